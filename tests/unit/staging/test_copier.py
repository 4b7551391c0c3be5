"""The copier by itself: what it makes is what find, cmp and hashlib say the source is."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xxhash import xxh3_128

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.records.mounts import file_system_type
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.pack import PackRequest, pack
from hpml_orchestrator.staging.request import Retry, StagingStopped
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.space import MEMORY_TYPES
from hpml_orchestrator.staging.stage import open_source
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from hpml_orchestrator.staging.source import Source

MIB = 1 << 20
CREWS = [
    pytest.param(CopyOptions(processes=1, threads=1), id="alone"),
    pytest.param(CopyOptions(processes=3), id="forked"),
    pytest.param(CopyOptions(processes=1, threads=1, hash=False), id="alone, no hash"),
    pytest.param(CopyOptions(processes=3, hash=False), id="forked, no hash"),
]


def never() -> bool:
    return False


def copied(
    source: Source,
    target: Path,
    options: CopyOptions,
    *,
    should_stop: Callable[[], bool] = never,
    progress: CopyProgress | None = None,
) -> list[bytes]:
    """Plan and copy into a new directory."""
    target.mkdir()
    retry = Retry(time.sleep, should_stop)
    return copy(
        source.plan(),
        source,
        str(target),
        options=options,
        retry=retry,
        progress=progress or CopyProgress(None),
    )


def tree(path: Path) -> TreeSource:
    return TreeSource(str(path), Retry(time.sleep, never))


def told_by_find(top: Path) -> bytes:
    """Type, mode, size, link count, time, link text and name of everything, as find prints them."""
    words = ["find", ".", "-printf", r"%y %m %n %T@ %l %P\0"]
    found = subprocess.run(words, cwd=top, check=True, capture_output=True).stdout
    return b"\0".join(sorted(found.split(b"\0")))


def sums(top: Path) -> dict[str, str]:
    """SHA-256 of every regular file."""
    return {
        os.path.relpath(os.path.join(parent, name), top): hashlib.sha256(
            Path(parent, name).read_bytes()
        ).hexdigest()
        for parent, _, names in os.walk(top)
        for name in names
        if not os.path.islink(os.path.join(parent, name))
    }


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Give a tree with some of everything: small, empty, larger, sparse, linked, odd names."""
    top = tmp_path / "wide"
    for number in range(40):
        below = top / f"d{number % 7}" / f"e{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"f{number}").write_bytes(os.urandom(number * 1009))
    (top / "none").mkdir()
    (top / "empty").touch()
    (top / "line\nend").write_bytes(b"odd")
    (top / os.fsdecode(b"\xff\xfe")).write_bytes(b"no text")
    (top / "large").write_bytes(os.urandom(5 * MIB + 17))
    (top / "block").write_bytes(os.urandom(MIB))
    with open(top / "sparse", "wb") as stream:
        stream.seek(9 * MIB)
        stream.write(os.urandom(3 * MIB))
        stream.truncate(70 * MIB + 1)
    os.link(top / "d0/e0/f0", top / "d1/second name")
    (top / "d2" / "link").symlink_to("../large")
    (top / "d3").chmod(0o750)
    (top / "block").chmod(0o700)
    os.utime(top / "large", ns=(5, 1_234_567_890_123_456_789))
    return top


