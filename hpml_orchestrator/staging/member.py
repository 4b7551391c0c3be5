"""A node's place in a chain: its neighbours, what they say, and the end of all when one ends.

Each node but the first has a neighbour before it, which connects to it, and each but the last one
behind it. Words go from neighbour to neighbour:

    plan      what will be made, in parts          down, each node passes it on
    terms     the source's kind, the hashing       down, passed on
    ready     this node and all behind it could    up; with whether any of them needs the data
    go        all are ready; whether data comes    down, passed on
    end       all data was sent                    down, passed on
    done      digest of the tree                   up, once all behind say the same
    commit    all have the same: publish           down, passed on
    fail      who ends and why                     both ways, at any time, passed on

A node that ends tells its neighbours why, so that all end; none publishes before "commit".

Nodes find each other by small files in `attempts/<n>/chain/`, which appear by rename and are
readable by the job's user alone; nothing is locked. While the first node chooses how the data come
to all, it gives signs of life there as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.faults import StagingStopped
from hpml_orchestrator.staging.link import (
    CONTROL,
    BrokenLinkError,
    Door,
    Heard,
    Link,
    call,
    own_address,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from hpml_orchestrator.staging.link import Caller
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["START", "Member", "Notices", "PeerFailedError", "Place"]

START = "start"
"""The first node's record: the method, and of a chain the secret."""

_BEATS_PER_TIMEOUT = 6.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_DOWNWARDS = frozenset({"plan", "terms", "go", "end", "commit"})
POLL_SECONDS = 0.05
_BEAT_SECONDS = 0.1
_CALL_EVERY_SECONDS = 0.2
_CALL_SLOWER, _CALL_SLOWEST_SECONDS = 1.1, 2.0
_CALL_SECONDS = 10.0
_GRACE_SECONDS = 2.0


def reason_of(error: BaseException) -> str:
    """Return why a node ends, as the others are told."""
    if isinstance(error, StagingStopped):
        return "was told to stop"
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class Place:
    """Where a node stands among those of the job.

    Attributes:
        index: 0 reads the source.
        nodes: how many there are.
        node: this node's name.
        names: of all nodes, in order; empty if unknown.
        interfaces: network interfaces to use, the best first.
        timeout: seconds of silence after which a node counts as hung.
        join_seconds: within how long a neighbour that has come must be reached.
        come_seconds: how long nodes wait for one another to come.
    """

    index: int
    nodes: int
    node: str
    names: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    timeout: float = 30.0
    join_seconds: float = 300.0
    come_seconds: float = 300.0

    @property
    def is_last(self) -> bool:
        """Whether no node stands behind this one."""
        return self.index == self.nodes - 1

    def called(self, index: int) -> str:
        """Return what to call a node whose name is not known from itself."""
        return self.names[index] if index < len(self.names) else f"node {index} of {self.nodes}"


