"""The watch over the ranks of this node: are they bound as planned, and do they stay so?

It looks at the live processes, soon after the ranks began and ever more rarely, and
`placement/verify.py` judges. A fault counts once all looks of some seconds have shown it: programs
bind themselves, shells prepare something on a single core, and that is gone a moment later. Until
then the proof has what was seen last of the rank when it was right. For a rank that has ended and
was never seen right, the last look counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.processes import (
    ProcessTable,
    RankRecords,
    openmp_of,
    seen_of_record,
    start_of,
    visible_of,
)
from hpml_orchestrator.placement.proof import NodeProof, Process, Seen, proof_json
from hpml_orchestrator.placement.report import node_line, table, wrong_rows
from hpml_orchestrator.placement.verify import judge
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.topology.model import Topology

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpml_orchestrator.node.planning import Prepared
    from hpml_orchestrator.records.process import ProcessStat

__all__ = ["Watch"]

_POLL_SECONDS, _SLOWEST_POLL_SECONDS, _POLL_GROWTH = 0.25, 2.0, 1.1
_LOOKS_SECONDS = (0.25, 1.0, 3.0, 10.0, 30.0, 60.0)  # after the ranks began; then every minute
_LOOK_EVERY_SECONDS = 60.0
_STEADY_SECONDS = 5.0  # a fault that is seen for so long counts
_AGAIN_SECONDS = 1.0  # between looks while one is seen that does not count yet
_KILL_SECONDS = 10.0
_NO_TOPOLOGY = Topology("none", (), ())


@dataclass
class _Rank:
    """One rank: its record, what was seen last, and what was seen last while it was right."""

    record: dict[str, Any]
    seen: Seen
    right: Seen | None = None
    wrong_since: float | None = None
    live: bool = True

    def is_wrong(self, now: float) -> bool:
        """Whether its fault is no passing state."""
        if self.wrong_since is None:
            return False
        return now - self.wrong_since >= _STEADY_SECONDS or not self.live

    def is_unsure(self, now: float) -> bool:
        """Whether it has a fault that may pass."""
        return self.wrong_since is not None and not self.is_wrong(now)


class Watch:
    """Watches the ranks of one node; the agent's loop calls `act` when something is due.

    Args:
        attempt: the attempt's directory.
        made: the node's plan and what it was made of.
        write: where messages go.
        proc_root: where /proc is.
    """

    def __init__(
        self,
        attempt: Path,
        made: Prepared,
        write: Callable[[str], object] = sys.stderr.write,
        proc_root: str = "/proc",
    ) -> None:
        self._made = made
        self._write = write
        self._proc_root = proc_root
        directory = attempt / "binding"
        self._records = RankRecords(directory / f"{made.around.node}.jsonl")
        self._file = directory / f"{made.around.node}.proof.json"
        self._ranks: dict[int, _Rank] = {}  # by local rank
        self._now = 0.0
        self._poll_at, self._pause = 0.0, _POLL_SECONDS
        self._look_at, self._began, self._scheduled, self._looks = math.inf, 0.0, 0, 0
        self._used: dict[tuple[int, int], tuple[int, float]] = {}  # ticks and time of a process
        self._proof: NodeProof | None = None
        self._reported = self._unwritten = False
        self._kill_at = math.inf
        self._doomed: dict[tuple[int, int], None] = {}

    def act(self, now: float) -> float:
        """Do what is due, and return after how many seconds there will be more.

        Args:
            now: seconds on a monotonic clock.
        """
        self._now = now
        if now >= self._poll_at:
            self._poll()
        if now >= self._look_at:
            self._look()
            self._schedule_look()
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._end_ranks(signal.SIGKILL)
        return max(0.0, min(self._poll_at, self._look_at, self._kill_at) - now)

    @property
    def binding(self) -> tuple[int, int] | None:
        """Ranks that are bound as planned, and ranks that are not; None before the first look.

        A rank is wrong once its fault is no passing state.
        """
        if self._proof is None:
            return None
        wrong = sum(rank.is_wrong(self._now) for rank in self._ranks.values())
        return len(self._proof.ranks) - wrong, wrong

    def close(self) -> None:
        """Take in what was recorded last, and write the last judgement."""
        self._take(self._records.new())
        for rank in self._ranks.values():
            self._end(rank)
        self._judge()

    def _poll(self) -> None:
        records = self._records.new()
        self._take(records)
        if records:
            self._pause = _POLL_SECONDS
            self._began, self._scheduled = self._now, 0
            self._look_at = self._now + _LOOKS_SECONDS[0]
        else:
            self._pause = min(self._pause * _POLL_GROWTH, _SLOWEST_POLL_SECONDS)
        self._poll_at = self._now + self._pause

    def _take(self, records: list[dict[str, Any]]) -> None:
        for record in records:  # of a rank that started again, the last counts
            self._ranks[record["local_rank"]] = _Rank(record, seen_of_record(record))

    def _schedule_look(self) -> None:
        live = [rank for rank in self._ranks.values() if rank.live]
        self._scheduled += 1
        if not live:
            self._look_at = math.inf
        elif self._scheduled < len(_LOOKS_SECONDS):
            self._look_at = max(self._now, self._began + _LOOKS_SECONDS[self._scheduled])
        else:
            self._look_at = self._now + _LOOK_EVERY_SECONDS
        if not self._reported and any(rank.wrong_since is not None for rank in live):
            self._look_at = min(self._look_at, self._now + _AGAIN_SECONDS)

    def _look(self) -> None:
        """Look at every rank that may live, and judge."""
        self._looks += 1
        processes = ProcessTable(self._proc_root)
        used: dict[tuple[int, int], tuple[int, float]] = {}
        for rank in self._ranks.values():
            if rank.live:
                seen = self._look_at_rank(processes, rank, used)
                if seen is None:
                    self._end(rank)
                else:
                    rank.seen = seen
        self._used = used
        self._judge()

    def _end(self, rank: _Rank) -> None:
        """Note that a rank has ended: what was seen of it stays, except for a short fault."""
        if rank.right is not None and rank.is_unsure(self._now):
            rank.seen = rank.right
        rank.live = False

    def _look_at_rank(
        self, processes: ProcessTable, rank: _Rank, used: dict[tuple[int, int], tuple[int, float]]
    ) -> Seen | None:
        """Return a rank as it is now; None where it has ended, or cannot be read from here."""
        family = self._family(processes, rank)
        if not family:
            return None
        chief = processes.main_of(family)
        shown = {stat.pid: self._process(processes, stat, used) for stat in family}
        main = shown.pop(chief.pid)
        if main is None:
            return None
        environment = processes.environment(chief.pid)
        return replace(
            rank.seen,
            main=replace(main, openmp=openmp_of(environment)),
            others=tuple(process for process in shown.values() if process is not None),
            visible=visible_of(environment) if environment else rank.seen.visible,
            live=True,
        )

    def _process(
        self,
        processes: ProcessTable,
        stat: ProcessStat,
        used: dict[tuple[int, int], tuple[int, float]],
    ) -> Process | None:
        """Return where a process runs, and how much it has worked since the look before."""
        process = processes.process(stat)
        key = stat.pid, stat.start_ticks
        used[key] = stat.cpu_ticks, self._now
        ticks, then = self._used.get(key, used[key])
        if process is None or self._now <= then:
            return process
        seconds = (stat.cpu_ticks - ticks) / os.sysconf("SC_CLK_TCK")
        return replace(process, load=round(seconds / (self._now - then), 3))

    def _family(self, processes: ProcessTable, rank: _Rank) -> list[ProcessStat]:
        pid = rank.record["pid"]
        if not processes.lives(pid, start_of(rank.record)):
            return []
        others = {other.record["pid"] for other in self._ranks.values() if other is not rank}
        return processes.family(pid, others)

    def _judge(self) -> None:
        """Judge what was seen last; write the proof, report faults, end the ranks if strict."""
        proof = self._judged()
        for judged in proof.ranks:
            rank = self._ranks[judged.local_rank]
            if not judged.wrong:
                rank.wrong_since = None
                rank.right = rank.seen if rank.seen.live else rank.right
            elif rank.wrong_since is None:
                rank.wrong_since = self._now
        if any(rank.right and rank.is_unsure(self._now) for rank in self._ranks.values()):
            proof = self._judged(forgiving=True)
        previous = self._proof
        changed = previous is None or proof != replace(previous, time=proof.time, looks=proof.looks)
        if changed or self._unwritten:
            proof = replace(proof, time=round(time.time(), 6))
            self._save(proof)
        self._proof = proof
        if not self._reported and any(rank.is_wrong(self._now) for rank in self._ranks.values()):
            self._reported = True
            self._report(node_line(proof))
            if proof.verify != "strict":  # then the table stands at the job's end, of all nodes
                self._report(*table(wrong_rows(proof)))
            else:
                self._report(f"{proof.node}: binding.verify is strict: its ranks are ended")
                self._end_ranks(signal.SIGTERM)
                self._kill_at = self._now + _KILL_SECONDS

    def _judged(self, *, forgiving: bool = False) -> NodeProof:
        """Judge what was seen last; forgiving, what was right last of ranks that are unsure."""
        return judge(
            self._made.topology or _NO_TOPOLOGY,
            self._made.plan,
            [
                rank.right if forgiving and rank.right and rank.is_unsure(self._now) else rank.seen
                for rank in self._ranks.values()
            ],
            self._made.around,
            looks=self._looks,
        )

    def _save(self, proof: NodeProof) -> None:
        try:
            write_json(self._file, proof_json(proof))
        except RecordError as error:
            if not self._unwritten:
                self._report(f"{proof.node}: {error}")
            self._unwritten = True
        else:
            self._unwritten = False

    def _report(self, *lines: str) -> None:
        # One write: the lines of several nodes, which share the output, do not mix.
        self._write("".join(f"hpml: {line}\n" for line in lines))

    def _end_ranks(self, number: signal.Signals) -> None:
        """Send a signal to the live ranks of this node, and to all that they have started."""
        processes = ProcessTable(self._proc_root)
        for rank in self._ranks.values():
            for stat in self._family(processes, rank):
                self._doomed[stat.pid, stat.start_ticks] = None
        for pid, start_ticks in self._doomed:
            if processes.lives(pid, start_ticks):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
