"""Jobs of several nodes, each a process with its own directory in RAM."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.staging.many.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def root() -> Iterator[Path]:
    """Give an empty directory in RAM."""
    path = tempfile.mkdtemp(prefix="hpml-test-", dir="/dev/shm")
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def tree(root: Path) -> Path:
    """Give a tree with every kind of entry: odd names, links, holes, empty files."""
    top = root / "source"
    (top / "a" / "deep").mkdir(parents=True)
    (top / "empty dir").mkdir()
    for number in range(300):
        (top / "a" / f"{number}.bin").write_bytes(os.urandom(1) * (number * 97))
    (top / "a" / "deep" / "none").touch()
    (top / "large").write_bytes(os.urandom(3 << 20) + b"end")
    with open(os.fsencode(top) + b"/odd\xff\n name", "wb") as stream:
        stream.write(b"odd")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o777)
    (top / "link").symlink_to("a/../a/7.bin")
    os.link(top / "large", top / "a" / "same")
    with open(top / "holes", "wb") as stream:
        stream.truncate(40 << 20)
        stream.seek(20 << 20)
        stream.write(b"in the middle")
    return top


@pytest.fixture
def big(root: Path) -> Path:
    """Give a tree of 64 MiB, which takes a moment."""
    top = root / "big"
    top.mkdir()
    block = os.urandom(1 << 20)
    for number in range(16):
        (top / f"{number}").write_bytes(block * 4)
    return top


@pytest.fixture
def job(root: Path) -> Iterator[Callable[..., Nodes]]:
    """Make jobs; what still runs of them is killed at the end."""
    made: list[Nodes] = []

    def make(source: Path, count: int, **options: object) -> Nodes:
        nodes = Nodes(root, source, count, options)
        made.append(nodes)
        return nodes

    yield make
    for nodes in made:
        nodes.close()
