"""A node as tables, JSON or a picture: this one, that of a file, or one of a run."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import STANDARD_OUTPUT, print_json, print_table
from hpml_orchestrator.cli.show import print_ranks
from hpml_orchestrator.cli.topopicture import (
    boxes_of_places,
    boxes_of_plan,
    names,
    nearest_nics,
    picture,
)
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, counted
from hpml_orchestrator.placement.model import PLAN_COLUMNS, plan_json, plan_rows
from hpml_orchestrator.placement.planfile import read
from hpml_orchestrator.records.files import read_text
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.reporting.summary import node_topology, read_binding
from hpml_orchestrator.runs.select import one_run
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.topology.model import format_list, parse_list, topology_json
from hpml_orchestrator.topology.sysfs import (
    BYTES_MAX,
    decode,
    list_gpus,
    read_sysfs,
    read_topology,
    topology_of_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.cli.topopicture import RankBox
    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.reporting.summary import BindingReport, RankLocation
    from hpml_orchestrator.topology.model import Topology

_GIB = 1024**3
_SUFFIX = ".topology.json"
_NODES_SHOWN = 10


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
        InputError: it contains no topology.
        NotFoundError: the file does not exist.
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


def show_node(node: ShownNode, *, svg: str | None, as_json: bool) -> None:
    """Print a node, and draw it; a picture on standard output is the only output."""
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
        title: above the picture.
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
    typer.echo(f"{title}: {', '.join(counted(count, noun) for count, noun in counts)}")
    kinds = Counter(core.kind or "other" for core in topology.cores)
    if len(kinds) > 1:
        typer.echo(f"kinds of cores: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
    typer.echo()
    rows = []
    for domain in topology.domains:
        cores = [core for core in topology.cores if core.domain == domain.number]
        sockets = {core.socket for core in cores}
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
    cells = [["-" if cell in {None, ""} else str(cell) for cell in row] for row in rows]
    print_table(header.split("|" if "|" in header else " "), cells)


def show_run(store: Store, run: str, node: str, *, svg: str | None, as_json: bool) -> None:
    """Print a node of a run's last attempt with where its ranks ran, or else the plan for them.

    Args:
        store: where records live.
        run: the run's name.
        node: the node's name; that of the first rank when empty.
        svg: file to write a picture to, if any; with - it takes the tables' place.
        as_json: whether to print JSON.

    Raises:
        NotFoundError: the run has no record of any node, or of this one.
        InputError: it is an array, or the node's record is damaged.
    """
    submission = one_run(store.resolve(run, newest=True), field="--run", has="nodes")
    attempt = run_of(submission).newest()
    if attempt is None:
        raise NotFoundError(
            f"{submission.label} has not started", hint=f"hpml status {submission.label}"
        )
    bound = read_binding(attempt)
    name = _node(attempt, submission.label, node, bound)
    topology = node_topology(attempt, name)
    if topology is None:
        raise InputError(
            "its record is damaged",
            field=f"topology of {name}",
            hint=str(attempt.directory / "nodes" / f"{name}{_SUFFIX}"),
        )
    places = [place for place in bound.places if place.node == name]
    plan, damage = _plan(attempt, name)
    title = f"{name} of {submission.label}"
    if svg is not None:
        boxes = boxes_of_places(places) if places else boxes_of_plan(plan) if plan else []
        what = ": where ranks ran" if places else ": plan" if plan else ""
        write_picture(topology, svg, title=title + what, ranks=boxes)
    warnings = [*topology.warnings, *(plan.warnings if plan and not places else ())]
    if damage:
        warnings.append(f"the plan of node {name} cannot be read: {damage}")
    warnings += _missing(bound, name, plan, len(places))
    if as_json:
        ranks = [_rank_json(topology, place) for place in places]
        print_json(
            {
                "node": name,
                "seen": bool(places),
                "ranks": ranks or (plan_json(plan)["ranks"] if plan else []),
                "warnings": warnings,
                "topology": topology_json(topology),
            }
        )
        return
    if svg != STANDARD_OUTPUT:
        print_node(topology, title)
        typer.echo("")
        if places:
            print_ranks(places)
        else:
            typer.echo(f"no rank has recorded where it runs{'; the plan is:' if plan else ''}")
            if plan:
                print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(plan))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _node(attempt: Attempt, label: str, wanted: str, bound: BindingReport) -> str:
    directory = attempt.directory / "nodes"
    known = sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))
    if not known:
        raise NotFoundError(
            f"no node of {label} has recorded its topology",
            hint="nodes do so before the ranks start",
        )
    if wanted and wanted not in known:
        raise NotFoundError(
            f"{label} has no record of a node {wanted!r}",
            hint=f"nodes with a record: {first_few(known, _NODES_SHOWN)}",
        )
    with_ranks = [place.node for place in bound.places if place.node in known]
    name = wanted or (with_ranks or known)[0]
    if not wanted and len(known) > 1:
        typer.echo(
            f"note: {name} is one of {len(known)} nodes; --node NODE shows another", err=True
        )
    return name


def _plan(attempt: Attempt, node: str) -> tuple[Plan | None, str]:
    """Return the plan of the node's agent, if there is one, and why it cannot be read."""
    try:
        return read(read_text(attempt.directory / "plan" / f"{node}.txt")), ""
    except NotFoundError:
        return None, ""
    except (RecordError, ValueError) as error:
        return None, str(error) or type(error).__name__


def _missing(bound: BindingReport, node: str, plan: Plan | None, shown: int) -> Iterator[str]:
    """Yield which proofs of a node cannot be read, and how many of its ranks left no record."""
    for proof in bound.unreadable:
        if proof.node == node:
            yield f"the proof of node {node} cannot be read: {proof.why}"
    expected = [proof.expected for proof in bound.proofs if proof.node == node]
    count = max([*expected, len(plan.ranks) if plan else 0])
    if 0 < shown < count:
        yield f"only {shown} of the {count} ranks of {node} left a record"


def _rank_json(topology: Topology, place: RankLocation) -> dict[str, object]:
    cpus = set(parse_list(place.cpus))
    cores = [core.number for core in topology.cores if cpus & set(core.cpus)]
    return {**asdict(place), "cores": cores, "nic": place.nic or None}
