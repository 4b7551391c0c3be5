"""Whether staging pays."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.staging import CopyStager, StageRequest, StageResult
from hpml_orchestrator.staging.payback import Payback, break_even, payback_of
from hpml_orchestrator.staging.reread import sample_staged
from hpml_orchestrator.staging.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Reread = Callable[..., Sample]

RESULT = StageResult(
    name="d",
    path="/d",
    bytes=1000,
    files=10,
    seconds=12.0,
    method="copy",
    reused=False,
    read_seconds=16.0,
    write_seconds=32.0,
    workers=4,
)


def reader(open_seconds: float, read_seconds: float) -> Reread:
    """A stand-in for reading what was staged: each reader has a file of 100 bytes at a time."""

    def read(path: str, *, readers: int, seconds: float) -> Sample:
        assert (path, seconds) == ("/d", 0.5)
        return Sample(readers, open_seconds, 100 * readers, read_seconds)

    return read


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_the_least_number_of_epochs_that_saves_more_than_staging_took(
    stage: float, remote: float, local: float
) -> None:
    """N epochs save more than it took, n - 1 do not; never where nothing is saved."""
    epochs = break_even(stage, remote, local)
    saved = remote - local
    if saved <= 0:
        assert epochs is None
    else:
        assert epochs is not None
        assert epochs * saved > stage * (1 - 1e-9)
        assert epochs == 1 or (epochs - 1) * saved <= stage * (1 + 1e-9)


@pytest.mark.parametrize("method", ["chain", "sbcast"])
def test_data_that_other_nodes_passed_on_tell_nothing_of_the_source(method: str) -> None:
    """What a node of a chain waits for is the network, and the other nodes."""
    passed = dataclasses.replace(RESULT, method=method)
    assert payback_of(passed, reread=reader(0.1, 0.1)) is None


def test_both_times_are_of_the_whole_node() -> None:
    """4 workers that read 16 s together are 4 s of a node; what was staged is read by 4 as well."""
    found = payback_of(RESULT, reread=reader(0.3, 0.1))  # 10 files of 0.4 s by 4 readers
    assert found is not None
    assert found.to_json() == {
        "stage_seconds": 12.0,
        "remote_seconds": 4.0,
        "local_seconds": 1.0,
        "epochs": 5,
        "warm": True,
    }
    late = dataclasses.replace(RESULT, workers=64)  # most came when the end was near
    assert payback_of(late, reread=reader(0.3, 0.1)) == found
    slow = payback_of(RESULT, reread=reader(1.5, 0.5))
    assert slow is not None
    assert slow.epochs is None


@given(st.integers(1, 64), st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
def test_a_file_that_opens_sooner_here_pays_whatever_the_number_of_readers(
    workers: int, there: float, here: float
) -> None:
    """Many readers at the source are compared with as many here, and never with a few."""
    files = 1000
    reading = files * there
    result = dataclasses.replace(
        RESULT,
        bytes=100 * files,
        files=files,
        seconds=5 + 2 * reading / workers,
        read_seconds=reading,
        write_seconds=5 * workers + reading,  # all of them were at work all the time
        workers=workers,
    )
    found = payback_of(result, reread=reader(here, 0.0))
    assert found is not None
    assert found.remote_seconds / found.local_seconds == pytest.approx(there / here)
    assert (found.epochs is None) == (found.remote_seconds <= found.local_seconds)


@pytest.mark.parametrize(
    "changes", [{"reused": True}, {"read_seconds": 0.0}, {"bytes": 0, "files": 0}]
)
def test_who_did_not_read_the_source_says_nothing(changes: dict[str, object]) -> None:
    """Reused, passed on by another node, or empty: there is no measured time to compare with."""
    other = dataclasses.replace(RESULT, **changes)  # type: ignore[arg-type]
    assert payback_of(other, reread=reader(0.1, 0.1)) is None


@pytest.mark.parametrize("read", [Sample(3, 0.1, 0, 0.1), Sample(0, 0, 0, 0)])
def test_a_sample_that_read_nothing_says_nothing(read: Sample) -> None:
    """Such as of a tree of empty files, or of one that is gone."""

    def reread(path: str, *, readers: int, seconds: float) -> Sample:
        assert (path, readers, seconds) == ("/d", 4, 0.5)
        return read

    assert payback_of(RESULT, reread=reread) is None


@pytest.mark.parametrize("readers", [1, 8])
def test_a_sample_reads_the_files_below_a_directory(source: Path, readers: int) -> None:
    """All of a small tree, each file once; links and what cannot be opened are passed over."""
    os.symlink("/etc/passwd", source / "link")
    os.mkfifo(source / "fifo")
    read = sample_staged(str(source), readers=readers, seconds=60)
    assert (read.bytes, read.files) == (5003, 3)
    assert 0 < read.open_seconds < 60
    assert 0 < read.read_seconds < 60
    assert sample_staged(str(source / "none"), readers=readers) == Sample(0, 0, 0, 0)


def test_all_readers_are_at_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes and threads: nobody gets a file open before 12 readers want one."""
    together = multiprocessing.get_context("fork").Barrier(12)
    real = os.open

    def open_together(path: str, flags: int, *rest: int) -> int:
        together.wait(60)
        return real(path, flags, *rest)

    for number in range(12):
        (tmp_path / f"{number}").write_bytes(b"x" * 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "open", open_together)
    read = sample_staged(str(tmp_path), readers=12, seconds=60)
    assert (read.files, read.bytes) == (12, 120)


def test_a_large_file_is_read_by_several(source: Path) -> None:
    """In pieces of 64 MiB, as it was staged in pieces: here one of 16 that two readers share."""
    with open(source / "large", "wb") as stream:
        stream.truncate(1 << 30)
    read = sample_staged(str(source), readers=2, seconds=600)
    assert (read.files, read.bytes) == (3 + 16, 5003 + (1 << 30))


def test_a_sample_ends_in_time(source: Path) -> None:
    """A large sparse file is read for the time that was given, and no longer."""
    with open(source / "large", "wb") as stream:
        stream.truncate(1 << 40)
    began = time.monotonic()
    read = sample_staged(str(source), seconds=0.05, readers=4)
    assert 0 < read.bytes < 1 << 40
    assert time.monotonic() - began < 60


def test_what_the_stager_measures_is_enough(stager: CopyStager, source: Path) -> None:
    """A real result has what the sentence needs, or says why it has not."""
    result = stager.stage(StageRequest("d", str(source), target="shm"))
    found = payback_of(result)
    assert (found is None) == (result.read_seconds == 0)
    if found is not None:
        assert isinstance(found, Payback)
        assert min(found.remote_seconds, found.local_seconds) > 0
