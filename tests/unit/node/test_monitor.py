"""The agent's exporter is kept alive, found, and gone at the end, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node.monitor import Monitor, Timing
from hpml_orchestrator.node.options import MonitorOptions
from hpml_orchestrator.node.planning import Prepared
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.verify import Circumstances
from hpml_orchestrator.records import targets
from tests.patience import PATIENCE_SECONDS

Until = Callable[[Callable[[], object]], object]

# A fake exporter for faults that the real one cannot make on demand. It tells what it was given.
FAKE = """
import json, os, signal, sys, time
behaviour, told = sys.argv[1], json.loads(sys.argv[2])
starts = told["summary_file"] + ".starts"
with open(starts, "a") as stream:
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # its own look: what it starts with
    own = {**told, "pid": os.getpid(), "nice": nice, "cpus": sorted(os.sched_getaffinity(0))}
    stream.write(json.dumps(own) + "\\n")
count = len(open(starts).readlines())
def listen():
    port = told["listen"].rpartition(":")[2]
    with open(told["address_file"] + ".new", "w") as stream:
        stream.write("127.0.0.1:%d\\n" % (int(port) or 40000 + count))
    os.rename(told["address_file"] + ".new", told["address_file"])
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listen()
if behaviour == "good" or (behaviour == "twice" and count > 2):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    listen()
if behaviour.isdecimal():
    print("hpml: error: cannot do this\\nhpml: hint: do another thing")
    sys.exit(int(behaviour))
