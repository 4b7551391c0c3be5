"""Turn pydantic's findings into one error with each field, its value and the right form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.records.job import Job, JobPart

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = type[BaseModel] | type[JobPart]

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
# Fields at which options of sbatch and torchrun are suggestions; others have their own words.
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


def problems_of(error: ValidationError, model: Model = Job, prefix: str = "") -> list[InputError]:
    """Return one error per finding, with its field, its value and what would be right.

    Args:
        error: pydantic's findings.
        model: what was validated, for the nearest name of an unknown field.
        prefix: dotted place of the model in the file, with a dot at its end.
    """
    problems = []
    for finding in error.errors(include_url=False):
        is_unknown = finding["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        # pydantic puts names of its validators between the user's; the last part of an unknown
        # field is always the user's own word.
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
    """Return one error for all problems, a line each, with the field and value of the first."""
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
    """Return how to write a text that YAML read as something else: `{stage.set}` is a mapping."""
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


def _nearest_field(place: list[str], model: Model) -> str:
    """Return the dotted name that an unknown field probably means; empty if none is near."""
    *parents, word = place
    synonym = _FIELD_OF.get(word.lower().replace("-", "_"), "")
    if synonym and model is Job and ".".join(parents) in _PLACES:
        return synonym
    around: Model = model
    for part in parents:  # an index or a user-chosen name does not lead into another model
        if part in (inner := _types_of(around)):
            around = _inner_model(inner[part]) or around
    near = nearest(word, _types_of(around))
    if near:
        return ".".join([*parents, near])
    if any(part.isdigit() for part in parents):
        return ""  # an entry of a list has no field of another section
    by_name = {field.rpartition(".")[2]: field for field in _dotted_names(Job)}
    return by_name.get(nearest(word, by_name), "") if model is Job else ""


def _types_of(model: Model) -> Mapping[str, object]:
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    return get_type_hints(model)


def _dotted_names(model: Model, prefix: str = "") -> Iterator[str]:
    for name, hint in _types_of(model).items():
        yield prefix + name
        inner = _inner_model(hint)
        if inner is not None:
            yield from _dotted_names(inner, f"{prefix}{name}.")


def _inner_model(annotation: object) -> Model | None:
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return annotation
        if issubclass(annotation, JobPart):
            return annotation
    inner = (_inner_model(part) for part in get_args(annotation))
    return next((model for model in inner if model is not None), None)
