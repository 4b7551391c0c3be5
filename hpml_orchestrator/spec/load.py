"""Read a job file, lay the command line over it, and return a complete job or a clear error."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from hpml_orchestrator.errors import InputError, NotFoundError, nearest
from hpml_orchestrator.spec import monitor
from hpml_orchestrator.spec.binding import POLICY_WORDS, spelled_out
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.overlay import covers, leaves, merged, values
from hpml_orchestrator.spec.regular import open_regular
from hpml_orchestrator.spec.words import field_for

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from hpml_orchestrator.spec.site_load import ResolvedSite

__all__ = ["ResolvedJob", "absolute", "explained", "load_job", "parse_setting", "read_mapping"]

_MAX_FILE_BYTES = 4 * 1024 * 1024
_INDEX_DIGITS = 6
_PART_CHARS = 60


@dataclass(frozen=True)
class ResolvedJob:
    """A complete job, and where each of its values came from.

    Attributes:
        job: the job; every path in it is absolute.
        source: absolute path of the job file.
        origins: dotted field -> `command line`, `job file`, `site profile FILE`, `default` or
            `measured`.
    """

    job: Job
    source: Path
    origins: dict[str, str]


def load_job(
    path: str | Path,
    settings: list[tuple[str, Any]] | None = None,
    site: ResolvedSite | None = None,
) -> ResolvedJob:
    """Load a job from a YAML 1.2 or TOML file.

    Args:
        path: the job file; `.toml` is read as TOML, all else as YAML.
        settings: dotted field and value pairs of the command line; later ones win.
        site: the site profile, whose defaults lie below the job file.

    Raises:
        NotFoundError: there is no such file.
        InputError: something in it is wrong; every finding is named with its field.
    """
    source = Path(os.path.abspath(path))
    data = monitor.spelled_out(spelled_out(read_mapping(source, _JOB_FILE)))
    given = dict.fromkeys(values(data), "job file")
    for name, value in settings or []:
        field = _inner(name, value)
        _set(data, field, value)
        given = {
            name: origin for name, origin in given.items() if not f"{name}.".startswith(f"{field}.")
        }
        given.update(dict.fromkeys(values(value, field), "command line"))
    switched = monitor.switched_on(data)
    if switched is not None:
        data = switched
        given["monitor.enabled"] = min(
            {origin for name, origin in given.items() if covers(name, "monitor")} or {"job file"}
        )
    if site is not None:
        below = _without_rivals(site.site.defaults, data)
        data = merged(below, data)
        from_site = {
            name: f"site profile {site.origin(f'defaults.{name}')}" for name in values(below)
        }
        given = {**from_site, **given}
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        raise explained(error, hint=f"in {source}; `hpml schema job` prints every field") from None
    job = absolute(job, source.parent)
    origins = {name: _origin(given, name) for name in leaves(job.model_dump())}
    return ResolvedJob(job, source, origins)


def parse_setting(text: str) -> tuple[str, Any]:
    """Return field and value of `resources.nodes=4`; the value is read as YAML.

    Raises:
        InputError: it has no `=`, or the value is no YAML.
    """
    field, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", field):
        raise InputError(
            "must be FIELD=VALUE, such as resources.nodes=4", field="--set", value=text
        )
    return field, _yaml(value, f"--set {field}")


@dataclass(frozen=True)
class _Kind:
    """What messages say of one kind of file."""

    name: str
    example: str
    schema: str


_JOB_FILE = _Kind("job file", "`name: …` and `script: train.py`", "job")
SITE_PROFILE = _Kind("site profile", '`cluster = "name"`', "site")


def read_mapping(source: Path, kind: _Kind) -> dict[str, Any]:
    """Return the fields of a file, not looked at yet.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read, is too large, or holds no mapping.
    """
    try:
        with open_regular(source) as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no such {kind.name}: {source}",
            hint=f"{kind.example} make a first one; `hpml schema {kind.schema}` prints every field",
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise InputError(
            f"{source} is over {_MAX_FILE_BYTES} bytes, the most that a {kind.name} may have",
            hint=f"keep data in files of their own and name them in the {kind.name}",
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start})", hint="save it as plain text, UTF-8"
        ) from error
    if source.suffix.lower() == ".toml":
        from hpml_orchestrator.spec.document import parse_toml  # noqa: PLC0415

        data: Any = parse_toml(text, str(source))
    else:
        data = _yaml(text, str(source))
    if not isinstance(data, dict):
        raise InputError(
            f"{source} holds no fields",
            hint=f"a {kind.name} is a mapping: {kind.example}; "
            f"`hpml schema {kind.schema}` prints every field",
        )
    return data


def _yaml(text: str, what: str) -> Any:
    from hpml_orchestrator.spec.document import parse_yaml  # noqa: PLC0415 - where a file is read

    return parse_yaml(text, what)


def _inner(name: str, value: Any) -> str:
    """Return the field that a value is meant for, where a short one stands for a mapping."""
    if name == "binding" and isinstance(value, str) and value in POLICY_WORDS:
        return "binding.policy"
    return "monitor.enabled" if name == "monitor" and isinstance(value, bool) else name


def _set(data: dict[str, Any], field: str, value: Any) -> None:
    """Put a value at a dotted place; what is not there, or empty, becomes a mapping on the way."""
    *parents, last = field.split(".")
    here: Any = data
    for depth, parent in enumerate(parents):
        place = ".".join(parents[: depth + 1])
        if isinstance(here, list):
            here = here[_index(here, parent, place, value)]
        else:
            if here.get(parent) is None:
                here[parent] = {}
            here = here[parent]
        if not isinstance(here, (dict, list)):
            raise InputError("has no fields of its own", field=place, value=field)
    if isinstance(here, list):
        here[_index(here, last, field, value)] = value
    else:
        here[last] = value


def _index(entries: list[Any], part: str, field: str, value: Any) -> int:
    if part.isascii() and part.isdecimal() and len(part) <= _INDEX_DIGITS:
        index = int(part)
        if index < len(entries):
            return index
    whole = field.rpartition(".")[0]
    if len(entries) > 1:
        there = f"{len(entries)} entries, 0 to {len(entries) - 1}"
    else:
        there = "one entry, number 0" if entries else "no entries"
    raise InputError(
        f"{whole} has {there}",
        field=field,
        value=value,
        hint=f"--set replaces an entry that is there, or the whole list: --set '{whole}=[…]'",
    )


def _origin(given: dict[str, str], name: str) -> str:
    """Return where a value came from; one that has a part of the command line came from there."""
    found = {origin for field, origin in given.items() if covers(field, name)}
    own = next((one for one in ("command line", "job file") if one in found), "")
    return own or min(found, default="default")


def _without_rivals(defaults: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the site's defaults without those that a choice of the job rules out."""
    chosen, below = data.get("environment"), defaults.get("environment")
    if not isinstance(chosen, dict) or not isinstance(below, dict):
        return defaults
    rivals = {
        other
        for one, other in (("conda", "venv"), ("venv", "conda"))
        if chosen.get(one) is not None
    }
    kept = {key: value for key, value in below.items() if key not in rivals}
    return {**defaults, "environment": kept}


