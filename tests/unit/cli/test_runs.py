"""Jobs run from the command line, on this machine and on a FAKE Slurm; all commands report them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.scheduler.slurm import client
from hpml_orchestrator.script.render import Capabilities
from hpml_orchestrator.testing.scheduler import FakeScheduler, Fault
from tests.unit.cli.support import Hpml, Result, Shell

pytestmark = pytest.mark.xdist_group("local runs")

RECORDS_PAGE = (Path(__file__).parents[3] / "docs" / "records.md").read_text()


@pytest.fixture(scope="module")
def completed(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of a job that completes prints, and the run's id."""
    for name in ("data", "t"):
        (shell.root / name).mkdir()
    (shell.root / "data" / "x").write_text("x" * 100)
    path = shell.job(
        "good",
        command=["bash", "-c", "echo hi; cat $0/x"],
        args=["{stage.d}"],
        stage=[{"name": "d", "source": str(shell.root / "data"), "target": str(shell.root / "t")}],
    )
    ended = shell.hpml("run", "--local", path)
    return ended, re.findall(r"submitted (\S+)", ended.err)[0]


@pytest.fixture(scope="module")
def failed(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of a job that fails prints, and the run's id."""
    ended = shell.hpml("run", "--local", shell.job("bad", command=["bash", "-c", "exit 42"]))
    return ended, re.findall(r"submitted (\S+)", ended.err)[0]


@pytest.fixture(scope="module")
def array(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of an array prints, of which task 2 fails, and its id."""
    command = ["bash", "-c", "echo task $0; exit $(($0 / 2))", "{array.index}"]
    ended = shell.hpml("run", "--local", shell.job("many", array="0-2%1", command=command))
    return ended, re.findall(r"submitted (\S+)", ended.err)[0]


def test_a_run_ends_with_its_summary(
    shell: Shell, hpml: Hpml, completed: tuple[Result, str]
) -> None:
    """The output comes as it is written, then state, staging, phases and where records lie."""
    ended, sid = completed
    assert ended.code == 0, ended.err
    assert ended.out.startswith("hpml: 1 node ready, staged 1 file, 100 bytes")
    assert f"hi\n{'x' * 100}\n" in ended.out  # the job's last line had no end
    lines = dict(re.findall(r"^(\w+) {2,}(.*)$", ended.out, re.MULTILINE))
    assert lines["run"] == f"{sid}  COMPLETED"
    assert lines["staged"].startswith("1 file, 100 bytes")
    assert re.search(r"staging \d+\.\d\d s", lines["phases"])
    assert lines["record"] == f"{shell.records}/runs/{sid}"
    assert "hpml: COMPLETED" in ended.err
    assert list((shell.root / "t").iterdir()) == []
    kept = (shell.records / "submissions" / sid / "job.sh").read_bytes()
    assert hpml("render", str(shell.root / "good.yaml")).out.encode() == kept


def test_a_failing_job_is_a_failing_run(shell: Shell, failed: tuple[Result, str]) -> None:
    """Status 6, the job's own exit code, where its output is; its reason is printed once."""
    ended, sid = failed
    assert ended.code == 6
    assert "ended FAILED, exit code 42" in ended.err
    assert f"hint: hpml logs {sid}" in ended.err
    assert (ended.out + ended.err).count("rank 0 exited with code 42") == 1
    assert "\nreason     rank 0 exited with code 42\n" in ended.out
    waited = shell.hpml("wait", sid)
    assert waited.err.count("rank 0 exited with code 42") == 1
    assert "hpml: FAILED (rank 0 exited with code 42)\n" in waited.err


def test_every_command_reports_runs(
    shell: Shell, hpml: Hpml, completed: tuple[Result, str], failed: tuple[Result, str]
) -> None:
    """By id and by part of it, in one JSON document with `--json`."""
    good, bad = completed[1], failed[1]
    rows = [line.split("\t") for line in hpml("list", "--all").out.splitlines()]
    assert rows[0] == ["RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"]
    states = {row[0]: (row[2], row[3]) for row in rows[1:]}
    assert (states[good], states[bad]) == (("local", "COMPLETED"), ("local", "FAILED"))
    assert len(hpml("list", "-n", "1", "--json").json()) == 1
    (state,) = hpml("status", "--json", "bad").json()
    assert (state["state"], state["exit_code"], state["over"]) == ("FAILED", 42, True)
    shown = hpml("show", "good").out
    assert f"run        {good}  COMPLETED" in shown
    assert re.search(r"^0\t\S+\t\S+\t[\d,-]+\t", shown, re.MULTILINE)  # rank, node, GPU, CPUs
    document = hpml("show", "--json", good).json()
    assert (document["state"], document["attempts"]) == ("COMPLETED", 1)
    assert document["summary"]["staged_bytes"] == 100
    data = f"{shell.root}/t/"
    assert document["command"][:3] == ["bash", "-c", "echo hi; cat $0/x"]
    assert document["command"][3].startswith(data)
    assert (document["launcher"], document["hours"]["basis"]) == ("srun", "allocated")
    for key in ("received", "sweep", "point", "values", "code", "result", "result_error"):
        assert f"`{key}`" in RECORDS_PAGE, key
    assert document["bindings"][0]["rank"] == 0
    assert document["record"]["job"]["name"] == "good"
    for options in ([], ["-f", "-n", "2"]):
        assert hpml("logs", *options, good).out.endswith(f"hi\n{'x' * 100}")
    assert hpml("logs", "-n", "1", good).out == "x" * 100
    waited = hpml("wait", "--json", bad)
    assert (waited.code, waited.json()["state"]) == (6, "FAILED")
    assert "COMPLETED" in hpml("cancel", good).out
    assert hpml("cancel", "--json", good).json()[0]["id"] == good


def test_a_job_on_slurm(shell: Shell, hpml: Hpml, slurm: FakeScheduler, tmp_path: Path) -> None:
    """It is submitted once, seen in the queue, while it runs, at its end, and cancelled."""
    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir()
    others.mkdir()

    def call(*words: str) -> Result:
        return hpml("--records", str(own), *words)

    def submit(name: str) -> str:
        return str(call("submit", "--no-check", "--json", shell.job(name)).json()["id"])

    first, second = submit("first"), submit("second")
    assert sorted(slurm.jobs) == ["1", "2"]
    slurm.move("1", JobState.RUNNING)
    rows = [line.split("\t")[:4] for line in call("status").out.splitlines()[1:]]
    assert rows == [[second, "2", "slurm", "PENDING"], [first, "1", "slurm", "RUNNING"]]
    slurm.move("1", JobState.COMPLETED)
    assert call("wait", "1").code == 0
    for command in ("show", "cancel", "report"):  # a job that these records do not have
        foreign = hpml("--records", str(others), command, "2")
        assert foreign.refuses(3, "no run '2'", "PENDING, and hpml has not", "scontrol show job 2")
    assert call("cancel", "2").out == f"{second}: cancelled job 2\n"
    assert call("wait", "2").refuses(6, "job 2 ended CANCELLED")
    assert call("status").err == "no unfinished runs; `hpml list` shows all\n"
    third = submit("third")
    slurm.faults = [Fault.UNAVAILABLE] * 3
    assert call("cancel", third).code == 5


def test_an_array_and_its_tasks(hpml: Hpml, array: tuple[Result, str]) -> None:
    """The end names the tasks that failed; RUN.INDEX and JOB_INDEX name one."""
    ended, sid = array
    (job,) = re.findall(r"as job (\d+) \(3 tasks\)", ended.err)
    assert (ended.code, "task 0\n" in ended.out) == (6, False)
    assert "hpml: FAILED (2 of 3 done, 1 failed)" in ended.err
    assert f"hint: hpml logs {sid}.2" in ended.err
    assert ended.out.splitlines()[:4] == [
        f"run        {sid}  FAILED",
        f"job        {job} (local), 3 tasks",
        "tasks      2 of 3 done, 1 failed",
        "task 2     FAILED, exit code 1: rank 0 exited with code 1",
    ]
    assert hpml("logs", f"{sid}.1").out.endswith("task 1\n")
    assert hpml("logs", "-f", f"{job}_0").out.endswith("task 0\n")
    row = hpml("status", f"{sid}.2").out.splitlines()[1].split("\t")
    assert row[:4] == [f"{sid}.2", f"{job}_2", "local", "FAILED"]
    assert (hpml("wait", f"{sid}.0").code, hpml("wait", f"{sid}.2").code) == (0, 6)
    rows = hpml("show", sid).out.partition("\nTASK\t")[2].splitlines()[1:]
    assert [row.split("\t")[2] for row in rows] == ["COMPLETED", "COMPLETED", "FAILED"]
    (state,) = hpml("status", sid, "--json").json()
    codes = [(task["run"], task["exit_code"]) for task in state["tasks"]]
    assert codes == [(f"{sid}.0", 0), (f"{sid}.1", 0), (f"{sid}.2", 1)]
    assert hpml("submit", "--resume", f"{sid}.1").out == f"{sid} is job {job} (3 tasks)\n"
    for words, code, message, hint in [
        ("logs {}", 2, "is a job array of 3 tasks", f"name one: {sid}.0, {sid}.1 and {sid}.2\n"),
        ("logs {}.9", 3, "has no task 9", "0, 1 and 2"),
        ("prune {}.1", 2, "names one task", f"hpml prune {sid}"),
        ("show {} --ranks", 2, "each task of a job array has its own ranks", f"{sid}.0 --ranks"),
    ]:
        assert hpml(*words.format(sid).split()).refuses(code, message, hint)


def test_submit_returns_at_once(shell: Shell, hpml: Hpml) -> None:
    """It prints id and job, as JSON the tasks as well; `run --json` prints nothing else."""
    go = shell.root / "go"
    waits = ["bash", "-c", f"until [[ -e '{go}' ]]; do sleep 0.1; done"]
    made = hpml("submit", "--local", "--json", shell.job("later", command=waits)).json()
    assert set(made) == {"id", "job_id", "submission", "directory", "tasks"}
    assert made["tasks"] == []
    go.touch()
    assert hpml("wait", made["job_id"]).code == 0
    shown = hpml("submit", "--local", shell.job("one", array=[4]))
    sid = shown.out.split()[1]
    assert f"to follow it: hpml wait {sid}; one task: hpml logs -f {sid}.4" in shown.err
    assert hpml("wait", sid).code == 0
    assert hpml("logs", sid).out.endswith("hi\n")  # of one task there is one output
    run = shell.hpml("run", "--local", "--json", shell.job("jason"))
    assert (run.code, run.json()["state"]) == (0, "COMPLETED")
    assert run.json()["summary"]["phases"]
    assert "hi\n" in run.err


def test_ctrl_c_stops_following_and_the_job_continues(shell: Shell, hpml: Hpml) -> None:
    """Interrupting `hpml run` ends the following with 130; `cancel` ends the job."""
    path = shell.job("long", command=["bash", "-c", "echo begun; exec sleep 300"])
    process = shell.start("run", "--local", path, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "begun\n":
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    (sid,) = re.findall(r"hpml cancel (\S+)`", err)
    assert "the job continues" in err
    assert "Traceback" not in err
    assert hpml("cancel", sid).code == 0
    assert hpml("wait", sid).refuses(6, "ended CANCELLED")


@pytest.mark.parametrize(
    ("presses", "ignored", "code", "message"),
    [
        (1, False, 130, r"submitted (\S+) as job \d+; the job continues"),
        (2, False, 130, r"`hpml submit --resume (\S+?)` completes it"),
        (2, True, 0, r"to follow it: hpml logs -f (\S+)"),
    ],
)
def test_ctrl_c_during_a_submission(
    shell: Shell,
    hpml: Hpml,
    monkeypatch: pytest.MonkeyPatch,
    presses: int,
    ignored: bool,
    code: int,
    message: str,
) -> None:
    """It waits for the answer and names the job; a second one explains how to find out."""
    real = LocalScheduler.submit

    def interrupted(self: LocalScheduler, request: Any, arguments: Any = ()) -> str:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return real(self, request, arguments)

    monkeypatch.setattr(LocalScheduler, "submit", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        ended = hpml("submit", "--local", shell.job())
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    assert ended.code == code, ended.err
    match = re.search(message, ended.err)
    assert match, ended.err
    assert (shell.records / "submissions" / match[1]).is_dir()


def prepared(shell: Shell, name: str) -> tuple[Store, Submission]:
    """A submission that was cut off long ago, before the scheduler was called."""
    store = Store(shell.records)
    rendered = render_job(load_job(shell.job(name), backend="local"), Capabilities())
    argv, environment = ["hpml"], shell.environment()
    now = time.time() - 1000
    made = prepare(store, rendered, cluster="", argv=argv, environment=environment, now=now)
    return store, made


def test_resume(shell: Shell, hpml: Hpml) -> None:
    """It makes the job if it is missing, and finds it if it is not on record."""
    store, submission = prepared(shell, "cut")
    (state,) = hpml("status", "--json", submission.sid).json()
    assert state["state"] == "NOT SUBMITTED"
    assert f"hpml submit --resume {submission.sid}" in state["reason"]
    first = hpml("submit", "--json", "--resume", submission.sid).json()
    assert hpml("submit", "--json", "--resume", submission.sid).json() == first
    assert hpml("wait", submission.sid).code == 0
    (submission.directory / "job.json").unlink()
    (submission.directory / "final.json").unlink()
    assert hpml("submit", "--json", "--resume", submission.sid).json() == first
    host = str(submission.record()["host"])
    jobs = LocalScheduler(store.local_home(host)).find(submission.directory, name="", since=0.0)
    assert jobs == [first["job_id"]]


def test_resuming_what_was_refused(shell: Shell, hpml: Hpml) -> None:
    """A refusal is final for that submission."""
    ended = hpml("run", "--local", "--no-check", shell.job("wide", resources={"nodes": 2}))
    assert (ended.code, "asks for 2 nodes" in ended.err) == (4, True)
    assert hpml("submit", "--resume", "wide").refuses(2, "asks for 2 nodes")
    (state,) = hpml("status", "--json", "wide").json()
    assert (state["state"], state["over"]) == ("REFUSED", True)
    assert hpml("logs", "wide").refuses(3, "has no output yet")


def test_a_record_that_cannot_be_read(shell: Shell, hpml: Hpml) -> None:
    """Cancel and wait fail with the reason, exit 7; with the record mended the job is cancelled."""
    submitted = hpml("submit", "--local", "--json", shell.job(command=["sleep", "600"])).json()
    record = Path(submitted["submission"], "job.json")
    text = record.read_text()
    record.write_text(json.dumps({**json.loads(text), "schema_version": 99}))
    for command in ("cancel", "wait"):
        assert hpml(command, submitted["id"]).refuses(7, "schema_version 99")
    record.write_text(text)
    assert hpml("cancel", submitted["id"]).code == 0
    assert hpml("wait", submitted["id"]).code == 6


def test_data_that_vanish_while_the_job_waits(shell: Shell, hpml: Hpml) -> None:
    """No rank has failed: the exit code is the one of data, and the reason names the source."""
    source = shell.root / "vanishing"
    source.write_text("x")
    job = shell.job(
        launcher="srun",
        stage=[{"name": "d", "source": str(source), "target": "local"}],
        environment={"setup": f"rm {source}"},
    )
    done = hpml("run", "--local", job)
    assert done.code == 6
    ended = hpml("show", *re.findall(r"submitted (\S+)", done.err), "--json").json()
    assert ended["exit_code"] == 8
    assert ended["reason"].endswith(f"{source}: No such file or directory")


@pytest.mark.parametrize("words", ["logs RUN", "logs -f RUN", "logs RUN 2>&1", "logs --help"])
def test_a_broken_pipe_is_no_error(shell: Shell, completed: tuple[Result, str], words: str) -> None:
    """`hpml logs | head -1` ends quietly and with 0, however its reader is connected."""
    output = Store(shell.records).run(completed[1]).output
    if output.stat().st_size < 1_000_000:
        with output.open("ab") as stream:
            stream.write(b"\n" + b"more\n" * 500_000)
    command, joined, _ = words.replace("RUN", completed[1]).partition(" 2>&1")
    line = f'"$@" {joined} | head -1; exit ${{PIPESTATUS[0]}}'
    ended = shell.bash(line, *command.split())
    assert (ended.code, ended.err.replace("hpml: COMPLETED\n", "")) == (0, "")


@pytest.mark.parametrize(
    ("place", "presses", "message"),
    [
        ("hpml_orchestrator.check.submission.check_rendered", 1, "hpml: nothing was submitted\n"),
        ("hpml_orchestrator.check.submission.prepare", 1, "hpml: nothing was submitted\n"),
        (
            "hpml_orchestrator.records.submission.Submission.mark_started",
            2,
            "hpml: nothing was submitted; `hpml submit --resume ",
        ),
        ("hpml_orchestrator.records.submission.Submission.record_job", 2, " may have been submitt"),
    ],
)
def test_an_early_ctrl_c(
    shell: Shell,
    hpml: Hpml,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    presses: int,
    message: str,
) -> None:
    """What is printed holds at every moment; the submission that was prepared can be completed."""
    name = "early" + place.rpartition(".")[2].replace("_", "")
    # The submitter, this process, lives on: it would be waited for.
    monkeypatch.setattr("hpml_orchestrator.runs.submit.GRACE_SECONDS", 0.1)

    def interrupted(*_: Any, **__: Any) -> None:
        for _press in range(presses):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(place, interrupted)
        ended = hpml("submit", "--local", shell.job(name))
    assert (ended.code, ended.out, message in ended.err) == (130, "", True), ended.err
    known = [run for run in hpml("list", "--json").json() if run["name"] == name]
    assert len(known) == presses - 1
    if known:
        submitted = hpml("submit", "--resume", known[0]["id"])
        assert (submitted.code, " is job " in submitted.out) == (0, True), submitted.err


def test_ctrl_c_in_the_midst_of_a_write() -> None:
    """The handler writes to standard error while the command writes to it, too."""
    code = (
        "import signal, sys, io; from hpml_orchestrator.cli.process import Stop\n"
        "class Raw(io.FileIO):\n"
        "  def write(self, data): signal.raise_signal(signal.SIGINT); return super().write(data)\n"
        "sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw(2, 'w', closefd=False)))\n"
        "with Stop(signal.SIGINT, message='stopping') as stop:\n"
        "  sys.stderr.write('x' * 9000); sys.stderr.flush()\n"
        "  sys.exit(7 if stop() else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("hpml: stopping\n")) == (7, 1), done.stderr[-300:]


@pytest.mark.parametrize(
    ("reason", "held"),
    [
        ("launch failed requeued held", True),
        ("launch_failed_requeued_held", True),
        ("JobHeldUser", True),
        ("JobHeldAdmin", False),  # whom an administrator holds, only an administrator releases
        ("Resources", False),
    ],
)
def test_a_held_job_and_a_message_of_the_site(
    shell: Shell,
    hpml: Hpml,
    slurm: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reason: str,
    held: bool,
) -> None:
    """What to do about a job that will not start is printed once; so is what a plugin printed."""
    submit, query = slurm.submit, slurm.query
    asked: list[str] = []

    def greet(request: Any, arguments: Any = ()) -> str:
        job_id = submit(request, arguments)
        (request.directory / "sbatch.err").write_text("sbatch: use partition \x1b[1mnew\n\n")
        slurm.jobs[job_id].status = replace(slurm.jobs[job_id].status, reason=reason)
        return job_id

    def then_cancelled(job_ids: Any) -> Any:
        asked.extend(job_ids)
        if len(asked) == 4:
            slurm.move(job_ids[0], JobState.CANCELLED)
        return query(job_ids)

    monkeypatch.setattr(slurm, "submit", greet)
    monkeypatch.setattr(slurm, "query", then_cancelled)
    monkeypatch.setattr(client.PollSchedule, "DELAYS_SECONDS", (0.01,))
    ended = hpml("--records", str(tmp_path), "run", "--no-check", shell.job("held"))
    assert ended.err.count("hpml: sbatch: use partition [1mnew\n") == 1, ended.err
    assert f"PENDING ({reason}: " in ended.err
    assert ended.err.count("`scontrol release 1` lets it start") == held
