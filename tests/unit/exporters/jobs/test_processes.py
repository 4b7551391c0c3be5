"""I/O of processes is counted once and kept when they end; real processes are looked at."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpml_exporters.jobs import processes
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen
from hpml_exporters.jobs.processes import ProcessTotals
from hpml_exporters.options import Context, NodeOptions

from tests.patience import eventually
from tests.storage import in_memory, stored_folder
from tests.unit.exporters.collectors.families import values
from tests.unit.exporters.jobs.machine import Machine, Task

MIB = 1 << 20
WRITE = ("hpml_job_io_syscall_write_bytes_total", "c", "7")
RSS = ("hpml_job_memory_bytes", "c", "7", "rss")
STORED = ("hpml_job_io_write_bytes_total", "c", "7")

# Executes commands, one per line: write N bytes itself; write in a child and wait for it, or leave
# it a zombie; burn CPU time; hold memory.
WORKER = """
import os, signal, sys, time

def write(size, path):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    block = b"x" * (1 << 20)
    while size:
        size -= os.write(fd, block[:size])
    os.close(fd)

path, children, held = sys.argv[1], [], []
print("ready", flush=True)
for line in sys.stdin:
    what, number = line.split()
    number = int(number)
    if what == "write":
        write(number, path)
    elif what in ("child", "waiting"):
        pid = os.fork()
        if pid == 0:
            write(number, path)
            if what == "waiting":
                signal.pause()
            os._exit(0)
        if what == "child":
            os.waitpid(pid, 0)
        else:
            children.append(pid)
    elif what == "kill":
        os.kill(children[-1], signal.SIGKILL)
        time.sleep(0.1)
    elif what == "reap":
        os.waitpid(children.pop(), 0)
    elif what == "burn":
        end = time.process_time() + number / 1000
        while time.process_time() < end:
            pass
    elif what == "hold":
        held.append(os.urandom(1 << 16) * (number >> 16))
    print(children[-1] if children else 0, flush=True)
"""


class Worker:
    """The process of a job, and the job as the collector sees it."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", WORKER, str(directory / "file")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.context = Context(NodeOptions(cluster="c"))
        self.collector = processes.make(self.context)
        self.now = 0.0

    def tell(self, what: str, number: int = 0) -> int:
        """Have it done; returns the id of the newest child that is waiting."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {number}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def look(self, *others: int) -> dict[tuple[str, ...], float]:
        """Post the job's processes as they are, and sample."""
        pids = frozenset({self.process.pid, *others})
        job = JobSeen(JobFacts("7"), (), {"0": pids}, pids)
        self.context.jobs.post(Jobs({"7": job}))
        self.now += 10
        return values(self.collector.sample(self.now))


@pytest.fixture
def worker() -> Iterator[Worker]:
    # Not tmp_path: what goes to a RAM disk is not storage.
    with stored_folder() as folder:
        made = Worker(folder)
        yield made
        made.process.kill()
        made.process.communicate()


def grown(worker: Worker, before: float, *others: int) -> float:
    return (worker.look(*others)[WRITE] - before) / MIB


def test_what_processes_write(worker: Worker) -> None:
    """Also one that nobody saw but its parent; it stays when all have ended."""
    first = worker.look()
    worker.tell("write", 64 * MIB)
    second = worker.look()
    assert (second[WRITE] - first[WRITE]) / MIB == pytest.approx(64, abs=0.1)
    if not in_memory():  # where /var/tmp is none in memory
        assert (second[STORED] - first[STORED]) / MIB == pytest.approx(64, abs=0.5)
    worker.tell("child", 16 * MIB)
    before = worker.look()[WRITE]
    assert (before - second[WRITE]) / MIB == pytest.approx(16, abs=0.1)
    worker.process.kill()
    worker.process.wait()
    after = worker.look()
    assert after[WRITE] == before
    assert ("hpml_job_threads", "c", "7") not in after


def test_a_child_that_was_seen_and_waited_for(worker: Worker) -> None:
    """Its bytes are counted once, not again with its parent's; also while it is a zombie."""
    before = worker.look()[WRITE]
    child = worker.tell("waiting", 16 * MIB)
    eventually(lambda: grown(worker, before, child) >= 15.9)
    worker.tell("kill")
    assert grown(worker, before) == pytest.approx(16, abs=0.1)
    worker.tell("reap")
    assert grown(worker, before) == pytest.approx(16, abs=0.1)
    worker.tell("write", 4 * MIB)
    assert grown(worker, before) == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize(("groups", "second"), [((), 30), (({"": "/none"},), 530)])
