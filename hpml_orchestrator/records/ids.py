"""Names of submissions and runs: sortable by time, unique across hosts, good as file names."""

from __future__ import annotations

import re
import secrets
import time

__all__ = ["ID_PATTERN", "new_id", "stamp", "stamp_of"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_SUFFIX_CHARS = 6
_NAME_CHARS = 40

ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*-\d{8}-\d{6}-[0-9a-z]{6}(\.\d+)?$")
"""`<name>-<yyyymmdd>-<hhmmss in UTC>-<6 characters>`, and `.<index>` for one of several runs."""


def new_id(name: str, *, now: float | None = None) -> str:
    """Return a new id for a job of that name.

    Args:
        name: a job name as the job file allows it; cut after 40 characters.
        now: seconds since the epoch; the clock when left out.
    """
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_CHARS))
    return f"{name[:_NAME_CHARS]}-{stamp(time.time() if now is None else now)}-{suffix}"


def stamp(seconds: float) -> str:
    """Return a time, seconds since the epoch, as it stands in ids; stamps compare as times do."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def stamp_of(sid: str) -> str:
    """Return the time that stands in an id."""
    return "-".join(sid.rsplit("-", 3)[1:3])
