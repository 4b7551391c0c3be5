"""The node agent: one per node, for as long as the job.

It plans where the ranks will run, stages the data, says when the node is ready, listens to the
ranks and watches them, keeps the job's exporter alive, and removes what it staged when the job is
over. The file `over` says so; SIGUSR1 only makes it look at once. Signals reach every step of a
job, also those that a user means for the ranks: while ranks live, none of them ends an agent.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import BindingError, HpmlError, NotFoundError, RecordError
from hpml_orchestrator.node.arguments import Arguments, Wish, parse_arguments
from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.node.feed import Feed, exporter_sockets
from hpml_orchestrator.node.names import attempt_channel
from hpml_orchestrator.node.processes import RankRecords, is_alive
from hpml_orchestrator.node.stages import NodeStaging, parts_of
from hpml_orchestrator.node.startup import node_name, resolve
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from hpml_orchestrator.node.monitor import Monitor
    from hpml_orchestrator.node.planning import Prepared
    from hpml_orchestrator.node.watch import Watch
    from hpml_orchestrator.staging import CopyStager

__all__ = ["Agent", "main"]

_POLL_SECONDS = 2.0
_KILL_WAIT_SECONDS = 30.0  # Slurm's default
_CLEAN_SECONDS = 3.0
"""How long before Slurm's SIGKILL the last ranks are ended, so that their data can be removed."""
_RANK_LOOK_SECONDS = 0.2
_WAKE_BYTES = 4096
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
_OVER_MARKER = "over"


def main(argv: list[str]) -> int:
    """Run the agent of this node until the job is over; see `Agent.run`."""
    agent = Agent(parse_arguments(argv))
    for number in _ENDING:
        signal.signal(number, agent.on_signal)
    # Blocked and not handled: all that the agent starts inherits that, and no copy dies of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
    threading.Thread(target=agent.listen, name="hpml-signals", daemon=True).start()
    status = agent.run()
    for number in _ENDING:  # Python gives its own handlers up before it exits
        signal.signal(number, signal.SIG_IGN)
    return status


def kill_wait(environment: Mapping[str, str]) -> float:
    """Return the seconds from a job's SIGTERM to its SIGKILL, as the cluster is configured."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        if "HPML_LOCAL_KILL_WAIT" in environment:
            return float(environment["HPML_LOCAL_KILL_WAIT"])
        command = ["scontrol", "show", "config"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=3, check=True)
        found = re.search(r"^KillWait\s*=\s*(\d+)", told.stdout, re.MULTILINE)
        return float(found[1]) if found else _KILL_WAIT_SECONDS
    return _KILL_WAIT_SECONDS


@dataclass
class Agent:
    """One node's agent.

    Attributes:
        asked: what the batch script asks for.
        node: Slurm's name of this node.
    """

    asked: Arguments
    node: str = field(default_factory=node_name)
    _asked_to_end: bool = False
    _over: bool = False
    _is_ready: bool = False
    _look_at: float = 0.0
    _note_at: float = math.inf
    _received: list[str] = field(default_factory=list)
    _ranks: list[dict[str, Any]] = field(default_factory=list)
    _watch: Optional[Watch] = None  # noqa: UP045
    _made: Optional[Prepared] = None  # noqa: UP045
    _feed: Feed = field(default_factory=lambda: Feed(exporter_sockets(os.environ)))
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    def __post_init__(self) -> None:
        self._records = RankRecords(self.attempt / "binding" / f"{self.node}.jsonl")

    @property
    def attempt(self) -> Path:
        """The attempt's directory, on the shared file system."""
        return self.asked.attempt

    def listen(self) -> None:
        """Take the signals that users send to ranks, for ever; a thread's work."""
        while True:
            self.on_signal(signal.sigwait(_FOR_RANKS), None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal; the main loop acts on it.

        A pipe and no `threading.Event`: that one's lock may be held by the very code that the
        signal interrupts.
        """
        self._received.append(signal.Signals(number).name)
        self._asked_to_end = self._asked_to_end or number in _ENDING
        self._look_at = 0.0
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _is_over(self) -> bool:
        """Whether the script is at its end; the file system is asked every few seconds."""
        now = time.monotonic()
        if not self._over and now >= self._look_at:
            self._look_at = now + _POLL_SECONDS
            self._over = os.path.exists(self.attempt / _OVER_MARKER)
        return self._over

    def _stops_staging(self) -> bool:
        return self._asked_to_end or self._is_over()

    def _rank_lives(self, *, may_begin: bool = False) -> bool:
        """Whether a rank of this node lives; `may_begin` before the first has begun."""
        self._ranks += self._records.new()
        return any(is_alive(record) for record in self._ranks) if self._ranks else may_begin

    def _kill_ranks(self) -> None:
        """End the ranks that outlive the job: SIGKILL would come next, for this agent too."""
        for record in filter(is_alive, self._ranks):
            with contextlib.suppress(OSError):
                os.kill(record["pid"], signal.SIGKILL)

    def run(self) -> int:
        """Plan, stage, report, listen, watch, wait for the end, clean up.

        Returns:
            0 when the node was ready and the job is over, 1 when it could not be made ready.
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
                    self._wait(log)
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
        return NodeStaging(self.asked, self.node, log, self._stops_staging)

    def _make_ready(
        self,
        staging: NodeStaging,
        log: Path,
        channel: str,
        monitor: Optional[Monitor] = None,  # noqa: UP045
    ) -> bool:
        """Plan, stage everything and publish the node's marker; returns whether that failed."""
        if self._is_over():
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
            if self._stops_staging():
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
        self._is_ready = True
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
                listing=lambda: planning.list_instances(self._stops_staging),
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

    def _wait(self, log: Path) -> None:
        """Wait until the job is over, or is being ended and no rank lives any more."""
        kill_at = math.inf
        while True:
            now = time.monotonic()
            if self._is_over():
                if not self._rank_lives():
                    return
                if kill_at == math.inf:
                    kill_at = now + max(1.0, kill_wait(os.environ) - _CLEAN_SECONDS)
                if now >= kill_at:
                    self._kill_ranks()
            elif self._asked_to_end and not self._rank_lives(may_begin=self._is_ready):
                return
            looked = self._note_signals(log, now)
            pause = self._watched(lambda watch: watch.act(time.monotonic()))
            pause = min(pause, self._feed.act(time.monotonic()), looked)
            if self._over or self._asked_to_end:
                pause = min(pause, _RANK_LOOK_SECONDS)
            select.select([self._wake[0]], [], [], max(0.0, pause))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], _WAKE_BYTES)

    def _note_signals(self, log: Path, now: float) -> float:
        """Put signals on record that did not end the job; returns seconds until the next look.

        The script's own comes with its file, which a shared file system may show a moment later.
        """
        if self._over:
            return math.inf
        if self._received:
            self._note_at = min(self._note_at, now + _POLL_SECONDS)
            if now >= self._note_at:
                received, self._received = self._received, []
                for name, count in Counter(received).items():
                    with contextlib.suppress(HpmlError, OSError):  # a full disk ends no job
                        events.append(log, "signal", node=self.node, name=name, count=count)
                self._note_at = math.inf
        return min(self._look_at, self._note_at) - now

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
