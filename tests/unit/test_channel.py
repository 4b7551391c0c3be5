"""The training channel: hpml_channel.py on the ranks' side, ChannelReader on the node's."""

import array
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.node.channel import (
    MAX_DATAGRAM_BYTES,
    MAX_NAME_BYTES,
    RANK_EVENTS,
    ChannelReader,
    attempt_channel,
    event_of,
    parse,
)
from hpml_orchestrator.records import feed
from tests.longtraining import WEEK_SECONDS, counters, pause_after, record_training
from tests.patience import PATIENCE_SECONDS, eventually
from tests.unit.training_runs import JOBS, load

NOBODY = 65534


hpml_channel = load(JOBS / "hpml_channel.py")


def message(**changes: object) -> bytes:
    whole = {"v": 1, "type": "event", "event": "checkpoint", "time": time.time(), "rank": 0}
    return json.dumps({**whole, "data": {"seconds": 1.5}, **changes}).encode()


def send(name: str, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, "\0" + name)


@pytest.fixture
def reader(tmp_path: Path) -> ChannelReader:
    return ChannelReader(f"hpml/test/{uuid.uuid4().hex}", tmp_path / "events" / "n1.jsonl", "n1")


def written(reader: ChannelReader) -> list[feed.Event]:
    return list(feed.read(reader._file)) if reader._file.exists() else []


def test_a_training_is_written_as_events(reader: ChannelReader) -> None:
    """Events, counters with their gauges and the result arrive, in order, under their rank."""
    with reader:
        channel = hpml_channel.Channel(reader.name, rank=3, local_rank=1, world_size=4)
        channel.event("rendezvous")
        channel.gauge(loss=0.5, epoch=2)
        channel.count(samples=32, steps=1, data_wait_seconds=0.25, step_seconds=0.5)
        channel.count(samples=32, steps=1, data_wait_seconds=0.25, step_seconds=0.5)
        channel.result(test_accuracy=0.97)
        channel.close()
    lines = sorted(written(reader), key=lambda event: event.time)
    assert [event.event for event in lines] == ["rendezvous", "step", "step", "evaluation"]
    assert {(event.rank, event.node) for event in lines} == {(3, "n1")}
    rendezvous, first, step, result = (dict(event.data) for event in lines)
    assert rendezvous == {"local_rank": 1, "world_size": 4, "pid": os.getpid()}
    assert result == {"test_accuracy": 0.97, "final": True}
    assert (first["samples_total"], first["steps_total"]) == (32, 1)
    totals = {"samples_total": 64, "steps_total": 2, "data_wait_seconds_total": 0.5}
    if os.path.exists("/proc/self/schedstat"):
        assert 0 <= first["cpu_wait_seconds_total"] <= step.pop("cpu_wait_seconds_total")
        assert first["helper_cpu_seconds_total"] >= 0
        assert step.pop("cpu_seconds_total") >= step.pop("helper_cpu_seconds_total") >= 0
        assert step.pop("loader_cpu_seconds_total") >= 0
        assert step.pop("python_cpu_seconds_total") >= 0
    assert step == {**totals, "step_seconds_total": 1.0, "loss": 0.5, "epoch": 2}
    assert (reader.refused, channel.dropped) == (0, 0)


def test_counters_are_sent_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps a second has, one datagram carries their sum."""
    now = [100.0]
    monkeypatch.setattr(hpml_channel.time, "monotonic", lambda: now[0])
    name = f"hpml/test/{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        channel = hpml_channel.Channel(name)
        for _ in range(640):
            now[0] += 1 / 256  # 256 steps a second for 2.5 s
            channel.count(steps=1)
        channel.close()
        datagrams = [json.loads(listener.recv(9000)) for _ in range(channel.sent)]
    assert [datagram["data"]["steps_total"] for datagram in datagrams] == [1, 257, 513, 640]


def test_the_warm_up_ends_with_the_first_count(
    reader: ChannelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written with its own time however quick the steps are; the last has its own too."""
    quick = SimpleNamespace(monotonic=lambda: 100.0, time=time.time, sleep=time.sleep)
    monkeypatch.setattr(hpml_channel, "time", quick)
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.count(steps=1)  # counted before: its second is not over when the warm-up begins
        channel.event("warm-up")
        for _ in range(200):
            channel.count(steps=1)
        counted = time.time()
        time.sleep(0.02)
        channel.close()
    found = written(reader)
    steps = [event for event in found if event.event == "step"]
    assert [event.event for event in found] == ["step", "warm-up", "step", "step"]
    assert [event.data["steps_total"] for event in steps] == [1, 2, 201]
    assert found[1].time <= steps[1].time < steps[2].time <= counted
    assert reader.superseded == 0


