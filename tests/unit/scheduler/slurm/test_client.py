"""SlurmScheduler against a fake runner, and the real runner against small commands."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import SchedulerError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import Completed, SubprocessRunner
from hpml_orchestrator.scheduler.model import Dependency, JobState, Scheduler, SubmitRequest
from hpml_orchestrator.scheduler.slurm.client import SlurmScheduler
from hpml_orchestrator.testing.clock import FakeClock
from hpml_orchestrator.testing.runner import FakeRunner
from tests.patience import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATA = Path(__file__).parent / "data" / "22.05.8"
SQUEUE = Completed(0, (DATA / "squeue.txt").read_text())
SACCT = Completed(0, (DATA / "sacct.txt").read_text())
NO_SUCH_JOB = Completed(1, "", "slurm_load_jobs error: Invalid job id specified\n")
TIMED_OUT = Completed(1, "", "slurm_load_jobs error: Socket timed out on send/recv operation\n")
NO_ACCOUNTING = Completed(1, "", "Slurm accounting storage is disabled\n")
NO_CONFIGURATION = Completed(
    1,
    "",
    "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "squeue: fatal: Could not establish a configuration source\n",
)
DBD_DOWN = Completed(1, "", "sacct: error: Problem talking to the database: Connection refused\n")
HANGS = SchedulerUnavailable("squeue gave no answer in 60 s")


def slurm(
    runner: FakeRunner, clock: FakeClock | None = None, proc_root: str = "/proc"
) -> SlurmScheduler:
    clock = clock or FakeClock()
    return SlurmScheduler(runner, clock=clock, rng=random.Random(0), proc_root=proc_root)


def request_in(directory: Path) -> SubmitRequest:
    return SubmitRequest(
        directory, directory / "100%.log", "train", "hpml:1", {"PATH": "/bin", "HPML_X": "1"}
    )


def sbatch(tmp_path: Path, answer: Completed | BaseException) -> str:
    return slurm(FakeRunner({"sbatch": [answer]})).submit(request_in(tmp_path))


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        (Completed(0, "JobId=7 JobState=NODE_FAIL Requeue=0 Restarts=0 BatchFlag=1\n"), False),
        (Completed(0, "JobId=7 JobState=NODE_FAIL Requeue=1 Restarts=0 BatchFlag=1\n"), True),
        (NO_SUCH_JOB, True),
        (SchedulerUnavailable("scontrol gave no answer in 60 s"), True),
    ],
)
def test_scontrol_says_whether_a_job_is_requeued(
    answer: Completed | BaseException, may: bool
) -> None:
    """It is asked only after a state that a requeue may follow, and not again at each poll."""
    rows = [
        f"7\x1f7\x1f{state}" + "\x1f" * 8 + "train\x1f/\x1e\n" for state in ("RUNNING", "NODE_FAIL")
    ]
    fields = [row.replace("\x1f" * 8, "\x1f0\x1f0\x1f\x1f\x1f\x1fn1\x1fNone\x1f") for row in rows]
    answers = [Completed(0, text) for text in (fields[0], fields[1], fields[1])]
    runner = FakeRunner({"squeue": answers, "scontrol": [answer]})
    clock = FakeClock()
    scheduler = slurm(runner, clock)
    assert scheduler.query(["7"])["7"].state is JobState.RUNNING
    assert runner.count("scontrol") == 0
    clock.sleep(5)
    status = scheduler.query(["7"])["7"]
    assert (status.state, status.may_requeue) == (JobState.NODE_FAIL, may)
    if isinstance(answer, Completed):
        clock.sleep(5)
        assert scheduler.query(["7"])["7"].may_requeue is may
        assert runner.count("scontrol") == 1


def test_arguments(tmp_path: Path) -> None:
    """Sbatch gets one argument per value, as it is."""
    scheduler: Scheduler = SlurmScheduler()
    assert scheduler.arguments(request_in(tmp_path)) == [
        "sbatch",
        "--parsable",
        f"--chdir={tmp_path}",
        f"--output={tmp_path}/100%%.log",
        "--comment=hpml:1",
        "--export=ALL",
        "--open-mode=append",
        f"{tmp_path}/job.sh",
    ]


def test_dependencies_and_arrays_are_arguments(tmp_path: Path) -> None:
    """`%a` is part of the name of a task's output; a percent sign of the user stays one."""
    after = (Dependency("12_3", "ok"), Dependency("7", "notok"))
    request = replace(request_in(tmp_path), directory=tmp_path / "100%", array=True, after=after)
    arguments = slurm(FakeRunner({})).arguments(request)
    assert "--dependency=afterok:12_3,afternotok:7" in arguments
    assert "--kill-on-invalid-dep=yes" in arguments
    assert f"--output={tmp_path}/100%%/output/%a.log" in arguments
    with pytest.raises(SchedulerError, match="backslash"):
        slurm(FakeRunner({})).arguments(replace(request, directory=tmp_path / "a\\b"))


