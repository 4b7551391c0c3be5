"""Write a job file: YAML for people, one field a line, quotes only where they are needed."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["write"]

_PLAIN = re.compile(r"(--?)?[A-Za-z0-9_./~][A-Za-z0-9_./=@%+~:-]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORDS = frozenset("true false null yes no on off y n nan inf ~".split())
_WIDTH = 96
_SPELLED = ("args", "command", "variables")  # numbers keep their spelling there


def write(job: dict[str, Any], notes: list[str]) -> str:
    """Return the text of a job file.

    Args:
        job: its fields, in the order to be written; texts, numbers, booleans, lists, mappings.
        notes: lines of a comment at the top.
    """
    lines = [f"# {note}".rstrip() for note in notes]
    for name, value in job.items():
        lines += _field(name, value, 0)
    return "\n".join(lines) + "\n"


def _field(name: str, value: Any, depth: int) -> list[str]:
    blank = "  " * depth
    spelled = name in _SPELLED
    if isinstance(value, dict):
        lines = [f"{blank}{name}:"]
        for inner, one in value.items():
            if spelled:
                lines.append(f"{blank}  {_scalar(inner)}: {_scalar(one, spelled=True)}")
            else:
                lines += _field(inner, one, depth + 1)
        return lines
    if isinstance(value, list):
        return _list(name, value, depth, spelled=spelled)
    return [f"{blank}{name}: {_scalar(value)}"]


def _list(name: str, value: list[Any], depth: int, *, spelled: bool) -> list[str]:
    blank = "  " * depth
    lines = [f"{blank}{name}:"]
    if any(isinstance(one, dict) for one in value):
        for one in value:
            inner = [line for key, each in one.items() for line in _field(key, each, depth + 2)]
            inner[0] = f"{blank}  - {inner[0].lstrip()}"
            lines += inner
        return lines
    scalars = [_scalar(one, spelled=spelled, flow=True) for one in value]
    short = f"{blank}{name}: [{', '.join(scalars)}]"
    if len(short) <= _WIDTH:
        return [short]
    for one in value:
        block = _block(one, blank)
        lines += block or [f"{blank}  - {_scalar(one, spelled=spelled)}"]
    return lines


def _block(text: str, blank: str) -> list[str]:
    """Return a text of several lines as a block; nothing where that would change it."""
    rows = text.split("\n")
    plain = all(row == row.strip("\r") and row.isprintable() for row in rows)
    if len(rows) < 2 or not plain or not rows[-1] or rows[0] != rows[0].lstrip() or not rows[0]:  # noqa: PLR2004
        return []
    return [
        f"{blank}  - |-",
        *(f"{blank}    {row}".rstrip() if not row else f"{blank}    {row}" for row in rows),
    ]


def _scalar(value: Any, *, spelled: bool = False, flow: bool = False) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _NUMBER.fullmatch(text):
        return text if spelled else f'"{text}"'
    plain = (
        _PLAIN.fullmatch(text)
        and text.lower() not in _WORDS
        and not text.endswith(":")
        and not re.fullmatch(r"[-+.\d][\d_xXobeE.+-]*", text)
        and not (flow and re.search(r":(?=$|[\[\]{},])", text))
        and text not in ("-", "--", "---", "...")
    )
    return text if plain else _quoted(text)


def _quoted(text: str) -> str:
    """Return a text in double quotes; letters of any script stay readable."""
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(
        letter if letter.isprintable() and letter != "\ufeff" else f"\\U{ord(letter):08x}"
        for letter in shown
    )