@pytest.mark.parametrize("news", [{"accuracy": 0.75}, {}])
def test_the_end_sends_what_came_after_the_last_count(
    reader: ChannelReader, news: dict[str, float]
) -> None:
    """The last evaluation comes after the last step; what was sent is not sent again."""
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.gauge(loss=0.5)
        channel.count(steps=1)  # the first is sent at once
        counted = time.time()
        time.sleep(0.02)
        if news:
            channel.gauge(**news)
        channel.close()
    last = written(reader)[-1]
    assert last.data.items() >= {"steps_total": 1, "loss": 0.5, **news}.items()
    assert last.time <= counted, "steps per second must not count the evaluation"
    assert channel.sent == 1 + len(news)


def test_the_time_between_steps_is_counted(reader: ChannelReader) -> None:
    """With the time of the last step: an evaluation is not a part of the time for the steps."""
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.count(steps=1)
        counted = time.time()
        with channel.timed("evaluation_seconds"):
            time.sleep(0.02)
        channel.count(save_seconds=2.0)
        channel.close()
    last = written(reader)[-1]
    assert last.data["evaluation_seconds_total"] >= 0.02
    assert (last.data["save_seconds_total"], last.data["steps_total"]) == (2.0, 1)
    assert last.time <= counted


COUNTED = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count"
)


def burn(seconds: float) -> None:
    """Use a CPU."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@COUNTED
def test_the_cpu_time_of_loaders_and_threads_is_told_apart(reader: ChannelReader) -> None:
    """A child process and a thread of Python beside the training's: each has its counter."""
    spun, over = threading.Event(), threading.Event()

    def beside() -> None:
        burn(0.3)
        spun.set()
        over.wait(PATIENCE_SECONDS)  # what has ended is not counted

    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.count(steps=1)
        loader = "import time\nwhile time.process_time() < 0.5: pass"
        subprocess.run([sys.executable, "-c", loader], check=True)
        thread = threading.Thread(target=beside)
        thread.start()
        assert spun.wait(PATIENCE_SECONDS)
        channel.count(steps=1)
        channel.close()
    over.set()
    thread.join()
    first, last = (event.data for event in written(reader))
    names = ("loader_cpu", "python_cpu", "helper_cpu", "cpu")
    loaders, python, helpers, whole = (
        last[f"{name}_seconds_total"] - first[f"{name}_seconds_total"] for name in names
    )
    assert 0.45 < loaders < 5
    assert 0.25 < python < 5
    assert loaders + python - 0.1 < helpers <= whole


