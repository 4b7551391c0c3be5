"""Jobs run on this machine from the command line, and every command tells of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.records.store import Store, Submission
from hpml_orchestrator.runs import cancel as cancel_module
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.script import Capabilities
from hpml_orchestrator.spec import load_job

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

pytestmark = pytest.mark.xdist_group("local runs")

Hpml = Callable[..., "Result"]


@pytest.fixture(scope="module")
def completed(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of a job that completes prints, and the run's id."""
    stage = [{"name": "d", "source": str(shell.root / "data"), "target": str(shell.root / "t")}]
    for name in ("data", "t"):
        (shell.root / name).mkdir()
    (shell.root / "data" / "x").write_text("x" * 100)
    path = shell.job("good", command=["bash", "-c", "echo hi; cat $0/x"], args=["{stage.d}"])
    text = Path(path).read_text()
    Path(path).write_text(text[:-1] + f', "stage": {stage}}}'.replace("'", '"'))
    told = shell.hpml("run", "--local", path)
    return told, re.findall(r"submitted (\S+)", told.err)[0]


@pytest.fixture(scope="module")
def failed(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of a job that fails prints, and the run's id."""
    told = shell.hpml("run", "--local", shell.job("bad", command=["bash", "-c", "exit 42"]))
    return told, re.findall(r"submitted (\S+)", told.err)[0]


def test_a_run_ends_with_its_summary(shell: Shell, completed: tuple[Result, str]) -> None:
    """The output comes as it is written, then state, staging, phases and where records lie."""
    told, sid = completed
    assert told.code == 0, told.err
    assert told.out.startswith("hpml: 1 node ready, staged 1 file, 100 bytes")
    assert f"hi\n{'x' * 100}\n" in told.out  # the job's last line had no end
    lines = dict(re.findall(r"^(\w+) {2,}(.*)$", told.out, re.MULTILINE))
    assert lines["run"] == f"{sid}  COMPLETED"
    assert lines["staged"].startswith("1 file, 100 bytes")
    assert re.search(r"staging \d+\.\d\d s", lines["phases"])
    assert re.search(r"running \d+\.\d\d s, end \d", lines["phases"])
    assert lines["record"] == f"{shell.records}/runs/{sid}"
    assert "hpml: COMPLETED" in told.err
    assert list((shell.root / "t").iterdir()) == []


def test_a_failing_job_is_a_failing_run(failed: tuple[Result, str]) -> None:
    """Status 6, the job's own exit code in the message, and where its output is."""
    told, sid = failed
    assert told.code == 6
    assert "hpml: error: job " in told.err
    assert "ended FAILED, exit code 42" in told.err
    assert f"hint: hpml logs {sid}" in told.err
    assert "Traceback" not in told.err + told.out


def test_the_reason_of_an_end_is_told_once(shell: Shell, failed: tuple[Result, str]) -> None:
    """By the summary of `run`, by the last state of `wait`: the error itself does not repeat it."""
    told, sid = failed
    assert (told.out + told.err).count("rank 0 exited with code 42") == 1
    assert "\nreason     rank 0 exited with code 42\n" in told.out
    assert "hpml: FAILED\n" in told.err
    waited = shell.hpml("wait", sid)
    assert waited.err.count("rank 0 exited with code 42") == 1
    assert "hpml: FAILED (rank 0 exited with code 42)\n" in waited.err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NO BINDING: one CPU alone")
def test_a_strict_binding_failure_is_told_once(shell: Shell) -> None:
    """Rank by rank in the job's output; the summary and the error say that it was this."""
    first = min(os.sched_getaffinity(0))
    command = ["bash", "-c", f"exec taskset -c {first} sleep 600"]
    path = shell.job(
        "elsewhere",
        command=command,
        resources={"ranks_per_node": 2},
        binding={"policy": "spread", "verify": "strict"},
    )
    told = shell.hpml("run", "--local", path)
    assert told.code == 6, told
    everything = told.out + told.err
    assert everything.count("not on its own") == 1
    assert re.search(r"ended FAILED, exit code 79: ranks do not run where they should", told.err)
    (sid,) = re.findall(r"submitted (\S+)", told.err)
    assert f"hint: hpml show {sid}" in told.err
    assert "the job failed for it (verify: strict)" in told.out
    assert "\nreason " not in told.out
    shown = shell.hpml("show", sid).out
    assert shown.count("not on its own") == 1
    waited = shell.hpml("wait", sid)
    assert (waited.code, waited.err.count("not on its own")) == (6, 1)


def test_what_was_rendered_is_what_was_submitted(
    shell: Shell, hpml: Hpml, completed: tuple[Result, str]
) -> None:
    """`hpml render` prints, to the byte, the script that is kept with the submission."""
    _, sid = completed
    kept = (shell.records / "submissions" / sid / "job.sh").read_bytes()
    assert hpml("render", str(shell.root / "good.yaml")).out.encode() == kept


def test_every_command_tells_of_it(
    shell: Shell, hpml: Hpml, completed: tuple[Result, str], failed: tuple[Result, str]
) -> None:
    """list, status, show, logs, wait and cancel know both runs, by id and by part of it."""
    good, bad = completed[1], failed[1]
    rows = [line.split("\t") for line in hpml("list").out.splitlines()]
    assert rows[0] == ["RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"]
    found = {row[0]: (row[2], row[3]) for row in rows[1:]}
    assert found[good] == ("local", "COMPLETED")
    assert found[bad] == ("local", "FAILED")
    assert len(hpml("list", "-n", "1").out.splitlines()) == 2
    told = hpml("status", good, "bad")
    assert [line.split("\t")[3] for line in told.out.splitlines()[1:]] == ["COMPLETED", "FAILED"]
    told = hpml("show", "good")
    assert f"run        {good}  COMPLETED" in told.out
    assert re.search(r"^0\t\S+\t\S+\t[\d,-]+\t", told.out, re.MULTILINE)  # rank, node, GPU, CPUs
    assert hpml("logs", good).out.endswith(f"hi\n{'x' * 100}")
    assert hpml("logs", "-f", good).out.endswith(f"hi\n{'x' * 100}")
    assert hpml("logs", "-n", "1", good).out == "x" * 100
    assert hpml("logs", "-f", "-n", "2", good).out == f"hi\n{'x' * 100}"
    told = hpml("wait", good)
    assert (told.code, told.out) == (0, "")
    assert hpml("wait", bad).code == 6
    assert hpml("cancel", good).out == f"{good}: is over already (COMPLETED)\n"


def test_the_end_is_told_behind_the_last_words(
    completed: tuple[Result, str], shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a screen, output that was not read yet stands above the state that ends the job."""
    store = Store(shell.records)
    with (tmp_path / "screen").open("w") as screen:
        monkeypatch.setattr("sys.stderr", screen)
        follow(store, store.resolve(completed[1]), out=screen, end_line=True)
    told = (tmp_path / "screen").read_text()
    assert f"hi\n{'x' * 100}" in told
    assert told.endswith("\nhpml: COMPLETED\n")


def test_programs_get_json(
    hpml: Hpml, completed: tuple[Result, str], failed: tuple[Result, str]
) -> None:
    """Every command that prints data prints one JSON document with `--json`."""
    good, bad = completed[1], failed[1]
    assert {one["id"] for one in hpml("list", "--json").json()} >= {good, bad}
    (one,) = hpml("status", "--json", bad).json()
    assert (one["state"], one["exit_code"], one["over"]) == ("FAILED", 42, True)
    shown = hpml("show", "--json", good).json()
    assert (shown["state"], shown["attempts"]) == ("COMPLETED", 1)
    assert shown["summary"]["staged_bytes"] == 100
    assert shown["bindings"][0]["rank"] == 0
    assert shown["record"]["job"]["name"] == "good"
    waited = hpml("wait", "--json", bad)
    assert (waited.code, waited.json()["state"]) == (6, "FAILED")
    (cancelled,) = hpml("cancel", "--json", good).json()
    assert cancelled["outcome"].startswith("is over already")


def test_run_json_is_the_only_output(shell: Shell) -> None:
    """The job's own output goes to standard error then."""
    told = shell.hpml("run", "--local", "--json", shell.job("jason"))
    assert told.code == 0
    assert told.json()["state"] == "COMPLETED"
    assert told.json()["summary"]["phases"]
    assert "hi\n" in told.err


def test_submit_returns_at_once(shell: Shell, hpml: Hpml) -> None:
    """It prints id and job; `wait` then waits for the end."""
    go = shell.root / "go"
    waits = ["bash", "-c", f"until [[ -e '{go}' ]]; do sleep 0.1; done"]
    told = hpml("submit", "--local", "--json", shell.job("later", command=waits))
    made = told.json()
    assert set(made) == {"id", "job_id", "submission", "directory", "tasks"}
    assert made["tasks"] == []  # it is no array
    go.touch()
    assert hpml("wait", made["job_id"]).code == 0
    told = hpml("submit", "--local", shell.job("now"))
    sid = told.out.split()[0] if told.out.split()[0] != "submitted" else told.out.split()[1]
    assert f"hpml logs -f {sid}" in told.err
    assert hpml("wait", sid).code == 0


def test_the_environment_travels_but_for_the_sessions(shell: Shell, hpml: Hpml) -> None:
    """A variable of the shell reaches the job; records' and schedulers' do not."""
    shell.variables.update({"MY_TOKEN": "s3cret", "SBATCH_ACCOUNT": "x"})
    try:
        code = 'echo "[$MY_TOKEN] [$SBATCH_ACCOUNT] [$HPML_HOME] [$RANK]"'
        path = shell.job("travel", command=["bash", "-c", code])
        assert shell.hpml("run", "--local", path).out.count("[s3cret] [] [] [0]\n") == 1
        minimal = ["--set", "environment.inherit=minimal"]
        assert "[] [] [] [0]\n" in shell.hpml("run", "--local", path, *minimal).out
    finally:
        shell.variables.clear()
    record = hpml("show", "--json", "travel").err  # two runs begin so: told, not guessed
    assert "names 2 runs" in record
    kept = "".join(
        path.read_text(errors="replace")
        for path in shell.records.glob("submissions/travel-*/*")
        if path.suffix != ".pyz"
    )
    assert "MY_TOKEN" in kept
    assert "s3cret" not in kept


def test_ctrl_c_detaches_and_the_job_goes_on(shell: Shell, hpml: Hpml) -> None:
    """Interrupting `hpml run` ends the following with 130; `cancel` ends the job."""
    path = shell.job("long", command=["bash", "-c", "echo begun; exec sleep 300"])
    process = shell.start("run", "--local", path, start_new_session=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line == "begun\n":
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    (sid,) = re.findall(r"hpml cancel (\S+)`", err)
    assert "the job goes on" in err
    assert "Traceback" not in err
    (state,) = hpml("status", "--json", sid).json()
    assert (state["state"], state["over"]) == ("RUNNING", False)
    assert [one["id"] for one in hpml("status", "--json").json()] == [sid]
    assert hpml("cancel", sid).out == f"{sid}: cancelled job {state['job_id']}\n"
    told = hpml("wait", sid)
    assert (told.code, "ended CANCELLED" in told.err) == (6, True)
    assert hpml("status", "--json", sid).json()[0]["state"] == "CANCELLED"
    assert hpml("status").out == ""


def prepared(shell: Shell, name: str) -> tuple[Store, Submission]:
    """A submission that was cut off long ago, before the scheduler was called."""
    store = Store(shell.records)
    rendered = render_job(load_job(shell.job(name)), Capabilities())
    argv, environment = ["hpml"], shell.environment()
    now = time.time() - 1000
    made = prepare(store, rendered, backend="local", argv=argv, environment=environment, now=now)
    return store, made


def test_resuming_what_was_never_submitted(shell: Shell, hpml: Hpml) -> None:
    """The state says how to go on; going on makes the job, going on again finds it."""
    _, submission = prepared(shell, "cut")
    (state,) = hpml("status", "--json", submission.sid).json()
    assert state["state"] == "NOT SUBMITTED"
    assert f"hpml submit --resume {submission.sid}" in state["reason"]
    first = hpml("submit", "--json", "--resume", submission.sid).json()
    again = hpml("submit", "--json", "--resume", submission.sid).json()
    assert first == again
    assert hpml("wait", submission.sid).code == 0
    assert hpml("submit", "--json", "--resume", submission.sid).json() == first


def test_resuming_what_was_cut_off_after_the_submission(shell: Shell, hpml: Hpml) -> None:
    """The job exists but is not on record: it is found, and there is one."""
    store, submission = prepared(shell, "lost")
    told = hpml("submit", "--json", "--resume", submission.sid).json()
    assert hpml("wait", submission.sid).code == 0
    (submission.directory / "job.json").unlink()
    (submission.directory / "final.json").unlink()
    again = hpml("submit", "--json", "--resume", submission.sid)
    assert again.json()["job_id"] == told["job_id"]
    host = str(submission.record()["host"])
    found = LocalScheduler(store.local_home(host)).find(submission.directory, name="", since=0.0)
    assert found == [told["job_id"]]


def test_cancelling_what_is_being_submitted(
    shell: Shell, hpml: Hpml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No job after some seconds: nothing was cancelled, and the exit status is not 0."""
    monkeypatch.setattr(cancel_module, "_PATIENCE_SECONDS", 0.5)
    _, submission = prepared(shell, "between")
    submission.mark_started(now=time.time())
    told = hpml("cancel", submission.sid)
    assert told.code == 5
    assert told.out.startswith(f"{submission.sid}: not cancelled: it is being submitted (")
    assert f"hpml cancel {submission.sid}" in told.err
    told = hpml("cancel", "--json", submission.sid)
    assert told.code == 5
    assert [one["job_id"] for one in told.json()] == [""]


def test_resuming_what_was_refused(shell: Shell, hpml: Hpml) -> None:
    """A refusal is final for that submission: told with its reason."""
    told = hpml("run", "--local", "--no-check", shell.job("wide", resources={"nodes": 2}))
    assert told.code == 4
    assert "asks for 2 nodes" in told.err
    told = hpml("submit", "--resume", "wide")
    assert (told.code, told.out) == (2, "")
    assert "the scheduler refused it: " in told.err
    assert "asks for 2 nodes" in told.err
    (state,) = hpml("status", "--json", "wide").json()
    assert (state["state"], state["over"]) == ("REFUSED", True)
    told = hpml("logs", "wide")
    assert (told.code, "has no output yet" in told.err) == (3, True)


def test_a_broken_pipe_is_no_error(shell: Shell, completed: tuple[Result, str]) -> None:
    """`hpml logs | head -1` ends quietly."""
    store = Store(shell.records)
    output = store.run(completed[1]).output
    with output.open("ab") as stream:
        stream.write(b"\n" + b"more\n" * 500_000)
    process = shell.start("logs", completed[1])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(120) in (0, 1)
    process.stderr.close()
