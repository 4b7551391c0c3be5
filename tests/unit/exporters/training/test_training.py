"""Training feeds as the exporter takes them: real sockets, real processes, real credentials."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.training.collector import STEP_BOUNDS_SECONDS, Training, make
from hpml_exporters.options import Context

from hpml_orchestrator.node.feed import Feed
from tests.patience import eventually
from tests.unit.exporters.collectors.reading import Series, context, post, sampled
from training_jobs import hpml_channel

NOBODY = 65534
JOB = ("7",)


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory that stands for /run/hpml, with a path short enough for sockets."""
    path = Path("/tmp") / f"hpml-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(run: Path) -> Iterator[tuple[Context, Training]]:
    """The collector of a whole node, and the context whose board the test fills."""
    told = context(run=run)
    made = make(told)
    yield told, made
    made.close()


@pytest.fixture
def inherited() -> Iterator[tuple[Feed, Training]]:
    """An agent's feed, and the collector of its own job at the other end of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    feed = Feed(clock=lambda: 0.0)
    feed.add_socket(ours)
    made = make(context(job=JobFacts("7"), feed_fd=theirs.fileno()))
    yield feed, made
    feed.close()
    made.close()
    theirs.close()


def counters(samples: float, steps: float, **more: object) -> dict[str, Any]:
    return {"samples_total": samples, "steps_total": steps, **more}


def shown(collector: Training, now: float = 0.0) -> dict[Series, Any]:
    """The series of jobs."""
    found = sampled(collector, now)
    return {series: value for series, value in found.items() if "refused" not in series[0]}


def refused(collector: Training, now: float = 0.0) -> dict[str, Any]:
    """What was not taken, by reason."""
    found = sampled(collector, now)
    return {series[1]: value for series, value in found.items() if "refused" in series[0]}


def test_bounds_are_those_of_the_channel() -> None:
    """Else a step would be shown in another bucket than it was counted in."""
    assert STEP_BOUNDS_SECONDS == hpml_channel.STEP_BOUNDS_SECONDS


def test_a_job_s_ranks_are_added_up(inherited: tuple[Feed, Training]) -> None:
    """Counters are sums, gauges means, durations one histogram, in cumulative buckets."""
    feed, collector = inherited
    one: dict[str, Any] = {
        "data_wait_seconds_total": 1.0,
        "step_seconds_total": 4.0,
        "comm_seconds_total": 0.5,
    }
    feed.take(
        0, 11, counters(320, 10, **one, loss=0.5, accuracy=0.8, comm_method="hook"), {"6": 10}
    )
    feed.take(1, 12, counters(640, 20, **one, loss=1.5, comm_method="hook"), {"4": 19, "10": 1})
    feed.tell_binding(1, 1)
    feed.act(0.0)
    assert shown(collector) == {
        ("hpml_train_samples_total", *JOB): 960,
        ("hpml_train_steps_total", *JOB): 30,
        ("hpml_train_data_wait_seconds_total", *JOB): 2.0,
        ("hpml_train_comm_seconds_total", *JOB, "hook"): 1.0,
        **{
            ("hpml_train_step_duration_seconds_bucket", *JOB, bound): count
            for bound, count in zip(
                "0.001 0.003 0.01 0.03 0.1 0.3 1.0 3.0 10.0 60.0 +Inf".split(),
                (0, 0, 0, 0, 19, 19, 29, 29, 29, 29, 30),
                strict=True,
            )
        },
        ("hpml_train_step_duration_seconds_count", *JOB): 30,
        ("hpml_train_step_duration_seconds_sum", *JOB): 8.0,
        ("hpml_train_ranks", *JOB): 2,
        ("hpml_train_loss", *JOB): 1.0,
        ("hpml_train_accuracy_ratio", *JOB): 0.8,
        ("hpml_rank_binding_ok", *JOB): 0.0,
        ("hpml_rank_binding_wrong_ranks", *JOB): 1,
    }


def test_what_is_not_told_is_no_series(inherited: tuple[Feed, Training]) -> None:
    """An old copy of hpml_channel.py sends no durations; communication needs its method."""
    feed, collector = inherited
    feed.take(0, 11, counters(1, 1, comm_seconds_total=5.0))
    feed.act(0.0)
    names = {series[0] for series in shown(collector)}
    assert names == {
        "hpml_train_samples_total",
        "hpml_train_steps_total",
        "hpml_train_data_wait_seconds_total",
        "hpml_train_ranks",
    }


def test_the_spread_between_ranks(inherited: tuple[Feed, Training]) -> None:
    """Fastest and slowest, over the last minute alone: a slow start is forgotten."""
    feed, collector = inherited
    names = [("hpml_train_rank_step_duration_seconds", *JOB, one) for one in ("fastest", "slowest")]
    spread = []
    for second in range(0, 100, 5):
        feed._clock = lambda second=second: float(second)
        steps = 1 + 10 * second
        for rank, seconds in enumerate((0.1, 0.1, 0.125)):
            taken = 50.0 + seconds * steps  # the first step took 50 seconds
            feed.take(rank, rank, counters(steps, steps, step_seconds_total=taken))
        feed.act(float(second))
        found = shown(collector, float(second))
        spread.append([found.get(name) for name in names])
    assert spread[0] == [None, None]
    assert spread[-1] == [pytest.approx(0.1), pytest.approx(0.125)]


def test_the_rank_that_waits_for_its_data(inherited: tuple[Feed, Training]) -> None:
    """Its steps last as long as the others', who wait for it: its wait for data tells.

    Of the last minute alone: it was rank 5 first, and all of them wait for their first batch.
    """
    feed, collector = inherited
    wait = [("hpml_train_rank_data_wait_seconds", *JOB, one) for one in ("shortest", "longest")]
    waited = dict.fromkeys((4, 5, 6), 30.0)
    seen = []
    for second in range(0, 200, 5):
        slow = 5 if second < 100 else 6
        for rank in waited:
            waited[rank] += 10 * (0.25 if rank == slow else 0.0625) if second else 0
            steps = 1 + 2 * second
            data = {"data_wait_seconds_total": waited[rank], "step_seconds_total": 0.5 * steps}
            feed.take(rank, rank, counters(steps, steps, **data))
        feed._clock = lambda second=second: float(second)
        feed.act(float(second))
        found = shown(collector, float(second))
        ranks = [s[2] for s in found if s[0] == "hpml_train_longest_data_wait_info"]
        steps_last = [v for s, v in found.items() if s[0].endswith("rank_step_duration_seconds")]
        seen.append((ranks, [found.get(name) for name in wait], steps_last))
    assert seen[0] == ([], [None, None], [])
    assert seen[19] == (["5"], [0.0625, 0.25], [0.5, 0.5])
    assert seen[-1] == (["6"], [0.0625, 0.25], [0.5, 0.5])


def test_of_waits_alike_the_lowest_rank_is_named(inherited: tuple[Feed, Training]) -> None:
    """Else the series would change at every sample; and what was never measured is not shown."""
    feed, collector = inherited
    for steps in (1, 2):
        for rank in (9, 8, 10):
            feed.take(rank, rank, counters(steps, steps, data_wait_seconds_total=steps))
        feed.flush()
        found = shown(collector)
    assert [s[2] for s in found if s[0] == "hpml_train_longest_data_wait_info"] == ["8"]


def test_counters_never_fall(inherited: tuple[Feed, Training]) -> None:
    """A rank starts again, then the agent: what was done before stays in the sums."""
    feed, collector = inherited
    series = ("hpml_train_samples_total", *JOB)
    seen = []
    for pid, samples in ((11, 100), (11, 200), (12, 10), (12, 20)):
        feed.take(0, pid, counters(samples, samples), {"1": samples})
        feed.flush()
        seen.append(shown(collector)[series])
    assert seen == [100, 200, 210, 220]
    again = Feed(clock=lambda: 0.0)  # a requeued job's agent: it knows of nothing
    again._inherited, feed._inherited = feed._inherited, []
    again.take(0, 13, counters(5, 5), {"1": 5})
    again.flush()
    found = shown(collector)
    assert found[series] == 225
    assert found["hpml_train_step_duration_seconds_count", *JOB] == 225
    again.close()


def test_a_silent_agent_s_series_end(inherited: tuple[Feed, Training]) -> None:
    """After a minute; they go on with their sums when it speaks again."""
    feed, collector = inherited
    feed.take(0, 11, counters(100, 10))
    feed.act(0.0)
    assert shown(collector, 0.0)
    assert shown(collector, 60.0)
    assert shown(collector, 61.0) == {}
    feed.take(0, 11, counters(101, 11))
    feed.flush()
    assert shown(collector, 100.0)["hpml_train_samples_total", *JOB] == 101


def test_a_rank_that_says_no_more(inherited: tuple[Feed, Training]) -> None:
    """Its agent goes on: the rank is not counted any more, and its old loss is no news."""
    feed, collector = inherited
    feed.take(0, 11, counters(100, 10, loss=0.5))
    for now in range(0, 2000, 10):
        feed._clock = lambda now=now: float(now)
        feed._beat_at = feed._send_at = 0.0
        feed.act(float(now))
        found = shown(collector, float(now))
        assert found["hpml_train_samples_total", *JOB] == 100
        assert found["hpml_train_ranks", *JOB] == int(now <= 60)
        assert (("hpml_train_loss", *JOB) in found) == (now <= 600)
    (agent,) = collector._jobs["7"]._agents.values()
    assert len(agent.ranks[0].steps) < 10, "it fills no memory either"


def test_methods_have_a_bound(inherited: tuple[Feed, Training]) -> None:
    """A label that a training makes up can have few values."""
    feed, collector = inherited
    for number in range(1, 50):
        data = counters(number, number, comm_seconds_total=number, comm_method=f"m{number}")
        feed.take(0, 11, data)
        feed.flush()
        found = shown(collector)
    methods = {s[2]: v for s, v in found.items() if s[0] == "hpml_train_comm_seconds_total"}
    assert methods == {"m1": 1, "m2": 1, "m3": 1, "m4": 1, "other": 45}


def test_a_job_has_few_series(inherited: tuple[Feed, Training]) -> None:
    """Not one more with 64 ranks than with one."""
    feed, collector = inherited
    more: dict[str, Any] = {"comm_seconds_total": 1, "comm_method": "hook", "mfu": 1}
    for rank in range(64):
        data = counters(1, 1, **more, data_wait_seconds_total=1, loss=1, accuracy=1)
        feed.take(rank, rank, data, {"1": 1})
        feed.tell_binding(64, 0)
    feed.act(0.0)
    shown(collector)
    for rank in range(64):
        more = {**data, **counters(2, 2, comm_seconds_total=2, step_seconds_total=1)}
        feed.take(rank, rank, more, {"1": 2})
    feed.flush()
    found = shown(collector, 5.0)
    assert len(found) == 28
    assert found["hpml_train_ranks", *JOB] == 64


def test_without_a_feed_nothing_is_here() -> None:
    """An exporter of a job whose agent gave it no socket, or something else."""
    with pytest.raises(NotHereError):
        make(context(job=JobFacts("7")))
    with open(os.devnull) as stream:
        told = context(job=JobFacts("7"), feed_fd=stream.fileno())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NotHereError):
            make(told)
        assert len(os.listdir("/proc/self/fd")) == before


# A process of a job: sends what its lines say to the exporter's socket, as another user if told.
SENDER = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
if uid:
    os.setgid(uid)
    os.setuid(uid)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(path)
print("connected", flush=True)
for line in sys.stdin:
    text, times, flags = eval(line)
    done = 0
    for _ in range(times):
        try:
            s.send(text, flags)
        except BlockingIOError:
            continue
        except OSError:
            break
        done += 1
    print(done, flush=True)
"""


