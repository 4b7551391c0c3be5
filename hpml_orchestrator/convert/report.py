"""What a draft states: fields of the job, and notes on lines that are carried over otherwise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hpml_orchestrator.records.job import JOB_FIELDS, Job, JobPart, Json

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["lost", "changed", "dropped"]
Value: TypeAlias = Any  # of a field of the job, whatever its type

OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
"""Reason and advice for a file that the script names for its output."""

_TITLES = {"lost": "by hand", "changed": "changed", "dropped": "not needed"}
_SHOWN_CHARS = 90


@dataclass(frozen=True)
class ImportNote:
    """A line of the script that the job file does not carry over unchanged.

    Attributes:
        line: where in the script, from 1; 0 for the script as a whole.
        text: the command or option, on one line, shortened if it is long.
        kind: `lost`: to be done by hand; `changed`: carried over in another way; `dropped`: not
            needed any more.
        why: the reason.
        todo: what to do; empty if nothing.
    """

    line: int
    text: str
    kind: Kind
    why: str
    todo: str = ""

    def to_json(self) -> dict[str, object]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


class ImportReport:
    """Collects notes, each once."""

    def __init__(self) -> None:
        self._notes: dict[ImportNote, None] = {}
        self._dropped: set[tuple[int, str]] = set()

    def add(self, kind: Kind, line: int, text: str, why: str, todo: str = "") -> None:
        """Add a note; its texts become one line each, without unprintable characters."""
        texts = (text.replace("\\\n", " "), why, todo)
        text, why, todo = (" ".join(printable(one).split()) for one in texts)
        if len(text) > _SHOWN_CHARS:
            text = f"{text[:_SHOWN_CHARS]}…"
        if kind == "dropped":
            if (line, text) in self._dropped:
                return  # one reason is enough
            self._dropped.add((line, text))
        self._notes[ImportNote(line, text, kind, why, todo)] = None

    def lost(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Note something that must be done by hand."""
        self.add("lost", line, text, why, todo)

    def changed(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Note something that is carried over in another way."""
        self.add("changed", line, text, why, todo)

    def extend(self, other: ImportReport) -> None:
        """Add the notes of another report."""
        self._notes |= other._notes

    def reason(self, line: int, end: int) -> str:
        """Return the reason of the first note about some lines; empty if there is none."""
        return next((note.why for note in self._notes if line <= note.line <= end), "")

    def notes(self) -> tuple[ImportNote, ...]:
        """Return all notes by line."""
        return tuple(sorted(self._notes, key=lambda note: note.line))


def printable(text: str) -> str:
    """Return text with its unprintable characters replaced, line by line."""
    text = text.replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def by_hand(notes: tuple[ImportNote, ...]) -> Iterator[str]:
    """Yield the comments at the top of a draft: what must be done by hand."""
    lost = [note for note in notes if note.kind == "lost"]
    if lost:
        yield "To do by hand:"
    for note in lost:
        where = f"line {note.line}: " if note.line else ""
        yield f"- {where}{note.text}: {note.why}"
        if note.todo:
            yield f"  -> {note.todo}"


def report_lines(name: str, notes: tuple[ImportNote, ...]) -> Iterator[str]:
    """Yield the report of a script by its name, grouped by reason; a hint is printed once."""
    groups: dict[tuple[str, str, str], list[ImportNote]] = {}
    for note in notes:
        groups.setdefault((note.kind, note.why, note.todo), []).append(note)
    hints = set()
    for (kind, why, todo), group in groups.items():
        for note in group:
            where = f"{name}:{note.line}" if note.line else name
            yield f"{where}: {_TITLES[kind]}: {note.text}"
        yield f"    {why}"
        if todo and todo not in hints:
            yield f"    -> {todo}"
        hints.add(todo)


@dataclass
class DraftFields:
    """The job of a draft, and which of its fields the script states.

    A stated field is written even if it is hpml's default: a site profile may have another.
    """

    job: Job
    stated: dict[str, list[int]] = field(default_factory=dict)  # dotted name -> lines

    def put(self, name: str, value: object, *lines: int) -> None:
        """Set a field by its dotted name."""
        self.job = _replaced(self.job, name.split("."), value)
        self.stated.setdefault(name, []).extend(lines)

    def remove(self, name: str) -> None:
        """Give a field its default again."""
        *parents, last = name.split(".")
        if parents[-1:] != ["variables"]:
            default: Value = Job(self.job.name)
            for part in name.split("."):
                default = getattr(default, part)
            self.job = _replaced(self.job, name.split("."), default)
        else:
            variables = {n: v for n, v in self.job.environment.variables.items() if n != last}
            self.job = _replaced(self.job, parents, variables)
        del self.stated[name]

    def written(self) -> Json:
        """Return the stated fields as the job file has them."""
        result: Json = {}
        for name in JOB_FIELDS:
            for stated in (one for one in self.stated if one.split(".")[0] == name):
                *parents, last = stated.split(".")
                place, part = result, self.job
                for parent in parents:
                    place, part = place.setdefault(parent, {}), getattr(part, parent)
                if isinstance(part, dict):
                    place[last] = part[last]
                    continue
                value = getattr(part, last)
                brief = isinstance(value, JobPart)
                place[last] = value.to_json(defaults=False) if brief else part.written(last)
                if isinstance(value, tuple) and value and isinstance(value[0], JobPart):
                    place[last] = [one.to_json(defaults=False) for one in value]
        gpus = str(result.get("resources", {}).get("gpus", ""))
        if gpus.isdigit():
            result["resources"]["gpus"] = int(gpus)
        if "binding" in result:
            result["binding"] = self.job.binding.policy
        return result


def _replaced(part: Value, names: list[str], value: object) -> Value:
    name, *rest = names
    if isinstance(part, dict):
        return {**part, name: value}
    return dataclasses.replace(
        part, **{name: _replaced(getattr(part, name), rest, value) if rest else value}
    )