def test_the_tasks_of_an_array_are_one_question() -> None:
    """Squeue and sacct are queried for the array; the answer is task by task."""
    rest = "\x1f" * 9 + "\x1e\n"
    queue = f"9\x1f9_[4-7%2]\x1fPENDING{rest}12\x1f9_3\x1fRUNNING{rest}"
    done = "10\x1f9_1\x1fCOMPLETED\x1f0:0\x1f1\x1f1\x1f2\x1f3\x1fn1\x1f\x1fa\x1f/d"
    runner = FakeRunner({"squeue": [Completed(0, queue)], "sacct": [Completed(0, done + "\n")]})
    asked = [f"9_{n}" for n in range(1, 8)]
    found = slurm(runner).query(asked)
    assert [(key, status.state.value) for key, status in found.items()] == [
        ("9_1", "COMPLETED"),
        ("9_3", "RUNNING"),
        *((f"9_{n}", "PENDING") for n in range(4, 8)),
    ]
    queued, accounted = runner.calls
    assert "--jobs=9" in queued.argv
    assert "--jobs=9" in accounted.argv
    assert queued.env["SLURM_BITSTR_LEN"] == "0"


def test_submit(tmp_path: Path) -> None:
    """The id is returned, the environment travels unchanged, and the answer is kept on disk."""
    config = Completed(0, "ClusterName             = Box\n")
    runner = FakeRunner({"sbatch": [Completed(0, "4711;box\n")], "scontrol": [config]})
    assert slurm(runner).submit(request_in(tmp_path)) == "4711"
    assert runner.calls[0].env == {"PATH": "/bin", "HPML_X": "1"}
    assert runner.calls[0].cwd == tmp_path
    assert (tmp_path / "sbatch.out").read_text() == "4711;box\n"
    # an id counts more than the status
    assert sbatch(tmp_path, Completed(1, "12\n", "sbatch: error: whatever\n")) == "12"


def test_a_job_that_went_to_another_cluster(tmp_path: Path) -> None:
    """It is an error that names the cluster and cancels the job; not the job of that id here."""
    config = Completed(0, "ClusterName             = box\n")
    runner = FakeRunner({"sbatch": [Completed(0, "60060368;slaking\n")], "scontrol": [config]})
    with pytest.raises(
        SchedulerError, match="cluster slaking, as job 60060368; this is box"
    ) as one:
        slurm(runner).submit(request_in(tmp_path))
    assert not isinstance(one.value, SchedulerUnavailable)
    assert "`scancel --clusters=slaking 60060368`" in one.value.hint


def test_a_wrapper_that_drops_an_option(tmp_path: Path) -> None:
    """Its words are read; what cannot be read is shown."""
    assert sbatch(tmp_path, Completed(0, "Submitted batch job 4711\n")) == "4711"
    with pytest.raises(SchedulerUnavailable, match="welcome; your job is number four"):
        sbatch(tmp_path, Completed(0, "your job is number four\n", "welcome\n"))


def test_refused(tmp_path: Path) -> None:
    """A refusal is in Slurm's words, with a hint."""
    text = "sbatch: error: Batch job submission failed: Invalid account specified\n"
    with pytest.raises(SchedulerError) as caught:
        sbatch(tmp_path, Completed(1, "", text))
    assert not isinstance(caught.value, SchedulerUnavailable)
    assert str(caught.value) == (
        "Slurm refused the job: Batch job submission failed: Invalid account specified"
    )
    assert "account" in caught.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        Completed(
            1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv\n"
        ),
        Completed(0, "", ""),
        Completed(0, "47", ""),
        Completed(-9, "", ""),
        Completed(-15, "", "sbatch: error: Batch job submission failed: Invalid account\n"),
        Completed(127, "", "wrapper: broken\n"),
        SchedulerUnavailable("sbatch has not ended in 300 s and still works"),
    ],
)
def test_no_usable_answer(tmp_path: Path, answer: Completed | BaseException) -> None:
    """Without a certain answer the hint names how to find out, and sbatch runs only once."""
    runner = FakeRunner({"sbatch": [answer]})
    with pytest.raises(SchedulerUnavailable) as caught:
        slurm(runner).submit(request_in(tmp_path))
    assert "hpml submit --resume ID" in caught.value.hint
    assert runner.count("sbatch") == 1


