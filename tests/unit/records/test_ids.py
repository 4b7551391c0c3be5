"""Names of submissions sort by time and never repeat."""

from __future__ import annotations

import os

import pytest

from hpml_orchestrator.records.ids import ID_PATTERN, new_id


def test_an_id_says_what_and_when() -> None:
    """Name, day, UTC time, six characters without those that look alike."""
    made = new_id("digits", now=1_700_000_000)
    assert made.startswith("digits-20231114-221320-")
    assert ID_PATTERN.match(made)
    assert not set(made.rsplit("-", 1)[1]) & set("ilou")


def test_ids_sort_by_time() -> None:
    """Ids of one name sort as they were made, over the ends of days and years."""
    times = [0, 1, 59, 3600, 86_399, 86_400, 1_700_000_000, 1_704_067_199, 1_704_067_200]
    made = [new_id("a", now=now) for now in times]
    assert sorted(made) == made


def test_ids_are_unique() -> None:
    """Thousands within one second differ."""
    assert len({new_id("a", now=0) for _ in range(5000)}) == 5000


@pytest.mark.parametrize("name", ["a", "a.b_c+d-e", "x" * 64, "20200101-000000", "9"])
def test_an_id_is_a_good_file_name(name: str) -> None:
    """Every job name makes an id that is recognised again and short enough for a file."""
    made = new_id(name)
    assert ID_PATTERN.match(made)
    assert ID_PATTERN.match(f"{made}.17")
    assert os.path.basename(made) == made
    assert len(made) <= 63
