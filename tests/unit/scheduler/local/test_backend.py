"""The local backend with real scripts and processes: nothing is lost, doubled or left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hpml_orchestrator
from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.scheduler.local.processes import (
    Identity,
    gpu_ids,
    is_alive,
    marked,
    send,
)
from hpml_orchestrator.scheduler.model import Dependency, JobState, Scheduler, SubmitRequest
from tests.patience import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from tests.unit.scheduler.local.conftest import Bench

ROOT = str(Path(hpml_orchestrator.__file__).parents[1])


def test_runs_a_script_as_slurm_would(bench: Bench) -> None:
    """Variables, directory, CPUs, GPUs and limits are those of a one-node job."""
    scheduler: Scheduler = bench.scheduler()
    request = bench.request(
        "echo $SLURM_JOB_ID $SLURM_JOB_NAME $SLURM_NNODES $SLURM_NTASKS $SLURM_CPUS_ON_NODE\n"
        "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE $SLURM_MEM_PER_NODE $MINE\n"
        "echo $SLURM_CPUS_PER_TASK ${SLURM_RESTART_COUNT-unset} $TMPDIR\n"
        "pwd; echo $((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME))\n"
        "nproc; cat; scontrol show hostnames; scontrol show hostnames $SLURM_JOB_NODELIST",
        name="first",
        ranks_per_node=2,
        gpus=1,
        memory="512M",
        time=5,
    )
    assert scheduler.submit(request) == "1"
    status = bench.over("1")
    where = request.directory
    assert (status.state, status.exit_code, status.signal) == (JobState.COMPLETED, 0, 0)
    assert bench.output().splitlines()[:5] == [
        "1 first 1 2 2",
        "GPU-a 1 512 yes",
        "1 unset /tmp",
        str(where),
        "300",
    ]
    host = os.uname().nodename.partition(".")[0]
    assert bench.output().splitlines()[6:] == [host, host]
    assert (where / "sbatch.out").read_text() == "1\n"
    assert (where / "sbatch.err").read_text() == ""
    assert (status.name, status.directory) == ("first", str(where))
    assert status.submitted is not None
    assert status.started is not None
    assert status.ended is not None
    assert status.submitted <= status.started <= status.ended
    assert scheduler.find(where, name="first", since=status.submitted) == ["1"]
    assert scheduler.find(where, name="second", since=0) == []


@pytest.mark.parametrize(
    ("body", "exit_code", "number", "reason"),
    [
        ("echo a; exit 7", 7, 0, "NonZeroExitCode"),
        ("echo a; kill -9 $$", 0, 9, "RaisedSignal:9(Killed)"),
    ],
)
def test_records_how_a_script_failed(
    bench: Bench, body: str, exit_code: int, number: int, reason: str
) -> None:
    """Exit status and signal are distinguished; output is appended, never replaced."""
    (bench.request("").directory / "out.txt").write_text("before\n")
    status = bench.run(body)
    assert status.state is JobState.FAILED
    assert (status.exit_code, status.signal, status.reason) == (exit_code, number, reason)
    assert bench.output() == "before\na\n"


@pytest.mark.parametrize("name", ["-n '\" $HOME `x` ünï☃", "new\nline", "100%a"])
def test_any_directory_name_will_do(bench: Bench, name: str) -> None:
    """Nothing is ever parsed by a shell."""
    status = bench.run('srun --ntasks=1 echo "$SLURM_SUBMIT_DIR"', directory=name)
    assert status.state is JobState.COMPLETED
    assert bench.output(name) == f"{bench.path / name}\n"
    assert bench.scheduler().find(bench.path / name, name="job", since=0) == ["1"]


def test_srun_is_the_local_one(bench: Bench) -> None:
    """It comes first on PATH, knows the job's size, and counts the job's steps."""
    status = bench.run(
        "srun echo hi\nsrun --ntasks=1 sh -c 'echo $SLURM_STEP_ID'", ranks_per_node=2
    )
    assert (status.state, bench.output()) == (JobState.COMPLETED, "hi\nhi\n1\n")


def test_cancel_reaches_every_process_and_lets_them_answer(bench: Bench) -> None:
    """The shell and a stopped child get SIGTERM once; the shell's trap runs."""
    job_id = bench.submit(
        "trap 'echo shell >> stopped; exit 5' TERM\n"
        "python3 -c 'import signal,os,time\n"
        'signal.signal(15, lambda *_: (open("stopped", "a").write("child\\n"), os._exit(0)))\n'
        'open("pid", "w").write(str(os.getpid())); os.rename("pid", "up"); '
        # short sleeps: a signal that comes just before one is heard after it
        "os.kill(os.getpid(), 19); [time.sleep(.02) for _ in range(30000)]' &\n"
        "wait"
    )
    child = int(bench.file("up"))
    eventually(lambda: (stat := read_stat(child)) and stat.state == "T", "it stops itself")
    bench.scheduler().cancel([job_id, "99"])
    status = bench.over(job_id)
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 5)
    assert sorted(bench.file("stopped").split()) == ["child", "shell"]
    assert f"JOB {job_id} ON {os.uname().nodename} CANCELLED AT 20" in bench.output()
    bench.scheduler().cancel([job_id])
    assert bench.status(job_id) == status


