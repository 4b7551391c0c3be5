"""Read a job file or a site profile as plain data: YAML 1.2 or TOML, bounded in size and depth."""

from __future__ import annotations

import io
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode

from hpml_orchestrator.errors import InputError, NotFoundError

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
        InputError: it cannot be read, is too large, or holds no mapping.
    """
    try:
        # a pipe or a device may never end, and opening a pipe waits for its writer
        if not stat.S_ISREG(os.stat(source).st_mode):
            raise InputError(f"{source} is not a regular file")
        with source.open("rb") as stream:
            # One byte more than is allowed tells a file that is too large, without reading all of a
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
    """An integer with its spelling as the attribute `written`: `007`, `0x10`, `1_000`."""

    written: str


class _WrittenFloat(float):
    """A float with its spelling as the attribute `written`: `1.10`, `1e-3`."""

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
        source: what it is, for messages.

    Raises:
        InputError: it is not YAML, has a key twice, or is over 200,000 values or 32 levels once
            aliases are followed.
    """
    # The pure Python reader, since YAML 1.2 matters: in 1.1, which libyaml reads, `10:00` is the
    # number 600 and `off` is false.
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
        InputError: it is not TOML, or is nested too deep.
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