def absolute(job: Job, base: Path) -> Job:
    """Make paths absolute: against the job file's directory, programs against the workdir."""

    def at(path: str, root: str | Path) -> str:
        return os.path.normpath(os.path.join(root, os.path.expanduser(path)))

    workdir = at(job.workdir, base)
    changes: dict[str, Any] = {"workdir": workdir}
    if job.script is not None:
        changes["script"] = at(job.script, workdir)
    changes["stage"] = [
        stage.model_copy(update={"source": at(stage.source, base)}) for stage in job.stage
    ]
    environment: dict[str, Any] = {}
    if job.environment.venv is not None:
        environment["venv"] = at(job.environment.venv, base)
    conda = job.environment.conda
    if conda is not None and "/" in conda:
        environment["conda"] = at(conda, base)
    if "/" in job.environment.python:
        environment["python"] = at(job.environment.python, base)
    container = job.environment.container
    if container is not None and container.engine == "apptainer" and "://" not in container.image:
        environment["container"] = container.model_copy(update={"image": at(container.image, base)})
    changes["environment"] = job.environment.model_copy(update=environment)
    monitored = {
        name: at(value, base)
        for name in ("web_config", "targets")
        if (value := getattr(job.monitor, name)) is not None
    }
    changes["monitor"] = job.monitor.model_copy(update=monitored)
    return job.model_copy(update=changes)


