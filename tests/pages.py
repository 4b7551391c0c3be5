"""The pages of the documentation, and somebody who follows them.

What the tags of code blocks mean is written in CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ANYTHING = "…"
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line, its tag's words, its text."""

    page: str
    line: int
    words: tuple[str, ...]
    text: str

    @property
    def tag(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block with its expected status and output."""

    place: str
    text: str
    status: int
    output: tuple[str, ...]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """All fenced blocks of a page, in order."""
    fenced: list[Block] = []
    opened: tuple[int, tuple[str, ...]] | None = None
    lines: list[str] = []
    for number, line in enumerate(read(page).splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened is None:
            opened, lines = (number, tuple(line[3:].split())), []
        else:
            fenced.append(Block(page, *opened, "".join(f"{line}\n" for line in lines)))
            opened = None
    assert opened is None, f"{page}: the block at line {opened} is not closed"
    return tuple(fenced)


def pages_with(tag: str) -> list[str]:
    """The pages that have a block of that tag."""
    return [page for page in RUN_PAGES if any(block.tag == tag for block in blocks(page))]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        first, _, rest = part.partition("\n")
        match = re.fullmatch(r"(.*?)(?:\s+# exit (\d+))?", first)
        assert match is not None
        output = tuple(line for line in rest.splitlines() if line.strip())
        yield Command(str(block), match[1], int(match[2] or 0), output)


def fits(expected: Iterable[str], printed: Iterable[str]) -> bool:
    """Whether output matches a block; `…` is anything, alone on a line any number of lines."""
    pattern = ""
    for line in expected:
        parts = (re.escape(_blanks(part)) for part in f"{line}\n".split(ANYTHING))
        pattern += r"(.*\n)*" if line.strip() == ANYTHING else ".*".join(parts)
    return re.fullmatch(pattern, "".join(_blanks(f"{line}\n") for line in printed)) is not None


def _blanks(line: str) -> str:
    return re.sub(r"[ \t]+", " ", line)


class Reader:
    """Somebody who follows a page in a separate directory.

    Args:
        directory: is made; holds a copy of the training jobs and docs/machines/dgx-a100.json.
        environment: the complete environment, except variables such as HOME and HPML_HOME.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.records = directory.with_name(f"{directory.name}-records")
        self.environment = {
            "HOME": str(directory),
            "USER": "reader",
            "LANG": "C.UTF-8",
            "HPML_HOME": str(self.records),
            **environment,
        }
        shutil.copytree(
            ROOT / "training_jobs", directory, ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "docs/machines/dgx-a100.json", directory)

    def call(self, command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"$ {command}: {error}\n{error.stdout!r}")

    def follow(self, page: str, *tags: str) -> int:
        """Write the page's files and run its commands of these tags; return how many there were."""
        count = 0
        for block in blocks(page):
            if len(block.words) > 1 and block.words[0] != "console":
                path = self.directory / block.words[1]
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            if block.tag in tags:
                for command in commands(block):
                    self._run(command)
                    count += 1
        return count

    def _run(self, command: Command) -> None:
        done = self.call(command.text)
        story = f"{command.place}: $ {command.text}\n{done.stdout}"
        assert done.returncode == command.status, f"exit status {done.returncode} of {story}"
        if command.output:
            printed = [line for line in done.stdout.splitlines() if line.strip()]
            assert fits(command.output, printed), f"{story}--- the page has:\n" + "\n".join(
                command.output
            )

    def administer(self) -> Path:
        """Become the administrator of docs/install-cluster.md; returns where files of /etc go.

        The network is not used: pip finds what hpml needs in this environment's packages.
        """
        place, packages = self.directory.parent / "site", self.directory.parent / "packages"
        for made in (place / "programs", packages):
            made.mkdir(parents=True)
        python = place / "programs" / "python3.11"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        for here in sys.path:
            for path in Path(here).iterdir() if here.endswith("site-packages") else ():
                own = path.name.startswith(("hpml_", "_hpml", "_editable")) or path.suffix == ".pth"
                if not own and not os.path.lexists(packages / path.name):
                    (packages / path.name).symlink_to(path)
        (self.directory / "hpml-orchestrator").symlink_to(ROOT)
        self.environment |= {
            "PREFIX": str(place / "opt" / "hpml"),
            "DESTDIR": str(place),
            "PYTHONPATH": str(packages),
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # which means yes
            "PATH": f"{place}/opt/hpml/commands:{place}/programs:{self.environment['PATH']}",
        }
        return place

    def leave(self) -> None:
        """End what a failed page left running."""
        left = self.call("hpml status --json").stdout
        if left.startswith("["):
            for run in json.loads(left):
                self.call(f"hpml cancel {run['id']} && hpml wait {run['id']}")
