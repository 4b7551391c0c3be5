"""Holding what lies at a name without touching the file system that it is on."""

from __future__ import annotations

import os

__all__ = ["Held"]

_HELD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_INFO_BYTES = 512


class Held:
    """One thing at a time, held by a descriptor that reaches no file system (O_PATH, open(2)).

    A user may mount a FUSE file system on an own file or directory that never answers: whoever
    looks at its root by name (lstat, open) waits for as long as that user likes. What is held here
    can be asked for its mount first, by the kernel's own memory of it (/proc/PID/fdinfo, proc(5)),
    and is then looked at by its descriptor: no mount that is made meanwhile, and no renaming, can
    come between. Nothing is mounted by itself either (autofs).

    Raises:
        OSError: no descriptor is left, or there is no procfs.
    """

    def __init__(self) -> None:
        # Always of the same number, so that its file in procfs can stay open: half the cost.
        self.fd = os.open("/", _HELD)
        try:
            self._info = os.open(f"/proc/self/fdinfo/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self.fd)
            raise

    def hold(self, name: str, parent: int | None = None) -> None:
        """Hold what lies at a name, and no longer what was held before; a link itself.

        Args:
            name: of it.
            parent: descriptor of the directory that it is in.

        Raises:
            OSError: nothing does, or it is not for us.
        """
        new = os.open(name, _HELD, dir_fd=parent)
        try:
            os.dup2(new, self.fd, inheritable=False)
        finally:
            os.close(new)

    def mount(self) -> bytes:
        """Return the number of the mount that it is on.

        Raises:
            OSError: the kernel does not say it.
        """
        told = os.pread(self._info, _INFO_BYTES, 0)
        _, name, number = told.partition(b"mnt_id:")
        if not name:
            raise OSError("no mnt_id in fdinfo")
        return number.partition(b"\n")[0].strip()

    def directory(self) -> int:
        """Open it as a directory, also where another file system covers it by now.

        Raises:
            OSError: it is none, or not for us.
        """
        return os.open(".", _DIRECTORY, dir_fd=self.fd)

    def file(self) -> int:
        """Open it for reading, without a wait for whoever writes to it; not a link.

        Raises:
            OSError: it is not for us.
        """
        return os.open(f"/proc/self/fd/{self.fd}", _FILE)

    def close(self) -> None:
        """Hold nothing any more."""
        os.close(self._info)
        os.close(self.fd)
