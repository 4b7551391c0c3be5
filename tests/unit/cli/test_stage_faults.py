"""Faults of issue 5 with real `hpml stage` processes.

After each of them: a status that is not zero, an error that names the cause, nothing half-published
and nothing left over, and the next run works.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import skip_or_fail
from tests.unit.cli.conftest import HPML, Result
from tests.unit.cli.stage_node import Node, grow, same
from tests.unit.staging.test_archive import make as archive

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
    while True:
        with contextlib.suppress(FileNotFoundError):  # a directory that goes while glob looks
            if any(node.root.glob("*/hpml-*/*/.*.partial-*/*/*")):
                (partial,) = node.root.glob("*/hpml-*/*/.*.partial-*")
                return partial
        assert time.monotonic() < end
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)


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


def no_override(node: Node, *words: object) -> Result:
    """Run hpml without the right to pass over modes, which root has."""
    start = ["setpriv", "--inh-caps=-dac_override,-dac_read_search"]
    start += ["--bounding-set=-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*(start if os.getuid() == 0 else []), HPML, *node.first, *map(str, words)],
        env=node.shell.environment(),
        cwd=node.root,
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_file_that_may_not_be_read(node: Node, tmp_path: Path) -> None:
    """Named by its path, with what helps against that and not against something else."""
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    told = no_override(node, "stage", tmp_path / "secret", "--to", "shm")
    assert told.code == 8
    assert f"cannot stage {tmp_path}/secret:" in told.err
    assert "Permission denied" in told.err
    assert "ask its owner" in told.err
    assert "being written" not in told.err


@pytest.mark.parametrize(
    "words",
    [
        "pack closed/in p",
        "stage ls closed/in",
        "stage clean closed/in",
        "stage verify closed/in",
        "stage tree --to closed/in",
        "stage closed/in --to shm",
    ],
)
def test_behind_a_closed_directory(node: Node, tree: Path, words: str) -> None:
    """Nobody can say that it is not there: that it may not be looked at is told."""
    (tree.parent / "closed" / "in").mkdir(parents=True)
    (tree.parent / "closed").chmod(0)
    told = no_override(node, *words.split())
    (tree.parent / "closed").chmod(0o700)
    assert told.code == 8
    assert "closed/in: Permission denied" in told.err
    assert "ask its owner" in told.err


def test_a_pack_that_was_cut_off_is_not_staged(node: Node, tree: Path) -> None:
    """A real one, ended by a file that may not be read: staged once it was completed."""
    pack = node.root / "phuge"
    (tree / "closed").touch(0)
    assert no_override(node, "pack", tree, pack).code == 8
    (tree / "closed").chmod(0o600)
    assert (pack / ".packing.json").exists()
    assert not (pack / "pack.index").exists()
    told = node.stage(str(pack), "--to", "shm")
    assert (told.code, told.out) == (2, "")
    assert "SRC: is no finished pack" in told.err
    assert str(pack) in told.err
    assert "`hpml pack --resume" in told.err
    assert node.left() == []
    assert node.stage(str(pack), "--to", "shm", "--kind", "tree", "--name", "raw").code == 0
    assert node.shell.hpml("pack", "--resume", str(tree), str(pack)).code == 0
    path = node.stage(str(pack), "--to", "shm", "--print", "path").out.strip()
    assert same(tree, path)


def test_the_local_directory_that_is_not_there(node: Node, tree: Path, tmp_path: Path) -> None:
    """Whoever said it is named: the option, the variable, the site profile."""
    told = node.stage(str(tree), "--to", "local", "--local-dir", "/nosuch")
    assert "--local-dir: no such directory on this node" in told.err
    shutil.rmtree(node.disk)
    told = node.stage(str(tree), "--to", "local")
    assert "--to: no such directory on this node" in told.err
    assert "the site profile says" in told.err
    node.disk.mkdir()
    variables = {**node.shell.environment(), "TMPDIR": "/nosuch"}
    done = subprocess.run(
        [HPML, "--site", "none", "stage", tree, "--to", "local"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "$TMPDIR says" in done.stderr