def test_a_job_that_is_missed_once(
    tmp_path: Path, groups: tuple[dict[str, str], ...], second: int
) -> None:
    """In control groups it continues; without, it may be another local job of that number."""
    machine = Machine(tmp_path)
    context = Context(machine.options)
    collector = processes.make(context)

    def written(now: float, pid: int) -> float:
        pids = frozenset({pid})
        context.jobs.post(Jobs({"7": JobSeen(JobFacts("7"), groups, {"0": pids}, pids)}))
        return values(collector.sample(now))[STORED]

    machine.process(Task(5, start=100, write_bytes=500))
    assert written(0.0, 5) == 500
    machine.ended(5)
    context.jobs.post(Jobs({}))
    assert values(collector.sample(10.0)) == {}
    machine.process(Task(6, start=200, write_bytes=30))
    assert written(20.0, 6) == second
    context.jobs.post(Jobs({}))
    collector.sample(90.0)
    assert written(100.0, 6) == 30, "a minute later it is another job in any case"


def test_cpu_time_and_memory_where_no_group_counts_them(worker: Worker) -> None:
    """As on a laptop: 1 s of burning, 100 MiB held."""
    first = worker.look()
    worker.tell("burn", 1000)
    worker.tell("hold", 100 * MIB)
    second = worker.look()

    def seconds(found: dict[tuple[str, ...], float]) -> float:
        return sum(
            found["hpml_job_cpu_seconds_total", "c", "7", mode] for mode in ("user", "system")
        )

    assert 0.95 <= seconds(second) - seconds(first) <= 2.0
    assert (second[RSS] - first[RSS]) / MIB == pytest.approx(100, abs=5)


def test_threads_and_a_kernel_without_io_accounting(tmp_path: Path) -> None:
    """Threads of all processes together; no /proc/PID/io to speak of is no I/O of 0 bytes."""
    machine = Machine(tmp_path)
    for pid, threads in ((5, 3), (6, 4)):
        machine.process(Task(pid, threads=threads))
        (machine.proc / str(pid) / "io").write_text("")
    context = Context(machine.options)
    pids = frozenset({5, 6})
    context.jobs.post(Jobs({"7": JobSeen(JobFacts("7"), (), {"0": pids}, pids)}))
    found = values(processes.make(context).sample(0.0))
    assert found["hpml_job_threads", "c", "7"] == 7
    assert not [key for key in found if "_io_" in key[0]]


OTHERS = """
import os, sys
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen
from hpml_exporters.jobs import processes
from hpml_exporters.options import Context
from hpml_exporters.options import NodeOptions

assert os.getuid() == 65534
context = Context(NodeOptions(cluster="c"))
pids = frozenset(int(one) or os.getpid() for one in sys.argv[1:])
context.jobs.post(Jobs({"7": JobSeen(JobFacts("7"), ({"": "/nonexistent"},), {"0": pids}, pids)}))
for family in processes.make(context).sample(0.0):
    print(family.samples[0].name, *(sample.value for sample in family.samples))
"""


def as_nobody(rights: str, *pids: int) -> str:
    """What another user's exporter shows of a job with these processes."""
    given = ["--inh-caps", f"-all{rights}", "--ambient-caps", f"-all{rights}"]
    become = ["--reuid", "65534", "--regid", "65534", "--clear-groups", *given]
    # The interpreter and the packages may lie in a home directory that is closed to others.
    searching = [sys.executable, "-c", OTHERS, *map(str, pids)]
    done = subprocess.run(
        ["setpriv", *become, *searching], capture_output=True, text=True, check=False
    )
    if "ermission denied" in done.stderr and not rights:
        pytest.skip("another user cannot start this interpreter")
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_setpriv = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


@needs_setpriv
@pytest.mark.parametrize(
    ("rights", "with_own", "unreadable"),
    [
        ("", False, 1),
        (",+dac_read_search", False, 1),
        (",+dac_read_search", True, 1),
        (",+sys_ptrace,+dac_read_search", False, 0),
    ],
)
def test_processes_of_others(worker: Worker, rights: str, with_own: bool, unreadable: int) -> None:
    """Without the two capabilities of the systemd unit their job's I/O is absent, even in part."""
    worker.tell("write", 8 * MIB)
    shown = as_nobody(rights, worker.process.pid, *([0] if with_own else []))
    lines = {name: float(value) for name, value in map(str.split, shown.splitlines())}
    assert lines.get("hpml_job_unreadable_processes", 0) == unreadable
    assert lines["hpml_job_threads"] >= 1 + with_own
    if unreadable:
        assert not [name for name in lines if "_io_" in name]
    else:
        assert lines[WRITE[0]] >= 8 * MIB


