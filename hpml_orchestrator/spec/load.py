"""Load a job: command line over job file over site profile over defaults.

While values are merged, `origins` keeps the source of each dotted field. Only leaves have an
origin, so a mapping from the command line must first remove the origins of the fields inside it.
The site's defaults come last because they depend on the job: a job with conda ignores the site's
venv.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.spec.document import parse_yaml, read_mapping
from hpml_orchestrator.spec.job import Job, expand_shorthand
from hpml_orchestrator.spec.problems import combined, problems_of
from hpml_orchestrator.spec.text import (
    BRACES,
    FIXED_PLACEHOLDERS,
    NODE_DIRECTORIES,
    PER_RANK,
    PLACEHOLDER,
    intended_placeholder,
)

if TYPE_CHECKING:
    from hpml_orchestrator.spec.site import ResolvedSite

_INDEX_DIGITS = 6


@dataclass(frozen=True)
class ResolvedJob:
    """A complete job, and the source of each of its values.

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
    settings: list[tuple[str, object]] | None = None,
    site: ResolvedSite | None = None,
    points: Collection[str] = (),
    *,
    fields: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
) -> ResolvedJob:
    """Load a job from a YAML 1.2 or TOML file.

    Args:
        path: the job file; `.toml` is read as TOML, all else as YAML.
        settings: dotted field and value pairs of the command line; later ones win.
        site: the site profile, whose defaults lie below the job file.
        points: names of a sweep's values, which arguments refer to as `{point.NAME}`.
        fields: what `read_fields` returned for this file, where many jobs are made of it.
        arguments: of the command line, to append to `args`.

    Raises:
        NotFoundError: the file does not exist.
        InputError: something in it is wrong; every finding is named with its field.
    """
    source = Path(os.path.abspath(path))
    # A sweep loads thousands of jobs from one file and changes each: copy what is shared.
    fields = read_fields(path) if fields is None else copy.deepcopy(fields)
    data = {name: expand_shorthand(name, value) for name, value in fields.items()}
    # `given` has the origin of each field, for `--explain`. It changes with `data`: a setting of
    # the command line replaces whatever was at its place, also the fields below it, whose origins
    # would otherwise be reported for values that are gone.
    given = dict.fromkeys(leaves(data, empty=False), "job file")
    for name, written in settings or []:
        value, field = expand_shorthand(name, written), name
        if value is not written and isinstance(value, dict):
            ((inner, value),) = value.items()  # a short form keeps the other inner fields
            field = f"{name}.{inner}"
        _set(data, field, value)
        kept = {other: origin for other, origin in given.items() if not is_in(other, field)}
        given = kept | dict.fromkeys(leaves(value, field, empty=False), "command line")
    for name in ("monitor", "checkpoint"):
        # Settings in a job file switch the feature on. A site's defaults do not: they only
        # configure it for the jobs that use it.
        mapping = data.get(name)
        if isinstance(mapping, dict) and "enabled" not in mapping:
            data[name] = {"enabled": True, **mapping}
            origins = {origin for field, origin in given.items() if overlaps(field, name)}
            given[f"{name}.enabled"] = min(origins, default="job file")
    # The site comes last although it ranks lowest: which of its defaults apply depends on what the
    # job says, as with `venv` of a site and `conda` of a job.
    if site is not None:
        below = _drop_conflicting_defaults(site.site.defaults, data)
        data = merged(below, data)
        given = {
            name: f"site profile {site.origin(f'defaults.{name}')}"
            for name in leaves(below, empty=False)
        } | given
    if arguments:
        args = data.get("args") or []
        data["args"] = [*args, *arguments] if isinstance(args, list) else args
        given["args"] = "command line"
    data.setdefault("workdir", ".")
    # Before validation, so that one run reports the faults of all kinds: pydantic's errors and
    # these come in one message.
    problems = [*_unknown_placeholders(data, points), *_wrong_targets(data)]
    make_absolute(data, source.parent)
    # `hpml bench` has no job file: its fields are given, and the path only places them.
    where = f"in {source}; " if source.is_file() else ""
    hint = f"{_argument(settings or [])}{where}`hpml schema job` prints every field"
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        raise combined([*problems_of(error), *problems], hint) from None
    if problems:
        raise combined(problems, hint)
    origins_of = {name: _origin(given, name) for name in leaves(job.model_dump())}
    return ResolvedJob(job, source, origins_of)


def _argument(settings: list[tuple[str, object]]) -> str:
    meant = [f"{name}={one}" for name, one in settings if name not in Job.model_fields]
    meant = [one for one in meant if "." not in one.partition("=")[0]]
    return f"an argument of the program goes to the end: -- --{meant[0]}; " if meant else ""


