"""Places to stage from and to: a source on disk, a base in RAM, small file systems."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hpml_orchestrator
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkProcess

FORK = multiprocessing.get_context("fork")
CHECKOUT = Path(hpml_orchestrator.__file__).parents[1]


def same(left: Path | str, right: Path | str) -> bool:
    """Return whether two trees have the same names, types and contents (GNU diff)."""
    words: list[str | Path] = ["diff", "-r", "-q", "--no-dereference", left, right]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def entries(base: Path, *, job: str = "") -> list[Path]:
    """Return the entries that are kept for later jobs, or those of a job."""
    found = base.glob("hpml-*/*")
    return sorted(path for path in found if path.name.partition("@")[2] == job)


def partials(base: Path) -> list[Path]:
    """Return the copies that are in progress, or that were left."""
    return list(base.glob("hpml-*/*/.data.partial-*"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a small tree on disk."""
    root = tmp_path / "source"
    (root / "a" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "one.bin").write_bytes(b"1" * 5000)
    (root / "a" / "two.txt").write_text("two")
    (root / "a" / "deep" / "none").touch()
    return root


@pytest.fixture
def base() -> Iterator[Path]:
    """Give an empty directory in /dev/shm and check that nothing is left mounted in it."""
    path = tempfile.mkdtemp(prefix="hpml-test-", dir="/dev/shm")
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def stager(base: Path, tmp_path: Path) -> Iterator[CopyStager]:
    """Give a stager whose shm is `base` and whose local is on disk; its sleep takes no time."""
    local = tmp_path / "local"
    local.mkdir()
    result = CopyStager(
        "7.0", bases=Bases(shm=str(base), local=str(local)), sleep=lambda _seconds: None
    )
    yield result
    result.cleanup()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small tmpfs file systems by their options; skips if that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"tmpfs{len(mounted)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "hpml-test", str(point)],
            check=False,
            capture_output=True,
        )
        if done.returncode:
            point.rmdir()
            pytest.skip("NOT TESTED: mounting needs root")
        mounted.append(point)
        return point

    yield mount
    busy = [
        point for point in mounted if subprocess.run(["umount", str(point)], check=False).returncode
    ]
    for point in busy:  # of a test that failed, as a rule: nothing stays mounted all the same
        subprocess.run(["umount", "--lazy", str(point)], check=True)
    assert busy == []


@pytest.fixture
def start() -> Iterator[Callable[..., ForkProcess]]:
    """Run functions in forked processes; they are killed when the test ends."""
    started: list[ForkProcess] = []

    def run(work: Callable[..., object], *arguments: object) -> ForkProcess:
        process = FORK.Process(target=work, args=arguments)
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code in another process; it is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one of everything that a pack keeps."""
    root = tmp_path / "tree"
    (root / "train" / "a.d").mkdir(parents=True)
    (root / "empty" / "deeper").mkdir(parents=True)
    (root / "train" / "a.jpg").write_bytes(b"jpg" * 700)
    (root / "train" / "a.cls").write_text("7")
    (root / "train" / "a.d" / "x").write_bytes(b"between, in plain order")
    (root / "train" / "none").touch()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "ends").write_bytes(b"e" * 512)
    (root / ("long" * 30)).mkdir()
    (root / ("long" * 30) / ("name" * 40)).write_text("pax")
    (root / "prefix" / ("p" * 90)).mkdir(parents=True)
    (root / "prefix" / ("p" * 90) / ("q" * 90)).write_text("ustar prefix")
    os.link(root / "train" / "a.jpg", root / "also.jpg")
    os.link(root / "train" / "a.jpg", root / "zz.jpg")
    (root / "train" / "link.jpg").symlink_to("a.jpg")
    (root / "up").symlink_to("train/a.d")
    (root / "dangling").symlink_to("nothing/there")
    (root / "far").symlink_to(("x" * 60 + "/") * 3)
    (root / "grüße").write_text("utf-8")
    odd = os.fsencode(root) + b"/odd-\xff\n name"
    with open(odd, "wb") as stream:
        stream.write(b"no utf-8")
    with open(os.fsencode(root) + b"/" + b"\xfe" * 150, "wb") as stream:
        stream.write(b"long and no utf-8")
    with open(root / "sparse", "wb") as stream:
        stream.truncate(3_000_000)
        stream.seek(1_500_000)
        stream.write(b"island")
    (root / "setuid").write_text("s")
    (root / "setuid").chmod(0o755)
    for number, path in enumerate(sorted(root.rglob("*"))):
        when = (1_600_000_000 + number) * 1_000_000_000 + 123_456_789
        os.utime(path, ns=(when, when), follow_symlinks=False)
    (root / "empty").chmod(0o555)
    return root