def test_query() -> None:
    """Many jobs take one squeue; unknown and impossible ids are left out."""
    runner = FakeRunner({"squeue": [SQUEUE], "sacct": [NO_ACCOUNTING]})
    found = slurm(runner).query(["3", "5", "3", "999", "nonsense", "--help"])
    assert list(found) == ["3", "5"]
    assert found["3"].exit_code == 3
    argv = runner.calls[0].argv
    assert "--jobs=3,5,999" in argv
    assert {"--all", "--states=all", "--noheader"} <= set(argv)
    assert runner.count("squeue") == 1


@pytest.mark.parametrize(
    ("squeue", "sacct", "asked", "states", "calls"),
    [
        # no ids, or none that can be one: no call
        ([], [], ["nonsense"], {}, []),
        # squeue fails for one unknown id on its own; that is an answer
        ([NO_SUCH_JOB], [Completed(0)], ["999"], {}, ["--jobs=999", "--jobs=999"]),
        # where an unknown id fails the whole call, all own jobs are asked for instead
        (
            [NO_SUCH_JOB, SQUEUE],
            [Completed(0)],
            ["3", "999"],
            {"3": "FAILED"},
            ["--jobs=3,999", "--me", "--jobs=999"],
        ),
        # what has left the queue is in accounting
        (
            [Completed(0)],
            [SACCT],
            ["3", "11", "999"],
            {"3": "FAILED", "11": "TIMEOUT"},
            ["--jobs=3,11,999", "--jobs=3,11,999"],
        ),
        # which lags: a job that the controller has forgotten does not run
        ([NO_SUCH_JOB], [SACCT], ["5"], {"5": "UNKNOWN"}, ["--jobs=5", "--jobs=5"]),
        # no accounting, no sacct here
        ([NO_SUCH_JOB], [NO_ACCOUNTING], ["3"], {}, ["--jobs=3", "--jobs=3"]),
        ([NO_SUCH_JOB], [], ["3"], {}, ["--jobs=3", "--jobs=3"]),
        # accounting is down: three tries; what has left the queue is unknown, not gone
        (
            [SQUEUE],
            [DBD_DOWN],
            ["5", "777"],
            {"5": "RUNNING", "777": "UNKNOWN"},
            ["--jobs=5,777", *["--jobs=777"] * 3],
        ),
        # a command that had to be killed is tried again
        ([HANGS, SQUEUE], [], ["3"], {"3": "FAILED"}, ["--jobs=3", "--jobs=3"]),
    ],
)
def test_queue_and_accounting(
    squeue: list[Completed | BaseException],
    sacct: list[Completed | BaseException],
    asked: list[str],
    states: dict[str, str],
    calls: list[str],
) -> None:
    """The queue is asked first, accounting for what has left it."""
    runner = FakeRunner({"squeue": squeue, "sacct": sacct})
    found = slurm(runner).query(asked)
    assert {job_id: status.state.value for job_id, status in found.items()} == states
    which = [
        arg for call in runner.calls for arg in call.argv if arg.startswith(("--jobs", "--me"))
    ]
    assert which == calls


def test_over_stays_over() -> None:
    """A job once seen over is not asked for in accounting when it leaves the queue."""
    clock = FakeClock()
    runner = FakeRunner({"squeue": [SQUEUE, NO_SUCH_JOB], "sacct": [SACCT]})
    scheduler = slurm(runner, clock)
    first = scheduler.query(["3"])
    clock.sleep(10)
    assert scheduler.query(["3"]) == first
    assert runner.count("sacct") == 0


