"""Where training feeds arrive: an inherited socket, or `{run}/exporter.sock` for a whole node.

Nothing is read between two samples, so a feed costs nothing then: what does not fit into a
connection's own queue waits with its sender, who loses nothing by that (counters are sums). So a
flood of messages stays the flooder's own affair, and what is read of it at each sample has a bound.

A connection belongs to the job that its process is in, as the kernel says, when it is new. A job
that just began may not be known yet: its connection waits for some samples. So that those who
connect again and again fill no queue that all share, a thread takes connections as they come, up to
4,000 a second, and closes at once what is beyond a job's or a user's own share of those that wait.
Who floods faster than that can still keep others out; an agent tries again every ten seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.jobs.board import JobsBoard
from hpml_exporters.training.message import MAX_MESSAGE_BYTES, part_of

__all__ = ["Connection", "Inherited", "Listener", "Refused"]

SOCKET_NAME = "exporter.sock"
_BACKLOG = 512
_MESSAGES = 128  # of one connection at a sample
_CONNECTIONS = 1024
_PER_JOB = 16
_ACCEPTS = 400  # at once
_PAUSE_SECONDS = 0.1  # after those
_WAITING = 256  # of no known job
_WAITING_PER_USER = 16
_WAIT_SAMPLES = 4
_UCRED = struct.Struct("=iII")  # pid, uid, gid
_LEAVE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass
class Refused:
    """What was not taken since the exporter began.

    Attributes:
        stranger: connections of processes that belong to no known job.
        limit: connections beyond what a job, or a node, may have.
        malformed: messages that are none.
    """

    stranger: int = 0
    limit: int = 0
    malformed: int = 0


@dataclass
class Connection:
    """A socket that one agent writes to.

    Attributes:
        channel: the socket, not blocking.
        jobid: whose it is; empty: not known yet.
        agent: process id of the agent; -1: the messages say it.
        uid: user of the agent; -1: of no interest.
        looks: how often its job was looked for.
        parts: what was read and not taken, by part.
    """

    channel: socket.socket
    jobid: str
    agent: int = -1
    uid: int = -1
    looks: int = 0
    parts: dict[int, bytes] = field(default_factory=dict)

    def read(self, refused: Refused) -> bool:
        """Take what is queued, and keep the latest of each part; False once the end has come."""
        for _ in range(_MESSAGES):
            try:
                datagram = self.channel.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not datagram and self.channel.type == socket.SOCK_SEQPACKET:
                return False
            try:
                self.parts[part_of(datagram)] = datagram
            except ValueError:
                refused.malformed += 1
        return True

    def take(self) -> Iterator[bytes]:
        """Yield the latest of each part that was read, once."""
        parts, self.parts = self.parts, {}
        yield from parts.values()


class Inherited:
    """The feed of the job that this exporter is a part of.

    Args:
        fd: the descriptor.
        jobid: the job.

    Raises:
        NotHereError: it is no socket.
    """

    def __init__(self, fd: int, jobid: str) -> None:
        try:
            copy = os.dup(fd)  # closed and made anew with the collector
        except OSError as error:
            raise NotHereError(f"the feed's descriptor {fd}: {error.strerror}") from error
        try:
            channel = socket.socket(fileno=copy)
        except OSError as error:
            os.close(copy)
            raise NotHereError(f"the feed's descriptor {fd}: {error.strerror}") from error
        channel.setblocking(False)
        self._connection = Connection(channel, jobid)

    def read(self, refused: Refused) -> list[Connection]:
        """Return the connection, with what has come."""
        self._connection.read(refused)
        return [self._connection]

    def close(self) -> None:
        """Close the copy of the descriptor."""
        self._connection.channel.close()


class Listener:
    """The socket that all agents of a node may connect to.

    Args:
        directory: where it is made, as `exporter.sock`; made too where that is allowed.
        jobs: which processes belong to which job.

    Raises:
        NotHereError: this user may not make it, or another exporter listens there.
    """

    def __init__(self, directory: str, jobs: JobsBoard) -> None:
        self._path = f"{directory}/{SOCKET_NAME}"
        self._jobs = jobs
        self._open: list[Connection] = []
        self._lock = threading.Lock()  # for what follows, and for accepting
        self._waiting: list[Connection] = []
        self._shares: Counter[str | int] = Counter()  # of those that wait, by job id or user
        self._refused = Refused()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        new = f"{directory}/.{SOCKET_NAME}.{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                os.chmod(directory, 0o755)  # noqa: S103 - whatever the umask: all users' agents come
            if _listens(self._path):
                raise NotHereError(f"another exporter listens at {self._path}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            self._socket.setblocking(False)
            self._socket.bind(new)
            os.chmod(new, 0o666)  # noqa: S103 - whose it is, each connection itself tells
            self._socket.listen(_BACKLOG)
            self._inode = os.lstat(new).st_ino
            os.rename(new, self._path)  # in the place of one that a killed exporter left
        except (OSError, NotHereError) as error:
            self._socket.close()
            if isinstance(error, OSError) and error.errno in {*_LEAVE, errno.ENOENT}:
                raise NotHereError(f"{self._path}: {error.strerror}") from error
            raise

    def read(self, refused: Refused) -> list[Connection]:
        """Return the connections, with what has come by each; one that has ended is in it once."""
        if self._jobs.wait(0):  # else nobody's job is known yet: they wait in the backlog
            if self._thread is None:
                self._thread = threading.Thread(target=self._take, name="feed", daemon=True)
                self._thread.start()
            with self._lock:
                self._accept()
                self._settle()
                refused.stranger += self._refused.stranger
                refused.limit += self._refused.limit
                self._refused = Refused()
        there = self._jobs.now.by_id
        read, self._open = self._open, []
        for one in read:
            if one.read(refused) and one.jobid in there:
                self._open.append(one)
            else:
                one.channel.close()
        return read

    def close(self) -> None:
        """Close all, and remove the socket's file unless it is another's by now."""
        self._closed.set()
        if self._thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends its wait
            self._thread.join()
        self._socket.close()
        for one in (*self._open, *self._waiting):
            one.channel.close()
        self._open, self._waiting = [], []
        with contextlib.suppress(OSError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    def _take(self) -> None:
        """Accept connections as they come, until this is closed: a thread of its own."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        while not self._closed.is_set():
            poll.poll()
            with self._lock:
                self._accept()
            self._closed.wait(_PAUSE_SECONDS)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                channel, _address = self._socket.accept()
            except OSError:  # nobody waits, or no descriptor is left
                return
            channel.setblocking(False)
            told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _gid = _UCRED.unpack(told)
            self._admit(Connection(channel, "", pid, uid))

    def _admit(self, one: Connection) -> None:
        """Let a connection wait for the next sample, if its job, or its user, has room for it."""
        jobid = self._jobs.now.job_of(one.agent)
        whose = one.uid if jobid is None else jobid
        most = _WAITING_PER_USER if jobid is None else _PER_JOB
        total = _WAITING if jobid is None else _CONNECTIONS
        if self._shares[whose] < most and len(self._waiting) < total:
            self._shares[whose] += 1
            self._waiting.append(one)
            return
        one.channel.close()
        if jobid is None:
            self._refused.stranger += 1
        else:
            self._refused.limit += 1

    def _settle(self) -> None:
        """Give the connections that wait to their jobs, as many as a job may have."""
        jobs = self._jobs.now
        of_job = Counter(one.jobid for one in self._open)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            jobid = jobs.job_of(one.agent)
            one.looks += 1
            if jobid is None and one.looks < _WAIT_SAMPLES:
                self._waiting.append(one)
            elif jobid is None:
                self._refused.stranger += 1
                one.channel.close()
            elif len(self._open) >= _CONNECTIONS or of_job[jobid] >= _PER_JOB:
                self._refused.limit += 1
                one.channel.close()
            else:
                of_job[jobid] += 1
                one.jobid = jobid
                self._open.append(one)
        self._shares = Counter(one.uid for one in self._waiting)


def _listens(path: str) -> bool:
    """Say whether somebody listens at a path."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # so many wait there that we find no room
            one.connect(path)
        return True
    return False
