"""How long reading what was staged takes, with as many readers at once as had read the source."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.sample import Sample
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Piece = tuple[str, int]  # path, where in the file it begins

__all__ = ["sample_staged"]

_PIECE_BYTES = 64 << 20  # of large files, so that several readers can be at work on one
_MOST_PIECES = 1 << 15
_MOST_AT_ONCE = 32  # pieces that a reader takes, as a copy has batches
_TURNS = 4
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_GATE_SECONDS = 0.0005
_clock = time.perf_counter


class _Span(NamedTuple):
    """What one reader did, or several: between two times, and in seconds of each of them."""

    begin: float
    end: float
    files: int = 0
    open_seconds: float = 0.0
    bytes: int = 0
    read_seconds: float = 0.0


def sample_staged(path: str, *, readers: int = 1, seconds: float = 0.5) -> Sample:
    """Read files below a directory for a while, and say how long that took.

    Readers are processes and threads as in a copy: one process for each CPU, and threads in them.
    What cannot be read is passed over: this is a measurement and no check. Nothing is done about
    the page cache, in which staged data are.

    Args:
        path: where the staged data lie.
        readers: that read at the same time.
        seconds: to read at most; half as long again to look for what to read.

    Returns:
        All that they read, and for it the wall time from the first open to the last byte.
    """
    pieces = _found(path, _clock() + seconds / 2)
    readers = max(1, min(readers, len(pieces)))
    at_once = max(1, min(_MOST_AT_ONCE, len(pieces) // (_TURNS * readers)))
    heaps = [pieces[at : at + at_once] for at in range(0, len(pieces), at_once)]
    processes = min(readers, len(os.sched_getaffinity(0)))
    threads = -(-readers // processes)
    told: list[_Span] = []
    gate = mmap.mmap(-1, 1)  # all begin when the last one is there

    def work(_number: int, take: Callable[[], int | None], tell: Callable[..., None]) -> None:
        while not gate[0]:
            time.sleep(_GATE_SECONDS)
        tell(*_read_all(heaps, take, threads, seconds))

    def all_are_there() -> None:
        gate[0] = 1

    def heed(*figures: Any) -> None:
        told.append(_Span(*figures))

    if readers == 1:
        left = iter(range(len(heaps)))
        told.append(_read_all(heaps, lambda: next(left, None), 1, seconds))
    else:
        with contextlib.suppress(OSError, StagingError):  # no more processes, or one was killed
            run_crew(processes, work, range(len(heaps)), told=heed, heartbeat=all_are_there)
    gate.close()
    return _together(told)


def _found(path: str, ends: float) -> list[Piece]:
    """Return where to read: whole small files, pieces of large ones."""
    found: list[Piece] = []
    for name, size in _files(path):
        places = range(0, max(1, size), _PIECE_BYTES)
        found += [(name, at) for at in itertools.islice(places, _MOST_PIECES - len(found))]
        if len(found) == _MOST_PIECES or _clock() > ends:
            break
    return found


def _files(path: str) -> Iterator[tuple[str, int]]:
    """Yield the regular files below a directory, and their sizes."""
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.path, entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue


def _read_all(
    heaps: list[list[Piece]], take: Callable[[], int | None], threads: int, seconds: float
) -> _Span:
    """Read with the threads of one process until there is no more, or it has been long."""
    begin = _clock()
    ends = begin + seconds
    done: list[_Span] = []

    def drain() -> None:
        done.append(_drain(heaps, take, begin, ends))

    others = [threading.Thread(target=drain, name="hpml-sample") for _ in range(threads - 1)]
    with contextlib.suppress(RuntimeError):  # the job may have no more threads
        for one in others:
            one.start()
    drain()
    for one in others:
        if one.ident is not None:
            one.join()
    return _sum(done)


def _drain(
    heaps: list[list[Piece]], take: Callable[[], int | None], begin: float, ends: float
) -> _Span:
    """Read with one thread."""
    block = memoryview(bytearray(BLOCK_BYTES))
    last, files, size, opening, reading = begin, 0, 0, 0.0, 0.0
    while last < ends and (number := take()) is not None:
        for path, at in heaps[number]:
            start = _clock()
            try:
                fd = os.open(path, _READ)
            except OSError:
                continue
            opened = _clock()
            with contextlib.suppress(OSError):
                size += _read(fd, at, block, ends)
            os.close(fd)
            last = _clock()
            files += 1
            opening += opened - start
            reading += last - opened
            if last > ends:
                break
    return _Span(begin, last, files, opening, size, reading)


def _read(fd: int, at: int, block: memoryview, ends: float) -> int:
    """Read a piece, or as much of it as the time allows; returns the bytes."""
    done = 0
    while done < _PIECE_BYTES:
        got = os.preadv(fd, (block,), at + done)
        done += got
        if got < len(block) or _clock() > ends:
            break
    return done


def _sum(spans: list[_Span]) -> _Span:
    begin, end, *figures = zip(*spans)
    return _Span(min(begin), max(end), *map(sum, figures))


def _together(spans: list[_Span]) -> Sample:
    """Return what was read as if by one reader that takes as long as all of them did together."""
    if not any(span.files for span in spans):
        return Sample(0, 0.0, 0, 0.0)
    read = _sum([span for span in spans if span.files])
    share = (read.end - read.begin) / (read.open_seconds + read.read_seconds)
    return Sample(read.files, read.open_seconds * share, read.bytes, read.read_seconds * share)
