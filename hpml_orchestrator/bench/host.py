"""Measure memory, /dev/shm, the local disk and the shared file system, without PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from hpml_orchestrator.bench.figures import (
    LEAST_REPEATS,
    MIB,
    Unmeasured,
    domains,
    figure,
    repeated,
)

_MEMORY_BYTES = 512 * MIB  # of a domain: far more than any cache
_MEMORY_SECONDS, _DOMAIN_SECONDS = 6.0, 2.0  # for all domains, and at least for each
_OPEN_SECONDS = 2.0
_FILE_REPEATS = 7
_FILE_BYTES = 64 * MIB  # of one repeat
_BLOCK_BYTES = 4 * MIB
_READERS = 4
_SMALL_FILES, _SMALL_BYTES, _OPENERS = 512, 4096, 8
_WRITE_SECONDS = 8


def measure_memory() -> None:
    """Copy memory with one thread per core of each domain; bytes read and written count."""
    found = domains()
    seconds = max(_DOMAIN_SECONDS, _MEMORY_SECONDS / len(found))
    for number, cpus in found.items():
        size = _MEMORY_BYTES // 2 // len(cpus) // 4096 * 4096
        size = max(size, 2 * MIB)
        gate = threading.Barrier(len(cpus) + 1)
        loops = [0]

        def copy(
            cpu: int, size: int = size, gate: threading.Barrier = gate, loops: list[int] = loops
        ) -> None:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
            pages = mmap.mmap(-1, 2 * size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            ctypes.memset(address, 1, 2 * size)  # the pages come from this thread's domain
            while True:
                gate.wait()
                if not loops[0]:
                    return
                for _ in range(loops[0]):
                    ctypes.memmove(address + size, address, size)  # without Python's lock
                gate.wait()

        threads = [threading.Thread(target=copy, args=(cpu,), daemon=True) for cpu in cpus]
        for thread in threads:
            thread.start()

        def work(gate: threading.Barrier = gate, loops: list[int] = loops) -> None:
            loops[0] = 2
            gate.wait()
            gate.wait()

        rates = repeated(work, 2 * 2 * size * len(cpus), seconds)
        loops[0] = 0
        gate.wait()
        for thread in threads:
            thread.join()
        figure(f"host.memory.domain{number}", [rates], "B/s")


def measure_files(part: str, options: argparse.Namespace) -> None:
    """Measure /dev/shm, the local disk, or the shared file system."""
    nodes = int(os.environ.get("WORLD_SIZE", "1"))
    directory = {"shm": options.shm, "disk": options.local}.get(part, options.shared)
    if not directory:
        raise Unmeasured("no directory was given")
    kind = filesystem(directory)
    if part == "disk" and kind in ("tmpfs", "ramfs"):
        raise Unmeasured(f"{directory} is in memory ({kind})")
    os.makedirs(directory, exist_ok=True)
    ranks = nodes if part == "shared" else None
    try:
        measure_stream(part, directory, ranks)
        if part == "shared":
            measure_opens(directory, ranks)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unmeasured(f"{error.strerror}: {directory}") from error
        raise


def filesystem(path: str) -> str:
    """Return the type of the file system that a path is on."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            words = line.split(" ")
            point = words[1].replace("\\040", " ")
            inside = real == point or real.startswith(f"{point.rstrip('/')}/")
            if inside and len(point) >= len(best):
                best, kind = point, words[2]
    return kind


def measure_stream(part: str, directory: str, ranks: int | None) -> None:
    """Write a file, each repeat with fsync, and read it again past the page cache.

    The file has no name while it is written: nothing is left of it, however this process ends.
    """
    about = os.statvfs(directory)
    free = about.f_bavail * about.f_frsize
    size = _FILE_BYTES * _FILE_REPEATS
    if free < 2 * size:
        raise Unmeasured(f"{free // MIB} MiB are free in {directory}; needs {2 * size // MIB}")
    block = os.urandom(8 * MIB)
    descriptor, path = tempfile.mkstemp(prefix="hpml-bench-", dir=directory)
    os.unlink(path)
    try:
        writes, limit = [], time.perf_counter() + _WRITE_SECONDS
        for _ in range(_FILE_REPEATS):
            begin = time.perf_counter()
            for _ in range(_FILE_BYTES // len(block)):
                write_all(descriptor, block)
            os.fsync(descriptor)
            writes.append(_FILE_BYTES / (time.perf_counter() - begin))
            if len(writes) >= LEAST_REPEATS and time.perf_counter() > limit:
                break
        figure(f"{part}.write", [writes], "B/s", ranks)
        with DiskReader(descriptor) as reader:
            rates = [reader.rate(repeat * _FILE_BYTES) for repeat in range(len(writes))]
        figure(f"{part}.read", [rates], "B/s", ranks)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, block: bytes) -> None:
    """Write a block completely; `os.write` may stop early."""
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


class DiskReader:
    """Reads a file with several threads, with O_DIRECT if the file system has it."""

    def __init__(self, descriptor: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        path = f"/proc/self/fd/{descriptor}"
        self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_READERS)]
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                # Some file systems accept O_DIRECT at `open` and refuse it at the first read.
                os.preadv(self._descriptor, self._buffers[:1], 0)
            except OSError:
                os.close(self._descriptor)
                raise
            return
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> DiskReader:  # noqa: PYI034 - Self is of Python 3.11
        self._pool = ThreadPoolExecutor(_READERS)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)

    def rate(self, offset: int) -> float:
        """Return the bytes per second of one repeat's part of the file."""

        def read(number: int) -> None:
            for place in range(number, _FILE_BYTES // _BLOCK_BYTES, _READERS):
                at = offset + place * _BLOCK_BYTES
                got = os.preadv(self._descriptor, [self._buffers[number]], at)
                if got != _BLOCK_BYTES:
                    raise OSError(errno.EIO, f"read {got} bytes of {_BLOCK_BYTES}")

        begin = time.perf_counter()
        list(self._pool.map(read, range(_READERS)))
        return _FILE_BYTES / (time.perf_counter() - begin)


def measure_opens(directory: str, ranks: int | None) -> None:
    """Open, read and close small files with several threads."""
    made = tempfile.mkdtemp(prefix="hpml-bench-", dir=directory)
    try:
        paths = [os.path.join(made, f"{number}.bin") for number in range(_SMALL_FILES)]
        block = os.urandom(_SMALL_BYTES)
        for path in paths:
            with open(path, "wb") as stream:
                stream.write(block)

        def read(path: str) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.read(descriptor, _SMALL_BYTES)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

        with ThreadPoolExecutor(_OPENERS) as pool:

            def read_all() -> None:
                list(pool.map(read, paths, chunksize=16))

            rates = repeated(read_all, float(_SMALL_FILES), _OPEN_SECONDS)
        figure("shared.opens", [rates], "1/s", ranks)
    finally:
        shutil.rmtree(made, ignore_errors=True)
