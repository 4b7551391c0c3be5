"""Verifies where the ranks of this node run: at their start, after 10 s and after 60 s.

When ranks start, hpml-bind's records of them are checked (`placement/verify.py`) and written as the
proof. 10 s and 60 s later the live processes are checked, since programs and libraries may bind
themselves while they start. A wrong binding is reported, or with `verify: strict` ends the ranks of
this node. Changes after the second check are not detected. Ranks that never meet (`meeting.py`) are
reported at the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.environment import integer
from hpml_orchestrator.node.processes import ProcessTable, openmp_of, visible_of
from hpml_orchestrator.placement.verify import (
    NodeProof,
    Process,
    Seen,
    judge,
    node_line,
    proof_json,
    table,
    wrong_rows,
)
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.topology.model import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpml_orchestrator.node.planning import NodePlan
    from hpml_orchestrator.node.processes import StartedRank
    from hpml_orchestrator.records.process import ProcessStat

# Whether a rank ever met another; each rank of a program that is not distributed works alone.
#
# A rank of a process group listens on a TCP port from its start to its end, for Gloo, for NCCL or
# as rank 0; torchrun's ranks also stay connected to MASTER_PORT. So a rank that had neither in any
# look, the last one after a minute and in the second half of its life, has worked alone.

ALONE = (
    "its ranks never connected to another rank: each worked alone. A program that should train as "
    "one has to start its process group (torch.distributed.init_process_group)"
)
"""The warning about a node whose ranks never met."""

CPU_SECONDS = 10.0
"""A rank without so much CPU time may only wait for the processes of a container's daemon."""

_LISTENS = "0A"


