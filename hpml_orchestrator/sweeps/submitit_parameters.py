"""submitit's parameters, by the names of its Slurm executor, as fields of a job file.

Parameters of a script written for `slurm_…` mean the same with `hpml_`, even where hpml's units
differ from sbatch's: GPUs and memory per node, CPUs per rank.
"""

from __future__ import annotations

import copy
import getpass
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.units import (
    Gpus,
    format_time,
    parse_gpu_option,
    parse_gpus,
    parse_mebibytes,
    split_list,
)

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Resources

_SLURM = {
    "job_name": "name",
    "time": "resources.time",
    "ntasks_per_node": "resources.ranks_per_node",
    "num_gpus": "resources.gpus",
    "mem": "resources.memory",
    "dependency": "after",
    **{
        name: f"resources.{name}"
        for name in ("account", "constraint", "exclusive", "partition", "qos")
    },
}
_FIELDS = {
    "name": "name",
    "timeout_min": "resources.time",
    "nodes": "resources.nodes",
    "tasks_per_node": "resources.ranks_per_node",
    "cpus_per_task": "resources.cpus_per_rank",
    "gpus_per_node": "resources.gpus",
    "mem_gb": "resources.memory",
    "gpus": "resources.gpus",
    "setup": "environment.setup",
    **{name: name for name in ("after", "binding", "monitor", "stage")},
    **_SLURM,
}
"""Parameter -> field of the job file; as in submitit, Slurm's name wins over the shared one."""
_DIRECTIVES = ("exclude", "nodelist", "wckey")
_DERIVED = "cpus_per_gpu gpus_per_task gres mail_type mail_user mem_per_cpu mem_per_gpu".split()
_OF_SBATCH = {*_SLURM, *_DIRECTIVES, *_DERIVED, "comment"}
NAMES = {*_FIELDS, *_OF_SBATCH} | set(
    "additional_parameters array_parallelism backend job_file records set signal_delay_s site "
    "stderr_to_stdout".split()
)
"""Every parameter; `set` and `job_file` reach the fields that have none."""

_ENDS = {"afterok": "ok", "afterany": "any", "afternotok": "notok"}
_GPU_PART = re.compile(r"(gres[:/])?gpu\b")
_ALL_EVENTS = ["begin", "end", "fail", "requeue"]
_NAME_CHARS = 64


T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Any]
"""Parameters by name, with the values that the user gave."""


class ParameterNames(set[str]):
    """Names of parameters that users give with the prefix `hpml_` only.

    AutoExecutor iterates over the names of all executors, and a name without a prefix goes to the
    last executor that has it. Plugins come last, so `partition` would not reach Slurm's executor.
    This set contains its names, but iterating over it yields one text of all names, as in the
    message of AutoExecutor about an unknown parameter.
    """

    def __iter__(self) -> Iterator[str]:
        """Yield one text."""
        return iter([", ".join(sorted(super().__iter__()))])


def job_name(name: object) -> str:
    """Return a valid job name for any name that submitit allows.

    >>> job_name("my_job"), job_name("a b/c: [1]"), job_name("//")
    ('my_job', 'a_b_c_1_', 'submitit')
    """
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", str(name)).lstrip("._+-")
    return plain[:_NAME_CHARS] or "submitit"


def given_in(parameters: Parameters) -> dict[str, Any]:
    """Return the parameters that are set.

    Additional parameters that sbatch and hpml both have replace those; the others stay additional.

    Raises:
        InputError: a parameter that must be a mapping is not one.
    """
    for name in ("set", "additional_parameters"):
        if not isinstance(parameters.get(name) or {}, Mapping):
            hint = f'such as hpml_{name}={{"name": value}}'
            value = str(parameters[name])
            raise InputError("must be a mapping", field=name, value=value, hint=hint)
    written = parameters.get("additional_parameters") or {}
    more = {name.replace("-", "_"): value for name, value in written.items()}
    known = {name: more.pop(name) for name in _OF_SBATCH & more.keys()}
    every = {**parameters, **known, "additional_parameters": more}
    return {name: value for name, value in every.items() if value is not None}


