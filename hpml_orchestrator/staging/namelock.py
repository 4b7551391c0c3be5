"""One stager per name and node: the others wait, then find the data or learn why not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.files import try_lock, unlock

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry

__all__ = ["NameLock"]

_POLL_SECONDS = 0.1
_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_REASON_BYTES = 4096


class NameLock:
    """An exclusive flock on a node-local file, as a context manager.

    The kernel frees it when its holder dies, so a lock that is held means "still copying".

    Attributes:
        holders_reason: why the stager that this one waited for failed; "" when it did not fail,
            was killed, or nobody was waited for.
    """

    def __init__(self, path: str, retry: Retry, sleep: Callable[[float], None]) -> None:
        self.holders_reason = ""
        self._path = path
        self._retry = retry
        self._sleep = sleep
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, _FILE, 0o600)
        except OSError as error:
            raise StagingError(f"cannot lock {shown(self._path)}: {why(error)}") from error
        try:
            waited = False
            while not try_lock(self._fd, exclusive=True):
                waited = True
                self._retry.check_stop()
                self._sleep(_POLL_SECONDS)
            if waited:
                reason = os.pread(self._fd, _REASON_BYTES, 0)
                self.holders_reason = reason.decode("utf-8", "replace")
            os.ftruncate(self._fd, 0)
        except BaseException:
            unlock(self._fd)
            raise
        return self

    def fail(self, reason: str) -> None:
        """Leave the reason for those who wait."""
        os.pwrite(self._fd, reason.encode("utf-8", "backslashreplace")[:_REASON_BYTES], 0)

    def __exit__(self, *_: object) -> None:
        unlock(self._fd)
