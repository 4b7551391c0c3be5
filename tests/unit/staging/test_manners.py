"""Manners towards the shared file system: rates, delays, caches."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest

from hpml_orchestrator.staging import manners
from hpml_orchestrator.staging.manners import (
    SECONDS_PER_TASK,
    TokenBucket,
    array_delay,
    drops_cache,
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


def _bucket(rate: float, clock: Clock, **more: object) -> TokenBucket:
    return TokenBucket(rate, clock=clock, sleep=clock.sleep, **more)  # type: ignore[arg-type]


def test_calls_keep_to_the_rate() -> None:
    """100 calls at 10 a second take 9.9 seconds when none may come early."""
    clock = Clock()
    bucket = _bucket(10, clock, burst=1)
    for _ in range(100):
        bucket.take()
    assert clock.now - 100 == pytest.approx(9.9)


def test_a_pause_gives_no_more_than_the_burst() -> None:
    """After a long pause the burst goes through at once, the next call waits."""
    clock = Clock()
    bucket = _bucket(10, clock, burst=5)
    clock.now += 3600
    assert [round(bucket.take(), 6) for _ in range(8)] == [0, 0, 0, 0, 0, 0, 0.1, 0.1]


def test_many_at_once_count_as_many() -> None:
    """Taking n is followed by the wait of n calls, more than the burst as well."""
    clock = Clock()
    bucket = _bucket(10, clock, burst=1)
    bucket.take(50)
    assert bucket.take() == pytest.approx(5.0)


def test_no_rate_is_no_limit() -> None:
    """Rate 0 lets everything through, and needs no shared memory."""
    clock = Clock()
    bucket = _bucket(0, clock)
    assert sum(bucket.take() for _ in range(1000)) == 0
    assert clock.slept == []
    bucket.close()


def test_a_wait_ends_when_told_to_stop() -> None:
    """A stop is seen within a fifth of a second, however long the wait would be."""
    clock = Clock()
    bucket = _bucket(1, clock, burst=1, should_stop=lambda: clock.now >= 101)
    bucket.take(1000)
    bucket.take()
    assert clock.now == pytest.approx(101, abs=0.3)


def test_a_closed_bucket_holds_nothing_back() -> None:
    """What still runs when the staging is over is not held up by a file that is gone."""
    bucket = TokenBucket(1)
    bucket.close()
    bucket.close()
    assert bucket.take(1000) == 0.0


def _take(bucket: TokenBucket, count: int) -> None:
    for _ in range(count):
        bucket.take()


def test_forked_processes_and_their_threads_share_one_rate() -> None:
    """Four processes of two threads each get 80 calls at 200 a second in no less than 0.35 s."""
    bucket = TokenBucket(200, burst=1)

    def work() -> None:
        threads = [threading.Thread(target=_take, args=(bucket, 10)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    crew = [context.Process(target=work) for _ in range(4)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(30)
    assert [process.exitcode for process in crew] == [0] * 4
    assert time.monotonic() - began >= 0.35
    bucket.close()


def test_a_fork_while_a_thread_takes_does_not_hang_the_child() -> None:
    """The lock that a thread of the parent holds at the fork is not the child's."""
    bucket = TokenBucket(1e9)
    bucket._mutex.acquire()
    child = os.fork()
    if not child:
        bucket.take()
        os._exit(0)
    bucket._mutex.release()
    deadline = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == (child, 0)
    bucket.close()


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


def test_few_tasks_wait_little_and_one_not_at_all() -> None:
    """The window grows with the tasks; a single job and a site without jitter never wait."""
    assert max(array_delay(30, 4, index) for index in range(4)) < 4 * SECONDS_PER_TASK
    assert array_delay(30, 1, 7) == array_delay(30, 0, 0) == array_delay(0, 100, 7) == 0.0


def test_what_a_node_reads_of_a_shared_source_leaves_its_cache() -> None:
    """Shared: always; of the node's own disk: only what would fill its memory."""
    assert drops_cache("lustre", 1, 0)
    assert drops_cache("nfs4", 1, 1 << 40)
    assert not drops_cache("ext4", 1 << 30, 64 << 30)
    assert drops_cache("ext4", 32 << 30, 64 << 30)
    assert not drops_cache("ext4", 32 << 30, 0)


def test_types_of_shared_file_systems_are_known() -> None:
    """As mountinfo names them; those of the node are not among them."""
    assert all(map(manners.is_shared_type, ["nfs", "nfs4", "lustre", "gpfs", "fuse.s3fs"]))
    assert not any(map(manners.is_shared_type, ["ext4", "xfs", "tmpfs", "overlay", "fuse", ""]))
