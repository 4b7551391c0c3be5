"""Faults of file systems: which are tried again, and how many are told."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DamagedSourceError", "Problems", "Retry", "SourceChangedError", "shown", "why"]

T = TypeVar("T")

PATHS_TOLD = 20
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_FIRST_DELAY_SECONDS = 0.1
_DELAYS = 6


class SourceChangedError(Exception):
    """A source is not what it was when it was scanned."""

    def __init__(self, how: str = "changed while it was copied") -> None:
        super().__init__(how)


class DamagedSourceError(Exception):
    """What was read is not what the source itself says it holds."""

    def __init__(self) -> None:
        super().__init__("is damaged: its digest is not the one that was recorded")


def shown(path: str) -> str:
    """Return a path as one line of valid text, odd bytes and line ends escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def why(error: BaseException) -> str:
    """Return the reason of a fault without the path that the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class Retry:
    """Calls again after faults that pass: EIO, ESTALE, EAGAIN, EINTR; 0.1 s to 3.2 s apart."""

    def __init__(self, sleep: Callable[[float], None], should_stop: Callable[[], bool]) -> None:
        self._sleep = sleep
        self._should_stop = should_stop

    def stops(self) -> bool:
        """Say whether staging was told to stop."""
        return self._should_stop()

    def check_stop(self) -> None:
        """Raise StagingStopped once staging was told to stop."""
        if self._should_stop():
            raise StagingStopped

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what the call returns; its last OSError when the fault does not pass."""
        try:
            return call()
        except OSError as error:
            return self.again(call, error)

    def again(self, call: Callable[[], T], fault: OSError) -> T:
        """Go on after a first fault of a call; raises it when it is none that passes."""
        delay = _FIRST_DELAY_SECONDS
        for _ in range(_DELAYS):
            if fault.errno not in TRANSIENT:
                raise fault
            self.check_stop()
            self._sleep(delay)
            self.check_stop()
            delay *= 2
            try:
                return call()
            except OSError as error:
                fault = error
        raise fault

    def stopped_by(self, should_stop: Callable[[], bool]) -> Retry:
        """Return the same but for what stops it."""
        return Retry(self._sleep, should_stop)


class Problems:
    """Collects what is wrong by path, tells the first 20 and the count."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._told: list[str] = []
        self._cause: BaseException | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, path: str, reason: str, cause: BaseException | None = None) -> None:
        """Note one path; safe from several threads."""
        with self._lock:
            self._count += 1
            self._cause = self._cause or cause
            if len(self._told) < PATHS_TOLD:
                self._told.append(f"{shown(path)}: {reason}")

    def raise_any(self, hint: str = "") -> None:
        """Raise one StagingError for all that was noted, if anything was."""
        if not self._count:
            return
        paths = "1 path" if self._count == 1 else f"{self._count} paths"
        lines = [f"{self._what}: {paths}", *self._told]
        if self._count > len(self._told):
            lines.append(f"and {self._count - len(self._told)} more")
        raise StagingError("\n  ".join(lines), hint=hint) from self._cause
