"""The local backend with real scripts and processes: nothing is lost, doubled or left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hpml_orchestrator
from hpml_orchestrator.errors import RecordError, SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.scheduler.local import jobs as local_jobs
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.scheduler.local.processes import (
    Identity,
    is_alive,
    kill_until_gone,
    processes,
    send,
)
from hpml_orchestrator.scheduler.local.resources import gpu_ids, without_slurm
from hpml_orchestrator.scheduler.model import (
    Dependency,
    JobState,
    JobStatus,
    Scheduler,
    SubmitRequest,
)
from tests.patience import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = str(Path(hpml_orchestrator.__file__).parents[1])


@dataclass
class Bench:
    """A home of its own on a machine of two CPUs and two GPUs."""

    path: Path
    options: dict[str, Any] = field(default_factory=dict)

    def scheduler(self, **more: Any) -> LocalScheduler:
        known: dict[str, Any] = {
            "cpu_ids": lambda: [0, 1],
            "gpu_ids": lambda: ["GPU-a", "GPU-b"],
            "memory_mb": lambda: 1024,
            "kill_wait_seconds": PATIENCE_SECONDS,
            "lock_root": self.path / "locks",
        }
        return LocalScheduler(self.home, **{**known, **self.options, **more})

    @property
    def home(self) -> Path:
        return self.path / "home"

    def request(self, body: str, *, name: str = "job", directory: str = "sub") -> SubmitRequest:
        where = self.path / directory
        where.mkdir(parents=True, exist_ok=True)
        where.joinpath("job.sh").write_text(f"#!/bin/bash\n{body}\n")
        return SubmitRequest(
            directory=where,
            output=where / "out.txt",
            name=name,
            comment="",
            environment={"PATH": os.environ["PATH"], "MINE": "yes"},
        )

    def run(self, body: str, **more: Any) -> JobStatus:
        return self.over(self.scheduler().submit(self.request(body, **more)))

    def over(self, job_id: str) -> JobStatus:
        return self.until(job_id, lambda status: status.state.over)

    def until(self, job_id: str, right: Callable[[JobStatus], bool]) -> JobStatus:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            status = self.scheduler().query([job_id])[job_id]
            if right(status):
                return status
            assert time.monotonic() < until, status
            time.sleep(0.02)

    def record(self, job_id: str) -> Any:
        return json.loads((self.home / "jobs" / job_id / "job.json").read_text())

    def supervisor(self, job_id: str) -> Identity:
        known = self.record(job_id)["supervisor"]
        return Identity(known["pid"], known["start"])

    def file(self, name: str, directory: str = "sub") -> Path:
        path = self.path / directory / name
        eventually(lambda: path.exists() and path.stat().st_size, f"{path} appears")
        return path

    def output(self, directory: str = "sub") -> str:
        return (self.path / directory / "out.txt").read_text()

    def members(self) -> list[str]:
        """Return the command lines of all processes that belong to a job of this home."""
        cluster = self.scheduler()._home.cluster.encode()
        found = []
        for pid in processes():
            try:
                if cluster in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(Path(f"/proc/{pid}/cmdline").read_text())
            except OSError:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "locks").mkdir()
    bench = Bench(tmp_path)
    yield bench
    scheduler = bench.scheduler()
    numbers = [str(number) for number in scheduler._home.numbers()]
    scheduler.cancel(numbers)
    for number in numbers:
        bench.over(number)
    eventually(lambda: not bench.members())


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def duration(status: JobStatus) -> float:
    assert status.started is not None
    assert status.ended is not None
    return status.ended - status.started


def test_is_a_scheduler(bench: Bench) -> None:
    """It has the calls of the Protocol and says what it will run."""
    scheduler: Scheduler = bench.scheduler()
    assert scheduler.name == "local"
    request = bench.request("true")
    assert scheduler.arguments(request) == ["bash", str(request.directory / "job.sh")]
    assert scheduler.query(["7", "nonsense", "../1"]) == {}


def test_runs_a_script_as_a_one_node_job(bench: Bench) -> None:
    """The variables of Slurm are there, the own ones too, output and answer where they belong."""
    status = bench.run(
        "#SBATCH -n 2 --gpus=1 --mem=512 -t 5 -p gpu\n"
        'echo "$SLURM_JOB_ID $SLURM_JOB_NAME $SLURM_NNODES $SLURM_NTASKS $SLURM_CPUS_ON_NODE"\n'
        'echo "$CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE $SLURM_MEM_PER_NODE $MINE"\n'
        'echo "${SLURM_CPUS_PER_TASK-unset} ${SLURM_RESTART_COUNT-unset}" >&2\n'
        '[ "$PWD" = "$SLURM_SUBMIT_DIR" ] && pwd\n'
        "echo $((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME)); nproc; cat",
        name="first",
    )
    assert (status.state, status.exit_code, status.signal) == (JobState.COMPLETED, 0, 0)
    where = bench.path / "sub"
    lines = bench.output().splitlines()
    assert lines[:5] == [
        "1 first 1 2 2",
        "GPU-a 1 512 yes",
        "unset unset",
        str(where),
        "300",
    ]
    assert (where / "sbatch.out").read_text() == "1\n"
    assert (where / "sbatch.err").read_text() == ""
    assert bench.record("1")["directives"]["ignored"] == ["-p gpu"]
    assert status.name == "first"
    assert status.directory == str(where)
    assert status.submitted is not None
    assert status.started is not None
    assert status.ended is not None
    assert status.submitted <= status.started <= status.ended
    assert bench.scheduler().find(where, name="first", since=status.submitted) == ["1"]
    assert bench.scheduler().find(where, name="second", since=0) == []


def test_records_how_a_script_failed(bench: Bench) -> None:
    """Exit status and signal are told apart; output is appended, never replaced."""
    status = bench.run("echo a; exit 7")
    assert (status.state, status.exit_code, status.reason) == (
        JobState.FAILED,
        7,
        "NonZeroExitCode",
    )
    status = bench.run("echo b; kill -9 $$")
    assert (status.state, status.exit_code, status.signal) == (JobState.FAILED, 0, 9)
    assert bench.output() == "a\nb\n"


def test_an_output_file_that_cannot_be_written_fails_the_job(bench: Bench) -> None:
    """The reason says which file."""
    request = bench.request("true")
    (request.directory / "out.txt").mkdir()
    status = bench.over(bench.scheduler().submit(request))
    assert status.state is JobState.FAILED
    assert "out.txt" in status.reason


@pytest.mark.parametrize("name", ["-n '\" $HOME `x` ünï☃", "new\nline", "100%j"])
def test_any_directory_name_will_do(bench: Bench, name: str) -> None:
    """Nothing is ever parsed by a shell."""
    status = bench.run('srun -n1 echo "$SLURM_SUBMIT_DIR"', directory=name)
    assert status.state is JobState.COMPLETED
    assert bench.output(name) == f"{bench.path / name}\n"
    assert bench.scheduler().find(bench.path / name, name="job", since=0) == ["1"]


def test_srun_is_the_local_one(bench: Bench) -> None:
    """It comes first on PATH, and knows the job's size."""
    status = bench.run(
        "#SBATCH -n 2\nsrun --label echo hi | sort\nsrun -n1 sh -c 'echo $SLURM_STEP_ID'"
    )
    assert (status.state, bench.output()) == (JobState.COMPLETED, "0: hi\n1: hi\n1\n")


