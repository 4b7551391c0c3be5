"""Faults of file systems: which are tried again, and how many are told."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "OUTSIDE_LINKS",
    "UNREADABLE",
    "Problems",
    "Retry",
    "SourceChangedError",
    "StagingStopped",
    "brief",
    "is_directory",
    "shown",
    "why",
]

T = TypeVar("T")

PATHS_TOLD = 20
_PATH_CHARACTERS = 4096
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
OUTSIDE_LINKS = "outside_links: true (as an option --outside-links) takes links that leave the tree"
UNREADABLE = "you have no right to that: ask its owner for it"
_WRITTEN = "if the source is being written, stage it when it is complete"
_FIRST_DELAY_SECONDS = 0.1
_DELAYS = 6
_GIVEN_UP_SECONDS = 60.0


class StagingStopped(StagingError):  # noqa: N818 - an event, not a fault
    """Staging was told to stop (SIGTERM, time limit); nothing was published."""

    def __init__(self) -> None:
        super().__init__("stopped")


class SourceChangedError(Exception):
    """A source is not what it was when it was scanned."""

    def __init__(self, how: str = "changed while it was copied") -> None:
        super().__init__(how)


def shown(path: str) -> str:
    """Return a path as one line of valid text, odd bytes and line ends escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def brief(path: str) -> str:
    """Return a path for a message, the middle of an absurd one left out."""
    text = shown(path)
    if len(text) <= _PATH_CHARACTERS:
        return text
    half = _PATH_CHARACTERS // 2
    return f"{text[:half]}…{text[-half:]} ({len(text)} characters)"


def why(error: BaseException) -> str:
    """Return the reason of a fault without the path that the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def is_directory(path: str) -> bool:
    """Say whether there is a directory at a path.

    Raises:
        StagingError: nobody could say, because a directory on the way is closed to this user.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {shown(path)}: {why(error)}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return False


class Retry:
    """Calls again after faults that pass: EIO, ESTALE, EAGAIN, EINTR; 0.1 s to 3.2 s apart.

    Once a fault did not pass, others are not waited for either, for a minute: a disk that fails has
    many of them, and the copy is lost.
    """

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sleep = sleep
        self._should_stop = should_stop
        self._given_up = float("-inf")

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
            if fault.errno not in TRANSIENT or time.monotonic() < self._given_up:
                raise fault
            self.check_stop()
            self.sleep(delay)
            self.check_stop()
            delay *= 2
            try:
                return call()
            except OSError as error:
                fault = error
        self._given_up = time.monotonic() + _GIVEN_UP_SECONDS
        raise fault

    def stopped_by(self, should_stop: Callable[[], bool]) -> Retry:
        """Return the same but for what stops it."""
        return Retry(self.sleep, should_stop)


_HINTS = {
    os.strerror(errno.EACCES): UNREADABLE,
    os.strerror(errno.EPERM): UNREADABLE,
    os.strerror(errno.ENOENT): _WRITTEN,  # it was there when its directory was listed
    str(SourceChangedError()): _WRITTEN,
}
"""What helps, by the reason: that is all that workers in other processes tell of a fault."""


class Problems:
    """Collects what is wrong by path, tells the first 20 and the count."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._told: list[str] = []
        self._hints: dict[str, None] = {}  # each once, in the order of the faults
        self._cause: BaseException | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._count > 0

    def add(
        self, path: str, reason: str, cause: BaseException | None = None, *, hint: str = ""
    ) -> None:
        """Note one path; safe from several threads.

        Args:
            path: what it is about.
            reason: what is wrong with it.
            cause: the error that told so.
            hint: what helps; known without being told for what the system says.
        """
        hint = hint or _HINTS.get(reason, "")
        with self._lock:
            if hint:
                self._hints[hint] = None
            self._count += 1
            self._cause = self._cause or cause
            if len(self._told) < PATHS_TOLD:
                self._told.append(f"{shown(path)}: {reason}")

    def raise_any(self, hint: str = "") -> None:
        """Raise one StagingError for all that was noted, if anything was.

        Args:
            hint: told rather than what helps against each kind of fault.
        """
        if not self._count:
            return
        paths = "1 path" if self._count == 1 else f"{self._count} paths"
        lines = [f"{self._what}: {paths}", *self._told]
        if self._count > len(self._told):
            lines.append(f"and {self._count - len(self._told)} more")
        raise StagingError("\n  ".join(lines), hint=hint or "; ".join(self._hints)) from self._cause
