"""List directories with the status of each entry: one by one, by many threads where that waits."""

from __future__ import annotations

import functools
import os
import queue
import resource
import threading
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.faults import why

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry

    Row = tuple[str, os.stat_result | None, str]
    # (name, status, fault) of an entry; either the status or the fault is set

__all__ = ["Lister"]

DEEPEST = 256
_THREADS = 32
_NAMES_AT_ONCE = 512
_WAITED_SECONDS = 0.01  # less is not worth threads
_WAITS_PER_CPU = 2.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_S_IFMT, _S_IFDIR = 0o170000, 0o040000


class Lister:
    """Lists directories below a root; entries come sorted by name.

    Once listing turns out to be mostly waiting, as it is on a busy metadata server, all that is
    left is listed by many threads.

    Args:
        root: the top.
        retry: calls again after faults that pass.
    """

    def __init__(self, root: str, retry: Retry) -> None:
        self._root = root
        self._retry = retry
        self._ready: dict[str, list[Row]] = {}
        self._since = _usage()

    def rows(self, directory: str, others: list[str]) -> list[Row]:
        """Return the entries of a directory.

        Args:
            directory: relative to the root, "" for itself.
            others: directories that will be asked for later.
        """
        self._retry.check_stop()
        ready = self._ready.pop(directory, None)
        if ready is not None:
            return sorted(ready, key=_name)
        names = self._names(directory)
        if isinstance(names, str):
            return [(".", None, names)]
        rows: list[Row] = []
        try:
            fd = os.open(f"{self._root}/{directory}", _DIRECTORY)
        except OSError:
            return self._rows_of(directory, names)
        try:
            for start in range(0, len(names), _NAMES_AT_ONCE):
                self._retry.check_stop()
                some = names[start : start + _NAMES_AT_ONCE]
                try:
                    rows += [
                        (name, os.stat(name, dir_fd=fd, follow_symlinks=False), "") for name in some
                    ]
                except OSError:
                    rows += self._rows_of(directory, some)
                if self._waits():
                    _Crowd(self, [directory, *others], self._ready).run()
                    return sorted(self._ready.pop(directory), key=_name)
        finally:
            os.close(fd)
        return rows

    def _waits(self) -> bool:
        """Say whether most of the time since the last look was spent waiting."""
        wall, cpu, waits = _usage()
        then_wall, then_cpu, then_waits = self._since
        used, waited = cpu - then_cpu, wall - then_wall - (cpu - then_cpu)
        if waited < _WAITED_SECONDS and used < _WAITED_SECONDS:
            return False  # too short to tell
        self._since = (wall, cpu, waits)
        return waited > max(_WAITED_SECONDS, used * _WAITS_PER_CPU) and waits - then_waits > 1

    def _names(self, directory: str) -> list[str] | str:
        """Return the sorted names in a directory, or what is wrong with it."""
        if directory.count("/") >= DEEPEST:
            return f"nested deeper than {DEEPEST} directories"
        try:
            full = f"{self._root}/{directory}"
            return sorted(self._retry(functools.partial(os.listdir, full)))
        except OSError as error:
            return why(error)

    def _rows_of(self, directory: str, names: list[str]) -> list[Row]:
        """Look at each of some names, with retries."""
        rows: list[Row] = []
        full = f"{self._root}/{directory}/" if directory else f"{self._root}/"
        for name in names:
            try:
                rows.append((name, self._retry(functools.partial(os.lstat, full + name)), ""))
            except OSError as error:
                rows.append((name, None, why(error)))
        return rows


class _Crowd:
    """Threads that list whole trees ahead."""

    def __init__(self, lister: Lister, roots: list[str], ready: dict[str, list[Row]]) -> None:
        self._lister = lister
        self._ready = ready
        self._tasks: queue.SimpleQueue[tuple[str, list[str] | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._failed: list[BaseException] = []
        for root in roots:
            self._put(root, None)

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_THREADS)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        if self._failed:
            raise self._failed[0]

    def _put(self, directory: str, names: list[str] | None) -> None:
        with self._lock:
            self._open += 1
        self._tasks.put((directory, names))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if not self._failed:
                    self._lister._retry.check_stop()  # noqa: SLF001 - the same module
                    self._do(*task)
            except BaseException as error:  # noqa: BLE001 - raised again by who runs this
                self._failed.append(error)
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                for _ in range(_THREADS):
                    self._tasks.put(None)

    def _do(self, directory: str, names: list[str] | None) -> None:
        lister = self._lister
        if names is None:
            found = lister._names(directory)  # noqa: SLF001
            if isinstance(found, str):
                self._ready[directory] = [(".", None, found)]
                return
            self._ready[directory] = []
            for start in range(0, len(found), _NAMES_AT_ONCE):
                self._put(directory, found[start : start + _NAMES_AT_ONCE])
            return
        rows = lister._rows_of(directory, names)  # noqa: SLF001
        with self._lock:
            self._ready[directory] += rows
        for name, info, _ in rows:
            if info is not None and info.st_mode & _S_IFMT == _S_IFDIR:
                self._put(f"{directory}/{name}" if directory else name, None)


def _name(row: Row) -> str:
    return row[0]


def _usage() -> tuple[float, float, int]:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nvcsw
