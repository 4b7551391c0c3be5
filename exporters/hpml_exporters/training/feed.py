"""Where the messages of node agents arrive: an inherited socket, or `{run}/exporter.sock`.

Nothing is read between two samples. What does not fit into a connection's own queue waits with its
sender, who loses nothing by that (counters are sums), and what is read of one at a sample is
limited: so a flood of messages harms only who sends it.

A connection belongs to the job of its process, by the kernel's credentials. A job that just began
may not be on the board yet: its connection waits for some samples.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.jobs.board import JobsBoard
from hpml_orchestrator.records.feed import MAX_MESSAGE_BYTES, FeedMessage, decode, part_of

SOCKET_NAME = "exporter.sock"
_BACKLOG = 512
_MESSAGES = 128  # of one connection at a sample
_CONNECTIONS = 1024
_PER_OWNER = 16  # connections of one job, or of one user without a known job
_ACCEPTS = 400  # at once
_PAUSE_SECONDS = 0.1  # after those
_WAIT_SAMPLES = 4
_UCRED = struct.Struct("=iII")  # pid, uid, gid


class Said(NamedTuple):
    """The latest message of each part on one connection; `key` is the job's in `Jobs`."""

    key: str
    agent: int
    messages: list[FeedMessage]


@dataclass
class _Connection:
    """A socket that an agent writes to.

    Attributes:
        channel: the socket, not blocking.
        pid: process id of the agent; 0: taken from its messages.
        owner: job id, or the user's number as long as the job is unknown.
        looks: samples at which the job was looked for.
    """

    channel: socket.socket
    pid: int = 0
    owner: str | int = ""
    looks: int = 0

    def read(self, refused: Counter[str]) -> tuple[list[FeedMessage], bool]:
        """Return the latest message of each part, and whether more may come."""
        parts: dict[int, bytes] = {}
        is_open = True
        for _ in range(_MESSAGES):
            try:
                datagram = self.channel.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:
                datagram = b""
            if not datagram:
                is_open = False
                break
            try:
                # Counters are sums, so the newest message of a part says all: older ones are not
                # decoded.
                parts[part_of(datagram)] = datagram
            except ValueError:
                refused["malformed"] += 1
        messages = []
        for datagram in parts.values():
            try:
                messages.append(decode(datagram))
            except ValueError:
                refused["malformed"] += 1
        return messages, is_open


class InheritedFeed:
    """The feed of the job that this exporter runs in.

    Args:
        fd: descriptor of a socket.
        jobid: the job.

    Attributes:
        refused: number of refused messages, by reason.

    Raises:
        NotHereError: it is not a socket.
    """

    def __init__(self, fd: int, jobid: str) -> None:
        self.refused: Counter[str] = Counter(malformed=0)
        self._jobid = jobid
        try:
            # Work on a copy: a collector that is created again needs the inherited descriptor,
            # which closing this feed must leave open.
            kind = socket.socket(fileno=fd)  # only to see that it is one
            self._connection = _Connection(kind.dup())
            kind.detach()
        except OSError as error:
            raise NotHereError(f"the feed's descriptor {fd}: {error.strerror}") from error
        self._connection.channel.setblocking(False)

    def read(self) -> list[Said]:
        """Return what has come since the last call."""
        messages, _ = self._connection.read(self.refused)
        return [Said(self._jobid, one.pid, [one]) for one in messages]

    def close(self) -> None:
        """Close the copy of the descriptor."""
        self._connection.channel.close()


class ListeningFeed:
    """The socket that all agents of a node may connect to.

    A thread takes connections as they come, up to 4,000 a second, and closes at once what is beyond
    the share of its job or user: so those who connect again and again keep no other out.

    Args:
        directory: of the socket `exporter.sock`; created if that is allowed.
        jobs: which processes belong to which job.

    Attributes:
        refused: number of refused connections and messages, by reason.

    Raises:
        NotHereError: this user may not make it, or another exporter listens there.
    """

    def __init__(self, directory: str, jobs: JobsBoard) -> None:
        self.refused: Counter[str] = Counter(stranger=0, limit=0, malformed=0)
        self._path = f"{directory}/{SOCKET_NAME}"
        self._jobs = jobs
        self._lock = threading.Lock()  # for these three
        self._connections: list[_Connection] = []
        self._shares: Counter[str | int] = Counter()  # connections by owner
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._take, name="feed", daemon=True)
        # Each connection has its own queue: a flood by one user starves nobody, and nothing needs
        # to be read between two samples.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._bind(directory)
        except (OSError, NotHereError) as error:
            self._socket.close()
            if isinstance(error, (PermissionError, FileNotFoundError)):
                raise NotHereError(f"{self._path}: {error.strerror}") from error
            raise

    def read(self) -> list[Said]:
        """Return what has come since the last call."""
        if not self._jobs.wait(0):
            return []  # nobody's job is known yet: they wait in the backlog
        if not self._thread.ident:
            self._thread.start()
        there = self._jobs.now.by_id
        said = []
        with self._lock:
            self._accept()
            for one in list(self._connections):
                if isinstance(one.owner, int):
                    self._look_up(one)
                if isinstance(one.owner, str):
                    messages, is_open = one.read(self.refused)
                    said.append(Said(one.owner, one.pid, messages))
                    if not is_open or one.owner not in there:
                        self._drop(one)
        return said

    def close(self) -> None:
        """Close all sockets, and remove the socket's file."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        if self._thread.ident:
            self._thread.join()
        self._socket.close()
        for one in self._connections:
            one.channel.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _bind(self, directory: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
            os.chmod(directory, 0o755)  # noqa: S103 - whatever the umask: all users' agents come
        if _is_taken(self._path):
            raise NotHereError(f"another exporter listens at {self._path}")
        # Bind under a temporary name and rename: an agent finds either no socket or one that
        # already listens, with its permissions set.
        new = f"{directory}/.{SOCKET_NAME}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        self._socket.setblocking(False)
        self._socket.bind(new)
        os.chmod(new, 0o666)  # noqa: S103 - the kernel identifies each connection's owner
        self._socket.listen(_BACKLOG)
        os.rename(new, self._path)

    def _take(self) -> None:
        """Accept connections until `close`; runs in the thread."""
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
            # Whose a connection is comes from the kernel: in a message anybody can claim any job.
            told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _gid = _UCRED.unpack(told)
            jobid = self._jobs.now.job_of(pid)
            owner = uid if jobid is None else jobid
            if self._has_room(owner):
                self._shares[owner] += 1
                self._connections.append(_Connection(channel, pid, owner))
            else:
                channel.close()
                self.refused["stranger" if jobid is None else "limit"] += 1

    def _has_room(self, owner: str | int) -> bool:
        return self._shares[owner] < _PER_OWNER and len(self._connections) < _CONNECTIONS

    def _look_up(self, one: _Connection) -> None:
        jobid = self._jobs.now.job_of(one.pid)
        one.looks += 1
        if jobid is not None and self._has_room(jobid):
            self._shares[one.owner] -= 1
            self._shares[jobid] += 1
            one.owner = jobid
        elif jobid is not None or one.looks >= _WAIT_SAMPLES:
            self.refused["stranger" if jobid is None else "limit"] += 1
            self._drop(one)

    def _drop(self, one: _Connection) -> None:
        one.channel.close()
        self._connections.remove(one)
        self._shares[one.owner] -= 1


def _is_taken(path: str) -> bool:
    # A socket's file outlives its process: only connecting shows whether somebody listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.setblocking(False)
        try:
            one.connect(path)
        except BlockingIOError:  # too many connections wait
            return True
        except OSError:
            return False
        return True
