"""Passwords of basic authentication, which bcrypt makes slow to check on purpose.

Checked credentials are remembered under a keyed hash, so a client with the right password is
checked once. All others wait for one place, where a wrong password stays for a while: guessing
takes a fifth of a core at most, and a single address cannot fill the queue.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping

from hpml_orchestrator.errors import InputError, extra_hint

_BCRYPT_BYTES = 72  # bcrypt reads no further
_REMEMBERED = 128
_WAITING_OF_ONE_ADDRESS = 4
_REST = 4  # times the CPU time of the check


class TooManyPasswordsError(Exception):
    """Too many passwords of this address are waiting to be checked."""


class Passwords:
    """Decides who may read; any thread may ask."""

    def __init__(self, users: Mapping[str, bytes]) -> None:
        """Take bcrypt hashes by user; without users everybody may read.

        Raises:
            InputError: bcrypt is not installed.
        """
        if users:
            try:
                import bcrypt  # noqa: F401, PLC0415 - only with users
            except ImportError:
                raise InputError(
                    "needs bcrypt", field="basic_auth_users", hint=extra_hint("export")
                ) from None
        self._users = dict(users)
        self._secret = secrets.token_bytes(32)
        self._right: set[bytes] = set()
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()
        self._place = threading.Lock()

    def allow(self, authorization: str, peer: str) -> bool:
        """Return whether a client may read.

        Args:
            authorization: the header of this name.
            peer: the client's address.

        Raises:
            TooManyPasswordsError: too many passwords of this address wait already.
        """
        if not self._users:
            return True
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        name, password = credentials
        # The length keeps `ab` with `c` apart from `a` with `bc`.
        text = len(name).to_bytes(4, "big") + name + password
        key = hashlib.blake2b(text, key=self._secret, digest_size=32).digest()
        if key in self._right:
            return True
        with self._lock:
            if self._waiting[peer] >= _WAITING_OF_ONE_ADDRESS:
                raise TooManyPasswordsError
            self._waiting[peer] += 1
        try:
            with self._place:
                # Another thread may have checked the same password while this one waited.
                return key in self._right or self._check(name, password, key)
        finally:
            with self._lock:
                self._waiting[peer] -= 1
                self._waiting += Counter()  # drops addresses that no longer wait

    def _check(self, name: bytes, password: bytes, key: bytes) -> bool:
        import bcrypt  # noqa: PLC0415 - only with users

        begun = time.thread_time()
        hashed = self._users.get(name.decode("utf-8", "replace"))
        # An unknown name takes as long as a known one, so names cannot be found out by time.
        any_hash = next(iter(self._users.values()))
        try:
            right = bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed or any_hash) and bool(hashed)
        except ValueError:  # a password that bcrypt refuses
            right = False
        if not right:
            time.sleep(_REST * (time.thread_time() - begun))
        elif len(self._right) < _REMEMBERED:  # the same one can be written in many ways
            self._right.add(key)
        return right


def _credentials(header: str) -> tuple[bytes, bytes] | None:
    """Return name and password of an Authorization header; None if it has none.

    >>> _credentials("Basic Ym9iOnB3"), _credentials("Bearer Ym9iOnB3")
    ((b'bob', b'pw'), None)
    """
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = b64decode(encoded.strip(), validate=True).partition(b":")
    except ValueError:
        return None
    return (name, password) if colon else None