@COUNTED
def test_an_evaluation_after_the_last_step_is_no_cpu_time_of_the_steps(
    reader: ChannelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last counters have the time of the last step, so their CPU time must be as old."""
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.count(steps=1)
        channel.count(steps=1)
        burn(0.1)
        later = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 2)
        monkeypatch.setattr(hpml_channel, "time", later)
        channel.close()
    first, last = (event.data for event in written(reader))
    assert last["steps_total"] == 2
    assert last["cpu_seconds_total"] == first["cpu_seconds_total"]


def test_without_a_channel_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script outside hpml runs through all calls: no socket, no error."""
    for name in ("HPML_CHANNEL", "RANK"):
        monkeypatch.delenv(name, raising=False)
    channel = hpml_channel.Channel.from_env()
    assert channel._socket is None
    for _ in range(1000):
        channel.count(steps=1, samples=32)
    channel.event("rendezvous", anything=object())
    with channel.timed("save_seconds"):
        channel.gauge(loss=1)
    channel.result(a=1)
    assert channel.stop_requested() is False
    channel.close()
    channel.close()


@pytest.mark.parametrize("prefix", ["", "HOROVOD_", "OMPI_COMM_WORLD_"])
def test_the_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """It is read from the variables of torchrun, horovodrun and mpirun; torchrun's come first."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HPML_CHANNEL"):
        monkeypatch.delenv(name, raising=False)
    if prefix == "":
        monkeypatch.setenv("HOROVOD_RANK", "7")
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("SIZE", "4")):
        monkeypatch.setenv(prefix + name if prefix or name != "SIZE" else "WORLD_SIZE", value)
    found = hpml_channel.Channel.from_env()._who
    assert found == {"rank": 3, "local_rank": 1, "world_size": 4}


@pytest.mark.parametrize(
    "name", [f"hpml/test/{uuid.uuid4().hex}", "x" * 500], ids=["nobody", "too long"]
)
def test_without_a_reader_nothing_is_raised(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A channel whose reader is gone, or can never have been, counts what is lost and continues."""
    monkeypatch.setenv("HPML_CHANNEL", name)
    monkeypatch.setenv("RANK", "no number")
    channel = hpml_channel.Channel.from_env()
    channel.event("rendezvous")
    channel.count(steps=1)
    channel.result(test_accuracy=1)
    channel.close()
    assert (channel.sent, channel.dropped) == (0, 4)


@pytest.mark.parametrize(
    "counts",
    [
        {"samples": None},
        {"samples": "8"},
        {"steps": 1, "step_seconds": None},
        {"steps": 10**400, "samples": 1.5},
        {"steps": float("nan"), "step_seconds": float("inf")},
        {"data_wait_seconds": float("nan")},
        {"data_wait_seconds": -1.0},
    ],
)
def test_a_count_that_is_no_number_ends_no_training(counts: dict[str, object]) -> None:
    """It is left out, and what comes after it counts, of the same counters too."""
    name = f"hpml-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        listener.settimeout(PATIENCE_SECONDS)
        channel = hpml_channel.Channel(name)
        channel.count(**counts)
        listener.recv(9000)
        channel.count(data_wait_seconds=2.5)
        channel.close()
        assert json.loads(listener.recv(9000))["data"]["data_wait_seconds_total"] == 2.5


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    """When the socket is full counters are dropped, events wait, and no call blocks."""
    name = f"hpml/test/{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind("\0" + name)
        channel = hpml_channel.Channel(name)
        began = time.perf_counter()
        for _ in range(2000):
            channel.event("checkpoint")
            channel._step_due = 0.0
            channel.count(steps=1)
        assert time.perf_counter() - began < PATIENCE_SECONDS  # usually a tenth of a second
        assert len(channel._unsent) == hpml_channel.UNSENT_EVENTS
        channel.close()
        assert channel.sent > 0
        assert channel.sent + channel.dropped == 4000


def test_an_event_waits_for_room(reader: ChannelReader) -> None:
    """An event that met a full socket is sent, in its order, as soon as there is room."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as slow:
        slow.bind("\0" + reader.name)
        slow.setblocking(False)
        channel = hpml_channel.Channel(reader.name)
        while not channel._unsent:
            channel.event("checkpoint", number=channel.sent)
        got = [json.loads(slow.recv(9000)) for _ in range(channel.sent)]
        channel.event("stopping")
        channel.close()
        got += [json.loads(slow.recv(9000)) for _ in range(channel.sent - len(got))]
    assert channel.dropped == 0
    assert [one["event"] for one in got[-2:]] == ["checkpoint", "stopping"]
    assert [one["data"]["number"] for one in got[:-1]] == list(range(len(got) - 1))


def test_what_json_cannot_hold_is_translated(reader: ChannelReader) -> None:
    """A diverged loss is null, a scalar tensor its number, an odd object its text or lost."""

    class Scalar:
        def item(self) -> float:
            return 0.25

    class Broken:
        def item(self) -> float:
            raise RuntimeError("device lost")

    with reader:
        channel = hpml_channel.Channel(reader.name)
        data = {"loss": float("nan"), "rate": float("-inf"), "tensor": Scalar(), "path": Path("a")}
        channel.event("evaluation", **data)
        channel.event("evaluation", loss=Broken())
        channel.event("evaluation", note="x" * MAX_DATAGRAM_BYTES)
        channel.result(test_loss=float("nan"), steps_to_loss=None)
        channel.close()
    event, result = written(reader)
    assert event.data == {"loss": None, "rate": None, "tensor": 0.25, "path": "a"}
    assert result.data == {"test_loss": "NaN", "steps_to_loss": None, "final": True}
    assert channel.dropped == 2


def test_a_rank_is_asked_to_stop(reader: ChannelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's request reaches a rank that has only joined; once seen, it stays."""
    monkeypatch.setenv("HPML_CHANNEL", reader.name)
    monkeypatch.setenv("RANK", "3")
    early = hpml_channel.Channel.from_env()
    assert not early.stop_requested()
    early.close()
    with reader:
        channel = hpml_channel.Channel.from_env()
        eventually(reader.peers.by_pid)
        assert [peer.rank for peer in reader.peers.by_pid().values()] == [3]
        assert not channel.stop_requested()
        reader.ask_to_stop("time_limit")
        assert channel.stop_requested()
    channel.close()
    assert channel.stop_requested()
    assert (reader.refused, written(reader)) == (0, [])


@pytest.mark.parametrize(
    ("sender", "datagram", "stops"),
    [
        ("agent", b'{"v":1,"stop":"hang"}', True),
        ("stranger", b'{"v":1,"stop":"hang"}', False),
        ("nameless", b'{"v":1,"stop":"hang"}', False),
        ("agent", b'{"v":1}', False),
        ("agent", b"\xff", False),
        ("agent", b"[1]", False),
        ("agent", b"[" * 5000, False),
    ],
)
def test_only_the_agent_stops_a_rank(sender: str, datagram: bytes, stops: bool) -> None:
    """Any user of the node can send to an abstract socket, but not from the agent's address."""
    name = f"hpml/test/{uuid.uuid4().hex}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        agent.bind("\0" + name)
        if sender == "stranger":
            other.bind("\0x" + name)
        channel = hpml_channel.Channel(name)
        channel.event("rendezvous")
        _, address = agent.recvfrom(9000)
        (agent if sender == "agent" else other).sendto(datagram, address)
        assert channel.stop_requested() is stops
        assert channel.stop_requested() is stops
        channel.close()


# A rank that hangs, in its own thread, while the agent asks where.
HANGS = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from hpml_channel import Channel
channel = Channel.from_env()
def stuck_in_all_reduce():
    time.sleep(600)
threading.Thread(target=stuck_in_all_reduce, daemon=True).start()
stuck_in_all_reduce()
"""


def test_a_signal_writes_the_stacks(reader: ChannelReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all threads, to the descriptor that the rank named; the rank is not ended by it."""
    monkeypatch.setenv("HPML_CHANNEL", reader.name)
    with reader, subprocess.Popen([sys.executable, "-c", HANGS, str(JOBS)]) as rank:
        try:
            eventually(reader.peers.by_pid)
            peer = reader.peers.by_pid()[rank.pid]
            assert peer.stacks_signal
            file = Path(f"/proc/{rank.pid}/fd/{peer.stacks_fd}")

            def stacks() -> bool:
                os.kill(rank.pid, peer.stacks_signal)
                return file.read_text().count("in stuck_in_all_reduce") >= 2

            eventually(stacks)
            assert rank.poll() is None
        finally:
            rank.kill()


def test_the_counters_of_a_warm_up_are_sent_at_its_end(reader: ChannelReader) -> None:
    """None earlier, but none is lost, and a warm-up that the training does not outlast is sent."""
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.event("warm-up", steps=3)
        for _ in range(4):
            channel.count(steps=1)
        channel.event("warm-up", steps=9)
        channel.count(steps=1)
        channel.event("warm-up", steps="many")
        channel.close()
    totals = [one.data["steps_total"] for one in written(reader) if one.event == "step"]
    assert totals in ([3, 4, 5], [3, 5])


MALFORMED = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"[" * 8000,
    b'{"v":1,"rank":' + b"9" * 5000 + b"}",
    message(v=2),
    message(type="other"),
    message(event="ended"),
    message(event="queued"),
    message(event=["step"]),
    message(rank=-1),
    message(rank=True),
    message(rank="0"),
    message(rank=None),
    message(rank=1 << 40),
    message(data=[]),
    message(data={"n": 1 << 70}),
    message(data={"a": {"b": {"c": {"d": {"e": 1}}}}}),
    message(data={"note": "x" * MAX_DATAGRAM_BYTES}),
]


