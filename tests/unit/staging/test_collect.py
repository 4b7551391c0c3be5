"""Results come back complete, or under a name that marks them as incomplete."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.staging.collect import Collected, collect
from hpml_orchestrator.staging.request import Retry

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An empty directory for results."""
    path = tmp_path / "target"
    path.mkdir()
    return path


def bring(source: Path, target: Path, stop: Callable[[], bool] = lambda: False) -> Collected:
    """Collect until `stop` returns True, without pauses between retries."""
    return collect(str(source), str(target), Retry(lambda _seconds: None, stop))


def test_a_directory_comes_as_it_is(source: Path, target: Path) -> None:
    """With links, times and modes, and nothing else is left there; twice with one digest."""
    (source / "link").symlink_to("/outside/of/it")
    os.link(source / "one.bin", source / "again")
    (source / "one.bin").chmod(0o640)
    os.utime(source / "one.bin", ns=(5, 5))
    os.mkfifo(source / "queue")  # holds nothing
    found = bring(source, target)
    assert (found.path, found.files, found.problem) == (f"{target}/source", 4, "")
    assert os.listdir(target) == ["source"]
    there = target / "source"
    assert os.readlink(there / "link") == "/outside/of/it"
    assert (there / "one.bin").samefile(there / "again")
    assert (there / "one.bin").read_bytes() == b"1" * 5000
    info = (there / "one.bin").stat()
    assert (info.st_mode & 0o777, info.st_mtime_ns) == (0o640, 5)
    assert not (there / "queue").exists()
    assert list((there / "empty").iterdir()) == []
    other = target / "other"
    other.mkdir()
    assert bring(source, other).digest == found.digest != ""


def test_a_file_comes_by_its_name(source: Path, target: Path) -> None:
    """Without a directory around it; a missing source is not an error."""
    (source / "dead").symlink_to("nowhere")
    assert bring(source / "dead", target).problem == "is a link to nothing"
    found = bring(source / "one.bin", target)
    assert (found.path, found.bytes, found.problem) == (f"{target}/one.bin", 5000, "")
    assert (target / "one.bin").read_bytes() == b"1" * 5000
    assert bring(source / "none", target) == Collected()
    assert os.listdir(target) == ["one.bin"]


@pytest.mark.parametrize("large", [False, True], ids=["many files", "one large file"])
def test_what_there_was_time_for_is_whole(tmp_path: Path, target: Path, *, large: bool) -> None:
    """Files that were begun are not there, not even those that had their size already."""
    source = tmp_path / "out"
    source.mkdir()
    (source / "0").write_bytes(b"first")
    for number in range(1, 40):
        (source / str(number)).write_bytes(os.urandom(1000))
    if large:
        with (source / "large").open("wb") as stream:
            stream.truncate(4000 * MIB)
            os.pwrite(stream.fileno(), os.urandom(100 * MIB), 0)
    old = time.time() - 60
    for path in source.iterdir():
        os.utime(path, (old, old))
    looks = iter(range(20))

    def stop() -> bool:
        return any(target.rglob("large")) if large else next(looks, None) is None

    found = bring(source, target, stop)
    assert found.problem == "time ran out"
    assert found.digest == ""
    there = target / "out.incomplete"
    if found.path:
        assert found.path == str(there)
        names = [path.name for path in there.iterdir()]
        assert len(names) == found.files
        assert "large" not in names
        for name in names:
            assert (there / name).read_bytes() == (source / name).read_bytes()
    else:
        assert large
    assert not [name for name in os.listdir(target) if name.startswith(".")]


def test_one_that_cannot_be_read_keeps_no_other_away(source: Path, target: Path) -> None:
    """For example a file that grows; it is named, and the others are copied."""
    grows = source / "a" / "log"
    grows.write_bytes(b"x" * 100)
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        with grows.open("ab") as stream:
            stream.write(b"more")
        return False

    found = bring(source, target, stop)
    assert found.path == f"{target}/source.incomplete"
    assert found.files == 3
    assert "log: " in found.problem
    assert "changed" in found.problem
    assert (target / "source.incomplete/one.bin").read_bytes() == b"1" * 5000
    assert not (target / "source.incomplete/a/log").exists()
    assert looks


def test_a_full_disk_keeps_what_fitted(tmp_path: Path, small_tmpfs: Callable[[str], Path]) -> None:
    """The error names the full disk."""
    full = small_tmpfs("size=3m")
    source = tmp_path / "out"
    source.mkdir()
    for number in range(5):
        (source / str(number)).write_bytes(os.urandom(MIB - 8192))
    found = bring(source, full)
    assert "No space left on device" in found.problem
    assert 1 <= found.files <= 3
    for path in (full / "out.incomplete").iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes()
