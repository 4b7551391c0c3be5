"""Validate the fields of a job file, report what is wrong, and return the job."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.jobfile.text import (
    BRACES,
    FIXED_PLACEHOLDERS,
    NODE_DIRECTORIES,
    PER_RANK,
    PLACEHOLDER,
    absolute,
    intended_placeholder,
    texts_of,
)
from hpml_orchestrator.records.job import PER_RUN, Job, JobPart

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from pydantic_core import ErrorDetails

    from hpml_orchestrator.records.job import Checkpoint, Environment, Resources

_NO_CONTAINERS = {
    ("mpirun", "pyxis"): "is a part of srun",
    ("horovodrun", "pyxis"): "is a part of srun",
    ("mpirun", "enroot"): "hides Open MPI's sockets",
}
"""Launchers and engines that do not fit together, and why."""

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
_OWN_PLACEHOLDERS = re.compile(r"(environment\.setup|checkpoint\.directory)\b")  # see the fields


class Model(BaseModel):
    """Base of all models: it refuses unknown fields, and nothing changes after validation.

    The docstring below a field is its description in the JSON Schema (`schema.py`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def contradictions(job: Job) -> Iterator[InputError]:
    """Yield contradictions between the fields of a job."""
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
    """Yield an error for each placeholder without a meaning, in a job as written.

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
    """Return the fault of a placeholder; `at_start`: it is filled in before setup has run."""
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
    """Yield an error for each target of `collect` with more than one leading place."""
    for index, entry in enumerate(job.collect):
        rest = entry.target.removeprefix("{run.dir}")
        if (rest != entry.target and rest[:1] not in {"", "/"}) or re.search(r"[{}$*?]", rest):
            message = "may begin with {run.dir}, ~ or /; all else is taken as it is written"
            yield InputError(message, field=f"collect.{index}.target", value=entry.target)


# Convert pydantic's findings to one error with each field, its value and the right form.

ModelType = type[BaseModel] | type[JobPart]

_PART_CHARS = 60

_SYNONYMS = {
    "name": "job_name jobname",
    "script": "python_script entrypoint entry_point",
    "command": "cmd executable program",
    "args": "arguments argv script_args",
    "workdir": "chdir cwd working_dir working_directory",
    "array": "job_array array_tasks",
    "after": "dependency dependencies depends_on depend afterok",
    "stage": "data dataset datasets staging",
    "binding": "cpu_bind gpu_bind bind bind_to map_by numa_binding affinity cpu_affinity",
    "binding.loader_workers": "num_workers dataloader_workers workers",
    "binding.hardware_threads": "threads_per_core hyperthreading hyperthreads smt",
    "resources.nodes": "nnodes num_nodes node_count",
    "resources.gpus": "gpus_per_node gpus_per_task gres gpu num_gpus ngpus gpu_type",
    "resources.ranks_per_node": "ntasks_per_node ntasks tasks_per_node nproc_per_node "
    "processes_per_node ranks",
    "resources.ranks_per_gpu": "ntasks_per_gpu tasks_per_gpu processes_per_gpu",
    "resources.cpus_per_rank": "cpus_per_task cpus cpus_per_gpu num_cpus cores threads",
    "resources.memory": "mem ram mem_per_node mem_gb mem_per_gpu",
    "resources.memory_per_cpu": "mem_per_cpu",
    "resources.time": "walltime wall_time time_limit timelimit timeout time_min timeout_min",
    "resources.partition": "queue partitions",
    "resources.account": "project",
    "resources.constraint": "features feature",
    "resources.mail": "email mail_user mail_type",
    "resources.extra": "sbatch slurm reservation nodelist exclude nodefile licenses "
    "additional_parameters",
    "environment.modules": "modules module_load",
    "environment.conda": "conda_env",
    "environment.setup": "setup prologue pre_command init_commands",
    "environment.venv": "virtualenv virtual_env",
    "environment.python": "interpreter python_path",
    "environment.variables": "variables env envs env_vars vars setenv",
    "environment.inherit": "export",
    "environment.container": "apptainer singularity docker pyxis enroot",
    "environment.container.image": "image container_image sif",
    "environment.container.mounts": "container_mounts mounts",
}
_FIELD_OF = {word: field for field, words in _SYNONYMS.items() for word in words.split()}
# Fields for which options of sbatch and torchrun are suggested; others have their own words.
_PLACES = ("", "resources", "environment", "environment.container", "binding")

_MESSAGES = {
    "missing": "must be given",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "list_type": "must be a list (in YAML, each entry begins with `- `)",
    "tuple_type": "must be a list (in YAML, each entry begins with `- `)",
    "dict_type": "must be a mapping of names and values",
    "model_type": "must be a mapping of fields",
    "dataclass_type": "must be a mapping of fields",
    "invalid_key": "a field's name must be text",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_pattern_mismatch": "must match the regular expression {pattern}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
}
_SHORT_FORMS = {
    "Binding": "must be a policy such as numa, or a mapping of fields such as policy and verify",
    "Checkpoint": "must be true or false, or a mapping of fields such as directory and requeue",
    "Monitor": "must be true or false, or a mapping of fields such as listen and targets",
}


def problems_of(
    error: ValidationError, model: ModelType = Job, prefix: str = ""
) -> list[InputError]:
    """Return one error per finding, with its field, its value and the right form.

    Args:
        error: pydantic's findings.
        model: what was validated, to find the nearest name of an unknown field.
        prefix: dotted place of the model in the file, ending with a dot.
    """
    problems = []
    for finding in error.errors(include_url=False):
        is_unknown = finding["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        # pydantic mixes names of its validators with the user's; the last part of an unknown field
        # is always the user's own word.
        *inner, last = finding["loc"] or ("",)
        parts = [part for part in inner if not _is_internal(part)]
        parts += [last] * (is_unknown or not _is_internal(last))
        place = [_printable(str(part)) for part in parts]
        value = finding.get("input")
        if is_unknown:
            field = _nearest_field(place, model)
            message = f"unknown field{f'; did you mean {prefix}{field}?' * bool(field)}"
        else:
            message = _message(finding, value)
        if is_unknown or finding["type"] == "missing" or isinstance(value, (dict, list)):
            value = None
        field = (prefix + ".".join(place)).removesuffix(".")
        problems.append(InputError(message, field=field, value=value))
    return problems


def combined(problems: Sequence[InputError], hint: str) -> InputError:
    """Return one error for all problems, one line each, with the field and value of the first."""
    result = InputError("\n".join(dict.fromkeys(map(str, problems))), hint=hint)
    result.field, result.value = problems[0].field, problems[0].value
    result.problems = problems
    return result


def _message(finding: ErrorDetails, value: object) -> str:
    kind, context = finding["type"], finding.get("ctx") or {}
    message = _SHORT_FORMS.get(context.get("class_name", "")) or _MESSAGES.get(kind)
    if message is None:
        message = finding["msg"].removeprefix("Value error, ")
        if message.startswith("Input should be "):
            message = "must be " + message.removeprefix("Input should be ")
        return message[0].lower() + message[1:]
    message = message.format(**context)
    if value is None and kind != "missing":
        message += ", and there is nothing: fill it in or leave it out"
    elif kind == "string_type":
        message += _in_quotes(value)
    return message


def _in_quotes(value: object) -> str:
    """Return how to write a text that YAML parsed as something else: `{stage.set}` is a mapping."""
    if not isinstance(value, (dict, list)):
        return ": put it in quotes"
    inner = next(iter(value.items()), None) if isinstance(value, dict) and len(value) == 1 else None
    if inner is None or not isinstance(inner[0], str) or isinstance(inner[1], (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f", and this is a {kind}: {_printable(json.dumps(value, default=str))}"
    name, written = inner[0], getattr(inner[1], "written", inner[1])
    if written is None:
        return f', and YAML reads {{{name}}} as a mapping: put it in quotes, "{{{name}}}"'
    shown = str(written).lower() if isinstance(written, bool) else written
    wanted = f'"{name}: {shown}"'
    wanted = f"{name}={shown}, or {wanted} if the colon is meant" if name[:1] == "-" else wanted
    return f", and YAML reads `{name}: {shown}` as a mapping: write {wanted}"


def _printable(part: str) -> str:
    """Return a part of a field's name on one line; a very long one is shortened."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in part)
    return shown if len(shown) <= _PART_CHARS else f"{shown[:_PART_CHARS]}…"


def _is_internal(part: object) -> bool:
    return isinstance(part, str) and part.startswith(("function-", "["))


def _nearest_field(place: list[str], model: ModelType) -> str:
    """Return the known field that an unknown one probably means; empty if none is similar."""
    *parents, word = place
    synonym = _FIELD_OF.get(word.lower().replace("-", "_"), "")
    if synonym and model is Job and ".".join(parents) in _PLACES:
        return synonym
    around: ModelType = model
    for part in parents:  # an index or a user's name does not lead into another model
        if part in (inner := _types_of(around)):
            around = _inner_model(inner[part]) or around
    near = nearest(word, _types_of(around))
    if near:
        return ".".join([*parents, near])
    if any(part.isdigit() for part in parents):
        return ""  # an entry of a list has no field of another section
    by_name = {field.rpartition(".")[2]: field for field in _dotted_names(Job)}
    return by_name.get(nearest(word, by_name), "") if model is Job else ""


def _types_of(model: ModelType) -> Mapping[str, object]:
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    return get_type_hints(model)


def _dotted_names(model: ModelType, prefix: str = "") -> Iterator[str]:
    for name, hint in _types_of(model).items():
        yield prefix + name
        inner = _inner_model(hint)
        if inner is not None:
            yield from _dotted_names(inner, f"{prefix}{name}.")


def _inner_model(annotation: object) -> ModelType | None:
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return annotation
        if issubclass(annotation, JobPart):
            return annotation
    inner = (_inner_model(part) for part in get_args(annotation))
    return next((model for model in inner if model is not None), None)


# Convert the fields of a job file to a job: validate each value first, then their combination.


@functools.cache
def job_adapter() -> TypeAdapter[Job]:
    """Return pydantic's validator of jobs, created once."""
    return TypeAdapter(Job)


def wrong_fields(fields: Mapping[str, object], prefix: str = "") -> list[InputError]:
    """Return what is wrong with the fields of a job.

    Args:
        fields: complete fields of a job file.
        prefix: dotted place of the fields in the file, ending with a dot.
    """
    try:
        problems = [*contradictions(job_adapter().validate_python(fields))]
    except ValidationError as error:
        return problems_of(error, Job, prefix)
    return [InputError(one.message, field=prefix + one.field, value=one.value) for one in problems]


def resolved_job(
    fields: Mapping[str, object], base: Path, points: Collection[str], hint: str
) -> Job:
    """Return the job described by the fields of a job file, with absolute paths.

    Args:
        fields: fields of the file, the command line and a site profile.
        base: directory of the file.
        points: names of a sweep's values, which arguments refer to as `{point.NAME}`.
        hint: for the error.

    Raises:
        InputError: values are wrong; or each is valid, but not their combination. Every problem is
            named with its field.
    """
    try:
        job = job_adapter().validate_python(fields)
    except ValidationError as error:
        raise combined(problems_of(error), hint) from None
    resolved = absolute(job, base)
    problems = [*contradictions(resolved), *wrong_placeholders(job, points), *wrong_targets(job)]
    if problems:
        raise combined(problems, hint)
    return resolved