def test_memory_that_forks_share_counts_once(worker: Worker) -> None:
    """A parent of 96 MiB and two forks of it: 96 MiB, and those of a process that shares none."""
    before = worker.look()[RSS]
    worker.tell("hold", 96 * MIB)
    forks = [worker.tell("waiting", 0) for _ in range(2)]
    holds = "x = b'x' * (32 << 20); print(flush=True); input()"
    try:
        shared = worker.look(*forks)[RSS] - before
        with subprocess.Popen(
            [sys.executable, "-Sc", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            more = worker.look(*forks, other.pid)[RSS] - before
            other.kill()
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
    assert shared / MIB == pytest.approx(96, abs=12)
    assert more / MIB == pytest.approx(128, abs=20)
    # those of the parent are its own again
    eventually(lambda: (worker.look()[RSS] - before) / MIB == pytest.approx(96, abs=12))


def test_many_processes_share_the_looks(tmp_path: Path) -> None:
    """A look ends when its time is up; the next one continues there, and none is left out."""
    machine = Machine(tmp_path)
    machine.process(Task(1, write_bytes=7))
    pids = frozenset(range(1000, 1010))
    for pid in pids:
        (machine.proc / str(pid)).symlink_to("1")
    context = Context(machine.options)
    job = JobSeen(JobFacts("7"), ({"": "/nonexistent"},), {"0": pids}, pids)
    context.jobs.post(Jobs({"7": job}))
    collector = processes.ProcessesCollector(context, budget=0.0)
    found = [values(collector.sample(float(look)))[STORED] for look in range(1, 13)]
    assert found == [*range(7, 77, 7), 70, 70]


Seen = tuple[int, int, int, int]  # pid, parent, start, count

# Successive looks at the processes of a job, and the sum after each.
LIVES: dict[str, list[tuple[list[Seen], int]]] = {
    "two that grow": [([(1, 0, 1, 10), (2, 1, 2, 5)], 15), ([(1, 0, 1, 20), (2, 1, 2, 6)], 26)],
    "a child that is waited for": [
        ([(1, 0, 1, 100), (2, 1, 2, 50)], 150),
        ([(1, 0, 1, 150)], 150),
        ([(1, 0, 1, 160)], 160),
    ],
    "a parent read a moment before it waits": [
        ([(1, 0, 1, 100), (2, 1, 2, 50)], 150),
        ([(1, 0, 1, 100)], 150),
        ([(1, 0, 1, 150)], 150),
        ([(1, 0, 1, 160)], 160),
    ],
    "one that nobody of the job waits for": [
        ([(1, 0, 1, 100), (2, 9, 2, 50)], 150),
        ([(1, 0, 1, 110)], 160),
        ([(1, 0, 1, 110), (3, 9, 3, 7)], 167),
        ([], 167),
    ],
    "a shell and its program end together": [
        ([(1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40)], 70),
        ([(1, 0, 1, 70)], 70),
    ],
    "a shell waits for its program, and ends": [
        ([(1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40)], 70),
        ([(1, 0, 1, 10), (2, 1, 2, 60)], 70),
        ([(1, 0, 1, 75)], 75),
    ],
    "children that outlive their parent go to a subreaper": [
        ([(1, 0, 1, 0), (2, 1, 2, 5), (3, 2, 3, 100), (4, 2, 4, 100)], 205),
        ([(1, 0, 1, 5), (3, 1, 3, 100), (4, 1, 4, 100)], 205),
        ([(1, 0, 1, 205)], 205),
    ],
    "an id that comes again": [([(2, 0, 5, 50)], 50), ([(2, 0, 9, 3)], 53), ([(2, 0, 9, 4)], 54)],
    "counts that fall": [([(1, 0, 1, 100)], 100), ([(1, 0, 1, 60)], 100)],
}


@pytest.mark.parametrize("looks", LIVES.values(), ids=LIVES)
def test_lives(looks: list[tuple[list[Seen], int]]) -> None:
    """The total after each look."""
    job = ProcessTotals(1)
    for seen, total in looks:
        job.keep([pid for pid, *_ in seen])
        for pid, parent, start, count in seen:
            job.seen(pid, parent, start, (count,))
        assert job.total() == (total,)
