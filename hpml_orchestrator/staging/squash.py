"""A SquashFS image as a source: mounted read-only by squashfuse, and staged as a tree.

squashfuse runs beside this process under a shell that waits for the end of its own standard input:
however this process ends, the image is unmounted. The mount point is in a directory that only this
user can enter, and FUSE itself keeps other users out.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.extents import drop_pages
from hpml_orchestrator.staging.faults import shown, why

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["SquashSource", "check_start"]

_MAGIC = b"hsqs"
_MOUNT_SECONDS = 30
_END_SECONDS = 10
_POLL_SECONDS = 0.02
# The pipe is closed by the end of this process, whatever it dies of; SIGTERM makes squashfuse
# unmount. Its own standard output stays open until then, which tells an early end.
_SCRIPT = """
"$1" -f -o ro,nosuid,nodev "$2" "$3" </dev/null & child=$!
exec >/dev/null 2>&1
trap '' INT TERM HUP
read -r _
kill "$child" && wait "$child"
"""


class SquashSource:
    """A SquashFS image.

    Args:
        path: the image.
        retry: calls again after faults that pass.
        tree: makes the source of a directory.

    Raises:
        StagingError: squashfuse is not installed.
    """

    kind = "squashfs"
    ordered = False

    def __init__(self, path: str, retry: Retry, tree: Callable[[str], Source]) -> None:
        # the low-level program is faster, and tells which names are one file
        program = shutil.which("squashfuse_ll") or shutil.which("squashfuse")
        if program is None:
            raise StagingError(
                f"{shown(path)}: squashfuse is not installed on this node",
                hint="install the package squashfuse (with FUSE for users), or stage the image "
                "itself with kind: file",
            )
        self._program = program
        self._path = path
        self._retry = retry
        self._tree = tree
        self._source: Source | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._room = ""

    def plan(self) -> Plan:
        """Mount the image and look at its tree; see `Source.plan`.

        Raises:
            StagingError: it cannot be mounted.
        """
        if self._source is None:
            self._mount()
            self._source = self._tree(self._point)
        return self._source.plan()

    def reader(self, plan: Plan) -> Reader:
        """Open for reading what `plan` returned."""
        assert self._source is not None  # noqa: S101 - `plan` comes first
        return self._source.reader(plan)

    @property
    def _point(self) -> str:
        return os.path.join(self._room, "image")

    def _mount(self) -> None:
        before = self._retry(lambda: os.stat(self._path))
        with open(self._path, "rb") as stream:
            check_start(self._path, stream.read(len(_MAGIC)))
        if not before.st_size:
            return
        self._room = tempfile.mkdtemp(prefix="hpml-squashfs-")  # of mode 0700
        try:
            os.mkdir(self._point, 0o700)
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", self._program, self._path, self._point],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C is for this process; the pipe tells the others
            )
            self._wait(self._process)
        except BaseException:
            self.close()
            raise

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the image is mounted."""
        assert process.stdout is not None  # noqa: S101 - given above
        until = time.monotonic() + _MOUNT_SECONDS
        while not os.path.ismount(self._point):
            self._retry.check_stop()
            said = b""
            if select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
                said = process.stdout.read()  # comes back when squashfuse has ended
            elif time.monotonic() < until:
                continue
            line = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise StagingError(
                f"{shown(self._path)}: squashfuse cannot mount it: {line or 'no answer'}",
                hint="may users mount with FUSE here (/dev/fuse, fusermount3)? Is the image whole?",
            )

    def close(self) -> None:
        """Unmount the image, and remove the mount point; may be called again."""
        if self._source is not None:
            self._source.close()
            self._source = None
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
            drop_pages(self._path)
        if self._room:
            with contextlib.suppress(OSError):
                os.rmdir(self._point)
            try:
                os.rmdir(self._room)
            except OSError as error:
                raise StagingError(
                    f"{shown(self._path)}: cannot remove its mount point {shown(self._room)}: "
                    f"{why(error)}",
                    hint=f"unmount it with: fusermount3 -uz {shown(self._point)}",
                ) from error
            finally:
                self._room = ""

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None  # noqa: S101 - given above
        assert process.stdout is not None  # noqa: S101
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.stdout.close()
        if os.path.ismount(self._point):
            self._force()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)

    def _force(self) -> None:
        """Take away a mount that something still uses."""
        for words in (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"]):
            with contextlib.suppress(OSError):
                done = subprocess.run([*words, self._point], check=False, capture_output=True)
                if not done.returncode:
                    return


def check_start(path: str, start: bytes) -> None:
    """Refuse what does not begin as an image does.

    Raises:
        StagingError: it is no SquashFS image.
    """
    if not start.startswith(_MAGIC):
        raise StagingError(f"{shown(path)}: is no SquashFS image")
