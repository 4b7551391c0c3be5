"""Whose a pack is: one hpml at a time, on whichever host; who falls silent has lost it.

The file's time tells when its owner was last at work. Times are compared on the file server's own
clock: the hosts' need not agree.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import dataclass
from typing import Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.packing.files import TEMPORARY, new_file, write_all
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.request import PACK_STATE

__all__ = ["BEAT_SECONDS", "SILENT_SECONDS", "STATE_FILE", "Claim", "Note", "is_temporary"]

STATE_FILE = PACK_STATE
BEAT_SECONDS = 30.0
"""How often an owner says that it is at work."""
SILENT_SECONDS = 300.0
"""An owner that cannot be judged otherwise and was not heard of for so long counts as dead."""

_FIRST_BEAT_SECONDS = 2.0  # two that took over at the same moment are told apart soon
_VERSION = 1
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}


@dataclass(frozen=True)
class Note:
    """What an earlier hpml, or another one, has written down.

    Attributes:
        source: the tree, its name's bytes in hexadecimal.
        owner: the process.
        text: of the file.
        mtime_ns: when the owner was last at work, by the file server's clock.
    """

    source: str
    owner: Owner
    text: bytes
    mtime_ns: int


class Claim:
    """The file by which a pack has an owner.

    Args:
        directory: the pack.
        name: what the user calls it.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, STATE_FILE)
        self._shown = shown(name)
        self._mine = b""
        self._next = 0.0

    def read(self) -> Note | None:
        """Return what is written down; None where there is nothing, or nothing of use."""
        try:
            with open(self._path, "rb") as stream:
                text = stream.read()
                mtime_ns = os.fstat(stream.fileno()).st_mtime_ns
            state: dict[str, Any] = json.loads(text)
            if state.get("schema_version") != _VERSION:
                return None
            return Note(str(state["source"]), Owner(**state["owner"]), text, mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def refuse_if_alive(self, note: Note) -> None:
        """Refuse what another hpml is at work on.

        Raises:
            StagingError: it lives, or was heard of a moment ago and cannot be judged from here.
            OSError: the directory cannot be written.
        """
        owner, here = note.owner, this_owner("")
        known = owner.boot_id != here.boot_id or owner.pid_namespace == here.pid_namespace
        if owner.hostname == here.hostname and known:
            if owner_is_alive(owner):
                raise StagingError(f"process {owner.pid} packs into {self._shown} at this moment")
            return
        silent = self._now() - note.mtime_ns / 1e9
        if silent < SILENT_SECONDS:
            raise StagingError(
                f"process {owner.pid} on {owner.hostname} packs into {self._shown}: "
                f"it said so {max(silent, 0):.0f} s ago",
                hint="wait until it is done; if it is gone, --resume takes over once it has been "
                f"silent for {SILENT_SECONDS / 60:.0f} minutes",
            )

    def take(self, source: str, before: Note | None) -> None:
        """Become the owner.

        Args:
            source: what is packed.
            before: what was found, and judged to be nobody's any more; None where nothing was.

        Raises:
            StagingError: another hpml has come first.
            OSError: the directory cannot be written.
        """
        state = {
            "schema_version": _VERSION,
            "source": os.fsencode(source).hex(),  # names need not be text
            "owner": vars(this_owner("pack")),
        }
        self._mine = json.dumps(state).encode()
        with new_file(self._directory, STATE_FILE) as (fd, temporary):
            write_all(fd, self._mine)
            os.fsync(fd)
            if before is None:
                self._make(temporary)
            else:
                # A moment is left in which two take over: their first beats tell them apart.
                if self.read() != before:
                    raise self._beaten()
                os.rename(temporary, self._path)
        fsync_dir(self._directory)
        self._next = time.monotonic() + _FIRST_BEAT_SECONDS

    def beat(self) -> None:
        """Say, twice a minute, that this process is at work; cheap to call at any time.

        Raises:
            StagingError: another hpml has taken over, for this one was silent for too long.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        try:
            self.check()
            os.utime(self._path)
        except OSError:
            return  # a fault of the file system that may pass, or ends the writing of archives

    def release(self) -> bool:
        """Say that nobody is at work any more: whoever resumes need not wait.

        Returns:
            Whether this process was the owner.
        """
        with contextlib.suppress(OSError, StagingError):
            self.check()
            os.utime(self._path, (0, 0))
            return True
        return False

    def remove(self) -> None:
        """Remove the file: the pack is finished."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def check(self) -> None:
        """Look whether this process is still the owner.

        Raises:
            StagingError: another hpml has taken over, for this one was silent for too long.
            OSError: that cannot be told.
        """
        try:
            with open(self._path, "rb") as stream:
                if stream.read() == self._mine:
                    return
        except FileNotFoundError:
            pass
        raise self._lost()

    def _make(self, temporary: str) -> None:
        try:
            os.link(temporary, self._path)  # unlike a rename it replaces nothing
        except FileExistsError:
            raise self._beaten() from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(self._path):
                raise self._beaten() from None
            os.rename(temporary, self._path)

    def _now(self) -> float:
        """Return the time of the file server's clock, in seconds."""
        with new_file(self._directory, STATE_FILE) as (fd, _):
            return os.fstat(fd).st_mtime

    def _beaten(self) -> StagingError:
        note = self.read()
        who = f"process {note.owner.pid} on {note.owner.hostname}" if note else "another hpml"
        return StagingError(f"{who} has begun to pack into {self._shown} at this moment")

    def _lost(self) -> StagingError:
        note = self.read()
        who = f"process {note.owner.pid} on {note.owner.hostname}" if note else "another hpml"
        return StagingError(
            f"{who} has taken over {self._shown}",
            hint="this one was not heard of for too long, or both began at the same moment; what "
            "it finished is kept",
        )


def is_temporary(name: str) -> bool:
    """Say whether a file was being made here when its hpml was killed."""
    return name.startswith(f".{STATE_FILE}.") and name.endswith(TEMPORARY)