def test_malformed_datagrams_are_refused_and_counted(reader: ChannelReader) -> None:
    """Only events of ranks reach the file, also those around bad datagrams."""
    with reader:
        send(reader.name, message(), *MALFORMED, message(rank=1))
    assert [event.rank for event in written(reader)] == [0, 1]
    assert (reader.received, reader.refused) == (len(MALFORMED) + 2, len(MALFORMED))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {"v": st.just(1), "type": st.sampled_from(["event", "result"])},
        optional={
            "event": st.sampled_from(RANK_EVENTS) | json_values,
            "rank": st.integers(0, 9) | json_values,
            "time": json_values,
            "data": st.dictionaries(st.text(max_size=5), json_values, max_size=3) | json_values,
        },
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_datagram_is_refused_or_one_line_of_strict_json(datagram: bytes) -> None:
    """Whatever comes, it is a ValueError or an event that every reader of the file understands."""
    try:
        event = event_of(parse(datagram), node="n1", now=1000.0)
    except ValueError:
        return
    assert event.event in RANK_EVENTS
    line = event.to_json()
    assert len(line.splitlines()) == 1
    assert line.encode("utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(line, parse_constant=refuse)["time"] >= 0


@pytest.mark.parametrize(("sent", "kept"), [(990.0, 990.0), (5e9, 1000.0), ("x", 1000.0)])
def test_a_time_far_off_is_replaced(sent: object, kept: float) -> None:
    """The sender's time counts unless it cannot be right."""
    assert event_of(parse(message(time=sent)), node="n", now=1000.0).time == kept


def test_another_user_is_refused(reader: ChannelReader) -> None:
    """Abstract sockets have no permissions: the kernel's credentials decide."""
    if os.getuid() != 0:
        pytest.skip("needs root to send as another user")
    code = (
        "import os, socket, sys; os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]));"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
        "s.sendto(sys.argv[3].encode(), chr(0) + sys.argv[2])"
    )
    with reader:
        arguments = [str(NOBODY), reader.name, message(rank=7).decode()]
        subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, timeout=PATIENCE_SECONDS
        )
        send(reader.name, message(rank=1))
    assert [event.rank for event in written(reader)] == [1]
    assert reader.refused == 1


