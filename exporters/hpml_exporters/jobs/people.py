"""Names of users, which may come from a directory service that is slow or down."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable

__all__ = ["People"]

_WAIT_SECONDS = 0.2
_KEEP_SECONDS = 3600.0
_RETRY_SECONDS = 600.0


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)  # there is no such user, so the number is the name


class People:
    """Looks names up in a thread of its own, and waits for it only a moment.

    Args:
        lookup: name by number; raises OSError for what it cannot know now.
    """

    def __init__(self, lookup: Callable[[int], str] = _name) -> None:
        self._lookup = lookup
        self._known: dict[int, tuple[str, float]] = {}
        self._busy: threading.Thread | None = None

    def name(self, uid: int, now: float) -> str:
        """Return the name of a user; empty while it is not known.

        Args:
            uid: of the user; negative: unknown.
            now: monotonic seconds.
        """
        if uid < 0:
            return ""
        known, until = self._known.get(uid, ("", now))
        if now < until:
            return known
        if self._busy is None or not self._busy.is_alive():
            self._busy = threading.Thread(target=self._ask, args=(uid, now), daemon=True)
            self._busy.start()
            self._busy.join(_WAIT_SECONDS)
        return self._known.get(uid, (known, 0.0))[0]

    def _ask(self, uid: int, now: float) -> None:
        try:
            self._known[uid] = (self._lookup(uid), now + _KEEP_SECONDS)
        except OSError:
            known = self._known.get(uid, ("", 0.0))[0]
            self._known[uid] = (known, now + _RETRY_SECONDS)