class Notices:
    """The files of one staged name: `{attempt}/chain/{name}.{what}`.

    Args:
        attempt: the attempt's directory, on the shared file system.
        name: what is staged.
        place: where this node stands.
        should_stop: True ends waiting with StagingStopped.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        attempt: str,
        name: str,
        place: Place,
        *,
        should_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = os.path.join(attempt, "chain")
        self._name = name
        self.place = place
        self.should_stop = should_stop
        self.clock = clock
        self._beat_at = 0.0
        self._beats = 0

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

    def beat(self) -> bool:
        """Give the first node's sign of life a few times per timeout; return whether to stop."""
        now = self.clock()
        if now >= self._beat_at:
            self._beat_at = now + self.place.timeout / _BEATS_PER_TIMEOUT
            self._beats += 1
            self.post("0.alive", beat=self._beats)
        return self.should_stop()

    def hear(self, what: str) -> dict[str, Any]:
        """Return a record of the first node, once it is there.

        Raises:
            StagingError: the first node says why it ends, did not come, or shows no sign of life
                any more.
            StagingStopped: should_stop said so.
        """
        place = self.place
        patience, since = place.come_seconds, self.clock()
        looked = since
        seen: dict[str, Any] | None = None
        pause = _FIRST_PAUSE_SECONDS
        while (found := self.read(what)) is None:
            if self.should_stop():
                raise StagingStopped
            beat = self.read("0.alive")
            if beat != seen:
                seen, since, patience = beat, self.clock(), 2 * place.timeout
            now = self.clock()
            if now - looked > place.timeout:  # this process was stopped, and perhaps the whole job
                since += now - looked
            looked = now
            if now - since > patience:
                gone = "was lost: no sign of life" if seen else "did not come"
                raise StagingError(f"{place.called(0)} {gone} within {patience:.0f} s")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.3)
        if "error" in found:
            raise StagingError(str(found["error"]), hint=str(found.get("hint", "")))
        return found

    def refuse(self, error: BaseException, what: str) -> None:
        """Let all who wait for a record of this node know why it ends."""
        told = {"error": f"{self.place.node}: {reason_of(error)}"}
        self.post(what, **told, hint=str(getattr(error, "hint", "")))

    def remove(self, what: str) -> None:
        """Take a record away; not the directory, where another node may be about to post one."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(what))

    def _path(self, what: str) -> str:
        return os.path.join(self.directory, f"{self._name}.{what}")


class PeerFailedError(StagingError):
    """Another node of the chain ended; its reason is in the message."""


class Member:
    """A node in the chain, and a `Supply`.

    Args:
        notices: by which the nodes find each other.
        secret: the job's.
    """

    method = "chain"

    def __init__(self, notices: Notices, secret: bytes) -> None:
        self._notices = notices
        self._place = notices.place
        self._secret = secret
        self._door: Door | None = None
        self._up: Link | None = None
        self._down: Link | None = None
        self._next_at = ("", 0)
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._said: dict[str, Any] = {}  # by neighbours, by its word
        self._parts: list[Any] = []  # of the plan, as they came
        self._later: list[tuple[str, Any]] = []  # for the node behind, once it is there
        self._plan: Plan | None = None
        self._is_done = self._is_closed = False
        self._pid = os.getpid()
        self._beat_at = 0.0
        self._beating = threading.Lock()

    def _join(self) -> None:
        """Find the neighbours.

        Raises:
            StagingError: one of them did not come in time, or failed.
            StagingStopped: should_stop said so.
            RecordError: the attempt's directory cannot be written.
        """
        place, clock = self._place, self._notices.clock
        if place.index:
            towards = place.names[0] if place.names else ""
            address = own_address(place.interfaces, towards=towards)
            before = place.index - 1
            self._door = Door(address, self._secret, caller=before, timeout=place.timeout)
            self._notices.post(
                str(place.index), node=place.node, address=address, port=self._door.port
            )
        began = call_at = clock()
        pause = _CALL_EVERY_SECONDS
        came: dict[int, float] = {}
        trouble = ""
        while missing := self._missing():
            if clock() >= call_at:
                for one in missing:
                    if one not in came and (one == 0 or self._notices.read(str(one)) is not None):
                        came[one] = clock()
                trouble = self._try_to_call() or trouble
                # all nodes look into one directory: the longer it lasts, the less often
                pause = min(_CALL_SLOWEST_SECONDS, pause * _CALL_SLOWER)
                call_at = clock() + pause
            with contextlib.suppress(queue.Empty):
                self._let_in(self._door.callers.get_nowait() if self._door else None)
            self._listen(POLL_SECONDS)
            for one in self._missing():
                patience = place.join_seconds if one in came else place.come_seconds
                if clock() - came.get(one, began) > patience:
                    raise StagingError(
                        f"{place.called(one)} did not come within {patience:.0f} s"
                        f"{f' ({trouble})' if trouble else ''}",
                        hint="if the nodes cannot reach one another, name the interfaces that can "
                        "in the site profile, or use distribution: shared",
                    )

    def _missing(self) -> list[int]:
        """Return the numbers of the neighbours that are not connected."""
        index = self._place.index
        up = [index - 1] if index and self._up is None else []
        return up + ([index + 1] if not self._place.is_last and self._down is None else [])

    def _let_in(self, caller: Caller | None) -> None:
        if caller is None:
            return
        if caller.kind != CONTROL or self._up is not None:
            caller.connection.close()
            return
        self._up = self._link(caller.connection, caller.name or "the node before")

    def _link(self, connection: Connection, name: str) -> Link:
        return Link(connection, name, self._secret, self._place.timeout, self._heard)

    def _try_to_call(self) -> str:
        """Connect to the node behind once it has said where it is; returns what went wrong."""
        behind = self._place.index + 1
        card = self._notices.read(str(behind)) if behind in self._missing() else None
        if card is None:
            return ""
        name = str(card.get("node"))
        self._next_at = (str(card.get("address")), int(card.get("port") or 0))
        try:
            connection = self._call(CONTROL, _CALL_SECONDS)
        except (OSError, StagingError) as error:
            return f"{name} at {self._next_at[0]}: {error}"
        self._down = self._link(connection, name)
        self._pass_on()
        return ""

    def _call(self, kind: str, timeout: float) -> Connection:
        """Connect to the node behind (see `link.call`)."""
        me, name = self._place.index, self._place.node
        return call(*self._next_at, self._secret, kind, me=me, name=name, timeout=timeout)

    def _listen(self, seconds: float = 0.0) -> None:
        """Wait for neighbours to say something, note all of it, and pass on what goes down.

        Raises:
            PeerFailedError: a node failed; the others were told.
            BrokenLinkError: a neighbour is gone or hangs.
            StagingError: one said something out of turn.
            StagingStopped: should_stop said so.
        """
        if self._notices.should_stop():
            raise StagingStopped
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=seconds) if seconds else self._heard.get_nowait()
            while True:
                self._note(*heard)
                heard = self._heard.get_nowait()

    def _note(self, link: Link, word: str, body: Any) -> None:
        if word == "lost":
            if "commit" in self._said or self._said.get("go") is False:
                return  # it is done, as this node soon is
            raise BrokenLinkError(str(body))
        if word == "fail":
            told = body if isinstance(body, dict) else {}
            reason = {key: str(told.get(key, "")) for key in ("node", "message", "hint")}
            self._tell(self._down if link is self._up else self._up, reason)
            raise PeerFailedError(f"{reason['node']}: {reason['message']}", hint=reason["hint"])
        if (word in _DOWNWARDS) != (link is self._up) or word in self._said:
            raise StagingError(f"protocol error: {link.peer} sent an unexpected message")
        if word == "plan":
            self._parts.append(body)
        else:
            self._said[word] = body
        if link is self._up and not self._place.is_last:
            self._pass_on((word, body))

    def _pass_on(self, *messages: tuple[str, Any]) -> None:
        """Tell the node behind, once it is there."""
        self._later += messages
        if self._down is not None:
            for word, body in self._later:
                self._down.send(word, body)
            self._later.clear()

    def _tell_up(self, word: str, body: object) -> None:
        assert self._up is not None  # noqa: S101 - joined
        self._up.send(word, body)

    @staticmethod
    def _tell(link: Link | None, reason: dict[str, str]) -> None:
        """Tell a neighbour why a node ends."""
        if link is not None:
            with contextlib.suppress(BrokenLinkError):
                link.send("fail", reason)

    def _wait_for(self, word: str) -> Any:
        """Return what a neighbour says by a word, once it does; see `_listen`."""
        while word not in self._said:
            self._listen(POLL_SECONDS)
        return self._said[word]

    def _explain(self, broken: StagingError) -> StagingError:
        """Return why a data connection broke if a neighbour says so soon, else the error itself."""
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while time.monotonic() < end:
                self._listen(POLL_SECONDS)
        except StagingError as error:
            return error
        return broken

    def _beat(self) -> bool:
        """Return whether to stop; on the way, hear whether another node failed.

        Raises:
            StagingError: it did.
        """
        is_due = os.getpid() == self._pid and time.monotonic() >= self._beat_at
        if is_due and self._beating.acquire(blocking=False):  # several threads copy
            try:
                self._beat_at = time.monotonic() + _BEAT_SECONDS
                self._listen()
            finally:
                self._beating.release()
        return self._notices.should_stop()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell the neighbours of any error in the block, and leave the chain."""
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None) -> None:
        """Leave the chain, take away what was posted, and tell the neighbours why."""
        if self._is_closed:
            return
        self._is_closed = True
        hint = str(getattr(error, "hint", ""))
        for link in (self._up, self._down):
            if error is not None and not isinstance(error, PeerFailedError):
                reason = {"node": self._place.node, "message": reason_of(error), "hint": hint}
                self._tell(link, reason)
            if link is not None:
                link.close()
        if self._door is not None:
            self._door.close()
        self._notices.remove(str(self._place.index) if self._place.index else START)

    def fail(self, reason: str, hint: str = "") -> None:
        """Tell the others why this node ends."""
        self._leave(StagingError(reason, hint=hint))

    def close(self) -> None:
        """Leave the chain."""
        self._leave(None if self._is_done else StagingError("ended before the data came"))
