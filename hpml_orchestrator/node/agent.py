"""The node agent: one per node, for as long as the job.

It plans where the ranks will run, stages the data, says when the node is ready, listens to the
ranks and watches them, keeps the job's exporter alive, and removes what it staged when it is told
to end: SIGUSR1 at the normal end, SIGTERM on cancel and at the time limit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import BindingError, HpmlError, NotFoundError, RecordError
from hpml_orchestrator.node.arguments import Arguments, Wish, parse_arguments
from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.node.claim import node_name
from hpml_orchestrator.node.feed import Feed, exporter_sockets
from hpml_orchestrator.node.names import attempt_channel
from hpml_orchestrator.node.rendezvous import resolve
from hpml_orchestrator.node.stages import NodeStaging, parts_of
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from hpml_orchestrator.node.monitor import Monitor
    from hpml_orchestrator.node.planning import Prepared
    from hpml_orchestrator.node.watch import Watch
    from hpml_orchestrator.staging import CopyStager

__all__ = ["Agent", "main"]

_POLL_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_OVER_MARKER = "over"


def main(argv: list[str]) -> int:
    """Run the agent of this node until it is told to end; see `Agent.run`."""
    agent = Agent(parse_arguments(argv))
    for number in _SIGNALS:
        signal.signal(number, agent.on_signal)
    status = agent.run()
    for number in _SIGNALS:  # Python gives its own handlers up before it exits
        signal.signal(number, signal.SIG_IGN)
    return status


@dataclass
class Agent:
    """One node's agent.

    Attributes:
        asked: what the batch script asks for.
        node: Slurm's name of this node.
    """

    asked: Arguments
    node: str = field(default_factory=node_name)
    _told: str = ""
    _watch: Optional[Watch] = None  # noqa: UP045
    _made: Optional[Prepared] = None  # noqa: UP045
    _feed: Feed = field(default_factory=lambda: Feed(exporter_sockets(os.environ)))
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    @property
    def attempt(self) -> Path:
        """The attempt's directory, on the shared file system."""
        return self.asked.attempt

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note that the end has come; the main loop acts on it.

        A pipe and no `threading.Event`: that one's lock may be held by the very code that the
        signal interrupts.
        """
        self._told = self._told or signal.Signals(number).name
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _is_ending(self) -> bool:
        return bool(self._told)

    def run(self) -> int:
        """Plan, stage, report, listen, watch, wait for the end, clean up.

        Returns:
            0 when the node was ready and was told to end, 1 when it could not be made ready.
        """
        log = self.attempt / "events" / f"{self.node}.jsonl"
        staging = self._staging(log)
        name = attempt_channel(os.environ, str(self.attempt))
        reader = ChannelReader(name, log, self.node, feed=self._feed)
        monitor = self._monitor()
        try:
            reader.start()
            try:
                failure = self._make_ready(staging, log, reader.name, monitor)
                if not failure:
                    self._wait()
            finally:
                reader.stop()
                self._watched(lambda watch: watch.close())
                self._feed.flush()
        finally:
            if monitor is not None:
                monitor.end()  # which takes a moment, like cleaning up
            self._clean(staging.stager)
            if monitor is not None:
                monitor.stop()
            self._feed.close()
        return 1 if failure else 0

    def _monitor(self) -> Optional[Monitor]:  # noqa: UP045
        """Return the job's exporter, which is not started yet; None where nobody asked for it."""
        if self.asked.monitor is None:
            return None
        from hpml_orchestrator.node.monitor import Monitor  # noqa: PLC0415 - few jobs have one

        try:
            monitor = Monitor(self.asked.monitor, self.attempt, self.node)
        except OSError as error:
            sys.stderr.write(f"hpml: {self.node}: the job is not monitored: {error}\n")
            return None
        self._feed.add_socket(monitor.feed)
        return monitor

    def _start(self, monitor: Monitor) -> None:
        """Start the job's exporter; the job goes on without one where that cannot be."""
        wish = self.asked.wish
        try:
            monitor.start(self._made, no_gpus=wish is not None and wish.no_gpus)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
            told = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"hpml: {self.node}: the job is not monitored: {told}\n")

    def _staging(self, log: Path) -> NodeStaging:
        return NodeStaging(self.asked, self.node, log, self._is_ending)

    def _make_ready(
        self,
        staging: NodeStaging,
        log: Path,
        channel: str,
        monitor: Optional[Monitor] = None,  # noqa: UP045
    ) -> bool:
        """Plan, stage everything and publish the node's marker; returns whether that failed."""
        if (self.attempt / _OVER_MARKER).exists():
            return False  # the script failed before this node's agent could hear its signal
        began = time.monotonic()
        placed: dict[str, Any] = {}
        try:
            if self.asked.wish is not None:
                placed = {"placed": self._plan(self.asked.wish, channel)}
                began = time.monotonic()
            if monitor is not None:
                self._start(monitor)
            stages = staging.stage_all()
        except (HpmlError, OSError) as error:
            if self._is_ending():
                return False
            message = str(error) or type(error).__name__
            self._mark(
                "failed",
                message=message,
                hint=getattr(error, "hint", ""),
                exit_code=getattr(error, "exit_code", 0),
            )
            return True
        seconds = time.monotonic() - began
        figures: dict[str, Any] = {
            "bytes": sum(one["bytes"] for one in stages),
            "files": sum(one["files"] for one in stages),
            "seconds": round(seconds, 6),
            "reused": sum(one["reused"] for one in stages),
            "stages": stages,
        }
        events.append(log, "ready", node=self.node, **figures)
        self._mark("ready", resolves=resolve(self._head_names()), **figures, **placed)
        return False

    def _plan(self, wish: Wish, channel: str) -> dict[str, Any]:
        """Plan the node's ranks and publish that; a node that cannot be planned binds nothing.

        Returns:
            What the script tells of it once all nodes are ready.

        Raises:
            BindingError: it cannot, and the job wants proof.
            RecordError: the plan cannot be written.
        """
        from hpml_orchestrator.node import planning  # noqa: PLC0415 - for jobs that bind alone
        from hpml_orchestrator.node.watch import Watch  # noqa: PLC0415
        from hpml_orchestrator.placement.told import plan_figures  # noqa: PLC0415

        allowed = os.sched_getaffinity(0)
        try:
            made = planning.prepare(
                wish,
                os.environ,
                node=self.node,
                allowed=allowed,
                listing=lambda: planning.list_instances(self._is_ending),
            )
        except (HpmlError, OSError, ValueError) as error:
            why = f"the ranks cannot be placed: {error}"
            if wish.verify == "strict":
                raise BindingError(why, hint=getattr(error, "hint", "")) from error
            made = planning.unbound(
                wish, os.environ, node=self.node, allowed=allowed, why=f"{why}; nothing is bound"
            )
        self._made = made
        parts = parts_of(self.asked.entries, os.environ)
        planning.publish(self.attempt, wish, made, channel=channel, parts=parts)
        if wish.verify != "off":
            self._watch = Watch(self.attempt, made)
        return plan_figures(made.plan, sets_threads=not wish.keep_threads)

    def _head_names(self) -> list[str]:
        try:
            return [str(name) for name in read_json(self.attempt / "head.json")["names"]]
        except (NotFoundError, RecordError, KeyError):
            return []

    def _mark(self, kind: str, **data: object) -> None:
        write_json(
            self.attempt / "nodes" / f"{self.node}.{kind}.json",
            {
                "node": self.node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": round(time.time(), 6),
                **data,
            },
        )

    def _wait(self) -> None:
        """Wait for a signal; the marker of the script's end counts as one that was lost."""
        over = self.attempt / _OVER_MARKER
        look_at = 0.0
        while not self._is_ending():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _POLL_SECONDS
                if over.exists():
                    return
            pause = self._watched(lambda watch: watch.act(time.monotonic()))
            pause = min(pause, self._feed.act(time.monotonic()))
            select.select([self._wake[0]], [], [], max(0.0, min(pause, look_at - now)))

    def _watched(self, step: Callable[[Watch], float | None]) -> float:
        """Let the watch do a step; should it fail, the ranks and their data stay as they are.

        Returns:
            seconds until its next one.
        """
        if self._watch is not None:
            try:
                pause = step(self._watch) or 0.0
            except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
                told = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"hpml: {self.node}: the ranks are not watched any more: {told}\n")
                self._watch = None
            else:
                if self._watch.binding is not None:
                    self._feed.tell_binding(*self._watch.binding)
                return pause
        return _POLL_SECONDS

    def _clean(self, stager: CopyStager, write: Callable[[str], object] = sys.stderr.write) -> None:
        try:
            stager.cleanup()
        except (HpmlError, OSError) as error:
            write(f"hpml: {self.node}: staged data could not be removed: {error}\n")
