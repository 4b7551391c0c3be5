"""Write YAML: a new job file, a single value, or changes to a user's file.

ruamel's round trip preserves the comments, the order of keys, anchors and quotes of a user's file.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import CommentMark
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import (
    DoubleQuotedScalarString,
    FoldedScalarString,
    LiteralScalarString,
    ScalarString,
)
from ruamel.yaml.tokens import CommentToken

from hpml_orchestrator.records.job import expand_shorthand

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDE = 1 << 30  # never wrap a value
_INDENTATIONS = [(mapping, dash) for dash in (2, 0, 4) for mapping in (2, 4, 3, 8)]
_COLLECTIONS = (CommentedMap, CommentedSeq)
_BEFORE_DOCUMENT = re.compile(r"(?:[ \t]*(?:[#%].*)?\n)*---[ \t]*(?:#.*)?\n")

Tree: TypeAlias = Any
"""A part of ruamel's documents, or a key in it: they have no types."""


class _Null(str):
    """A null with its original spelling: `null` or `~`."""

    __slots__ = ()


class _Constructor(RoundTripConstructor):
    def written_null(self, node: ScalarNode) -> _Null | None:
        return _Null(node.value) if node.value else None


class _Representer(RoundTripRepresenter):
    def written_null(self, null: _Null) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:null", str(null))


_Constructor.add_constructor("tag:yaml.org,2002:null", _Constructor.written_null)
_Representer.add_representer(_Null, _Representer.written_null)


def _yaml(indentation: tuple[int, int] = _INDENTATIONS[0], width: int = _WIDE) -> YAML:
    yaml = YAML()
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.preserve_quotes = True
    yaml.width = width
    mapping, dash = indentation
    yaml.indent(mapping=mapping, sequence=dash + 2, offset=dash)
    return yaml


def _dumped(yaml: YAML, value: object) -> str:
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def job_text(
    job: Mapping[str, object], comments: list[str], above: Mapping[str, list[str]] | None = None
) -> str:
    """Return the text of a job file: shell lines as a block, lists of words on one line.

    Args:
        job: its fields.
        comments: for its top.
        above: lines with their `#` above a field of it; all others come at the end.
    """
    yaml, above = _yaml(width=96), {**(above or {})}
    text = "".join(f"# {comment}\n" for comment in comments)
    for name, value in job.items():
        text += "".join(f"{line}\n" for line in above.pop(name, []))
        text += _dumped(yaml, _styled({name: value}))
    return text + "".join(f"{line}\n" for lines in above.values() for line in lines)


def one_line(value: object) -> str:
    """Return a value on one line: `{name: digits, target: shm}`."""
    return _dumped(_yaml(), _styled([value], flow=True)).strip()[1:-1]


def _styled(value: object, *, flow: bool = False) -> Tree:
    if isinstance(value, dict):
        fields = CommentedMap((name, _styled(one, flow=flow)) for name, one in value.items())
        if flow:
            fields.fa.set_flow_style()
        return fields
    if isinstance(value, list):
        flow = flow or not any(isinstance(one, dict) for one in value)
        entries = CommentedSeq(_styled(one, flow=flow) for one in value)
        if flow:
            entries.fa.set_flow_style()
        return entries
    if isinstance(value, float):
        return float(value)  # TOML floats have a class that ruamel does not accept
    if not isinstance(value, str):
        return value
    is_unprintable = not all(row.isprintable() for row in value.split("\n"))
    if is_unprintable or (flow and ("\n" in value or value.startswith(":"))):
        return DoubleQuotedScalarString(value)  # escaped: YAML treats some of these as line ends
    return LiteralScalarString(value) if "\n" in value and value[0] not in " \n" else value