if behaviour == "twice" and count <= 2:
    listen()
    while not os.path.exists(told["summary_file"] + f".found{count}"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(60)
"""
LOCAL = MonitorOptions("127.0.0.1:0")
QUICK = Timing(first_pause=0.1, longest_pause=0.2, until_address=600.0, restarts=3, look=0.05)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_USER": "ada",
    "SLURM_CLUSTER_NAME": "elbe",
    "SLURM_SUBMIT_HOST": os.uname().nodename,
}


class Watched:
    """A monitor with a fake exporter, and what became of both."""

    def __init__(self, root: Path, behaviour: str, timing: Timing, wish: MonitorOptions) -> None:
        self.attempt = root / "records" / "runs" / "r-1" / "attempts" / "0"
        (self.attempt / "nodes").mkdir(parents=True, exist_ok=True)
        script = root / "fake.py"
        script.write_text(FAKE)
        self.monitor = Monitor(
            wish,
            self.attempt,
            "n1",
            ENVIRONMENT,
            timing,
            (sys.executable, "-I", str(script), behaviour),
        )
        self.targets = root / "records" / "targets"

    def starts(self) -> list[dict[str, Any]]:
        """What each exporter was told, and who it was."""
        path = self.attempt / "nodes" / "n1.monitor.json.starts"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def lives(self, count: int) -> bool:
        """Whether Prometheus finds the exporter that was started as the first, second, ...."""
        return len(self.starts()) == count and bool(self.found())

    def found(self) -> list[str]:
        """The addresses that Prometheus finds."""
        found: list[str] = []
        for one in sorted(self.targets.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # withdrawn since it was listed
                found += json.loads(one.read_text())[0]["targets"]
        return found


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path, until: Until) -> Iterator[Watch]:
    """Make monitors, and stop them at the end."""
    made: list[Watched] = []

    def make(behaviour: str, timing: Timing = QUICK, wish: MonitorOptions = LOCAL) -> Watched:
        made.append(Watched(tmp_path, behaviour, timing, wish))
        return made[-1]

    yield make
    for one in made:
        one.monitor.stop()
        for start in one.starts():
            until(lambda pid=start["pid"]: not alive(pid))  # type: ignore[misc]


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_empty(directory: Path) -> bool:
    """Whether nothing lies there."""
    return not list(directory.iterdir())


def prepared(*cpus: tuple[int, ...]) -> Prepared:
    """A plan whose ranks have these CPUs."""
    ranks = tuple(RankPlan(rank, cpus=own) for rank, own in enumerate(cpus))
    return Prepared(Plan(ranks), None, Circumstances("n1", "warn", (), None, frozenset(), 1))


def test_it_is_told_of_its_job_and_found(watch: Watch, until: Until) -> None:
    """Options, low priority, a target while it lives and none behind it."""
    watched = watch("good", wish=MonitorOptions("127.0.0.1:0", interval=3, web_config="/w.yml"))
    watched.monitor.start(None)
    until(watched.found)
    assert watched.found() == ["127.0.0.1:40001"]
    (start,) = watched.starts()
    assert start["nice"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert (start["job"]["jobid"], start["job"]["run"], start["job"]["user"]) == (
        "17",
        "r-1",
        "ada",
    )
    assert (start["gpu_interval"], start["job_interval"], start["process_interval"]) == (3, 15, 15)
    assert (start["web_config"], start["parent_pid"]) == ("/w.yml", os.getpid())
    watched.monitor.stop()
    until(lambda: not list(watched.targets.iterdir()))


def test_it_keeps_off_the_ranks_cpus(watch: Watch, until: Until) -> None:
    """Where the job has others; where it has none it may run wherever the job may."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) == 1:
        pytest.skip("one CPU cannot be divided")
    for ranks, cpus in (([allowed[0]], allowed[1:]), (allowed, allowed)):
        watched = watch("good")
        watched.monitor.start(prepared(*((cpu,) for cpu in ranks)))
        until(watched.found)
        assert watched.starts()[-1]["cpus"] == cpus, "from its first moment"
        watched.monitor.stop()
        until(partial(is_empty, watched.targets))


def test_one_that_dies_is_started_again(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the same port, so that Prometheus goes on; each end is a line."""
    watched = watch("twice")
    watched.monitor.start(None)
    for count in (1, 2):
        until(partial(watched.lives, count))
        time.sleep(0.3)  # one that dies sooner than the first pause may not have its port again
        (watched.attempt / "nodes" / f"n1.monitor.json.found{count}").touch()
    until(lambda: len(watched.starts()) == 3)
    until(watched.found)
    watched.monitor.stop()
    assert [one["listen"] for one in watched.starts()] == [
        "127.0.0.1:0",
        "127.0.0.1:40001",
        "127.0.0.1:40001",
    ]
    told = capsys.readouterr().err
    assert told == (
        "hpml: n1: the job's monitor ended (by SIGKILL); started again in 0.1 s\n"
        "hpml: n1: the job's monitor ended (by SIGKILL); started again in 0.2 s\n"
    )


def test_it_is_not_started_for_ever(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that is stuck each time: three starts more, then the job goes on without."""
    watched = watch("75")
    watched.monitor.start(None)
    until(lambda: not watched.monitor._thread.is_alive())  # type: ignore[union-attr]
    assert len(watched.starts()) == 4
    lines = capsys.readouterr().err.splitlines()
    ended = "hpml: n1: the job's monitor ended (status 75: error: cannot do this);"
    assert lines[0] == f"{ended} started again in 0.1 s"
    assert lines[-1] == f"{ended} not started again"
    assert watched.found() == []


def test_without_an_exporter_the_job_goes_on(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interpreter has no site packages, as on a node where hpml is not installed: one line."""
    watched = watch("good")
    interpreter, *words = Monitor.command
    watched.monitor.command = (interpreter, "-S", *words)
    watched.monitor.start(None)
    until(lambda: not watched.monitor._thread.is_alive())  # type: ignore[union-attr]
    told = f"hpml: n1: the job's monitor is not there: {interpreter} has no hpml_exporters\n"
    assert capsys.readouterr().err == told


def test_what_cannot_be_is_tried_once(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that are refused: one line, with the exporter's own words."""
    watched = watch("2")
    watched.monitor.start(None)
    until(lambda: not watched.monitor._thread.is_alive())  # type: ignore[union-attr]
    assert len(watched.starts()) == 1
    told = "hpml: n1: the job's monitor was refused: error: cannot do this\n"
    assert capsys.readouterr().err == told


def test_an_interpreter_that_is_gone_is_one_line(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a node without hpml's own Python."""
    watched = watch("good")
    watched.monitor.command = ("/no/such/python",)
    watched.monitor.start(None)
    until(lambda: not watched.monitor._thread.is_alive())  # type: ignore[union-attr]
    told = "hpml: n1: the job's monitor cannot be started by /no/such/python\n"
    assert capsys.readouterr().err == told


def test_one_that_never_listens_is_ended(
    watch: Watch, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """It hangs at its start: ended, and tried again."""
    watched = watch("hangs", replace(QUICK, until_address=1.0, restarts=100))
    watched.monitor.start(None)
    until(lambda: len(watched.starts()) >= 2)
    watched.monitor.stop()
    assert "does not answer after 1 s\n" in capsys.readouterr().err


def test_one_that_does_not_end_is_killed_in_time(watch: Watch, until: Until) -> None:
    """SIGTERM is ignored: the end of a job waits two seconds at most."""
    watched = watch("deaf", Timing(look=0.05))
    watched.monitor.start(None)
    until(watched.found)
    began = time.monotonic()
    watched.monitor.stop()
    assert time.monotonic() - began < PATIENCE_SECONDS  # without SIGKILL it would never end
    until(lambda: not alive(watched.starts()[0]["pid"]))
    until(lambda: not watched.found())


def test_an_exporter_whose_start_hangs_holds_nobody(
    watch: Watch, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system with its interpreter stands still (a fake): the end comes all the same."""
    watched = watch("good")
    reached, answer = threading.Event(), threading.Event()
    launch = Monitor._launch

    def hang(self: Monitor, listen: str) -> subprocess.Popen[bytes]:
        process = launch(self, listen)
        reached.set()
        answer.wait()
        return process

    monkeypatch.setattr(Monitor, "_launch", hang)
    watched.monitor.start(None)
    assert reached.wait(PATIENCE_SECONDS)
    ended = threading.Thread(target=watched.monitor.stop, daemon=True)
    ended.start()
    ended.join(PATIENCE_SECONDS)
    held = ended.is_alive()
    answer.set()
    assert not held
    until(lambda: not watched.monitor._thread.is_alive())  # type: ignore[union-attr]


def test_the_end_comes_before_the_beginning(watch: Watch) -> None:
    """A job that is cancelled at once: nothing is left, whatever was about to start."""
    watched = watch("good")
    watched.monitor.start(None)
    watched.monitor.stop()
    watched.monitor.stop()
    assert watched.found() == []


def test_a_target_that_was_swept_in_error_comes_back(
    watch: Watch, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent stood still meanwhile (a suspended job): it writes the file again."""
    monkeypatch.setattr(targets, "RENEW_SECONDS", 0.1)
    watched = watch("good")
    watched.monitor.start(None)
    until(watched.found)
    (path,) = watched.targets.glob("*.json")
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0)
    path.unlink()
    until(watched.found)


def test_targets_of_the_dead_go_when_a_job_starts(watch: Watch, until: Until) -> None:
    """And a job's own directory of targets is used where it names one."""
    watched = watch("good")
    dead = watched.targets / "dead.elbe-1@n9.json"
    targets.publish(dead, "a:1", {"jobid": "1", "run": "dead", "node": "n9"})
    os.utime(dead, (0, 0))
    watched.monitor.start(None)
    until(lambda: watched.found() == ["127.0.0.1:40001"])


def test_targets_that_cannot_be_written_hurt_nobody(
    watch: Watch, until: Until, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; the exporter goes on."""
    (tmp_path / "file").write_text("")
    watched = watch("good", wish=MonitorOptions("127.0.0.1:0", targets=str(tmp_path / "file")))
    watched.monitor.start(None)
    until(watched.starts)
    until(lambda: "cannot be found by Prometheus" in capsys.readouterr().err)
    assert alive(watched.starts()[0]["pid"])


def test_the_real_exporter_answers(tmp_path: Path, until: Until) -> None:
    """Started as an agent starts it: isolated, with options of a job; its summary is left."""
    attempt = tmp_path / "runs" / "r-1" / "attempts" / "0"
    (attempt / "nodes").mkdir(parents=True)
    patient = Timing(terminate=PATIENCE_SECONDS)
    monitor = Monitor(MonitorOptions("127.0.0.1:0"), attempt, "n1", ENVIRONMENT, patient)
    monitor.start(None, no_gpus=True)
    try:
        until(lambda: list((tmp_path / "targets").glob("*.json")))
        (path,) = (tmp_path / "targets").glob("*.json")
        (group,) = json.loads(path.read_text())
        with urllib.request.urlopen(
            f"http://{group['targets'][0]}/metrics", timeout=PATIENCE_SECONDS
        ) as answer:
            assert b"hpml_exporter_" in answer.read()
        assert group["labels"]["jobid"] == "17"
    finally:
        monitor.stop()
    told = json.loads((attempt / "nodes" / "n1.monitor.json").read_text())
    assert (told["jobid"], told["run"], told["starts"]) == ("17", "r-1", 1)


def test_a_second_job_at_the_same_port(
    tmp_path: Path, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real exporters: the second takes a free port, says so, and Prometheus finds both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = []
    for number in (17, 18):
        attempt = tmp_path / "runs" / f"r-{number}" / "attempts" / "0"
        (attempt / "nodes").mkdir(parents=True)
        job = {**ENVIRONMENT, "SLURM_JOB_ID": str(number)}
        monitor = Monitor(MonitorOptions(f"127.0.0.1:{port}"), attempt, "n1", job)
        monitor.start(None, no_gpus=True)
        made.append(monitor)
        until(monitor.target.exists)
    try:
        groups = [json.loads(one.target.read_text())[0] for one in made]
        ports = [int(group["targets"][0].rpartition(":")[2]) for group in groups]
        assert ports[0] == port != ports[1]
        assert [group["labels"]["jobid"] for group in groups] == ["17", "18"]
        for group in groups:
            with urllib.request.urlopen(f"http://{group['targets'][0]}/healthz", timeout=10) as one:
                assert one.status == 200
    finally:
        for monitor in made:
            monitor.stop()
    told = f"listens at 127.0.0.1:{ports[1]}: port {port} is another's on this node\n"
    assert capsys.readouterr().err == f"hpml: n1: the job's monitor {told}"
    assert all((one.attempt / "nodes" / "n1.monitor.json").exists() for one in made)
