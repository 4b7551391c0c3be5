"""A node full of jobs for bench_exporter.py: simulated GPUs, real processes, real control groups.

By default 20 jobs on 8 GPUs with 500 processes; each job has one process on a GPU, the others
represent workers that read its data. Control groups are of version 1 if this user may create them
(below a directory that no other exporter reads), else a tree of files in the form of version 2,
whose values do not change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.gpusim.gpusim import Process, Simulator, Square, State, h100

CONTROLLERS = ("freezer", "memory", "cpuacct", "cpuset", "devices")
KERNEL = Path("/sys/fs/cgroup")
FIRST_JOB = 910_000
GIB = 1 << 30
FILES = {  # of a job in version 2
    "cpu.stat": "usage_usec 100\nuser_usec 60\nsystem_usec 40\nnr_periods 0\nnr_throttled 0\n",
    "memory.current": "314572800\n",
    "memory.peak": "419430400\n",
    "memory.max": "8589934592\n",
    "memory.stat": "anon 209715200\nfile 104857600\nshmem 1048576\ninactive_file 52428800\n",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "cpuset.cpus.effective": "0-15\n",
    "pids.current": "25\n",
    **{
        f"{name}.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        for name in ("cpu", "memory", "io")
    },
}


@dataclass
class Load:
    """What there is, and where exporters find it."""

    gpus: int
    jobs: int
    processes: int
    scratch: Path
    simulator: Simulator = field(default_factory=Simulator)
    kind: str = ""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def state(self) -> Path:
        """The simulator's state file."""
        return self.scratch / "gpusim"

    @property
    def cgroup(self) -> Path:
        """What our exporter takes for /sys/fs/cgroup."""
        return self.scratch / "cgroup"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of programs that see the GPUs."""
        return dict(os.environ) | self.simulator.environment(self.state)


@contextlib.contextmanager
def loaded(load: Load) -> Iterator[Load]:
    """Starts the processes, puts them into control groups and on GPUs; ends it all after use."""
    load.cgroup.mkdir()
    made: list[Path] = []
    each = load.processes // load.jobs
    try:
        where = _kernels_groups(load, made) if _may_make_groups() else None
        load.kind = "files like version 2" if where is None else "the kernel's, version 1"
        for number in range(load.jobs):
            jobid = FIRST_JOB + number
            pids = [_sleeper(load, jobid).pid for _ in range(each)]
            if where is None:
                _files(load.cgroup, jobid, pids)
            else:
                _groups(where, jobid, pids, made)
        load.simulator.write(_node(load, each), load.state)
        yield load
    finally:
        for child in load.children:
            child.kill()
        for child in load.children:
            child.wait()
        for path in reversed(made):
            _remove(path)


def _sleeper(load: Load, jobid: int) -> subprocess.Popen[bytes]:
    environment = {
        "SLURM_JOB_ID": str(jobid),
        "SLURM_JOB_NAME": "bench",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "lab",
        "SLURM_JOB_GPUS": str((jobid - FIRST_JOB) % load.gpus),
        "PATH": os.environ["PATH"],
    }
    child = subprocess.Popen(["sleep", "86400"], env=environment)
    load.children.append(child)
    return child


def _node(load: Load, each: int) -> State:
    leaders = [child.pid for child in load.children[::each]]
    gpus = []
    for number in range(load.gpus):
        work = Square(7 + number, 5, 95, number)
        pids = leaders[number :: load.gpus]
        gpu = h100(
            number,
            util=work,
            power=Square(20, 90, 600, number),
            pcie_tx=1e9,
            pcie_rx=2e9,
            nvlink_tx=5e9,
            nvlink_rx=5e9,
            gpm_sm=work,
            gpm_tensor=40,
            gpm_occupancy=30,
            gpm_dram=50,
            processes=tuple(Process(pid, memory=8 * GIB, sm=25) for pid in pids),
        )
        gpus.append(gpu)
    return State(gpus=tuple(gpus))


def _top() -> str:
    # what ends in .service is not searched for Slurm's jobs by the exporters of this machine
    return f"hpml-bench-{os.getpid()}.service"


def _may_make_groups() -> bool:
    try:
        for controller in CONTROLLERS:
            path = KERNEL / controller / _top()
            path.mkdir()
            path.rmdir()
    except OSError:
        return False
    return True


def _kernels_groups(load: Load, made: list[Path]) -> dict[str, Path]:
    found = {}
    for controller in CONTROLLERS:
        path = KERNEL / controller / _top()
        _make(path, controller, made)
        (load.cgroup / controller).symlink_to(path)
        found[controller] = path
    return found


def _groups(tops: dict[str, Path], jobid: int, pids: list[int], made: list[Path]) -> None:
    for controller, top in tops.items():
        path = top
        for name in ("slurm", f"uid_{os.getuid()}", f"job_{jobid}", "step_0", "task_0"):
            path /= name
            if not path.exists():
                _make(path, controller, made)
        for pid in pids:
            (path / "cgroup.procs").write_text(str(pid))


def _make(path: Path, controller: str, made: list[Path]) -> None:
    path.mkdir()
    made.append(path)
    if controller == "cpuset":  # a new one is empty, and takes no process
        for name in ("cpuset.cpus", "cpuset.mems"):
            (path / name).write_text((path.parent / name).read_text())


def _files(root: Path, jobid: int, pids: list[int]) -> None:
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    job = root / "system.slice" / "slurmstepd.scope" / f"job_{jobid}"
    task = job / "step_0" / "user" / "task_0"
    task.mkdir(parents=True)
    for path in (job, task, task.parent, task.parent.parent):
        for name, text in FILES.items():
            (path / name).write_text(text)
        (path / "cgroup.procs").write_text("")
    (task / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def _remove(path: Path) -> None:
    """Removes a control group, which may need a moment after the end of its last process."""
    for _ in range(100):
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
