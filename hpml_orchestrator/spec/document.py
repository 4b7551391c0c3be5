"""Turn the text of a job file into plain data: YAML 1.2 or TOML, bounded in size and depth."""

from __future__ import annotations

import io
import tomllib
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import Node, ScalarNode

from hpml_orchestrator.errors import InputError

__all__ = ["WrittenFloat", "WrittenInt", "parse_toml", "parse_yaml"]

_MAX_VALUES = 200_000
_MAX_DEPTH = 32
_MAX_MESSAGE_CHARS = 400


class WrittenInt(int):
    """An integer that remembers its spelling: `007`, `0x10`, `1_000`."""

    written: str


class WrittenFloat(float):
    """A float that remembers its spelling: `1.10`, `1e-3`."""

    written: str


class _TooLarge(Exception):  # noqa: N818 - told as an InputError
    """A document is over the bounds."""


class _Constructor(SafeConstructor):
    """ruamel's safe constructor, with numbers that remember how they were written."""

    def get_single_data(self) -> Any:
        """Return the document's data; ruamel calls it between composing and constructing."""
        node = self.composer.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return self.construct_document(node)

    def construct_written_int(self, node: ScalarNode) -> WrittenInt:
        value = WrittenInt(self.construct_yaml_int(node))
        value.written = str(node.value)
        return value

    def construct_written_float(self, node: ScalarNode) -> WrittenFloat:
        value = WrittenFloat(self.construct_yaml_float(node))
        value.written = str(node.value)
        return value


_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.construct_written_int)
_Constructor.add_constructor("tag:yaml.org,2002:float", _Constructor.construct_written_float)


def parse_yaml(text: str, what: str) -> Any:
    """Return the data of one YAML 1.2 document; numbers know how they were written.

    Args:
        text: the document.
        what: what it is, for messages.

    Raises:
        InputError: it is no YAML, has a key twice, or is over 200,000 values or 32 levels once
            aliases and merge keys are followed. Nothing is expanded before that is known.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        return reader.load(io.StringIO(text))
    except _TooLarge as error:
        raise InputError(f"{what} {error}") from None
    except RecursionError:
        raise InputError(f"{what} is nested deeper than {_MAX_DEPTH} levels") from None
    except (YAMLError, ValueError) as error:
        said = _one_line(str(error))
        raise InputError(f"{what} is not YAML: {said}", hint=_yaml_hint(said)) from None


def parse_toml(text: str, what: str) -> Any:
    """Return the data of a TOML document.

    Raises:
        InputError: it is no TOML, or is nested too deep.
    """
    try:
        data = tomllib.loads(text, parse_float=_toml_float)
    except RecursionError:
        raise InputError(f"{what} is nested deeper than {_MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InputError(
            f"{what} is not TOML: {_one_line(str(error))}",
            hint="texts stand in quotes; a file whose name does not end in .toml is read as YAML",
        ) from None
    level: list[Any] = [data]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return data
    raise InputError(f"{what} is nested deeper than {_MAX_DEPTH} levels")


def _toml_float(text: str) -> WrittenFloat:
    value = WrittenFloat(text)
    value.written = text
    return value


def _check_size(root: Node) -> None:
    """Refuse a document that grows when its aliases are followed, without following them."""
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def size(node: Node, depth: int) -> int:
        key = id(node)
        if key in open_ or depth > _MAX_DEPTH:
            raise _TooLarge(f"is nested deeper than {_MAX_DEPTH} levels")
        if key not in sizes:
            open_.add(key)
            total = 1
            for child in _children(node):
                total += size(child, depth + 1)
                if total > _MAX_VALUES:
                    raise _TooLarge(f"holds more than {_MAX_VALUES} values (are they aliases?)")
            open_.remove(key)
            sizes[key] = total
        return sizes[key]

    size(root, 1)


def _children(node: Node) -> list[Node]:
    if not isinstance(node.value, list):
        return []
    return [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]


_YAML_HINTS = (
    (r"'\t'", "indent with blanks: YAML takes no tabs there"),
    ("duplicate key", "leave one of the two out"),
    ("undefined alias", "a text that begins with * stands in quotes"),
    ("constructor for the tag", "a text that begins with ! stands in quotes"),
    ("another document", "one file holds one job: leave the line --- out"),
    ("digits", "a number that long stands in quotes, if it is meant as text"),
)


def _yaml_hint(said: str) -> str:
    """Return what can be done about a parser's complaint."""
    found = (hint for mark, hint in _YAML_HINTS if mark in said)
    return next(found, "texts with any of : # { } [ ] , & * ! | > ' \" % @ ` stand in quotes")


def _one_line(text: str) -> str:
    """Return a parser's message on one line, without its advice for programmers."""
    text = text.partition("To suppress this check")[0].replace(' in "<file>",', " in")
    text = text.partition("; use sys.set_int_max_str_digits")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:_MAX_MESSAGE_CHARS]