def test_status_and_cancel_from_another_process(bench: Bench) -> None:
    """Any process of the user sees the job and can end it."""
    job = bench.scheduler().submit(bench.request("echo > up; sleep 600"))
    bench.file("up")
    code = (
        "import sys; from pathlib import Path\n"
        "from hpml_orchestrator.scheduler.local.backend import LocalScheduler\n"
        "s = LocalScheduler(Path(sys.argv[1]), lock_root=Path(sys.argv[2]))\n"
        "print(s.query(['1'])['1'].state)\n"
        "s.cancel(['1']); s.cancel(['1', '99'])\n"
    )
    done = python(code, str(bench.home), str(bench.path / "locks"))
    assert (done.stdout, done.stderr) == ("RUNNING\n", "")
    status = bench.over(job)
    assert (status.state, status.signal) == (JobState.CANCELLED, signal.SIGTERM)
    bench.scheduler().cancel([job])
    assert bench.over(job) == status


def test_cancel_reaches_every_process_and_lets_them_answer(bench: Bench) -> None:
    """The shell and a stopped child get SIGTERM; the shell's trap runs."""
    job = bench.scheduler().submit(
        bench.request(
            "trap 'echo shell >> told; exit 5' TERM\n"
            "python3 -c 'import signal,os,time\n"
            'signal.signal(15, lambda *_: (open("told", "a").write("child\\n"), os._exit(0)))\n'
            'open("pid", "w").write(str(os.getpid())); os.rename("pid", "up"); '
            # short sleeps: a signal that comes just before one is heard after it
            "os.kill(os.getpid(), 19); [time.sleep(.02) for _ in range(30000)]' &\n"
            "wait"
        )
    )
    child = int(bench.file("up").read_text())
    stat = Path(f"/proc/{child}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops itself")
    bench.scheduler().cancel([job])
    status = bench.over(job)
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 5)
    assert sorted(bench.file("told").read_text().split()) == ["child", "shell"]


