"""Read the fields of a job: command line over job file over site profile; not validated yet.

While fields are merged, `origins` records the source of each dotted field. Only leaves have an
origin, so a mapping from the command line must first remove the origins of the fields inside it.
The site's defaults are merged last because they depend on the job: a job with conda ignores the
site's venv.
"""

from __future__ import annotations

import copy
import io
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.records.job import expand_shorthand

# Read a job file or a site profile as plain data: YAML 1.2 or TOML, limited in size and depth.

_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_VALUES = 200_000
_MAX_DEPTH = 32
_MAX_MESSAGE_CHARS = 400

_SHELL_SUFFIXES = frozenset({".sh", ".bash", ".sbatch", ".slurm"})
_MAPPINGS = {
    "job file": "`name: …` and `script: train.py`; `hpml schema job` prints every field",
    "site profile": '`cluster = "name"`; `hpml schema site` prints every field',
    "sweep file": "`base: job.yaml`, `mode: grid` and `axes`; see `hpml schema sweep`",
}


def read_mapping(
    source: Path, kind: Literal["job file", "site profile", "sweep file"]
) -> dict[str, object]:
    """Return the fields of a file, not validated yet; `.toml` is read as TOML, all else as YAML.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it cannot be read, is too large, or does not contain a mapping.
    """
    try:
        # reading a pipe or a device may never end, and opening a pipe waits for its writer
        if not stat.S_ISREG(os.stat(source).st_mode):
            raise InputError(f"{source} is not a regular file")
        with source.open("rb") as stream:
            # One more byte than allowed shows that a file is too large, without reading all of a
            # pipe or of /dev/zero.
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        hint = f"a minimal {kind} has {_MAPPINGS[kind]}"
        raise NotFoundError(f"no such {kind}: {source}", hint=hint) from error
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise InputError(
            f"{source} is over {_MAX_FILE_BYTES} bytes, the most that a {kind} may have",
            hint=f"keep data in separate files and name them in the {kind}",
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start})", hint="save it as plain text, UTF-8"
        ) from error
    if kind != "site profile":
        _refuse_program(source, text, kind)
    parse = parse_toml if source.suffix.lower() == ".toml" else parse_yaml
    data = parse(text, str(source))
    if not isinstance(data, dict):
        hint = f"a {kind} is a mapping: {_MAPPINGS[kind]}"
        raise InputError(f"{source} holds no fields", hint=hint)
    return data


def _refuse_program(source: Path, text: str, kind: str) -> None:
    shebang = re.match(r"#!.*?\b(python|(?:ba|da|k|z)?sh\b)", text)
    is_python = source.suffix == ".py" or (shebang is not None and shebang[1] == "python")
    is_batch = re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None
    if is_batch or source.suffix in _SHELL_SUFFIXES or (shebang is not None and not is_python):
        raise InputError(
            f"{source} is a shell script, not a {kind}",
            hint=f"hpml import {source} prints a job file that does the same",
        )
    if is_python:
        raise InputError(
            f"{source} is a Python program, not a {kind}",
            hint=f"write a job file with the lines `name: {source.stem}` and "
            f"`script: {source.name}`, and give that",
        )


class _WrittenInt(int):
    """An integer with its original spelling as the attribute `written`: `007`, `0x10`, `1_000`."""

    written: str


class _WrittenFloat(float):
    """A float with its original spelling as the attribute `written`: `1.10`, `1e-3`."""

    written: str

    @classmethod
    def of(cls, text: str, number: float | None = None) -> _WrittenFloat:
        result = cls(text if number is None else number)
        result.written = text
        return result


class _Constructor(SafeConstructor):
    """ruamel's safe constructor, with numbers that keep their spelling."""

    def written_int(self, node: ScalarNode) -> _WrittenInt:
        number = _WrittenInt(self.construct_yaml_int(node))
        number.written = str(node.value)
        return number

    def written_float(self, node: ScalarNode) -> _WrittenFloat:
        return _WrittenFloat.of(str(node.value), self.construct_yaml_float(node))


_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.written_int)
_Constructor.add_constructor("tag:yaml.org,2002:float", _Constructor.written_float)


def parse_yaml(text: str, source: str) -> Any:
    """Return the data of one YAML 1.2 document; its numbers have an attribute `written`.

    Args:
        text: the document.
        source: its name, for messages.

    Raises:
        InputError: it is not YAML, contains a key twice, or has more than 200,000 values or 32
            levels after following aliases.
    """
    # The pure Python reader, because YAML 1.2 matters: in 1.1, which libyaml reads, `10:00` is the
    # number 600 and `off` is False.
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        data = reader.load(io.StringIO(text))
    except RecursionError:
        raise InputError(f"{source} is nested deeper than {_MAX_DEPTH} levels") from None
    except (YAMLError, ValueError) as error:
        message = _one_line(str(error))
        hint = next((hint for part, hint in _YAML_HINTS if part in message), _QUOTES_HINT)
        raise InputError(f"{source} is not YAML: {message}", hint=hint) from None
    _check_size(data, source)
    return data


def parse_toml(text: str, source: str) -> Any:
    """Return the data of a TOML document; its floats have an attribute `written`.

    Raises:
        InputError: it is not TOML, or is nested too deeply.
    """
    try:
        data = tomllib.loads(text, parse_float=_WrittenFloat.of)
    except RecursionError:
        raise InputError(f"{source} is nested deeper than {_MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InputError(
            f"{source} is not TOML: {_one_line(str(error))}",
            hint="texts stand in quotes; a file whose name does not end in .toml is read as YAML",
        ) from None
    _check_size(data, source)
    return data


