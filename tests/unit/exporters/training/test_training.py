"""Training feeds as the exporter takes them: real sockets, real processes, real credentials."""

from __future__ import annotations

import os
import runpy
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
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.options import Context
from hpml_exporters.training.collector import OF_PARTS, TrainingCollector, make

from hpml_orchestrator import assets
from hpml_orchestrator.node.channel import Feed
from hpml_orchestrator.records.feed import STEP_BOUNDS_SECONDS, RankFigures, encode
from tests.patience import eventually
from tests.unit.exporters.collectors.reading import Series, context, post, sampled

NOBODY = 65534
JOB = ("c", "7")
SAMPLES = ("hpml_train_samples_total", *JOB)


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory used as /run/hpml, with a path short enough for sockets."""
    path = Path("/tmp") / f"hpml-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(run: Path) -> Iterator[tuple[Context, TrainingCollector]]:
    """The collector of a whole node, and the context whose board the test fills."""
    told = context(run=run, cluster="c")
    made = make(told)
    yield told, made
    made.close()


class Training:
    """Ranks whose agent passes on their messages, and the collector of their job."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.now = 0.0
        self.feed = Feed(clock=lambda: self.now)
        self.feed.add_socket(ours)
        job = JobFacts("7")
        self.collector = make(context(cluster="c", job=job, feed_fd=theirs.fileno()))
        self.ours, self.theirs = ours, theirs

    def say(
        self, rank: int, samples: float, steps: float, buckets: Any = None, **more: Any
    ) -> None:
        """Have a rank report its counters, `data_wait_seconds=…`, and gauges."""
        totals = {f"{name}_total": value for name, value in more.items() if "seconds" in name}
        gauges = {name: value for name, value in more.items() if "seconds" not in name}
        counted = {"samples_total": samples, "steps_total": steps}
        self.feed.take(rank, rank + 10, {**counted, **totals, **gauges}, buckets)

    def shown(self, now: float | None = None) -> dict[Series, Any]:
        """The job's series, once the agent has sent what is new."""
        self.feed.flush()
        return shown(self.collector, self.now if now is None else now)

    def close(self) -> None:
        self.feed.close()
        self.collector.close()
        self.theirs.close()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def shown(collector: TrainingCollector, now: float = 0.0) -> dict[Series, Any]:
    """The series of jobs."""
    found = sampled(collector, now)
    return {series: value for series, value in found.items() if "refused" not in series[0]}


def refused(collector: TrainingCollector, now: float = 0.0) -> dict[str, Any]:
    """What was not taken, by reason."""
    found = sampled(collector, now)
    return {series[1]: value for series, value in found.items() if "refused" in series[0]}


def test_bounds_are_those_of_the_channel() -> None:
    """Else a step would be shown in another bucket than it was counted in."""
    channel = runpy.run_path(str(assets.path("training_jobs") / "hpml_channel.py"))
    assert channel["STEP_BOUNDS_SECONDS"] == STEP_BOUNDS_SECONDS


def test_a_job_s_ranks_are_added_up(training: Training) -> None:
    """Counters are sums, gauges means, durations one histogram, in cumulative buckets."""
    one: dict[str, Any] = {"data_wait_seconds": 1.0, "step_seconds": 4.0, "comm_seconds": 0.5}
    one |= {"transfer_seconds": 0.25, "save_seconds": 1.5, "evaluation_seconds": 1.0}
    training.say(0, 320, 10, {"6": 10}, **one, loss=0.5, accuracy=0.8, comm_method="hook")
    training.say(1, 640, 20, {"4": 19, "10": 1}, **one, loss=1.5, comm_method="hook")
    training.feed.set_binding(1, 1)
    bounds = (*map(str, STEP_BOUNDS_SECONDS), "+Inf")
    counts = (0, 0, 0, 0, 19, 19, 29, 29, 29, 29, 30)
    duration = "hpml_train_step_duration_seconds"
    expected: dict[Series, float] = {
        SAMPLES: 960,
        ("hpml_train_steps_total", *JOB): 30,
        ("hpml_train_data_wait_seconds_total", *JOB): 2.0,
        ("hpml_train_comm_seconds_total", *JOB, "hook"): 1.0,
        ("hpml_train_transfer_seconds_total", *JOB): 0.5,
        ("hpml_train_save_seconds_total", *JOB): 3.0,
        ("hpml_train_evaluation_seconds_total", *JOB): 2.0,
        (f"{duration}_count", *JOB): 30,
        (f"{duration}_sum", *JOB): 8.0,
        ("hpml_train_ranks", *JOB): 2,
        ("hpml_train_loss", *JOB): 1.0,
        ("hpml_train_accuracy_ratio", *JOB): 0.8,
        ("hpml_rank_binding_ok", *JOB): 0.0,
        ("hpml_rank_binding_wrong_ranks", *JOB): 1,
    }
    for bound, count in zip(bounds, counts, strict=True):
        expected[f"{duration}_bucket", *JOB, bound] = count
    assert training.shown() == expected


