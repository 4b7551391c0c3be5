"""What the agent hands on to exporters: sums, messages, sockets that come and go."""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node.channel import Feed

PARTS = ("transfer_seconds", "wait_seconds", "save_seconds", "evaluation_seconds")
COUNTERS = ("samples", "steps", "data_wait_seconds", "step_seconds", "comm_seconds", *PARTS)
GAUGES = ("loss", "accuracy", "mfu")


class Clocked:
    """A feed whose clock the test turns."""

    def __init__(self, *targets: str) -> None:
        self.now = 1000.0
        self.feed = Feed(targets, clock=lambda: self.now)
        self.ends: list[socket.socket] = []

    def exporter(self) -> socket.socket:
        """Connect an exporter; returns its end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ends.append(ours)
        self.feed.add_socket(theirs)
        return ours

    def act(self, seconds: float = 0.0) -> float:
        """Let time pass; returns the pause that the feed asks for."""
        self.now += seconds
        return self.feed.act(self.now)

    def close(self) -> None:
        self.feed.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    """A feed without targets."""
    made = Clocked()
    yield made
    made.close()


def messages(end: socket.socket) -> list[dict[str, Any]]:
    """All messages that have come."""
    received: list[dict[str, Any]] = []
    while True:
        try:
            head, _, body = end.recv(40000).partition(b"\n")
        except BlockingIOError:
            return received
        assert head.startswith(b"hpml-feed 2 ")
        assert len(head) + len(body) < 32 * 1024
        received.append(json.loads(body))


def ranks(end: socket.socket) -> dict[int, dict[str, Any]]:
    """The ranks of the only message."""
    (message,) = messages(end)
    return {rank["r"]: rank for rank in message["ranks"]}


def counters(samples: float, steps: float, **more: object) -> dict[str, Any]:
    return {"samples_total": samples, "steps_total": steps, **more}


def test_counters_go_out_once_a_second(clocked: Clocked) -> None:
    """However often ranks report; without news, every ten seconds; at the end, at once."""
    end = clocked.exporter()
    clocked.feed.take(0, 11, counters(32, 1, data_wait_seconds_total=0.5, loss=0.25))
    assert clocked.act() == 1.0
    first = ranks(end)[0]
    assert (first["t"], first["g"], first["b"]) == (
        [32, 1, 0.5, 0, 0, 0, 0, 0, 0],
        {"loss": 0.25},
        None,
    )
    for step in range(2, 10):
        clocked.feed.take(0, 11, counters(32 * step, step))
        clocked.act(0.1)
    assert messages(end) == []
    clocked.act(0.3)
    assert ranks(end)[0]["t"][:2] == [288, 9]
    for _ in range(9):
        clocked.act(1)
    assert messages(end) == [], "nothing is new"
    clocked.act(1.01)
    assert ranks(end)[0]["age"] == pytest.approx(10.41)
    clocked.feed.take(0, 11, counters(300, 10))
    clocked.feed.flush()
    assert ranks(end)[0]["t"][:2] == [300, 10]


@pytest.mark.parametrize(
    ("reports", "totals", "buckets"),
    [
        pytest.param([(11, 320, 10), (12, 32, 1), (12, 64, 2)], [384, 12], 12, id="starts again"),
        pytest.param([(11, 10, 1), (12, 5, 1), (11, 20, 2)], [25, 3], 3, id="two trainings"),
        pytest.param([(0, 100, 10), (0, 20, 2)], [120, 12], 12, id="pid comes again"),
    ],
)
def test_a_rank_is_the_sum_of_its_processes(
    clocked: Clocked, reports: list[tuple[int, int, int]], totals: list[int], buckets: int
) -> None:
    """A new process begins at zero, and so does one whose samples and steps both fall."""
    end = clocked.exporter()
    for pid, samples, steps in reports:
        clocked.feed.take(0, pid, counters(samples, steps), {"4": steps})
    clocked.act()
    rank = ranks(end)[0]
    assert rank["t"][:2] == totals
    assert rank["b"] == [0, 0, 0, 0, buckets, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "report",
    [
        counters(100, 9, data_wait_seconds_total=2.0),
        counters(90, 10, data_wait_seconds_total=2.0),
        counters(100, 10, data_wait_seconds_total=1.5),
        counters(100, 10, data_wait_seconds_total=float("nan")),
        counters(100, 10, data_wait_seconds_total=-1.0),
    ],
    ids=["steps fall", "samples fall", "wait falls", "wait is NaN", "wait is negative"],
)
def test_one_figure_that_makes_no_sense(clocked: Clocked, report: dict[str, Any]) -> None:
    """It is refused: it neither doubles the others nor stops what comes after it."""
    end = clocked.exporter()
    clocked.feed.take(0, 11, counters(100, 10, data_wait_seconds_total=2.0))
    clocked.feed.take(0, 11, report)
    clocked.act()
    assert ranks(end)[0]["t"][:3] == [100, 10, 2.0]
    clocked.feed.take(0, 11, counters(110, 11, data_wait_seconds_total=2.5))
    clocked.act(1)
    assert ranks(end)[0]["t"][:3] == [110, 11, 2.5]


def test_many_ranks_are_several_messages(clocked: Clocked) -> None:
    """A message stays under 32 KiB, whatever its ranks report, and a rank in its own."""
    end = clocked.exporter()
    data = {f"{name}_total": 12345678901234567.123 for name in COUNTERS}
    data |= dict.fromkeys(GAUGES, -1.2345678901e-300)
    method = "\\" * 20 + "x" * 500
    for rank in reversed(range(100)):
        buckets = {str(place): 10**17 for place in range(11)}
        clocked.feed.take(rank, rank, {**data, "comm_method": method}, buckets)
    clocked.act()
    received = messages(end)
    assert [len(message["ranks"]) for message in received] == [36, 36, 28]
    first = [rank["r"] for rank in received[0]["ranks"]]
    clocked.feed.take(200, 1, counters(1, 1))
    clocked.act(1)
    assert [rank["r"] for rank in messages(end)[0]["ranks"]] == first


def test_an_exporter_that_does_not_read_holds_nobody_up(clocked: Clocked) -> None:
    """Its queue is full: what has no room is dropped, and the next message holds it."""
    end = clocked.exporter()
    for step in range(1, 2000):
        clocked.feed.take(0, 11, counters(step, step))
        clocked.act(1)
    assert clocked.feed.dropped > 0
    assert messages(end)[-1]["ranks"][0]["t"][0] < 1999
    clocked.act(1)
    assert ranks(end)[0]["t"][0] == 1999


def test_an_exporter_that_is_gone(clocked: Clocked) -> None:
    """The others continue, and one that starts later gets everything at once."""
    gone, stays = clocked.exporter(), clocked.exporter()
    gone.close()
    clocked.feed.take(0, 11, counters(1, 1))
    clocked.act()
    assert ranks(stays)[0]["t"][0] == 1
    late = clocked.exporter()
    clocked.act(1)
    assert ranks(late)[0]["t"][0] == 1


def test_the_binding_goes_out_without_any_channel(clocked: Clocked) -> None:
    """A training that copied no hpml_channel.py has its ranks judged all the same."""
    end = clocked.exporter()
    clocked.act()
    assert messages(end) == []
    clocked.feed.set_binding(7, 1)
    clocked.act(1)
    assert messages(end) == [{"pid": os.getpid(), "binding": [7, 1], "ranks": []}]


def test_a_nodes_exporter_is_found_when_it_comes() -> None:
    """It is looked for every ten seconds, and again after it went."""
    directory = Path("/tmp") / f"hpml-{uuid.uuid4().hex[:12]}"  # short enough for a socket
    directory.mkdir()
    path = directory / "exporter.sock"
    made = Clocked(str(path))
    made.feed.take(0, 11, counters(1, 1))
    assert made.act() == 10.0
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as exporter:
            exporter.bind(str(path))
            exporter.listen()
            exporter.setblocking(False)
            made.act(5)
            with pytest.raises(BlockingIOError):
                exporter.accept()
            made.act(5.1)
            with exporter.accept()[0] as connection:
                assert b'"r":0' in connection.recv(40000)
        path.unlink()
        made.feed.take(0, 11, counters(2, 2))
        made.act(1)
    made.close()
    shutil.rmtree(directory)