def test_busy_controller_is_asked_again() -> None:
    """Reading is tried three times, ever later, and then given up."""
    clock = FakeClock()
    runner = FakeRunner({"squeue": [TIMED_OUT, TIMED_OUT, SQUEUE]})
    assert list(slurm(runner, clock).query(["3"])) == ["3"]
    assert [round(seconds) for seconds in clock.sleeps] == [1, 2]
    runner = FakeRunner({"squeue": [TIMED_OUT]})
    with pytest.raises(SchedulerUnavailable, match="Socket timed out") as caught:
        slurm(runner).query(["3"])
    assert runner.count("squeue") == 3
    assert caught.value.hint
    runner = FakeRunner({"squeue": [Completed(1, "", "squeue: error: no such option\n")]})
    with pytest.raises(SchedulerUnavailable, match="no such option"):
        slurm(runner).query(["3"])
    assert runner.count("squeue") == 1, "waiting does not mend that"


def test_a_dead_controller_is_not_asked_for_ever() -> None:
    """What timed out is not tried again: nobody waits a minute for a status."""
    clock = FakeClock()

    class Slow(FakeRunner):
        def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
            clock.now += 10
            return super().run(argv, env=env, timeout=timeout)

    runner = Slow({"squeue": [TIMED_OUT, HANGS, TIMED_OUT, HANGS]})
    for tries in (1, 2):
        with pytest.raises(SchedulerUnavailable) as caught:
            slurm(runner, clock).query(["3"])
        assert "scontrol ping" in caught.value.hint
        assert runner.count("squeue") == tries
    for tries in (3, 4):
        with pytest.raises(SchedulerUnavailable) as caught:
            slurm(runner, clock).find(Path("/x"), name="n", since=0)
        assert "scontrol ping" in caught.value.hint
        assert runner.count("squeue") == tries
    assert clock.sleeps == []


def test_nodes_that_a_job_waits_for_are_named() -> None:
    """Slurm's words for it name no node; the question is asked only then, and may fail."""
    words = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority"
    waits = Completed(0, SQUEUE.stdout.replace("BeginTime", words))
    runner = FakeRunner({"squeue": [waits] * 2, "sinfo": [Completed(0, "node2 (fan broke)\n")]})
    assert slurm(runner).query(["7"])["7"].reason == f"{words}; out of service: node2 (fan broke)"
    runner = FakeRunner({"squeue": [waits], "sinfo": [HANGS]})
    assert slurm(runner).query(["7"])["7"].reason == words


def test_one_id_is_asked_for_without_the_federation() -> None:
    """That takes one wait for a dead controller, not two; siblings are queried if it matters."""
    runner = FakeRunner({"squeue": [SQUEUE]})
    slurm(runner).query(["3"])
    slurm(runner).query(["3", "5"])
    assert ["--local" in call.argv for call in runner.calls] == [True, False]
    text = SQUEUE.stdout
    assert "FAILED" in text
    gone = Completed(0, text.replace("FAILED", "REVOKED"))
    runner = FakeRunner({"squeue": [gone, SQUEUE]})
    assert slurm(runner).query(["3"])["3"].state is JobState.FAILED
    assert ["--local" in call.argv for call in runner.calls] == [True, False]


def test_without_configuration(tmp_path: Path) -> None:
    """Slurm's packages without a slurm.conf are named as what they are, at once."""
    said = NO_CONFIGURATION.stderr.replace("squeue:", "sbatch:")
    with pytest.raises(SchedulerError, match="installed here but not configured") as caught:
        sbatch(tmp_path, Completed(1, "", said))
    assert not isinstance(caught.value, SchedulerUnavailable)
    assert "--local" in caught.value.hint
    runner = FakeRunner({"squeue": [NO_CONFIGURATION], "scancel": [NO_CONFIGURATION]})
    for call in (
        lambda: slurm(runner).query(["3"]),
        lambda: slurm(runner).find(Path("/x"), name="n", since=0),
        lambda: slurm(runner).cancel(["3"]),
    ):
        with pytest.raises(SchedulerUnavailable, match="^Slurm is installed here but") as caught:
            call()
        assert "--local" in caught.value.hint
    assert len(runner.calls) == 3


def test_rate_limit() -> None:
    """A repeated query within a second is answered from memory; other ids are asked for."""
    clock = FakeClock()
    runner = FakeRunner({"squeue": [SQUEUE], "sacct": [NO_ACCOUNTING], "scancel": [Completed(0)]})
    scheduler = slurm(runner, clock)
    first = scheduler.query(["3", "5"])
    clock.sleep(0.5)
    assert scheduler.query(["5", "3"]) == first
    assert list(scheduler.query(["5"])) == ["5"]
    assert runner.count("squeue") == 1
    scheduler.query(["7"])
    assert runner.count("squeue") == 2
    clock.sleep(1.5)
    scheduler.query(["7"])
    assert runner.count("squeue") == 3
    scheduler.cancel(["7"])
    scheduler.query(["7"])
    assert runner.count("squeue") == 4, "nothing old after a cancel"