def test_what_is_not_told_is_no_series(training: Training) -> None:
    """An old copy of hpml_channel.py sends no durations; communication needs its method."""
    training.say(0, 1, 1, comm_seconds=5.0)
    names = {series[0] for series in training.shown()}
    counted = ("samples_total", "steps_total", "data_wait_seconds_total", "ranks")
    assert names == {f"hpml_train_{name}" for name in counted}


def test_the_spread_between_ranks(training: Training) -> None:
    """Of the last minute alone: a slow first batch, and who was slow before, are forgotten.

    Steps of ranks that wait for each other last equally long: the wait for data distinguishes them.
    """
    waited = dict.fromkeys((4, 5, 6), 30.0)
    seen = []
    for second in range(0, 200, 5):
        training.now = float(second)
        slow = 5 if second < 100 else 6
        for rank in waited:
            waited[rank] += 10 * (0.25 if rank == slow else 0.0625) if second else 0
            steps = 1 + 2 * second
            training.say(rank, steps, steps, data_wait_seconds=waited[rank], step_seconds=steps / 2)
        found = training.shown()
        seen.append({key: value for key, value in found.items() if "data_wait" in key[0]})
        wait, step = "hpml_train_rank_data_wait_seconds", "hpml_train_rank_step_duration_seconds"
    del seen[0]["hpml_train_data_wait_seconds_total", *JOB]
    assert seen[0] == {}
    for place, slowest in ((19, "5"), (-1, "6")):
        assert seen[place]["hpml_train_longest_data_wait_info", *JOB, slowest] == 1
        assert seen[place][wait, *JOB, "shortest"] == 0.0625
        assert seen[place][wait, *JOB, "longest"] == 0.25
    assert (found[step, *JOB, "fastest"], found[step, *JOB, "slowest"]) == (0.5, 0.5)
    training.now += 100
    for steps in (500, 501):
        for rank in waited:
            training.say(rank, steps, steps, data_wait_seconds=100.0 + steps)
        found = training.shown()
    named = [series[3] for series in found if series[0] == "hpml_train_longest_data_wait_info"]
    assert named == ["4"], "of waits alike the lowest, else the series would change each time"


def test_the_rank_that_others_wait_for(training: Training) -> None:
    """Waits least of all; of ranks that wait equally long the lowest is named."""
    for slow, named in ((5, "5"), (None, "4")):
        waited = dict.fromkeys((4, 5, 6), 0.0)
        for second in range(0, 200, 5):
            training.now += 5
            for rank in waited:
                waited[rank] += 0.0 if rank == slow else 1.25 if second else 0.0
                steps = 1 + 10 * training.now
                told = {"wait_seconds": waited[rank] + training.now, "step_seconds": steps}
                training.say(rank, steps, steps, **told)
            found = training.shown()
        wait = "hpml_train_rank_wait_seconds"
        shortest, longest = (found[wait, *JOB, which] for which in ("shortest", "longest"))
        assert longest - shortest == pytest.approx(0.025 if slow else 0.0)
        info = "hpml_train_shortest_wait_info"
        assert [series[3] for series in found if series[0] == info] == [named]
    assert found["hpml_train_wait_seconds_total", *JOB] > 0


def figures(samples: float, steps: float, wait: float = 0.0) -> RankFigures:
    return RankFigures(0, 0.0, (samples, steps, wait, *[0.0] * 6), (0,) * 11, "", {})


