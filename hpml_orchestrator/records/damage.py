"""Damage in the records of an attempt: files that are truncated, garbled, or of a newer version.

Readers skip records that they cannot parse, because damage must not end a run. Code that computes
figures from the records must know that some are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.feed import event_fault, is_number, parse_record
from hpml_orchestrator.records.files import names_in, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BINDING_VERSION = 2
_ENTRY_FIELDS = ("node", "path", "files", "bytes", "problem")


@dataclass(frozen=True)
class Damage:
    """One damaged file.

    Attributes:
        path: of the file.
        why: the damage, in words.
        line: the first damaged line, counted from 1; 0 if the file is a single record.
    """

    path: Path
    why: str
    line: int = 0

    def __str__(self) -> str:
        where = f" from line {self.line} on" if self.line else ""
        return f"{self.path} is damaged{where}: {self.why}"


def find_damage(attempt: Path, *, is_growing: bool) -> Iterator[Damage]:
    """Yield the attempt's damaged files that figures depend on.

    A file truncated between two lines cannot be detected.

    Args:
        attempt: its directory.
        is_growing: whether the job may still write, so that last lines may be incomplete.
    """
    for directory, ending, fault in (
        ("events", ".jsonl", event_fault),
        ("binding", ".jsonl", _binding_fault),
    ):
        for path in _files(attempt / directory, ending):
            yield from _lines(path, fault, is_growing=is_growing)
    for directory, ending in (("plan", ".txt"), ("started", "job_id")):
        for path in _files(attempt / directory, ending):
            yield from _lines(path, _text_fault, is_growing=False)
    for directory, ending, fields in _RECORDS:
        for path in _files(attempt / directory, ending):
            yield from record_damage(path, fields)


def record_damage(path: Path, fields: Mapping[str, Callable[[object], bool]]) -> Iterator[Damage]:
    """Yield the damage of a file with a single record; a missing file is not damaged."""
    try:
        why = field_fault(read_json(path), fields)
    except NotFoundError:
        return
    except RecordError as error:
        why = str(error).replace(f"{path} ", "").replace(str(path), path.name)
    if why:
        yield Damage(path, why)


def field_fault(
    record: Mapping[str, object], fields: Mapping[str, Callable[[object], bool]]
) -> str:
    """Return a message about a missing or invalid field of a record; empty if all are valid."""
    for name, is_right in fields.items():
        if name not in record:
            return f"it has no `{name}`"
        if not is_right(record[name]):
            return f"`{name}` has a wrong value"
    return ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return type(value) is int


def _are_entries(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict) and all(name in entry for name in _ENTRY_FIELDS) for entry in value
    )


END_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "ended.json": {"time": is_number, "exit_code": _is_whole},
    "next.json": {"time": is_number, "job_id": _is_text},
}
"""Required fields of the records of an attempt's end."""

RUN_FIELDS: dict[str, Callable[[object], bool]] = {
    "rid": _is_text,
    "job": lambda job: isinstance(job, dict),
}
"""Required fields of a run's plan, `run.json`."""

_RECORDS: tuple[tuple[str, str, dict[str, Callable[[object], bool]]], ...] = (
    *(("", name, fields) for name, fields in END_FIELDS.items()),
    ("", "head.json", {"node": _is_text}),
    ("nodes", ".monitor.json", {"seconds": is_number, "updated": is_number}),
    ("nodes", ".collected.json", {"entries": _are_entries}),
    ("nodes", ".failed.json", {"node": _is_text, "message": _is_text}),
)


def _files(directory: Path, ending: str) -> list[Path]:
    """Return files by name; empty if the directory is missing or unreadable."""
    return [directory / name for name in names_in(directory) if name.endswith(ending)]


def _lines(path: Path, fault: Callable[[bytes], str], *, is_growing: bool) -> Iterator[Damage]:
    """Yield the first damaged line of a file."""
    number = 0
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    # The writer may be in the middle of the last line.
                    if not is_growing:
                        yield Damage(path, "the line is cut off", number)
                    return
                if why := fault(line):
                    yield Damage(path, why, number)
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        yield Damage(path, f"it cannot be read: {error.strerror or error}")
        return
    if not number and not is_growing:
        yield Damage(path, "it is empty")


def _binding_fault(line: bytes) -> str:
    record = parse_record(line, _BINDING_VERSION)
    if isinstance(record, str):
        return record
    return field_fault(record, {"rank": _is_whole, "node": _is_text})


def _text_fault(line: bytes) -> str:
    return "not text" if re.search(rb"[\x00-\x08\x0e-\x1f]", line) else ""