def test_accounting_is_asked_about_starts_now_and_then() -> None:
    """Who follows a job asks often; one that does not answer is asked again after ten minutes."""
    runner, clock = FakeRunner({"sacct": [Completed(0), DBD_DOWN, DBD_DOWN, DBD_DOWN]}), FakeClock()
    scheduler = slurm(runner, clock)
    for pause, calls in ((0.0, 1), (60.0, 1), (600.0, 4)):
        clock.sleep(pause)
        assert scheduler.starts("7") == []
        assert runner.count("sacct") == calls
    assert scheduler.starts("7; rm") == []


def test_long_lists_are_cut() -> None:
    """Ids beyond what one argument may hold go into further calls."""
    runner = FakeRunner({"squeue": [Completed(0)], "sacct": [NO_ACCOUNTING]})
    slurm(runner).query([str(1_000_000 + n) for n in range(5000)])
    calls = [call for call in runner.calls if call.argv[0] == "squeue"]
    assert len(calls) == 2
    ids: list[str] = []
    for call in calls:
        (jobs,) = [a for a in call.argv if a.startswith("--jobs=")]
        assert len(jobs) < 100_000
        ids += jobs.removeprefix("--jobs=").split(",")
    assert len(set(ids)) == 5000


def test_find_in_the_queue() -> None:
    """Jobs are found by their exact directory, oldest first, arrays once."""
    runner = FakeRunner({"squeue": [SQUEUE]})
    found = slurm(runner).find(Path("/tmp/hpml-capture"), name="any", since=0)
    assert found == [str(n) for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16)]
    odd = Path("/tmp/hpml-capture/with\nnewline")
    assert slurm(runner).find(odd, name="any", since=0) == ["14"]
    assert "--me" in runner.calls[0].argv


def test_find_in_accounting() -> None:
    """What has left the queue is looked for in accounting, from the submission on."""
    clock = FakeClock(1795218700.0)
    runner = FakeRunner({"squeue": [Completed(0)], "sacct": [SACCT]})
    since = 1795218517.0
    odd = Path("/tmp/hpml-capture/with\nnewline")
    assert slurm(runner, clock).find(odd, name="any", since=since) == ["14"]
    assert {"--starttime=uts1795217917", "--endtime=now+365days"} <= set(runner.calls[1].argv)
    assert slurm(runner, clock).find(Path("/tmp"), name="any", since=since) == []
    # sacct refuses a start in the future, or before there was Slurm
    for wrong, start in ((1.9e9, 1795218100), (0.0, 1_000_000_000)):
        slurm(runner, clock).find(Path("/x"), name="", since=wrong)
        assert f"--starttime=uts{start}" in runner.calls[-1].argv


@pytest.mark.parametrize(
    "answers",
    [
        {"squeue": [TIMED_OUT]},
        {"squeue": [NO_SUCH_JOB]},
        {"squeue": [Completed(1)]},
        {"squeue": [Completed(0)], "sacct": [DBD_DOWN]},
        {"squeue": [Completed(-9)]},
        {},
    ],
)
def test_no_answer_is_not_no_job(answers: dict[str, Sequence[Completed]]) -> None:
    """Only an answer of the controller and of accounting may exclude a job."""
    with pytest.raises(SchedulerError):
        slurm(FakeRunner(answers)).find(Path("/x"), name="n", since=0)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path / "proc"


def process(proc: Path, pid: str, comm: str, cwd: Path) -> None:
    (proc / pid).mkdir(parents=True)
    (proc / pid / "comm").write_text(f"{comm}\n")
    (proc / pid / "cwd").symlink_to(cwd)


def test_submitting(tmp_path: Path, proc: Path) -> None:
    """Only a live sbatch in that very directory counts."""
    here = tmp_path / "here"
    here.mkdir()
    process(proc, "10", "bash", here)
    process(proc, "11", "sbatch", tmp_path)
    (proc / "12").mkdir()  # ended while we looked
    (proc / "self").mkdir()
    scheduler = slurm(FakeRunner({}), proc_root=str(proc))
    assert not scheduler.submitting(here)
    process(proc, "13", "sbatch", here)
    assert scheduler.submitting(here)
    (tmp_path / "link").symlink_to(here)
    assert scheduler.submitting(tmp_path / "link")