def read_fields(path: str | Path) -> dict[str, object]:
    """Return the fields of a job file, not validated yet.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it cannot be read, holds no mapping, or is a sweep file.
    """
    source = Path(os.path.abspath(path))
    fields = read_mapping(source, "job file")
    if {"base", "mode"} <= fields.keys():
        raise InputError(f"{source} is a sweep file", hint=f"hpml sweep run {path}")
    return fields


def parse_setting(text: str) -> tuple[str, object]:
    """Return field and value of `resources.nodes=4`; the value is read as YAML.

    Raises:
        InputError: it has no `=`, or the value is not YAML.
    """
    field, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", field):
        raise InputError(
            "must be FIELD=VALUE, such as resources.nodes=4", field="--set", value=text
        )
    return field, parse_yaml(value, f"--set {field}")


def _set(data: dict[str, object], field: str, value: object) -> None:
    """Put a value at a dotted place; mappings on the way that are missing or empty are made."""
    parts = field.split(".")
    here: Any = data
    for depth, part in enumerate(parts, 1):
        place = ".".join(parts[:depth])
        if not isinstance(here, (dict, list)):
            raise InputError("has no inner fields", field=place.rpartition(".")[0], value=field)
        key: Any = _index(here, part, place, value) if isinstance(here, list) else part
        if depth == len(parts):
            here[key] = value
        elif isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]


def _index(entries: list[object], part: str, field: str, value: object) -> int:
    if part.isascii() and part.isdecimal() and len(part) <= _INDEX_DIGITS:
        index = int(part)
        if index < len(entries):
            return index
    whole = field.rpartition(".")[0]
    raise InputError(
        f"{whole} has no such entry; it is a list of length {len(entries)}, numbered from 0",
        field=field,
        value=value,
        hint=f"--set replaces an existing entry, or the whole list: --set '{whole}=[…]'",
    )


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


def _unknown_placeholders(data: dict[str, object], points: Collection[str]) -> Iterator[InputError]:
    """Yield an error for each placeholder without a meaning; fields are not validated yet."""
    names = [stage.get("name") for stage in _entries(data, "stage") if isinstance(stage, dict)]
    known = [*(f"stage.{name}" for name in names), *(f"point.{name}" for name in points)]
    own = data.get("checkpoint")
    needed = {
        "array.index": "" if data.get("array") is not None else "an array, such as `array: 0-9`",
        "checkpoint.dir": ""
        if isinstance(own, dict) and own.get("enabled") is not False
        else "`checkpoint: true`",
    }
    for field, value in _texts(data):
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


