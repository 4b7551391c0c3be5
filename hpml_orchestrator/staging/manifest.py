"""What was published, written down so that a later stager can tell whether it is all there."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass
from typing import Any

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import read_json, write_json

__all__ = ["Manifest", "manifest_path", "measure", "published_manifest"]


@dataclass(frozen=True)
class Manifest:
    """The record of one published directory; bytes count each inode once, files each name."""

    name: str
    source: str
    kind: str
    method: str
    bytes: int
    files: int

    def write(self, path: str) -> None:
        """Write durably.

        Raises:
            RecordError: the directory cannot be written.
        """
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: str) -> Manifest | None:
        """Read; None when there is none or it cannot be understood."""
        try:
            record: dict[str, Any] = read_json(path)
            return cls(
                name=str(record["name"]),
                source=str(record["source"]),
                kind=str(record["kind"]),
                method=str(record["method"]),
                bytes=int(record["bytes"]),
                files=int(record["files"]),
            )
        except (NotFoundError, RecordError, KeyError, TypeError, ValueError):
            return None


def manifest_path(data: str) -> str:
    """Return where the manifest of published data lies: beside it."""
    return f"{os.path.dirname(data)}/.{os.path.basename(data)}.manifest.json"


def published_manifest(data: str) -> Manifest | None:
    """Read the manifest of published data, or of the entry that a job's link leads to."""
    return Manifest.read(manifest_path(os.path.realpath(data)))


def measure(directory: str) -> tuple[int, int]:
    """Return (bytes, files) of what lies below a directory, counted as a manifest counts."""
    total = files = 0
    seen: set[tuple[int, int]] = set()
    for parent, _, names in os.walk(directory):
        for name in names:
            info = os.lstat(os.path.join(parent, name))
            if not stat.S_ISREG(info.st_mode):
                continue
            files += 1
            inode = (info.st_dev, info.st_ino)
            if info.st_nlink == 1 or inode not in seen:
                total += info.st_size
            if info.st_nlink > 1:
                seen.add(inode)
    return total, files
