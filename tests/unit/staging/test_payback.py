"""Whether staging pays."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.staging import CopyStager, StageRequest, StageResult
from hpml_orchestrator.staging.payback import Payback, Sample, break_even, payback_of, sample_staged

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
    """A stand-in for reading what was staged: one file of 100 bytes."""

    def read(path: str, *, seconds: float) -> Sample:
        assert (path, seconds) == ("/d", 0.5)
        return Sample(1, open_seconds, 100, read_seconds)

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


def test_data_that_other_nodes_passed_on_tell_nothing_of_the_source() -> None:
    """What a node of a chain waits for is the network, and the other nodes."""
    passed = dataclasses.replace(RESULT, method="chain")
    assert payback_of(passed, reread=reader(0.1, 0.1)) is None


def test_both_times_are_of_the_whole_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 workers that read 16 s together are 4 s of a node; what was staged is read by 4 as well."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone = payback_of(RESULT, reread=reader(0.3, 0.1))
    assert alone is not None
    assert alone.local_seconds == 4.0, "one CPU reads no faster for four readers"


@given(st.integers(1, len(os.sched_getaffinity(0))), st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
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

    def reread(path: str, *, seconds: float) -> Sample:
        assert (path, seconds) == ("/d", 0.5)
        return read

    assert payback_of(RESULT, reread=reread) is None


def test_a_sample_reads_the_files_below_a_directory(source: Path) -> None:
    """All of a small tree, each file once; links and what cannot be opened are passed over."""
    os.symlink("/etc/passwd", source / "link")
    read = sample_staged(str(source), seconds=60)
    assert (read.bytes, read.files) == (5003, 3)
    assert 0 < read.open_seconds < 60
    assert 0 < read.read_seconds < 60
    assert sample_staged(str(source / "none")) == Sample(0, 0, 0, 0)


def test_a_sample_ends_in_time(source: Path) -> None:
    """It does not read a large tree to the end; of a large file it reads the beginning."""
    with open(source / "large", "wb") as stream:
        stream.truncate(1 << 40)
    now = iter(range(10_000))
    read = sample_staged(str(source), seconds=5, clock=lambda: float(next(now)))
    assert 0 < read.files < 4
    assert read.bytes < 9 << 20


def test_what_the_stager_measures_is_enough(stager: CopyStager, source: Path) -> None:
    """A real result has what the sentence needs, or says why it has not."""
    result = stager.stage(StageRequest("d", str(source), target="shm"))
    found = payback_of(result)
    assert (found is None) == (result.read_seconds == 0)
    if found is not None:
        assert isinstance(found, Payback)
        assert min(found.remote_seconds, found.local_seconds) > 0
