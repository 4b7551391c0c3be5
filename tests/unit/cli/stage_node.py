"""A node of a test's own, for the tests of `hpml stage`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]


@dataclass
class Node:
    """A directory for RAM, one for the disk, and a site profile that says so."""

    root: Path
    hpml: Hpml
    shell: Shell

    def make(self) -> None:
        """Make all of it."""
        self.ram.mkdir()
        self.disk.mkdir()
        (self.root / "site.toml").write_text(
            f'[paths]\nram = "{self.ram}"\nscratch = "{self.disk}"\n', encoding="utf-8"
        )

    @property
    def ram(self) -> Path:
        """What shm stands for."""
        return self.root / "ram"

    @property
    def disk(self) -> Path:
        """What local stands for."""
        return self.root / "disk"

    @property
    def first(self) -> tuple[str, ...]:
        """Options of hpml itself."""
        return ("--site", str(self.root / "site.toml"))

    def stage(self, *words: str) -> Result:
        """Run `hpml stage` in this process."""
        return self.hpml(*self.first, "stage", *words)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start it as a process of its own."""
        return self.shell.start(*self.first, "stage", *words, **more)

    def left(self, base: Path | None = None) -> list[str]:
        """What lies below a base and is more than hpml's own small files."""
        found: list[str] = []
        for _, directories, files in os.walk(base or self.ram):
            found += [one for one in directories if not one.startswith(("hpml-", "shell-"))]
            found += [one for one in files if not re.search(r"lock$|lease|owner|staging$", one)]
        return sorted(found)

    def clean(self) -> None:
        """Remove what this test's process staged, and what is kept."""
        self.stage("clean", "--mine", "--all", str(self.ram), str(self.disk))


def grow(root: Path, files: int, size: int = 500) -> Path:
    """Make a tree of small files, with an empty directory and a link."""
    (root / "empty").mkdir(parents=True)
    for number in range(files):
        place = root / f"{number % 7}"
        place.mkdir(exist_ok=True)
        (place / f"{number:05}.bin").write_bytes(os.urandom(size))
    (root / "link").symlink_to("0")
    return root


def same(one: str | Path, other: str | Path) -> bool:
    """Whether two trees have the same names and contents."""
    return subprocess.run(["diff", "-r", one, other], check=False).returncode == 0