def test_descriptors_that_come_along_are_not_kept(reader: ChannelReader) -> None:
    """A sender cannot fill the agent's table of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    with reader:
        fds = array.array("i", [0] * 100)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for _ in range(5):
                sender.sendmsg([message()], ancillary, 0, "\0" + reader.name)
        eventually(lambda: written(reader))  # on disk while the training continues
        assert len(os.listdir("/proc/self/fd")) < before + 20
    assert reader.received == 5


@pytest.mark.parametrize(
    ("flood", "per_second"),
    [(["step"], 1), (["checkpoint"], 50), (["warm-up", "step"], 101)],  # a warm-up has its step
)
def test_a_flood_is_bounded(reader: ChannelReader, flood: list[str], per_second: int) -> None:
    """Of a rank that reports at every step most is left out, and none of another's or the last."""
    began = time.monotonic()
    with reader:
        send(reader.name, *[message(event=event) for event in flood] * 2000)
        send(reader.name, message(rank=1), message(event="step", data={"steps_total": 7}))
    lines = written(reader)
    assert len(lines) <= per_second * (time.monotonic() - began + 2) + 3
    assert [line.rank for line in lines].count(1) == 1
    assert [line for line in lines if line.event == "step"][-1].data == {"steps_total": 7}
    assert reader.superseded + len(lines) == reader.received == 2000 * len(flood) + 2


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_week_stays_small(tmp_path: Path, ranks: int) -> None:
    """Under 10 MB, whatever else ranks report, and never far behind; the ends are all there."""
    file = tmp_path / "n1.jsonl"
    reader = record_training(file, ranks=ranks, chatter=["evaluation"])
    assert file.stat().st_size < 10e6
    assert (reader.refused, reader.write_errors) == (0, 0)
    found = list(feed.read(file))
    assert reader.superseded + len(found) == reader.received
    for rank in range(ranks):
        mine = [event for event in found if event.rank == rank]
        assert [event.event for event in mine][:3] == ["rendezvous", "warm-up", "step"]
        steps = [event for event in mine if event.event == "step"]
        times = [event.time for event in steps]
        assert (times[0], times[-1]) == (1, WEEK_SECONDS)
        assert steps[-1].data == counters(rank, WEEK_SECONDS)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        near = [min(0.02 * later, 600) + 4 * pause_after(later) for later in times[1:]]
        # The reader's thread may now and then miss some of the simulated time.
        assert sum(gap <= most for gap, most in zip(gaps, near, strict=True)) >= 0.9 * len(gaps)
        assert max(gaps) <= 10 * 600
    (result,) = [event for event in found if event.data.get("final")]
    assert result.data == {"final": True, "test_accuracy": 0.97}