def test_counters_never_fall(run: Path) -> None:
    """A new agent's ranks begin at zero; one counter that falls does not double the others."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        collector = make(context(cluster="c", job=JobFacts("7"), feed_fd=theirs.fileno()))
        seen = []
        for pid, said in (
            (11, figures(100, 10, 2.0)),
            (11, figures(110, 11, 1.5)),
            (11, figures(120, 12, 2.5)),
            (12, figures(5, 1, 0.5)),
        ):
            ours.send(encode(pid, None, [said])[0])
            found = shown(collector)
            seen.append((found[SAMPLES], found["hpml_train_data_wait_seconds_total", *JOB]))
        assert seen == [(100, 2.0), (110, 2.0), (120, 2.5), (125, 3.0)]
        collector.close()


def test_silence(training: Training) -> None:
    """A job's series end a minute after its agent; a rank's share of them, too, its loss later."""
    training.say(0, 100, 10, loss=0.5)
    for now in range(0, 1000, 20):
        training.now = float(now)
        found = training.shown()
        assert found[SAMPLES] == 100
        assert found["hpml_train_ranks", *JOB] == int(now <= 60)
        assert (("hpml_train_loss", *JOB) in found) == (now <= 600)
    assert shown(training.collector, 1040.0)
    assert shown(training.collector, 1041.0) == {}
    training.now = 1100.0
    training.say(0, 101, 11)
    assert training.shown()[SAMPLES] == 101, "it continues with its sums"


def test_labels_and_series_have_a_bound(training: Training) -> None:
    """Not one more with 64 ranks than with one; of methods, which a training makes up, few."""
    for number in range(1, 20):
        training.say(0, number, number, comm_seconds=number, comm_method=f"m{number}")
        found = training.shown()
    methods = {s[3]: v for s, v in found.items() if s[0] == "hpml_train_comm_seconds_total"}
    assert methods == {"m1": 1, "m2": 1, "m3": 1, "m4": 1, "other": 15}
    for steps in (20, 21):
        for rank in range(64):
            more = {"step_seconds": steps, "data_wait_seconds": 1, "loss": 1, "accuracy": 1}
            more |= dict.fromkeys(OF_PARTS, 1)
            training.say(rank, steps, steps, {"1": steps}, **more, mfu=1)
        training.feed.set_binding(64, 0)
        found = training.shown()
    assert len(found) - len(methods) == 34
    assert found["hpml_train_ranks", *JOB] == 64


BAD = [
    b"garbage",
    b"hpml-feed 2 -\n{}",
    b"hpml-feed 2 0\n[]",
    b"hpml-feed 2 0\n\xff",
    b"hpml-feed 2 0\n" + b"[" * 20000,
    *(
        encode(1, None, [figures(7, 7)])[0].replace(old, new)
        for old, new in (
            (b"[7,", b"[NaN,"),
            (b"[7,", b"[-1,"),
            (b"[7,", b"["),
            (b'"b":[0,', b'"b":['),
            (b'"r":0', b'"r":true'),
            (b'"g":{}', b'"g":{"loss":"x"}'),
            (b'"g":{}', b'"g":{"loss":NaN}'),
            (b'"pid":1', b'"pid":' + b"9" * 5000),
            (b'"ranks"', b'"rank"'),
            (b'"binding":null', b'"binding":[1]'),
            (b"}]}", b"}]}" + b" " * 33000),
        )
    ),
]


@pytest.mark.parametrize("datagram", BAD, ids=range(len(BAD)))
def test_what_is_no_message_is_refused(training: Training, datagram: bytes) -> None:
    """It is counted, and the next message is taken."""
    training.ours.send(datagram)
    assert refused(training.collector)["malformed"] == 1
    training.say(0, 5, 1)
    assert training.shown()[SAMPLES] == 5


def test_without_a_feed_nothing_is_here(tmp_path: Path) -> None:
    """A user's own exporter has no /run/hpml; an agent may give it no socket, or something else."""
    for told in (context(job=JobFacts("7")), context(run=tmp_path / "none" / "hpml")):
        with pytest.raises(NotHereError):
            make(told)
    with open(os.devnull) as stream:
        told = context(job=JobFacts("7"), feed_fd=stream.fileno())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NotHereError):
            make(told)
        assert len(os.listdir("/proc/self/fd")) == before


