"""Places to stage from and to: a source on disk, a base in RAM, small file systems."""

from __future__ import annotations

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

CHECKOUT = Path(hpml_orchestrator.__file__).parents[1]


def same(left: Path | str, right: Path | str) -> bool:
    """Return whether two trees have the same names, types and contents (GNU diff)."""
    trees = [Path(left).resolve(), Path(right).resolve()]  # of a job's link its target
    words: list[str | Path] = ["diff", "-r", "-q", "--no-dereference", *trees]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


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