class Agent:
    """A process that speaks for a job."""

    def __init__(self, run: Path, uid: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(run / "exporter.sock"), str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "connected\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, text: bytes, times: int = 1, flags: int = 0) -> int:
        """Send a message so many times, and return how many of them were taken."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{(text, times, int(flags))!r}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def agent(run: Path) -> Iterator[Callable[..., Agent]]:
    """Start processes of jobs, ended at the end."""
    made: list[Agent] = []

    def start(uid: int = 0) -> Agent:
        made.append(Agent(run, uid))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def message(samples: int, pid: int = 1) -> bytes:
    rank = {"r": 0, "age": 0, "t": [samples, 1, 0, 0, 0], "b": None, "m": None, "g": {}}
    return b"hpml-feed 1 0\n" + json.dumps({"pid": pid, "binding": None, "ranks": [rank]}).encode()


def test_a_job_is_known_by_its_process(
    node: tuple[Context, Training], agent: Callable[..., Agent]
) -> None:
    """Users of all jobs may speak, each for the own job, whatever the messages say."""
    told, collector = node
    ours, theirs = agent(), agent(NOBODY if os.getuid() == 0 else 0)
    post(told.jobs, {"7": (0, [ours.pid]), "8": (NOBODY, [theirs.pid])})
    ours.send(message(100, pid=theirs.pid))
    theirs.send(message(30, pid=ours.pid))
    found = shown(collector)
    assert found["hpml_train_samples_total", "7"] == 100
    assert found["hpml_train_samples_total", "8"] == 30
    post(told.jobs, {"7": (0, [ours.pid])})
    assert {series[1] for series in shown(collector)} == {"7"}, "job 8 has ended"
    assert theirs.send(message(40), flags=socket.MSG_NOSIGNAL) == 0


def test_a_job_that_just_began(node: tuple[Context, Training], agent: Callable[..., Agent]) -> None:
    """Its agent connects before the board knows it: what it says is taken once it does."""
    told, collector = node
    ours = agent()
    ours.send(message(100))
    assert shown(collector) == {}, "nobody is known yet"
    post(told.jobs, {})
    assert shown(collector) == {}
    post(told.jobs, {"7": (0, [ours.pid])})
    assert shown(collector)["hpml_train_samples_total", "7"] == 100
    assert refused(collector) == {"stranger": 0, "limit": 0, "malformed": 0}


def test_a_stranger_is_not_heard(
    node: tuple[Context, Training], agent: Callable[..., Agent]
) -> None:
    """A process of no job is refused after some samples, and counted."""
    told, collector = node
    post(told.jobs, {"7": (0, [1])})
    stranger = agent()
    stranger.send(message(100))
    for _ in range(4):
        assert shown(collector) == {}
    assert refused(collector)["stranger"] == 1
    assert stranger.send(message(100), flags=socket.MSG_NOSIGNAL) == 0


def test_a_job_s_connections_have_a_bound(node: tuple[Context, Training], run: Path) -> None:
    """A user who opens a thousand takes neither all descriptors nor another job's place."""
    told, collector = node
    post(told.jobs, {"7": (0, [os.getpid()])})
    opened = []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.connect(str(run / "exporter.sock"))
        opened.append(one)
    assert refused(collector) == {"stranger": 0, "limit": 84, "malformed": 0}
    assert len(os.listdir("/proc/self/fd")) == before + 100 + 16
    for one in opened:
        one.close()
    sampled(collector)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_flood_is_the_flooder_s_own(
    node: tuple[Context, Training], agent: Callable[..., Agent]
) -> None:
    """100,000 messages of one user: another job's are all there, and each sample reads few."""
    told, collector = node
    flooder, ours = agent(NOBODY if os.getuid() == 0 else 0), agent()
    post(told.jobs, {"7": (0, [ours.pid]), "8": (NOBODY, [flooder.pid])})
    sampled(collector)
    for number in range(1, 11):
        sent = flooder.send(b"garbage" if number % 2 else message(1), 10_000, socket.MSG_DONTWAIT)
        assert sent < 10_000, "its own queue is full"
        assert ours.send(message(number), 1, socket.MSG_DONTWAIT) == 1
        assert shown(collector)["hpml_train_samples_total", "7"] == number
        if number == 1:
            assert collector._refused.malformed == 128 < sent, "the rest is for the next sample"
    assert 0 < refused(collector)["malformed"] <= 128 * 11
    assert shown(collector)["hpml_train_samples_total", "8"] == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_strangers_who_connect_keep_no_job_out(
    node: tuple[Context, Training], run: Path, agent: Callable[..., Agent]
) -> None:
    """More than any queue holds, between two samples: each finds room, and so does a job."""
    told, collector = node
    post(told.jobs, {})
    sampled(collector)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.connect(str(run / "exporter.sock"))  # it waits for room: for ever, were none made
    ours = agent(NOBODY)
    ours.send(message(100))
    assert len(os.listdir("/proc/self/fd")) <= before + 16 + 1 + 3, "Popen's pipes are two more"
    post(told.jobs, {"7": (NOBODY, [ours.pid])})
    samples = ("hpml_train_samples_total", "7")
    eventually(lambda: shown(collector).get(samples) == 100, "behind the last of them")
    for _ in range(4):
        found = refused(collector)
    assert found == {"stranger": 2000, "limit": 0, "malformed": 0}


def test_an_exporter_that_was_killed_leaves_nothing_in_the_way(run: Path) -> None:
    """The next one takes the place of its socket, agents find it, and sums go on."""
    code = (
        "import sys, time; sys.path[:0] = sys.argv[2].split(':');"
        "from tests.unit.exporters.collectors.reading import context;"
        "from hpml_exporters.training.collector import make;"
        "kept = make(context(run=sys.argv[1])); print('up', flush=True); time.sleep(600)"
    )
    clock = [0.0]
    feed = Feed([str(run / "exporter.sock")], clock=lambda: clock[0])
    feed.take(0, 11, counters(100, 10))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run), ":".join(sys.path)], stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        feed.act(clock[0])
        assert feed.sent == 1
        with pytest.raises(NotHereError, match="another exporter"):
            make(context(run=run))
        first.send_signal(signal.SIGKILL)
    assert (run / "exporter.sock").is_socket()
    told = context(run=run)
    collector = make(told)
    post(told.jobs, {"7": (os.getuid(), [os.getpid()])})
    for _ in range(25):
        clock[0] += 1
        feed.take(0, 11, counters(100 + clock[0], 10))
        feed.act(clock[0])
    assert shown(collector, clock[0])["hpml_train_samples_total", "7"] == 125
    feed.close()
    collector.close()
    assert list(run.iterdir()) == [], "the socket's file goes with the exporter"