class JobDocument:
    """A user's job file; changes to fields leave everything else as it is.

    ruamel attaches a comment to the value before it. So the lines below an entry are moved when
    another entry is added after it, and when it is removed.

    Args:
        text: text of a valid job file.
    """

    def __init__(self, text: str) -> None:
        start = _BEFORE_DOCUMENT.match(text)
        self._head = start[0] if start else ""  # ruamel drops comments here
        self._body = text[len(self._head) :]
        self._comments: list[tuple[str, str]] = []
        best = min(_INDENTATIONS, key=self._reformatted)
        self._yaml = _yaml(best)
        self._root = _loaded(self._body)

    def _reformatted(self, indentation: tuple[int, int]) -> int:
        """Return how many lines change if an unchanged document is written with an indentation."""
        lines = _dumped(_yaml(indentation), _loaded(self._body)).splitlines()
        return len({*lines} ^ {*self._body.splitlines()})

    def put(self, field: str, value: object, comment: str = "") -> None:
        """Set a field.

        Without a suitable place in the document nothing changes: read the result to find out.

        Args:
            field: dotted; numbers are places in a list. Missing mappings are created.
            value: as JSON; None removes the field.
            comment: written on a line of its own above the field.
        """
        before = _dumped(self._yaml, self._root)
        around: Tree = [self._root]
        place: Tree = 0
        *parents, last = field.split(".")
        for part in parents:
            here = around[place]
            key = _key(here, part)
            inner = here[key] if key in _keys(here) else None
            if here is self._root:
                inner = expand_shorthand(part, inner)
            if not isinstance(inner, _COLLECTIONS):
                if value is None and not isinstance(inner, dict):
                    return
                _set(around, place, key, inner if isinstance(inner, dict) else {})
            around, place = here, key
        _set(around, place, _key(around[place], last), value)
        if comment and before != _dumped(self._yaml, self._root):
            self._comments.append((field, comment))

    def has_entry(self, field: str, place: str) -> bool:
        """Return whether a list of the document has an entry at a place, or can get it next."""
        entries, index = self._root.get(field), place.partition(".")[0]
        return bool(isinstance(entries, list) and entries and index.isdecimal()) and (
            int(index) <= len(entries)
        )

    def text(self) -> str:
        """Return the document with its changes and their comments."""
        body = _dumped(self._yaml, self._root)
        lines, document = body.splitlines(keepends=True), _loaded(body)
        above: dict[int, list[str]] = {}
        for field, comment in self._comments:
            number = _line_of(document, field)
            lead = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
            above.setdefault(number, []).append(f"{lead}# {comment}\n")
        texts = [text for n, line in enumerate(lines) for text in (*above.get(n, ()), line)]
        return self._head + "".join(texts)


def _loaded(text: str) -> Tree:
    document = _yaml().load(text)
    _open_commented(document)
    return document


def _open_commented(value: object) -> None:
    """Put each entry of commented collections on its own line, or ruamel drops the comments."""
    if not isinstance(value, _COLLECTIONS):
        return
    has_comments = value.ca.items or (isinstance(value, CommentedSeq) and value.ca.end)
    if value.fa.flow_style() and has_comments:
        value.fa.set_block_style()
        if isinstance(value, CommentedSeq):
            _put_comments_behind(value)
    for inner in value.values() if isinstance(value, CommentedMap) else value:
        _open_commented(inner)


def _put_comments_behind(entries: CommentedSeq) -> None:
    """Attach a comment after an entry and its comma to that entry, not to the next one."""
    for index, (_, before, *_rest) in [*entries.ca.items.items()]:
        if index and before and before[0].start_mark.line == entries.lc.data[index - 1][0]:
            entries.ca.items.setdefault(index - 1, [None] * 4)[0] = before.pop(0)


def _line_of(document: Tree, field: str) -> int:
    """Return the line on which a field begins, or the innermost field around it."""
    line = min((one[0] for one in document.lc.data.values()), default=0)
    here = document
    for part in field.split("."):
        key = _key(here, part)
        if not isinstance(here, _COLLECTIONS) or key not in (here.lc.data or ()):
            break
        line = here.lc.data[key][0]
        here = here[key]
    return int(line)