def test_srun_tasks_get_one_signal_on_cancel(bench: Bench) -> None:
    """The supervisor signals the tasks, and srun does not signal them again."""
    body = "trap 'echo x >> stopped; sleep .2; exit 0' TERM; echo > up; while :; do sleep .05; done"
    job_id = bench.submit(f'srun --ntasks=1 bash -c "{body}"')
    bench.file("up")
    bench.scheduler().cancel([job_id])
    bench.over(job_id)
    assert bench.file("stopped") == "x\n"


def test_jobs_take_turns_in_order(bench: Bench) -> None:
    """A small one that there is room for does not overtake one that wants the whole machine."""
    body = 'echo "$SLURM_JOB_ID" >> ../order; sleep .1; echo "-$SLURM_JOB_ID" >> ../order'
    os.mkfifo(bench.request("").directory / "gate")
    first = bench.submit(f"read < gate\n{body}")
    bench.running(first)
    waiting = [bench.submit(body, directory="s2", ranks_per_node=2)]
    bench.waits(waiting[0], "Resources: 2 CPUs wanted, 1 of 2 free (running: 1)")
    waiting.append(bench.submit(body, directory="s1"))
    bench.waits(waiting[1], "Priority: an earlier job waits for room")
    (bench.path / "sub" / "gate").write_text("go\n")
    # no question is asked until the last has run: supervisors alone drive the queue
    eventually(lambda: "-3" in bench.file("order", "."))
    assert (bench.path / "order").read_text().split() == ["1", "-1", "2", "-2", "3", "-3"]
    for job_id in (first, *waiting):
        assert bench.over(job_id).state is JobState.COMPLETED


def test_jobs_that_fit_run_side_by_side_on_their_own_cpus_and_gpus(bench: Bench) -> None:
    """No CPU and no GPU is given to two jobs; one that waits is cancelled at once."""
    body = "{ echo $CUDA_VISIBLE_DEVICES; taskset -cp $$; } > new; mv new has; sleep 600"
    for directory in ("a", "b"):
        bench.submit(body, directory=directory, gpus=1)
    has = [bench.file("has", directory).split() for directory in ("a", "b")]
    assert {(one[0], one[-1]) for one in has} == {("GPU-a", "0"), ("GPU-b", "1")}
    waits = bench.submit("", directory="c", gpus=1)
    bench.scheduler().cancel([waits])
    status = bench.status(waits)
    assert (status.state, status.exit_code, status.started) == (JobState.CANCELLED, None, None)


def test_jobs_wait_for_the_end_of_others(bench: Bench) -> None:
    """Later jobs pass them; one that can never start is cancelled, which others may wait for."""

    def submit(name: str, body: str, *after: tuple[str, str], array: str = "") -> str:
        waits = tuple(Dependency(job_id, end) for end, job_id in after)
        request = bench.request(body, name=name, directory=name, array=array)
        return bench.scheduler().submit(replace(request, after=waits))

    gate = bench.path / "gate"
    until = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    good = submit("good", until, array="0-1")
    bad = submit("bad", f"{until}; exit 3")
    waits = {
        "both": submit("both", "true", ("ok", good), ("any", f"{good}_1"), ("notok", bad)),
        "never": submit("never", "true", ("ok", bad), ("ok", good)),
        "unlike": submit("unlike", "true", ("notok", good)),
    }
    waits["chain"] = submit("chain", "true", ("any", waits["never"]))
    waits["doomed"] = submit("doomed", "true", ("ok", waits["never"]))
    for job_id in waits.values():
        bench.waits(job_id, "Dependency")
    free = submit("free", "true")
    gate.touch()
    ends = {name: bench.over(job_id) for name, job_id in waits.items()}
    assert {name: one.state.value for name, one in ends.items()} == {
        "both": "COMPLETED",
        "never": "CANCELLED",
        "unlike": "CANCELLED",
        "chain": "COMPLETED",
        "doomed": "CANCELLED",
    }
    assert ends["doomed"].reason == "DependencyNeverSatisfied"
    assert bench.over(free).state is JobState.COMPLETED


