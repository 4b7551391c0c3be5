"""The exporter of a node: collectors, sampler and web server, from the first to the last moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Protocol

from hpml_exporters.collector import Collector
from hpml_exporters.context import Context
from hpml_exporters.options import COLLECTORS, NodeOptions
from hpml_exporters.sampler import Sampler
from hpml_exporters.slot import Source, tell
from hpml_exporters.snapshot import Snapshot
from hpml_orchestrator.errors import InputError

__all__ = ["EXIT_STUCK", "Observer", "block_signals", "run", "sources_of", "write_address"]

EXIT_STUCK = 75
"""A driver call does not return: start me again."""

_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LOOK_SECONDS = 1.0
_OBSERVE_SECONDS = (1.0, 5.0)  # as often as GPUs are read, within these bounds
_WRITE_SECONDS = 30.0
_END_SECONDS = 5.0


class Observer(Protocol):
    """Looks at the snapshots now and then, as the summary of a job does."""

    def note(self, snapshot: Snapshot) -> None:
        """Look at one; about as often as GPUs are read, every five seconds at least."""

    def end(self) -> None:
        """Do what is left to do: the exporter ends."""


class _SummaryWriter:
    """Hands snapshots to the job's summary, and has it written now and then and at the end."""

    def __init__(self, options: NodeOptions) -> None:
        self._path = options.summary_file
        self._pause = observe_seconds(options)
        from hpml_exporters.summary import Summary  # noqa: PLC0415 - in jobs alone

        self._summary = Summary(options)
        self._began = self._written = time.monotonic()

    def note(self, snapshot: Snapshot) -> None:
        self._summary.note(snapshot)
        now = time.monotonic()
        # A short job whose exporter is killed loses half of its figures at most; and the nodes of
        # a large one do not keep writing to the shared file system.
        later = now + self._pause  # until which nobody writes, if this one does not
        if later - self._written > min(_WRITE_SECONDS, (later - self._began) / 2):
            self._written = now
            self._summary.write(self._path)

    def end(self) -> None:
        self._summary.write(self._path)


class _Observers:
    """Calls the observers from one thread; what one of them does wrong stays its own."""

    def __init__(
        self, observers: Sequence[Observer], snapshot: Callable[[], Snapshot], pause: float
    ) -> None:
        self._observers = observers
        self._pause = pause
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="observers", daemon=True)

    def start(self) -> None:
        if self._observers:
            self._thread.start()

    def end(self) -> None:
        """Have them finish, and wait for that a few seconds."""
        self._ended.set()
        if self._observers:
            self._thread.join(_END_SECONDS)

    def _observe(self) -> None:
        while not self._ended.wait(self._pause):
            self._each(lambda one: one.note(self._snapshot()))
        self._each(lambda one: one.note(self._snapshot()))
        self._each(lambda one: one.end())

    def _each(self, call: Callable[[Observer], None]) -> None:
        for one in self._observers:
            try:
                call(one)
            except Exception as error:  # noqa: BLE001 - the metrics are shown all the same
                tell(f"{type(one).__name__}: {type(error).__name__}: {error}")


class _Pages:
    """What the server serves of a sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.health = sampler.health

    def metrics(self, accept: str, names: Sequence[str], *, gzip: bool) -> tuple[bytes, str]:  # noqa: ARG002 - all series are shown
        """Return all series in the format of the header Accept."""
        openmetrics = "application/openmetrics-text" in accept
        kind = _OPENMETRICS_TYPE if openmetrics else _TEXT_TYPE
        return self._sampler.metrics(openmetrics=openmetrics, gzip=gzip), kind


def observe_seconds(options: NodeOptions) -> float:
    """Return how often observers look: whoever looks less often misses levels, and peaks most."""
    least, most = _OBSERVE_SECONDS
    return min(max(options.gpu_interval, least), most)


def sources_of(options: NodeOptions) -> list[Source]:
    """Return the collectors that are switched on; that of the jobs first, others look at it."""
    context = Context(options)
    names = [name for name in COLLECTORS if name not in options.without]
    names.sort(key=lambda name: name != "jobs")
    return [Source(name, partial(_made, name, context)) for name in names]


def _made(name: str, context: Context) -> Collector:
    """Import a collector's module, in its own thread, and make it."""
    made: Collector = import_module(f"hpml_exporters.collectors.{name}").make(context)
    return made


def run(
    options: NodeOptions,
    *,
    sources: Iterable[Source] | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Export this node until told to end; returns the exit status.

    Args:
        options: what and where.
        sources: other collectors than those of the options.
        observers: who looks at the snapshots, besides the summary that the options ask for.

    Raises:
        HpmlError: the server cannot be started, or its address not be written.
    """
    from hpml_exporters.web import Server  # noqa: PLC0415 - the largest import, after the rest

    ending = block_signals()  # before there are threads to inherit it
    watching: list[Observer] = list(observers)
    if options.summary_file:
        watching.append(_SummaryWriter(options))

    def give_up(why: str) -> None:
        tell(f"{why}: ending for a new start")
        group.end()
        os._exit(EXIT_STUCK)  # a thread that hangs in a driver lets no other way

    sampler = Sampler(
        sources_of(options) if sources is None else sources,
        stuck_seconds=options.stuck_seconds,
        exit_seconds=options.exit_seconds,
        give_up=give_up,
    )
    server = Server(options.listen, options.web_config, _Pages(sampler), any_port=options.any_port)
    sampler.show_server(server.counters)
    group = _Observers(watching, sampler.snapshot, observe_seconds(options))
    host, port = server.start()
    try:
        sampler.start()
        group.start()
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if options.address_file:
            write_address(options.address_file, shown)
        tell(f"{server.scheme}://{shown}/metrics")
        _wait_for_end(ending, options.parent_pid)
    finally:
        sampler.stop(last_reading=bool(watching))  # what a short job did since the last one
        group.end()
        server.stop()
    return 0


def write_address(path: str, address: str) -> None:
    """Write where the exporter listens, as one line that is there whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    partial_path = f"{path}.{os.getpid()}"
    try:
        with open(partial_path, "w", encoding="utf-8") as stream:
            stream.write(address + "\n")
        os.replace(partial_path, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial_path)
        why = f"cannot be written: {error.strerror}"
        raise InputError(why, field="address_file", value=path) from None


def block_signals() -> set[signal.Signals]:
    """Keep back the signals that end the exporter, for the main thread to wait for.

    Those that the caller ignores, as `nohup` and a shell's `&` do, go on being ignored: Linux
    delivers even these to who waits.
    """
    ending = {signal.SIGTERM}
    ending |= {
        one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    return ending


def _wait_for_end(ending: set[signal.Signals], parent: int) -> None:
    """Return when a signal says so, or when the parent is another than it was.

    Not by sigtimedwait: when the process was stopped for longer than the time that it waits, as
    `scontrol suspend` does, Python returns a signal that never was (seen with 3.9 to 3.13).
    """
    if parent:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()
    signal.sigwait(ending)


def _watch_parent(parent: int) -> None:
    """Have this process end when its parent is another than it was; runs in a thread."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    tell("the process that started this exporter is gone")
    os.kill(os.getpid(), signal.SIGTERM)
