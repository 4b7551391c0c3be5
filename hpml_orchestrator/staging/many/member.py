"""A node's place in a chain: its neighbours, what they say, and the end of all when one ends.

Node 0 reads the source. Each of the others has one neighbour before it, which connects to it, and
but for the last one behind it. Words go from neighbour to neighbour:

    plan      what will be made, in parts          down, each node passes it on
    terms     the source's kind, the hashing       down, passed on
    ready     this node and all behind it could    up; with whether any of them needs the data
    go        all are ready; whether data comes    down, passed on
    end       all data was sent                    down, passed on
    done      digest of the tree                   up, once all behind say the same
    commit    all have the same: publish           down, passed on
    fail      who ends and why                     both ways, at any time, passed on
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import StagingStopped
from hpml_orchestrator.staging.many.link import (
    CONTROL,
    SECRET_BYTES,
    BrokenLinkError,
    Caller,
    Door,
    Heard,
    Link,
    call,
    own_address,
)
from hpml_orchestrator.staging.many.notices import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from hpml_orchestrator.staging.many.notices import Notices, Place

__all__ = ["Member", "PeerFailedError"]

_DOWNWARDS = frozenset({"plan", "terms", "go", "end", "commit"})
_POLL_SECONDS = 0.05
_CALL_EVERY_SECONDS = 0.2
_CALL_SLOWER, _CALL_SLOWEST_SECONDS = 1.1, 2.0
_CALL_SECONDS = 10.0
_GRACE_SECONDS = 2.0


class PeerFailedError(StagingError):
    """Another node of the chain ended; its reason is in the message."""


@dataclass
class Member:
    """A node in the chain.

    Attributes:
        said: what neighbours said, by its word.
        parts: of the plan, as they came.
        is_done: whether all went well, so that nobody needs to be told when this node leaves.
    """

    notices: Notices
    secret: bytes = b""
    # Optional[] because dataclasses look at the text of annotations on Python 3.9 as well
    door: Optional[Door] = None  # noqa: UP045
    up: Optional[Link] = None  # noqa: UP045
    down: Optional[Link] = None  # noqa: UP045
    next_at: tuple[str, int] = ("", 0)
    said: dict[str, Any] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    is_done: bool = False
    _heard: queue.SimpleQueue[Heard] = field(default_factory=queue.SimpleQueue)
    _later: list[tuple[Any, ...]] = field(default_factory=list)
    _closed: bool = False

    @property
    def place(self) -> Place:
        """Where this node stands."""
        return self.notices.place

    @property
    def is_first(self) -> bool:
        """Whether this node reads the source."""
        return self.place.index == 0

    @property
    def is_last(self) -> bool:
        """Whether no node stands behind this one."""
        return self.place.index == self.place.nodes - 1

    @property
    def names(self) -> tuple[str, str]:
        """What the nodes before and behind are called."""
        return (self.up.peer if self.up else "", self.down.peer if self.down else "")

    def join(self) -> None:
        """Find the neighbours.

        Raises:
            StagingError: one of them did not come in time, or failed.
            StagingStopped: should_stop said so.
            RecordError: the attempt's directory cannot be written.
        """
        place = self.place
        if self.is_first:
            self.secret = secrets.token_bytes(SECRET_BYTES)
            self.notices.post("secret", secret=self.secret.hex())
        else:
            told = self.notices.hear("secret", beats=False)
            self.secret = bytes.fromhex(str(told["secret"]))
            towards = place.names[0] if place.names else ""
            address = own_address(place.interfaces, towards=towards)
            before = place.index - 1
            self.door = Door(address, self.secret, caller=before, timeout=place.timeout)
            self.notices.post(
                str(place.index), node=place.node, address=address, port=self.door.port
            )
        self._meet()

    def _meet(self) -> None:
        clock = self.notices.clock
        began = call_at = clock()
        pause = _CALL_EVERY_SECONDS
        here: dict[int, float] = {}
        trouble = ""
        while missing := self._missing():
            if clock() >= call_at:
                here.update((one, clock()) for one in missing if self._comes(one, here))
                trouble = self._try_to_call() or trouble
                # all nodes look into one directory: the longer it lasts, the less often
                pause = min(_CALL_SLOWEST_SECONDS, pause * _CALL_SLOWER)
                call_at = clock() + pause
            with contextlib.suppress(queue.Empty):
                self._take(self.door.callers.get_nowait() if self.door else None)
            self.listen(_POLL_SECONDS)
            for one in self._missing():
                self._check_patience(one, began, here.get(one), trouble)

    def _missing(self) -> list[int]:
        """Return the numbers of the neighbours that are not connected."""
        index = self.place.index
        up = [index - 1] if not self.is_first and self.up is None else []
        return up + ([index + 1] if not self.is_last and self.down is None else [])

    def _comes(self, index: int, here: dict[int, float]) -> bool:
        """Say whether a neighbour that was not here before has begun to look for its own."""
        return index not in here and (index == 0 or self.notices.read(str(index)) is not None)

    def _check_patience(self, index: int, began: float, came: float | None, trouble: str) -> None:
        """Give up a neighbour that does not come, or that came and cannot be reached.

        Raises:
            StagingError: it is time.
        """
        place = self.place
        patience = place.come_seconds if came is None else place.join_seconds
        if self.notices.clock() - (began if came is None else came) > patience:
            raise StagingError(
                f"{place.called(index)} did not come within {patience:.0f} s"
                f"{f' ({trouble})' if trouble else ''}",
                hint="if the nodes cannot reach one another, name the interfaces that can in "
                "the site profile, or use distribution: shared",
            )

    def _take(self, caller: Caller | None) -> None:
        if caller is None:
            return
        if caller.kind != CONTROL or self.up is not None:
            caller.connection.close()
            return
        name = caller.name or self.place.called(self.place.index - 1)
        self.up = Link(caller.connection, name, self.place.timeout, self._heard)

    def _try_to_call(self) -> str:
        """Connect to the node behind once it has said where it is; returns what went wrong."""
        index = self.place.index
        if index + 1 not in self._missing():
            return ""
        card = self.notices.read(str(index + 1))
        if card is None:
            return ""
        name = str(card.get("node"))
        self.next_at = (str(card.get("address")), int(card.get("port") or 0))
        try:
            connection = self.call(CONTROL, _CALL_SECONDS)
        except (OSError, StagingError) as error:
            return f"{name} at {self.next_at[0]}: {error}"
        self.down = Link(connection, name, self.place.timeout, self._heard)
        self._pass_on()
        return ""

    def call(self, kind: str, timeout: float) -> Connection:
        """Connect to the node behind (see `link.call`)."""
        me, node = self.place.index, self.place.node
        return call(*self.next_at, self.secret, kind, me=me, name=node, timeout=timeout)

    def listen(self, seconds: float = 0.0) -> None:
        """Wait for neighbours to say something, note all of it, and pass on what goes down.

        Raises:
            PeerFailedError: a node failed; the others were told.
            BrokenLinkError: a neighbour is gone or hangs.
            StagingError: one said something out of turn.
            StagingStopped: should_stop said so.
        """
        if self.notices.should_stop():
            raise StagingStopped
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=seconds) if seconds else self._heard.get_nowait()
            while True:
                self._note(heard)
                heard = self._heard.get_nowait()

    def _note(self, heard: Heard) -> None:
        link, word, body = heard
        if word == "lost":
            if "commit" in self.said or self.said.get("go") is False:
                return  # it is done, as this node soon is
            raise BrokenLinkError(str(body))
        if word == "fail":
            self._failed(link, body)
        if (word in _DOWNWARDS) != (link is self.up) or word in self.said:
            raise StagingError(f"{link.peer} said something out of turn")
        if word == "plan":
            self.parts.append(body)
        else:
            self.said[word] = body
        if link is self.up and not self.is_last:
            self._pass_on(word, body)

    def _pass_on(self, *message: Any) -> None:
        """Tell the node behind, once it is there."""
        self._later += [message] * bool(message)
        if self.down is not None:
            for word, body in self._later:
                self.down.send(word, body)
            self._later.clear()

    def wait_for(self, word: str) -> Any:
        """Return what a neighbour says by a word, once it does; see `listen`."""
        while word not in self.said:
            self.listen(_POLL_SECONDS)
        return self.said[word]

    def _failed(self, link: Link, body: Any) -> None:
        told = body if isinstance(body, dict) else {}
        reason = {key: str(told.get(key, "")) for key in ("node", "message", "hint")}
        other = self.down if link is self.up else self.up
        if other is not None:
            with contextlib.suppress(BrokenLinkError):
                other.send("fail", reason)
        raise PeerFailedError(f"{reason['node']}: {reason['message']}", hint=reason["hint"])

    def explain(self, broken: StagingError) -> StagingError:
        """Return why a data connection broke if a neighbour says so soon, else the error itself."""
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while time.monotonic() < end:
                self.listen(_POLL_SECONDS)
        except StagingError as error:
            return error
        return broken

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Tell the neighbours of any error in the block, and leave the chain."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the neighbours why this node ends, and leave the chain."""
        if self._closed:
            return
        if not isinstance(error, PeerFailedError):
            told = {
                "node": self.place.node,
                "message": reason_of(error),
                "hint": str(getattr(error, "hint", "")),
            }
            for link in (self.up, self.down):
                if link is not None:
                    with contextlib.suppress(BrokenLinkError):
                        link.send("fail", told)
        self.close()

    def leave(self, unless_done: str) -> None:
        """Leave the chain; before all was done, the neighbours are told what did not happen."""
        if self.is_done:
            self.close()
        else:
            self.fail(StagingError(unless_done))

    def close(self) -> None:
        """Leave the chain and take away what was posted."""
        if self._closed:
            return
        self._closed = True
        for link in (self.up, self.down):
            if link is not None:
                link.close()
        if self.door is not None:
            self.door.close()
        mine = str(self.place.index)
        self.notices.remove(*(("secret",) if self.is_first else (mine,)))
