"""What an import produces: findings about the script, and the job file with its YAML text."""

from __future__ import annotations

import copy
import dataclasses
import io
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import Job

__all__ = ["Draft", "Finding", "Kind", "Report", "write_yaml"]

Kind = Literal["lost", "changed", "dropped"]

_ORDER = "name array launcher mpi script module command args workdir resources environment stage"
_NEEDED = frozenset({"name", "script", "module", "command"})
_MAX_CORRECTIONS = 200
_SHOWN_CHARS = 90


@dataclass(frozen=True)
class Finding:
    """A line of the script that the job file does not carry over as it stands.

    Attributes:
        line: where in the script, from 1; 0 for the script as a whole.
        text: the command or option, on one line, cut where it is long.
        kind: `lost`: missing until you act; `changed`: carried over in another way; `dropped`:
            not needed any more.
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
    """Collects findings; the same finding about the same line is kept once."""

    def __init__(self) -> None:
        self._findings: dict[Finding, None] = {}

    def add(self, kind: Kind, line: int, text: str, why: str, todo: str = "") -> None:
        """Keep a finding; unprintable characters of its text are replaced."""
        shown = " ".join(text.replace("\\\n", " ").split())
        shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in shown)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        self._findings[Finding(line, shown, kind, why, todo)] = None

    def lost(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Report something that is not carried over."""
        self.add("lost", line, text, why, todo)

    def changed(self, line: int, text: str, why: str, todo: str = "") -> None:
        """Report something that is carried over in another way."""
        self.add("changed", line, text, why, todo)

    def merge(self, other: Report) -> None:
        """Take over the findings of another report."""
        self._findings.update(other._findings)

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings by line."""
        return tuple(sorted(self._findings, key=lambda finding: finding.line))


class Draft:
    """The fields of a job file in the making, and the script lines that they came from."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self._origins: dict[str, tuple[int, str]] = {}

    def put(self, field: str, value: Any, line: int, text: str) -> None:
        """Set a field by its dotted name."""
        *parents, last = field.split(".")
        mapping = self.fields
        for parent in parents:
            mapping = mapping.setdefault(parent, {})
        mapping[last] = value
        self._origins[field] = (line, text)

    def finished(self, report: Report) -> dict[str, Any]:
        """Return the fields in order; values that no job file may hold are left out and reported.

        Raises:
            InputError: a required field is wrong.
        """
        fields = copy.deepcopy(self.fields)
        for _ in range(_MAX_CORRECTIONS):
            try:
                Job.model_validate(fields)
                break
            except ValidationError as error:
                self._leave_out(fields, error.errors(include_url=False)[0], report)
        return _without_empty({name: fields[name] for name in _ORDER.split() if name in fields})

    def _leave_out(self, fields: dict[str, Any], problem: Any, report: Report) -> None:
        place = [part for part in problem["loc"] if part != "[key]"]
        message = str(problem["msg"]).removeprefix("Value error, ")
        parent: Any = fields
        key: Any = None
        for part in place:  # the innermost part that exists; pydantic's place may go deeper
            inner = parent if key is None else parent[key]
            if not isinstance(inner, dict | list) or (
                part not in inner if isinstance(inner, dict) else part not in range(len(inner))
            ):
                break
            parent, key = inner, part
        name = ".".join(map(str, place))
        origins = [
            origin
            for field, origin in self._origins.items()
            if f"{name}.".startswith(f"{field}.") or f"{field}.".startswith(f"{name}.")
        ]
        line, text = origins[0] if origins else (0, name)
        if key is None or place[0] in _NEEDED:
            raise InputError(
                f"line {line}: {text}: {name or 'the job'} {message}",
                hint="reduce the script to what the job needs, or write the job file by hand",
            )
        del parent[key]
        report.lost(line, text, f"{name} {message}", "write the field by hand if you need it")


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    filled = {
        name: _without_empty(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return {name: value for name, value in filled.items() if value not in ({}, [])}


def write_yaml(job: dict[str, Any], comments: list[str]) -> str:
    """Return the text of a job file: shell lines as a block, lists of words on one line."""
    yaml = YAML()
    yaml.width = 96
    yaml.allow_unicode = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(_styled(job), stream)
    return "".join(f"# {comment}\n" for comment in comments) + stream.getvalue()


def _styled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _styled(item) for name, item in value.items()}
    if isinstance(value, list):
        styled = CommentedSeq(_styled(item) for item in value)
        if not any(isinstance(item, dict) for item in value):
            styled.fa.set_flow_style()
        return styled
    if not isinstance(value, str):
        return value
    if not all(row.isprintable() for row in value.split("\n")):
        return DoubleQuotedScalarString(value)  # escaped: YAML folds some of them as line ends
    if "\n" in value and value[0] not in " \n":
        return LiteralScalarString(value)
    return value