def test_a_rank_that_starts_again_leaves_its_last_count(reader: ChannelReader) -> None:
    """Its counters begin anew: its progress is written before it joins again."""
    numbers = [*range(1, 9), 0, 1, 2, 3]
    names = ["step" if number else "rendezvous" for number in numbers]
    with reader:
        for name, number in zip(names, numbers, strict=True):
            send(reader.name, message(event=name, data={"steps_total": number}))
    counted = [one.data["steps_total"] for one in written(reader)]
    assert counted[counted.index(0) - 1] == 8
    assert counted[-1] == 3


def test_stop_writes_what_is_queued(reader: ChannelReader) -> None:
    """What was sent before stop() is in the file after it; a second stop is harmless."""
    reader.start()
    send(reader.name, *[message(rank=rank, event="step") for rank in range(8)])
    reader.stop()
    reader.stop()
    assert {event.rank for event in written(reader)} == set(range(8))
    assert not [one for one in threading.enumerate() if one.name == "hpml-channel"]


def test_a_directory_that_cannot_be_written_loses_nothing(reader: ChannelReader) -> None:
    """Events are kept while the file cannot be written, and written when it can."""
    reader._file.parent.mkdir()
    reader._file.mkdir()
    with reader:
        send(reader.name, message())
        eventually(lambda: reader.write_errors)
        reader._file.rmdir()
    assert [event.event for event in written(reader)] == ["checkpoint"]


def test_a_taken_name_is_an_error_with_a_hint(reader: ChannelReader) -> None:
    """Two agents of one attempt on one node: the second reports it."""
    second = ChannelReader(reader.name, reader._file, "n1")
    with reader, pytest.raises(HpmlError) as caught:
        second.start()
    assert "agent" in caught.value.hint
    second.stop()


@pytest.mark.parametrize("name", ["", "x" * 108, "a\0b"])
def test_a_name_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    """An unusable name is found when the reader is made."""
    with pytest.raises(InputError) as caught:
        ChannelReader(name, tmp_path / "x", "n1")
    assert caught.value.field == "channel"


# What an environment can hold: any bytes but NUL, as Python decodes them.
words = st.binary(max_size=150).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
places = st.tuples(words, words, words)


def name_of(place: tuple[str, str, str]) -> str:
    """The name for (attempt's directory, node, job key)."""
    attempt, node, key = place
    return attempt_channel({"SLURMD_NODENAME": node, "HPML_JOB_KEY": key or "k"}, attempt)


@given(places, places)
def test_names_fit_and_differ(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Every name is a usable one, repeatable, and no two jobs, attempts or nodes share it."""
    name = name_of(one)
    assert 0 < len(name.encode("ascii")) <= MAX_NAME_BYTES
    assert name == name_of(one)
    same = (one[:2], one[2] or "k") == (other[:2], other[2] or "k")
    assert (name == name_of(other)) == same


def test_a_link_to_a_page_about_the_run(reader: ChannelReader) -> None:
    """Its name and address become an event."""
    with reader:
        channel = hpml_channel.Channel(reader.name)
        channel.event("link", name="W&B", url="https://wandb.ai/ada/fit/runs/1")
        channel.close()
    (link,) = [event for event in written(reader) if event.event == "link"]
    assert link.data == {"name": "W&B", "url": "https://wandb.ai/ada/fit/runs/1"}
