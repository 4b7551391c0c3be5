"""Whether a rank ever met another; each rank of a program that is not distributed works alone.

A rank of a process group listens on a TCP port from its start to its end, for Gloo, for NCCL or as
rank 0; torchrun's ranks also stay connected to MASTER_PORT. So a rank that had neither in any look,
the last one after a minute and in the second half of its life, has worked alone.
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
