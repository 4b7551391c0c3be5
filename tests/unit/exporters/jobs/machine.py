"""Trees of /proc and of control groups in the kernel's and Slurm's layout, from plain facts.

The shapes are those that a real 22.05 made in version 1 (seen with `find`), those that Slurm's
documentation of cgroup/v2 shows, and for 26.05 those of its release notes (`s` and 13 letters).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.options import NodeOptions, Roots

SCOPE = "system.slice/slurmstepd.scope"
V1_MEMORY_STAT = """\
cache 4096
rss 8192
shmem 0
hierarchical_memory_limit 9223372036854771712
total_cache {cache}
total_rss {rss}
total_rss_huge 0
total_shmem {shmem}
total_mapped_file 0
"""
V2_MEMORY_STAT = """\
anon {rss}
file {cache}
kernel 1654784
kernel_stack 16384
shmem {shmem}
file_mapped 0
"""
V2_CPU_STAT = """\
usage_usec {total}
user_usec {user}
system_usec {system}
nice_usec 0
nr_periods 0
nr_throttled 0
throttled_usec 0
"""


@dataclass
class Task:
    """A process: what its files in /proc show."""

    pid: int
    uid: int = 1000
    parent: int = 1
    start: int = 5000
    threads: int = 1
    command: bytes = b"python\0train.py\0"
    environment: Mapping[str, str] | None = None
    group: str = "0::/\n"
    utime: int = 0
    stime: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


class Machine:
    """A directory with `proc`, `cgroup` and `run`, and the options that point there."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup, self.run = root / "proc", root / "cgroup", root / "run"
        for path in (self.proc, self.cgroup, self.run):
            path.mkdir(parents=True)
        roots = Roots(proc=str(self.proc), cgroup=str(self.cgroup), run=str(self.run))
        self.options = NodeOptions(roots=roots, cluster="c")

    def only(self, *facts: Any, **more: Any) -> NodeOptions:
        """The options of an exporter inside of a job with these facts, its id first."""
        return replace(self.options, job=JobFacts(*facts, **more))

    def process(self, task: Task) -> None:
        """Show a process in /proc."""
        path = self.proc / str(task.pid)
        path.mkdir(exist_ok=True)
        name = task.command.split(b"\0")[0].rpartition(b"/")[2].split(b":")[0].decode()
        (path / "comm").write_text(f"{name}\n")
        (path / "cmdline").write_bytes(task.command)
        (path / "cgroup").write_text(task.group)
        pairs = (task.environment or {}).items()
        (path / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in pairs))
        uids = f"{task.uid}\t" * 4
        (path / "status").write_text(f"Name:\t{name}\nUmask:\t0022\nUid:\t{uids}\nThreads:\t1\n")
        # proc(5): pid (comm) state ppid pgrp session tty tpgid flags minflt cminflt majflt
        # cmajflt utime stime cutime cstime priority nice num_threads itrealvalue starttime …
        (path / "stat").write_text(
            f"{task.pid} (a ) b (c) S {task.parent} 1 1 0 -1 4194560 5 6 7 8 {task.utime}"
            f" {task.stime} 0 0 20 0 {task.threads} 0 {task.start} 227590144 900 1844674407\n"
        )
        (path / "statm").write_text("10000 900 400 1 0 500 0\n")
        (path / "io").write_text(
            f"rchar: 11\nwchar: 12\nsyscr: 1\nsyscw: 1\nread_bytes: {task.read_bytes}\n"
            f"write_bytes: {task.write_bytes}\ncancelled_write_bytes: 0\n"
        )

    def ended(self, pid: int) -> None:
        """Take a process away."""
        shutil.rmtree(self.proc / str(pid))

    def stepd(self, pid: int, jobid: str, step: str) -> int:
        """Show a slurmstepd; returns its process id."""
        title = f"slurmstepd: [{jobid}.{step}]     \0\0".encode()
        self.process(Task(pid, uid=0, command=title))
        return pid

    def group(self, path: str, pids: tuple[int, ...] = ()) -> Path:
        """Make a control group with its parents, which have no processes."""
        full = self.cgroup / path
        for part in [*reversed(full.relative_to(self.cgroup).parents), Path(path)]:
            here = self.cgroup / part
            here.mkdir(exist_ok=True)
            procs = here / "cgroup.procs"
            if not procs.exists():
                procs.write_text("")
        (full / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return full

    def unified(self, at: str = "") -> None:
        """Mark a version-2 mount."""
        path = self.cgroup / at
        path.mkdir(exist_ok=True)
        (path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")

    def step_2(self, job: str, step: str, stepd: int, tasks: Mapping[int, tuple[int, ...]]) -> None:
        """A step as cgroup/v2 lays it out, below the job's directory."""
        base = f"{job}/step_{step}"
        self.group(f"{base}/slurm", (stepd,))
        if (self.proc / str(stepd)).exists():
            (self.proc / str(stepd) / "cgroup").write_text(f"0::/{base}/slurm\n")
        for task, pids in tasks.items():
            self.group(f"{base}/user/task_{task}", pids)

    def step_1(
        self,
        job: str,
        step: str,
        stepd: int,
        pids: tuple[int, ...],
        controllers: Mapping[str, str] | None = None,
    ) -> None:
        """A step as cgroup/v1 of 22.05 lays it out; `job` is slurm…/uid_U/job_J.

        The freezer has the tasks in the step and slurmstepd in the job, the others have a group
        per task.
        """
        mounts = controllers or {one: one for one in ("freezer", "memory", "cpuacct", "cpuset")}
        for name, mount in mounts.items():
            if name == "freezer":
                self.group(f"{mount}/{job}/step_{step}", pids)
                procs = self.cgroup / mount / job / "cgroup.procs"
                procs.write_text(f"{procs.read_text()}{stepd}\n")
            else:
                self.group(f"{mount}/{job}/step_{step}/task_0", pids)

    def counts_2(
        self, job: str, *, user: int, system: int, rss: int, cache: int, shmem: int
    ) -> Path:
        """Files of a job's group in version 2; times in microseconds."""
        path = self.cgroup / job
        path.joinpath("cpu.stat").write_text(
            V2_CPU_STAT.format(total=user + system, user=user, system=system)
        )
        stat = V2_MEMORY_STAT.format(rss=rss, cache=cache, shmem=shmem)
        path.joinpath("memory.stat").write_text(stat)
        path.joinpath("memory.max").write_text("max\n")
        path.joinpath("memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
        path.joinpath("cpuset.cpus").write_text("\n")
        return path
