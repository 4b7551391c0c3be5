"""A node as tables or JSON: this one, or that of a file."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import STANDARD_OUTPUT, print_json, print_table
from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import topology_json
from hpml_orchestrator.topology.nvidia_smi import list_gpus
from hpml_orchestrator.topology.recognise import (
    BYTES_MAX,
    decode,
    read_topology,
    topology_of_text,
)
from hpml_orchestrator.topology.sysfs import read_sysfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.topology.model import Topology

__all__ = ["ShownNode", "read_node", "show_node"]

_GIB = 1024**3
_NEAR = ("PIX", "PXB", "PHB", "NODE")


@dataclass(frozen=True)
class ShownNode:
    """A node to show.

    Attributes:
        topology: the node.
        name: the file that it was read from, or its host name.
        usable: CPUs that this process may use, in the kernel's list format; empty where the node
            is another one, or all of its CPUs are usable.
    """

    topology: Topology
    name: str
    usable: str = ""

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.name} ({self.topology.source})"


def read_node(file: str | None) -> ShownNode:
    """Return the node of a topology file, of standard input (`-`), or this node.

    Raises:
        InputError: there is no topology in it.
        NotFoundError: there is no such file.
    """
    if file is None:
        has_instances = os.path.isdir("/proc/driver/nvidia/capabilities")  # of MIG, perhaps
        topology = read_sysfs(gpu_listing=list_gpus() if has_instances else "")
        usable = os.sched_getaffinity(0)
        restriction = format_list(usable) if topology.cpus - usable else ""
        return ShownNode(topology, os.uname().nodename, restriction)
    if file == STANDARD_OUTPUT:
        text = decode(sys.stdin.buffer.read(BYTES_MAX + 1), name="standard input")
        return ShownNode(topology_of_text(text, name="standard input"), "standard input")
    return ShownNode(read_topology(file), os.path.basename(os.path.abspath(file)) or file)


def show_node(node: ShownNode, *, as_json: bool) -> None:
    """Print a node as tables or as JSON."""
    topology = node.topology
    if as_json:
        print_json(topology_json(topology))
    else:
        _print_node(topology, node.title)
    for warning in topology.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _print_node(topology: Topology, title: str) -> None:
    """Print a node's domains, GPUs and network cards as tables."""
    counts = (
        (len({core.socket for core in topology.cores}), "socket"),
        (len(topology.domains), "NUMA domain"),
        (len(topology.cores), "core"),
        (len(topology.cpus), "CPU"),
        (len(topology.devices), "GPU"),
        (len(topology.nics), "network card"),
    )
    shown = counts if topology.sockets_told else counts[1:]
    typer.echo(f"{title}: {', '.join(counted(count, noun) for count, noun in shown)}\n")
    rows = []
    for domain in topology.domains:
        cores = [core for core in topology.cores if core.domain == domain.number]
        sockets = {core.socket for core in cores} if topology.sockets_told else set()
        rows.append(
            (
                domain.number,
                ",".join(map(str, sorted(sockets))),
                len(cores),
                format_list(domain.cpus),
                f"{domain.memory_bytes / _GIB:.0f} GiB" if domain.memory_bytes else "",
                _names(gpu.name for gpu in topology.gpus if gpu.domain == domain.number),
                _names(nic.name for nic in topology.nics if nic.domain == domain.number),
                " ".join(f"{other}:{away}" for other, away in domain.distances),
            )
        )
    _print_table("DOMAIN SOCKET CORES CPUS MEMORY GPUS NICS DISTANCES", rows)
    if topology.gpus:
        typer.echo()
        _print_table(
            "GPU|ADDRESS|DOMAIN|LOCAL CPUS|NEAREST NICS",
            [
                (
                    gpu.name,
                    gpu.address,
                    gpu.domain,
                    format_list(gpu.cpus),
                    _nearest_nics(topology, gpu.name),
                )
                for gpu in topology.gpus
            ],
        )
    if topology.nics:
        typer.echo()
        _print_table(
            "NIC ADDRESS DOMAIN", [(nic.name, nic.address, nic.domain) for nic in topology.nics]
        )


def _print_table(header: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a table; what is unknown is a dash."""
    cells = [["-" if cell in {None, ""} else str(cell) for cell in row] for row in rows]
    print_table(header.split("|" if "|" in header else " "), cells)


def _nearest_nics(topology: Topology, gpu: str) -> str:
    """Return the level and the names of the cards that are nearest to a GPU; SYS is not near."""
    for level in _NEAR:
        near = [nic for name, nic, distance in topology.links if (name, distance) == (gpu, level)]
        if near:
            return f"{level} {_names(near)}"
    return ""


def _names(words: Iterable[str]) -> str:
    """Return names as one text, with consecutive numbers as a range.

    >>> _names(["GPU0", "GPU1", "GPU2", "mlx5_0"])
    'GPU0-2 mlx5_0'
    """
    runs: list[list[str]] = []  # a stem, its first number and its last
    for word in words:
        match = re.fullmatch(r"(|.*[^0-9])(0|[1-9][0-9]{0,8})", word)
        stem, number = (match[1], match[2]) if match else (word, "")
        last = runs[-1] if runs else ["", "", ""]
        if number and last[2] and last[0] == stem and int(number) == int(last[2]) + 1:
            last[2] = number
        else:
            runs.append([stem, number, number])
    return " ".join(
        f"{stem}{first}" + (f"-{last}" if last != first else "") for stem, first, last in runs
    )
