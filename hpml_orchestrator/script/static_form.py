"""Whether the launcher itself can bind a job's ranks, and by which options: a pure function.

Only where all is known beforehand: the job gets whole nodes, and the site profile has the topology
of every node that it may get. Then the plan that each node would make is made here, as options of
the launcher. hpml-bind still runs on the nodes and verifies the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.placement import static
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.script.directives import as_asked, whole_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpml_orchestrator.spec import Job, NodeType, ResolvedSite, Site
    from hpml_orchestrator.topology import Topology

__all__ = ["StaticForm", "describe", "static_form"]

_REDUCING = frozenset(
    # options of sbatch after which a whole node is not all CPUs, or its tasks lie otherwise
    "core-spec thread-spec hint threads-per-core ntasks-per-core ntasks-per-socket "
    "sockets-per-node cores-per-socket extra-node-info overcommit oversubscribe".split()
)


@dataclass(frozen=True)
class StaticForm:
    """How the launcher binds the ranks, or why each node plans for itself.

    Attributes:
        name: the form, such as `map_ldom`; empty where each node plans for itself.
        options: of srun or mpirun, which say the plan.
        slots: cores of each local rank, where mpirun takes them from a rankfile.
        missing: what keeps the launcher from binding, one phrase each; empty where it binds, and
            where the job does not want it.
    """

    name: str = ""
    options: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def static_form(
    job: Job, site: ResolvedSite | None, topologies: Mapping[str, Topology]
) -> StaticForm:
    """Return the form that a job's script has.

    Args:
        job: the job, complete.
        site: the site profile, if there is one.
        topologies: of the node types that have one, by the type's name.

    Raises:
        InputError: the job wants it static, and it cannot be; names all that is missing.
    """
    if job.binding.form == "node":
        return StaticForm()
    asked = as_asked(job, site.site.directives) if site else job
    kinds = site.site.kinds_of(asked.resources.partition) if site else {}
    missing = [*_missing(asked, site.site if site else None)]
    for name, kind in kinds.items():
        missing += _missing_of_type(name, kind, topologies.get(name), asked.resources.gpu_count)
    form = StaticForm(missing=tuple(missing))
    if not missing:
        forms = list(dict.fromkeys(_form(job, topologies[name]) for name in kinds))
        different = f"ranks lie differently on nodes of the types {' and '.join(kinds)}"
        form = forms[0] if len(forms) == 1 else StaticForm(missing=(different,))
    if form.missing and job.binding.form == "static":
        raise InputError(
            f"cannot be static: {'; '.join(form.missing)}",
            field="binding.form",
            value="static",
            hint="with `form: auto` each node plans for itself until all of this holds",
        )
    return form


def describe(form: StaticForm) -> str:
    """Return in one line what binds the ranks, and why."""
    if form.name:
        return f"the launcher binds, by {form.name}; each node checks it"
    reasons = f": {'; '.join(form.missing)}" if form.missing else ""
    return f"each node plans for itself{reasons}"


def _missing(job: Job, site: Site | None) -> Iterator[str]:
    """Yield what keeps the launcher from binding the job that Slurm will see."""
    if job.launcher not in ("srun", "mpirun"):
        yield f"{job.launcher} starts the ranks, and only srun and mpirun can bind them one by one"
    if job.binding.policy == "none":
        yield "policy none binds nothing"
    wanted = job.resources.partition
    if site is None:
        yield "there is no site profile with the topology of the nodes"
    else:
        names = site.partitions_of(wanted)
        unknown = [name for name in names if name not in site.partitions]
        if not names:
            yield "the job names no partition, and the site profile has no default one"
        elif unknown:
            yield f"the site profile does not know partition {', '.join(unknown)}"
        elif not site.kinds_of(wanted):
            yield f"the site profile names no node types of partition {', '.join(names)}"
    if not whole_nodes(job, site):
        yield "the job does not get whole nodes (resources.exclusive)"
    for option in job.resources.extra if site else ():
        if option.removeprefix("--").partition("=")[0] in _REDUCING:
            yield f"{option} leaves parts of a node out"


def _missing_of_type(
    name: str, kind: NodeType, topology: Topology | None, gpus: int
) -> Iterator[str]:
    """Yield what of one type of nodes is not known, or is not the job's, which asks for GPUs."""
    if topology is None:
        yield f"node type {name} has no topology in the site profile"
        return
    if topology.source in static.PARTIAL:
        yield f"the topology of node type {name} ({topology.source}) does not have all cores"
    cpus, devices = len(topology.cpus), len(topology.devices)
    if kind.cpus is not None and kind.cpus != cpus:
        yield f"jobs can have {kind.cpus} CPUs of node type {name}, and its topology has {cpus}"
    if gpus != devices:
        yield f"the job asks for {gpus} of the {devices} GPUs that nodes of type {name} have"


def _form(job: Job, topology: Topology) -> StaticForm:
    """Return the most readable form that equals what the nodes themselves would plan."""
    binding = job.binding
    planned = plan(
        topology,
        job.resources.ranks,
        policy=binding.policy,
        ranks_per_gpu=job.resources.ranks_per_gpu,
        loader_workers=binding.loader_workers,
        smt=binding.hardware_threads,
    )
    if job.launcher == "mpirun":
        by = static.openmpi_map_by(topology, planned)
        if by.value is not None:
            return StaticForm(by.name, tuple(by.value.split()))
        file = static.openmpi_rankfile(topology, planned, ["localhost"])
        if file.value is None:
            return StaticForm(missing=(file.reason,))
        slots = [line.rpartition("slot=")[2] for line in file.value.splitlines()]
        return StaticForm(file.name, slots=tuple(slots))
    forms = [static.slurm_ldoms(topology, planned), static.slurm_masks(planned)]
    # The form `cores` makes the step as large as its tasks, and Slurm chooses which cores those
    # are: it equals the plan where they are all cores of the node.
    if sum(len(rank.cores) for rank in planned.ranks) == len(topology.cores):
        forms.insert(1, static.slurm_cores(topology, planned))
    memory = static.slurm_memory(planned).value
    for form in forms:
        if form.value is not None:
            return StaticForm(form.name, (*form.value.split(), *([memory] if memory else [])))
    return StaticForm(missing=(forms[-1].reason,))
