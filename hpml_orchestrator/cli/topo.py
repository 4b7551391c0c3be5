"""Command `topo`: a node as tables, JSON or a picture, and where ranks would run or ran on it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.check.request import kinds_for, topologies_of
from hpml_orchestrator.cli.common import (
    STANDARD_OUTPUT,
    JsonOption,
    SetOption,
    chosen_site,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import refuse_gone_directory
from hpml_orchestrator.cli.show import print_ranks
from hpml_orchestrator.cli.topopicture import (
    picture,
    ranks_of_places,
    ranks_of_plan,
)
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, counted
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.placement.model import PLAN_COLUMNS, plan_json, plan_rows
from hpml_orchestrator.placement.planfile import read
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.records.files import read_text
from hpml_orchestrator.records.job import Policy
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.reporting.summary import node_topology, read_binding
from hpml_orchestrator.runs.select import one_run
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.script.render import effective_job, whole_nodes
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import format_names, nearest_nics, topology_json
from hpml_orchestrator.topology.sysfs import (
    BYTES_MAX,
    decode,
    list_gpus,
    read_sysfs,
    read_topology,
    topology_of_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hpml_orchestrator.cli.topopicture import DrawnRank
    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.reporting.summary import BindingReport, RankLocation
    from hpml_orchestrator.site.model import ResolvedSite
    from hpml_orchestrator.topology.model import Topology

# Show a node: this one, one from a file, or one of a run.

_GIB = 1024**3
_SUFFIX = ".topology.json"
_NODES_SHOWN = 10


@dataclass(frozen=True)
class ShownNode:
    """A node to show.

    Attributes:
        topology: the node.
        name: the file that it was read from, or its host name.
        usable: CPUs that this process may use, in the kernel's list format; empty if all are
            usable or it is another node.
    """

    topology: Topology
    name: str
    usable: str = ""

    @property
    def title(self) -> str:
        """Its name and source, for headings."""
        return f"{self.name} ({self.topology.source})"


def read_node(file: str | None) -> ShownNode:
    """Return the node in a topology file or standard input (`-`); by default this node.

    Raises:
        InputError: the input is not a topology.
        NotFoundError: the file does not exist.
    """
    if file is None:
        has_instances = os.path.isdir("/proc/driver/nvidia/capabilities")  # perhaps of MIG
        topology = read_sysfs(gpu_listing=list_gpus() if has_instances else "")
        usable = os.sched_getaffinity(0)
        restriction = format_list(usable) if topology.cpus - usable else ""
        return ShownNode(topology, os.uname().nodename, restriction)
    if file == STANDARD_OUTPUT:
        text = decode(sys.stdin.buffer.read(BYTES_MAX + 1), name="standard input")
        return ShownNode(topology_of_text(text, name="standard input"), "standard input")
    return ShownNode(read_topology(file), os.path.basename(os.path.abspath(file)) or file)


def show_node(node: ShownNode, *, svg: str | None, as_json: bool) -> None:
    """Print a node and draw its picture; with `-` print only the picture."""
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
    topology: Topology, path: str, *, title: str, ranks: Sequence[DrawnRank] = ()
) -> None:
    """Write a node's picture.

    Args:
        topology: the node.
        path: of a file, pipe or device; - for standard output.
        title: above the picture.
        ranks: ranks to draw.

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
                format_names(gpu.name for gpu in topology.gpus if gpu.domain == domain.number),
                format_names(nic.name for nic in topology.nics if nic.domain == domain.number),
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
    """Print a node of a run's last attempt with the location of its ranks, or else the plan.

    Args:
        store: of the records.
        run: the run's name.
        node: the node's name; empty for the node of the first rank.
        svg: file for a picture, if any; - prints it instead of the tables.
        as_json: whether to print JSON.

    Raises:
        NotFoundError: the run has no record of this node or of any node.
        InputError: the run is an array, or the node's record is damaged.
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
        boxes = ranks_of_places(places) if places else ranks_of_plan(plan) if plan else []
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
    """Return the plan of the node's agent, if any, and the reason if it cannot be read."""
    try:
        return read(read_text(attempt.directory / "plan" / f"{node}.txt")), ""
    except NotFoundError:
        return None, ""
    except (RecordError, ValueError) as error:
        return None, str(error) or type(error).__name__


def _missing(bound: BindingReport, node: str, plan: Plan | None, shown: int) -> Iterator[str]:
    """Yield a warning per unreadable proof of a node, and one if ranks left no record."""
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


# The command, and plans for the ranks of a node.

_EXCLUDES = {
    "--run": ("FILE", "--ranks", "--plan", "--policy", "--allowed-cpus"),
    "--plan": ("--ranks", "--policy"),
}
_NEEDS = {
    "--node": ("--run",),
    "--set": ("--plan",),
    "--policy": ("--ranks",),
    "--allowed-cpus": ("--ranks", "--plan"),
}
_ONE_THREAD = {"--hint=nomultithread", "--hint=compute_bound", "--threads-per-core=1"}