def test_cancel() -> None:
    """Many jobs take one scancel; those that are over or not known are passed over."""
    runner = FakeRunner({"scancel": [Completed(0)]})
    slurm(runner).cancel(["1", "2_3", "1", "bad id"])
    assert [call.argv for call in runner.calls] == [("scancel", "1", "2_3")]
    slurm(FakeRunner({})).cancel([])
    over = "scancel: error: Kill job error on job id 9: Invalid job id specified\n"
    slurm(FakeRunner({"scancel": [Completed(1, "", over)]})).cancel(["9"])


def test_cancel_fails() -> None:
    """Another user's job is an error; a lost answer is another, and is not tried again."""
    denied = "scancel: error: Kill job error on job id 9: Access/permission denied\n"
    with pytest.raises(SchedulerError, match="permission denied") as caught:
        slurm(FakeRunner({"scancel": [Completed(1, "", denied)]})).cancel(["8", "9"])
    assert not isinstance(caught.value, SchedulerUnavailable)
    assert "only by its owner" in caught.value.hint
    lost = "scancel: error: Kill job error on job id 9: Socket timed out on send/recv operation\n"
    runner = FakeRunner({"scancel": [Completed(140, "", lost)]})
    with pytest.raises(SchedulerUnavailable) as unavailable:
        slurm(runner).cancel(["9"])
    assert "scontrol ping" in unavailable.value.hint
    assert runner.count("scancel") == 1


def test_runner_times_out() -> None:
    """A command that hangs is killed, and that does not count as an answer."""
    with pytest.raises(SchedulerUnavailable, match=r"no answer in 0\.1 s"):
        SubprocessRunner().run(["sleep", "30"], env=dict(os.environ), timeout=0.1)


def detached(tmp_path: Path, code: str, timeout: float = PATIENCE_SECONDS) -> int:
    return SubprocessRunner().run_detached(
        ["sh", "-c", code],
        env={"PATH": os.environ["PATH"], "X": "1"},
        timeout=timeout,
        cwd=tmp_path,
        stdout=tmp_path / "sbatch.out",
        stderr=tmp_path / "sbatch.err",
    )


def test_detached_answers_into_files(tmp_path: Path) -> None:
    """The command itself writes its answer, in its directory, with just its environment."""
    (tmp_path / "sbatch.out").write_text("old answer\n")
    assert detached(tmp_path, "pwd; env | grep -c ^X=1; echo no >&2; exit 4") == 4
    assert (tmp_path / "sbatch.out").read_text() == f"{tmp_path}\n1\n"
    assert (tmp_path / "sbatch.err").read_text() == "no\n"


def wait_for_text(path: Path) -> str:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text()


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_detached_is_left_alone_past_its_time(tmp_path: Path) -> None:
    """A slow sbatch is never killed: its answer still arrives."""
    with pytest.raises(SchedulerUnavailable, match="still works"):
        detached(tmp_path, "until [ -e go ]; do sleep 0.02; done; echo 7", timeout=0.05)
    assert (tmp_path / "sbatch.out").read_text() == ""
    (tmp_path / "go").touch()
    assert wait_for_text(tmp_path / "sbatch.out") == "7\n"


def test_answer_outlives_a_killed_hpml(tmp_path: Path) -> None:
    """When hpml is killed while sbatch works, sbatch's answer is still written."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "sbatch").write_text(
        "#!/bin/sh\ntouch began\nuntil [ -e go ]; do sleep 0.02; done\necho 42\n"
    )
    (bin_dir / "sbatch").chmod(0o755)
    code = (
        "import pathlib, sys\n"
        "from hpml_orchestrator.scheduler.slurm.client import SlurmScheduler\n"
        "from hpml_orchestrator.scheduler.model import SubmitRequest\n"
        "d = pathlib.Path(sys.argv[1])\n"
        "env = {'PATH': f'{d}/bin:/usr/bin:/bin'}\n"
        "SlurmScheduler().submit(SubmitRequest(d, d / 'o', 'n', 'c', env))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    assert eventually((tmp_path / "began").exists)
    assert SlurmScheduler().submitting(tmp_path)
    os.killpg(child.pid, signal.SIGINT)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    (tmp_path / "go").touch()
    assert wait_for_text(tmp_path / "sbatch.out") == "42\n"
