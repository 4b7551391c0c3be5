"""The ladder of ways: what is made, measured and removed again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, InputError, StagingError
from hpml_orchestrator.packing.bench import run_bench
from hpml_orchestrator.staging import ladder as module
from hpml_orchestrator.staging.capacity import Room
from hpml_orchestrator.staging.ladder import (
    LARGE,
    SMALL,
    Data,
    Sizes,
    Way,
    bench_directory,
    check_room_for,
    climb,
    make_data,
    open_latency,
)
from hpml_orchestrator.staging.peers import peers, run_program
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Data("/small", 10, 1000, "/large", 5000)


def never() -> bool:
    return False


def test_peers_copy_everything(tmp_path: Path) -> None:
    """Each of them, as a real program: what arrives is what was made."""
    data = make_data(str(tmp_path), Sizes(120, 700, 3 << 20), never)
    assert (data.files, data.small_bytes, data.large_bytes) == (120, 84_000, 3 << 20)
    ways = peers(data.small, data.large, never)
    assert {way.name for way in ways} >= {"cp -r", "shutil.copytree", "cp, one file"}
    for number, way in enumerate(ways):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        way.run(str(target))
        sizes = [path.stat().st_size for path in target.rglob("*.bin")]
        assert sum(sizes) == (84_000 if way.data == SMALL else 3 << 20), way.name
        assert len(sizes) == (120 if way.data == SMALL else 1), way.name
    found = open_latency(data.small)
    assert found.files == 120
    assert 0 < found.median <= found.worst


def test_only_programs_that_are_there_take_part() -> None:
    """Without any of them Python's own is left."""
    ways = peers("/small", "/large", never, which=lambda _name: None)
    assert [way.name for way in ways] == ["shutil.copytree"]


def test_slow_places_get_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ends after a while, with a hundred files at least."""
    monkeypatch.setattr(module, "_WRITING_SECONDS", 0.0)
    data = make_data(str(tmp_path), Sizes(1000, 10, 64 << 20), never)
    assert data.files == 100
    assert data.large_bytes == 1 << 20


def test_rungs_are_medians_and_faults_are_told(tmp_path: Path) -> None:
    """A way that fails has its reason; the others go on; nothing of any run is left."""
    now = [0.0]
    steps = iter([1.0, 2.0, 9.0])

    def slow(target: str) -> None:
        (Path(target) / "x").write_text("x")
        now[0] += next(steps)

    calls = []

    def broken(target: str) -> None:
        calls.append(target)
        raise OSError(28, "No space left on device")

    def quick(_target: str) -> None:
        now[0] += 0.5

    ways = [
        Way("slow", SMALL, True, slow),
        Way("broken", SMALL, False, broken),
        Way("quick", LARGE, False, quick),
    ]
    found = climb(ways, DATA, str(tmp_path), runs=3, should_stop=never, clock=lambda: now[0])
    assert [one.way for one in found] == ["slow", "broken", "quick"]
    assert (found[0].seconds, found[0].runs, found[0].checked) == (2.0, 3, True)
    assert (found[0].files_per_second, found[0].bytes_per_second) == (5.0, 500.0)
    assert (found[1].fault, found[1].runs) == ("No space left on device", 0)
    assert found[1].files_per_second == 0.0
    assert (found[2].files, found[2].bytes_per_second) == (1, 10_000.0)
    assert len(calls) == 1
    assert os.listdir(tmp_path) == []


def test_time_runs_out(tmp_path: Path) -> None:
    """After the first turn the next begins only if it will end in time."""
    now = [0.0]

    def slow(_target: str) -> None:
        now[0] += 30.0

    (found,) = climb(
        [Way("slow", SMALL, True, slow)],
        DATA,
        str(tmp_path),
        runs=50,
        should_stop=never,
        clock=lambda: now[0],
    )
    assert (found.runs, found.seconds) == (1, 30.0)


def test_a_program_is_ended_when_it_is_to_stop() -> None:
    """At once, with what it started; a failed one is an error with its last words."""
    begin = time.monotonic()
    with pytest.raises(StagingStopped):
        run_program(["sh", "-c", "sleep 600 | sleep 600"], lambda: True)
    assert time.monotonic() - begin < 60
    with pytest.raises(StagingError, match=r"sh ended with 3: two"):
        run_program(["sh", "-c", "echo one >&2; echo two >&2; exit 3"], never)
    run_program(["true"], never)


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    """While the files are made as well as between the ways."""
    with pytest.raises(StagingStopped), bench_directory(str(tmp_path)) as made:
        make_data(made, Sizes(), lambda: True)
    with pytest.raises(StagingStopped), bench_directory(str(tmp_path)) as made:
        climb(
            [Way("a", SMALL, True, lambda _target: None)],
            DATA,
            made,
            runs=1,
            should_stop=lambda: True,
        )
    assert os.listdir(tmp_path) == []


def test_there_must_be_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, inodes, and of memory no more than half."""
    check_room_for(str(tmp_path), 1000, 10, field="DIR")
    with pytest.raises(CapacityError, match="DIR: needs"):
        check_room_for(str(tmp_path), 1 << 60, 10, field="DIR")
    with pytest.raises(InputError, match="--from: No such file"):
        check_room_for(f"{tmp_path}/none", 1, 1, field="--from")
    room = Room(1000, "a limit", 50, 1, in_memory=True)
    monkeypatch.setattr(module, "room_at", lambda _path: room)
    check_room_for("/ram", 400, 50, field="DIR")
    with pytest.raises(CapacityError, match="more than half of the memory"):
        check_room_for("/ram", 600, 10, field="DIR")
    with pytest.raises(CapacityError, match="inodes"):
        check_room_for("/ram", 10, 51, field="DIR")


def test_a_place_that_is_none(tmp_path: Path) -> None:
    """A directory that is not there cannot be measured."""
    with (
        pytest.raises(InputError, match="nothing can be written there"),
        bench_directory(f"{tmp_path}/none"),
    ):
        raise AssertionError


def test_a_place_to_copy_from_is_told_as_such(
    small_tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is the current directory where it is not given: DIR would be another one."""
    origin = small_tmpfs("size=8m,ro")
    with pytest.raises(InputError, match="--from: nothing can be written there: Read-only"):
        run_bench(str(origin), [("DIR", str(tmp_path))], Sizes(1, 1, 1, 1), never)
