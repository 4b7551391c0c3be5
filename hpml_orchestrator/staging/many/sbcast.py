"""One file to all nodes with Slurm's own `sbcast`, whose exit code and result are both checked.

The first node asks all others whether they have room, runs the command, and says what the file's
digest is; every node compares its copy. All goes on only once every node has the right bytes.
sbcast can leave part of a file on nodes that it did not finish: every node removes its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
import secrets
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, StagingError
from hpml_orchestrator.staging.capacity import Need, check_room
from hpml_orchestrator.staging.engine import Copied
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.filehash import hashed
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.many.chunks import hashing_of_first
from hpml_orchestrator.staging.plan import Entry, Plan
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.sources import open_source
from hpml_orchestrator.staging.supply import LocalSupply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.engine import EngineOptions
    from hpml_orchestrator.staging.many.notices import Notices
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["Broadcast", "has_sbcast", "is_one_file"]

_POLL_SECONDS = 0.1
_SAID_CHARS = 500


def has_sbcast(environment: dict[str, str] | None = None) -> bool:
    """Say whether this is a job of Slurm's, and the command is there."""
    env = os.environ if environment is None else environment
    return bool(env.get("SLURM_JOB_ID")) and shutil.which("sbcast") is not None


def is_one_file(kind: str) -> bool:
    """Say whether a source of a kind is one file, as sbcast wants; a pack is a directory.

    >>> [kind for kind in ("file", "tar", "tree", "pack") if is_one_file(kind)]
    ['file', 'tar']
    """
    return kind not in {"tree", "pack"}


