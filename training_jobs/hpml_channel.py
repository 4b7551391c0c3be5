"""Report the progress of a training to hpml; copy this one file next to your script.

    from hpml_channel import Channel

    channel = Channel.from_env()
    channel.event("warm-up", steps=20)
    channel.event("training", step=step, total_steps=total_steps)
    for images, labels in loader:  # train with them
        channel.gauge(loss=loss)
        channel.count(samples=len(labels), steps=1, data_wait_seconds=waited, step_seconds=took)
        stop = channel.stop_requested()
    channel.result(test_accuracy=evaluate(model))
    channel.close()

Outside hpml (without `HPML_CHANNEL`) every call does nothing. No call raises or waits, except that
`close` may take half a second. Make all calls from the thread of the training loop.

Each message is a datagram of at most 8 KiB with a JSON object, to an abstract unix socket:
`{"v": 1, "type": "event" | "result" | "hello", "event": NAME, "time": SECONDS, "rank": 0,
"local_rank": 0, "world_size": 1, "pid": 4242, "data": {...}}`. The only answer is `{"v": 1, "stop":
REASON}`. Counters are sums since the process started; `"step_buckets": {"4": 1200, ...}` counts
steps by duration, see STEP_BOUNDS_SECONDS.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

MAX_DATAGRAM_BYTES, STEP_EVERY_SECONDS = 8192, 1.0
ALWAYS_SENT = ["samples_total", "steps_total", "data_wait_seconds_total", "step_seconds_total"]
CLOSE_WAITS, UNSENT_EVENTS = 100, 64  # waits of 5 ms each
STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
MOST_AMOUNT = 1e18  # maximum of one increment; NaN and infinity are refused as well


class Channel:
    """The connection of one rank (`rank`, `local_rank`, `world_size`) to the agent of its node.

    `sent` counts datagrams; `dropped` lost ones, and amounts that are negative or not numbers.
    """

    def __init__(self, name: str = "", **who: int) -> None:
        """Connect to an abstract socket, named without its leading NUL; without a name, to none."""
        self.sent, self.dropped, self._address = 0, 0, "\0" + name
        self._who = {"rank": 0, "local_rank": 0, "world_size": 1, **who}
        self._socket: socket.socket | None = None
        with suppress(OSError, AttributeError):  # out of descriptors, or no unix sockets
            if name:
                new = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                new.setblocking(False)
                # So that the agent can answer; bind("") gives equal names before Python 3.10.6.
                new.bind("\0hpml-rank-" + os.urandom(12).hex())
                self._socket = new
        self._totals: dict[str, float] = dict.fromkeys(ALWAYS_SENT, 0)
        self._gauges: dict[str, object] = {}
        self._buckets = [0] * (len(STEP_BOUNDS_SECONDS) + 1)
        self._unsent: deque[bytes] = deque()
        self._step_due = self._warm_until = 0.0  # seconds; number of warm-up steps
        self._counted_at: float | None = None
        self._first, self._news, self._stop = True, False, False

    @classmethod
    def from_env(cls) -> Channel:
        """Return the channel that hpml prepared for this rank, or one that does nothing."""
        channel = cls(os.environ.get("HPML_CHANNEL", ""))
        for name in channel._who:  # Open MPI and Horovod call the world size SIZE
            theirs = name.upper().replace("WORLD_", "")
            for variable in (f"OMPI_COMM_WORLD_{theirs}", f"HOROVOD_{theirs}", name.upper()):
                with suppress(KeyError, ValueError):
                    channel._who[name] = int(os.environ[variable])
        if channel._socket is not None:
            channel._send("hello", "hello", data=_write_stacks_on_signal())
        return channel

    def event(self, event: str, **data: object) -> None:
        """Report an event at once; names of data include their units.

        `rendezvous` and `preparation` (before and after init_process_group), `warm-up(steps=20)`,
        `training(step=, total_steps=)` (before the first step), `resumed(step=, checkpoint=)`,
        `evaluation`, `checkpoint(step=, seconds=, size_bytes=)`, `stopping(step=)`, `link(name=,
        url=)`. `step` counts over all restarts. Counters start after the warm-up's steps.
        """
        self._send("event", event, data=data)
        if event == "warm-up":
            steps = _amount(data.get("steps")) or 0
            self._warm_until, self._first = self._totals["steps_total"] + steps, True

    def count(self, **increments: float) -> None:
        """Add to the counters since the process started, which are sent at most once a second.

        A call without increments is a heartbeat: hpml ends ranks that are silent for too long.
        `samples`, `steps`, `step_seconds` (the sum, for several steps) and its parts
        `data_wait_seconds`, `transfer_seconds` (to the device), `wait_seconds` (for slower ranks),
        `comm_seconds` (see `gauge`); `save_seconds`, `evaluation_seconds`; or any other. Added
        automatically: `cpu_wait_seconds` (this thread had no CPU) and CPU times, see `_cpu_times`.
        """
        if self._socket is None:
            return
        amounts = {name: value for name, value in increments.items() if _amount(value) is not None}
        self.dropped += len(increments) - len(amounts)
        for name, amount in amounts.items():
            self._totals[f"{name}_total"] = self._totals.get(f"{name}_total", 0) + amount
        if (steps := amounts.get("steps", 0)) and "step_seconds" in amounts:
            mean = amounts["step_seconds"] / steps
            self._buckets[bisect_left(STEP_BOUNDS_SECONDS, mean)] += int(steps)
        # An evaluation or a save does not extend the time in which the steps were made.
        if self._counted_at is None or not amounts or amounts.keys() & {"steps", "samples"}:
            self._counted_at = time.time()
        self._news, is_due = True, self._first or time.monotonic() >= self._step_due
        if is_due and self._totals["steps_total"] >= self._warm_until:
            self._step_due = time.monotonic() + STEP_EVERY_SECONDS
            self._send_step(keep=self._first)
            self._first = False

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Add the seconds of a `with` block to a counter, such as `evaluation_seconds`."""
        began = time.perf_counter()
        yield
        self.count(**{counter: time.perf_counter() - began})

    def gauge(self, **values: object) -> None:
        """Set values to send with the next counters; tensors are only read then.

        Exported are `loss`, `accuracy` (0 to 1) and `mfu` (0 to 1); `comm_seconds` needs
        `comm_method`, the way it was measured (see hpml_waits.py).
        """
        self._gauges.update(values)
        self._news = True

    def result(self, **data: object) -> None:
        """Send the training's final figures, such as `test_accuracy`; call it on one rank only."""
        self._send("result", "evaluation", data=data)

    def close(self) -> None:
        """Send the last counters and gauges, and what is still unsent."""
        if self._news and self._counted_at is not None:
            self._send_step()
        for _ in range(CLOSE_WAITS):
            if self._send_unsent():
                break
            time.sleep(0.005)
        self.dropped += len(self._unsent)
        self._unsent.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def stop_requested(self) -> bool:
        """Return whether hpml asked the training to stop; takes a microsecond, so call it often.

        Ranks learn of it at different times: agree first, see hpml_checkpoint.StopAgreement.
        """
        while self._socket is not None and not self._stop:
            try:
                datagram, sender = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
            except OSError:  # usually: no message
                break
            with suppress(Exception):  # anybody can send, but only the agent has this address
                if sender == os.fsencode(self._address):
                    self._stop = bool(json.loads(datagram)["stop"])
        return self._stop

    def _send_step(self, *, keep: bool = True) -> None:
        if time.time() - (self._counted_at or 0.0) < STEP_EVERY_SECONDS:  # not after the steps
            with suppress(OSError, LookupError):
                self._totals.update(_cpu_times())
        data, self._news = {**self._totals, **self._gauges}, False
        buckets = {str(i): count for i, count in enumerate(self._buckets) if count}
        more = {"step_buckets": buckets} if buckets else {}
        self._send("event", "step", data=data, keep=keep, time=self._counted_at, **more)

    def _send(self, kind: str, event: str, *, keep: bool = True, **more: object) -> None:
        """Send a datagram after earlier unsent ones; with `keep`, a full socket only delays it."""
        if self._socket is None:
            return
        who = {"time": time.time(), **self._who, "pid": os.getpid()}
        with suppress(Exception):  # values of users' types may raise anything
            message = {"v": 1, "type": kind, "event": event, **who, **more}
            text = json.dumps(message, default=lambda one: getattr(one, "item", one.__str__)())
            if "NaN" in text or "Infinity" in text:  # such a result means that it diverged
                nan = str if kind == "result" else lambda _: None
                text = json.dumps(json.loads(text, parse_constant=nan))
            if len(text) <= MAX_DATAGRAM_BYTES:
                self._unsent.append(text.encode("ascii"))
                if self._send_unsent() or (keep and len(self._unsent) <= UNSENT_EVENTS):
                    return
                self._unsent.pop()
        self.dropped += 1

    def _send_unsent(self) -> bool:
        while self._unsent and self._socket is not None:
            try:
                self._socket.sendto(self._unsent[0], self._address)
                self.sent += 1
            except BlockingIOError:
                return False  # the socket is still full
            except OSError:  # nobody listens: nothing to wait for
                self.dropped += 1
            self._unsent.popleft()
        return True