def _keys(here: Tree) -> list[Tree]:
    return [*(range(len(here)) if isinstance(here, CommentedSeq) else here)]


def _key(here: object, part: str) -> Tree:
    return int(part) if isinstance(here, CommentedSeq) and part.isdecimal() else part


def _set(around: Tree, place: Tree, key: Tree, value: object) -> None:
    """Set, add or remove an entry of `around[place]`, changing as little as possible."""
    here = around[place]
    old = here[key] if key in _keys(here) else None
    old = None if isinstance(old, _Null) else old
    if isinstance(old, CommentedMap) and isinstance(value, dict) and old and value:
        for name in [*(name for name in old if name not in value), *value]:
            _set(here, key, name, value.get(name))
    elif isinstance(old, CommentedSeq) and isinstance(value, list) and old and value:
        for index in [*range(len(old) - 1, len(value) - 1, -1), *range(len(value))]:
            _set(here, key, index, value[index] if index < len(value) else None)
    elif value is None:
        _remove(around, place, key)
    elif key not in _keys(here):
        below = _take_below(here, _keys(here)[-1]) if here else ""
        if isinstance(here, CommentedSeq):
            here.append(_styled(value, flow=True))
            key = len(here) - 1
        else:
            here[key] = _styled(value, flow=True)
        _add_below(here, key, below)
    elif (old, isinstance(old, bool)) != (value, isinstance(value, bool)):
        below = _take_below(here, key)
        here[key] = _in_style_of(old, value)
        _add_below(here, key, below)


def _in_style_of(old: object, value: object) -> Tree:
    """Return a value, with the old value's quotes if both are text."""
    if not (isinstance(value, str) and isinstance(old, ScalarString)):
        return _styled(value, flow=True)
    new: Tree = type(old)(value)
    if isinstance(old, LiteralScalarString) and hasattr(old, "comment"):
        new.comment = old.comment  # after the | of the block
    return new


def _remove(around: Tree, place: Tree, key: Tree) -> None:
    here = around[place]
    keys = _keys(here)
    if key not in keys:
        return
    index, below = keys.index(key), _take_below(here, key)
    del here[key]
    if not here:
        here.fa.set_flow_style()
        _add_below(around, place, below)
    elif index:
        _add_below(here, keys[index - 1], below)
    elif below:
        slots = here.ca.items.setdefault(_keys(here)[0], [None] * 4)
        slots[1] = [CommentToken(below, CommentMark(0))]


def _last(here: Tree, key: Tree) -> tuple[list[Tree], int, bool]:
    """Return where ruamel stores the text after and below the last value of an entry.

    The third value is whether that is a block of text, after which there is nothing.
    """
    value = here[key]
    while isinstance(value, _COLLECTIONS) and value and not value.fa.flow_style():
        here, key = value, _keys(value)[-1]
        value = here[key]
    slots = here.ca.items.setdefault(key, [None] * 4)
    is_block = isinstance(value, (LiteralScalarString, FoldedScalarString))
    return slots, 0 if isinstance(here, CommentedSeq) else 2, is_block


def _take_below(here: Tree, key: Tree) -> str:
    """Remove the blank lines and comments below an entry, and return them."""
    slots, place, is_block = _last(here, key)
    token, slots[place] = slots[place], None
    if token is None:
        return ""
    indent = "" if token.value.startswith("\n") else " " * token.start_mark.column
    behind, _, below = (f"\n{indent}" * is_block + token.value).partition("\n")
    if behind:
        slots[place] = CommentToken(f"{behind}\n", token.start_mark)
    return str(below)


def _add_below(here: Tree, key: Tree, below: str) -> None:
    slots, place, is_block = _last(here, key)
    before = CommentToken("" if is_block else "\n", CommentMark(0))
    if below:
        token = slots[place] or before
        slots[place] = CommentToken(token.value + below, token.start_mark)
