"""Tell hpml's node agent how a training gets on; copy this one file beside the training script.

    from hpml_channel import Channel

    channel = Channel.from_env()
    channel.event("rendezvous")
    for images, labels in loader:
        ...
        channel.gauge(loss=loss)
        channel.count(samples=len(labels), steps=1, data_wait_seconds=waited, step_seconds=took)
        if channel.stop_requested():
            break
    channel.result(test_accuracy=0.97)
    channel.close()

Outside hpml (`HPML_CHANNEL` is unset, or nobody listens) every call does nothing. No call waits for
the reader, except `close`, which waits half a second at most; no call raises. Standard library
only, Python 3.9 and newer. Calls come from one thread, the training loop's.

On the wire, one JSON object per datagram of at most 8 KiB, to an abstract unix socket:

    {"v": 1, "type": "event" | "result", "event": NAME, "time": SECONDS, "rank": 0,
     "local_rank": 0, "world_size": 1, "pid": 4242, "data": {...}}

Counters are sums since the process began, so a lost datagram loses nothing. With those of `step`
travels `"step_buckets": {"4": 1200, ...}`: how many steps took as long as bucket 4 says, whose
bounds are STEP_BOUNDS_SECONDS (0: at most 1 ms, ..., 10: over 60 s); empty ones are left out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from bisect import bisect_left
from collections import deque
from typing import Any

__all__ = ["MAX_DATAGRAM_BYTES", "STEP_BOUNDS_SECONDS", "Channel"]

MAX_DATAGRAM_BYTES = 8192
STEP_EVERY_SECONDS = 1.0
STOP_CHECK_EVERY_SECONDS = 1.0
CLOSE_WAIT_SECONDS = 0.5
UNSENT_EVENTS = 64
STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
MOST_STEPS = 1_000_000_000  # in one count; more is a mistake, and no histogram
MOST_AMOUNT = 1e18  # in one count of anything; NaN and infinity are no amounts either


class Channel:
    """A rank's way to the node agent.

    Args:
        name: the abstract socket's name without its leading NUL; empty: say nothing to nobody.
        rank: global rank.
        local_rank: rank within the node.
        world_size: ranks in all.
        stop_file: a file whose presence asks the training to stop; empty: never asked.

    Attributes:
        sent: datagrams handed to the socket.
        dropped: datagrams that were lost: reader gone or too slow, too long, no JSON; and
            counts that are negative, NaN or no numbers.
    """

    def __init__(
        self,
        name: str = "",
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        stop_file: str = "",
    ) -> None:
        self.sent = 0
        self.dropped = 0
        self._address = "\0" + name
        self._rank = rank
        self._local_rank = local_rank
        self._world_size = world_size
        self._socket: socket.socket | None = None
        if name:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
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
        self._stop_file = stop_file
        self._stop_due = 0.0
        self._stop = False

    @classmethod
    def from_env(cls) -> Channel:
        """Return the channel that hpml prepared for this rank, or one that does nothing."""
        return cls(
            os.environ.get("HPML_CHANNEL", ""),
            rank=_env_int("RANK", 0),
            local_rank=_env_int("LOCAL_RANK", 0),
            world_size=_env_int("WORLD_SIZE", 1),
            stop_file=os.environ.get("HPML_STOP_FILE", ""),
        )

    def event(self, event: str, **data: Any) -> None:
        """Send at once that something happened.

        The first counters after `warm-up` are sent at once too: they are its end.

        Args:
            event: `rendezvous`, `warm-up`, `evaluation`, `checkpoint` or `stopping`.
            data: what belongs to it; units stand in the keys (`seconds`, `size_bytes`).
        """
        if self._socket is not None:
            self._send("event", event, data, keep=True)
            self._first = self._first or event == "warm-up"

    def count(self, **increments: float) -> None:
        """Add to the counters since the process began; at most once a second they are sent.

        Args:
            increments: `samples`, `steps`, `data_wait_seconds`, `step_seconds`, or any other
                counter; `samples` travels as `samples_total` and so on. Of several steps in one
                call each counts as long as their mean. `comm_seconds` is exported only beside
                `gauge(comm_method=...)`, which says how it was measured: frameworks overlap
                communication with computation, and a figure without its method says nothing.
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
        now = time.monotonic()
        if self._first or now >= self._step_due:
            self._step_due = now + STEP_EVERY_SECONDS
            self._send_step(keep=self._first)
            self._first = False

    def gauge(self, **values: Any) -> None:
        """Set what the next counters carry beside them: `loss`, `accuracy`, `epoch`.

        Exported are `loss`, `accuracy` (0 to 1) and `mfu` (0 to 1: FLOP/s of the model over the
        devices' peak); `comm_method="ddp-comm-hook, 1 in 50"` says how `comm_seconds` came about.
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
        """Say whether hpml asked the training to stop; looks at the file once a second at most.

        Ranks see the file at different moments: agree on the answer (an all_reduce) before acting.
        """
        if self._stop or not self._stop_file:
            return self._stop
        now = time.monotonic()
        if now >= self._stop_due:
            self._stop_due = now + STOP_CHECK_EVERY_SECONDS
            self._stop = os.path.exists(self._stop_file)
        return self._stop

    def _send_step(self, *, keep: bool) -> None:
        at, self._news = self._counted_at, False
        buckets = {str(number): count for number, count in enumerate(self._buckets) if count}
        more = {"step_buckets": buckets} if buckets else {}
        self._send("event", "step", {**self._totals, **self._gauges}, keep=keep, at=at, **more)

    def _send(
        self,
        kind: str,
        event: str,
        data: dict[str, Any],
        *,
        keep: bool,
        at: float | None = None,
        **more: Any,
    ) -> None:
        """Send one datagram behind those still unsent; with `keep` a full socket only delays it."""
        try:
            datagram = _encode(
                {
                    "v": 1,
                    "type": kind,
                    "event": event,
                    "time": time.time() if at is None else at,
                    "rank": self._rank,
                    "local_rank": self._local_rank,
                    "world_size": self._world_size,
                    "pid": os.getpid(),
                    "data": data,
                    **more,
                }
            )
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
        except OSError:  # nobody listens, or not any more: nothing to wait for
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
    """Return whether a counter can grow by a value; what cannot is no reason to end a training."""
    try:
        return bool(0 <= value < MOST_AMOUNT)
    except Exception:  # noqa: BLE001 - a value of the user's own type may raise anything
        return False


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default
