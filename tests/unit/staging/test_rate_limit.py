"""Limits of the load on the shared file system: rates and delays."""

from __future__ import annotations

import pytest

from hpml_orchestrator.staging.request import StagingStopped
from hpml_orchestrator.staging.workers import (
    TokenBucket,
    array_delay,
    open_rate,
)


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("calls", "count"), [(100, 1), (2, 50), (1, 102)])
def test_calls_keep_to_the_rate(calls: int, count: int) -> None:
    """100 calls at 10 per second take 10 s, less 0.2 s of them that may come at once."""
    clock = Clock()
    bucket = TokenBucket(10, clock=clock, sleep=clock.sleep)
    clock.now += 60
    for _ in range(calls):
        bucket.take(count)
    bucket.take()
    assert clock.now - 160 == pytest.approx(calls * count / 10 - 0.2)


def test_a_wait_ends_when_told_to_stop() -> None:
    """A stop is seen within a fifth of a second, however long the wait would be."""
    clock = Clock()

    def check_stop() -> None:
        if clock.now >= 101:
            raise StagingStopped

    bucket = TokenBucket(1, clock=clock, sleep=clock.sleep, check_stop=check_stop)
    bucket.take(1000)
    with pytest.raises(StagingStopped):
        bucket.take()
    assert clock.now == pytest.approx(101, abs=0.3)


@pytest.mark.parametrize(
    ("per_node", "per_job", "nodes", "rate"),
    [(0, 0, 8, 0), (100, 0, 8, 100), (0, 800, 8, 100), (50, 800, 8, 50), (500, 800, 8, 100)],
)
def test_the_jobs_limit_is_shared_by_the_nodes_that_read(
    per_node: float, per_job: float, nodes: int, rate: float
) -> None:
    """The smaller of the node's own limit and its share of the job's."""
    assert open_rate(per_node, per_job, nodes) == rate


def test_tasks_of_an_array_are_spread_evenly() -> None:
    """Of 100 tasks no two wait alike, and no tenth of the window is left empty."""
    waits = [array_delay(30, 100, index, "4711") for index in range(100)]
    assert len(set(waits)) == 100
    assert all(0 <= wait < 30 for wait in waits)
    assert {int(wait // 3) for wait in waits} == set(range(10))
    assert waits == [array_delay(30, 100, index, "4711") for index in range(100)]
    assert waits != [array_delay(30, 100, index, "4712") for index in range(100)]