@pytest.mark.parametrize(
    ("trap", "kill_wait", "number", "last"),
    [("'echo saved; exit 0'", PATIENCE_SECONDS, 0, "saved"), ("''", 0.3, 9, "")],
    ids=["listens", "ignores"],
)
def test_time_limit(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    trap: str,
    kill_wait: float,
    number: int,
    last: str,
) -> None:
    """A trap of SIGTERM runs to its end; who ignores it is killed; the state is TIMEOUT."""
    monkeypatch.setenv("HPML_LOCAL_KILL_WAIT", str(kill_wait))
    status = bench.run(f"trap {trap} TERM\nwhile :; do sleep .05; done", time="0:01")
    assert (status.state, status.exit_code, status.signal) == (JobState.TIMEOUT, 0, number)
    assert "DUE TO TIME LIMIT ***" in bench.output()
    assert bench.output().endswith(f"{last}\n")


def test_what_escapes_is_ended_with_the_job(bench: Bench) -> None:
    """A daemon without the job's session and environment is found by its descent."""
    status = bench.run(
        "setsid -f env -i /bin/bash -c 'echo $$ > pid; exec sleep 600'\n"
        "until [ -s pid ]; do sleep .01; done"
    )
    assert status.state is JobState.COMPLETED
    assert read_stat(bench.file("pid").strip()) is None


def test_a_job_inside_a_job_is_its_own(bench: Bench) -> None:
    """Its supervisor is not ended with the outer job, and its variables are its own."""
    body = "sleep .5; echo $SLURM_JOB_ID $SLURM_NTASKS_PER_NODE ${SLURM_STEP_ID-no}"
    inner = bench.request(body, directory="inner", ranks_per_node=2)
    code = bench.path / "inner.py"
    code.write_text(
        f"import os, sys; sys.path.insert(0, {ROOT!r}); from pathlib import Path\n"
        "from hpml_orchestrator.scheduler.local.backend import LocalScheduler\n"
        "from hpml_orchestrator.scheduler.model import SubmitRequest\n"
        "from hpml_orchestrator.scheduler.command import job_environment\n"
        f"p, d = Path({str(bench.path)!r}), Path({str(inner.directory)!r})\n"
        "from hpml_orchestrator.scheduler.local.processes import LocalMachine\n"
        "m = LocalMachine((0, 1), (), 0)\n"
        "s = LocalScheduler(p / 'home', machine=m)\n"
        "s.submit(SubmitRequest(d, d / 'out.txt', 'in', '', job_environment(os.environ, 'all')))\n"
    )
    status = bench.run(f"srun {sys.executable} {code}")
    assert status.state is JobState.COMPLETED
    assert bench.over("2").state is JobState.COMPLETED
    assert bench.output("inner") == "2 2 no\n"


def dying_submission(bench: Bench, request: SubmitRequest, step: int) -> bool:
    """Submit in a process that dies at its n-th file operation; return whether it died."""
    pid = os.fork()
    if pid == 0:
        left = step

        def die(event: str, _: object) -> None:
            nonlocal left
            left -= event in ("open", "os.rename", "os.mkdir", "os.link", "subprocess.Popen")
            if left < 0:
                os._exit(9)

        sys.addaudithook(die)
        bench.scheduler().submit(request)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("array", [False, True])