def test_an_exporter_with_a_full_queue_still_listens(run: Path) -> None:
    """So many agents knock that the next one finds no room: the place is taken all the same."""
    told = context(run=run)
    collector = make(told)
    with contextlib.ExitStack() as knocking:
        for _ in range(1000):
            one = knocking.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            one.setblocking(False)
            try:
                one.connect(str(run / "exporter.sock"))
            except BlockingIOError:
                break
        else:
            pytest.fail("the queue has no end")
        with pytest.raises(NotHereError, match="another exporter"):
            make(context(run=run))
    collector.close()


def test_the_end_of_an_old_exporter_leaves_the_new_one_s_socket(run: Path) -> None:
    """Closed late, it removes nothing that is not its own."""
    old = make(context(run=run))
    (run / "exporter.sock").unlink()
    new = make(context(run=run))
    old.close()
    assert (run / "exporter.sock").is_socket()
    new.close()


def test_the_socket_is_open_to_all_users(run: Path) -> None:
    """Whatever the umask, and so is a directory that had to be made."""
    before = os.umask(0o077)
    try:
        collector = make(context(run=run / "new"))
    finally:
        os.umask(before)
    assert (run / "new").stat().st_mode & 0o777 == 0o755
    assert (run / "new" / "exporter.sock").stat().st_mode & 0o777 == 0o666
    collector.close()


