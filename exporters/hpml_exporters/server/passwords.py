"""Passwords of basic authentication, checked by bcrypt beside the server's thread.

A check costs 50 ms by design, so it runs in a thread of its own behind a queue of bounded length.
Its result is remembered under a keyed hash, never the password. A name that is no user's is checked
against the hash of a user chosen by that name: it takes as long as a user's, and gets no further.
"""

from __future__ import annotations

import binascii
import hashlib
import secrets
import threading
import time
from base64 import b64decode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from hpml_exporters.server.limits import Limits
from hpml_orchestrator.errors import InputError

__all__ = ["Credentials", "Passwords", "credentials"]

_BCRYPT_BYTES = 72  # bcrypt reads no further


class Credentials(NamedTuple):
    """What a header Authorization brings."""

    name: str
    password: bytes


class _Check(NamedTuple):
    key: bytes
    peer: str
    password: bytes
    hashed: bytes
    is_user: bool


def credentials(header: str) -> Credentials | None:
    """Return name and password of a header; nothing where it has none of this kind.

    >>> credentials("Basic Ym9iOnB3")
    Credentials(name='bob', password=b'pw')
    >>> credentials("Bearer Ym9iOnB3")
    """
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = b64decode(encoded.strip(), validate=True).partition(b":")
        return Credentials(name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


class Passwords:
    """Checks passwords; all methods but the thread's belong to the server's thread."""

    def __init__(self, limits: Limits, wake: Callable[[], None]) -> None:
        """Prepare.

        Raises:
            InputError: bcrypt is not installed.
        """
        try:
            import bcrypt  # noqa: PLC0415 - for those who have users
        except ImportError:
            hint = "pip install 'hpml-orchestrator[export]'"
            raise InputError("users need bcrypt", field="basic_auth_users", hint=hint) from None
        self._checkpw = bcrypt.checkpw
        self._limits = limits
        self._wake = wake
        self._secret = secrets.token_bytes(32)
        self._users: dict[str, bytes] = {}
        self._hashes: list[bytes] = []
        self._right: OrderedDict[bytes, float] = OrderedDict()
        self._wrong: OrderedDict[bytes, float] = OrderedDict()
        self._queue: deque[_Check] = deque()
        self._done: deque[tuple[bytes, bool]] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    def use(self, users: dict[str, bytes]) -> None:
        """Take other users; what was remembered of the earlier ones is forgotten."""
        self._users = users
        self._hashes = sorted(users.values())
        self._secret = secrets.token_bytes(32)
        self._right.clear()
        self._wrong.clear()

    def key(self, given: Credentials) -> bytes:
        """Return what stands for a name with a password, for as long as the users stay the same."""
        name = given.name.encode()
        text = len(name).to_bytes(4, "big") + name + given.password
        return hashlib.blake2b(text, key=self._secret, digest_size=32).digest()

    def known(self, key: bytes, now: float) -> bool | None:
        """Return whether a password is right, or nothing where it has to be checked."""
        if self._right.get(key, 0.0) > now:
            self._right[key] = now + self._limits.remembered_seconds
            self._right.move_to_end(key)
            return True
        return False if self._wrong.get(key, 0.0) > now else None

    def ask(self, key: bytes, given: Credentials, peer: str) -> bytes | None:
        """Have a password checked; return the key of a check that is left out for want of place.

        In a full queue the newest check of the address that waits for most of them makes place.
        """
        hashed = self._users.get(given.name)
        is_user = hashed is not None
        if hashed is None:
            name = hashlib.blake2b(given.name.encode(), key=self._secret, digest_size=8).digest()
            hashed = self._hashes[int.from_bytes(name, "big") % len(self._hashes)]
        left_out = None
        with self._change:
            self._queue.append(_Check(key, peer, given.password[:_BCRYPT_BYTES], hashed, is_user))
            if len(self._queue) > self._limits.checks:
                left_out = self._make_place()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="passwords", daemon=True)
                self._thread.start()
            self._change.notify()
        return left_out

    def answers(self, now: float) -> list[tuple[bytes, bool]]:
        """Return which checks have ended, and how; remember them."""
        found = []
        while self._done:
            key, right = self._done.popleft()
            found.append((key, right))
            table = self._right if right else self._wrong
            seconds = self._limits.remembered_seconds if right else self._limits.wrong_seconds
            table[key] = now + seconds
            while len(table) > self._limits.remembered:
                table.popitem(last=False)
        return found

    def stop(self) -> None:
        """End the thread, after the check that it is at."""
        with self._change:
            self._ended = True
            self._queue.clear()
            self._change.notify()

    def _make_place(self) -> bytes:
        """Take a check out of the queue and return its key."""
        peer = Counter(check.peer for check in self._queue).most_common(1)[0][0]
        at = max(index for index, check in enumerate(self._queue) if check.peer == peer)
        key = self._queue[at].key
        del self._queue[at]
        return key

    def _run(self) -> None:
        """Check one password after the other."""
        while True:
            with self._change:
                while not self._queue and not self._ended:
                    self._change.wait()
                if self._ended:
                    return
                check = self._queue.popleft()
            try:
                right = self._checkpw(check.password, check.hashed) and check.is_user
            except Exception:  # noqa: BLE001 - a password that bcrypt does not take is a wrong one
                right = False
                time.sleep(0.05)
            self._done.append((check.key, right))
            self._wake()
