"""Passwords of basic authentication, checked with bcrypt on a budget of CPU time.

A check takes about 50 ms by design, so it runs in a thread of its own, and all checks together take
a small share of a core however many passwords a client tries. Checked credentials are remembered
under a keyed hash, never as they are: a client with the right password is checked once.
"""

from __future__ import annotations

import binascii
import hashlib
import secrets
import threading
import time
from base64 import b64decode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hpml_exporters.web.limits import Limits, Pace
from hpml_orchestrator.errors import InputError

__all__ = ["Authenticator", "BusyError"]

_BCRYPT_BYTES = 72  # bcrypt reads no further
_REMEMBERED = 128
_CHECKS_OF_ONE_ADDRESS = 4


class BusyError(Exception):
    """Too many passwords wait for their check."""


class _Check(NamedTuple):
    key: bytes
    peer: str
    password: bytes
    hashed: bytes
    is_user: bool


class Authenticator:
    """Decides who may read; all methods belong to the server's thread."""

    def __init__(self, limits: Limits, checked: Callable[[], None]) -> None:
        """Prepare; `checked` is called in another thread after each check."""
        self._limits = limits
        self._checked = checked
        self._users: Mapping[str, bytes] = {}
        self._secret = b""
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._trusted: set[str] = set()
        self._change = threading.Condition()
        self._queue: deque[_Check] = deque()
        self._waiting: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def use(self, users: Mapping[str, bytes]) -> None:
        """Take other users, bcrypt hashes by name; forgets all credentials if they changed.

        Raises:
            InputError: bcrypt is not installed.
        """
        if users and self._thread is None:
            try:
                import bcrypt  # noqa: F401, PLC0415 - only where there are users
            except ImportError:
                hint = "pip install 'hpml-orchestrator[export]'"
                raise InputError("needs bcrypt", field="basic_auth_users", hint=hint) from None
            self._thread = threading.Thread(target=self._run, name="passwords", daemon=True)
            self._thread.start()
        with self._change:
            if users != self._users:
                self._users = dict(users)
                self._secret = secrets.token_bytes(32)  # no earlier result matches any more
                self._right.clear()
                self._wrong.clear()

    def allows(self, authorization: str, peer: str) -> bool | None:
        """Return whether a client may read; None until its password is checked: ask again then.

        Args:
            authorization: the header of this name.
            peer: the client's address.

        Raises:
            BusyError: too many passwords wait already.
        """
        if not self._users:
            return True
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        text = len(name).to_bytes(4, "big") + name + password
        key = hashlib.blake2b(text, key=self._secret, digest_size=32).digest()
        with self._change:
            if key in self._right:
                self._right.move_to_end(key)
                return True
            if key in self._wrong:
                return False
            if key not in self._waiting:
                self._submit(key, peer, name, password)
        return None

    def stop(self) -> None:
        """End the thread after its current check."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _submit(self, key: bytes, peer: str, name: bytes, password: bytes) -> None:
        """Queue a check; addresses that authenticated before come first."""
        peers = Counter(check.peer for check in self._queue)
        if len(self._queue) >= self._limits.waiting_checks or peers[peer] >= _CHECKS_OF_ONE_ADDRESS:
            raise BusyError
        hashed = self._users.get(name.decode("utf-8", "replace"))
        # An unknown name takes as long as a known one, so names cannot be found out by time.
        any_hash = next(iter(self._users.values()))
        check = _Check(key, peer, password[:_BCRYPT_BYTES], hashed or any_hash, hashed is not None)
        self._waiting.add(key)
        if peer in self._trusted:
            self._queue.appendleft(check)
        else:
            self._queue.append(check)
        self._change.notify()

    def _run(self) -> None:
        """Check one password after the other within the budget; runs in its own thread."""
        import bcrypt  # noqa: PLC0415 - only where there are users

        pace = Pace(self._limits.password_cpu, self._limits.password_burst)
        while check := self._next(pace):
            begun = time.thread_time()
            try:
                right = bcrypt.checkpw(check.password, check.hashed) and check.is_user
            except Exception:  # noqa: BLE001 - a password that bcrypt refuses is a wrong one
                right = False
            pace.use(time.monotonic(), time.thread_time() - begun)
            self._remember(check, right=right)
            self._checked()

    def _next(self, pace: Pace) -> _Check | None:
        """Return the next check once the budget allows it; None at the end."""
        with self._change:
            while not self._stopped:
                delay = pace.delay(time.monotonic())
                if self._queue and not delay:
                    return self._queue.popleft()
                self._change.wait(delay if self._queue else None)
        return None

    def _remember(self, check: _Check, *, right: bool) -> None:
        """Note a result. Wrong passwords are kept apart: guesses never displace a right one."""
        with self._change:
            self._waiting.discard(check.key)
            results = self._right if right else self._wrong
            results[check.key] = None
            if len(results) > _REMEMBERED:
                results.popitem(last=False)
            if right:
                self._trusted.add(check.peer)
                if len(self._trusted) > _REMEMBERED:
                    self._trusted.pop()


def _credentials(header: str) -> tuple[bytes, bytes] | None:
    """Return name and password of a header Authorization; None if it has none.

    >>> _credentials("Basic Ym9iOnB3"), _credentials("Bearer Ym9iOnB3")
    ((b'bob', b'pw'), None)
    """
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = b64decode(encoded.strip(), validate=True).partition(b":")
    except binascii.Error:
        return None
    return (name, password) if colon else None
