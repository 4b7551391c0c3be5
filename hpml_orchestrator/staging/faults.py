"""Faults of file systems: which are retried, and how they are reported."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import HpmlError, InputError, StagingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

PATHS_TOLD = 20
_PATH_CHARACTERS = 1000
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
OUTSIDE_LINKS = "outside_links: true (as an option --outside-links) takes links that leave the tree"
UNREADABLE = "ask its owner for access"
NO_ROOM_LEFT = "something else took the room that was free before; choose another target"
_WRITTEN = "if the source is being written, stage it when it is complete"
_FIRST_DELAY_SECONDS = 0.1
_DELAYS = 6  # 6.3 s in all
_GIVEN_UP_SECONDS = 60.0


def links_hint(root: str, targets: Sequence[str]) -> str:
    """Return what helps with links that leave a tree, by its real path and their targets there."""
    hint = "follow_links: true (as an option --follow-links) copies what links lead to"
    hint += f"; {OUTSIDE_LINKS} as they are"
    if any(target.startswith("/") for target in targets):
        return hint  # no tree may hold absolute links
    parent = os.path.commonpath([root, *(os.path.normpath(f"{root}/{one}") for one in targets)])
    told = f"; {shown(parent)} is above the links and what they lead to"
    return hint + told if parent.count("/") > 1 else hint


class StagingStopped(StagingError):  # noqa: N818 - an event, not a fault
    """Staging was stopped (SIGTERM, time limit); nothing was published."""

    def __init__(self) -> None:
        super().__init__("stopped")


class SourceChangedError(Exception):
    """A source has changed since it was scanned."""

    def __init__(self, how: str = "changed while it was copied") -> None:
        super().__init__(how)


def shown(path: str) -> str:
    """Return a path as one line of valid text, with the middle of a very long one left out."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
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
    """Return whether there is a directory at a path.

    Raises:
        StagingError: unknown, because a directory above it is closed to this user.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {shown(path)}: {why(error)}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return False


def request_error(name: str, source: str, error: BaseException) -> BaseException:
    """Convert an OSError or a record's error to one about the request; return others unchanged."""
    if isinstance(error, (StagingError, InputError)):
        return error
    if isinstance(error, HpmlError):
        return StagingError(f"cannot stage {name}: {error}")
    if not isinstance(error, OSError):
        return error
    named = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = shown(os.fsdecode(named) or source)
    return StagingError(
        f"cannot stage {name} from {shown(source)}: {path}: {why(error)}",
        hint=UNREADABLE if isinstance(error, PermissionError) else "",
    )


class Retry:
    """Retries after faults that may pass: EIO, ESTALE, EAGAIN, EINTR; 0.1 s to 3.2 s apart.

    If a fault does not pass, no other is retried for a minute: a failing disk causes many of them,
    and the copy is lost in any case.
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
        """Return whether staging must stop."""
        return self._should_stop()

    def check_stop(self) -> None:
        """Raise StagingStopped if staging must stop."""
        if self._should_stop():
            raise StagingStopped

    def __call__(self, call: Callable[[], T]) -> T:
        """Call with retries and return the result; raises the last OSError if the fault stays."""
        try:
            return call()
        except OSError as error:
            return self.again(call, error)

    def again(self, call: Callable[[], T], fault: OSError) -> T:
        """Retry after the first fault of a call; raises it if it is not one that may pass."""
        delay = _FIRST_DELAY_SECONDS
        for _ in range(_DELAYS):
            # After one fault that lasted for all retries, the next ones fail at once: 6.3 s for
            # each of a thousand unreadable files would keep the job waiting for hours.
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
        """Return a copy with another condition to stop."""
        return Retry(self.sleep, should_stop)


_HINTS = {
    os.strerror(errno.EACCES): UNREADABLE,
    os.strerror(errno.EPERM): UNREADABLE,
    os.strerror(errno.ENOENT): _WRITTEN,  # it existed when its directory was listed
    str(SourceChangedError()): _WRITTEN,
}
"""Hints by the text of a fault: workers in other processes report nothing but the text."""


class Problems:
    """Collects faults by path; reports the first 20 and the count."""

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
        """Record the fault of a path; safe from several threads.

        Args:
            path: of the file.
            reason: the fault.
            cause: the error.
            hint: what helps; found by the reason for errors of the system.
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
        """Raise one StagingError for all faults, if there are any; `hint` replaces theirs."""
        if not self._count:
            return
        paths = "1 path" if self._count == 1 else f"{self._count} paths"
        lines = [f"{self._what}: {paths}", *self._told]
        if self._count > len(self._told):
            lines.append(f"and {self._count - len(self._told)} more")
        raise StagingError("\n  ".join(lines), hint=hint or "; ".join(self._hints)) from self._cause