def topo(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Topology file in any supported format, a copy of /sys, or - for stdin.",
            show_default="this node",
        ),
    ] = None,
    as_json: JsonOption = False,
    svg: Annotated[
        str | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Write a picture (SVG); - prints it instead of the tables.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=10_000,
            help="Show the CPUs and GPUs of this many ranks.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option("--policy", help="With --ranks: how to place them.", show_default="gpu-local"),
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="JOB_FILE",
            help="Show where the ranks of that job would run. Without FILE this uses the site "
            "profile's topology of the job's nodes, else this node.",
            show_default=False,
        ),
    ] = None,
    settings: SetOption = [],
    allowed_cpus: Annotated[
        str | None,
        typer.Option(
            "--allowed-cpus",
            metavar="LIST",
            help="With --ranks or --plan: use only these CPUs, e.g. 0-15,64-79.",
            show_default="all",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Show a node of that run and where its ranks ran.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            help="With --run: the node to show.",
            show_default="the node of the first rank",
        ),
    ] = None,
) -> None:
    """Show a node's NUMA domains, cores, GPUs and NICs, and which are near each other.

    `--ranks` and `--plan` show which GPU, cores and network card each rank would get; `--run` shows
    where the ranks of a run were bound.
    """
    given = {
        "FILE": file,
        "--svg": svg,
        "--ranks": ranks,
        "--policy": policy,
        "--plan": job_file,
        "--set": settings,
        "--allowed-cpus": allowed_cpus,
        "--run": run,
        "--node": node,
    }
    _check(given)
    if svg == STANDARD_OUTPUT:
        refuse_with("--svg -", {"--json": as_json})
    if run:
        show_run(store_of(context), run, node or "", svg=svg, as_json=as_json)
        return
    if job_file or file not in {None, "-"}:
        refuse_gone_directory()
    if job_file:
        request, site_node = request_of_job(context, job_file, settings)
        shown = (file is None and site_node) or read_node(file)
    else:
        shown = read_node(file)
        request = PlanRequest(ranks or 0, policy or "gpu-local")
    if job_file or ranks:
        show_plan(shown, request, allowed_cpus or "", svg=svg, as_json=as_json)
    else:
        show_node(shown, svg=svg, as_json=as_json)
    if shown.usable and not allowed_cpus:
        typer.echo(f"note: this process may only use CPUs {shown.usable}", err=True)


def _check(given: Mapping[str, object]) -> None:
    refuse_empty({option: value for option, value in given.items() if isinstance(value, str)})
    for option, others in _EXCLUDES.items():
        if given[option]:
            refuse_with(option, {other: given[other] for other in others})
    for option, others in _NEEDS.items():
        if given[option] and not any(given[other] for other in others):
            raise InputError(f"needs {' or '.join(others)}", field=option, hint="hpml topo --help")


@dataclass(frozen=True)
class PlanRequest:
    """What to plan on a node.

    Attributes:
        ranks: ranks on the node.
        policy: a policy of the planner.
        ranks_per_gpu: ranks that share a GPU.
        loader_workers: data loader processes per rank.
        hardware_threads: whether ranks get all hardware threads of a core.
        gpus: GPUs that the job requests; None for all.
        cpus: CPUs that the job requests; None for all.
    """

    ranks: int
    policy: str
    ranks_per_gpu: int = 1
    loader_workers: int = 0
    hardware_threads: bool = True
    gpus: int | None = None
    cpus: int | None = None


def request_of_job(
    context: typer.Context, job_file: str, settings: Sequence[str]
) -> tuple[PlanRequest, ShownNode | None]:
    """Return what a job requests of each node, and its node if the site profile has a topology.

    Raises:
        InputError: the job is invalid, its nodes may differ, or a topology file of the profile
            cannot be read.
    """
    values = [parse_setting(setting) for setting in settings]
    resolved = load_job(job_file, values, chosen_site(context))
    job, profile = resolved.job, resolved.site
    site = profile.site if profile else None
    asked = effective_job(job, site.directives) if site else job
    request = PlanRequest(
        job.resources.ranks,
        job.binding.policy,
        job.resources.ranks_per_gpu,
        job.binding.loader_workers,
        job.binding.hardware_threads and _ONE_THREAD.isdisjoint(asked.resources.extra),
        job.resources.gpu_count,
        None if whole_nodes(asked, site) else job.resources.ranks * job.resources.cpus_per_rank,
    )
    return request, _site_node(job, profile) if profile else None