def _check_size(data: object, source: str) -> None:
    waiting, count = [(data, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > _MAX_DEPTH:
            raise InputError(f"{source} is nested deeper than {_MAX_DEPTH} levels")
        if count + len(waiting) > _MAX_VALUES:
            raise InputError(f"{source} holds more than {_MAX_VALUES} values (are they aliases?)")
        if isinstance(value, (dict, list)):
            inner = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in inner]


_QUOTES_HINT = "texts with any of : # { } [ ] , & * ! | > ' \" % @ ` stand in quotes"
_YAML_HINTS = (
    (r"'\t'", "indent with blanks: YAML takes no tabs there"),
    ("duplicate key", "leave one of the two out"),
    ("undefined alias", "a text that begins with * needs quotes"),
    ("constructor for the tag", "a text that begins with ! needs quotes"),
    ("another document", "one file holds one job: leave the line --- out"),
    ("digits", "a number that long needs quotes if it is meant as text"),
)


def _one_line(text: str) -> str:
    text = text.partition("To suppress this check")[0].replace(' in "<file>",', " in")
    text = text.partition("; use sys.set_int_max_str_digits")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:_MAX_MESSAGE_CHARS]


_INDEX_DIGITS = 6


class Layer(NamedTuple):
    """Some fields of a job as written, and their origins."""

    fields: dict[str, object]
    origins: dict[str, str]  # by the dotted names of the leaves

    def origin(self, name: str) -> str:
        """Return the origin of a value; if its parts differ, the one that ranks highest."""
        origins = {origin for field, origin in self.origins.items() if overlaps(field, name)}
        strongest = [origin for origin in ("command line", "job file") if origin in origins]
        return strongest[0] if strongest else min(origins, default="default")


def read_fields(path: str | Path) -> dict[str, object]:
    """Return the fields of a job file, not validated yet.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it cannot be read, does not contain a mapping, or is a sweep file.
    """
    source = Path(os.path.abspath(path))
    fields = read_mapping(source, "job file")
    if {"base", "mode"} <= fields.keys():
        raise InputError(f"{source} is a sweep file", hint=f"hpml sweep run {path}")
    return fields


def merge(
    fields: Mapping[str, object],
    settings: Sequence[tuple[str, object]] = (),
    defaults: Layer | None = None,
    arguments: Sequence[str] = (),
) -> Layer:
    """Merge the command line over the fields of a job file, and these over a site's defaults.

    Args:
        fields: result of `read_fields`; not modified.
        settings: pairs of dotted field and value from the command line; later ones win.
        defaults: defaults of the site profile.
        arguments: words of the command line to append to `args`.

    Raises:
        InputError: a setting names a place that does not exist.
    """
    fields = copy.deepcopy(fields)  # a sweep changes the fields of one file thousands of times
    data = {name: expand_shorthand(name, value) for name, value in fields.items()}
    # `given` has the origin of each leaf, for `--explain`. It changes with `data`: a setting of the
    # command line replaces whatever was there, including fields below it, whose origins would
    # otherwise be reported for values that no longer exist.
    given = dict.fromkeys(leaves(data, empty=False), "job file")
    for name, written in settings:
        value, field = expand_shorthand(name, written), name
        if value is not written and isinstance(value, dict):
            ((inner, value),) = value.items()  # a short form keeps the other inner fields
            field = f"{name}.{inner}"
        _set(data, field, value)
        kept = {other: origin for other, origin in given.items() if not is_in(other, field)}
        given = kept | dict.fromkeys(leaves(value, field, empty=False), "command line")
    for name in ("monitor", "checkpoint"):
        # Settings in a job file enable the feature. A site's defaults do not: they only configure
        # it for the jobs that use it.
        mapping = data.get(name)
        if isinstance(mapping, dict) and "enabled" not in mapping:
            data[name] = {"enabled": True, **mapping}
            origins = {origin for field, origin in given.items() if overlaps(field, name)}
            given[f"{name}.enabled"] = min(origins, default="job file")
    # Merge the site last although it ranks lowest: which of its defaults apply depends on the job,
    # as with the site's `venv` and a job's `conda`.
    if defaults is not None:
        below = _drop_conflicting_defaults(defaults.fields, data)
        data = merged(below, data)
        given = {name: defaults.origins[name] for name in leaves(below, empty=False)} | given
    if arguments:
        args = data.get("args") or []
        data["args"] = [*args, *arguments] if isinstance(args, list) else args
        given["args"] = "command line"
    return Layer(data, given)


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
    """Set a value at a dotted place; missing or empty mappings on the way are created."""
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
    """Return whether a field is another one, or inside it."""
    return f"{field}.".startswith(f"{around}.")


def overlaps(given: str, name: str) -> bool:
    """Return whether two fields are equal or one contains the other.

    >>> overlaps("a.b", "a.b.c"), overlaps("a.b.c", "a.b"), overlaps("a.b", "a.bc")
    (True, True, False)
    """
    return is_in(name, given) or is_in(given, name)


def merged(
    below: dict[str, object], above: dict[str, object], *, whole: str = ""
) -> dict[str, object]:
    """Return a mapping merged over another: mappings are joined by key, all else is replaced.

    Args:
        below: the mapping with lower precedence.
        above: the mapping with higher precedence.
        whole: a top-level key whose entries replace each other as a whole.

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
