"""What an import reports about a script."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Kind = Literal["lost", "changed", "dropped"]

ALL_GPUS = ("each rank sees all GPUs of its node", "choose one by LOCAL_RANK in the program")
HIDES_GPUS = ("gpus-per-task", "gpu-bind", "ntasks-per-gpu")
"""Options of sbatch and srun that show each task only its own GPUs; ALL_GPUS is reported."""

OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
"""Why and what to do where a script names a file for its output."""

_SHOWN_CHARS = 90


@dataclass(frozen=True)
class ImportNote:
    """A line of the script that the job file does not carry over unchanged.

    Attributes:
        line: where in the script, from 1; 0 for the script as a whole.
        text: the command or option, on one line, shortened if it is long.
        kind: `lost`: missing until you act; `changed`: carried over in another way; `dropped`:
            no longer needed.
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
    """Collects findings; the same finding about the same line is kept once, a dropped line too."""

    def __init__(self) -> None:
        self.entries: dict[ImportNote, None] = {}

    def add(self, kind: Kind, line: int, text: str, why: str, todo: str = "") -> None:
        """Keep a finding; unprintable characters of its text are replaced."""
        text = " ".join(text.replace("\\\n", " ").split())
        text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
        if len(text) > _SHOWN_CHARS:
            text = f"{text[:_SHOWN_CHARS]}…"
        same = ((note.line, note.text, note.kind) for note in self.entries)
        if kind != "dropped" or (line, text, kind) not in same:  # one reason is enough
            self.entries[ImportNote(line, text, kind, why, todo)] = None

    def lost(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Report something that is not carried over."""
        self.add("lost", line, text, why, todo)

    def changed(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Report something that is carried over in another way."""
        self.add("changed", line, text, why, todo)

    def findings(self) -> tuple[ImportNote, ...]:
        """Return all findings by line."""
        return tuple(sorted(self.entries, key=lambda finding: finding.line))
