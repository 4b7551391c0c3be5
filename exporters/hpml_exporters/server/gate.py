"""Who may read, and how often: users and the rate limit of the web-config file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpml_exporters.server.connection import Connection
from hpml_exporters.server.limits import Limits
from hpml_exporters.server.request import Request
from hpml_exporters.server.settings import Settings

if TYPE_CHECKING:
    from hpml_exporters.server.passwords import Passwords

__all__ = ["Gate"]


class Gate:
    """Decides for each request; belongs to the server's thread."""

    def __init__(self, settings: Settings, limits: Limits, wake: Callable[[], None]) -> None:
        """Take the first settings.

        Args:
            settings: who may read.
            limits: how much clients may take.
            wake: called, from another thread, when `verdicts` has something to say.

        Raises:
            InputError: there are users, and no bcrypt.
        """
        self._limits = limits
        self._wake = wake
        self._settings = Settings()
        self._passwords: Passwords | None = None
        self._waiting: dict[bytes, list[Connection]] = {}
        self._left_out: list[Connection] = []
        self._tokens = 0.0
        self._tokens_at = 0.0
        self.use(settings)

    def use(self, settings: Settings) -> list[Connection]:
        """Take other settings; return the connections that have to ask again.

        Raises:
            InputError: there are users, and no bcrypt.
        """
        if settings.rate_limit != self._settings.rate_limit and settings.rate_limit:
            self._tokens = float(settings.rate_limit.burst)
            self._tokens_at = time.monotonic()
        if settings.users != self._settings.users:
            if self._passwords is None:
                from hpml_exporters.server.passwords import (  # noqa: PLC0415 - with users alone
                    Passwords,
                )

                self._passwords = Passwords(self._limits, self._wake)
            self._passwords.use(settings.users)
        self._settings = settings
        again = [one for asked in self._waiting.values() for one in asked]
        self._waiting.clear()
        return again

    def take_token(self, now: float) -> bool:
        """Return whether the rate limit has room for a request, which takes it."""
        limit = self._settings.rate_limit
        if limit is None:
            return True
        gained = max(0.0, now - self._tokens_at) / limit.interval
        self._tokens = min(float(limit.burst), self._tokens + gained)
        self._tokens_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def ask(self, one: Connection, request: Request, now: float) -> bool | None:
        """Return whether a request may be answered; nothing where `verdicts` will say so later."""
        passwords = self._passwords
        if not self._settings.users or passwords is None:
            return True
        from hpml_exporters.server.passwords import credentials  # noqa: PLC0415 - with users alone

        given = credentials(request.headers.get("authorization", ""))
        if given is None:
            return False
        key = passwords.key(given)
        right = passwords.known(key, now)
        if right is not None:
            return right
        asked = self._waiting.setdefault(key, [])
        asked.append(one)
        if len(asked) == 1:
            left_out = passwords.ask(key, given, one.peer)
            if left_out is not None:
                self._left_out += self._waiting.pop(left_out, [])
        return None

    def verdicts(self, now: float) -> list[tuple[Connection, bool | None]]:
        """Return whose request may be answered and whose not; nothing: nobody will find out."""
        found: list[tuple[Connection, bool | None]] = [(one, None) for one in self._left_out]
        self._left_out.clear()
        if self._passwords:
            for key, right in self._passwords.answers(now):
                found += [(one, right) for one in self._waiting.pop(key, [])]
        return found

    def stop(self) -> None:
        """End the thread that checks passwords."""
        if self._passwords:
            self._passwords.stop()
