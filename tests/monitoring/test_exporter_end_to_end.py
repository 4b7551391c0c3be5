"""Jobs of a real Slurm share a node; Prometheus shows the load that each of them generates.

The GPUs are simulated; Slurm allocates them by their device files, like real ones.
Expected values come from the jobs' orders, from Slurm, from /proc and from the simulator's state.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import Process, State, a100
from tests.cluster.conftest import booted
from tests.cluster.hpml_on_slurm import ROOT, Desk, install_prolog
from tests.monitoring.gpusim_support import Gpusim
from tests.monitoring.prometheus_support import of_jobs, static
from tests.patience import eventually
from tests.storage import in_memory, stored_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.gpusim.gpusim import Simulator
    from tests.cluster.conftest import SlurmCluster
    from tests.monitoring.exporter_support import StartExporter
    from tests.monitoring.prometheus_support import BootPrometheus, Prometheus

MIB = 1 << 20
HZ = os.sysconf("SC_CLK_TCK")
WRITTEN = 64 * MIB
HELD = 300 * MIB
SERIES_OF_A_JOB = 25

# What nodes run with: without control groups (a laptop, proctrack/linuxproc), and with real ones.
LAYOUTS = {
    "environment": "",
    "cgroup": (
        "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\n"
        "JobAcctGatherType=jobacct_gather/cgroup\n"
    ),
}

# Holds 300 MiB, burns CPU time, and starts a child that writes 64 MiB and ends on request.
WRITER = """
import os, sys, time
here = sys.argv[1]
held = b"x" * (300 << 20)
while time.process_time() < 2:
    pass
child = os.fork()
if child == 0:
    with open(f"{here}/data", "wb", buffering=0) as data:
        for _ in range(64):
            data.write(os.urandom(1 << 20))
        os.fsync(data.fileno())
    with open(f"{here}/child.new", "w") as told:
        told.write(str(os.getpid()))
    os.rename(f"{here}/child.new", f"{here}/child")
    while not os.path.exists(f"{here}/end-child"):
        time.sleep(0.05)
    os._exit(0)
os.waitpid(child, 0)
open(f"{here}/child-ended", "w").close()
time.sleep(600)
"""


# A rank of a training, as the training scripts talk: with the one file that users copy. Each step
# has its own number of samples, so that a lost or a doubled one shows.
TRAINER = """
import os, sys, time
from hpml_channel import Channel

here, rank = sys.argv[1], os.environ["RANK"]
with open(f"{here}/rank{rank}.new", "w") as told:
    told.write(str(os.getpid()))
os.rename(f"{here}/rank{rank}.new", f"{here}/rank{rank}")
channel = Channel.from_env()
for step in range(1, 101):
    channel.gauge(loss=1.0 / step, accuracy=step / 100)
    channel.count(samples=step, steps=1, data_wait_seconds=0.25, step_seconds=0.5)
    time.sleep(0.02)
channel.result()
channel.close()
while not os.path.exists(f"{here}/end"):
    time.sleep(0.05)
"""
RANKS = 2
SAMPLES = RANKS * sum(range(1, 101))


@dataclass(frozen=True)
class Job:
    """A job that runs, and the folder on a disk that it and the test share."""

    jobid: str
    folder: Path

    def told(self, name: str, seconds: float = 240.0) -> str:
        """Wait for a file of the job; returns what is in it."""
        eventually((self.folder / name).exists, name, seconds)
        return (self.folder / name).read_text("utf-8")

    def pids(self) -> set[int]:
        """Its processes: those that have its number in their environment."""
        wanted = f"SLURM_JOB_ID={self.jobid}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
        return found


@dataclass(frozen=True)
class Node:
    """The cluster's only node."""

    cluster: SlurmCluster
    disk: Path  # a folder of this test's own
    gpus: Path  # the state of the GPUs that its jobs see
    options: tuple[str, ...]  # of its exporter

    @contextlib.contextmanager
    def job(self, name: str, *options: str, text: str) -> Iterator[Job]:
        """Run a batch script for as long as the block lasts."""
        folder = self.disk / name
        folder.mkdir()
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\ncd {folder}\n{text}\n", encoding="utf-8")
        words = ["sbatch", "--parsable", f"--job-name={name}", f"--output={folder}/output"]
        jobid = self.cluster.run(*words, *options, script).stdout.strip()
        try:
            yield Job(jobid, folder)
        finally:
            self.cluster.run("scancel", "--full", "--signal=KILL", jobid, check=False)

    def gpu_numbers(self, job: Job) -> list[int]:
        """The GPUs of a job according to Slurm: the numbers of their device files."""

        def numbers() -> str:
            shown = self.cluster.run("scontrol", "show", "job", "-d", job.jobid).stdout
            match = re.search(r"GRES=gpu\S*\(IDX:([\d,-]+)\)", shown)
            return match[1] if match else ""

        parts = [part.split("-") for part in eventually(numbers, pause=0.2).split(",")]
        return [gpu for part in parts for gpu in range(int(part[0]), int(part[-1]) + 1)]


