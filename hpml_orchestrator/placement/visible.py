"""Which GPUs a process sees: CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, and what a cgroup hides.

Indices count the GPUs that the process may open, in the order of their PCI addresses (with
CUDA_DEVICE_ORDER=PCI_BUS_ID); the kernel's description lists hidden ones all the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.placement.gpus import visible

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hpml_orchestrator.topology.model import Gpu, Topology

__all__ = ["VISIBLE_VARIABLES", "chosen_names", "visible_devices"]

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the visible devices, the one that counts first."""

_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]+)/([0-9]+)", re.IGNORECASE)


def visible_devices(
    topology: Topology, text: str | None, hidden: Collection[str] = ()
) -> list[Gpu | None]:
    """Return the devices of a visible list in its order; None stands for one that is not known.

    Args:
        topology: the node.
        text: the variable's value; None where it is not set: then all that are not hidden.
        hidden: PCI addresses of GPUs that a cgroup hides.
    """
    return visible(topology, chosen_names(topology, text, hidden), [])


def chosen_names(
    topology: Topology, text: str | None, hidden: Collection[str] = ()
) -> list[str] | None:
    """Return the names of visible devices in order, as the planner takes them; None for all.

    As for the driver, the list ends before an entry that can be no device, such as `-1` or
    Slurm's `NoDevFiles`. A device that the topology does not know stays in the list: it is one.
    """
    if text is None:
        if not hidden:
            return None
        everything = [one for one in visible(topology, None, []) if one is not None]
        return [one.name for one in everything if one.address not in hidden]
    admitted = [one for one in topology.gpus if not one.parent and one.address not in hidden]
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            index = int(entry)
            found.append(admitted[index].name if index < len(admitted) else f"index {index}")
        elif entry.upper().startswith(("GPU-", "MIG-")):
            found.append(_instance(topology.gpus, entry) or entry)
        else:
            break
    return found


def _instance(gpus: Sequence[Gpu], entry: str) -> str:
    """Return the name of the MIG instance that `MIG-GPU-<uuid>/<gi>/<ci>` means; empty if none.

    Drivers before R470 write it so. Without their listing its place is known from the driver's
    directory of capabilities, and at least its GPU is.
    """
    match = _OLD_MIG.fullmatch(entry)
    if not match or any(one.uuid.lower() == entry.lower() for one in gpus):
        return ""
    parent = next((one for one in gpus if one.uuid.lower() == match[1].lower()), None)
    if parent is None:
        return ""
    name = f"{parent.name} MIG gi{int(match[2])}/ci{int(match[3])}"
    return name if any(one.name == name for one in gpus) else parent.name