def explained(
    error: ValidationError,
    *,
    hint: str,
    model: type[BaseModel] = Job,
    prefix: str = "",
) -> InputError:
    """Turn pydantic's findings into one error that names each field, value and what is right.

    Args:
        error: the findings.
        hint: where they are, and where to look.
        model: what was validated, for the nearest right name of an unknown field.
        prefix: dotted place of the model in the file, with a dot at its end.
    """
    findings: list[str] = []
    first_field, first_value = "", None
    for finding in error.errors(include_url=False, include_context=True):
        unknown = finding["type"] == "extra_forbidden"
        location = list(finding["loc"])
        if not unknown:
            location = [part for part in location if not _is_internal(part)]
        place = [_short(str(part)) for part in location]
        field = prefix + ".".join(place)
        value = finding.get("input")
        message = (
            _NO_FIELD + _nearest(place, model, prefix) if unknown else _message(finding, value)
        )
        if unknown or finding["type"] == "missing" or isinstance(value, (dict, list)):
            value = None
        shown = InputError(message, field=field.removesuffix("."), value=value)
        if not findings:
            first_field, first_value = field, value
        findings.append(str(shown))
    unique = list(dict.fromkeys(findings))
    made = InputError("\n".join(unique), hint=hint)
    made.field, made.value = first_field, first_value
    return made


def _message(finding: ErrorDetails, value: Any) -> str:
    """Return what would be right, in words that say nothing of Python or pydantic."""
    kind, context = finding["type"], finding.get("ctx") or {}
    plain = _MESSAGES.get(kind)
    if plain is not None:
        message = plain.format(**context)
        if value is None and kind != "missing":
            message += ", and there is nothing: fill it in or leave it out"
        elif kind == "string_type" and not isinstance(value, (dict, list)):
            message += ": put it in quotes"
        return message
    message = finding["msg"].removeprefix("Value error, ")
    if message.startswith("Input should be "):
        message = "must be " + message.removeprefix("Input should be ")
    return message[0].lower() + message[1:]


_NO_FIELD = "there is no such field"
_MESSAGES = {
    "missing": "must be given",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names and values",
    "model_type": "must be a mapping of fields",
    "invalid_key": "a field's name must be text",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
}


def _short(part: str) -> str:
    """Return a part of a field's name, cut where it is absurdly long and on one line."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in part)
    return shown if len(shown) <= _PART_CHARS else f"{shown[:_PART_CHARS]}…"


def _is_internal(part: object) -> bool:
    """Whether a place is pydantic's own (a validator's name), not the user's."""
    return isinstance(part, str) and (part.startswith("function-") or part == "[key]")


def _nearest(place: list[str], model: type[BaseModel], prefix: str) -> str:
    """Return a question after the field that an unknown one means; empty when none is near."""
    meant = field_for(place[-1], place[:-1]) if model is Job else ""
    if meant:
        return f"; did you mean {prefix}{meant}?"
    parent: type[BaseModel] | None = _model_at(place[:-1], model)
    word = place[-1]
    if parent is not None:
        near = nearest(word, parent.model_fields)
        if near:
            return f"; did you mean {prefix}{'.'.join([*place[:-1], near])}?"
    everywhere = {name.rsplit(".", 1)[-1]: name for name in _all_fields(model)}
    near = nearest(word, everywhere)
    return f"; did you mean {prefix}{everywhere[near]}?" if near else ""


def _children(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the fields of a model that are models themselves, lists of them included."""
    found = {}
    for name, field in model.model_fields.items():
        stack: list[Any] = [field.annotation]
        while stack:
            kind = stack.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
            stack.extend(getattr(kind, "__args__", ()))
    return found


def _model_at(place: list[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model at a place; the names of a mapping's entries count as no step."""
    model: type[BaseModel] | None = root
    entries = False  # inside a mapping of models, whose keys are the user's
    for part in place:
        if part.isdigit() or entries:
            entries = False
            continue
        if model is None:
            return None
        entries = _is_mapping(model, part)
        model = _children(model).get(part)
    return model


def _is_mapping(model: type[BaseModel], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and getattr(field.annotation, "__origin__", None) is dict


def _all_fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    children = _children(model)
    for name in model.model_fields:
        names.append(f"{prefix}{name}")
        if name in children:
            names.extend(_all_fields(children[name], f"{prefix}{name}."))
    return names
