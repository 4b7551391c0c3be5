"""Put a job file together: fields as they are found, and where each of them came from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import Job

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report

__all__ = ["ORDER", "Draft"]

ORDER = (
    "name array launcher mpi script module command args workdir resources environment stage"
).split()
_NEEDED = frozenset({"name", "script", "module", "command"})
_MAX_ROUNDS = 200


class Draft:
    """The fields of a job file in the making."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self._origins: dict[str, tuple[int, str]] = {}

    def put(self, field: str, value: Any, line: int, text: str) -> None:
        """Set a field by its dotted name, and remember the line that it came from."""
        *parents, last = field.split(".")
        here = self.fields
        for parent in parents:
            here = here.setdefault(parent, {})
        here[last] = value
        self._origins[field] = (line, text)

    def finished(self, report: Report) -> dict[str, Any]:
        """Return the fields in their order; what no job file may hold is left out and reported.

        Raises:
            InputError: what is wrong cannot be left out.
        """
        fields = copy.deepcopy(self.fields)
        for _ in range(_MAX_ROUNDS):
            try:
                Job.model_validate(fields)
                break
            except ValidationError as error:
                finding = error.errors(include_url=False)[0]
                self._leave_out(fields, finding, report)
        return _filled({name: fields[name] for name in ORDER if name in fields})

    def _leave_out(self, fields: dict[str, Any], finding: Any, report: Report) -> None:
        place = [part for part in finding["loc"] if part != "[key]"]
        message = str(finding["msg"]).removeprefix("Value error, ")
        here: Any = fields
        depth = 0
        while depth < len(place) - 1 and _has(here, place[depth]):
            here, depth = here[place[depth]], depth + 1
        name = ".".join(str(part) for part in place)
        found = [
            (line, text)
            for field, (line, text) in self._origins.items()
            if name == field or name.startswith(f"{field}.") or field.startswith(f"{name}.")
        ]
        line, text = found[0] if found else (0, name)
        if not place or place[0] in _NEEDED or not _has(here, place[depth]):
            raise InputError(
                f"line {line}: {text}: {name or 'the job'} {message}",
                hint="shorten the script to what the job needs, or write the job file by hand",
            )
        del here[place[depth]]
        report.lost(line, text, f"{name} {message}", "write the field by hand if you need it")


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without lists and mappings that nothing is left in."""
    found = {
        name: _filled(value) if isinstance(value, dict) else value for name, value in fields.items()
    }
    return {name: value for name, value in found.items() if value not in ({}, [])}


def _has(here: Any, part: Any) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and part < len(here)