def _texts(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from _texts(inner, f"{field}.{key}" if field else str(key))


def _wrong_targets(data: dict[str, object]) -> Iterator[InputError]:
    for index, entry in enumerate(_entries(data, "collect")):
        target = entry.get("target") if isinstance(entry, dict) else None
        if not isinstance(target, str):
            continue
        rest = target.removeprefix("{run.dir}")
        if (rest != target and rest[:1] not in {"", "/"}) or re.search(r"[{}$*?]", rest):
            message = "may begin with {run.dir}, ~ or /; all else is taken as it is written"
            yield InputError(message, field=f"collect.{index}.target", value=target)


def _entries(data: dict[str, object], name: str) -> list[object]:
    entries = data.get(name)
    return entries if isinstance(entries, list) else []


def _origin(given: dict[str, str], name: str) -> str:
    """Return the origin of a value; if its parts have several, the one that takes precedence."""
    origins = {origin for field, origin in given.items() if overlaps(field, name)}
    strongest = [origin for origin in ("command line", "job file") if origin in origins]
    return strongest[0] if strongest else min(origins, default="default")


def _drop_conflicting_defaults(
    defaults: dict[str, object], data: dict[str, object]
) -> dict[str, object]:
    chosen, below = data.get("environment"), defaults.get("environment")
    if not isinstance(chosen, dict) or not isinstance(below, dict):
        return defaults
    rivals = {
        rival
        for name, rival in (("conda", "venv"), ("venv", "conda"))
        if chosen.get(name) is not None
    }
    kept = {name: value for name, value in below.items() if name not in rivals}
    return {**defaults, "environment": kept}


def make_absolute(data: dict[str, object], base: Path) -> None:
    """Make the paths of a job's fields absolute, in place: the script against the workdir.

    A leading `~/` of arguments and variables becomes the home, as in a shell. The fields are not
    validated yet; what is not a path is left as it is.
    """

    def resolve(
        fields: object, name: str, root: str | Path = base, *, may_be_name: bool = False
    ) -> None:
        owner = fields if isinstance(fields, dict) else {}
        path = owner.get(name)
        # Nothing is validated yet. A value of a wrong type passes, and the model reports it; a URL
        # is no path.
        if not isinstance(path, str) or not path or "\0" in path or "://" in path:
            return
        if "/" in path or not may_be_name:
            owner[name] = os.path.normpath(os.path.join(root, os.path.expanduser(path)))

    # The order matters: the script is relative to the workdir, as it is for the program itself, and
    # all else to the job file.
    resolve(data, "workdir")
    workdir = data.get("workdir")
    resolve(data, "script", workdir if isinstance(workdir, str) else base)
    for stage in _entries(data, "stage"):
        resolve(stage, "source")
    for entry in _entries(data, "collect"):
        target = entry.get("target") if isinstance(entry, dict) else None
        if not (isinstance(target, str) and target.startswith("{")):
            resolve(entry, "target")
    own = data.get("checkpoint")
    checkpoint = own if isinstance(own, dict) else {}
    directory = checkpoint.get("directory")
    if isinstance(directory, str) and directory.startswith("~"):
        checkpoint["directory"] = os.path.expanduser(
            directory
        )  # a relative one stays relative: it is in the run's directory
    for name in ("web_config", "targets"):
        resolve(data.get("monitor"), name)
    _expand_homes(data)
    environment = data.get("environment")
    resolve(environment, "venv")
    resolve(environment, "conda", may_be_name=True)
    resolve(environment, "python", may_be_name=True)
    container = environment.get("container") if isinstance(environment, dict) else None
    own = container if isinstance(container, dict) else {}
    if is_image_file(own.get("engine"), str(own.get("image"))):
        resolve(container, "image")


def _expand_homes(data: dict[str, object]) -> None:
    for field, word in [*_texts(data)]:
        if _WITH_PLACEHOLDERS.match(field) and f"{word}/".startswith("~/"):
            _set(data, field, os.path.expanduser(word))


def is_image_file(engine: object, image: str) -> bool:
    """Whether the image of a container is a file, and not a reference or name."""
    is_squashfs = image.endswith((".sqsh", ".squashfs")) or (engine == "enroot" and "/" in image)
    return "://" not in image and (is_squashfs or engine == "apptainer")


def field_value(document: object, field: str) -> object:
    """Return the value of a field such as `stage.0.target`; None if the document has none."""
    for part in field.split("."):
        if isinstance(document, list):
            document = document[int(part)] if int(part) < len(document) else None
        else:
            document = document.get(part) if isinstance(document, dict) else None
    return document


def leaves(data: object, prefix: str = "", *, empty: bool = True) -> list[str]:
    """Return the dotted names of all values; a list of plain values counts as one.

    Args:
        data: nested mappings and lists.
        prefix: the dotted name of `data` itself.
        empty: whether an empty mapping counts as a value.

    >>> leaves({"a": {"b": 1, "c": [2, 3]}, "d": {}}), leaves({"d": {}}, empty=False)
    (['a.b', 'a.c', 'd'], [])
    """
    items: Iterable[tuple[object, object]] = ()
    if isinstance(data, dict):
        if not data and not empty:
            return []
        items = data.items()
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        items = enumerate(data)
    names = [
        name
        for key, value in items
        for name in leaves(value, f"{prefix}.{key}" if prefix else str(key), empty=empty)
    ]
    return names or ([prefix] if prefix and not items else [])


def is_in(field: str, around: str) -> bool:
    """Return whether a field is another one, or in it."""
    return f"{field}.".startswith(f"{around}.")


def overlaps(given: str, name: str) -> bool:
    """Return whether one field is the other, holds it, or is in it.

    >>> overlaps("a.b", "a.b.c"), overlaps("a.b.c", "a.b"), overlaps("a.b", "a.bc")
    (True, True, False)
    """
    return is_in(name, given) or is_in(given, name)


def merged(
    below: dict[str, object], above: dict[str, object], *, whole: str = ""
) -> dict[str, object]:
    """Return a mapping laid over another: mappings are joined key by key, all else is replaced.

    Args:
        below: the mapping with lower precedence.
        above: the mapping with higher precedence.
        whole: a top-level key whose entries replace each other whole.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4})
    {'a': {'b': 1, 'c': 3}, 'd': 4}
    """
    result = copy.deepcopy(below)
    for key, value in above.items():
        lower = result.get(key)
        if isinstance(lower, dict) and isinstance(value, dict):
            result[key] = {**lower, **value} if key == whole else merged(lower, value)
        else:
            result[key] = value
    return result
