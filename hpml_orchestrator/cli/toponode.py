"""A node as tables, JSON or a picture, as `hpml topo` shows it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import STANDARD_OUTPUT, print_json, print_table
from hpml_orchestrator.cli.topopicture import names, nearest_nics, picture
from hpml_orchestrator.errors import HpmlError, InputError, counted
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.recognise import (
    BYTES_MAX,
    decode,
    read_topology,
    topology_of_text,
)
from hpml_orchestrator.topology.record import topology_json
from hpml_orchestrator.topology.sysfs import read_sysfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.cli.topopicture import RankBox
    from hpml_orchestrator.topology import Topology

__all__ = ["ShownNode", "print_node", "read_node", "show_node", "write_picture"]

_GIB = 1024**3


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
        topology = read_sysfs(gpu_listing=_gpu_listing())
        usable = os.sched_getaffinity(0)
        restriction = format_list(usable) if topology.cpus - usable else ""
        return ShownNode(topology, os.uname().nodename, restriction)
    if file == STANDARD_OUTPUT:
        text = decode(sys.stdin.buffer.read(BYTES_MAX + 1), name="standard input")
        return ShownNode(topology_of_text(text, name="standard input"), "standard input")
    return ShownNode(read_topology(file), os.path.basename(os.path.abspath(file)) or file)


def _gpu_listing() -> str:
    """Return the output of `nvidia-smi -L` where there are MIG instances."""
    if not os.path.isdir("/proc/driver/nvidia/capabilities"):
        return ""
    try:
        result = SubprocessRunner().run(["nvidia-smi", "-L"], env=os.environ, timeout=20)
    except (HpmlError, OSError):
        return ""
    return result.stdout if result.returncode == 0 and "MIG " in result.stdout else ""


def show_node(node: ShownNode, *, svg: str | None, as_json: bool) -> None:
    """Print a node, and draw it; a picture on standard output stands there alone."""
    topology = node.topology
    if svg is not None:
        write_picture(topology, svg, title=node.title)
    if as_json:
        print_json(topology_json(topology))
    elif svg != STANDARD_OUTPUT:
        print_node(topology, node.title)
    for warning in topology.warnings:
        typer.echo(f"warning: {warning}", err=True)


def write_picture(
    topology: Topology, path: str, *, title: str, ranks: Sequence[RankBox] = ()
) -> None:
    """Write a node's picture.

    Args:
        topology: the node.
        path: of the file, a pipe or a device; - for standard output.
        title: stands above.
        ranks: the owners of its cores.

    Raises:
        InputError: the file cannot be written.
    """
    drawn = picture(topology, title=title, ranks=ranks).encode()
    try:
        if path == STANDARD_OUTPUT:
            sys.stdout.buffer.write(drawn)
            sys.stdout.flush()
        else:
            Path(path).write_bytes(drawn)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field="--svg", value=path
        ) from None


def print_node(topology: Topology, title: str) -> None:
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
                names(gpu.name for gpu in topology.gpus if gpu.domain == domain.number),
                names(nic.name for nic in topology.nics if nic.domain == domain.number),
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
                    nearest_nics(topology, gpu.name),
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
