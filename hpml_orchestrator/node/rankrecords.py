"""The lines that hpml-bind appends for each rank, read as they come."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.node.processes import entry_of
from hpml_orchestrator.placement.proof import Seen
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RankRecords", "is_alive", "seen_of_record", "start_of"]

_READ_BYTES = 8 * 1024**2


class RankRecords:
    """A node's file of ranks, which grows.

    Args:
        path: the JSONL file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records of complete lines that came since the last call; often none."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return []
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read(_READ_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and _is_rank(record):
                found.append(record)
        return found


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the process of a rank's record still runs."""
    process = entry_of(record["pid"])
    return process is not None and process.start_ticks == start_of(record)


def start_of(record: dict[str, Any]) -> int:
    """Return when a rank's process began, in clock ticks after boot; -1 where that is unknown."""
    ticks = record.get("start_ticks")
    return ticks if type(ticks) is int else -1


def seen_of_record(record: dict[str, Any]) -> Seen:
    """Return what a rank's own record tells; what is missing or damaged is unknown."""
    child = record.get("child_cpus")
    inherited = record.get("inherited")
    visible, threads = record.get("visible"), record.get("threads")
    return Seen(
        local_rank=record["local_rank"],
        rank=record["rank"],
        pid=record["pid"],
        inherited=_cpus(inherited) or None,
        cpus=_cpus(record.get("cpus")),
        child_cpus=_cpus(child) or None,
        visible=visible if isinstance(visible, str) else None,
        memory=str(record.get("memory") or ""),
        threads=int(str(threads)) if str(threads).isdecimal() else None,
        nic=str(record.get("nic") or ""),
        error=str(record.get("error") or ""),
        note=str(record.get("note") or ""),
    )


def _is_rank(record: dict[str, Any]) -> bool:
    numbers = [record.get(name) for name in ("rank", "local_rank", "pid")]
    return all(type(one) is int and one >= 0 for one in numbers)


def _cpus(text: Any) -> tuple[int, ...]:
    """Return the CPUs of a list, or of the numbers that records of version 1 had."""
    try:
        if isinstance(text, list):
            return tuple(sorted({int(one) for one in text}))
        return parse_list(text) if isinstance(text, str) else ()
    except (ValueError, TypeError, OverflowError):
        return ()