def test_a_killed_submission_leaves_one_job_or_none(bench: Bench, array: bool) -> None:
    """Wherever hpml dies, the next call finds either no job or one, and that one runs once."""
    outcomes: list[str] = []
    step = 0
    while not outcomes or outcomes[-1] != "survived":
        request = bench.array("0-2", "echo ran") if array else bench.request("echo ran")
        killed = dying_submission(bench, request, step)
        scheduler = bench.scheduler()
        while scheduler.submitting(request.directory):  # its supervisor looks after the job
            pass
        found = scheduler.find(request.directory, name="job", since=0)
        outcomes.append("none" if not found else "one" if killed else "survived")
        assert len(found) <= 1
        if found and (outcomes.count("one") in (0, 1) or outcomes[-1] == "survived"):
            assert bench.over(found[0]).state is JobState.COMPLETED
            paths = [request.task_output(n) for n in range(3)] if array else [request.output]
            assert [path.read_text() for path in paths] == ["ran\n"] * len(paths)
        bench.scheduler().cancel(found)
        for job_id in found:
            bench.over(job_id)
        shutil.rmtree(request.directory)
        shutil.rmtree(bench.path / "home", ignore_errors=True)
        step += 1
    assert outcomes == sorted(outcomes, key=["none", "one", "survived"].index)
    assert len(set(outcomes)) == 3


def test_a_dead_supervisor_is_a_node_failure(bench: Bench) -> None:
    """What it ran is killed, escaped processes too, and its slots are free again."""
    job_id = bench.submit(
        "setsid sleep 61 & \ntrap '' TERM; echo > up; sleep 62; sleep 63", ranks_per_node=2
    )
    bench.file("up")
    waits = bench.submit("echo > ran", directory="next", ranks_per_node=2)
    assert send(bench.supervisor(job_id), signal.SIGKILL)
    bench.file("ran", "next")  # nobody has asked
    status = bench.until(job_id, lambda status: status.state is not JobState.RUNNING)
    assert status.state is JobState.NODE_FAIL
    assert "supervisor died" in status.reason
    assert bench.over(waits).state is JobState.COMPLETED
    assert not bench.processes()


