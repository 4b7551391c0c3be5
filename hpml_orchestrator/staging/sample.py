"""How long reading everything once will take, from a sample: of a source, a target, a copy."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.staging.files import remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["Sample", "epoch_seconds", "sample_source", "sample_staged", "sample_target"]

_PIECE_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20
_MOST_STAGED_BYTES = 1 << 40
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Sample(NamedTuple):
    """What reading took: the opens, and the bytes.

    Attributes:
        files: how many were opened.
        open_seconds: for all of them, closing included.
        bytes: how many were read.
        read_seconds: for all of them.
    """

    files: int
    open_seconds: float
    bytes: int
    read_seconds: float


def epoch_seconds(sample: Sample, files: int, size: int) -> float | None:
    """Return the time of so many files and bytes, one after the other; None without a sample.

    files * (time of an open) + bytes * (time of a byte): the sample need not have files as large as
    those that it stands for.
    """
    if not sample.files or (size and not sample.bytes):
        return None
    opens = files * sample.open_seconds / sample.files
    return opens + (size * sample.read_seconds / sample.bytes if sample.bytes else 0.0)


def sample_source(
    plan: Plan,
    *,
    seconds: float = 0.5,
    most_bytes: int = 64 << 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Read files of a plan at random, past the page cache as far as the kernel lets go of it.

    Files that cannot be read are passed over: the copy will tell of them.

    Args:
        plan: of a directory tree or a file.
        seconds: stop after so long.
        most_bytes: stop after so many.
        clock: seconds.
    """
    entries = list(plan.files)
    random.Random(len(entries)).shuffle(entries)
    paths = [f"{plan.source_root}/{plan.origins.get(one.path, one.path)}" for one in entries]
    return _read(paths, seconds, most_bytes, clock)


def sample_staged(
    path: str, *, seconds: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> Sample:
    """Read staged files for a while, out of the page cache, where they are; what cannot is left.

    Args:
        path: where the staged data lie.
        seconds: stop after so long.
        clock: seconds.
    """
    paths = (f"{top}/{name}" for top, _, names in os.walk(path) for name in names)
    return _read(paths, seconds, _MOST_STAGED_BYTES, clock, drop=False)


def sample_target(
    base: str,
    entries: Sequence[Entry],
    *,
    seconds: float = 0.5,
    most_bytes: int = 16 << 20,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Sample, Sample]:
    """Write files of such sizes in a directory, read them, remove them; (written, read).

    Raises:
        OSError: the directory cannot be written.
    """
    directory = tempfile.mkdtemp(prefix=".hpml-sample-", dir=base)
    try:
        written, paths = _write(directory, entries, seconds, most_bytes, clock)
        return written, _read(paths, seconds, most_bytes, clock)
    finally:
        with contextlib.suppress(OSError):
            remove_tree(directory)


def _read(
    paths: Iterable[str],
    seconds: float,
    most_bytes: int,
    clock: Callable[[], float],
    *,
    drop: bool = True,
) -> Sample:
    begin = clock()
    files = size = 0
    opening = reading = 0.0
    for path in paths:
        start = clock()
        if start - begin > seconds or size >= most_bytes:
            break
        try:
            fd = os.open(path, _READ)
        except OSError:
            continue
        opened = clock()
        try:
            if drop:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            before = clock()
            got = _drain(fd)
            done = clock()
        except OSError:
            continue
        finally:
            os.close(fd)
        files += 1
        size += got
        opening += opened - start
        reading += done - before
    return Sample(files, opening, size, reading)


def _drain(fd: int) -> int:
    size = 0
    while size < _PIECE_BYTES:
        block = os.read(fd, _BLOCK_BYTES)
        if not block:
            break
        size += len(block)
    return size


def _write(
    directory: str,
    entries: Sequence[Entry],
    seconds: float,
    most_bytes: int,
    clock: Callable[[], float],
) -> tuple[Sample, list[str]]:
    block = memoryview(os.urandom(_BLOCK_BYTES))
    begin = clock()
    size = 0
    opening = writing = 0.0
    paths: list[str] = []
    for entry in entries:
        start = clock()
        if start - begin > seconds or size >= most_bytes:
            break
        path = f"{directory}/{len(paths)}"
        fd = os.open(path, _CREATE, 0o600)
        try:
            opened = clock()
            left = min(entry.size, _PIECE_BYTES)
            while left:
                count = os.write(fd, block[: min(left, _BLOCK_BYTES)])
                left -= count
                size += count
            done = clock()
            os.fdatasync(fd)  # else its pages could not be dropped before they are read again
        finally:
            os.close(fd)
        paths.append(path)
        opening += opened - start
        writing += done - opened
    return Sample(len(paths), opening, size, writing), paths
