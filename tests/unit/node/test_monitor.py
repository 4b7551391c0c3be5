"""The job's exporter is kept alive, found, and gone at the end, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.log import message_of
from hpml_orchestrator.node.monitor import (
    NodeMonitor,
    Timing,
    allocated_gpus,
    target_address,
)
from hpml_orchestrator.node.planning import NodePlan
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.verify import NodeContext
from hpml_orchestrator.records import targets
from hpml_orchestrator.records.job import Monitor
from hpml_orchestrator.topology.model import Topology
from tests.unit.placement.machines import dgx_a100

Until = Callable[[Callable[[], object]], object]

# A fake exporter for faults that the real one cannot make on demand. It records its options.
FAKE = """
import json, os, signal, sys, time
behaviour, options = sys.argv[1], json.loads(sys.argv[2])
starts = options["summary_file"] + ".starts"
with open(starts, "a") as stream:
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # its own look: what it starts with
    own = {**options, "pid": os.getpid(), "nice": nice, "cpus": sorted(os.sched_getaffinity(0))}
    stream.write(json.dumps(own) + "\\n")
count = len(open(starts).readlines())
def listen():
    port = options["listen"].rpartition(":")[2]
    with open(options["address_file"] + ".new", "w") as stream:
        stream.write("127.0.0.1:%d\\n" % (int(port) or 40000 + count))
    os.rename(options["address_file"] + ".new", options["address_file"])
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listen()
if behaviour == "good" or (behaviour == "twice" and count > 2):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    listen()
if behaviour.isdecimal():
    print("2026-11-28T12:00:00Z ERROR cannot do this (hint: do another thing)")
    sys.exit(int(behaviour))
if behaviour == "twice" and count <= 2:
    listen()
    while not os.path.exists(options["summary_file"] + f".found{count}"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(60)
"""
LOCAL = Monitor(enabled=True)
QUICK = Timing(first_pause=0.1, longest_pause=0.2, until_address=600.0, restarts=3, look=0.05)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_USER": "ada",
    "SLURM_CLUSTER_NAME": "elbe",
    "SLURM_SUBMIT_HOST": os.uname().nodename,
}


class Watched:
    """A monitor with a fake exporter, and the files that both wrote."""

    def __init__(self, root: Path, behaviour: str, timing: Timing, options: Monitor) -> None:
        self.attempt = root / "records" / "runs" / "r-1" / "attempts" / "0"
        (self.attempt / "nodes").mkdir(parents=True, exist_ok=True)
        script = root / "fake.py"
        script.write_text(FAKE)
        self.monitor = NodeMonitor(
            options,
            self.attempt,
            "n1",
            ENVIRONMENT,
            timing,
            (sys.executable, "-I", str(script), behaviour),
        )
        self.targets = root / "records" / "targets"

    def starts(self) -> list[dict[str, Any]]:
        """The options and the process of each exporter."""
        path = self.attempt / "nodes" / "n1.monitor.json.starts"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def lives(self, count: int) -> bool:
        """Whether Prometheus finds the exporter that was started as the first, second, ....

        One that is started again has the target of the one before it, renewed once it listens.
        """
        if len(self.starts()) != count or not self.found():
            return False
        began = (self.attempt / "nodes" / "n1.monitor.json.starts").stat().st_mtime_ns
        return all(one.stat().st_mtime_ns > began for one in self.targets.glob("*.json"))

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

    def make(behaviour: str, timing: Timing = QUICK, options: Monitor = LOCAL) -> Watched:
        made.append(Watched(tmp_path, behaviour, timing, options))
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


def test_it_is_told_of_its_job_and_found(watch: Watch, until: Until, tmp_path: Path) -> None:
    """Options, low priority, a target while it lives and none behind it; with TLS by HTTPS."""
    web = tmp_path / "w.yml"
    web.write_text("tls_server_config:\n  cert_file: a\n")
    watched = watch("good", options=Monitor(enabled=True, interval=3, web_config=str(web)))
    watched.monitor.start(None)
    until(watched.found)
    assert watched.found() == ["127.0.0.1:40001"]
    (group,) = json.loads(watched.monitor.target.read_text())
    assert group["labels"]["__scheme__"] == "https"
    (start,) = watched.starts()
    assert start["nice"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert (start["job"]["jobid"], start["job"]["run"], start["job"]["user"]) == (
        "17",
        "r-1",
        "ada",
    )
    assert (start["gpu_interval"], start["job_interval"], start["process_interval"]) == (3, 15, 15)
    assert (start["web_config"], start["parent_pid"]) == (str(web), os.getpid())
    assert set(start["without"]) == {"disks", "infiniband", "nfs", "lustre", "health"}, (
        "the whole node's"
    )
    watched.monitor.stop()
    until(lambda: not list(watched.targets.iterdir()))


def test_a_target_that_was_swept_in_error_comes_back(
    watch: Watch, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was suspended with its job: it writes the file again."""
    monkeypatch.setattr(targets, "RENEW_SECONDS", 0.1)
    watched = watch("good")
    watched.monitor.start(None)
    until(watched.found)
    (path,) = watched.targets.glob("*.json")
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0)
    path.unlink()
    until(watched.found)


