"""What the agent tells exporters of its ranks: sums, messages, sockets that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.node import feed
from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.node.feed import Feed, exporter_sockets
from tests.patience import eventually
from training_jobs.hpml_channel import STEP_BOUNDS_SECONDS, Channel

NOBODY = 65534


class Ear:
    """The exporter's end of a socket that the feed was given."""

    made: ClassVar[list[Ear]] = []

    def __init__(self, to: Feed) -> None:
        Ear.made.append(self)
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        to.add_socket(theirs)

    def heard(self) -> list[dict[str, Any]]:
        """All messages that have come."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                head, _, body = self.end.recv(40000).partition(b"\n")
            except BlockingIOError:
                return found
            assert head == b"hpml-feed 1 %d" % (len(found) % 100)
            found.append(json.loads(body))

    def ranks(self) -> dict[int, dict[str, Any]]:
        """The ranks of one message."""
        (message,) = self.heard()
        return {one["r"]: one for one in message["ranks"]}


@pytest.fixture
def now() -> list[float]:
    """A clock that the test turns."""
    return [1000.0]


@pytest.fixture
def told(now: list[float]) -> Iterator[Feed]:
    """A feed without targets."""
    made = Feed(clock=lambda: now[0])
    yield made
    made.close()
    while Ear.made:
        Ear.made.pop().end.close()


def counters(samples: float, steps: float, **more: object) -> dict[str, Any]:
    return {"samples_total": samples, "steps_total": steps, **more}


def test_counters_go_out_once_a_second(told: Feed, now: list[float]) -> None:
    """However often ranks speak; without news, every ten seconds."""
    ear = Ear(told)
    told.take(0, 11, counters(32, 1, data_wait_seconds_total=0.5, loss=0.25))
    assert told.act(now[0]) == 1.0
    assert ear.ranks()[0]["t"] == [32, 1, 0.5, 0, 0]
    for step in range(2, 10):
        now[0] += 0.1
        told.take(0, 11, counters(32 * step, step))
        told.act(now[0])
    assert ear.heard() == []
    now[0] += 0.2
    told.act(now[0])
    assert ear.ranks()[0]["t"][:2] == [288, 9]
    for _ in range(9):
        now[0] += 1
        told.act(now[0])
    assert ear.heard() == [], "nothing is new"
    now[0] += 1.01
    told.act(now[0])
    assert ear.ranks()[0]["age"] == pytest.approx(10.21)


def test_a_rank_that_starts_again_goes_on_counting(told: Feed, now: list[float]) -> None:
    """A new process begins at zero: its counters are added to those of the one before."""
    ear = Ear(told)
    told.take(0, 11, counters(320, 10), {"4": 10})
    told.take(0, 12, counters(32, 1), {"4": 1})
    told.take(0, 12, counters(64, 2), {"4": 1, "5": 1})
    told.act(now[0])
    rank = ear.ranks()[0]
    assert rank["t"][:2] == [384, 12]
    assert rank["b"] == [0, 0, 0, 0, 11, 1, 0, 0, 0, 0, 0]


def test_two_trainings_of_one_rank_are_added_up(told: Feed, now: list[float]) -> None:
    """A job may run several trainings side by side, each with a rank 0: each counts once."""
    ear = Ear(told)
    for step in range(1, 101):
        told.take(0, 11, counters(10 * step, step))
        told.take(0, 12, counters(5 * step, step))
    told.act(now[0])
    assert ear.ranks()[0]["t"][:2] == [1500, 200]


def test_a_process_number_that_comes_again(told: Feed, now: list[float]) -> None:
    """Counters that fall are another process's; 0 is a process that cannot be seen from here."""
    ear = Ear(told)
    for pid in (0, 77):
        told.take(pid, pid, counters(100, 10))
        told.take(pid, pid, counters(20, 2))
    told.act(now[0])
    assert [one["t"][:2] for one in ear.ranks().values()] == [[120, 12], [120, 12]]


def test_many_ranks_are_several_messages(told: Feed, now: list[float]) -> None:
    """A message stays under 32 KiB, whatever its ranks say, and a rank in its own."""
    ear = Ear(told)
    method = "\\" * 20 + "x" * 500
    high = 12345678901234567.123
    for rank in reversed(range(100)):
        data = dict.fromkeys(feed._COUNTERS, high) | dict.fromkeys(feed._GAUGES, -1.2345678901e-300)
        told.take(rank, rank, {**data, "comm_method": method}, {str(n): 10**17 for n in range(11)})
    told.act(now[0])
    messages = ear.heard()
    assert [len(one["ranks"]) for one in messages] == [48, 48, 4]
    assert max(len(json.dumps(one, separators=(",", ":"))) for one in messages) < 32 * 1024 - 20
    first = [one["r"] for one in messages[0]["ranks"]]
    told.take(200, 1, counters(1, 1))
    now[0] += 1
    told.act(now[0])
    assert [one["r"] for one in ear.heard()[0]["ranks"]] == first


