"""The node agent: one per node, for as long as the job.

It stages the data, says when the node is ready, listens to the ranks, and removes what it staged
when it is told to end: SIGUSR1 at the normal end, SIGTERM on cancel and at the time limit.
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
from typing import Any

from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError, RecordError
from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.node.claim import node_name
from hpml_orchestrator.node.names import attempt_channel, job_key
from hpml_orchestrator.node.rendezvous import resolve
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.staging import CopyStager, StageRequest, StageResult

__all__ = ["Agent", "main", "parse_arguments"]

_POLL_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_OVER_MARKER = "over"
_STAGE_WORDS = 4
# What the plan is made by, with the number of values.
_PLAN_WORDS = {
    **dict.fromkeys(("--ranks", "--policy", "--verify", "--ranks-per-gpu", "--loader-workers"), 1),
    **dict.fromkeys(("--one-thread", "--keep-threads"), 0),
}


def main(argv: list[str]) -> int:
    """Run the agent of this node until it is told to end; see `Agent.run`."""
    attempt, requests = parse_arguments(argv)
    agent = Agent(attempt, requests)
    for number in _SIGNALS:
        signal.signal(number, agent.on_signal)
    status = agent.run()
    for number in _SIGNALS:  # Python gives its own handlers up before it exits
        signal.signal(number, signal.SIG_IGN)
    return status


def parse_arguments(argv: list[str]) -> tuple[Path, list[StageRequest]]:
    """Return the attempt's directory and the requests of `ATTEMPT [--stage N KIND SOURCE BASE]…`.

    Raises:
        InputError: the words are not of that form.
    """
    if not argv:
        raise InputError("must be the attempt's directory", field="ATTEMPT", value="")
    requests = []
    rest = argv[1:]
    while rest:
        if rest[0] in _PLAN_WORDS and len(rest) > _PLAN_WORDS[rest[0]]:
            rest = rest[1 + _PLAN_WORDS[rest[0]] :]
            continue
        if rest[0] != "--stage" or len(rest) <= _STAGE_WORDS:
            raise InputError(
                "must be --stage NAME KIND SOURCE BASE", field="agent", value=" ".join(rest)
            )
        name, kind, source, base = rest[1 : _STAGE_WORDS + 1]
        requests.append(StageRequest(name=name, source=source, kind=kind, target=base))
        rest = rest[_STAGE_WORDS + 1 :]
    return Path(argv[0]), requests


@dataclass
class Agent:
    """One node's agent.

    Attributes:
        attempt: the attempt's directory, on the shared file system.
        requests: what to stage; `target` is an absolute base directory.
        node: Slurm's name of this node.
    """

    attempt: Path
    requests: list[StageRequest]
    node: str = field(default_factory=node_name)
    _told: str = ""
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

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
        """Stage, report, listen, wait for the end, clean up.

        Returns:
            0 when the node was ready and was told to end, 1 when it could not be made ready.
        """
        log = self.attempt / "events" / f"{self.node}.jsonl"
        stager = CopyStager(
            job_key=job_key(os.environ), should_stop=self._is_ending, on_progress=None
        )
        reader = ChannelReader(attempt_channel(os.environ, str(self.attempt)), log, self.node)
        try:
            reader.start()
            try:
                failure = self._make_ready(stager, log)
                if not failure:
                    self._wait()
            finally:
                reader.stop()
        finally:
            self._clean(stager)
        return 1 if failure else 0

    def _make_ready(self, stager: CopyStager, log: Path) -> bool:
        """Stage everything and publish the node's marker; returns whether that failed."""
        if (self.attempt / _OVER_MARKER).exists():
            return False  # the script failed before this node's agent could hear its signal
        began = time.monotonic()
        try:
            results = [self._stage(stager, request, log) for request in self.requests]
        except (HpmlError, OSError) as error:
            if self._is_ending():
                return False
            message = str(error) or type(error).__name__
            self._mark("failed", message=message, hint=getattr(error, "hint", ""))
            return True
        seconds = time.monotonic() - began
        figures: dict[str, Any] = {
            "bytes": sum(result.bytes for result in results),
            "files": sum(result.files for result in results),
            "seconds": round(seconds, 6),
            "reused": sum(result.reused for result in results),
        }
        events.append(log, "ready", node=self.node, **figures)
        self._mark("ready", resolves=resolve(self._head_names()), **figures)
        return False

    def _stage(self, stager: CopyStager, request: StageRequest, log: Path) -> StageResult:
        events.append(
            log,
            "staging",
            node=self.node,
            name=request.name,
            source=request.source,
            target=request.target,
        )
        return stager.stage(request)

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
        while not self._is_ending() and not over.exists():
            select.select([self._wake[0]], [], [], _POLL_SECONDS)

    def _clean(self, stager: CopyStager, write: Callable[[str], object] = sys.stderr.write) -> None:
        try:
            stager.cleanup()
        except (HpmlError, OSError) as error:
            write(f"hpml: {self.node}: staged data could not be removed: {error}\n")