def test_srun_tasks_get_one_signal_on_cancel(bench: Bench) -> None:
    """The supervisor tells the tasks and srun does not tell them again."""
    body = "trap 'echo x >> told; sleep .2; exit 0' TERM; echo > up; while :; do sleep .05; done"
    job = bench.scheduler().submit(bench.request(f'srun -n1 bash -c "{body}"'))
    bench.file("up")
    bench.scheduler().cancel([job])
    bench.over(job)
    assert bench.file("told").read_text() == "x\n"


def test_jobs_take_turns_in_order(bench: Bench) -> None:
    """Two that want the whole machine and a small one run first come, first served."""
    scheduler = bench.scheduler()
    body = 'echo "$SLURM_JOB_ID" >> "../order"; sleep .2; echo "-$SLURM_JOB_ID" >> ../order'
    request = bench.request(f"#SBATCH -n 2\necho > up\nread < gate\n{body}")
    os.mkfifo(bench.path / "sub" / "gate")
    first = scheduler.submit(request)
    jobs = [
        scheduler.submit(bench.request(f"#SBATCH -n {n}\n{body}", directory=f"s{i}"))
        for i, n in enumerate((2, 1))
    ]
    bench.until(first, lambda status: status.state is JobState.RUNNING)
    reasons = [status.reason for status in scheduler.query(jobs).values()]
    assert reasons == [
        "Resources: 2 CPUs wanted, 0 of 2 free (running: 1)",
        "Priority: job 2 is before it",
    ]
    (bench.path / "sub" / "gate").write_text("go\n")
    for job in (first, *jobs):
        assert bench.over(job).state is JobState.COMPLETED
    assert (bench.path / "order").read_text().split() == ["1", "-1", "2", "-2", "3", "-3"]


def test_jobs_that_fit_run_side_by_side_on_their_own_cpus_and_gpus(bench: Bench) -> None:
    """No CPU and no GPU is given to two jobs."""
    scheduler = bench.scheduler()
    body = "#SBATCH -n 1 --gpus=1\necho $CUDA_VISIBLE_DEVICES > gpu; sleep 600"
    jobs = [scheduler.submit(bench.request(body, directory=f"s{i}")) for i in (0, 1)]
    gpus = {bench.file("gpu", f"s{i}").read_text().strip() for i in (0, 1)}
    assert gpus == {"GPU-a", "GPU-b"}
    assert sorted(bench.record(job)["cpus"] for job in jobs) == [[0], [1]]
    waits = scheduler.submit(bench.request("#SBATCH --gpus=1", directory="s2"))
    scheduler.cancel([waits])
    status = scheduler.query([waits])[waits]
    assert (status.state, status.exit_code, status.started) == (JobState.CANCELLED, None, None)


