"""Kills and missing permissions: nothing half-published, nothing left, and the next run works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
from tests.patience import eventually
from tests.unit.staging.conftest import same

if TYPE_CHECKING:
    from collections.abc import Callable

STAGE = """
import os, sys, time
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
real = os.readv
def slow(*arguments):
    time.sleep(0.5)
    return real(*arguments)
os.readv = slow
options = CopyOptions(processes=2, threads=1)
stager = CopyStager("7.0", bases=Bases(shm=sys.argv[1]), options=options)
stager.stage(Stage("data", sys.argv[2], target="shm"))
sys.stdin.read()
"""
MIB = 1 << 20


@pytest.fixture
def crowd(tmp_path: Path) -> Path:
    """Give a tree that takes a moment: 1200 small files, one of 24 MiB."""
    top = tmp_path / "crowd"
    for number in range(12):
        (top / f"d{number}").mkdir(parents=True)
        for other in range(100):
            (top / f"d{number}" / f"f{other}").write_bytes(b"%d" % other * 2000)
    (top / "large").write_bytes(os.urandom(24 * MIB))
    return top


def alive(marker: str) -> list[str]:
    """Return the processes that have a word in their command line, zombies left out."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in line:
            found.append(process.name)
    return found


def test_workers_end_with_a_stager_that_is_killed(
    base: Path, crowd: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """At once, with most of the work before them: nobody writes where the next one cleans up."""
    process = child(STAGE, base, crowd)
    eventually(lambda: len(alive(str(base))) >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(str(base)), seconds=60)  # they would have five minutes' work


@pytest.mark.parametrize("processes", [1, 2])
def test_what_cannot_be_read_is_listed(
    base: Path, crowd: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """EACCES is final: the first 20 paths are listed, the rest counted, nothing is published."""
    real = os.open

    def closed(path: str, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        if flags & os.O_NONBLOCK and str(path).startswith("d3/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", closed)  # a fault: root may read everything
    options = CopyOptions(processes=processes, threads=1)
    stager = CopyStager("1", bases=Bases(shm=str(base)), options=options)
    with pytest.raises(StagingError) as caught:
        stager.stage(Stage("data", str(crowd), target="shm"))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(": 100 paths")
    assert len(lines) == 22
    assert all("Permission denied" in line for line in lines[1:21])
    assert "ask its owner" in caught.value.hint
    assert "being written" not in caught.value.hint
    monkeypatch.undo()
    assert not stager.stage(Stage("data", str(crowd), target="shm")).reused
    stager.cleanup()
    assert os.listdir(base) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fails_is_not_waited_for_file_by_file(
    base: Path, crowd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Each worker waits once for a fault to pass: 6.3 s, not for each of a thousand files."""
    real = os.open

    def broken(path: str, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        if flags & os.O_NONBLOCK and str(path).startswith("d"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, flags, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", broken)  # a fault that no disk here makes on demand
    waited = tmp_path / "waited"  # by processes that are forked

    def sleep(seconds: float) -> None:
        with waited.open("a") as stream:
            stream.write(f"{seconds}\n")

    options = CopyOptions(processes=processes, threads=1)
    stager = CopyStager("1", bases=Bases(shm=str(base)), options=options, sleep=sleep)
    with pytest.raises(StagingError, match="1200 paths"):
        stager.stage(Stage("data", str(crowd), target="shm"))
    assert sum(map(float, waited.read_text().split())) < 7 * processes


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN])
def test_faults_in_workers_that_pass_are_tried_again(
    base: Path, crowd: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Each worker repeats what failed, also in the middle of a large file."""
    for name in ("readv", "preadv"):
        real = getattr(os, name)
        faults = [code]

        def failing(
            *arguments: object, real: Callable[..., int] = real, faults: list[int] = faults
        ) -> int:
            if faults:
                raise OSError(faults.pop(), "injected")
            return real(*arguments)

        monkeypatch.setattr(os, name, failing)
    options = CopyOptions(processes=2, threads=1)
    stager = CopyStager("1", bases=Bases(shm=str(base)), options=options)
    result = stager.stage(Stage("data", str(crowd), target="shm"))
    assert same(Path(result.path), crowd)
    stager.cleanup()