# A process of a job: sends its input lines to the exporter's socket, as another user if given.
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
        """Send a message repeatedly, and return how many were accepted."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{(text, times, int(flags))!r}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


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
    return encode(pid, None, [figures(samples, 1)])[0]


def test_a_job_is_known_by_its_process(
    node: tuple[Context, TrainingCollector], agent: Callable[..., Agent]
) -> None:
    """Users of all jobs may speak, each for the own job, whatever the messages say.

    A local run of the same number is another one.
    """
    told, collector = node
    ours, theirs = agent(), agent(NOBODY if os.getuid() == 0 else 0)
    post(told.jobs, {"7": (0, [ours.pid]), "local-3fa9c1-7": (NOBODY, [theirs.pid])})
    ours.send(message(100, pid=theirs.pid))
    theirs.send(message(30, pid=ours.pid))
    found = shown(collector)
    assert found["hpml_train_samples_total", *JOB] == 100
    assert found["hpml_train_samples_total", "c", "local-3fa9c1-7"] == 30
    post(told.jobs, {"7": (0, [ours.pid])})
    assert "local-3fa9c1-7" not in {series[2] for series in shown(collector)}, (
        "the local run has ended"
    )
    assert theirs.send(message(40), flags=socket.MSG_NOSIGNAL) == 0


def test_a_job_that_just_began(
    node: tuple[Context, TrainingCollector], agent: Callable[..., Agent]
) -> None:
    """Its agent connects before the board has the job: its messages are accepted afterwards.

    A process that is not part of a job is refused after some samples, and counted.
    """
    told, collector = node
    ours = agent()
    ours.send(message(100))
    assert shown(collector) == {}, "nobody is known yet"
    post(told.jobs, {})
    assert shown(collector) == {}
    post(told.jobs, {"7": (0, [ours.pid])})
    assert shown(collector)["hpml_train_samples_total", *JOB] == 100
    assert refused(collector) == {"stranger": 0, "limit": 0, "malformed": 0}
    stranger = agent()
    stranger.send(message(30))
    for _ in range(4):
        assert {series[2] for series in shown(collector)} == {"7"}
    assert refused(collector)["stranger"] == 1
    assert stranger.send(message(30), flags=socket.MSG_NOSIGNAL) == 0


def test_a_job_s_connections_have_a_bound(
    node: tuple[Context, TrainingCollector], run: Path
) -> None:
    """A user who opens a thousand exhausts neither the descriptors nor another job's share."""
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
    node: tuple[Context, TrainingCollector], agent: Callable[..., Agent]
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
        assert shown(collector)["hpml_train_samples_total", *JOB] == number
        if number == 1:
            assert refused(collector)["malformed"] >= 128, "the rest is for the next sample"
    assert 0 < refused(collector)["malformed"] <= 128 * 11
    assert shown(collector)["hpml_train_samples_total", "c", "8"] == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_strangers_who_connect_keep_no_job_out(
    node: tuple[Context, TrainingCollector], run: Path, agent: Callable[..., Agent]
) -> None:
    """More than any queue holds, between two samples: each finds room, and so does a job."""
    told, collector = node
    post(told.jobs, {})
    sampled(collector)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.connect(str(run / "exporter.sock"))  # it blocks until the exporter reads
    ours = agent(NOBODY)
    ours.send(message(100))
    assert len(os.listdir("/proc/self/fd")) <= before + 16 + 1 + 3, "Popen's pipes are two more"
    post(told.jobs, {"7": (NOBODY, [ours.pid])})
    samples = ("hpml_train_samples_total", *JOB)
    eventually(lambda: shown(collector).get(samples) == 100, "behind the last of them")
    for _ in range(4):
        found = refused(collector)
    assert found == {"stranger": 2000, "limit": 0, "malformed": 0}


def test_an_exporter_that_was_killed_leaves_nothing_in_the_way(run: Path) -> None:
    """The next one replaces its socket, agents find it, and sums continue."""
    code = (
        "import sys, time; sys.path[:0] = sys.argv[2].split(':');"
        "from tests.unit.exporters.collectors.reading import context;"
        "from hpml_exporters.training.collector import make;"
        "kept = make(context(run=sys.argv[1])); print('up', flush=True); time.sleep(600)"
    )
    clock = [0.0]
    feed = Feed([str(run / "exporter.sock")], clock=lambda: clock[0])
    feed.take(0, 11, {"samples_total": 100, "steps_total": 10})
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run), ":".join(sys.path)], stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        feed.act(clock[0])
        assert feed.sent == 1
        with pytest.raises(NotHereError, match="another exporter"):
            make(context(run=run, cluster="c"))
        first.send_signal(signal.SIGKILL)
    assert (run / "exporter.sock").is_socket()
    told = context(run=run, cluster="c")
    collector = make(told)
    post(told.jobs, {"7": (os.getuid(), [os.getpid()])})
    for _ in range(25):
        clock[0] += 1
        feed.take(0, 11, {"samples_total": 100 + clock[0], "steps_total": 10})
        feed.act(clock[0])
    assert shown(collector, clock[0])["hpml_train_samples_total", *JOB] == 125
    feed.close()
    collector.close()
    assert list(run.iterdir()) == [], "the socket's file goes with the exporter"


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