def supervisors(bench: Bench, job_id: str) -> list[Identity]:
    """Return the processes that wait for a submission's next task or run one."""
    found = []
    for who in marked([f"HPML_LOCAL_SUPERVISOR={job_id}"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            if str(bench.path) in Path(f"/proc/{who.pid}/cmdline").read_text():
                found.append(who)
    return found


@pytest.mark.parametrize("tasks", ["", "0-1"])
def test_a_killed_supervisor_that_waits_is_replaced(bench: Bench, tasks: str) -> None:
    """The next call starts another one, and each task runs once; others pass meanwhile."""
    first = bench.submit("echo > up; until [ -e ../go ]; do sleep .02; done", ranks_per_node=2)
    bench.running(first)
    request = bench.request("echo ran", directory="next", array=tasks)
    job_id = bench.scheduler().submit(request)
    bench.waits(job_id, "Resources: 1 CPUs wanted, 0 of 2 free (running: 1)")
    (waiting,) = supervisors(bench, job_id)
    assert send(waiting, signal.SIGKILL)
    later = bench.submit("", directory="later")
    (bench.path / "go").touch()
    assert bench.over(later).state is JobState.COMPLETED
    assert bench.over(job_id).state is JobState.COMPLETED
    outputs = [request.task_output(n) for n in (0, 1)] if tasks else [request.output]
    assert [path.read_text() for path in outputs] == ["ran\n"] * len(outputs)


def test_nothing_starts_while_the_machine_shuts_down(bench: Bench) -> None:
    """TERM ends one that waits, whoever has started it; one that runs starts none."""
    job_id = bench.submit("echo > up; sleep 64", array="0-1", ranks_per_node=2)
    bench.waits(f"{job_id}_1", f"Resources: 2 CPUs wanted, 0 of 2 free (running: {job_id}_0)")
    running = bench.supervisor(job_id)
    (waiting,) = [one for one in supervisors(bench, job_id) if one != running]
    assert send(waiting, signal.SIGTERM)
    eventually(lambda: supervisors(bench, job_id) == [running])
    assert send(running, signal.SIGTERM)
    eventually(lambda: not supervisors(bench, job_id))
    assert bench.until(f"{job_id}_0", lambda status: status.state.over).state is JobState.NODE_FAIL
    bench.running(f"{job_id}_1")  # once somebody calls hpml again


def test_supervisors_that_are_killed_all_the_time(bench: Bench) -> None:
    """Every task ends, none starts twice, no CPU is shared, and no process is left."""
    note = 'echo $SLURM_JOB_ID $(taskset -cp $$ | sed "s/.*: //; s/-/,/") $(date +%s%N) >> ../'
    body = f"{note}began; (setsid sleep 600 &); sleep .2; {note}ended"
    job_ids = [
        bench.submit(body, directory=f"d{number}", ranks_per_node=ranks, array=tasks)
        for number, (ranks, tasks) in enumerate([(1, ""), (2, ""), (1, "0-3"), (1, "0-2%1")])
    ]
    kills, chance = 0, random.Random(7)
    while not all(status.state.over for status in bench.scheduler().query(job_ids).values()):
        found = [pid for job_id in job_ids for pid in supervisors(bench, job_id)]
        if found and kills < 5:
            kills += send(chance.choice(found), signal.SIGKILL)
        time.sleep(0.1)
    began = [line.split() for line in bench.file("began", ".").splitlines()]
    ends = [line.split() for line in bench.file("ended", ".").splitlines()]
    ended = {number: int(moment) for number, _, moment in ends}
    assert len({number for number, *_ in began}) == len(began)
    busy: dict[str, int] = {}
    for number, cpus, start in sorted(began, key=lambda one: int(one[2])):
        for cpu in cpus.split(","):
            assert busy.get(cpu, 0) < int(start)
            busy[cpu] = ended.get(number, 0)
    eventually(lambda: not bench.processes())
    assert kills


def test_a_reboot_is_a_node_failure(bench: Bench) -> None:
    """A record of another boot names no process of this one."""
    job_id = bench.submit("true")
    bench.over(job_id)
    supervisor = {**asdict(this_owner("")), "boot_id": "another"}
    state = {"state": "RUNNING", "started": 1.0, "supervisor": supervisor}
    write_json(bench.path / "home" / "jobs" / job_id / "0.json", state)
    status = bench.over(job_id)  # later, while the job's own supervisor still holds the lock
    assert status.state is JobState.NODE_FAIL
    assert "restarted" in status.reason


def test_the_jobs_of_another_machine_are_left_alone(bench: Bench) -> None:
    """Seen through a shared file system they are what that machine wrote down."""
    job_id = bench.submit("echo > up; sleep 600")
    bench.file("up")
    path = bench.path / "home" / "jobs" / job_id / "job.json"
    request = json.loads(path.read_text())
    write_json(path, {**request, "host": "elsewhere"})
    try:
        send(bench.supervisor(job_id), signal.SIGSTOP)
        assert bench.status(job_id).state is JobState.RUNNING
        with pytest.raises(SchedulerError, match="elsewhere"):
            bench.scheduler().cancel([job_id])
    finally:
        write_json(path, request)
        send(bench.supervisor(job_id), signal.SIGCONT)


@pytest.mark.parametrize("tasks", [0, 3])
def test_variables_are_private_and_go_with_the_job(bench: Bench, tasks: int) -> None:
    """They may be passwords; tasks that still wait need them, also if others were cancelled."""
    body = "echo > up$SLURM_ARRAY_TASK_ID; until [ -e go ]; do sleep .02; done"
    request = bench.array(f"1-{tasks}%1", body) if tasks else bench.request(body)
    job_id = bench.scheduler().submit(request)
    bench.file("up1" if tasks else "up")
    path = bench.path / "home" / "jobs" / job_id / "environment"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o077) == (0o600, 0)
    if tasks:
        bench.scheduler().cancel([f"{job_id}_2"])
        bench.scheduler().query([job_id])
        assert path.exists()
    (bench.path / "sub" / "go").touch()
    for one in [f"{job_id}_{index + 1}" for index in range(tasks)] or [job_id]:
        bench.over(one)
    eventually(lambda: not path.exists())
    assert b"MINE" not in b"".join(
        file.read_bytes() for file in path.parent.rglob("*") if file.is_file()
    )


def test_the_id_of_a_removed_job_is_not_used_again(bench: Bench) -> None:
    """Records of others that waited for it would mean the new one."""
    first = bench.scheduler().submit(bench.array("0-4", "true"))
    bench.over(first)
    (bench.path / "home" / "jobs" / first).rename(bench.path / "removed")
    assert int(bench.submit("true")) == int(first) + 5


def no_room(who: Identity, *, on: bool = True) -> None:
    """Let a process write no more bytes: a full disk for it alone."""
    _, hard = resource.prlimit(who.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(who.pid, resource.RLIMIT_FSIZE, (0 if on else hard, hard))


def test_an_end_without_room_is_recorded_later(bench: Bench) -> None:
    """The supervisor stays until it could write."""
    job_id = bench.submit("echo > up; until [ -e go ]; do sleep .02; done; exit 3")
    bench.file("up")
    who = bench.supervisor(job_id)
    no_room(who)
    (bench.path / "sub" / "go").touch()
    eventually(lambda: not [line for line in bench.processes() if "job.sh" in line])
    assert bench.status(job_id).state is JobState.RUNNING
    no_room(who, on=False)
    status = bench.over(job_id)
    assert (status.exit_code, status.reason) == (3, "NonZeroExitCode")
    eventually(lambda: not is_alive(who))


def test_a_dead_supervisor_is_never_running(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that cannot be recorded."""
    job_id = bench.submit("echo > up; sleep 600")
    bench.file("up")
    who = bench.supervisor(job_id)
    send(who, signal.SIGKILL)
    eventually(lambda: not is_alive(who))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert bench.status(job_id).state is JobState.NODE_FAIL
    assert bench.over(job_id).state is JobState.NODE_FAIL


def test_a_supervisor_that_is_told_to_stop_ends_its_job(bench: Bench) -> None:
    """SIGTERM to the supervisor, as at shutdown, ends the job as a failure of the node."""
    job_id = bench.submit("echo > up; sleep 600")
    bench.file("up")
    send(bench.supervisor(job_id), signal.SIGTERM)
    status = bench.over(job_id)
    assert (status.state, status.signal) == (JobState.NODE_FAIL, signal.SIGTERM)
    assert "DUE TO NODE FAILURE ***" in bench.output()


def test_a_refusal_leaves_no_job(bench: Bench) -> None:
    """The reason is in the error and in sbatch.err, and nothing was queued."""
    request = bench.request("", gpus=3)
    with pytest.raises(SchedulerError, match="asks for 3 GPUs; this machine .* has 2"):
        bench.scheduler().submit(request)
    assert "3 GPUs" in (request.directory / "sbatch.err").read_text()
    with pytest.raises(SchedulerError, match=r"asks for 9T of memory; this machine .* has \d+[MG]"):
        bench.scheduler().submit(bench.request("", memory=9 << 20))
    assert not (request.directory / "sbatch.out").exists()
    assert bench.scheduler().find(request.directory, name="", since=0) == []
    with pytest.raises(SchedulerError, match="colon"):
        LocalScheduler(bench.path / "a:b").submit(request)
    (request.directory / "job.sh").unlink()
    with pytest.raises(SchedulerError, match=r"job\.sh"):
        bench.scheduler().submit(request)
    (request.directory / "agent.json").unlink()
    (request.directory / "job.sh").touch()
    with pytest.raises(SchedulerError, match=r"agent\.json"):
        bench.scheduler().submit(request)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"nodes": 2}, "2 nodes; .* has 1$"),
        ({"ranks_per_node": 3}, r"3 CPUs \(3 ranks of 1\); .* has 2$"),
        ({"launcher": "torchrun", "cpus_per_rank": 3}, "3 CPUs"),
        ({"memory": "2G"}, "2G of memory; .* has 1G"),
        ({"array": "0-1000"}, "1001 array tasks; .* has 1000$"),
    ],
)
def test_refuses_more_than_the_machine_has(bench: Bench, asked: dict[str, Any], words: str) -> None:
    """The message names the request and what is here, the hint the way out."""
    with pytest.raises(SchedulerError, match=words) as caught:
        bench.submit("", **asked)
    assert "Slurm cluster" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"ranks_per_node": 2}, "2 2 1\n"),
        ({"launcher": "torchrun", "ranks_per_node": 2}, "2 1 2\n"),
        ({"exclusive": True}, "2 1 1\n"),
        ({"ranks_per_node": 4, "extra": ["--overcommit"]}, "2 4 1\n"),
        ({"cpus_per_rank": 1}, "1 1 1\n"),
    ],
)
def test_a_job_holds_what_its_file_asks_for(
    bench: Bench, asked: dict[str, Any], found: str
) -> None:
    """CPUs are ranks times CPUs per rank; if exclusive all, if overcommitted at most all."""
    bench.run("echo $SLURM_CPUS_ON_NODE $SLURM_NTASKS $SLURM_CPUS_PER_TASK", **asked)
    assert bench.output() == found


@pytest.mark.parametrize(
    ("value", "ids"),
    [("0,1", ["0", "1"]), ("", []), ("GPU-x, 1", ["GPU-x", "1"]), ("0,-1,1", ["0"])],
)
def test_gpus_come_from_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, value: str, ids: list[str]
) -> None:
    """Up to the first entry that is not a device, as CUDA reads it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpu_ids() == ids


# Job arrays: a process per task, in order, never more at once than asked for.


def test_every_task_runs_with_its_own_variables_and_output(bench: Bench) -> None:
    """The variables are those that Slurm sets for an array; each task writes to its own file."""
    asked = bench.array("1,3,7", "env | grep ^SLURM_ARRAY | sort; echo id=$SLURM_JOB_ID")
    job_id = bench.scheduler().submit(asked)
    assert bench.over(job_id).state is JobState.COMPLETED
    task_ids = [f"{job_id}_{n}" for n in (1, 3, 7)]
    found = bench.scheduler().query([*task_ids, f"{job_id}_2", "99_1", "x_1"])
    assert list(found) == task_ids
    numbers = set()
    for index in (1, 3, 7):
        variables = dict(line.split("=") for line in asked.task_output(index).read_text().split())
        numbers.add(variables.pop("id"))
        assert variables == {
            "SLURM_ARRAY_JOB_ID": job_id,
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_ARRAY_TASK_COUNT": "3",
            "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_MAX": "7",
            "SLURM_ARRAY_TASK_STEP": "2",
        }
    assert numbers == {"1", "2", "3"}
    assert bench.submit("true", directory="next") == "4"


def test_no_more_tasks_at_once_than_asked_for(bench: Bench) -> None:
    """With %1 the second task waits for the first, with a reason, though CPUs are free."""
    release = bench.path / "release"
    asked = bench.array("0-2%1", f"while [ ! -e {release} ]; do sleep 0.02; done")
    job_id = bench.scheduler().submit(asked)
    bench.running(f"{job_id}_0")
    bench.waits(f"{job_id}_1", "Priority: the array runs 1 task at once")
    later = bench.submit("true", directory="later")
    assert bench.over(later).state is JobState.COMPLETED  # what has room passes by
    release.touch()
    ended = [bench.over(f"{job_id}_{n}") for n in range(3)]
    times = [moment or 0.0 for status in ended for moment in (status.started, status.ended)]
    assert times == sorted(times)


def test_one_task_or_all_are_cancelled(bench: Bench) -> None:
    """By the task's id only that one ends, by the array's all of them."""
    job_id = bench.scheduler().submit(bench.array("0-3", "exec sleep 600"))
    for index in (0, 1):
        bench.running(f"{job_id}_{index}")
    bench.scheduler().cancel([f"{job_id}_1", f"{job_id}_3"])
    assert bench.over(f"{job_id}_1").state is JobState.CANCELLED
    assert bench.over(f"{job_id}_3").started is None
    assert bench.status(f"{job_id}_0").state is JobState.RUNNING
    assert bench.status(job_id).state is JobState.RUNNING
    bench.scheduler().cancel([job_id])
    for index in range(4):
        assert bench.over(f"{job_id}_{index}").state is JobState.CANCELLED
    assert bench.over(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("body", "runs"),
    [
        ("scontrol requeue $SLURM_JOB_ID; exit 0", 3),
        # It ends by itself after the first SIGTERM only
        ("trap 'exit 1' TERM; scontrol requeue $SLURM_JOB_ID; sleep 600 & wait", 3),
        ("scontrol requeue 99 || scontrol requeue || exit 7", 1),
    ],
)
def test_a_job_requeues_itself(bench: Bench, body: str, runs: int) -> None:
    """It waits and runs once more under its id, and its restarts are counted."""
    count = 'n=${SLURM_RESTART_COUNT:-0}; echo run $n >> ran; [ "$n" -lt 2 ] || exit 0\n'
    status = bench.run(count + body)
    assert bench.file("ran") == "".join(f"run {number}\n" for number in range(runs))
    assert (status.job_id, status.restarts) == ("1", runs - 1)
    assert status.state is (JobState.COMPLETED if runs > 1 else JobState.FAILED)


def test_cancelling_undoes_a_requeue(bench: Bench) -> None:
    """A job that is cancelled while it is being requeued does not come back."""
    job_id = bench.submit(
        "echo run >> ran; trap 'echo > asked' TERM; scontrol requeue $SLURM_JOB_ID\n"
        "while [ ! -e cancelled ]; do sleep 0.05; done"
    )
    bench.file("asked")
    bench.scheduler().cancel([job_id])
    (bench.path / "sub" / "cancelled").touch()
    assert bench.over(job_id).state is JobState.CANCELLED
    assert bench.file("ran") == "run\n"
