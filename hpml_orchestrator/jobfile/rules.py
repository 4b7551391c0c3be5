"""What is wrong with a job whose values are all right by themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.jobfile.paths import texts_of
from hpml_orchestrator.jobfile.text import (
    BRACES,
    FIXED_PLACEHOLDERS,
    NODE_DIRECTORIES,
    PER_RANK,
    PLACEHOLDER,
    intended_placeholder,
)
from hpml_orchestrator.records.job import PER_RUN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hpml_orchestrator.records.job import Checkpoint, Environment, Job, Resources

_NO_CONTAINERS = {
    ("mpirun", "pyxis"): "is a part of srun",
    ("horovodrun", "pyxis"): "is a part of srun",
    ("mpirun", "enroot"): "hides Open MPI's sockets",
}
"""Launchers and engines that do not fit, and why."""

_THERE_ARE = "; there are {run.id}, {array.index}, and {run.dir} at the beginning"


_ADVICE = {
    "stage": "stage data under that name",
    "point": "a sweep alone has points",
    "run": "there are {run.dir} and {run.id}",
    "local": "there is {local.dir}",
    "shm": "there is {shm.dir}",
    "array": "there is {array.index}",
    "job": "there is {job.id}",
    "checkpoint": "there is {checkpoint.dir}",
    "env": "a variable's name has letters, digits and _",
}
_WITH_PLACEHOLDERS = re.compile(r"(args|command|collect|environment\.variables)\b")
_OWN_PLACEHOLDERS = re.compile(r"(environment\.setup|checkpoint\.directory)\b")  # see the field


def contradictions(job: Job) -> Iterator[InputError]:
    """Yield what the fields of a job must not say together."""
    yield from _program(job)
    yield from _resources(job.resources)
    yield from _environment(job.environment)
    yield from _launcher(job)
    yield from _data(job)
    yield from _checkpoint(job)


def _program(job: Job) -> Iterator[InputError]:
    given = [name for name in ("script", "module", "command") if getattr(job, name)]
    if len(given) != 1:
        listed = " and ".join(given) or "none of them"
        yield InputError(f"give exactly one of script, module and command, not {listed}")


def _resources(resources: Resources) -> Iterator[InputError]:
    shared, gpus, ranks = resources.ranks_per_gpu, resources.gpu_count, resources.ranks_per_node
    fault = ""
    if shared > 1 and not gpus:
        fault = "needs GPUs to share: give `gpus`, or leave it out"
    elif shared > 1 and ranks is not None and -(-ranks // gpus) != shared:
        fault = (
            f"{shared} ranks on each of {gpus} GPUs are {shared * gpus} ranks per node, but "
            f"ranks_per_node is {ranks}: leave one of the two out"
        )
    if fault:
        yield InputError(fault, field="resources.ranks_per_gpu", value=shared)
    if resources.memory is not None and resources.memory_per_cpu is not None:
        yield InputError("give memory or memory_per_cpu, not both", field="resources")


def _environment(environment: Environment) -> Iterator[InputError]:
    if environment.conda is not None and environment.venv is not None:
        yield InputError("give conda or venv, not both", field="environment")
    container, field = environment.container, "environment.container"
    if container is None or container.engine != "enroot":
        return
    if re.search("[:#]", container.image):
        message = (
            "`enroot start` takes no reference: make a file with `enroot import`, or use "
            "`engine: pyxis`"
        )
        yield InputError(message, field=f"{field}.image", value=container.image)
    if re.search(r"\s", "".join([container.image, *container.mounts])):
        yield InputError("image and mounts: enroot cannot mount paths with blanks", field=field)


def _launcher(job: Job) -> Iterator[InputError]:
    if job.mpi != "none" and job.launcher != "srun":
        message = (
            f"needs `launcher: srun`; with {job.launcher}, which starts the ranks itself, leave "
            "the field out"
        )
        yield InputError(message, field="mpi", value=job.mpi)
    nodes, container = job.resources.nodes, job.environment.container
    if job.launcher == "horovodrun" and nodes > 1:
        message = (
            f"horovodrun starts ranks on one node only, and resources.nodes is {nodes}: use "
            "`launcher: mpirun`, or `launcher: srun` with `mpi: pmix`; both need a Horovod that "
            "was built with MPI"
        )
        yield InputError(message, field="launcher")
    engine = container.engine if container is not None else ""
    if why := _NO_CONTAINERS.get((job.launcher, engine)):
        message = (
            f"{job.launcher} cannot start ranks in a container of {engine}, which {why}: use "
            "`launcher: srun`, or `engine: apptainer`"
        )
        yield InputError(message, field="launcher")


def _data(job: Job) -> Iterator[InputError]:
    names = [stage.name for stage in job.stage]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield InputError(f"the name {name!r} is used twice", field="stage")
    for index, stage in enumerate(job.stage):
        if stage.trust_mtime and not stage.keep:
            message = "is for data that is kept; add `keep: true`"
            yield InputError(message, field=f"stage.{index}.trust_mtime")
    places = [(entry.target, entry.name) for entry in job.collect]
    for index, place in enumerate(places):
        if place in places[:index]:
            where = f"{place[0]}/RUN/NODE/{place[1]}, as of collect.{places.index(place)}"
            message = f"its results would be {where}: use another `target`"
            yield InputError(message, field=f"collect.{index}")


def _checkpoint(job: Job) -> Iterator[InputError]:
    own, field = job.checkpoint, "checkpoint.directory"
    if fault := _placeholder_fault(own):
        yield InputError(fault, field=field, value=own.directory)
    if not own.enabled:
        return
    if job.array is not None and not own.is_per_run:
        message = (
            f"{own.directory} would be the directory of every task: put {{run.id}} or "
            "{array.index} into it, or give a relative path"
        )
        yield InputError(message, field=field)
    for option in job.resources.extra:
        if option.partition("=")[0] == "--signal":
            message = (
                f"{option} would reach hpml's own processes, too: use `checkpoint.signal` for the "
                "signal and `checkpoint.lead` for the time"
            )
            yield InputError(message, field="resources.extra")


def _placeholder_fault(own: Checkpoint) -> str:
    """Return what is wrong with the placeholders of a directory; empty for nothing."""
    path = own.directory.removeprefix("{run.dir}")
    for match in BRACES.finditer(path):
        shown, name = match[0], match[1]
        if name == "job.id":
            return "{job.id} changes when the run continues: use {run.id}"
        if not PLACEHOLDER.fullmatch(shown):
            meant = intended_placeholder(name)
            if meant is not None:
                advice = f"; did you mean {{{meant}}}?" if meant else _THERE_ARE
                return f"{shown} names nothing{advice}"
        elif name not in PER_RUN:
            return f"{shown} cannot be used here{_THERE_ARE}"
    return "names an unknown user: give an absolute path" if path.startswith("~") else ""


def wrong_placeholders(job: Job, points: Collection[str] = ()) -> Iterator[InputError]:
    """Yield an error for each placeholder without a meaning, of a job as it is written.

    Args:
        job: the job.
        points: names of a sweep's values, which arguments refer to as `{point.NAME}`.
    """
    known = [*(f"stage.{one.name}" for one in job.stage), *(f"point.{name}" for name in points)]
    needed = {
        "array.index": "" if job.array is not None else "an array, such as `array: 0-9`",
        "checkpoint.dir": "" if job.checkpoint.enabled else "`checkpoint: true`",
    }
    for field, value in texts_of(job):
        if _WITH_PLACEHOLDERS.match(field):
            faults = _placeholder_faults(value, known, needed=needed, field=field)
        elif field == "checkpoint.directory" and "{array.index}" in value and needed["array.index"]:
            faults = iter([f"{{array.index}} needs {needed['array.index']}"])
        elif PLACEHOLDER.search(value) and not _OWN_PLACEHOLDERS.match(field):
            faults = iter(["has no placeholders; args, command and environment.variables have"])
        else:
            continue
        for message in faults:
            yield InputError(message, field=field, value=value)


def _placeholder_faults(
    value: str, known: Sequence[str], *, needed: Mapping[str, str], field: str
) -> Iterator[str]:
    for match in BRACES.finditer(value):
        shown, name = match[0], match[1]
        follows_dollar = value[: match.start()].endswith("$")
        if not PLACEHOLDER.fullmatch(shown):
            # ${name} belongs to a shell or to OmegaConf, and code may contain {an.expression}.
            meant = None if follows_dollar else intended_placeholder(name, known)
            around = value.replace(shown, "")
            if meant is None or (not meant and "." in name and re.search(r"[\s'\"()]", around)):
                continue
            fault = _names_nothing(shown, meant)
        elif follows_dollar:
            fault = f"the $ before {shown} is passed on as text: leave it out"
        else:
            fault = _fault_of(name, known, needed=needed, at_start=field.startswith("collect."))
        if fault:
            yield f"{fault} (the text itself is written {{{shown.replace(' ', '')}}})"


def _fault_of(name: str, known: Sequence[str], *, needed: Mapping[str, str], at_start: bool) -> str:
    """Return the fault of a placeholder; `at_start`: it is filled before setup has run."""
    root, _, rest = name.partition(".")
    if needed.get(name):
        return f"{{{name}}} needs {needed[name]}"
    if root == "point" and at_start:
        return f"{{{name}}} is not known here; results of each run are in TARGET/RUN"
    if name in known or name in FIXED_PLACEHOLDERS:
        return ""
    if root == "env" and not rest[:1].isdigit():
        if at_start:
            late = f"{{{name}}} is not known here: it is read after environment.setup"
            return "" if rest in NODE_DIRECTORIES else late
        # The launcher sets these in each rank's process. In the batch script they are empty or,
        # worse, those of the first task.
        per_rank = f"{{{name}}} is not the same in all ranks: read {rest} in the program"
        return per_rank if rest in PER_RANK else ""
    return _names_nothing(f"{{{name}}}", nearest(name, [*FIXED_PLACEHOLDERS, *known]))


def _names_nothing(shown: str, meant: str) -> str:
    root = shown.strip("{ }").partition(".")[0].lower()
    advice = f"did you mean {{{meant}}}?" if meant else _ADVICE.get(root, "")
    return f"{shown} names nothing; {advice}" if advice else f"{shown} names nothing"


def wrong_targets(job: Job) -> Iterator[InputError]:
    """Yield an error for each target of `collect` that has more than a place in front of it."""
    for index, entry in enumerate(job.collect):
        rest = entry.target.removeprefix("{run.dir}")
        if (rest != entry.target and rest[:1] not in {"", "/"}) or re.search(r"[{}$*?]", rest):
            message = "may begin with {run.dir}, ~ or /; all else is taken as it is written"
            yield InputError(message, field=f"collect.{index}.target", value=entry.target)