def _site_node(job: Job, site: ResolvedSite) -> ShownNode | None:
    kinds = kinds_for(job, site)
    topologies = {
        str(kinds[name].topology): topology
        for name, topology in topologies_of(job, site).items()
        if kinds[name].topology is not None
    }
    if len(topologies) > 1:
        raise InputError(
            f"this job may run on several kinds of nodes: {', '.join(topologies)}",
            field="FILE",
            hint=f"choose one: hpml topo {next(iter(topologies))} --plan …",
        )
    for file, topology in topologies.items():
        return ShownNode(topology, os.path.basename(file))
    if kinds:
        typer.echo(
            "note: the site profile has no topology for this job's nodes; the plan is for this "
            "machine",
            err=True,
        )
    return None


def show_plan(
    node: ShownNode, request: PlanRequest, allowed_cpus: str, *, svg: str | None, as_json: bool
) -> None:
    """Print which GPU, cores and network card each rank would get, and draw the picture.

    Args:
        node: the node.
        request: the ranks to plan.
        allowed_cpus: usable CPUs in the kernel's list format; empty for all.
        svg: file for a picture, if any; - prints it instead of the table.
        as_json: whether to print JSON.

    Raises:
        InputError: the allowed CPUs are not a CPU list, or the node has none of them.
    """
    topology, devices = node.topology, node.topology.devices
    allowed = _allowed(topology, allowed_cpus or node.usable)
    apart = () if allowed else _away_from_other_gpus(topology, request)
    few = request.gpus is not None and request.gpus < len(devices)
    planned = plan(
        topology,
        request.ranks,
        policy=request.policy,
        ranks_per_gpu=request.ranks_per_gpu,
        allowed_cpus=apart or allowed,
        visible_gpus=devices[: request.gpus] if few else None,
        loader_workers=request.loader_workers,
        smt=request.hardware_threads,
    )
    warnings = [*topology.warnings, *planned.warnings]
    if foreign := set(allowed or ()) - topology.cpus:
        warnings.append(f"this node does not have the allowed CPUs {format_list(foreign)}")
    if request.gpus is not None and request.gpus > len(devices):
        warnings.append(
            f"the job requests {counted(request.gpus, 'GPU')}, and this node has {len(devices)}"
        )
    cpus_note = "" if allowed else "the CPUs not next to other jobs' GPUs" if apart else "all CPUs"
    note = _note(topology, request, cpus_note)
    if svg is not None:
        ranks = f"{counted(request.ranks, 'rank')} ({request.policy})"
        write_picture(
            topology, svg, title=f"{node.title}: plan of {ranks}", ranks=ranks_of_plan(planned)
        )
    if as_json:
        notes = [note] if note else []
        print_json({**plan_json(planned), "warnings": warnings, "notes": notes})
        return
    if svg != STANDARD_OUTPUT:
        print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(planned))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if note:
        typer.echo(f"note: {note}", err=True)


def _allowed(topology: Topology, text: str) -> tuple[int, ...] | None:
    """Return the CPUs of `--allowed-cpus`; None for all."""
    if not text:
        return None
    try:
        allowed = parse_list(text)
    except ValueError:
        raise InputError(
            "must be a list of CPUs such as 0-7,64-71", field="--allowed-cpus", value=text
        ) from None
    if not topology.cpus.intersection(allowed):
        raise InputError("contains none of the node's CPUs", field="--allowed-cpus", value=text)
    return allowed


def _away_from_other_gpus(topology: Topology, request: PlanRequest) -> tuple[int, ...]:
    """Return the CPUs not next to other jobs' GPUs, for a job that gets part of a node.

    Empty if these are all CPUs or fewer than the job requests.
    """
    if not request.gpus or request.cpus is None:
        return ()
    own = {gpu.domain for gpu in topology.devices[: request.gpus]}
    others = {gpu.domain for gpu in topology.devices[request.gpus :]} - own
    # If the domain of the job's own GPUs is unknown, so are the CPUs near them.
    if None in own or not others:
        return ()
    left = [
        cpu for domain in topology.domains if domain.number not in others for cpu in domain.cpus
    ]
    return tuple(left) if request.cpus <= len(left) else ()


def _note(topology: Topology, request: PlanRequest, cpus: str) -> str:
    """Return a note about the part of the node that a job requests; empty for the whole node."""
    count = len(topology.devices)
    parts, used = [], [cpus] if cpus else []
    if cpus and request.cpus is not None and request.cpus < len(topology.cpus):
        parts.append(f"{request.cpus} of {len(topology.cpus)} CPUs")
    if request.gpus is not None and 0 < request.gpus < count:
        parts.append(f"{request.gpus} of {counted(count, 'GPU')}")
        first = "GPU" if request.gpus == 1 else f"{request.gpus} GPUs"
        used.append(f"the first {first}")
    if not parts:
        return ""
    return (
        f"the job requests {' and '.join(parts)}: Slurm decides which; "
        f"this plan uses {' and '.join(used)}"
    )
