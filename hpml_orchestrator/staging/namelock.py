"""One stager per name and node: the others wait, then find the data or learn why not."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.files import try_lock, unlock

if TYPE_CHECKING:
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.progress import OnProgress

__all__ = ["BusyError", "NameLock"]

_POLL_SECONDS = 0.1
_POLLS_PER_TELLING = 10
_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FAILED, _COPYING = "failed ", "copying "
_TEXT_BYTES = 4096


class BusyError(StagingError):
    """Another process holds the lock, and waiting was not wanted."""

    def __init__(self) -> None:
        super().__init__("another process is staging this")


class NameLock:
    """An exclusive flock on a node-local file, as a context manager.

    The kernel frees it when its holder dies, so a lock that is held means "still copying". The
    file tells those who wait how far the holder is, or why it failed.

    Args:
        path: of the file.
        retry: waits, and is asked whether to stop.
        on_wait: told the holder's progress about once a second.
        waits: while another process holds it; else entering raises BusyError.
        most_seconds: to wait before BusyError; None for no limit.

    Attributes:
        holders_reason: why the stager that this one waited for failed; "" when it did not fail,
            was killed, or nobody was waited for.
    """

    def __init__(
        self,
        path: str,
        retry: Retry,
        *,
        on_wait: OnProgress | None = None,
        waits: bool = True,
        most_seconds: float | None = None,
    ) -> None:
        self.holders_reason = ""
        self._path = path
        self._retry = retry
        self._on_wait = on_wait
        self._most = 0.0 if not waits else most_seconds
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, _FILE, 0o600)
        except OSError as error:
            raise StagingError(f"cannot lock {shown(self._path)}: {why(error)}") from error
        try:
            waited = 0
            while not try_lock(self._fd, exclusive=True):
                if self._most is not None and waited * _POLL_SECONDS >= self._most:
                    raise BusyError
                waited += 1
                self._retry.check_stop()
                if waited % _POLLS_PER_TELLING == 0:
                    self._tell_of_holder()
                self._retry.sleep(_POLL_SECONDS)
            text = self._text() if waited else ""
            if text.startswith(_FAILED):
                self.holders_reason = text[len(_FAILED) :]  # stays for the others who wait
            else:
                os.ftruncate(self._fd, 0)
        except BaseException:
            unlock(self._fd)
            raise
        return self

    def fail(self, reason: str) -> None:
        """Leave the reason for those who wait."""
        self._write(_FAILED + reason)

    def tell(self, done: int, files: int, bytes_total: int, files_total: int) -> None:
        """Leave how far the copy is for those who wait."""
        self._write(f"{_COPYING}{done} {files} {bytes_total} {files_total} ")

    def raise_reason(self, what: str) -> None:
        """Stop a caller who waited for a stager that failed.

        Raises:
            StagingError: what happened, and the reason that was left.
        """
        if self.holders_reason:
            raise StagingError(f"{what}: {self.holders_reason}")

    def __exit__(self, *_: object) -> None:
        unlock(self._fd)

    def _tell_of_holder(self) -> None:
        text = self._text()
        numbers = [int(field) for field in text.split()[1:5] if field.isdigit()]
        if self._on_wait is None or not text.startswith(_COPYING):
            return
        if len(numbers) == 4:  # noqa: PLR2004 - as `tell` writes them
            self._on_wait(*numbers)

    def _text(self) -> str:
        return os.pread(self._fd, _TEXT_BYTES, 0).decode("utf-8", "replace")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")[:_TEXT_BYTES]
        with contextlib.suppress(OSError):  # a full disk must not hide why the copy failed
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
