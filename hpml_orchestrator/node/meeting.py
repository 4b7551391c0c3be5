"""Whether the ranks of a node ever met; each rank of a program that is not distributed works alone.

A rank of a process group listens on a TCP port from its start to its end, for Gloo, for NCCL or as
rank 0; torchrun's ranks also stay connected to MASTER_PORT. So a rank that worked for a minute and
had neither in any look, the last one in the second half of its life, has worked alone. If anything
is in doubt, ranks count as met: after an MPI start, or if their sockets may not be read.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.node.environment import integer

if TYPE_CHECKING:
    from hpml_orchestrator.node.processes import ProcessTable
    from hpml_orchestrator.records.process import ProcessStat

ALONE = (
    "its ranks never connected to another rank: each worked alone. A program that should train as "
    "one has to start its process group (torch.distributed.init_process_group)"
)
"""The warning about a node whose ranks never met."""

MEETING_SECONDS = 5.0
"""From the start of the ranks to the first look; each later one comes after twice the time."""

CPU_SECONDS = 10.0
"""A rank without so much CPU time may only wait for the processes of a container's daemon."""

_WATCHED_SECONDS = 60.0
_LISTENS = "0A"


class Meeting:
    """What was seen of the sockets of one node's ranks."""

    def __init__(self) -> None:
        self.is_possible = True  # that they worked alone
        self._looks: dict[int, tuple[float, float, float]] = {}  # first, last; CPU time of the rank

    def look(
        self, now: float, local_rank: int, processes: ProcessTable, family: list[ProcessStat]
    ) -> None:
        """Look at the sockets of a rank's processes; `now` is in seconds, monotonic."""
        main = processes.main_of(family).pid
        environment = processes.environment(main)
        is_mpi = any(name.startswith(("PMI", "OMPI_", "HOROVOD_")) for name in environment)
        try:
            connected = _is_connected(main, family, integer(environment, "MASTER_PORT", 0))
        except OSError:
            connected = True
        if is_mpi or connected:
            self.is_possible = False
        first = self._looks.get(local_rank, (now,))[0]
        ticks = sum(stat.cpu_ticks for stat in family)
        self._looks[local_rank] = first, now, ticks / os.sysconf("SC_CLK_TCK")

    def worked_alone(self, ranks: int) -> bool:
        """Return whether so many ranks surely worked alone."""
        return (
            self.is_possible
            and len(self._looks) == ranks
            and all(
                last - first >= _WATCHED_SECONDS and cpu_seconds >= CPU_SECONDS
                for first, last, cpu_seconds in self._looks.values()
            )
        )


def _is_connected(main: int, family: list[ProcessStat], port: int) -> bool:
    """Return whether a process listens on a TCP port, or is connected to `port` elsewhere."""
    sockets = set()
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
                connected = state == _LISTENS or int(remote.rpartition(":")[2], 16) == port
                if connected and f"socket:[{inode}]" in sockets:
                    return True
    return False