def test_jobs_wait_for_the_end_of_others(bench: Bench) -> None:
    """Later jobs pass them; one that can never start is cancelled, which others may wait for."""

    def submit(name: str, body: str, *after: tuple[str, str]) -> str:
        waits = tuple(Dependency(job_id, end) for end, job_id in after)
        request = bench.request(body, name=name, directory=name)
        return bench.scheduler().submit(replace(request, after=waits))

    (bench.path / "good" / "output").mkdir(parents=True)  # for the array's tasks
    gate = bench.path / "gate"
    until = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    good = submit("good", f"#SBATCH --array=0-1\n{until}")
    bad = submit("bad", f"#SBATCH -c 1\n{until}; exit 3")
    waits = {
        "both": submit("both", "true", ("ok", good), ("any", f"{good}_1"), ("notok", bad)),
        "never": submit("never", "true", ("ok", bad), ("ok", good)),
        "unlike": submit("unlike", "true", ("notok", good)),
    }
    waits["chain"] = submit("chain", "true", ("any", waits["never"]))
    waits["doomed"] = submit("doomed", "true", ("ok", waits["never"]))
    last = bench.request("true", name="free", directory="free")
    states = bench.scheduler().query(list(waits.values()))
    assert {(one.state, one.reason) for one in states.values()} == {
        (JobState.PENDING, "Dependency")
    }
    free = bench.scheduler().submit(last)
    gate.touch()
    ends = {name: bench.over(job_id) for name, job_id in waits.items()}
    assert {name: one.state for name, one in ends.items()} == {
        "both": JobState.COMPLETED,
        "never": JobState.CANCELLED,
        "unlike": JobState.CANCELLED,
        "chain": JobState.COMPLETED,
        "doomed": JobState.CANCELLED,
    }
    assert ends["doomed"].reason == "DependencyNeverSatisfied"
    assert bench.over(free).state is JobState.COMPLETED


def test_a_long_queue_is_no_crowd_of_processes(bench: Bench) -> None:
    """Only the first few that wait have a supervisor, and yet every job runs."""
    scheduler = bench.scheduler()
    first = scheduler.submit(bench.request("#SBATCH -n 2\necho > up; sleep 600"))
    bench.file("up")
    requests = [bench.request("#SBATCH -n 2\necho x > done", directory=f"s{i}") for i in range(7)]
    jobs = [scheduler.submit(request) for request in requests]
    bench.until(jobs[3], lambda _: bench.record(jobs[3])["supervisor"] is not None)
    assert [bench.record(job)["supervisor"] for job in jobs[4:]] == [None] * 3
    scheduler.cancel([first])
    for number in range(7):  # watched by file alone: nothing but supervisors drives the queue
        bench.file("done", f"s{number}")


def test_time_limit_lets_the_script_finish(bench: Bench) -> None:
    """A trap of SIGTERM runs to its end; the state is TIMEOUT all the same."""
    status = bench.run(
        "#SBATCH --time=0:01\ntrap 'echo saved; exit 0' TERM\nwhile :; do sleep .05; done"
    )
    assert (status.state, status.exit_code, status.signal) == (JobState.TIMEOUT, 0, 0)
    assert bench.output().splitlines()[-1] == "saved"
    assert duration(status) >= 0.9


def test_time_limit_kills_who_ignores_it(bench: Bench) -> None:
    """After the kill wait nothing is asked any more."""
    bench.options["kill_wait_seconds"] = 0.5
    status = bench.run("#SBATCH --time=0:01\ntrap '' TERM\nwhile :; do sleep .05; done")
    assert (status.state, status.signal) == (JobState.TIMEOUT, signal.SIGKILL)
    assert duration(status) >= 1.4


@pytest.mark.parametrize("flag", ["B:", ""])
def test_warning_signal_comes_before_the_limit(bench: Bench, flag: str) -> None:
    """B: reaches the batch shell only, without it only the steps are told."""
    status = bench.run(
        f"#SBATCH --time=1:05 --signal={flag}USR1@60\n"  # five seconds to set the traps
        "trap 'echo shell; kill $!; exit 0' USR1\n"
        "srun -n1 bash -c 'trap \"echo step; exit 0\" USR1; while :; do sleep .05; done' &\n"
        "wait"
    )
    assert (status.state, status.exit_code) == (JobState.COMPLETED, 0)
    told = {"shell", "step"} & set(bench.output().splitlines())
    assert told == ({"shell"} if flag else {"step"})


def test_what_escapes_is_ended_with_the_job(bench: Bench) -> None:
    """A daemon without the job's session and environment is found by its descent."""
    status = bench.run(
        "setsid -f env -i /bin/bash -c 'echo $$ > pid; exec sleep 600'\n"
        "until [ -s pid ]; do sleep .01; done"
    )
    assert status.state is JobState.COMPLETED
    assert int(bench.file("pid").read_text()) not in processes()


