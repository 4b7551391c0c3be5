"""Small files by which the nodes of a job find each other, in `attempts/<n>/chain/`.

They appear by rename and are readable by the job's user alone; nothing is locked.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Notices", "reason_of"]

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0


def reason_of(error: BaseException) -> str:
    """Return why a node ends, as the others are told."""
    if isinstance(error, StagingStopped):
        return "was told to stop"
    return str(error) or type(error).__name__


class Notices:
    """The files of one staged name: `{attempt}/chain/{name}.{what}`.

    Args:
        attempt: the attempt's directory, on the shared file system.
        name: what is staged.
        should_stop: True ends waiting with StagingStopped.
    """

    def __init__(
        self,
        attempt: str,
        name: str,
        *,
        should_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = os.path.join(attempt, "chain")
        self._name = name
        self.should_stop = should_stop
        self.clock = clock
        self._sleep = sleep

    def post(self, what: str, **record: object) -> None:
        """Publish a record.

        Raises:
            RecordError: the attempt's directory cannot be written.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write {self.directory}: {error.strerror}") from error
        write_text(self._path(what), json.dumps(record), mode=0o600)

    def read(self, what: str) -> dict[str, Any] | None:
        """Return a record; None while there is none."""
        with contextlib.suppress(OSError):
            # NFS keeps "there is no such file" for up to a minute, until the directory is opened.
            os.close(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            found = json.loads(read_text(self._path(what)))
        except (NotFoundError, RecordError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def wait(self, what: str, seconds: float, missing: str) -> dict[str, Any]:
        """Return a record once it is there.

        Raises:
            StagingError: it did not come in time; `missing` says what that means.
            StagingStopped: should_stop said so.
        """
        pause, end = _FIRST_PAUSE_SECONDS, self.clock() + seconds
        while True:
            found = self.read(what)
            if found is not None:
                return found
            if self.should_stop():
                raise StagingStopped
            if self.clock() >= end:
                raise StagingError(f"{missing} within {seconds:.0f} s")
            self._sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def remove(self, *whats: str) -> None:
        """Take records away; not the directory, where another node may be about to post one."""
        for what in whats:
            with contextlib.suppress(OSError):
                os.unlink(self._path(what))

    def _path(self, what: str) -> str:
        return os.path.join(self.directory, f"{self._name}.{what}")
