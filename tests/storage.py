"""Folders on a real disk, for tests of what reaches one: /tmp may be in memory."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "/var/tmp"


@contextmanager
def stored_folder() -> Iterator[Path]:
    """A new folder on the disk, if this machine has one."""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="hpml-test-") as folder:
        yield Path(folder)


def in_memory(path: str | Path = FOLDER) -> bool:
    """Whether files there are not stored on a disk, or on one that cannot be determined."""
    words = subprocess.run(
        ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
    )
    return words.stdout.strip() in {"tmpfs", "ramfs", "overlayfs"}