def test_an_exporter_that_does_not_read_holds_nobody_up(told: Feed, now: list[float]) -> None:
    """Its queue is full: what has no room is dropped, and the next message holds it."""
    ear = Ear(told)
    for step in range(1, 2000):
        told.take(0, 11, counters(step, step))
        now[0] += 1
        told.act(now[0])
    assert told.dropped > 0
    old = [one["ranks"][0]["t"][0] for one in _all(ear)]
    assert old[-1] < 1999
    now[0] += 1
    told.act(now[0])
    assert ear.ranks()[0]["t"][0] == 1999


def _all(ear: Ear) -> list[dict[str, Any]]:
    found = []
    while True:
        try:
            found.append(json.loads(ear.end.recv(40000).partition(b"\n")[2]))
        except BlockingIOError:
            return found


def test_what_found_no_room_goes_first(told: Feed, now: list[float]) -> None:
    """The exporter reads every five seconds, and its queue holds a few parts of very many ranks."""
    ear = Ear(told)
    for rank in range(4000):
        told.take(rank, rank, counters(1e17 + rank, 1e17), dict.fromkeys("0123456789", 10**17))
    known: set[int] = set()
    for second in range(120):
        now[0] += 1
        told.act(now[0])
        while second % 5 == 0:
            try:
                body = ear.end.recv(40000).partition(b"\n")[2]
            except BlockingIOError:
                break
            known.update(one["r"] for one in json.loads(body)["ranks"])
    assert told.dropped, "the queue was full"
    assert len(known) == 4000


def test_an_exporter_that_is_gone(told: Feed, now: list[float]) -> None:
    """Its socket is closed, another is heard at once, and the others go on."""
    gone, stays = Ear(told), Ear(told)
    gone.end.close()
    told.take(0, 11, counters(1, 1))
    told.act(now[0])
    assert len(told._inherited) == 1
    assert stays.ranks()[0]["t"][0] == 1
    late = Ear(told)
    now[0] += 1
    told.act(now[0])
    assert late.ranks()[0]["t"][0] == 1


def test_the_binding_goes_out_without_any_channel(told: Feed, now: list[float]) -> None:
    """A training that copied no hpml_channel.py has its ranks judged all the same."""
    ear = Ear(told)
    told.act(now[0])
    assert ear.heard() == []
    told.tell_binding(7, 1)
    now[0] += 1
    told.act(now[0])
    (message,) = ear.heard()
    assert message == {"pid": os.getpid(), "binding": [7, 1], "ranks": []}


def test_the_last_word_is_sent_at_once(told: Feed, now: list[float]) -> None:
    """The end of a training does not wait for its second to be over."""
    ear = Ear(told)
    told.take(0, 11, counters(1, 1))
    told.act(now[0])
    told.take(0, 11, counters(2, 2))
    told.flush()
    assert [one["ranks"][0]["t"][0] for one in _all(ear)] == [1, 2]


def test_pauses_are_never_none(told: Feed, now: list[float]) -> None:
    """The agent's loop sleeps between two calls, with and without an exporter."""
    assert told.act(now[0]) == feed._LOOK_SECONDS
    Ear(told)
    for _ in range(50):
        pause = told.act(now[0])
        assert pause > 0
        now[0] += pause


def test_what_ranks_tell_that_is_no_number(told: Feed, now: list[float]) -> None:
    """It counts as none; what others said is as it was."""
    ear = Ear(told)
    odd: list[Any] = [None, True, "1", [], float("nan"), float("inf"), -1, 1e300, {}]
    for value in odd:
        told.take(0, 11, dict.fromkeys((*feed._COUNTERS, "loss", "mfu"), value), {"1": value})
    told.take(0, 11, counters(5, 1, loss=-3, comm_method=7), {"x": 1, "99": 1, "٣": 1, "2": 1})
    told.act(now[0])
    rank = ear.ranks()[0]
    assert rank["t"][:2] == [5, 1]
    assert (rank["g"], rank["m"]) == ({"loss": -3}, None)
    assert rank["b"][2] == 1
    assert sum(rank["b"]) == 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.lists(st.integers(0, 50), max_size=12).map(sorted),
        ),
        max_size=12,
    )
)
def test_totals_never_fall(runs: list[tuple[int, int, list[int]]]) -> None:
    """Whatever processes say in whatever order, a rank's sums only grow."""
    told = Feed(clock=lambda: 0.0)
    before: dict[int, float] = {}
    for rank, pid, values in runs:
        for value in values:
            told.take(rank, pid, counters(value, value))
            total = told._ranks[rank].totals[0]
            assert total >= before.get(rank, 0)
            before[rank] = total


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    path = Path("/tmp") / f"hpml-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def listen(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.bind(str(path))
    one.listen()
    one.setblocking(False)
    return one