class Broadcast:
    """A `Supply` that gets one file from sbcast; an archive is unpacked from there.

    Args:
        request: what is staged; its source is one file.
        notices: by which the nodes agree.
        directory: on this node, where copies go; of the same path on all nodes.
        room: measures the room in a directory.
        most: the room up to which an archive is counted.
        make_room: removes kept data if a need takes it; None: nothing is removed.
        options: how the engine unpacks.
    """

    method = "sbcast"

    def __init__(
        self,
        request: StageRequest,
        notices: Notices,
        *,
        directory: str,
        room: Callable[[str], Room],
        most: Callable[[], Room],
        make_room: Callable[[Need], object] | None,
        options: EngineOptions,
    ) -> None:
        self._request = request
        self._notices = notices
        self._place = notices.place
        self._directory = directory
        self._room = room
        self._most = most
        self._make_room = make_room
        self._options = options
        self._retry = Retry(time.sleep, notices.beat)
        self._copy = ""
        self._digest = b""
        self._supply: Supply | None = None
        self._plan: Plan | None = None
        self.kind = kind_of(request)
        if not is_one_file(self.kind):
            raise StagingError(
                f"sbcast sends one file, and {shown(request.source)} is a directory",
                hint="make a tar archive of it, or use distribution: chain",
            )

    def plan(self) -> Plan:
        """Have the file sent to this node, and say what will be made of it.

        Raises:
            StagingError: a node has no room, sbcast failed, a copy is damaged, a node is gone.
            StagingStopped: should_stop said so.
        """
        if self._plan is None:
            told = self._send() if self._place.index == 0 else self._receive()
            if self.kind == "file":
                name = os.path.basename(self._request.source)
                entry = Entry(name, told["mode"], told["mtime_ns"], told["size"], told["size"])
                top = Entry("", 0o755, told["mtime_ns"])
                self._plan = Plan(self._directory, top, files=[entry])
            else:
                here = dataclasses.replace(self._request, source=self._copy, kind=self.kind)
                source = open_source(here, self._retry, self._most())
                self._supply = LocalSupply(source, self._options)
                self._plan = self._supply.plan()
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Unpack the archive, or move the file to where it belongs.

        Raises:
            StagingError: it cannot be unpacked.
            StagingStopped: retry's should_stop said so.
            OSError: the directory cannot be written.
        """
        if self._supply is not None:
            return self._supply.fill(plan, partial_dir, retry=retry, progress=progress)
        begin = time.perf_counter()
        entry = plan.files[0]
        target = os.path.join(partial_dir, entry.path)
        # made anew: its mode is then & ~umask, which sbcast's copy need not be
        fd = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, entry.mode & 0o777 | 0o600
        )
        try:
            mode = os.fstat(fd).st_mode & 0o777
        finally:
            os.close(fd)
        os.chmod(self._copy, mode)
        os.utime(self._copy, ns=(entry.mtime_ns, entry.mtime_ns))
        os.replace(self._copy, target)
        progress.add(entry.size, 1)
        return Copied([self._digest], time.perf_counter() - begin)

    def reuse(self) -> None:
        """Nothing is left to do for the others."""

    def fail(self, reason: str, hint: str = "") -> None:
        """Let the first node know, should it wait for this one."""
        with contextlib.suppress(HpmlError):
            self._notices.refuse(StagingError(reason, hint=hint), f"{self._place.index}.done")

    def close(self) -> None:
        """Remove the copy, or what sbcast left of one."""
        try:
            if self._supply is not None:
                self._supply.close()
        finally:
            self._sweep()

    def _sweep(self) -> None:
        for path in glob.glob(f"{glob.escape(self._directory)}/.{self._request.name}.sbcast-*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _send(self) -> dict[str, Any]:
        """Do the first node's part; returns what there is to know of the file."""
        notices = self._notices
        try:
            info = self._retry(lambda: os.stat(self._request.source))
            suffix = re.sub(r"[^A-Za-z0-9.]", "", self._request.source.rpartition("/")[2])[-40:]
            told: dict[str, Any] = {
                "copy": f".{self._request.name}.sbcast-{secrets.token_hex(4)}-{suffix}",
                "directory": self._directory,
                "size": info.st_size,
                "mtime_ns": info.st_mtime_ns,
                "mode": info.st_mode & 0o777,
                "hashing": hashing().name,
            }
            self._check_room(told)
            notices.post("start", **told)
            self._gather("room")
            digest = self._file_digest(self._request.source, hashing().name)
            self._run()
            now = self._retry(lambda: os.stat(self._request.source))
            if (now.st_size, now.st_mtime_ns) != (info.st_size, info.st_mtime_ns):
                raise StagingError(f"{shown(self._request.source)}: changed while it was sent")
            notices.post("sent", digest=digest.hex())
            self._compare(told, digest)
            self._gather("done")
        except BaseException as error:
            with contextlib.suppress(HpmlError):
                notices.refuse(error, "start", "sent", "verdict")
            raise
        notices.post("verdict", node=self._place.node)
        return told

    def _receive(self) -> dict[str, Any]:
        """Do what every other node does; returns what there is to know of the file."""
        step, mine = "room", self._place.index
        try:
            told = self._notices.hear("start")
            self._check_room(told)
            if told["directory"] != self._directory:
                raise StagingError(
                    f"sbcast needs one path for all nodes, but the target is {self._directory} "
                    f"here and {told['directory']} on the first node"
                )
            self._notices.post(f"{mine}.room", node=self._place.node)
            sent = self._notices.hear("sent")
            step = "done"
            self._compare(told, bytes.fromhex(str(sent["digest"])))
            self._notices.post(f"{mine}.done", node=self._place.node)
            self._notices.hear("verdict")
        except BaseException as error:
            with contextlib.suppress(HpmlError):
                self._notices.refuse(error, f"{mine}.{step}")
            raise
        return told

    def _check_room(self, told: dict[str, Any]) -> None:
        need = Need(int(told["size"]), 1)
        if self._make_room is not None:
            self._make_room(need)
        room = self._room(self._directory)
        check_room(need, room, name=self._request.name, where=self._directory)
        self._copy = os.path.join(self._directory, str(told["copy"]))

    def _run(self) -> None:
        """Run sbcast.

        Raises:
            StagingError: it failed.
            StagingStopped: should_stop said so.
        """
        command = ["sbcast", "--preserve", self._request.source, self._copy]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
            )
        except OSError as error:
            raise StagingError(f"cannot start sbcast: {why(error)}") from error
        with process:
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        said = process.communicate(timeout=_POLL_SECONDS)[0]
                        break
                    self._retry.check_stop()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise StagingError(
                f"sbcast ended with {process.returncode}: {said.strip()[-_SAID_CHARS:]}",
                hint="Slurm has to allow it (no NoShare in SbcastParameters); or use "
                "distribution: chain",
            )

    def _compare(self, told: dict[str, Any], digest: bytes) -> None:
        """Look whether this node's copy is what was sent."""
        try:
            size = os.stat(self._copy).st_size
            if size != told["size"]:
                raise StagingError(f"sbcast brought {size} bytes of {told['size']}")
            found = self._file_digest(self._copy, str(told["hashing"]))
        except OSError as error:
            raise StagingError(f"sbcast left no file on this node: {why(error)}") from error
        if found != digest:
            raise StagingError(
                f"sbcast brought other bytes than those of {shown(self._request.source)}"
            )
        self._digest = found

    def _file_digest(self, path: str, name: str) -> bytes:
        how = hashing_of_first(name)
        follow = os.O_NOFOLLOW if path == self._copy else 0  # the source may be a link
        fd = self._retry(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | follow))
        try:
            return hashed(self._blocks(fd), how)
        finally:
            os.close(fd)

    def _blocks(self, fd: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while count := self._retry(lambda: os.readv(fd, [buffer])):
            yield buffer[:count]
            self._retry.check_stop()

    def _gather(self, what: str) -> None:
        """Wait for the same word of all other nodes."""
        for index in range(1, self._place.nodes):
            self._notices.hear(f"{index}.{what}", index)