@pytest.fixture
def node(site: Node) -> Node:
    """The cluster's node, and a folder for one test."""
    disk = Path(tempfile.mkdtemp(dir=site.disk))
    disk.chmod(0o755)
    return replace(site, disk=disk)


@pytest.fixture(scope="module", params=LAYOUTS)
def site(request: pytest.FixtureRequest, gpusim_library: Simulator) -> Iterator[Node]:
    """Boots a cluster of one node with 8 CPUs and 4 GPUs.

    Its job numbers are unique, as clusters of other tests use the same control groups. Its
    task prolog sets a directory other than /run/hpml for node agents, and the path of the library
    of simulated GPUs: a submission does not pass on hpml's own variables.
    """
    if request.param == "cgroup" and not Path("/sys/fs/cgroup/freezer/tasks").exists():
        pytest.skip("HARDWARE: no control groups of version 1 here")
    first = 1_000_000 + os.getpid() % 1_000_000
    options = ("--nodes", "1", "--cpus", "8", "--gpus", "4", "--no-accounting")
    # on a disk: what is written to a file system in memory is not written to storage
    with stored_folder() as disk:
        (disk / "run").mkdir()
        prolog = disk / "task-prolog"
        told = {
            "HPML_EXPORTER_SOCKET": f"{disk}/run/exporter.sock",
            "SLURM_SUBMIT_HOST": "node1",  # the node is this machine under another name
            **gpusim_library.environment(disk / "gpus"),
        }
        lines = "".join(f"echo export {name}={value}\n" for name, value in told.items())
        prolog.write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
        prolog.chmod(0o755)
        lines = f"{LAYOUTS[request.param]}FirstJobId={first}\nTaskProlog={prolog}\n"
        lines += f"PrologFlags=Alloc\n{install_prolog(disk)}"  # it records each job's GPUs
        (disk / "own.conf").write_text(lines, encoding="utf-8")
        with booted(*options, "--slurm-conf", disk / "own.conf") as cluster:
            exporter: tuple[str, ...] = ("--root", f"run={disk}/run")
            if request.param == "environment":
                # groups of other clusters on this machine say nothing of a node that has none
                exporter += ("--root", f"cgroup={disk}")
            yield Node(cluster, disk, disk / "gpus", exporter)


def four_gpus() -> State:
    """NVML's order is the other way round than that of the device files, as it is on some nodes."""
    return State(
        epoch=time.time(),
        gpus=tuple(a100(index, minor=3 - index, power=100 + index, util=10) for index in range(4)),
    )


def cpu_seconds(pids: set[int]) -> float:
    """User and system time of processes and of their children that were waited for."""
    total = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        total += sum(map(int, stat[11:15]))
    return total / HZ


def anonymous_bytes(pids: set[int]) -> int:
    """Resident anonymous memory of processes."""
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        total += int(found[1]) * 1024 if found else 0
    return total


def about(value: float) -> object:
    """Within a twentieth, and a second or a mebibyte of noise."""
    return pytest.approx(value, rel=0.05, abs=1.0 if value < 1000 else MIB)


