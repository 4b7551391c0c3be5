"""A chain brings the same tree to all nodes, and the source is read once."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import eventually
from tests.unit.staging.conftest import same
from tests.unit.staging.many.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Callable


COUNT_OPENS = """
import hpml_orchestrator.staging.source as S
opened = os.path.join(node["attempt"], "..", f"opened{node['index']}")
real = S._TreeReader.read
def read(self, number):
    with open(opened, "a") as stream:
        stream.write(f"{number}\\n")
    return real(self, number)
S._TreeReader.read = read
"""


def test_all_nodes_get_the_tree(job: Callable[..., Nodes], tree: Path) -> None:
    """Four nodes: same names, contents, links, times, holes; modes without what umask takes."""
    nodes = job(tree, 4, umask=0o027)
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * 4, ends
    assert len({end["digest"] for end in ends}) == 1
    assert ends[0]["digest"].startswith("xxh3_128:")
    assert all(end["method"] == "chain" and not end["reused"] for end in ends)
    for index in range(4):
        data = nodes.data(index)
        assert same(tree, data)
        assert stat.S_IMODE((data / "run.sh").stat().st_mode) == 0o750
        assert os.readlink(data / "link") == "a/../a/7.bin"
        assert (data / "a" / "same").stat().st_ino == (data / "large").stat().st_ino
        assert (data / "holes").stat().st_blocks * 512 < 4 << 20
        for name in ("large", "a", "a/7.bin"):
            assert (data / name).stat().st_mtime_ns == (tree / name).stat().st_mtime_ns
    assert nodes.leftovers() == []


def test_only_the_first_node_reads_the_source(job: Callable[..., Nodes], tree: Path) -> None:
    """Each file with contents is read once, on node 0."""
    nodes = job(tree, 3, before=COUNT_OPENS)
    nodes.start()
    assert [end["status"] for end in nodes.ends()] == [0, 0, 0]
    opened = (nodes.root / "opened0").read_text().split()
    assert len(opened) == len(set(opened)) >= 300
    assert not (nodes.root / "opened1").exists()
    assert not (nodes.root / "opened2").exists()


def test_archives_are_unpacked_once(job: Callable[..., Nodes], tree: Path, root: Path) -> None:
    """What travels is what is in the archive."""
    archive = root / "data.tar.gz"
    shutil.rmtree(tree / "empty dir")
    with tarfile.open(archive, "w:gz") as made:
        for path in sorted((tree / "a").iterdir()):
            made.add(path, path.name)
    nodes = job(archive, 3)
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert all(same(tree / "a", nodes.data(index)) for index in range(3))


def test_old_isolated_interpreters_will_do(job: Callable[..., Nodes], tree: Path) -> None:
    """Python 3.9 without site-packages, as nodes may have it."""
    found = sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))
    old = str(found[0]) if found else shutil.which("python3.9")
    if old is None:
        pytest.skip("no Python 3.9 found: that a chain runs there is NOT tested")
    nodes = job(tree, 3)
    nodes.python = (old, "-I", "-S", "-W", "error")
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert ends[2]["digest"].startswith("blake2b_128:")
    assert same(tree, nodes.data(2))


def test_a_node_that_cannot_hash_alike_is_named(job: Callable[..., Nodes], tree: Path) -> None:
    """One node without xxhash ends all, rather than trust what it cannot check."""
    before = "import hpml_orchestrator.staging.manifest as H; H._xxhash = lambda: None"
    nodes = job(tree, 3)
    nodes.start(0, 1)
    nodes.start(2, before=before)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert "n2: this node cannot hash with xxh3_128" in ends[0]["error"]


def test_a_node_that_has_the_data_passes_it_on(job: Callable[..., Nodes], tree: Path) -> None:
    """Whichever node has it already, first, middle or last, the others get theirs."""
    for number, having in enumerate(((0,), (1,), (2,), (0, 1, 2))):
        nodes = job(tree, 3, keep=True)
        nodes.attempt = f"attempt{number}"
        for index in having:
            nodes.start(index, nodes=1, method="shared")
        assert all(end["status"] == 0 for end in nodes.ends())
        inodes = {index: nodes.data(index).stat().st_ino for index in having}
        nodes.start()
        ends = nodes.ends()
        assert [end["status"] for end in ends] == [0, 0, 0], ends
        assert [end["reused"] for end in ends] == [index in having for index in range(3)]
        assert all(same(tree, nodes.data(index)) for index in range(3))
        assert inodes == {index: nodes.data(index).stat().st_ino for index in having}
        assert nodes.leftovers() == []
        for index in range(3):
            shutil.rmtree(nodes.base(index))


def test_the_notices_are_for_the_user_alone(job: Callable[..., Nodes], tree: Path) -> None:
    """The file with the secret is mode 0600 in a directory of mode 0700, and gone at the end."""
    nodes = job(tree, 2)
    nodes.start(0)
    chain = nodes.root / "attempt" / "chain"
    start = chain / "data.start"
    eventually(start.exists)
    assert stat.S_IMODE(start.stat().st_mode) == 0o600
    assert stat.S_IMODE(chain.stat().st_mode) == 0o700
    nodes.start(1)
    assert [end["status"] for end in nodes.ends()] == [0, 0]
    assert list(chain.iterdir()) == []
