"""The directory of a pack: its lock, by which one hpml at a time works there, and its files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.packing.index import INDEX_FILE, read_index
from hpml_orchestrator.packing.shards import DONE, TEMPORARY
from hpml_orchestrator.records.files import SCHEMA_VERSION, fsync_dir
from hpml_orchestrator.records.owner import Owner, boot_id, owner_is_alive, this_owner
from hpml_orchestrator.staging.capacity import file_system_type
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.packindex import TREE_FILE
from hpml_orchestrator.staging.request import PACK_STATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.packing.index import Index
    from hpml_orchestrator.packing.layout import Layout

__all__ = ["Destination", "stripe"]

_ARCHIVE = re.compile(rf"data-\d{{5,}}\.tar|{re.escape(TREE_FILE)}")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_PER_STRIPE_BYTES = 256 << 20
_MOST_STRIPES = 8
_LFS_SECONDS = 30
_ANOTHER = "take another DEST"


class _Note(NamedTuple):
    """What is packed, in hexadecimal, by whom (None: nobody is at work), and since when."""

    source: str
    owner: Owner | None
    began: float


class Destination:
    """DEST of a pack, locked for this process until `end` or `leave`.

    The lock is an flock on `.packing.json`, which also says what is packed and by which process.
    That process counts as gone when this kernel frees its lock or knows its pid no more. Of one on
    another host this is never guessed: the user decides.

    Args:
        path: the directory; made when it is not there.
        source: what is packed, without symbolic links.
        resume: whether to go on with what is there.

    Attributes:
        finished: the index of a pack that is complete already; then nothing is locked.

    Raises:
        InputError: it is inside the source, or holds something else.
        StagingError: it cannot be made or written, or another hpml is at work there.
    """

    def __init__(self, path: str, source: str, *, resume: bool) -> None:
        self.path = os.path.realpath(path)
        self.finished: Index | None = None
        self._shown = path
        self._source = os.fsencode(source).hex()  # names need not be text
        self._resume = resume
        self._made = False
        self._fd = -1
        self._state = os.path.join(self.path, PACK_STATE)
        if f"{self.path}/".startswith(source.rstrip("/") + "/"):
            raise self._refused("must not be inside SOURCE", "")
        try:
            self._look(self._names())
            if self.finished is None:
                self._lock()
                self._remove(_is_temporary)
        except NotADirectoryError:
            raise self._refused("is no directory", "") from None
        except BaseException as error:
            self._close()
            self._unmake()
            if not isinstance(error, OSError):
                raise
            raise StagingError(f"cannot write in {shown(path)}: {why(error)}") from error

    def _names(self) -> set[str]:
        if not os.path.lexists(self.path):
            os.makedirs(self.path)
            self._made = True
        return {name for name in os.listdir(self.path) if not _is_temporary(name)}

    def _look(self, names: set[str]) -> None:
        if INDEX_FILE in names:
            if not self._resume:
                raise self._refused("is a finished pack", _ANOTHER)
            self.finished = read_index(self.path)
            return
        names.discard(PACK_STATE)
        if names and self._note() is None and not (self._resume and _are_archives(names)):
            raise self._refused(
                "is not empty, and holds no unfinished pack",
                "take an empty directory, or one that is not there yet",
            )

    def _lock(self) -> None:
        """Become the one that packs here, and write that down."""
        has_locks = True
        while self._fd < 0:
            self._fd = os.open(self._state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise self._at_work() from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                has_locks = False
            if not self._is_in_place():
                self._close()  # its owner ended at this moment
        note = self._note()
        if note is not None:
            self._check_note(note, has_locks=has_locks)
        state = {
            "schema_version": SCHEMA_VERSION,
            "source": self._source,
            "owner": vars(this_owner("pack")),
        }
        # One write, over all that was there: a kill leaves the one note or the other.
        os.pwrite(self._fd, json.dumps(state).encode().ljust(os.fstat(self._fd).st_size), 0)
        os.fsync(self._fd)
        fsync_dir(self.path)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._state))
        except FileNotFoundError:
            return False

    def _check_note(self, note: _Note, *, has_locks: bool) -> None:
        if note.source != self._source:
            other = shown(os.fsdecode(bytes.fromhex(note.source)))
            raise self._refused(f"is a pack that was begun of another tree, {other}", _ANOTHER)
        owner = note.owner
        if owner is not None:
            if owner.boot_id == boot_id():
                gone = has_locks or not owner_is_alive(owner)
            else:
                gone = owner.hostname == socket.gethostname()  # before this host was started anew
            if not gone:
                raise self._at_work()
        if not self._resume:
            raise self._refused(
                "is a pack of this tree that was not finished", "go on with --resume"
            )

    def _note(self) -> _Note | None:
        try:
            with open(self._state, "rb") as stream:
                state: dict[str, Any] = json.load(stream)
                began = os.fstat(stream.fileno()).st_mtime
            if state["schema_version"] != SCHEMA_VERSION:
                return None
            return _Note(str(state["source"]), Owner(**state["owner"]) if began else None, began)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _at_work(self) -> StagingError:
        note = self._note()
        who, hint = "another process", "wait until it is done"
        if note is not None and note.owner is not None:
            host = note.owner.hostname
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(note.began))
            who = f"process {note.owner.pid} on {host} (since {since})"
            if host != socket.gethostname():
                hint += f"; if it has died, use --resume on {host}, or delete "
                hint += f"{shown(self._state)} and use --resume here"
        return StagingError(f"{who} packs into {shown(self._shown)}", hint=hint)

    def sweep(self, layout: Layout) -> None:
        """Remove archives of an earlier plan, which the pack is not to have.

        Raises:
            OSError: they cannot be removed.
        """
        planned = {shard.file for shard in layout.shards}

        def is_unplanned(name: str) -> bool:
            archive = name.removeprefix(".").removesuffix(DONE)
            return bool(_ARCHIVE.fullmatch(archive)) and archive not in planned

        self._remove(is_unplanned)

    def end(self) -> None:
        """Remove the notes of a pack that has its index.

        Raises:
            OSError: they cannot be removed.
        """
        self._remove(lambda name: name.startswith(".") and name.endswith((DONE, TEMPORARY)))
        self._remove(PACK_STATE.__eq__)
        self._close()

    def leave(self) -> None:
        """Say that nobody is at work any more, and remove what is of no use to who resumes."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self._remove(_is_temporary)  # a worker that was ended may have left it
            if os.listdir(self.path) == [PACK_STATE]:
                self._remove(PACK_STATE.__eq__)
            else:
                os.utime(self._fd, (0, 0))
        self._close()
        self._unmake()

    def _unmake(self) -> None:
        if self._made:
            with contextlib.suppress(OSError):  # finished archives are in it
                os.rmdir(self.path)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove(self, is_wanted: Callable[[str], bool]) -> None:
        for name in filter(is_wanted, os.listdir(self.path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def _refused(self, reason: str, hint: str) -> InputError:
        return InputError(reason, field="DEST", value=self._shown, hint=hint)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(TEMPORARY)


def _are_archives(names: set[str]) -> bool:
    """Say whether these are finished archives of a pack with their notes, and nothing else."""
    notes = {name for name in names if name.startswith(".") and name.endswith(DONE)}
    return all(_ARCHIVE.fullmatch(name) and f".{name}{DONE}" in notes for name in names - notes)


def stripe(directory: str, shard_bytes: int, *, proc_root: str = "/proc") -> str:
    """Spread new archives over Lustre's servers: one for each 256 MiB, 8 at most.

    Args:
        directory: the pack, still without archives.
        shard_bytes: size of an archive.
        proc_root: where the kernel tells the mounts.

    Returns:
        What was done or went wrong, in one line; empty where there is no Lustre.
    """
    if file_system_type(directory, proc_root=proc_root) != "lustre":
        return ""
    lfs = shutil.which("lfs")
    if lfs is None:
        return "on Lustre, but there is no lfs command: the archives get the default striping"
    count = max(1, min(_MOST_STRIPES, -(-shard_bytes // _PER_STRIPE_BYTES)))
    try:
        done = subprocess.run(
            [lfs, "setstripe", "-c", str(count), directory],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LFS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"lfs setstripe failed: {error}"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
        return f"lfs setstripe failed: {reason}"
    return f"on Lustre: each archive is spread over {count} servers"