def test_two_jobs_share_a_node(
    node: Node, exporter: StartExporter, gpusim: Gpusim, prometheus: BootPrometheus
) -> None:
    """Each has its own GPUs, CPU time, memory and I/O, and none of the other's."""
    state = gpusim.write(four_gpus())
    rhythm = ("--job-interval", "1", "--process-interval", "1", "--node-interval", "1")
    here = exporter(*rhythm, *node.options, gpus=gpusim)
    server = prometheus([static("node", here.address)])
    (node.disk / "writer.py").write_text(WRITER, encoding="utf-8")
    write = f"exec python3 {node.disk}/writer.py $PWD"
    with (
        node.job("holder", "--gres=gpu:2", text="echo $$ > pid\nexec sleep 600") as holder,
        node.job("writer", "-c2", "--gres=gpu:1", text=write) as writer,
    ):
        gpus_are_told(node, server, gpusim, state, holder, writer)
        io_outlives_its_process(server, writer)
        usage_is_that_of_proc(server, writer, holder)
        who_they_are(server, holder, writer)
        for job in (holder, writer):
            series = server.value(f'count({{jobid="{job.jobid}"}})')
            assert series <= SERIES_OF_A_JOB, server.query(f'{{jobid="{job.jobid}"}}')
    server.wait_for(
        f'hpml_job_info{{jobid=~"{holder.jobid}|{writer.jobid}"}}',
        good=lambda found: not found,
    )
    assert server.value('hpml_exporter_up{collector="jobs"}') == 1
    assert server.query("hpml_exporter_errors_total > 0") == []


def test_gpus_of_an_allocation_without_a_process(
    node: Node, exporter: StartExporter, gpusim: Gpusim, prometheus: BootPrometheus
) -> None:
    """`salloc` that never starts a step has GPUs, and nobody has opened them."""
    gpusim.write(four_gpus())
    here = exporter("--job-interval", "1", "--process-interval", "1", *node.options, gpus=gpusim)
    server = prometheus([static("node", here.address)])
    done = node.cluster.run("salloc", "--no-shell", "--gres=gpu:2", "--time=10")
    (jobid,) = re.findall(r"Granted job allocation (\d+)", done.stderr)
    of_job = f'{{jobid="{jobid}"}}'
    try:
        server.wait_for(f"hpml_job_gpus_allocated{of_job} == 2")
        unopened = server.query(f"hpml_job_gpu_processes{of_job} == 0")
        assert len({one.labels["uuid"] for one in unopened}) == 2
        assert server.value(f"hpml_job_processes{of_job}") == 0
    finally:
        node.cluster.run("scancel", jobid)
    server.wait_for(f"hpml_job_info{of_job}", good=lambda found: not found)


@contextlib.contextmanager
def training(node: Node, **fields: Any) -> Iterator[tuple[Job, Desk, str]]:
    """Run the trainer through hpml for as long as the block lasts; gives the run's id too."""
    desk = Desk(node.cluster, node.disk, as_root=True)
    (node.disk / "trainer.py").write_text(TRAINER, encoding="utf-8")
    shutil.copy(ROOT / "training_jobs" / "hpml_channel.py", node.disk)
    command = ["python3", "trainer.py", str(node.disk)]
    submitted = desk.submit("training", command=command, **fields)
    jobid = str(submitted["job_id"])
    try:
        yield Job(jobid, node.disk), desk, submitted["id"]
    except BaseException:
        for path in [*node.disk.rglob("*.log"), *node.disk.rglob("targets/*")]:
            print(f"== {path}\n{path.read_text('utf-8')}")
        raise
    finally:
        node.cluster.run("scancel", "--full", "--signal=KILL", jobid, check=False)


def training_is_told(server: Prometheus, job: Job) -> None:
    """Samples, steps and times are what the ranks sent."""
    of_job = f'{{jobid="{job.jobid}"}}'
    server.wait_for(f"hpml_train_samples_total{of_job} >= {SAMPLES}")
    assert server.value(f"hpml_train_samples_total{of_job}") == SAMPLES
    assert server.value(f"hpml_train_steps_total{of_job}") == RANKS * 100
    assert server.value(f"hpml_train_data_wait_seconds_total{of_job}") == RANKS * 25
    assert server.value(f"hpml_train_step_duration_seconds_sum{of_job}") == RANKS * 50
    assert server.value(f"hpml_train_step_duration_seconds_count{of_job}") == RANKS * 100
    buckets = f"sum by (le) (hpml_train_step_duration_seconds_bucket{of_job})"
    assert 0.3 <= server.value(f"histogram_quantile(0.5, {buckets})") <= 1
    assert server.value(f"hpml_train_loss{of_job}") == 0.01
    assert server.value(f"hpml_train_accuracy_ratio{of_job}") == 1
    assert server.value(f"hpml_train_ranks{of_job}") == RANKS