@pytest.mark.parametrize("options", CREWS)
def test_a_tree_is_copied_as_find_and_sha256_see_it(
    wide: Path, base: Path, options: CopyOptions
) -> None:
    """Names, types, modes, link counts, times and contents are the source's, however it is done."""
    told: list[tuple[int, int, int, int]] = []
    progress = CopyProgress(lambda *figures: told.append(figures))
    done = copied(tree(wide), base / "to", options, progress=progress)
    progress.finish()
    plan = tree(wide).plan()
    assert told[-1][:2] == (plan.bytes, len(plan.files))
    digests = [xxh3_128((wide / entry.path).read_bytes()).digest() for entry in plan.files]
    assert done == (digests if options.hash else [])
    assert told_by_find(base / "to") == told_by_find(wide)
    assert sums(base / "to") == sums(wide)
    assert (base / "to" / "sparse").stat().st_blocks * 512 < 6 * MIB


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give a fault: every call that reads a file takes longer, in forked workers too."""

    def make(seconds: float) -> None:
        for name in ("readv", "preadv"):
            real = getattr(os, name)

            def slow(*arguments: object, real: Callable[..., int] = real) -> int:
                time.sleep(seconds)
                return real(*arguments)

            monkeypatch.setattr(os, name, slow)

    return make


@pytest.fixture
def while_reading(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], object]], AbstractContextManager[None]]:
    """Do something once a file is being read: whoever reads, forked or not, waits for it."""
    reading, done = base / "reading", base / "done"
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def held(*arguments: object, real: Callable[..., int] = real) -> int:
            reading.touch()
            eventually(done.exists)
            return real(*arguments)

        monkeypatch.setattr(os, name, held)

    @contextmanager
    def act(action: Callable[[], object]) -> Iterator[None]:
        def run() -> None:
            try:
                eventually(reading.exists)
                action()
            finally:
                done.touch()

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join()

    return act


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("one_file", [True, False])
def test_a_stop_is_heard_within_a_second(
    wide: Path, base: Path, slowly: Callable[[float], None], processes: int, *, one_file: bool
) -> None:
    """Workers that copy for long are ended, between files and in the middle of one."""
    if one_file:
        with open(wide / "large", "wb") as stream:
            stream.write(bytes(128 * MIB))
    else:
        for number in range(100):
            (wide / f"n{number}").write_bytes(b"%d" % number)
    slowly(1.0)
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    begin = time.monotonic()
    options = CopyOptions(processes=processes, threads=1)
    large = TreeSource(str(wide / "large"), Retry(time.sleep, never), "file")
    source = large if one_file else tree(wide)
    with pytest.raises(StagingStopped):
        copied(source, base / "to", options, should_stop=stop.is_set)
    assert time.monotonic() - begin < 20  # whole, it takes at least twice as long as that
    assert children() == []


def children() -> list[str]:
    """Return the processes that this one has forked and not yet reaped."""
    task = f"/proc/self/task/{threading.get_native_id()}/children"
    return Path(task).read_text("ascii").split()


def test_a_worker_that_is_killed_is_an_error(
    wide: Path, base: Path, while_reading: Callable[..., Any]
) -> None:
    """The signal is named, and the other workers are gone, too."""
    forked: list[int] = []
    main = threading.get_native_id()

    def kill() -> None:
        forked.extend(int(one) for one in eventually(lambda: two_of(children_of(main))))
        os.kill(forked[0], 9)

    with (
        while_reading(kill),
        pytest.raises(StagingError, match=r"a worker process died \(signal 9\)"),
    ):
        copied(tree(wide), base / "to", CopyOptions(processes=2, threads=1))
    assert len(forked) == 2
    assert children() == []


def two_of(found: list[str]) -> list[str]:
    """Return what was found if that is two, else nothing."""
    return found if len(found) == 2 else []


def children_of(thread: int) -> list[str]:
    return Path(f"/proc/self/task/{thread}/children").read_text("ascii").split()


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_limit_of_processes_leaves_fewer_workers(
    wide: Path, base: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With room for none of them, this process copies."""
    real, forked = os.fork, 0

    def fork() -> int:
        nonlocal forked
        if len(children()) >= most:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked += 1
        return real()

    monkeypatch.setattr(os, "fork", fork)  # a fault: root has no limit
    copied(tree(wide), base / "to", CopyOptions(processes=3, threads=1))
    assert sums(base / "to") == sums(wide)
    assert (forked > 0) == (most > 0)
    assert children() == []


def test_a_large_file_has_figures_while_it_is_copied(
    tmp_path: Path, base: Path, slowly: Callable[[float], None]
) -> None:
    """Those of forked workers arrive before the first file is whole."""
    (tmp_path / "two").mkdir()
    for number in range(2):
        (tmp_path / "two" / f"{number}").write_bytes(os.urandom(8 * MIB))
    slowly(0.05)
    told: list[tuple[int, int, int, int]] = []
    ticks = itertools.count(step=10)
    progress = CopyProgress(lambda *figures: told.append(figures), clock=lambda: next(ticks))
    copied(tree(tmp_path / "two"), base / "to", CopyOptions(processes=2), progress=progress)
    assert any(0 < done_bytes < 8 * MIB and files == 0 for done_bytes, files, *_ in told)
    progress.finish()
    assert told[-1][:2] == (16 * MIB, 2)


def resident_bytes(directory: Path) -> int:
    """How much of the files in a directory is in the page cache."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    words = ["fincore", "--bytes", "--noheadings", "--output=RES", *map(str, files)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("form", ["tree", "file", "tar", "tar.gz", "zip", "pack"])
def test_pages_of_a_servers_files_leave_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, served: bool
) -> None:
    """Of every kind of source; files on a disk of this machine stay cached."""
    if not shutil.which("fincore") or file_system_type(str(tmp_path)) in MEMORY_TYPES:
        pytest.skip("NOT TESTED: needs fincore, and a temporary directory that is not in memory")
    # FAKE: this machine's disk counts as a file server
    monkeypatch.setattr("hpml_orchestrator.staging.space.is_served_type", lambda _kind: served)
    tree, place = tmp_path / "tree", tmp_path / "place"
    for directory in (tree, place):
        directory.mkdir()
    for number in range(3):
        (tree / f"{number}.bin").write_bytes(os.urandom(3 * MIB))
    if form == "pack":
        pack(PackRequest(str(tree), str(place / "data.pack")))
    elif form in {"tree", "file"}:
        shutil.copytree(tree, place / "data")
    else:
        names = {"tar": "tar", "tar.gz": "gztar", "zip": "zip"}
        shutil.make_archive(str(place / "data"), names[form], tree)
    (source,) = place.iterdir()
    if form == "file":
        (source / "1.bin").unlink()
        (source / "2.bin").unlink()
        source /= "0.bin"
    os.sync()  # only clean pages leave
    request = Stage("data", str(source))
    opened = open_source(request, Retry(time.sleep, never), 1 << 40)
    copied(opened, tmp_path / "copy", CopyOptions(processes=2))
    opened.close()
    assert (resident_bytes(place) > MIB) != served
