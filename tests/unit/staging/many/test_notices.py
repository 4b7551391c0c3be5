"""Files by which nodes find each other."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.many.notices import Notices

if TYPE_CHECKING:
    from pathlib import Path


def test_a_node_can_post_while_others_take_their_notices_away(root: Path) -> None:
    """One node begins with the next data while the last of the others ends with these."""
    done = threading.Event()

    def come_and_go() -> None:
        other = Notices(str(root), "a", should_stop=lambda: False)
        while not done.is_set():
            other.post("1", port=1)
            other.remove("1")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        first = Notices(str(root), "b", should_stop=lambda: False)
        for _ in range(500):
            first.post("secret", beat=1)
            assert first.read("secret") is not None
            first.remove("secret")
    finally:
        done.set()
        thread.join()