def _cpu_times() -> dict[str, float]:
    me, threads = threading.current_thread(), {}
    for thread in threading.enumerate():
        with suppress(OSError), open(f"/proc/self/task/{thread.native_id}/schedstat") as counted:
            threads[thread] = [int(one) / 1e9 for one in counted.read().split()[:2]]
    ran, waited = threads.pop(me)
    used, python = _cpu_seconds(os.getpid()), sum(other[0] for other in threads.values())
    # total; except this thread; of loaders; of Python's other threads: none is another user's
    names = "cpu_wait", "cpu", "helper_cpu", "loader_cpu", "python_cpu"
    seconds = waited, used, used - ran, used - sum(os.times()[:2]), python
    return {f"{name}_seconds_total": max(0.0, n) for name, n in zip(names, seconds)}  # noqa: B905 - Python 3.9


def _cpu_seconds(pid: int | str) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in children.read().split():
            with suppress(OSError, LookupError):
                seconds += _cpu_seconds(child)
    return seconds


def _amount(value: Any) -> float | None:
    with suppress(Exception):  # values of users' types may raise anything
        return value if 0 <= value < MOST_AMOUNT else None
    return None


def _write_stacks_on_signal() -> dict[str, int]:
    with suppress(OSError, AttributeError, RuntimeError, ValueError):  # unsupported, or table full
        # A file in memory: the agent can read it through /proc even if this process hangs.
        number, fd = signal.SIGRTMAX - 3, os.memfd_create("hpml-stacks")
        faulthandler.register(number, file=fd, all_threads=True)
        return {"stacks_fd": fd, "stacks_signal": int(number)}
    return {}
