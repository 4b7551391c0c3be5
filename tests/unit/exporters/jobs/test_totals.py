"""Counters of processes that come and go are added up once each, whoever waits for whom."""

from __future__ import annotations

import pytest
from hpml_exporters.jobs.processes import ProcessTotals

Seen = tuple[int, int, int, int]  # pid, parent, start, count

# Looks at the processes of a job, one after the other, and what they add up to.
LIVES: dict[str, list[tuple[list[Seen], int]]] = {
    "two that grow": [([(1, 0, 1, 10), (2, 1, 2, 5)], 15), ([(1, 0, 1, 20), (2, 1, 2, 6)], 26)],
    "a child that is waited for": [
        ([(1, 0, 1, 100), (2, 1, 2, 50)], 150),
        ([(1, 0, 1, 150)], 150),
        ([(1, 0, 1, 160)], 160),
    ],
    "a parent read a moment before it waits": [
        ([(1, 0, 1, 100), (2, 1, 2, 50)], 150),
        ([(1, 0, 1, 100)], 150),
        ([(1, 0, 1, 150)], 150),
        ([(1, 0, 1, 160)], 160),
    ],
    "one that nobody of the job waits for": [
        ([(1, 0, 1, 100), (2, 9, 2, 50)], 150),
        ([(1, 0, 1, 110)], 160),
        ([(1, 0, 1, 110), (3, 9, 3, 7)], 167),
        ([], 167),
    ],
    "a shell and its program end together": [
        ([(1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40)], 70),
        ([(1, 0, 1, 70)], 70),
    ],
    "a shell waits for its program, and ends": [
        ([(1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40)], 70),
        ([(1, 0, 1, 10), (2, 1, 2, 60)], 70),
        ([(1, 0, 1, 75)], 75),
    ],
    "children that outlive their parent go to a subreaper": [
        ([(1, 0, 1, 0), (2, 1, 2, 5), (3, 2, 3, 100), (4, 2, 4, 100)], 205),
        ([(1, 0, 1, 5), (3, 1, 3, 100), (4, 1, 4, 100)], 205),
        ([(1, 0, 1, 205)], 205),
    ],
    "an id that comes again": [([(2, 0, 5, 50)], 50), ([(2, 0, 9, 3)], 53), ([(2, 0, 9, 4)], 54)],
    "counts that fall": [([(1, 0, 1, 100)], 100), ([(1, 0, 1, 60)], 100)],
}


@pytest.mark.parametrize("looks", LIVES.values(), ids=LIVES)
def test_lives(looks: list[tuple[list[Seen], int]]) -> None:
    """The total after each look."""
    job = ProcessTotals(1)
    for processes, total in looks:
        job.keep([pid for pid, *_ in processes])
        for pid, parent, start, count in processes:
            job.seen(pid, parent, start, (count,))
        assert job.total() == (total,)