def test_a_training_tells_the_exporter_of_its_node(
    node: Node, exporter: StartExporter, prometheus: BootPrometheus
) -> None:
    """It can be joined with the job and its run, which no exporter but ours can show."""
    here = exporter("--job-interval", "1", "--process-interval", "1", *node.options)
    server = prometheus([static("node", here.address)])
    resources = {"ranks_per_node": RANKS, "cpus_per_rank": 1, "time": "10:00"}
    with training(node, resources=resources) as (job, _, run):
        training_is_told(server, job)
        of_job = f'{{jobid="{job.jobid}"}}'
        joined = f"hpml_train_samples_total * on (jobid) group_left (name) hpml_job_info{of_job}"
        (one,) = server.wait_for(joined)
        assert (one.labels["name"], one.value) == ("training", SAMPLES)
        (run_info,) = server.wait_for(f"hpml_run_info{of_job}")
        assert run_info.labels["run"] == run
        assert server.counters_that_fell("5m", "node", job.jobid) == []


@pytest.mark.parametrize("site", ["environment"], indirect=True)
def test_a_job_monitors_itself(
    node: Node, gpusim_library: Simulator, prometheus: BootPrometheus
) -> None:
    """Without anybody's leave: Prometheus finds it by a file, and a summary of it stays."""
    gpusim = Gpusim(node.gpus, gpusim_library)  # nodes have a private /tmp
    state = gpusim.write(four_gpus())
    server = prometheus([of_jobs(node.disk / "records/targets/*.json")])
    resources = {"ranks_per_node": RANKS, "gpus": RANKS, "time": "10:00"}
    with training(node, resources=resources, monitor=True) as (job, desk, run):
        # without a prolog's map, Slurm's GPU numbers cannot be resolved, but use can be seen
        process = Process(int(job.told("rank0")), memory=5 << 30)
        gpusim.write(state.changed(2, processes=(process,)))
        training_is_told(server, job)
        of_job = f'{{jobid="{job.jobid}"}}'
        server.wait_for(f"hpml_job_gpus_used{of_job} == 1")
        (used,) = server.query(f"hpml_job_gpu_memory_used_bytes{of_job} > 0")
        assert (used.labels["uuid"], used.value) == (state.gpus[2].uuid, 5 << 30)
        assert {one.labels["jobid"] for one in server.query('{jobid!=""}')} == {job.jobid}
        (target,) = server.targets()
        assert (target["labels"]["jobid"], target["labels"]["run"]) == (job.jobid, run)
        # long enough for the summary, which looks every five seconds
        server.wait_for(f"count_over_time((hpml_job_gpus_used{of_job} == 1)[9s:1s]) >= 8")
        (node.disk / "end").touch()
        assert desk.json("wait", run)["state"] == "COMPLETED"
        server.wait_for("up", lambda found: not found)  # its target file is gone
    summary = desk.json("show", run)["summary"]
    (told,) = summary["monitored"]
    assert (told["training"]["samples"], told["training"]["steps"]) == (SAMPLES, RANKS * 100)
    assert told["figures"]["gpus_used"] == 1
    (gpu,) = [one for one in told["gpus"] if one["uuid"] == state.gpus[2].uuid]
    assert gpu["figures"]["memory_peak_bytes"] == (5 << 30) + (4 << 20)  # what an idle one holds
    assert gpu["figures"]["power_watts"] == 102


