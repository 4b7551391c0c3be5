"""A node's place in a chain: its neighbours, what they say, and the end of all when one ends.

Node 0 reads the source. Each of the others has one neighbour before it, which connects to it, and
but for the last one behind it. Words go from neighbour to neighbour:

    NAME      who connected                        down, at once
    PLAN…     what will be made, in parts          down
    PLAN_END  the source's kind, the hashing       down
    READY     this node and all behind it could    up; with whether any of them needs the data
    GO        all are ready                        down; from here on silence counts
    END       all data was sent                    down
    DONE      digest of the tree                   up, once all behind say the same
    COMMIT    all have the same: publish           down
    FAIL      who ends and why                     both ways, at any time
    BEAT      a sign of life                       both ways
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.many.link import (
    CONTROL,
    FAIL,
    NAME,
    SECRET_BYTES,
    BrokenLinkError,
    Caller,
    Door,
    Link,
    call,
)
from hpml_orchestrator.staging.many.notices import reason_of
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpml_orchestrator.staging.many.notices import Notices, Place

__all__ = ["Member", "PeerFailedError", "interface_address", "own_address"]

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"
_NOWHERE = "192.0.2.1"  # RFC 5737: an address for documentation; only the route to it is asked for


def own_address(interfaces: Sequence[str] = (), *, towards: str = "") -> str:
    """Return the address to listen at.

    That of the first given interface which has one; else what the host's name stands for, if that
    is not the loopback; else the one that packets to the other node would leave with; else that
    of any interface.

    Args:
        interfaces: names of network interfaces, the best first.
        towards: name or address of another node.
    """
    for name in interfaces:
        found = interface_address(name)
        if found:
            return found
    for one in [*_resolved(socket.gethostname()), _route(towards), _route(_NOWHERE)]:
        if one and not _is_local(one):
            return one
    for _, name in socket.if_nameindex():
        found = interface_address(name)
        if found and not _is_local(found):
            return found
    return "127.0.0.1"


def interface_address(name: str, *, inet6: str = "/proc/net/if_inet6") -> str:
    """Return an interface's first address, IPv4 before global IPv6; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        asked = _IFREQ.pack(name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError, ValueError), open(inet6, encoding="ascii") as stream:
        for line in stream:
            digits, _, _, scope, _, device = line.split()
            if device == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(one[4][0]) for one in found]


def _route(towards: str) -> str:
    """Return the address that packets to another node leave with; none is sent."""
    for one in _resolved(towards)[:1] if towards else []:
        family = socket.AF_INET6 if ":" in one else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((one, 9))
            return str(probe.getsockname()[0])
    return ""


def _is_local(address: str) -> bool:
    """Say whether no other machine can use an address: loopback, or of one link alone."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return True
    return found.is_loopback or found.is_link_local or found.is_unspecified


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
        is_done: whether all went well, so that nobody needs to be told when this node leaves.
    """

    notices: Notices
    secret: bytes = b""
    # Optional[] because dataclasses look at the text of annotations on Python 3.9 as well
    door: Optional[Door] = None  # noqa: UP045
    up: Optional[Link] = None  # noqa: UP045
    down: Optional[Link] = None  # noqa: UP045
    next_at: tuple[str, int] = ("", 0)
    is_done: bool = False
    _reason: dict[str, str] = field(default_factory=dict)
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
            StagingError: one of them did not come in time.
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
            self.door = Door(address, self.secret, me=place.index, caller=place.index - 1)
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
        while self._missing():
            if self.notices.should_stop():
                raise StagingStopped
            if clock() >= call_at:
                here.update((one, clock()) for one in self._missing() if self._comes(one, here))
                trouble = self._try_to_call() or trouble
                # all nodes look into one directory: the longer it lasts, the less often
                pause = min(_CALL_SLOWEST_SECONDS, pause * _CALL_SLOWER)
                call_at = clock() + pause
            for caller in self.door.poll(_POLL_SECONDS) if self.door else ():
                self._take(caller)
            if self.door is None:
                time.sleep(_POLL_SECONDS)
            for one in self._missing():
                self._check_patience(one, began, here.get(one), trouble)

    def _missing(self) -> list[int]:
        """Return the numbers of the neighbours that are not connected."""
        index = self.place.index
        up = [index - 1] if self._is_missing_up else []
        return up + ([index + 1] if self._is_missing_down else [])

    def _comes(self, index: int, here: Mapping[int, float]) -> bool:
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

    @property
    def _is_missing_up(self) -> bool:
        return not self.is_first and self.up is None

    @property
    def _is_missing_down(self) -> bool:
        return not self.is_last and self.down is None

    def _take(self, caller: Caller) -> None:
        if caller.kind != CONTROL or self.up is not None:
            caller.sock.close()
            return
        name = self.place.called(self.place.index - 1)
        self.up = Link(caller, name, connector=False, timeout=self.place.timeout)

    def _try_to_call(self) -> str:
        """Connect to the node behind once it has said where it is; returns what went wrong."""
        if not self._is_missing_down:
            return ""
        index = self.place.index
        card = self.notices.read(str(index + 1))
        if card is None:
            return ""
        name = str(card.get("node"))
        self.next_at = (str(card.get("address")), int(card.get("port") or 0))
        try:
            caller = self.call(CONTROL, _CALL_SECONDS)
        except (OSError, StagingError) as error:
            return f"{name} at {self.next_at[0]}: {error}"
        self.down = Link(caller, name, connector=True, timeout=self.place.timeout)
        self.down.send(NAME, self.place.node.encode("utf-8", "surrogateescape"))
        return ""

    def call(self, kind: int, timeout: float) -> Caller:
        """Connect to the node behind (see `handshake.call`)."""
        me = self.place.index
        return call(*self.next_at, self.secret, kind, me=me, callee=me + 1, timeout=timeout)

    def tick(self) -> list[tuple[int, bytes, bool]]:
        """Return what the neighbours said: (kind, payload, whether from the one before).

        Raises:
            PeerFailedError: a node failed; the others were told.
            BrokenLinkError: a neighbour is gone or hangs.
            StagingStopped: should_stop said so.
        """
        if self.notices.should_stop():
            raise StagingStopped
        found = []
        broken: BrokenLinkError | None = None
        for link in (self.up, self.down):
            if link is None:
                continue
            try:
                messages = link.tick()
            except BrokenLinkError as error:
                broken = broken or error
                continue
            for kind, payload in messages:
                if kind == FAIL:
                    self._failed(link, payload)
                elif kind == NAME:
                    link.peer = payload.decode("utf-8", "backslashreplace")[:255]
                else:
                    found.append((kind, payload, link is self.up))
        if broken is not None and not found:
            raise broken
        return found

    def _failed(self, link: Link, payload: bytes) -> None:
        try:
            told: dict[str, Any] = json.loads(payload)
        except ValueError:
            told = {}
        self._reason = {key: str(told.get(key, "")) for key in ("node", "message", "hint")}
        other = self.down if link is self.up else self.up
        if other is not None:
            with contextlib.suppress(BrokenLinkError):
                other.send(FAIL, json.dumps(self._reason).encode())
        raise PeerFailedError(
            f"{self._reason['node']}: {self._reason['message']}", hint=self._reason["hint"]
        )

    def explain(self, lost: StagingError) -> StagingError:
        """Return why a data connection broke if a neighbour says so soon, else the error itself."""
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while time.monotonic() < end:
                self.tick()
                time.sleep(_POLL_SECONDS)
        except StagingError as error:
            return error
        return lost

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
                        link.send(FAIL, json.dumps(told).encode())
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