def prepared(
    *cpus: Sequence[int], topology: Topology | None = None, visible: str | None = None
) -> NodePlan:
    """A node whose ranks have these CPUs."""
    ranks = tuple(RankPlan(rank, cpus=tuple(own)) for rank, own in enumerate(cpus))
    context = NodeContext("n1", "warn", (), visible, frozenset(), 1)
    return NodePlan(Plan(ranks), topology, context)


def test_one_that_dies_is_started_again(
    watch: Watch, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    """At the same port, so that Prometheus still finds it; each end is a line."""
    watched = watch("twice")
    watched.monitor.start(None)
    for count in (1, 2):
        until(partial(watched.lives, count))
        (watched.attempt / "nodes" / f"n1.monitor.json.found{count}").touch()
    until(partial(watched.lives, 3))
    watched.monitor.stop()
    ports = [start["listen"] for start in watched.starts()]
    assert ports == ["127.0.0.1:0", "127.0.0.1:40001", "127.0.0.1:40001"]
    assert caplog.messages == [
        "n1: the job's monitor ended (by SIGKILL); started again in 0.1 s",
        "n1: the job's monitor ended (by SIGKILL); started again in 0.2 s",
    ]


@pytest.mark.parametrize(
    ("behaviour", "last"),
    [
        ("75", "ended (status 75: cannot do this (hint: do another thing)); not started again"),
        ("hangs", "ended (by SIGKILL); not started again"),
        ("no python", "failed: FileNotFoundError: [Errno 2] No such file or directory: '/no'"),
    ],
)
def test_the_job_goes_on_without(
    watch: Watch, until: Until, caplog: pytest.LogCaptureFixture, behaviour: str, last: str
) -> None:
    """Refused options, nothing installed, one that never listens: a line, and one start."""
    watched = watch(behaviour, replace(QUICK, until_address=1.0 if behaviour == "hangs" else 600))
    if behaviour == "no python":
        watched.monitor.command = ("/no",)
    watched.monitor.start(None)
    until(lambda: not watched.monitor.is_alive)
    assert len(watched.starts()) <= 1
    assert caplog.messages[-1] == f"n1: the job's monitor {last}"
    assert watched.found() == []


def test_a_line_of_pythons_own_is_whole() -> None:
    """Only time and level are cut off, not the words of an interpreter that cannot start it."""
    assert message_of("2026-11-28T12:00:00Z ERROR cannot listen") == "cannot listen"
    assert message_of("/opt/python: No module named x") == "/opt/python: No module named x"


def test_one_that_does_not_end_is_killed_in_time(watch: Watch, until: Until) -> None:
    """SIGTERM is ignored: the end of a job does not wait for long."""
    watched = watch("deaf", replace(QUICK, terminate=0.2))
    watched.monitor.start(None)
    until(watched.found)
    watched.monitor.stop()
    until(lambda: not alive(watched.starts()[0]["pid"]))
    until(lambda: not watched.found())


def test_gpus_by_the_nodes_own_topology() -> None:
    """Those that are visible, in PCI addresses or UUIDs, never by index."""
    topology = dgx_a100()
    third, first = topology.gpus[2], topology.gpus[0]
    made = prepared([0], topology=topology, visible="2,0")
    assert allocated_gpus(made, {}) == [
        third.uuid or third.address,
        first.uuid or first.address,
    ]
    named = replace(topology, gpus=(replace(first, uuid="GPU-a"), *topology.gpus[1:]))
    made = prepared([0], topology=named, visible="0")
    assert allocated_gpus(made, {}) == ["GPU-a"]


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "GPU-a,MIG-b", "SLURM_NNODES": "1"}, ["GPU-a", "MIG-b"]),
        ({"SLURM_JOB_GPUS": "GPU-a", "SLURM_NNODES": "2"}, None),
        ({"SLURM_STEP_GPUS": "0-1,5"}, None),
        ({"SLURM_JOB_GPUS": "3", "SLURM_NNODES": "1"}, None),
        ({}, None),
    ],
)
def test_gpus_by_what_the_scheduler_says(
    environment: dict[str, str], gpus: list[str] | None
) -> None:
    """UUIDs name devices; Slurm's numbers are indices of gres.conf and name no device.

    In a job with several nodes, the batch script's list describes the first node only.
    """
    assert allocated_gpus(None, environment) == gpus


@pytest.mark.parametrize(
    ("listens", "target"),
    [
        ("10.1.2.3:9445", "10.1.2.3:9445"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("127.0.0.1:4000", ""),
        ("[::1]:4000", ""),
        ("localhost:4000", ""),
        ("127.8.9.1:4000", ""),
        ("127.example.org:4000", "127.example.org:4000"),
        ("0.0.0.0:4000", "localhost:4000"),
        ("[::]:4000", "localhost:4000"),
    ],
)
def test_where_prometheus_reaches_it(listens: str, target: str) -> None:
    """At loopback only on the host that submitted; everywhere is the node's name, or the host's."""
    submitted = {"SLURM_SUBMIT_HOST": "login1"}
    assert target_address(listens, submitted, "localhost", host="gpu01") == target
    assert target_address("0.0.0.0:1", submitted, "no-such.invalid", host="gpu01") == "gpu01:1"
    here = {"SLURM_SUBMIT_HOST": "desk.home"}
    assert target_address("127.0.0.1:4000", here, "n1", host="desk") == "127.0.0.1:4000"
