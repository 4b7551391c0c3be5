"""Report the progress of a training to hpml; copy this one file next to your script.

    from hpml_channel import Channel

    channel = Channel.from_env()
    channel.event("rendezvous")
    ...
    channel.event("warm-up", steps=20)
    channel.event("training", step=step, total_steps=total_steps)
    for images, labels in loader:
        ...
        channel.gauge(loss=loss)
        channel.count(samples=len(labels), steps=1, data_wait_seconds=waited, step_seconds=took)
        if channel.stop_requested():
            break
    channel.result(test_accuracy=0.97)
    channel.close()

Outside hpml (`HPML_CHANNEL` is not set, or nobody listens) every call does nothing. No call waits
for hpml, except `close`, which waits half a second at most; no call raises. Standard library only,
Python 3.9 and newer. Make all calls from one thread, that of the training loop.

Messages are JSON objects, one per datagram of at most 8 KiB, to an abstract unix socket:

    {"v": 1, "type": "event" | "result" | "hello", "event": NAME, "time": SECONDS, "rank": 0,
     "local_rank": 0, "world_size": 1, "pid": 4242, "data": {...}}

`from_env` sends a `hello`; the only answer, at any time, is `{"v": 1, "stop": REASON}`. Counters
are sums since the process began, so a lost datagram loses nothing. With those of `step` travels
`"step_buckets": {"4": 1200, ...}`: the number of steps in each bucket of a histogram with the
bounds STEP_BOUNDS_SECONDS (0: at most 1 ms, ..., 10: over 60 s), without the empty ones.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from typing import Any

__all__ = ["MAX_DATAGRAM_BYTES", "STEP_BOUNDS_SECONDS", "Channel"]

MAX_DATAGRAM_BYTES = 8192
STEP_EVERY_SECONDS = 1.0
CLOSE_WAIT_SECONDS = 0.5
UNSENT_EVENTS = 64
STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
MOST_STEPS = 1_000_000_000  # in one count; more is a mistake, and no histogram
MOST_AMOUNT = 1e18  # in one count of anything; NaN and infinity are not amounts either


class Channel:
    """The connection of one rank to the agent of its node.

    Args:
        name: of the agent's abstract socket, without its leading NUL; empty: nothing is sent.
        rank: global rank.
        local_rank: rank within the node.
        world_size: number of ranks.

    Attributes:
        sent: number of datagrams that were sent.
        dropped: number of lost datagrams (the agent is gone or too slow, the message is too long or
            not JSON), and of counts that are negative, NaN or not numbers.
    """

    def __init__(
        self, name: str = "", *, rank: int = 0, local_rank: int = 0, world_size: int = 1
    ) -> None:
        self.sent = self.dropped = 0
        self._address = "\0" + name
        self._who = {"rank": rank, "local_rank": local_rank, "world_size": world_size}
        self._socket: socket.socket | None = None
        if name:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
                # A name, so that the agent can answer. Not bind(""), for which Linux chooses one:
                # Python before 3.10.6 gives all sockets the same.
                self._socket.bind("\0hpml-rank-" + os.urandom(12).hex())
            except (OSError, AttributeError):  # no descriptor left; a system without unix sockets
                self._socket = None
        self._totals: dict[str, float] = dict.fromkeys(
            ("samples_total", "steps_total", "data_wait_seconds_total", "step_seconds_total"), 0
        )
        self._gauges: dict[str, Any] = {}
        self._buckets = [0] * (len(STEP_BOUNDS_SECONDS) + 1)
        self._unsent: deque[bytes] = deque()
        self._step_due = 0.0
        self._counted_at: float | None = None  # the time of the last count
        self._news = False  # counters or gauges that were not sent
        self._first = True
        self._warm_until = 0.0  # steps in total, before which no counters are sent
        self._stop = False

    @classmethod
    def from_env(cls) -> Channel:
        """Return the channel that hpml prepared for this rank, or one that does nothing."""
        who = {"rank": 0, "local_rank": 0, "world_size": 1}
        for name in who:
            with suppress(KeyError, ValueError):
                who[name] = int(os.environ[name.upper()])
        channel = cls(os.environ.get("HPML_CHANNEL", ""), **who)
        if channel._socket is not None:
            channel._send("hello", "hello", _write_stacks_on_signal(), keep=True)
        return channel

    def event(self, event: str, **data: Any) -> None:
        """Report at once that something happened.

        Args:
            event: `rendezvous` (before the process group's start), `resumed`, `warm-up`, `training`
                (before the first step), `evaluation`, `checkpoint` or `stopping`.
            data: what belongs to it, with units in the names. `step` counts the optimizer's steps
                since the training began, over all restarts: `resumed(step=, checkpoint=)`,
                `training(step=, total_steps=)`, `checkpoint(step=, seconds=, size_bytes=)`,
                `stopping(step=)`. The counters of `warm-up(steps=20)` are sent after 20 steps: the
                first counters that hpml gets end the warm-up.
        """
        if self._socket is not None:
            self._send("event", event, data, keep=True)
            if event == "warm-up":
                self._first = True
                more: Any = data.get("steps")
                self._warm_until = self._totals["steps_total"] + (more if _is_amount(more) else 0)

    def count(self, **increments: float) -> None:
        """Add to the counters since the process began, which are sent at most once a second.

        Without increments it is a sign of life: hpml ends ranks that send nothing for too long.

        Args:
            increments: `samples`, `steps`, `data_wait_seconds`, `step_seconds`, or any other
                counter; `samples` travels as `samples_total` and so on. Of several steps in one
                call each counts as long as their mean. `comm_seconds` is exported only with
                `gauge(comm_method=...)`, how it was measured: frameworks overlap communication
                with computation, so that a figure without its method has no meaning.
        """
        if self._socket is None:
            return
        amounts = {name: value for name, value in increments.items() if _is_amount(value)}
        self.dropped += len(increments) - len(amounts)
        for name, amount in amounts.items():
            total = name + "_total"
            self._totals[total] = self._totals.get(total, 0) + amount
        steps, seconds = amounts.get("steps", 0), amounts.get("step_seconds")
        if 0 < steps < MOST_STEPS and seconds is not None:
            self._buckets[bisect_left(STEP_BOUNDS_SECONDS, seconds / steps)] += int(steps)
        self._counted_at, self._news = time.time(), True
        if self._totals["steps_total"] < self._warm_until:
            return
        now = time.monotonic()
        if self._first or now >= self._step_due:
            self._step_due = now + STEP_EVERY_SECONDS
            self._send_step(keep=self._first)
            self._first = False

    def gauge(self, **values: Any) -> None:
        """Set what is sent with the next counters: `loss`, `accuracy`, `epoch`.

        Exported are `loss`, `accuracy` (0 to 1) and `mfu` (0 to 1: FLOP/s of the model over the
        devices' peak); `comm_method="ddp-comm-hook, 1 in 50"` is how `comm_seconds` was measured.
        A tensor may be given; its value is taken when it is sent, not at every step.
        """
        if self._socket is not None:
            self._gauges.update(values)
            self._news = True

    def result(self, **data: Any) -> None:
        """Send the final figures of the training, such as `test_accuracy`; from one rank only."""
        if self._socket is not None:
            self._send("result", "evaluation", data, keep=True)

    def close(self) -> None:
        """Send the last counters and gauges, with the time of the counters, and what is unsent."""
        if self._socket is None:
            return
        if self._news and self._counted_at is not None:
            self._send_step(keep=True)
        deadline = time.monotonic() + CLOSE_WAIT_SECONDS
        while not self._send_unsent() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.dropped += len(self._unsent)
        self._unsent.clear()
        self._socket.close()
        self._socket = None

    def stop_requested(self) -> bool:
        """Return whether hpml asked the training to stop; takes a microsecond, so call it often.

        Ranks learn of the request at different moments, and have to agree on it before they act:
        see `StopAgreement` in hpml_checkpoint.py.
        """
        while self._socket is not None and not self._stop:
            try:
                datagram, sender = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
            except OSError:  # usually: there is none
                break
            # Anybody on this node may send anything, but only the agent has that address.
            if sender == os.fsencode(self._address):
                with suppress(Exception):
                    self._stop = bool(json.loads(datagram)["stop"])
        return self._stop

    def _send_step(self, *, keep: bool) -> None:
        at, self._news = self._counted_at, False
        buckets = {str(number): count for number, count in enumerate(self._buckets) if count}
        more = {"step_buckets": buckets} if buckets else {}
        data = {**self._totals, **self._gauges}
        self._send("event", "step", data, keep=keep, time=at, **more)

    def _send(
        self, kind: str, event: str, data: dict[str, Any], *, keep: bool, **more: Any
    ) -> None:
        """Send one datagram behind those still unsent; with `keep` a full socket only delays it."""
        message = {"v": 1, "type": kind, "event": event, "time": time.time(), **self._who}
        try:
            datagram = _encode({**message, "pid": os.getpid(), "data": data, **more})
        except Exception:  # noqa: BLE001 - a value of the user's own type may raise anything
            self.dropped += 1
            return
        if len(datagram) > MAX_DATAGRAM_BYTES:
            self.dropped += 1
        elif self._send_unsent() and self._send_now(datagram):
            pass
        elif keep and len(self._unsent) < UNSENT_EVENTS:
            self._unsent.append(datagram)
        else:
            self.dropped += 1

    def _send_unsent(self) -> bool:
        """Send what waits; False when the socket is full again."""
        while self._unsent:
            if not self._send_now(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _send_now(self, datagram: bytes) -> bool:
        """Hand one datagram to the kernel; False when it would have to wait."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(datagram, self._address)
        except BlockingIOError:
            return False
        except OSError:  # nobody listens: nothing to wait for
            self.dropped += 1
        else:
            self.sent += 1
        return True


def _encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON; a number that is not finite (a diverged loss) becomes null."""
    text = json.dumps(message, separators=(",", ":"), default=_plain)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
    return text.encode("ascii")


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a tensor, a NumPy scalar or anything else."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def _is_amount(value: Any) -> bool:
    """Return whether a counter can grow by a value; a wrong one must not end a training."""
    try:
        return bool(0 <= value < MOST_AMOUNT)
    except Exception:  # noqa: BLE001 - a value of the user's own type may raise anything
        return False


def _write_stacks_on_signal() -> dict[str, int]:
    """Have a signal write the stacks of all threads to a file in memory; return what hpml needs."""
    try:
        number, fd = signal.SIGRTMAX - 3, os.memfd_create("hpml-stacks")
        faulthandler.register(number, file=fd, all_threads=True)
    except (OSError, AttributeError, RuntimeError, ValueError):  # another system, a full table
        return {}
    return {"stacks_fd": fd, "stacks_signal": int(number)}
