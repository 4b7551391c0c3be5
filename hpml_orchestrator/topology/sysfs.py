"""This node's topology out of /sys and /proc: CPUs, cores and NUMA domains; devices beside it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import adopt_strays, cores_of_groups
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list, parse_list, parse_mask
from hpml_orchestrator.topology.model import Core, Domain, Topology
from hpml_orchestrator.topology.sysfs_devices import read_devices, read_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["read_sysfs"]

_SOURCE = "sysfs"
_KIB = 1024


def read_sysfs(
    sys_root: str = "/sys",
    proc_root: str = "/proc",
    *,
    gpu_listing: str = "",
) -> Topology:
    """Return the machine that a kernel describes.

    All CPUs that are online are told, also those that this process may not use.

    Args:
        sys_root: where sysfs is.
        proc_root: where /proc is.
        gpu_listing: what `nvidia-smi -L` printed: it alone has the UUIDs of MIG instances.

    Raises:
        InputError: there are no CPUs below these directories.
    """
    warnings: list[str] = []
    cpu_root = os.path.join(sys_root, "devices", "system", "cpu")
    online = _online(cpu_root, proc_root, warnings)
    if not online:
        raise InputError(
            f"{cpu_root}: no CPUs are told there, nor in {proc_root}/cpuinfo",
            hint="is /sys mounted? A topology file can be given instead: `hpml topo FILE`",
        )
    domains = _domains(sys_root, proc_root, online, warnings)
    cores = _cores(cpu_root, online, domains, warnings)
    gpus, nics, links = read_devices(
        sys_root, proc_root, domains, warnings, gpu_listing=gpu_listing
    )
    return Topology(_SOURCE, cores, domains, gpus, nics, links, tuple(warnings))


def _cpus(list_text: str, mask_text: str) -> tuple[int, ...]:
    """Return the CPUs of a list, or of a mask where there is no list; none where both are bad."""
    for text, parse in ((list_text, parse_list), (mask_text, parse_mask)):
        try:
            if text:
                return parse(text)
        except ValueError:
            continue
    return ()


def _numbered(directory: str, word: str) -> list[int]:
    """Return the numbers of entries such as `cpu0` or `node1`."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = (re.fullmatch(rf"{word}([0-9]{{1,5}})", name) for name in names)
    return sorted(int(one[1]) for one in found if one and int(one[1]) < CPUS_MAX)


def _online(cpu_root: str, proc_root: str, warnings: list[str]) -> frozenset[int]:
    told = _cpus(read_text(cpu_root, "online"), "")
    if told:
        return frozenset(told)
    present = [
        cpu
        for cpu in _numbered(cpu_root, "cpu")
        if read_text(cpu_root, f"cpu{cpu}", "online") != "0"  # cpu0 often has no such file
    ]
    if present:
        return frozenset(present)
    lines = re.findall(
        r"^processor\s*:\s*([0-9]{1,5})$", read_text(proc_root, "cpuinfo"), re.MULTILINE
    )
    if lines:
        warnings.append("/sys tells no CPUs: they are those of /proc/cpuinfo, each one a core.")
    return frozenset(int(one) for one in lines if int(one) < CPUS_MAX)


def _domains(
    sys_root: str, proc_root: str, online: Collection[int], warnings: list[str]
) -> tuple[Domain, ...]:
    root = os.path.join(sys_root, "devices", "system", "node")
    numbers = _numbered(root, "node")
    homes: dict[int, int] = {}
    for number in numbers:
        node = os.path.join(root, f"node{number}")
        for cpu in _cpus(read_text(node, "cpulist"), read_text(node, "cpumap")):
            if cpu in online:
                homes.setdefault(cpu, number)
    if not homes:
        warnings.append("The kernel tells no NUMA domains: all CPUs count as domain 0.")
        memory = _memory(read_text(proc_root, "meminfo"))
        return (Domain(0, tuple(sorted(online)), memory),)
    adopt_strays(homes, online, warnings)
    return tuple(
        Domain(
            number,
            tuple(sorted(cpu for cpu, home in homes.items() if home == number)),
            _memory(read_text(root, f"node{number}", "meminfo")),
            _distances(read_text(root, f"node{number}", "distance"), numbers),
        )
        for number in numbers
    )


def _memory(meminfo: str) -> int:
    """Return the total of a meminfo file in bytes; 0 where it is not told."""
    match = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", meminfo)
    return int(match[1]) * _KIB if match else 0


def _distances(text: str, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the distances to all domains that are there; none where the counts differ."""
    words = text.split()
    if len(words) != len(numbers) or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        return ()
    return tuple((number, int(word)) for number, word in zip(numbers, words))


def _cores(
    cpu_root: str, online: Iterable[int], domains: Sequence[Domain], warnings: list[str]
) -> tuple[Core, ...]:
    homes = {cpu: one.number for one in domains for cpu in one.cpus}
    groups: dict[int, tuple[int, ...]] = {}
    sockets: dict[int, int] = {}
    untold: list[int] = []
    seen: set[int] = set()
    for cpu in sorted(online):
        place = os.path.join(cpu_root, f"cpu{cpu}", "topology")
        siblings = _siblings(place)
        socket = read_text(place, "physical_package_id")
        # -1 is told by some ARM machines and hypervisors
        sockets[cpu] = int(socket) if re.fullmatch("[0-9]{1,9}", socket) else 0
        if not siblings:
            untold.append(cpu)
        if cpu in seen:
            continue
        mine = {cpu, *(one for one in siblings or () if homes.get(one, -1) == homes[cpu])}
        groups[cpu] = tuple(sorted(mine - seen))
        seen |= mine
    if untold and os.path.isdir(cpu_root):
        warnings.append(
            f"The hardware threads of the CPUs {format_list(untold)} are not told: "
            "each counts as a core."
        )
    return cores_of_groups(groups.values(), sockets, homes)


def _siblings(place: str) -> Optional[tuple[int, ...]]:  # noqa: UP045
    """Return the CPUs of one core; the names are those of new kernels, then of older ones."""
    for name in ("core_cpus", "thread_siblings"):
        cpus = _cpus(read_text(place, f"{name}_list"), read_text(place, name))
        if cpus:
            return cpus
    return None
