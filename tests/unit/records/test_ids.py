"""Ids of submissions: name, UTC time and six random characters."""

from __future__ import annotations

import pytest

from hpml_orchestrator.records.ids import ID_PATTERN, new_id


def test_an_id_has_name_and_time() -> None:
    """Without letters that look alike; ids of one second differ, and ids sort by time."""
    made = new_id("digits", now=1_700_000_000)
    assert made.startswith("digits-20231114-221320-")
    assert not set(made.rsplit("-", 1)[1]) & set("ilou")
    assert len({new_id("a", now=0) for _ in range(5000)}) == 5000
    times = [0, 1, 59, 3600, 86_399, 86_400, 1_700_000_000, 1_704_067_199, 1_704_067_200]
    ids = [new_id("a", now=now) for now in times]
    assert sorted(ids) == ids


@pytest.mark.parametrize("name", ["a", "a.b_c+d-e", "x" * 64, "20200101-000000", "9"])
def test_an_id_is_a_good_file_name(name: str) -> None:
    """Every job name makes an id that is recognised again and short enough for a file."""
    made = new_id(name)
    assert ID_PATTERN.match(made)
    assert ID_PATTERN.match(f"{made}.17")
    assert "/" not in made
    assert len(made) <= 63