def fields_of(given: Parameters) -> dict[str, object]:
    """Return the fields of the job file that parameters set.

    Raises:
        InputError: a dependency cannot be understood.
    """
    names = [name for name in _FIELDS if name in given]
    return {
        _FIELDS[name]: _AS_WRITTEN[name](given[name])
        if name in _AS_WRITTEN
        else copy.deepcopy(given[name])
        for name in names
    }


def derived_from(given: Parameters, resources: Resources) -> tuple[dict[str, object], list[str]]:
    """Return the fields that depend on the job's size, and the options of sbatch without a field.

    Raises:
        InputError: a value has the wrong form, or does not fit the job's size.
    """
    fields: dict[str, object] = {}
    options = {name: given[name] for name in _DIRECTIVES if name in given}
    options |= given["additional_parameters"]
    ranks, gpus, cpus = resources.ranks_per_node or 1, resources.gpus, 0
    if "gres" in given:
        parts = [*split_list(str(given["gres"]))]
        of_gpus = [part for part in parts if _GPU_PART.match(part)]
        others = [part for part in parts if part not in of_gpus]
        gpus = parse_gpu_option(",".join(of_gpus)) if of_gpus else gpus
        options |= {"gres": ",".join(others)} if others else {}
    if "gpus_per_task" in given:
        each = _converted(given, "gpus_per_task", parse_gpus)
        gpus = Gpus(tuple((kind, number * ranks) for kind, number in each.kinds))
    if {"gres", "gpus_per_task"} & given.keys():
        fields["resources.gpus"] = str(gpus) or "0"
    if "cpus_per_gpu" in given:
        cpus, rest = divmod(_converted(given, "cpus_per_gpu", int) * gpus.count, ranks)
        if rest or not cpus:
            message = f"the CPUs of {gpus.count} GPUs cannot be divided over {ranks} ranks per node"
            hint = "give cpus_per_task"
            raise InputError(message, field="cpus_per_gpu", value=given["cpus_per_gpu"], hint=hint)
        fields["resources.cpus_per_rank"] = cpus
    for name, count in (
        ("mem_per_cpu", ranks * (cpus or resources.cpus_per_rank)),
        ("mem_per_gpu", gpus.count),
    ):
        if name in given:
            each_mb = _converted(given, name, lambda size: parse_mebibytes(str(size)))
            if not count:
                hint = "give gpus_per_node, or mem_gb"
                raise InputError("needs GPUs", field=name, value=given[name], hint=hint)
            fields["resources.memory"] = f"{each_mb * count}M"
    events = str(given.get("mail_type", "")).lower().split(",")
    if {"mail_user", "mail_type"} & given.keys() and "none" not in events:
        mail = {"to": given.get("mail_user") or getpass.getuser()}
        on = {"on": _ALL_EVENTS if "all" in events else events} if any(events) else {}
        fields["resources.mail"] = {**mail, **on}
    return fields, [_directive(name, value) for name, value in options.items()]


def _converted(given: Parameters, name: str, convert: Callable[[Any], T]) -> T:
    try:
        return convert(given[name])
    except ValueError as error:
        hint = "as for the option of sbatch"
        raise InputError(str(error), field=name, value=str(given[name]), hint=hint) from error


def _directive(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def _run_name(job_id: str) -> str:
    return re.sub(r"_(\d+)$", r".\1", job_id)


def _after(dependency: str) -> list[str]:
    """Return `afterok:7:8,afterany:9`, as sbatch takes it, in the form of the field `after`."""
    runs = []
    for part in str(dependency).split(","):
        kind, *jobs = part.split(":")
        if kind not in _ENDS or not jobs:
            raise InputError(
                "must be afterok, afterany or afternotok, each with the ids of jobs",
                field="dependency",
                value=dependency,
                hint="such as afterok:4711, or hpml_after=[job.job_id]",
            )
        runs += [f"{_ENDS[kind]}:{_run_name(job)}" for job in jobs]
    return runs


_AS_WRITTEN: dict[str, Callable[[Any], object]] = {
    "name": job_name,
    "job_name": job_name,
    "after": lambda jobs: [_run_name(job) for job in ([jobs] if isinstance(jobs, str) else jobs)],
    "dependency": _after,
    "mem_gb": lambda size: f"{math.ceil(size * 1024)}M",
    "timeout_min": lambda minutes: format_time(math.ceil(minutes * 60)),
    "setup": lambda lines: lines if isinstance(lines, str) else "\n".join(lines),
}
