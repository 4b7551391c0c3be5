"""What an import has to say about lines of the script that it could not take as they stand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Finding", "Kind", "Report"]

Kind = Literal["lost", "changed", "dropped"]
_SHOWN_CHARS = 90


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        line: where in the script, from 1; 0 for the script as a whole.
        text: what stands there, on one line, cut where it is long.
        kind: `lost`: the job does without it until you act; `changed`: carried in another way;
            `dropped`: needed no more.
        why: the reason.
        todo: what to do, empty where nothing has to be done.
    """

    line: int
    text: str
    kind: Kind
    why: str
    todo: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


class Report:
    """Findings as they are made; the same words about the same line are kept once."""

    def __init__(self) -> None:
        self._found: dict[Finding, None] = {}

    def add(self, kind: Kind, line: int, text: str, why: str, todo: str = "") -> None:
        """Keep a finding."""
        shown = " ".join(text.replace("\\\n", " ").split())
        shown = "".join(letter if letter.isprintable() else "�" for letter in shown)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        self._found[Finding(line, shown, kind, why, todo)] = None

    def lost(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Say that something is not carried over."""
        self.add("lost", line, text, why, todo)

    def changed(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Say that something is carried over in another way."""
        self.add("changed", line, text, why, todo)

    def merge(self, other: Report) -> None:
        """Take the findings of another report."""
        self._found.update(other._found)

    def findings(self) -> tuple[Finding, ...]:
        """Return all of them, by line."""
        return tuple(sorted(self._found, key=lambda one: one.line))
