"""Whether staging pays."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.staging import CopyStager, StageRequest, StageResult
from hpml_orchestrator.staging.payback import Payback, Sample, break_even, payback_of, sample_read

if TYPE_CHECKING:
    from pathlib import Path

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
    assert payback_of(passed, sample=lambda _: Sample(500, 5, 0.5)) is None


def test_both_times_are_of_the_whole_node() -> None:
    """4 workers that read 16 s together are 4 s of a node; a sample counts for all bytes."""
    found = payback_of(RESULT, sample=lambda path: Sample(500, 5, 0.5 if path == "/d" else 0))
    assert found == Payback(12.0, 4.0, 1.0, 5)
    assert found.to_json() == {
        "stage_seconds": 12.0,
        "remote_seconds": 4.0,
        "local_seconds": 1.0,
        "epochs": 5,
        "warm": True,
    }
    late = dataclasses.replace(RESULT, workers=64)  # most came when the end was near
    found = payback_of(late, sample=lambda _: Sample(500, 5, 0.5))
    assert found is not None
    assert found.remote_seconds == 4.0
    slow = payback_of(RESULT, sample=lambda _: Sample(500, 5, 2.0))
    assert slow is not None
    assert slow.epochs is None


@pytest.mark.parametrize(
    "changes", [{"reused": True}, {"read_seconds": 0.0}, {"bytes": 0, "files": 0}]
)
def test_who_did_not_read_the_source_says_nothing(changes: dict[str, object]) -> None:
    """Reused, passed on by another node, or empty: there is no measured time to compare with."""
    other = dataclasses.replace(RESULT, **changes)  # type: ignore[arg-type]
    assert payback_of(other, sample=lambda _: Sample(1, 1, 1.0)) is None


def test_a_sample_that_read_nothing_says_nothing() -> None:
    """Such as of a tree of empty files."""
    assert payback_of(RESULT, sample=lambda _: Sample(0, 3, 0.1)) is None


def test_a_sample_reads_the_files_below_a_directory(source: Path) -> None:
    """All of a small tree, each file once; links and what cannot be opened are passed over."""
    os.symlink("/etc/passwd", source / "link")
    os.mkfifo(source / "fifo")
    read = sample_read(str(source), readers=8)
    assert (read.bytes, read.files) == (5003, 3)
    assert 0 < read.seconds < 60
    assert sample_read(str(source / "none")).bytes == 0


def test_a_sample_ends_in_time(source: Path) -> None:
    """A large sparse file is read for the time that was given, and no longer."""
    with open(source / "large", "wb") as stream:
        stream.truncate(1 << 40)
    began = time.monotonic()
    read = sample_read(str(source), seconds=0.05)
    assert read.bytes > 0
    assert time.monotonic() - began < 60  # whole, it takes minutes


def test_what_the_stager_measures_is_enough(stager: CopyStager, source: Path) -> None:
    """A real result has what the sentence needs, or says why it has not."""
    result = stager.stage(StageRequest("d", str(source), target="shm"))
    found = payback_of(result)
    assert (found is None) == (result.read_seconds == 0)