def test_a_job_inside_a_job_is_its_own(bench: Bench) -> None:
    """Its supervisor belongs to nobody's leftovers and its variables are its own."""
    inner = bench.request(
        "#SBATCH -n 1\nsleep .5; echo $SLURM_JOB_ID ${SLURM_NTASKS_PER_NODE-no}", directory="inner"
    )
    code = bench.path / "inner.py"
    code.write_text(
        f"import os, sys; sys.path.insert(0, {ROOT!r}); from pathlib import Path\n"
        "from hpml_orchestrator.scheduler.local.backend import LocalScheduler\n"
        "from hpml_orchestrator.scheduler.model import SubmitRequest\n"
        f"s = LocalScheduler(Path({str(bench.home)!r}), cpu_ids=lambda: [0, 1],"
        f" lock_root=Path({str(bench.path / 'locks')!r}))\n"
        f"d = Path({str(inner.directory)!r})\n"
        "s.submit(SubmitRequest(d, d / 'out.txt', 'in', '', dict(os.environ)))\n"
    )
    status = bench.run(f"#SBATCH --ntasks-per-node=1\n{sys.executable} {code}")
    assert status.state is JobState.COMPLETED
    assert bench.over("2").state is JobState.COMPLETED
    assert bench.output("inner") == "2 no\n"


@pytest.mark.parametrize("point", ["begin", "locked", "published", "answered", "started"])
def test_a_killed_submission_leaves_one_job_or_none(bench: Bench, point: str) -> None:
    """Wherever hpml dies, the next call finds either no job or one, and that one runs once."""
    request = bench.request("echo ran")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from hpml_orchestrator.scheduler.local.backend import LocalScheduler\n"
        "from hpml_orchestrator.scheduler.model import SubmitRequest\n"
        "home, locks, d, point = sys.argv[1:]\n"
        "die = lambda here: here == point and os.kill(os.getpid(), 9)\n"
        "s = LocalScheduler(Path(home), lock_root=Path(locks), reached=die)\n"
        "d = Path(d)\n"
        "s.submit(SubmitRequest(d, d / 'out.txt', 'job', '', dict(os.environ)))\n"
    )
    done = python(code, str(bench.home), str(bench.path / "locks"), str(request.directory), point)
    assert done.returncode == -signal.SIGKILL, done.stderr
    scheduler = bench.scheduler()
    assert not scheduler.submitting(request.directory)
    found = scheduler.find(request.directory, name="job", since=0)
    if point in ("begin", "locked"):
        assert found == []
        assert not (request.directory / "sbatch.out").exists()
        return
    assert found == ["1"]
    assert bench.over("1").state is JobState.COMPLETED
    assert bench.output() == "ran\n"
    assert bench.file("sbatch.out").read_text() == "1\n"
    assert scheduler.find(request.directory, name="job", since=0) == ["1"]


def test_submitting_is_true_while_a_process_submits(bench: Bench) -> None:
    """And false before and after."""
    request = bench.request("true")
    seen: list[bool] = []

    def look(point: str) -> None:
        seen.append(bench.scheduler().submitting(request.directory))

    scheduler = bench.scheduler(reached=look)
    assert not scheduler.submitting(request.directory)
    scheduler.submit(request)
    assert seen == [True] * 5
    assert not scheduler.submitting(request.directory)


def test_what_died_while_this_process_was_stopped_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped (a fake clock) for longer than its patience, right after its first look."""
    now = [0.0]
    gone = Identity(2**22 + 1, 1)  # no kernel gives that number

    def find() -> list[Identity]:
        looked, now[0] = now[0], 100.0
        return [] if looked else [gone]

    with monkeypatch.context() as patch:
        patch.setattr("hpml_orchestrator.scheduler.local.processes.time.monotonic", lambda: now[0])
        assert kill_until_gone(find, patience_seconds=5) == []
        assert kill_until_gone(lambda: [gone], patience_seconds=-1) == [gone.pid]


def test_a_dead_supervisor_is_a_node_failure(bench: Bench) -> None:
    """What it ran is ended, escaped processes too, and its slots are free again."""
    job = bench.scheduler().submit(
        bench.request(
            "#SBATCH -n 2\nsetsid sleep 61 & \ntrap '' TERM; echo > up; sleep 62; sleep 63"
        )
    )
    bench.file("up")
    waits = bench.scheduler().submit(bench.request("#SBATCH -n 2", directory="next"))
    assert send(bench.supervisor(job), signal.SIGKILL)
    status = bench.until(job, lambda status: status.state is not JobState.RUNNING)
    assert status.state is JobState.NODE_FAIL
    assert "supervisor died" in status.reason
    assert not [line for line in bench.members() if "sleep" in line]
    assert bench.over(waits).state is JobState.COMPLETED


def test_a_waiting_job_survives_its_supervisor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes over; the job runs once."""
    monkeypatch.setattr(local_jobs, "_SPAWN_GRACE_SECONDS", 0.3)
    scheduler = bench.scheduler()
    first = scheduler.submit(bench.request("#SBATCH -n 2\necho > up; sleep 600"))
    bench.file("up")
    waits = scheduler.submit(bench.request("#SBATCH -n 2\necho ran", directory="next"))
    bench.until(waits, lambda _: bench.record(waits)["supervisor"] is not None)
    dead = bench.supervisor(waits)
    assert send(dead, signal.SIGKILL)
    bench.until(waits, lambda _: bench.supervisor(waits) != dead)
    assert is_alive(bench.supervisor(waits))
    scheduler.cancel([first])
    assert bench.over(waits).state is JobState.COMPLETED
    assert bench.output("next") == "ran\n"


