"""Verify where the ranks of this node run: at their start, after 10 s and after 60 s.

When ranks start, check hpml-bind's records (`placement/verify.py`) and write the result as the
proof. Check the live processes 10 s and 60 s later, because programs and libraries may bind
themselves while they start. Report a wrong binding, or with `verify: strict` end the ranks of this
node. Later changes are not detected. At the end, report ranks that never met another one.
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

# Meetings: whether a rank ever met another. If a program is not distributed, its ranks work alone.
#
# A rank of a process group listens on a TCP port during its whole life, for Gloo, for NCCL or as
# rank 0; torchrun's ranks also stay connected to MASTER_PORT. So a rank that had neither in any
# check, the last one after a minute and in the second half of its life, worked alone.

ALONE = (
    "its ranks never connected to another rank: each worked alone. A program that should train as "
    "one has to start its process group (torch.distributed.init_process_group)"
)
"""Warning about a node whose ranks never met."""

CPU_SECONDS = 10.0
"""A rank with less CPU time may only be waiting for processes of a container's daemon."""

_LISTENS = "0A"


def may_have_met(processes: ProcessTable, family: list[ProcessStat]) -> bool:
    """Return whether a rank's processes have such a socket; True for MPI and if in doubt."""
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
        # These are the tables of the rank's network namespace.
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
"""Seconds from the last start of a rank to the checks of the live ranks."""

_MEETING_SECONDS = 5.0  # until the first check for a meeting; the time doubles for each later check
_ALONE_SECONDS = 60.0
_POLL_SECONDS = 1.0  # until all ranks have started
_KILL_SECONDS = 10.0
_NO_TOPOLOGY = Topology("none", (), ())


class Watch:
    """Verifies where the ranks of one node run; the agent's loop calls `act`.

    Args:
        attempt: the attempt's directory.
        node_plan: the node's plan.
        write: prints messages; default: to standard error.
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
        self._used: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # CPU ticks of a process, and time of the check
        self._reported: list[tuple[str, ...]] = []
        self._kill_at = math.inf
        self._to_kill: dict[tuple[int, int], None] = {}
        self._alone: set[int] = set()  # local ranks that worked without a meeting
        self._began = self._meet_at = math.inf
        self.binding: tuple[int, int] | None = None
        """Numbers of ranks that are and are not bound as planned; None before the first start."""

    def act(self, now: float, started: Sequence[StartedRank]) -> float:
        """Do what is due; return the seconds until the next call is needed.

        Args:
            now: seconds on a monotonic clock.
            started: the ranks so far, in order.
        """
        # Restart the intervals: libraries bind themselves while they are loaded.
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
        """Read the last records, and write and report the final result."""
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
        self._meet_at = (
            2 * now - self._began
        )  # so the last check is in the second half of their life

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
        # Load is the CPU time between two checks, so it is 0 at the first check.
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
        if proof.verify != "strict":  # with strict, `finish` prints one table for all nodes
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
        # A single write, so that lines of several nodes do not mix in the shared output.
        self._write("".join(f"hpml: {line}\n" for line in lines))

    def _end_ranks(self, number: signal.Signals) -> None:
        processes = ProcessTable()
        for local_rank in self._ranks:
            for stat in self._family(processes, local_rank):
                # Remember the processes of the first call: when SIGKILL is due, a rank may have
                # ended, and its remaining processes are no longer found as descendants.
                self._to_kill[stat.pid, stat.start_ticks] = None
        for pid, start_ticks in self._to_kill:
            if processes.lives(pid, start_ticks):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
