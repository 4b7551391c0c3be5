"""Copy the files of a working tree, byte by byte, into a directory of their own."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.worktree import FIELD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hpml_orchestrator.runs.worktree import Entry

__all__ = ["copy_entries"]

_CHUNK_BYTES = 1024**2
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def copy_entries(
    top: bytes,
    target: bytes,
    entries: Collection[Entry],
    *,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Copy entries of a working tree with their modes and times; the target is made.

    A symbolic link stays one and leads to the same file, to that of the copy if the copy has it.
    What has vanished since it was listed is left out.

    Args:
        top: of the working tree.
        target: the directory to make; nobody but its owner may look into it.
        entries: what to copy.
        tick: is called before each.

    Returns:
        Number of files and links, and bytes of the files.

    Raises:
        InputError: a file cannot be read.
        OSError: the target cannot be written.
    """
    os.mkdir(target)
    os.chmod(target, 0o700)
    folders = _folders(entry.path for entry in entries)
    for folder in sorted(folders):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
    known = folders | {entry.path for entry in entries}
    files = size = 0
    for entry in entries:
        tick()
        source, goal = os.path.join(top, entry.path), os.path.join(target, entry.path)
        if stat.S_ISDIR(entry.info.st_mode):
            os.makedirs(goal, exist_ok=True)
            continue
        copied = (
            _copy_link(top, entry.path, goal, known)
            if stat.S_ISLNK(entry.info.st_mode)
            else _copy_file(source, goal)
        )
        if copied is not None:
            files += 1
            size += copied
    return files, size


def _folders(paths: Iterable[bytes]) -> set[bytes]:
    """Return the directories that paths lie in, those above them included."""
    found: set[bytes] = set()
    for path in paths:
        folder = os.path.dirname(path)
        while folder and folder not in found:
            found.add(folder)
            folder = os.path.dirname(folder)
    return found


def _copy_file(source: bytes, goal: bytes) -> int | None:
    """Copy a regular file and return its bytes; None if it is none any more."""
    try:
        # a pipe may have come in its place, which must not be waited for
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        _fail_unless_gone(source, error)
        return None
    try:
        info = os.fstat(reading)
        if not stat.S_ISREG(info.st_mode):
            return None
        # the owner may always read and remove what lies in the records
        mode = stat.S_IMODE(info.st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR
        writing = os.open(goal, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copied = 0
            while copied < info.st_size:  # and no further: it may be a log that grows
                try:
                    data = os.read(reading, min(_CHUNK_BYTES, info.st_size - copied))
                except OSError as error:
                    _fail_unless_gone(source, error)
                    return None
                if not data:
                    break
                copied += len(data)
                while data:
                    data = data[os.write(writing, data) :]
            os.fchmod(writing, mode)
            os.utime(writing, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(writing)
        return copied
    finally:
        os.close(reading)


def _copy_link(top: bytes, path: bytes, goal: bytes, known: Collection[bytes]) -> int | None:
    """Make a link that leads where that of the working tree leads; None if it is none any more."""
    try:
        text = os.readlink(os.path.join(top, path))
    except OSError as error:
        if error.errno != errno.EINVAL:  # so it is where it is a file now
            _fail_unless_gone(os.path.join(top, path), error)
        return None
    folder = os.path.dirname(path)
    place = os.path.normpath(os.path.join(top, folder, text))
    inside = place.startswith(top.rstrip(b"/") + b"/") or place == top
    if os.path.isabs(text):
        name = os.path.relpath(place, top)
        if inside and name in known:  # into the tree that is about to be edited
            text = os.path.relpath(name, folder or b".")
    elif not inside:  # from the copy it would lead elsewhere
        text = os.path.join(top, folder, text)
    os.symlink(text, goal)
    return 0


def _fail_unless_gone(path: bytes, error: OSError) -> None:
    if error.errno in _GONE:
        return
    raise InputError(
        f"cannot copy {os.fsdecode(path)!r}: {error.strerror or error}",
        field=FIELD,
        hint="make it readable, or list it in .gitignore if it is no code",
    ) from error