def test_only_one_supervisor_claims_a_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are started for it."""
    monkeypatch.setattr(local_jobs, "_SPAWN_GRACE_SECONDS", 0.0)
    scheduler = bench.scheduler()
    job = scheduler.submit(bench.request("echo ran; sleep .3"))
    found = scheduler._home.load(job)
    assert found is not None
    with scheduler._home.lock():
        for _ in range(3):
            scheduler._home._spawn(found)
    assert bench.over(job).state is JobState.COMPLETED
    assert bench.output() == "ran\n"


def test_a_reboot_is_a_node_failure(bench: Bench) -> None:
    """A record of another boot names no process of this one."""
    job = bench.scheduler().submit(bench.request("true"))
    bench.over(job)
    record = bench.record(job)
    record |= {"state": "RUNNING", "ended": None, "exit_code": None}
    record["supervisor"] = {"pid": os.getpid(), "start": 1, "boot": "another"}
    write_json(bench.home / "jobs" / job / "job.json", record)
    status = bench.scheduler().query([job])[job]
    assert status.state is JobState.NODE_FAIL
    assert "restarted" in status.reason


def no_room(who: Identity, *, on: bool = True) -> None:
    """Let a process write no more bytes, into its log neither: a full disk for it alone."""
    _, hard = resource.prlimit(who.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(who.pid, resource.RLIMIT_FSIZE, (0 if on else hard, hard))


def without_room(monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    def refuse(path: Path, record: object) -> None:
        raise RecordError(f"cannot write {path}") from OSError(28, "No space left on device")

    def no_link(text: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_jobs, "write_json", refuse)
    if not links:
        monkeypatch.setattr(os, "symlink", no_link)


@pytest.mark.parametrize("seen", [True, False])
def test_an_end_without_room_is_kept(bench: Bench, seen: bool) -> None:
    """The supervisor stays until it could write; meanwhile the end is known where it can be."""
    job = bench.scheduler().submit(bench.request("echo > up; until [ -e go ]; do :; done; exit 3"))
    bench.file("up")
    who, directory = bench.supervisor(job), bench.home / "jobs" / job
    no_room(who)
    if not seen:
        (directory / "ended").write_text("in the way of the note")
    (bench.path / "sub" / "go").touch()
    if seen:
        status = bench.over(job)
        assert (status.state, status.exit_code) == (JobState.FAILED, 3)
        assert status.reason == "NonZeroExitCode; its end cannot be recorded: File too large"
        assert bench.record(job)["state"] == "RUNNING"
    else:
        time.sleep(1)
    assert is_alive(who)
    no_room(who, on=False)
    bench.until(job, lambda _: bench.record(job)["state"] == "FAILED" and not is_alive(who))
    status = bench.over(job)
    assert (status.exit_code, status.reason) == (3, "NonZeroExitCode")
    assert not (directory / "ended").exists()
    assert "File too large" in (directory / "supervisor.log").read_text()


def test_a_supervisor_without_room_can_be_told_to_stop(bench: Bench) -> None:
    """What it noted of the end stays the truth."""
    job = bench.scheduler().submit(bench.request("echo > up; until [ -e go ]; do :; done"))
    bench.file("up")
    who = bench.supervisor(job)
    no_room(who)
    (bench.path / "sub" / "go").touch()
    assert bench.over(job).state is JobState.COMPLETED
    send(who, signal.SIGTERM)
    status = bench.until(job, lambda _: not is_alive(who))
    assert (status.state, status.exit_code) == (JobState.COMPLETED, 0)


@pytest.mark.parametrize("links", [True, False])
def test_a_dead_supervisor_is_never_running(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Also where that cannot be written down: the answer does not depend on room."""
    scheduler = bench.scheduler()
    job = scheduler.submit(bench.request("echo > up; sleep 600"))
    bench.file("up")
    who = bench.supervisor(job)
    with monkeypatch.context() as patch:
        without_room(patch, links=links)
        send(who, signal.SIGKILL)
        bench.until(job, lambda _: not is_alive(who))
        first = scheduler.query([job])[job]
        assert first.state is JobState.NODE_FAIL
        assert first.exit_code is None
        assert "supervisor died" in first.reason
        assert links or "cannot be recorded: No space left on device" in first.reason
        assert scheduler.query([job])[job].ended == first.ended
        assert bench.scheduler().query([job])[job].state is JobState.NODE_FAIL
        assert bench.record(job)["state"] == "RUNNING"
    assert bench.over(job).state is JobState.NODE_FAIL
    assert scheduler.query([job])[job].state is JobState.NODE_FAIL


