"""List directories with the status of each entry: one by one, by many threads where that waits."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.faults import why
from hpml_orchestrator.staging.manners import TokenBucket
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry

    Row = tuple[str, os.stat_result | None, str]
    # (name, status, fault) of an entry; either the status or the fault is set

__all__ = ["DEEPEST", "Lister"]

DEEPEST = 256
_NAMES_AT_ONCE = 512
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_S_IFMT, _S_IFDIR = 0o170000, 0o040000


class Lister:
    """Lists directories below a root; entries come sorted by name.

    On a file system that is served to this node, where each look waits for a server, the whole tree
    is listed ahead by many threads.

    Args:
        root: the top.
        retry: calls again after faults that pass.
        rate: entries that may be looked at per second; 0 for any.
    """

    def __init__(self, root: str, retry: Retry, rate: float = 0.0) -> None:
        self._root = root
        self._take = TokenBucket(rate, check_stop=retry.check_stop).take
        self._retry = retry
        self._threads = readers_for(root)
        self._ready: dict[str, list[Row]] = {}
        self._tasks: queue.SimpleQueue[tuple[str, list[str] | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._failed: list[BaseException] = []

    def rows(self, directory: str) -> list[Row]:
        """Return the entries of a directory, relative to the root; of the root itself first."""
        self._retry.check_stop()
        if not directory and self._threads > 1:
            self._list_ahead()
        ready = self._ready.pop(directory, None)
        if ready is not None:
            ready.sort(key=_name)  # once: its parts came one by one
            return ready
        names = self._names(directory)
        if isinstance(names, str):
            return [(".", None, names)]
        try:
            fd = os.open(f"{self._root}/{directory}", _DIRECTORY)
        except OSError:
            return self._rows_of(directory, names)
        rows: list[Row] = []
        try:
            for start in range(0, len(names), _NAMES_AT_ONCE):
                self._retry.check_stop()
                some = names[start : start + _NAMES_AT_ONCE]
                self._take(len(some))
                try:
                    rows += [
                        (name, os.stat(name, dir_fd=fd, follow_symlinks=False), "") for name in some
                    ]
                except OSError:
                    rows += self._rows_of(directory, some)
        finally:
            os.close(fd)
        return rows

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

    def _list_ahead(self) -> None:
        """List everything with threads."""
        self._put("", None)
        threads = []
        with contextlib.suppress(RuntimeError):  # the job may have no more: those that are do it
            for _ in range(self._threads):
                one = threading.Thread(target=self._work, daemon=True)
                one.start()
                threads.append(one)
        if not threads:
            self._work()
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
                    self._retry.check_stop()
                    self._list(*task)
            except BaseException as error:  # noqa: BLE001 - raised again by who runs this
                self._failed.append(error)
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                for _ in range(self._threads):
                    self._tasks.put(None)

    def _list(self, directory: str, names: list[str] | None) -> None:
        """List a directory, or look at some of its names."""
        if names is None:
            found = self._names(directory)
            if isinstance(found, str):
                self._ready[directory] = [(".", None, found)]
                return
            self._ready[directory] = []
            for start in range(0, len(found), _NAMES_AT_ONCE):
                self._put(directory, found[start : start + _NAMES_AT_ONCE])
            return
        self._take(len(names))
        rows = self._rows_of(directory, names)
        with self._lock:
            self._ready[directory] += rows
        for name, info, _ in rows:
            if info is not None and info.st_mode & _S_IFMT == _S_IFDIR:
                self._put(f"{directory}/{name}" if directory else name, None)


def _name(row: Row) -> str:
    return row[0]
