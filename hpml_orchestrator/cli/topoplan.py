"""Where ranks would run on a node: `hpml topo --ranks` and `hpml topo --plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import (
    STANDARD_OUTPUT,
    chosen_site,
    print_json,
    print_table,
    refuse_with,
)
from hpml_orchestrator.errors import InputError, counted, did_you_mean

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site_load import ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = [
    "Asked",
    "SiteJob",
    "Wanted",
    "job_of",
    "site_topology",
    "tell_plan",
    "wanted_by_job",
    "wanted_by_words",
]


@dataclass(frozen=True)
class Asked:
    """The options of `hpml topo` about ranks, as they were given."""

    ranks: int | None
    policy: str
    job_file: str
    settings: tuple[str, ...]
    allowed_cpus: str
    run: str
    node: str

    def check(self, file: str | None) -> None:
        """Refuse options that rule one another out, and those that need another.

        Raises:
            InputError: names the option, and what it needs.
        """
        whole = {"--ranks": self.ranks is not None, "--plan": self.job_file}
        details = {"--policy": self.policy, "--allowed-cpus": self.allowed_cpus}
        if self.run:
            refuse_with("--run", {"FILE": file is not None, **whole, **details})
        if self.ranks is not None:
            refuse_with("--ranks", {"--plan": self.job_file})
        for option, given, needs, example in (
            ("--node", self.node, bool(self.run), "--run RUN"),
            ("--set", self.settings, bool(self.job_file), "--plan JOB_FILE"),
            ("--allowed-cpus", self.allowed_cpus, any(whole.values()), "--ranks N or --plan JOB"),
        ):
            if given and not needs:
                raise InputError(f"needs {example}", field=option, hint="hpml topo --help")
        if self.policy and self.job_file:
            raise InputError(
                "cannot be given together with --plan: the job has a policy",
                field="--policy",
                value=self.policy,
                hint=f"--set binding.policy={self.policy}",
            )
        if self.policy and self.ranks is None:
            raise InputError(
                "needs --ranks N", field="--policy", value=self.policy, hint="hpml topo --ranks 4"
            )


@dataclass(frozen=True)
class SiteJob:
    """A job, and the site profile that counts for it."""

    job: Job
    site: ResolvedSite | None


@dataclass(frozen=True)
class Wanted:
    """What is to be planned on a node.

    Attributes:
        ranks: how many ranks it has.
        policy: one of the planner's.
        ranks_per_gpu: how many of them share a GPU.
        loader_workers: of each rank.
        hardware_threads: whether ranks get all hardware threads of a core.
        allowed_cpus: the only CPUs to use, in the kernel's list format; all when empty.
        gpus: GPUs that the job asks for; None where all of the node's count.
        cpus: CPUs that the job asks for; None where all of the node's count.
    """

    ranks: int
    policy: str = "gpu-local"
    ranks_per_gpu: int = 1
    loader_workers: int = 0
    hardware_threads: bool = True
    allowed_cpus: str = ""
    gpus: int | None = None
    cpus: int | None = None


def wanted_by_words(ranks: int, asked: Asked) -> Wanted:
    """Return what `--ranks` and `--policy` ask for.

    Raises:
        InputError: there is no such policy.
    """
    from hpml_orchestrator.placement.planner import POLICIES  # noqa: PLC0415

    if asked.policy and asked.policy not in POLICIES:
        raise InputError(
            f"must be one of {', '.join(POLICIES)}",
            field="--policy",
            value=asked.policy,
            hint=did_you_mean(asked.policy, POLICIES),
        )
    return Wanted(ranks, asked.policy or "gpu-local", allowed_cpus=asked.allowed_cpus)


def job_of(context: typer.Context, asked: Asked) -> SiteJob:
    """Load the job file of `--plan` through the site profile that counts for it."""
    from hpml_orchestrator.site.profile import site_for  # noqa: PLC0415
    from hpml_orchestrator.spec import load_job, parse_setting  # noqa: PLC0415

    given = [parse_setting(setting) for setting in asked.settings]
    site = site_for(asked.job_file, os.environ, chosen=chosen_site(context))
    return SiteJob(load_job(asked.job_file, given, site).job, site)


def wanted_by_job(one: SiteJob, asked: Asked) -> Wanted:
    """Return what a job asks of each of its nodes."""
    from hpml_orchestrator.script.site_rules import as_asked, whole_nodes  # noqa: PLC0415

    resources, binding = one.job.resources, one.job.binding
    site = one.site.site if one.site else None
    whole = whole_nodes(as_asked(one.job, site.directives) if site else one.job, site)
    return Wanted(
        resources.ranks,
        binding.policy,
        resources.ranks_per_gpu,
        binding.loader_workers,
        binding.hardware_threads,
        asked.allowed_cpus,
        resources.gpu_count,
        None if whole else resources.ranks * resources.cpus_per_rank,
    )


def site_topology(one: SiteJob) -> tuple[str, Topology] | None:
    """Return file and content of the topology that the site profile has of the job's nodes.

    It is read as rendering and checking do; None where there is none.

    Raises:
        InputError: the job's nodes are of several kinds, and these differ; or a file cannot be
            read, or tells of no CPUs.
    """
    if one.site is None:
        return None
    from hpml_orchestrator.site.profile import kinds_for, topologies_of  # noqa: PLC0415

    kinds = kinds_for(one.job, one.site)
    found = {
        file: topology
        for name, topology in topologies_of(one.job, one.site).items()
        if (file := kinds[name].topology) is not None
    }
    if len(found) > 1:
        raise InputError(
            f"nodes of several kinds may run this job: {', '.join(found)}",
            field="FILE",
            hint=f"name one: hpml topo {next(iter(found))} --plan …",
        )
    if not found and kinds:
        typer.echo(
            "note: the site profile tells no topology of this job's nodes: the plan is of this "
            "machine",
            err=True,
        )
    return next(iter(found.items()), None)


def tell_plan(
    topology: Topology, wanted: Wanted, *, svg: str | None, title: str, as_json: bool
) -> None:
    """Print which GPU, cores and network card each rank of a node would get, and draw it.

    Args:
        topology: the node.
        wanted: what is to be planned.
        svg: file to write a picture to, if any; with - it takes the table's place.
        title: what to call the node in the picture.
        as_json: whether to print JSON.

    Raises:
        InputError: the allowed CPUs are no list, or none of the node's.
    """
    from hpml_orchestrator.placement.planner import plan  # noqa: PLC0415
    from hpml_orchestrator.placement.show import (  # noqa: PLC0415
        PLAN_COLUMNS,
        plan_json,
        plan_rows,
    )

    if wanted.allowed_cpus and not topology.cores:
        topology = _of_allowed(topology, wanted.allowed_cpus)
    allowed = _allowed(topology, wanted.allowed_cpus)
    beside = _beside_its_gpus(topology, wanted)
    devices = topology.devices
    few = wanted.gpus is not None and wanted.gpus < len(devices)
    made = plan(
        topology,
        wanted.ranks,
        policy=wanted.policy,
        ranks_per_gpu=wanted.ranks_per_gpu,
        allowed_cpus=beside or allowed,
        visible_gpus=[one.index for one in devices[: wanted.gpus]] if few else None,
        loader_workers=wanted.loader_workers,
        smt=wanted.hardware_threads,
    )
    warnings = [*topology.warnings, *made.warnings]
    strange = sorted(set(allowed or ()) - topology.cpus)
    if strange:
        from hpml_orchestrator.topology import format_list  # noqa: PLC0415

        warnings.append(f"of the allowed CPUs this node does not have {format_list(strange)}")
    if wanted.gpus is not None and wanted.gpus > len(devices):
        warnings.append(
            f"the job asks for {counted(wanted.gpus, 'GPU')}, and this node has {len(devices)}"
        )
    note = _note(topology, wanted, part=bool(beside))
    if svg is not None:
        from hpml_orchestrator.cli.rankpicture import of_plan  # noqa: PLC0415
        from hpml_orchestrator.cli.topo import write_picture  # noqa: PLC0415

        count = f"{wanted.ranks} rank{'s' * (wanted.ranks != 1)}"
        words = f"{title}: where {count} would run ({wanted.policy})"
        write_picture(topology, svg, title=words, ranks=of_plan(made))
    if as_json:
        notes = [note] if note else []
        print_json({**plan_json(made), "warnings": warnings, "notes": notes})
        return
    if svg != STANDARD_OUTPUT:
        print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(made))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if note:
        typer.echo(f"note: {note}", err=True)


def _of_allowed(topology: Topology, text: str) -> Topology:
    """Return a node of which no CPUs are told, with those that are allowed."""
    from hpml_orchestrator.topology import Core, Domain  # noqa: PLC0415

    cpus = _cpus(text)
    note = "No NUMA domain is told: the allowed CPUs count as domain 0, and each as a core."
    return replace(
        topology,
        cores=tuple(Core(number, 0, 0, (cpu,)) for number, cpu in enumerate(cpus)),
        domains=(Domain(0, cpus),),
        warnings=(*topology.warnings, note),
    )


def _cpus(text: str) -> tuple[int, ...]:
    from hpml_orchestrator.topology import parse_list  # noqa: PLC0415

    try:
        return parse_list(text)
    except ValueError:
        raise InputError(
            "must be CPU numbers such as 0-7,64-71", field="--allowed-cpus", value=text
        ) from None


def _allowed(topology: Topology, text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    allowed = _cpus(text)
    if not set(allowed) & topology.cpus:
        raise InputError("names none of the node's CPUs", field="--allowed-cpus", value=text)
    return allowed


def _beside_its_gpus(topology: Topology, wanted: Wanted) -> tuple[int, ...]:
    """Return the CPUs of a job that asks for a part of a node: none of other GPUs' domains.

    Empty where there is nothing to leave out: the job has the node or all of its GPUs, names its
    CPUs, or asks for more than would be left.
    """
    if not wanted.gpus or wanted.cpus is None or wanted.allowed_cpus:
        return ()
    devices = topology.devices
    own = {one.domain for one in devices[: wanted.gpus]}
    others = {one.domain for one in devices[wanted.gpus :]} - own
    if None in own or not others:
        return ()
    left = [cpu for one in topology.domains if one.number not in others for cpu in one.cpus]
    return tuple(left) if wanted.cpus <= len(left) else ()


def _note(topology: Topology, wanted: Wanted, *, part: bool) -> str:
    """Say which part of the node a job asks for, where it is not all of it.

    Args:
        topology: the node.
        wanted: what the job asks for.
        part: whether the plan leaves the CPUs next to other GPUs out.
    """
    parts, taken = [], []
    if not wanted.allowed_cpus:
        taken.append("the CPUs that are next to no other GPU" if part else "all CPUs")
        if wanted.cpus is not None and wanted.cpus < len(topology.cpus):
            parts.append(f"{wanted.cpus} of {len(topology.cpus)} CPUs")
    if wanted.gpus is not None and 0 < wanted.gpus < len(topology.devices):
        parts.append(f"{wanted.gpus} of {counted(len(topology.devices), 'GPU')}")
        taken.append(
            "the first GPU" if wanted.gpus == 1 else f"the first {counted(wanted.gpus, 'GPU')}"
        )
    if not parts:
        return ""
    return (
        f"the job asks for {' and '.join(parts)}: Slurm decides which; "
        f"this plan takes {' and '.join(taken)}"
    )