def test_a_told_supervisor_ends_its_job(bench: Bench) -> None:
    """SIGTERM to the supervisor, as at shutdown, ends the job as a failure of the node."""
    job = bench.scheduler().submit(bench.request("echo > up; sleep 600"))
    bench.file("up")
    send(bench.supervisor(job), signal.SIGTERM)
    status = bench.over(job)
    assert (status.state, status.signal) == (JobState.NODE_FAIL, signal.SIGTERM)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("#SBATCH --nodes=2", "--nodes=2"),
        ("#SBATCH --gpus=3", "--gpus=3"),
        ("#SBATCH -n 3", "-n 3"),
        ("#SBATCH --mem=2G", "--mem=2G"),
        ("#SBATCH --time=soon", "--time=soon"),
    ],
)
def test_a_refusal_leaves_no_job(bench: Bench, line: str, part: str) -> None:
    """The reason is in the error and in sbatch.err, and nothing was queued."""
    request = bench.request(line)
    with pytest.raises(SchedulerError) as caught:
        bench.scheduler().submit(request)
    assert part in str(caught.value)
    assert part in (request.directory / "sbatch.err").read_text()
    assert not (request.directory / "sbatch.out").exists()
    assert bench.scheduler().find(request.directory, name="", since=0) == []


def test_refuses_a_submission_without_script(bench: Bench) -> None:
    """And a home that cannot stand on PATH."""
    request = bench.request("true")
    with pytest.raises(SchedulerError, match="colon"):
        LocalScheduler(bench.path / "a:b", lock_root=bench.path / "locks").submit(request)
    (request.directory / "job.sh").unlink()
    with pytest.raises(SchedulerError, match=r"job\.sh"):
        bench.scheduler().submit(request)


def test_locks_of_others_are_not_trusted(bench: Bench) -> None:
    """A directory that others may write to is refused with its name."""
    place = bench.path / "locks" / f"hpml-locks-{os.geteuid()}"
    place.mkdir(mode=0o700)
    place.chmod(0o777)
    with pytest.raises(SchedulerUnavailable, match="locks"):
        bench.scheduler().submit(bench.request("true"))
    place.chmod(0o700)


def test_a_job_gets_no_variable_of_a_job_around_it() -> None:
    """Of Slurm's variables only the one that names the configuration stays."""
    found = without_slurm({"SLURM_JOB_ID": "1", "SLURMD_X": "", "SLURM_CONF": "/c", "A": "b"})
    assert found == {"SLURM_CONF": "/c", "A": "b"}


@pytest.mark.parametrize(
    ("value", "found"),
    [("0,1", ["0", "1"]), ("", []), ("GPU-x, 1", ["GPU-x", "1"]), ("0,-1,1", ["0"])],
)
def test_gpus_come_from_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, value: str, found: list[str]
) -> None:
    """Up to the first entry that is no device, as CUDA reads it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpu_ids() == found
