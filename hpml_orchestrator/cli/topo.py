"""Command `topo`: a node, and where ranks would run on it (`--ranks`, `--plan`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    SetOption,
    chosen_site,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
)
from hpml_orchestrator.cli.process import refuse_gone_directory
from hpml_orchestrator.cli.toponode import ShownNode, read_node, show_node
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.placement.model import PLAN_COLUMNS, plan_json, plan_rows
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.script.directives import as_asked, whole_nodes
from hpml_orchestrator.site.profile import kinds_for, site_for, topologies_of
from hpml_orchestrator.spec.job import Policy
from hpml_orchestrator.spec.load import load_job, parse_setting
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.spec.job import Job
    from hpml_orchestrator.spec.site import ResolvedSite
    from hpml_orchestrator.topology.model import Topology

__all__ = ["topo"]


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
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=10_000,
            help="Show where this many ranks would run.",
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
) -> None:
    """Show a node's NUMA domains, cores, GPUs and NICs, and which are near each other.

    `--ranks` and `--plan` show which GPU, cores and network card each rank would get.
    """
    refuse_empty({"FILE": file, "--plan": job_file})
    if job_file:
        refuse_with("--plan", {"--ranks": ranks, "--policy": policy})
    for option, given, needed, present in (
        ("--set", settings, "--plan", job_file),
        ("--policy", policy, "--ranks", ranks),
    ):
        if given and not present:
            raise InputError(f"needs {needed}", field=option, hint="hpml topo --help")
    if job_file or file not in {None, "-"}:
        refuse_gone_directory()
    if job_file:
        request, site_node = request_of_job(context, job_file, settings)
        shown = (file is None and site_node) or read_node(file)
    else:
        shown = read_node(file)
        request = Request(ranks or 0, policy or "gpu-local")
    if job_file or ranks:
        show_plan(shown, request, as_json=as_json)
    else:
        show_node(shown, as_json=as_json)
    if shown.usable:
        typer.echo(f"note: this process may only use CPUs {shown.usable}", err=True)


@dataclass(frozen=True)
class Request:
    """What is to be planned on a node.

    Attributes:
        ranks: how many ranks it has.
        policy: one of the planner's.
        ranks_per_gpu: how many of them share a GPU.
        loader_workers: of each rank.
        hardware_threads: whether ranks get all hardware threads of a core.
        gpus: GPUs that the job requests; None where all of the node's count.
        cpus: CPUs that the job requests; None where all of the node's count.
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
) -> tuple[Request, ShownNode | None]:
    """Return what a job requests of each of its nodes, and such a node if the site profile has it.

    Raises:
        InputError: the job is wrong; or its nodes are of several kinds, and these differ; or a
            topology file of the profile cannot be read.
    """
    resolved = site_for(job_file, os.environ, chosen=chosen_site(context))
    job = load_job(job_file, [parse_setting(setting) for setting in settings], resolved).job
    site = resolved.site if resolved else None
    whole = whole_nodes(as_asked(job, site.directives) if site else job, site)
    request = Request(
        job.resources.ranks,
        job.binding.policy,
        job.resources.ranks_per_gpu,
        job.binding.loader_workers,
        job.binding.hardware_threads,
        job.resources.gpu_count,
        None if whole else job.resources.ranks * job.resources.cpus_per_rank,
    )
    return request, _site_node(job, resolved) if resolved else None


def _site_node(job: Job, site: ResolvedSite) -> ShownNode | None:
    """Return the node that the site profile has for a job."""
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


def show_plan(node: ShownNode, request: Request, *, as_json: bool) -> None:
    """Print which GPU, cores and network card each rank of a node would get."""
    topology, devices = node.topology, node.topology.devices
    allowed = parse_list(node.usable) if node.usable else None
    few = request.gpus is not None and request.gpus < len(devices)
    planned = plan(
        topology,
        request.ranks,
        policy=request.policy,
        ranks_per_gpu=request.ranks_per_gpu,
        allowed_cpus=allowed,
        visible_gpus=devices[: request.gpus] if few else None,
        loader_workers=request.loader_workers,
        smt=request.hardware_threads,
    )
    warnings = [*topology.warnings, *planned.warnings]
    if request.gpus is not None and request.gpus > len(devices):
        warnings.append(
            f"the job requests {counted(request.gpus, 'GPU')}, and this node has {len(devices)}"
        )
    note = _note(topology, request)
    if as_json:
        print_json({**plan_json(planned), "warnings": warnings, "notes": [note] if note else []})
        return
    print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(planned))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if note:
        typer.echo(f"note: {note}", err=True)


def _note(topology: Topology, request: Request) -> str:
    """Return which part of the node a job requests; empty if it is all of it."""
    count, parts = len(topology.devices), []
    few = request.gpus is not None and 0 < request.gpus < count
    if request.cpus is not None and request.cpus < len(topology.cpus):
        parts.append(f"{request.cpus} of {len(topology.cpus)} CPUs")
    if few:
        parts.append(f"{request.gpus} of {counted(count, 'GPU')}")
    if not parts:
        return ""
    return (
        f"the job requests {' and '.join(parts)}, and Slurm decides which: "
        f"this plan uses {'the first GPUs and ' * bool(few)}all CPUs"
    )
