"""Waiting for a condition as long as the slowest machine may take, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# No test waits so long for what does happen; one that waits in vain fails before pytest's timeout.
PATIENCE_SECONDS = 120

Found = TypeVar("Found")


def eventually(
    check: Callable[[], Found],
    what: str = "",
    seconds: float = PATIENCE_SECONDS,
    *,
    pause: float = 0.01,
) -> Found:
    """Wait until a check is true, and return what it found.

    Args:
        check: looked at again and again; the last look is made after the time is over.
        what: message if it never becomes true.
        seconds: for how long.
        pause: seconds between two looks at least. Looks take a quarter of the time at most: one
            that starts a command would otherwise slow down what it waits for.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        late = began > deadline
        found = check()
        if found:
            return found
        assert not late, f"not within {seconds} s: {what or check}"
        time.sleep(max(pause, 3 * (time.monotonic() - began)))