def test_where_no_socket_may_be_made(run: Path) -> None:
    """A user's own exporter has no /run/hpml: no trainings, and no failure."""
    with pytest.raises(NotHereError):
        make(context(run=run / "none" / "hpml"))
    if os.getuid() == 0:
        code = (
            "import os, sys; sys.path[:0] = sys.argv[2].split(':');"
            "from tests.unit.exporters.collectors.reading import context;"
            "from hpml_exporters.core.collector import NotHereError;"
            "from hpml_exporters.training.collector import make\n"
            "os.setuid(65534)\ntry:\n make(context(run=sys.argv[1]))\n"
            "except NotHereError as error:\n print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(run), ":".join(sys.path)],
            check=True,
            capture_output=True,
            text=True,
        )
        assert "Permission denied" in done.stdout


def test_a_clock_far_off_changes_nothing(node: tuple[Context, Training]) -> None:
    """Agents and exporter each have their own monotonic clock, and times are only ages."""
    told, collector = node
    post(told.jobs, {"7": (os.getuid(), [os.getpid()])})
    feed = Feed([collector._source._path], clock=lambda: 1e9)  # type: ignore[union-attr]
    feed.take(0, 11, counters(100, 10))
    feed.act(1e9)
    assert shown(collector, 5.0)["hpml_train_ranks", "7"] == 1
    feed._clock = lambda: 5.0  # an agent's clock that jumps back
    feed.take(0, 11, counters(110, 11))
    feed.flush()
    found = shown(collector, 6.0)
    assert (found["hpml_train_ranks", "7"], found["hpml_train_samples_total", "7"]) == (1, 110)
    feed.close()
