"""The watch over the ranks of this node: do they run where they should, and go on to do so?

Looked at are the live processes, soon after the ranks began and ever more rarely; the judgement is
`placement/verify.py`'s. A fault counts once all looks of some seconds have seen its rank wrong:
programs bind themselves, shells prepare something on a single core, and that is gone a moment
later. Until then the proof has what was seen last of the rank when it was right. Of a rank that has
ended and was never seen to be right, the last look counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.processes import (
    Entry,
    Look,
    RankRecords,
    entry_of,
    openmp_of,
    seen_of_record,
    start_of,
    visible_of,
)
from hpml_orchestrator.placement.proof import NodeProof, Process, Seen, proof_json
from hpml_orchestrator.placement.told import node_line, table, wrong_rows
from hpml_orchestrator.placement.verify import judge
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.topology.model import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpml_orchestrator.node.planning import Prepared

__all__ = ["Watch"]

_POLL_SECONDS, _SLOWEST_POLL_SECONDS = 0.25, 2.0
_QUICK_GROWTH, _SLOW_GROWTH = 1.25, 1.05  # of the pause: all ranks are there, or some are not yet
_LOOKS_SECONDS = (0.25, 1.0, 3.0, 10.0, 30.0, 60.0)
_LOOK_EVERY_SECONDS = 60.0
_STEADY_SECONDS = 5.0  # a fault that is seen for so long counts
_AGAIN_SECONDS = 1.0  # between looks while one is seen that does not count yet
_KILL_SECONDS = 10.0
_NOTHING = Topology("none", (), ())


class Watch:
    """Watches the ranks of one node; the agent's loop calls `act` when something is due.

    Args:
        attempt: the attempt's directory.
        made: the node's plan and what it was made of.
        write: where people are told.
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
        place = attempt / "binding"
        self._records = RankRecords(place / f"{made.around.node}.jsonl")
        self._file = place / f"{made.around.node}.proof.json"
        self._ranks: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, Seen] = {}
        self._right: dict[int, Seen] = {}  # what was seen last of a live rank that was right
        self._wrong_since: dict[int, float] = {}
        self._live: set[int] = set()
        self._poll_at, self._pause = 0.0, _POLL_SECONDS
        self._look_at, self._began, self._looks_done = math.inf, 0.0, 0
        self._looks = 0
        self._used: dict[tuple[int, int], tuple[int, float]] = {}  # ticks and time of a process
        self._used_before = self._used
        self._proof: Optional[NodeProof] = None  # noqa: UP045 - runs on Python 3.9
        self._told = self._unwritten = False
        self._kill_at, self._now = math.inf, 0.0
        self._doomed: dict[tuple[int, int], None] = {}

    def act(self, now: float) -> float:
        """Do what is due, and return after how many seconds there will be more.

        Args:
            now: seconds on a monotonic clock.
        """
        self._now = now
        if now >= self._poll_at:
            self._poll(now)
        if now >= self._look_at:
            self._look()
            self._plan_look(now)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._end_ranks(signal.SIGKILL)
        return max(0.0, min(self._poll_at, self._look_at, self._kill_at) - now)

    @property
    def binding(self) -> Optional[tuple[int, int]]:  # noqa: UP045
        """Ranks that run where they should, and ranks that do not; None before the first look.

        A rank is wrong once its fault is no passing state.
        """
        if self._proof is None:
            return None
        wrong = sum(self._counts(rank) for rank in self._wrong_since)
        return len(self._proof.ranks) - wrong, wrong

    def close(self) -> None:
        """Take in what was recorded last, and write the last judgement."""
        self._take(self._records.new())
        for rank in tuple(self._live):
            self._end(rank)
        self._judge()

    def _poll(self, now: float) -> None:
        new = self._records.new()
        if new:
            self._take(new)
            self._pause = _POLL_SECONDS
            self._began, self._looks_done = now, 0
            self._look_at = now + _LOOKS_SECONDS[0]
        else:
            complete = len(self._ranks) >= len(self._made.plan.ranks)
            grown = self._pause * (_QUICK_GROWTH if complete else _SLOW_GROWTH)
            self._pause = min(grown, _SLOWEST_POLL_SECONDS)
        self._poll_at = now + self._pause

    def _take(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            rank = record["local_rank"]
            self._ranks[rank] = record
            self._seen[rank] = seen_of_record(record)
            self._right.pop(rank, None)
            self._wrong_since.pop(rank, None)
            self._live.add(rank)

    def _plan_look(self, now: float) -> None:
        """Set the next look: at the times of the table, then every minute, while ranks live."""
        self._looks_done += 1
        if not self._live:
            self._look_at = math.inf
        elif self._looks_done < len(_LOOKS_SECONDS):
            self._look_at = max(now, self._began + _LOOKS_SECONDS[self._looks_done])
        else:
            self._look_at = now + _LOOK_EVERY_SECONDS
        if self._live & self._wrong_since.keys() and not self._told:
            self._look_at = min(self._look_at, now + _AGAIN_SECONDS)

    def _look(self) -> None:
        """Look at every rank that may live, and judge."""
        self._looks += 1
        look = Look(self._proc_root)
        self._used_before, self._used = self._used, {}
        for rank in sorted(self._live):
            seen = self._look_at_rank(look, rank)
            if seen is None:
                self._end(rank)
            else:
                self._seen[rank] = seen
        self._judge()

    def _end(self, rank: int) -> None:
        """Note that a rank has ended: what was seen of it stays, but for a fault that was short."""
        if rank in self._right and rank in self._wrong_since and not self._counts(rank):
            self._seen[rank] = self._right[rank]
        self._live.discard(rank)

    def _look_at_rank(self, look: Look, rank: int) -> Optional[Seen]:  # noqa: UP045
        """Return a rank as it is now; None where it has ended, or cannot be found from here."""
        record = self._ranks[rank]
        if look.find(record["pid"], start_of(record)) is None:
            return None
        family = self._family(look, rank)
        if not family:
            return None
        chief = look.main_of(family)
        main = self._process(look, chief)
        if main is None:
            return None
        environment = look.environment(chief.pid)
        told = self._seen[rank]
        others = [self._process(look, one) for one in family if one is not chief]
        return replace(
            told,
            main=replace(main, openmp=openmp_of(environment)),
            others=tuple(one for one in others if one is not None),
            visible=visible_of(environment) if environment else told.visible,
            live=True,
        )

    def _process(self, look: Look, one: Entry) -> Optional[Process]:  # noqa: UP045
        """Return where a process runs, and how much it has worked since the look before."""
        found = look.process(one)
        key = one.pid, one.start_ticks
        self._used[key] = one.busy_ticks, self._now
        ticks, then = self._used_before.get(key, self._used[key])
        if found is None or self._now <= then:
            return found
        seconds = (one.busy_ticks - ticks) / os.sysconf("SC_CLK_TCK")
        return replace(found, load=round(seconds / (self._now - then), 3))

    def _family(self, look: Look, rank: int) -> list[Entry]:
        others = {record["pid"] for one, record in self._ranks.items() if one != rank}
        return look.family(self._ranks[rank]["pid"], others)

    def _judge(self) -> None:
        """Judge what was seen last; write, tell and end the ranks as that asks for."""
        proof = self._judged({})
        self._note_faults(proof)
        unsure = {rank for rank in self._wrong_since if not self._counts(rank)}
        if unsure & self._right.keys():
            proof = self._judged({rank: self._right[rank] for rank in unsure & self._right.keys()})
        before = self._proof
        if before is None or self._unwritten or not _same(before, proof):
            proof = replace(proof, time=round(time.time(), 6))
            self._save(proof)
        else:
            proof = replace(proof, time=before.time)
        self._proof = proof
        if not self._told and self._wrong_since.keys() - unsure:
            self._told = True
            self._say(node_line(proof))
            if proof.verify != "strict":  # then the table stands at the job's end, of all nodes
                self._say(*table(wrong_rows(proof)))
            else:
                self._say(f"{proof.node}: binding.verify is strict: its ranks are ended")
                self._end_ranks(signal.SIGTERM)
                self._kill_at = self._now + _KILL_SECONDS

    def _judged(self, instead: Mapping[int, Seen]) -> NodeProof:
        """Judge what was seen last, but of some ranks something else."""
        return judge(
            self._made.topology or _NOTHING,
            self._made.plan,
            {**self._seen, **instead}.values(),
            self._made.around,
            looks=self._looks,
        )

    def _note_faults(self, proof: NodeProof) -> None:
        """Note since when each rank is wrong, and what was seen of those that are right."""
        for one in proof.ranks:
            rank = one.local_rank
            if one.wrong:
                self._wrong_since.setdefault(rank, self._now)
            else:
                self._wrong_since.pop(rank, None)
                if self._seen[rank].live:
                    self._right[rank] = self._seen[rank]

    def _counts(self, rank: int) -> bool:
        """Whether a rank's fault is no passing state."""
        steady = self._now - self._wrong_since[rank] >= _STEADY_SECONDS
        return steady or rank not in self._live

    def _save(self, proof: NodeProof) -> None:
        try:
            write_json(self._file, proof_json(proof))
        except RecordError as error:
            if not self._unwritten:
                self._say(f"{proof.node}: {error}")
            self._unwritten = True
        else:
            self._unwritten = False

    def _say(self, *lines: str) -> None:
        # One write: the lines of several nodes, which share the output, do not mix.
        self._write("".join(f"hpml: {line}\n" for line in lines))

    def _end_ranks(self, number: signal.Signals) -> None:
        """Send a signal to the live ranks of this node, and to all that they have started."""
        look = Look(self._proc_root)
        for rank, record in self._ranks.items():
            if look.find(record["pid"], start_of(record)) is not None:
                family = self._family(look, rank)
                self._doomed.update(dict.fromkeys((one.pid, one.start_ticks) for one in family))
        for pid, start_ticks in self._doomed:
            _send(pid, start_ticks, number, self._proc_root)


def _same(one: NodeProof, other: NodeProof) -> bool:
    return one == replace(other, time=one.time, looks=one.looks)


def _send(pid: int, start_ticks: int, number: signal.Signals, proc_root: str) -> None:
    """Signal a process, unless it has ended or its number is another's by now."""
    one = entry_of(pid, proc_root)
    if one is not None and one.start_ticks == start_ticks:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