def gpus_are_told(
    node: Node, server: Prometheus, gpusim: Gpusim, state: State, holder: Job, writer: Job
) -> None:
    """The holder has two and uses one of them; the writer has one and uses none."""
    minors = {gpu.minor: gpu for gpu in state.gpus}
    pid = int(holder.told("pid"))
    mine = [minors[number] for number in node.gpu_numbers(holder)]
    others = [minors[number] for number in node.gpu_numbers(writer)]
    used = state.gpus.index(mine[0])
    gpusim.write(state.changed(used, processes=(Process(pid, memory=3 << 30, sm=60),)))
    of_holder = f'{{jobid="{holder.jobid}"}}'
    server.wait_for(f"hpml_job_gpus_used{of_holder} == 1")
    assert server.value(f"hpml_job_gpus_allocated{of_holder}") == 2
    assert server.value(f"hpml_job_gpus_foreign{of_holder}") == 0
    found = server.query(f"hpml_job_gpu_info{of_holder}")
    assert {one.labels["uuid"] for one in found} == {gpu.uuid for gpu in mine}
    (of_used,) = server.query(f"hpml_job_gpu_memory_used_bytes{of_holder} > 0")
    assert (of_used.labels["uuid"], of_used.value) == (mine[0].uuid, 3 << 30)
    # what is allocated and not used, as an alert asks for it
    (idle,) = server.query(f"hpml_job_gpu_processes{of_holder} == 0")
    assert idle.labels["uuid"] == mine[1].uuid
    of_writer = f'{{jobid="{writer.jobid}"}}'
    server.wait_for(f"hpml_job_gpus_allocated{of_writer} == 1")
    assert server.value(f"hpml_job_gpus_used{of_writer}") == 0
    assert {one.labels["uuid"] for one in server.query(f"hpml_job_gpu_info{of_writer}")} == {
        gpu.uuid for gpu in others
    }
    ours = f'hpml_job_gpu_info{{jobid=~"{holder.jobid}|{writer.jobid}"}}'
    drawn = f"sum by (jobid) (hpml_gpu_power_watts * on (uuid) group_right {ours})"
    assert {one.labels["jobid"]: one.value for one in server.query(drawn)} == {
        holder.jobid: sum(100 + state.gpus.index(gpu) for gpu in mine),
        writer.jobid: sum(100 + state.gpus.index(gpu) for gpu in others),
    }
    for gpu in state.gpus:
        by_now = gpu.total("power", time.time() - state.epoch)
        joules = f'hpml_gpu_energy_joules_total{{uuid="{gpu.uuid}"}}'
        (told,) = server.wait_for(f"{joules} >= {by_now}")  # what is scraped is seconds old
        assert told.value <= gpu.total("power", time.time() - state.epoch)


def io_outlives_its_process(server: Prometheus, writer: Job) -> None:
    """What a process wrote is shown while it lives and stays when it has ended."""
    child = int(writer.told("child"))
    told = Path(f"/proc/{child}/io").read_text("utf-8")
    by_child = int(re.search(r"^write_bytes: (\d+)", told, re.MULTILINE)[1])  # type: ignore[index]
    assert in_memory() or WRITTEN <= by_child < WRITTEN + MIB
    of_writer = f'{{jobid="{writer.jobid}"}}'
    stored = f"hpml_job_io_write_bytes_total{of_writer}"
    (shown,) = server.wait_for(f"{stored} >= {by_child}")
    assert shown.value < by_child + MIB
    (writer.folder / "end-child").touch()
    writer.told("child-ended")
    began = time.time()
    server.wait_for(f"timestamp({stored}) > {began + 3}")
    assert server.value(stored) >= shown.value
    assert server.value(stored) < by_child + MIB
    assert server.value(f"hpml_job_io_syscall_write_bytes_total{of_writer}") >= WRITTEN
    assert server.query(f"resets({stored}[5m]) > 0") == []


def usage_is_that_of_proc(server: Prometheus, writer: Job, holder: Job) -> None:
    """Memory, CPU time and processes, against the kernel's own files."""
    for job in (writer, holder):
        of_job = f'{{jobid="{job.jobid}"}}'
        pids = job.pids()
        began = time.time()
        server.wait_for(f"timestamp(hpml_job_processes{of_job}) > {began + 3}")
        assert job.pids() == pids  # nothing came or went meanwhile
        assert server.value(f"hpml_job_processes{of_job}") == len(pids)
        used = server.value(f"sum(hpml_job_cpu_seconds_total{of_job})")
        assert used == about(cpu_seconds(pids))
        resident = server.value(f'hpml_job_memory_bytes{{jobid="{job.jobid}", kind="rss"}}')
        assert resident == pytest.approx(anonymous_bytes(pids), rel=0.05, abs=16 * MIB)
    held = server.value(f'hpml_job_memory_bytes{{jobid="{writer.jobid}", kind="rss"}}')
    assert HELD <= held < HELD + 32 * MIB
    assert server.value(f'sum(hpml_job_cpu_seconds_total{{jobid="{writer.jobid}"}})') >= 2
    assert server.value(f'sum(hpml_job_cpu_seconds_total{{jobid="{holder.jobid}"}})') < 1


def who_they_are(server: Prometheus, *jobs: Job) -> None:
    """User, partition and name are those in Slurm."""
    for job in jobs:
        (one,) = server.query(f'hpml_job_info{{jobid="{job.jobid}"}}')
        assert one.labels["user"] == getpass.getuser()
        assert one.labels["partition"] == "main"
        assert one.labels["name"] == job.folder.name
