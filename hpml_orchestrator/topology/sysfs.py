"""This node's topology from /sys and /proc: CPUs, cores and NUMA domains."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import adopt_strays, cores_of_groups, links
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list
from hpml_orchestrator.topology.model import Core, Domain, Topology
from hpml_orchestrator.topology.sysfs_devices import (
    PciDevices,
    list_directory,
    read_cpus,
    read_gpus,
    read_nics,
    read_text,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["read_sysfs"]

_SOURCE = "sysfs"
_KIB = 1024


def read_sysfs(
    sys_root: str = "/sys",
    proc_root: str = "/proc",
    *,
    gpu_listing: str = "",
) -> Topology:
    """Return the machine that a kernel describes, with all CPUs that are online.

    Args:
        sys_root: where sysfs is.
        proc_root: where /proc is.
        gpu_listing: output of `nvidia-smi -L`, the only source of the UUIDs of MIG instances.

    Raises:
        InputError: there are no CPUs below these directories.
    """
    warnings: list[str] = []
    cpu_root = os.path.join(sys_root, "devices", "system", "cpu")
    online = _online(cpu_root)
    if not online:
        raise InputError(
            f"{cpu_root}: no CPUs found",
            hint="is /sys mounted? A topology file can be given instead: `hpml topo FILE`",
        )
    domains = _domains(sys_root, proc_root, online, warnings)
    cores = _cores(cpu_root, domains, warnings)
    pci = PciDevices(sys_root, domains)
    gpus = read_gpus(pci, proc_root, gpu_listing, warnings)
    nics = read_nics(pci)
    addresses = [gpu.address for gpu in gpus] + [nic.address for nic in nics]
    paths = {address: pci.path(address) for address in addresses}
    return Topology(_SOURCE, cores, domains, gpus, nics, links(gpus, nics, paths), tuple(warnings))


def _numbered(directory: str, word: str) -> list[int]:
    """Return the numbers of entries such as `cpu0` or `node1`."""
    matches = (re.fullmatch(rf"{word}([0-9]{{1,5}})", name) for name in list_directory(directory))
    return sorted(int(match[1]) for match in matches if match and int(match[1]) < CPUS_MAX)


def _online(cpu_root: str) -> frozenset[int]:
    listed = read_cpus(cpu_root, "online")
    return frozenset(
        listed
        # cpu0 often has no file of its own
        or (n for n in _numbered(cpu_root, "cpu") if read_text(cpu_root, f"cpu{n}/online") != "0")
    )


def _domains(
    sys_root: str, proc_root: str, online: Collection[int], warnings: list[str]
) -> tuple[Domain, ...]:
    root = os.path.join(sys_root, "devices", "system", "node")
    numbers = _numbered(root, "node")
    homes: dict[int, int] = {}
    for number in numbers:
        for cpu in read_cpus(root, f"node{number}/cpulist"):
            if cpu in online:
                homes.setdefault(cpu, number)
    if not homes:
        warnings.append("The kernel has no NUMA domains: all CPUs count as domain 0.")
        return (Domain(0, tuple(sorted(online)), _memory(read_text(proc_root, "meminfo"))),)
    adopt_strays(homes, online, warnings)
    return tuple(
        Domain(
            number,
            tuple(sorted(cpu for cpu, home in homes.items() if home == number)),
            _memory(read_text(root, f"node{number}/meminfo")),
            _distances(read_text(root, f"node{number}/distance"), numbers),
        )
        for number in numbers
    )


def _memory(meminfo: str) -> int:
    """Return the total of a meminfo file in bytes; 0 where it has none."""
    match = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", meminfo)
    return int(match[1]) * _KIB if match else 0


def _distances(text: str, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the distances to all domains; none where the counts differ."""
    words = re.findall(r"[0-9]{1,9}", text)
    return tuple(zip(numbers, map(int, words))) if len(words) == len(numbers) else ()


def _cores(cpu_root: str, domains: Sequence[Domain], warnings: list[str]) -> tuple[Core, ...]:
    homes = {cpu: domain.number for domain in domains for cpu in domain.cpus}
    groups: list[set[int]] = []
    sockets: dict[int, int] = {}
    unknown: list[int] = []
    seen: set[int] = set()
    for cpu in sorted(homes):
        place = os.path.join(cpu_root, f"cpu{cpu}", "topology")
        socket = read_text(place, "physical_package_id")
        # some ARM machines and hypervisors have -1
        sockets[cpu] = int(socket) if re.fullmatch("[0-9]{1,9}", socket) else 0
        siblings = read_cpus(place, "thread_siblings_list")
        if not siblings:
            unknown.append(cpu)
        if cpu not in seen:
            core = {cpu, *(other for other in siblings if homes.get(other) == homes[cpu])} - seen
            groups.append(core)
            seen |= core
    if unknown:
        warnings.append(
            f"The hardware threads of the CPUs {format_list(unknown)} are unknown: each counts as "
            "a core."
        )
    return cores_of_groups(groups, sockets, homes)
