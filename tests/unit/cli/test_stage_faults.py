"""Faults of issue 5 with real `hpml stage` processes.

After each of them: a status that is not zero, an error that names the cause, nothing half-published
and nothing left over, and the next run works.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.conftest import skip_or_fail
from tests.unit.cli.stage_node import Node, grow, same
from tests.unit.staging.test_archive import make as archive

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result

FILES = 600
SLOWLY = ("--opens-per-second", "200")  # three seconds for FILES


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path / "tree", FILES)


def process(node: Node, *words: object) -> Result:
    """Run `hpml stage` as a process of its own."""
    return node.shell.hpml(*node.first, "stage", *map(str, words))


def copying(node: Node, started: subprocess.Popen[str]) -> Path:
    """Wait until the first files are there, and return the directory that is being filled."""
    end = time.monotonic() + 60
    while not any(node.root.glob("*/hpml-*/*/.*.partial-*/*/*")):
        assert time.monotonic() < end
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)
    (partial,) = node.root.glob("*/hpml-*/*/.*.partial-*")
    return partial


def failed(started: subprocess.Popen[str]) -> str:
    """Wait for the end, which is a told failure; returns what was told."""
    out, err = started.communicate(timeout=60)
    assert started.returncode == 8, (out, err)
    assert out == ""
    assert "Traceback" not in err
    return err


def kept_aside(tree: Path) -> Callable[[], None]:
    """Return what puts a tree back as it is now."""
    kept = tree.with_name("kept")
    shutil.copytree(tree, kept, symlinks=True)

    def again() -> None:
        shutil.rmtree(tree, ignore_errors=True)
        kept.rename(tree)

    return again


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("grows", "changed while it was copied"),
        ("is replaced", "changed while it was copied"),
        ("goes", "No such file or directory|changed while it was copied"),
        ("all go", "No such file or directory"),
        ("comes", "changed while it was copied"),
    ],
)
def test_a_source_that_changes_midway(node: Node, tree: Path, fault: str, said: str) -> None:
    """Files that grow, are replaced, vanish or come while others are copied."""
    again = kept_aside(tree)
    started = node.start(str(tree), "--to", "shm", *SLOWLY)
    partial = copying(node, started)
    waits = [one for one in tree.glob("?/*") if not (partial / one.relative_to(tree)).exists()]
    last = waits[-1]
    if fault == "grows":
        last.write_bytes(b"x" * 10_000)
    elif fault == "is replaced":
        shutil.copy2(last, tree.parent / "other")
        (tree.parent / "other").rename(last)
    elif fault == "goes":
        last.unlink()
    elif fault == "all go":
        shutil.rmtree(tree)
    else:
        (last.parent / "new").touch()
    assert re.search(said, failed(started))
    assert os.listdir(node.ram) == []
    again()
    told = node.stage(str(tree), "--to", "shm", "--print", "path")
    assert told.code == 0, told
    assert same(tree, told.out.strip())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if subprocess.run(mount, check=False).returncode:
        skip_or_fail("NOT TESTED: mounting needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_fills_midway(node: Node, tree: Path, disk: Path) -> None:
    """Another process takes the room that was there when the copy began."""
    started = node.start(str(tree), "--to", str(disk), *SLOWLY)
    copying(node, started)
    filler = disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k", "status=none"], check=False)
    told = failed(started)
    assert "No space left on device" in told
    assert "hint: " in told
    assert os.listdir(disk) == ["filler"]
    filler.unlink()
    done = node.stage(str(tree), "--to", str(disk), "--print", "path")
    assert done.code == 0, done
    assert same(tree, done.out.strip())
    assert node.stage("clean", "--mine", str(disk)).code == 0


LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}
FINE = ("fine", {"data": b"1" * 5000})


@pytest.mark.parametrize(
    ("said", "members"),
    [
        ("absolute name", [("/tmp/hpml-escaped", {"data": b"1"})]),
        ("`..` in the name", [("../../hpml-escaped", {"data": b"1"})]),
        ("leaves the tree", [("out", {**LINK, "linkname": "../.."})]),
        ("absolute path", [("out", {**LINK, "linkname": "/etc/passwd"})]),
        ("below out, which is no", [("out", {**LINK, "linkname": "a"}), ("out/x", {"data": b"1"})]),
        ("absolute name", [("hard", {**HARD, "linkname": "/etc/passwd"})]),
        ("device, a fifo", [("disk", {"type": tarfile.BLKTYPE, "devmajor": 7})]),
        ("twice", [("x", {"data": b"1"}), ("./x", {"data": b"2"})]),
    ],
)
def test_a_hostile_archive(
    node: Node, tmp_path: Path, said: str, members: list[tuple[str, dict[str, Any]]]
) -> None:
    """What would write or point elsewhere, or has one name twice; the next archive is fine."""
    path = tmp_path / "data.tar"
    archive(path, FINE, *members, FINE if said != "twice" else ("other", {}))
    told = process(node, path, "--to", "shm")
    assert (told.code, told.out) == (8, ""), told
    assert said in told.err
    assert "Traceback" not in told.err
    assert os.listdir(node.ram) == []
    assert not list(tmp_path.rglob("hpml-escaped"))
    assert not os.path.exists("/tmp/hpml-escaped")
    archive(path, FINE)
    told = node.stage(str(path), "--to", "shm", "--print", "path")
    assert Path(told.out.strip(), "fine").read_bytes() == b"1" * 5000


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_bomb(node: Node, disk: Path, tmp_path: Path, mode: str) -> None:
    """A small archive of 64 MiB of zeros: given up where it does not fit, before it is unpacked."""
    path = tmp_path / "data.tar"
    archive(path, *[(f"{number}", {"data": bytes(1 << 20)}) for number in range(64)], mode=mode)
    assert path.stat().st_size < 1 << 18
    told = process(node, path, "--kind", "tar", "--to", disk)
    assert (told.code, told.out) == (2, ""), told
    assert re.search(r"needs at least [89]\.\d MiB", told.err)
    assert os.listdir(disk) == []
    archive(path, FINE, mode=mode)
    assert node.stage(str(path), "--kind", "tar", "--to", str(disk)).code == 0
    assert node.stage("clean", "--mine", str(disk)).code == 0


@pytest.mark.parametrize("form", ["tar", "gztar", "zip"])
def test_an_archive_that_was_cut(node: Node, tmp_path: Path, form: str) -> None:
    """As a full disk or a broken download leaves one; whole, it is staged."""
    tree = grow(tmp_path / "tree", 50)
    whole = Path(shutil.make_archive(str(tmp_path / "whole"), form, tree))
    path = whole.with_name(f"data{''.join(whole.suffixes)}")
    path.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * 0.6)])
    told = process(node, path, "--to", "shm")
    assert (told.code, told.out) == (8, ""), told
    assert path.name in told.err
    assert "Traceback" not in told.err
    assert os.listdir(node.ram) == []
    whole.replace(path)
    told = node.stage(str(path), "--to", "shm", "--print", "files")
    assert (told.code, told.out) == (0, "50\n"), told