def may_have_met(processes: ProcessTable, family: list[ProcessStat]) -> bool:
    """Whether a rank's processes have such a socket; True after an MPI start and if in doubt."""
    main = processes.main_of(family).pid
    environment = processes.environment(main)
    if any(name.startswith(("PMI", "OMPI_", "HOROVOD_")) for name in environment):
        return True
    port = integer(environment, "MASTER_PORT", 0)
    sockets, meeting = set(), set()
    try:
        for stat in family:
            with contextlib.suppress(FileNotFoundError):  # it has ended
                for descriptor in os.listdir(f"/proc/{stat.pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        sockets.add(os.readlink(f"/proc/{stat.pid}/fd/{descriptor}"))
        # The tables are those of the rank's network namespace.
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{main}/net/{name}") as table:
                for line in [*table][1:]:
                    _, _, remote, state, _, _, _, _, _, inode, *_ = line.split()
                    if state == _LISTENS or int(remote.rpartition(":")[2], 16) == port:
                        meeting.add(f"socket:[{inode}]")
    except OSError:
        return True
    return not sockets.isdisjoint(meeting)


LOOKS_SECONDS = (10.0, 60.0)
"""When the live ranks are checked, after the last of them started."""

_MEETING_SECONDS = 5.0  # to the first look for a meeting; each later one comes after twice the time
_ALONE_SECONDS = 60.0
_POLL_SECONDS = 1.0  # until all ranks have started
_KILL_SECONDS = 10.0
_NO_TOPOLOGY = Topology("none", (), ())


class Watch:
    """Verifies where the ranks of one node run; the agent's loop calls `act` when a check is due.

    Args:
        attempt: the attempt's directory.
        node_plan: the node's plan.
        write: prints messages; by default to standard error.
    """

    def __init__(
        self, attempt: Path, node_plan: NodePlan, write: Callable[[str], object] | None = None
    ) -> None:
        self._node_plan = node_plan
        self._write = write or sys.stderr.write
        self._file = attempt / "binding" / f"{node_plan.context.node}.proof.json"
        self._taken = 0
        self._ranks: dict[int, StartedRank] = {}  # by local rank
        self._seen: dict[int, Seen] = {}
        self._due: list[float] = []
        self._looks = 0
        self._used: dict[tuple[int, int], tuple[int, float]] = {}  # ticks and time of a process
        self._reported: list[tuple[str, ...]] = []
        self._kill_at = math.inf
        self._to_kill: dict[tuple[int, int], None] = {}
        self._alone: set[int] = set()  # local ranks that have worked without a meeting
        self._began = self._meet_at = math.inf
        self.binding: tuple[int, int] | None = None
        """Ranks that are bound as planned, and ranks that are not; None before any started."""

    def act(self, now: float, started: Sequence[StartedRank]) -> float:
        """Do what is due; return the seconds until the next call is needed.

        Args:
            now: seconds on a monotonic clock.
            started: the ranks so far, in order.
        """
        # Count again from the last start: libraries bind themselves while they are loaded.
        if self._take(started):
            self._save(self._verify())
            self._due = [now + seconds for seconds in LOOKS_SECONDS]
            self._alone.clear()
            if len(self._ranks) > 1 or integer(os.environ, "SLURM_NNODES", 1) > 1:
                self._began, self._meet_at = now, now + _MEETING_SECONDS
        if self._due and now >= self._due[0]:
            self._due.pop(0)
            self._look(now)
            self._conclude(now)
        if now >= self._meet_at:
            self._look_for_meeting(now)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._end_ranks(signal.SIGKILL)
        poll_at = now + _POLL_SECONDS
        if len(self._ranks) >= len(self._node_plan.plan.ranks):
            poll_at = math.inf
        return max(0.0, min([*self._due[:1], poll_at, self._meet_at, self._kill_at]) - now)

    def close(self, started: Sequence[StartedRank]) -> None:
        """Read the last records, then write and report the final result."""
        self._take(started)
        self._conclude(math.inf)
        if self._worked_alone and any(rank.rank == 0 for rank in self._ranks.values()):
            self._report(f"warning: {self._node_plan.context.node}: {ALONE}")

    def _take(self, started: Sequence[StartedRank]) -> bool:
        new = started[self._taken :]
        self._taken += len(new)
        for rank in new:  # the last start of a restarted rank counts
            self._ranks[rank.seen.local_rank] = rank
            self._seen[rank.seen.local_rank] = rank.seen
        return bool(new)

    def _look(self, now: float) -> None:
        """Check every live rank; keep the last observation of one that has ended."""
        self._looks += 1
        processes = ProcessTable()
        used: dict[tuple[int, int], tuple[int, float]] = {}
        for local_rank in self._ranks:
            family = self._family(processes, local_rank)
            if not family:
                continue
            main_stat = processes.main_of(family)
            shown = {stat.pid: self._process(processes, stat, now, used) for stat in family}
            main = shown.pop(main_stat.pid)
            if main is None:
                continue
            environment = processes.environment(main_stat.pid)
            before = self._seen[local_rank]
            self._seen[local_rank] = replace(
                before,
                main=replace(main, openmp=openmp_of(environment)),
                others=tuple(process for process in shown.values() if process is not None),
                visible=visible_of(environment) if environment else before.visible,
                live=True,
            )
        self._used = used

    def _look_for_meeting(self, now: float) -> None:
        processes = ProcessTable()
        for local_rank in self._ranks:
            family = self._family(processes, local_rank)
            if family and may_have_met(processes, family):
                self._alone.clear()
                self._meet_at = math.inf
                return
            seconds = sum(stat.cpu_ticks for stat in family) / os.sysconf("SC_CLK_TCK")
            if now - self._began >= _ALONE_SECONDS and family and seconds >= CPU_SECONDS:
                self._alone.add(local_rank)
        self._meet_at = 2 * now - self._began  # so the last is in the second half of their life

    @property
    def _worked_alone(self) -> bool:
        return 0 < len(self._alone) == len(self._node_plan.plan.ranks)

    def _process(
        self,
        processes: ProcessTable,
        stat: ProcessStat,
        now: float,
        used: dict[tuple[int, int], tuple[int, float]],
    ) -> Process | None:
        process = processes.process(stat)
        key = stat.pid, stat.start_ticks
        used[key] = stat.cpu_ticks, now
        ticks, then = self._used.get(key, used[key])
        # Load is CPU time between two checks, so the first check has none.
        if process is None or now <= then:
            return process
        seconds = (stat.cpu_ticks - ticks) / os.sysconf("SC_CLK_TCK")
        return replace(process, load=round(seconds / (now - then), 3))

    def _family(self, processes: ProcessTable, local_rank: int) -> list[ProcessStat]:
        rank = self._ranks[local_rank]
        if not processes.lives(rank.pid, rank.start_ticks):
            return []
        others = {other.pid for other in self._ranks.values() if other is not rank}
        return processes.family(rank.pid, others)

    def _verify(self) -> NodeProof:
        proof = judge(
            self._node_plan.topology or _NO_TOPOLOGY,
            self._node_plan.plan,
            self._seen.values(),
            self._node_plan.context,
            looks=self._looks,
        )
        wrong = sum(bool(rank.wrong) for rank in proof.ranks)
        self.binding = len(proof.ranks) - wrong, wrong
        if self._worked_alone:
            proof = replace(proof, warnings=(*proof.warnings, ALONE))
        return replace(proof, time=round(time.time(), 6))

    def _conclude(self, now: float) -> None:
        proof = self._verify()
        self._save(proof)
        rows = wrong_rows(proof)
        if not rows or rows == self._reported:
            return
        self._reported = rows
        self._report(node_line(proof))
        if proof.verify != "strict":  # if strict, `finish` prints one table for all nodes
            self._report(*table(rows))
        else:
            self._report(f"{proof.node}: binding.verify is strict: its ranks are ended")
            self._end_ranks(signal.SIGTERM)
            self._kill_at = now + _KILL_SECONDS

    def _save(self, proof: NodeProof) -> None:
        try:
            write_json(self._file, proof_json(proof))
        except RecordError as error:
            self._report(f"{proof.node}: {error}")

    def _report(self, *lines: str) -> None:
        # One write: the lines of several nodes, which share the output, do not mix.
        self._write("".join(f"hpml: {line}\n" for line in lines))

    def _end_ranks(self, number: signal.Signals) -> None:
        processes = ProcessTable()
        for local_rank in self._ranks:
            for stat in self._family(processes, local_rank):
                # Remember the processes of the first call: when SIGKILL is due, a rank may have
                # ended, and what it left behind is no longer found as its family.
                self._to_kill[stat.pid, stat.start_ticks] = None
        for pid, start_ticks in self._to_kill:
            if processes.lives(pid, start_ticks):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