def test_a_node_s_exporter_is_found_when_it_comes(place: Path, now: list[float]) -> None:
    """It is looked for every ten seconds, and again after it went."""
    path = place / "exporter.sock"
    told = Feed([str(path)], clock=lambda: now[0])
    told.take(0, 11, counters(1, 1))
    assert told.act(now[0]) == 10.0
    for _ in range(2):
        with listen(path) as exporter:
            now[0] += 5
            told.act(now[0])
            with pytest.raises(BlockingIOError):
                exporter.accept()
            now[0] += 5.1
            told.act(now[0])
            with exporter.accept()[0] as connection:
                assert b'"r":0' in connection.recv(40000)
        path.unlink()
        told.take(0, 11, counters(2, 2))
        now[0] += 1
        told.act(now[0])
        assert told._reached == {}
    told.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_anyone_may_write_is_not_trusted(place: Path, mode: int) -> None:
    """Another user could have put a socket there."""
    path = place / "exporter.sock"
    with listen(path):
        assert feed._is_trusted(str(path))
        place.chmod(mode)
        assert not feed._is_trusted(str(path))
        place.chmod(0o1775)  # what the systemd unit makes
        assert feed._is_trusted(str(path))


def test_another_user_s_directory_is_not_trusted(place: Path) -> None:
    """Unless it lies where only root can have put it, as systemd does for a service."""
    if os.getuid() != 0:
        pytest.skip("needs root to make directories of others")
    inner = place / "hpml"
    inner.mkdir()
    path = inner / "exporter.sock"
    with listen(path):
        os.chown(inner, NOBODY, NOBODY)
        assert feed._is_trusted(str(path))
        place.chmod(0o777)
        assert not feed._is_trusted(str(path))


def test_what_is_no_socket_is_not_trusted(place: Path) -> None:
    """A link to a socket neither."""
    path = place / "exporter.sock"
    path.write_text("")
    assert not feed._is_trusted(str(path))
    path.unlink()
    with listen(place / "real"):
        path.symlink_to(place / "real")
        assert not feed._is_trusted(str(path))
    assert stat.S_ISLNK(path.lstat().st_mode)


def test_where_exporters_are_looked_for() -> None:
    """The usual place, one of the environment, or nowhere."""
    assert exporter_sockets({}) == ("/run/hpml/exporter.sock",)
    assert exporter_sockets({"HPML_EXPORTER_SOCKET": "/x"}) == ("/x",)
    assert exporter_sockets({"HPML_EXPORTER_SOCKET": ""}) == ()


def test_through_the_channel(told: Feed, now: list[float], tmp_path: Path) -> None:
    """A rank's own channel, the reader, the feed: sums, durations, and how they were measured.

    The wall clock of the reader is decades off, which changes nothing.
    """
    ear = Ear(told)
    name = f"hpml/test/{uuid.uuid4().hex}"
    file = tmp_path / "n1.jsonl"
    with ChannelReader(name, file, "n1", clock=lambda: 5e9, feed=told):
        channel = Channel(name, rank=3)
        channel.gauge(loss=0.5, accuracy=0.9, mfu=0.4, comm_method="hook, 1 in 50", other=1)
        for seconds in (0.001, 0.0011, 0.02, 0.3, 70.0):
            channel.count(samples=8, steps=1, step_seconds=seconds, comm_seconds=0.25)
        channel.count(samples=80, steps=10, step_seconds=20.0)
        channel.close()
    told.act(now[0])
    rank = ear.ranks()[3]
    assert rank["t"][:2] == [120, 15]
    assert rank["t"][3:] == [pytest.approx(90.3221), 1.25]
    assert rank["g"] == {"loss": 0.5, "accuracy": 0.9, "mfu": 0.4}
    assert rank["m"] == "hook, 1 in 50"
    # <= 1, 3, 10, 30, 100, 300 ms, 1, 3, 10, 60 s, more; the ten took two seconds each
    assert rank["b"] == [1, 1, 0, 1, 0, 1, 0, 10, 0, 0, 1]
    assert len(rank["b"]) == len(STEP_BOUNDS_SECONDS) + 1
    assert "step_buckets" not in file.read_text(), "the shared file system needs none of it"


def test_an_exporter_that_is_flooded_is_reached(tmp_path: Path) -> None:
    """Its queue of connections is full, and it takes one: ours, for we wait in line a moment."""
    path = tmp_path / "exporter.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as exporter:
        exporter.bind(str(path))
        exporter.listen(1)
        flood = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
        for one in flood:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(str(path))
        with pytest.raises(BlockingIOError):
            flood[-1].connect(str(path))  # it is full
        assert feed._connected(str(path)) is None  # and nobody takes any
        taken: list[socket.socket] = []
        found: list[socket.socket | None] = []

        def knock() -> None:
            while not (found and found[-1]):
                found.append(feed._connected(str(path)))

        knocking = threading.Thread(target=knock)
        knocking.start()
        eventually(lambda: _in_connect(knocking))
        taken.append(exporter.accept()[0])
        knocking.join(60)
        assert found[-1] is not None
        assert found[-1].getblocking() is False
        for one in (*flood, *taken, found[-1]):
            one.close()


def _in_connect(thread: threading.Thread) -> bool:
    """Say whether a thread sleeps in the kernel, where it waits for room in the queue."""
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2][1] == "S"
