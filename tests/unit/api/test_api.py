"""The Python API, on the local backend."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpml_orchestrator
from hpml_orchestrator import (
    InputError,
    Job,
    JobFailedError,
    NotFoundError,
    Run,
    WaitTimeoutError,
    list_runs,
    make_job,
    run,
    submit,
    sweep_report,
)
from hpml_orchestrator.api import runs as api_module
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.job import Monitor, Resources
from hpml_orchestrator.records.store import open_store

LIMIT_SECONDS = 120


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory and records of each test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPML_HOME", str(tmp_path / "records"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("HPML_SITE", "HPML_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "records"


def shell(text: str, **fields: Any) -> Job:
    """A job that runs a shell program in one rank."""
    command = ["bash", "-c", text]
    return make_job(**{"name": "api", "launcher": "srun", "command": command, **fields})


def wrong(value: object) -> Any:
    """A value of a type that the function does not take."""
    return value


def test_all_is_complete() -> None:
    """Every exported name can be imported, and every name imported for types is exported."""
    tree = ast.parse(Path(hpml_orchestrator.__file__).read_text("utf-8"))
    named = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hpml_orchestrator")
        for alias in node.names
    }
    assert named | {"__version__"} == set(hpml_orchestrator.__all__) <= set(dir(hpml_orchestrator))
    for name in hpml_orchestrator.__all__:
        assert getattr(hpml_orchestrator, name) is not None
    assert issubclass(JobFailedError, HpmlError)
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        _ = hpml_orchestrator.Jobs


def test_importing_the_package_imports_nothing_else() -> None:
    """`import hpml_orchestrator` stays cheap, as the start of `hpml` needs it."""
    code = "import sys, hpml_orchestrator; print([m for m in sys.modules if 'hpml' in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    loaded = ast.literal_eval(done.stdout.decode())
    assert [name for name in loaded if not name.startswith("__editable__")] == ["hpml_orchestrator"]


def test_examples_in_docstrings() -> None:
    """They print what the docstring shows."""
    assert doctest.testmod(api_module).failed == 0


def test_a_run_from_its_submission_to_its_results() -> None:
    """State, output, results, events, report and tables of a job that completes."""
    done = run(
        shell('echo one; echo two; echo \'{"loss": 0.5}\' > "$HPML_RUN_DIR/result.json"'),
        local=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.state() == done.wait() == "COMPLETED"
    assert done.logs().splitlines()[-2:] == ["one", "two"]
    assert done.logs(lines=1) == "two\n"
    assert done.results() == {"loss": 0.5}
    info = done.info()
    assert (info["id"], info["exit_code"], info["backend"]) == (done.id, 0, "local")
    events = done.events()
    assert {"started", "ready", "ended"} <= {event["event"] for event in events}
    assert {(event["attempt"], event["rank"]) for event in events} == {(0, None)}
    times = [float(str(event["time"])) for event in events]
    assert times == sorted(times)
    assert [events[0]["event"], events[-1]["event"]] == ["queued", "ended"]
    report = done.report()
    assert report.headline in str(report)
    assert report.to_dict()["findings"] == report.findings
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html')
    assert [one.id for one in list_runs(state="completed", since="1h", limit=1)] == [done.id]
    assert list_runs(state="failed") == list_runs(name="other-*") == []
    assert (Run().id, [task.id for task in Run(done.id).tasks()]) == (done.id, [done.id])
    assert done.cancel() == "is over already (COMPLETED)"


def test_a_notebook_shows_a_run_as_a_table(tmp_path: Path) -> None:
    """What the job wrote is text there, not HTML; addresses are links."""
    (tmp_path / "out.json").write_text(
        '{"note": "<b>bold</b>", "page": "https://example.org/?a&b"}'
    )
    done = run(shell('cp out.json "$HPML_RUN_DIR/result.json"'), local=True)
    shown = done._repr_html_()
    assert shown.startswith("<table>")
    assert f">{done.id}  COMPLETED</td>" in shown
    assert "<b>" not in shown
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown
    link = '<a href="https://example.org/?a&amp;b">https://example.org/?a&amp;b</a>'
    assert link in shown
    array = run(shell("true", array="1-2"), local=True)
    assert f">{array.id}  COMPLETED</td>" in array._repr_html_()


def test_a_failed_job() -> None:
    """`wait` raises, unless the caller looks at the state itself."""
    failed = submit(shell("exit 3"), local=True)
    with pytest.raises(JobFailedError, match="ended FAILED, exit code 3") as raised:
        failed.wait(LIMIT_SECONDS)
    assert raised.value.run == failed.id
    assert failed.wait(must_complete=False) == "FAILED"
    assert failed.results() == {}


def test_wait_gives_up_and_cancel_ends_the_job() -> None:
    """The job continues after a time-out."""
    running = submit(shell("echo begun; sleep 600"), local=True)
    with pytest.raises(WaitTimeoutError, match="after 0 s") as raised:
        running.wait(0)
    assert isinstance(raised.value, TimeoutError)
    assert isinstance(raised.value, HpmlError)
    assert running.state() in {"PENDING", "CONFIGURING", "RUNNING"}
    assert running.cancel().startswith("cancelled job ")
    assert running.wait(LIMIT_SECONDS, must_complete=False) == "CANCELLED"


def test_a_job_array_has_a_run_per_task() -> None:
    """Output and results are read from each task."""
    job = shell('echo "task $0"', args=["{array.index}"], array="3,5")
    array = run(job, local=True, timeout=LIMIT_SECONDS)
    assert [task.logs(lines=1) for task in array.tasks()] == ["task 3\n", "task 5\n"]
    tasks: Any = array.info()["tasks"]
    assert [task["index"] for task in tasks] == [3, 5]
    with pytest.raises(InputError, match="array of 2 tasks, each with its own results") as raised:
        array.results()
    assert raised.value.hint.startswith("choose one of `tasks()`: ")


def test_a_job_file_is_run_by_its_path(tmp_path: Path) -> None:
    """`run` and `submit` take the path of a job file in place of a job."""
    (tmp_path / "job.yaml").write_text("name: fit\ncommand: [echo, hello]\nlauncher: srun\n")
    assert run("job.yaml", local=True, timeout=LIMIT_SECONDS).logs(lines=1) == "hello\n"
    done = submit(Path("job.yaml"), local=True)
    assert done.wait(LIMIT_SECONDS) == "COMPLETED"
    with pytest.raises(InputError, match="lines: must be a number of lines"):
        done.logs(lines=-1)


def test_a_hint_names_the_argument_of_the_function() -> None:
    """It is `check=False`, not the option of the command."""
    with pytest.raises(InputError, match="9999") as refused:
        submit(shell("true", resources={"cpus_per_rank": 9999}), local=True)
    assert refused.value.hint == "nothing was submitted; `check=False` submits it as it is"


def test_a_job_is_the_one_class(tmp_path: Path) -> None:
    """It has the values in their units, cannot be changed, and a changed copy is checked again."""
    (tmp_path / "fit.py").write_text("import sys; print(sys.argv[1:])")
    job = make_job(name="fit", launcher="srun", script=Path("fit.py"), resources={"time": "5m"})
    assert isinstance(job, Job)
    assert (job.script, job.resources.time) == (str(tmp_path / "fit.py"), 300)
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrong(job).name = "other"
    done = run(dataclasses.replace(job, args=("b",)), local=True, timeout=LIMIT_SECONDS)
    assert done.logs(lines=1) == "['b']\n"
    for changed, message in [
        (dataclasses.replace(job, script=None), "exactly one of script, module and command"),
        (dataclasses.replace(job, name="a b"), "name"),
        (
            dataclasses.replace(job, args=wrong("--lr=1")),
            "job: args: '--lr=1' is not of type tuple",
        ),
        (dataclasses.replace(job, resources=wrong({"time": "5m"})), "job: resources: .* of type"),
        (
            dataclasses.replace(job, resources=Resources(time=wrong("5m"))),
            "job: resources: time: '5m' is not of type int",
        ),
        (
            dataclasses.replace(job, resources=Resources(gpus=wrong(True))),
            "job: resources: gpus: True is not of type Gpus",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            submit(changed, local=True)
    assert len(list_runs()) == 1


def test_a_site_profile_fills_what_a_job_leaves_out(tmp_path: Path) -> None:
    """What it says stays, also where that is hpml's own default."""
    (tmp_path / "site.toml").write_text(
        "[defaults.monitor]\nenabled = true\ntargets = '/tmp'\n"
        "[defaults.resources]\ntime = '10m'\nmemory = '100M'\n"
    )
    job = shell("true", monitor=False, resources={"time": "1h"}, checkpoint={"requeue": []})
    submitted = submit(job, local=True, site="site.toml")
    submitted.wait(LIMIT_SECONDS)
    recorded = open_store(None).resolve(submitted.id).requested_job()
    assert recorded.monitor == Monitor(enabled=False, targets="/tmp")
    assert (recorded.resources.time, recorded.resources.memory) == (3600, 100)
    assert recorded.checkpoint.requeue == ()


def test_a_job_file_and_its_changes(tmp_path: Path, records: Path) -> None:
    """Paths in a job file start at its directory, and settings win over it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "fit.py").write_text("import sys; print(sys.argv[1:])")
    (folder / "job.yaml").write_text("name: fit\nscript: fit.py\nargs: [a]\n")
    changes = {"args": ["b"], "launcher": "srun"}
    done = run("project/job.yaml", settings=changes, local=True, timeout=LIMIT_SECONDS)
    assert done.logs(lines=1) == "['b']\n"
    assert Run("fit", records=records).state() == "COMPLETED"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_job(name="a"), InputError, "exactly one of script, module and command"),
        (lambda: shell("true", resources={"gpu": 1}), InputError, "did you mean resources.gpus?"),
        (lambda: shell("true", args=["{stage.x}"]), InputError, "names nothing"),
        (lambda: submit("none.yaml", settings={"name": "a"}), NotFoundError, "none.yaml"),
        (lambda: submit(shell("true"), local=True, site="no.toml"), NotFoundError, "no.toml"),
        (lambda: submit(shell("true", mpi="pmix"), local=True), InputError, "srun offers no pmix"),
        (lambda: submit(shell("true", after=["x"]), local=True), InputError, "no run 'x'"),
        (lambda: run("none.yaml"), NotFoundError, "none.yaml"),
        (lambda: submit(wrong(5)), InputError, r"job: must be a Job, or the path .* \(got 5\)"),
        (
            lambda: run(shell("true"), timeout=wrong("1m")),
            InputError,
            "timeout: must be .*got '1m'",
        ),
        (lambda: run(shell("true"), timeout=float("nan")), InputError, "timeout: must be"),
        (lambda: submit(shell("true"), local=wrong("yes")), InputError, "local: must be True"),
        (lambda: submit(shell("true"), check=wrong("x")), InputError, "check: must be True"),
        (lambda: list_runs(records="none"), NotFoundError, "no such directory of records"),
        (lambda: Run(records="none"), NotFoundError, "no such directory of records"),
        (lambda: sweep_report(records="none"), NotFoundError, "no such directory of records"),
        (lambda: sweep_report("nothing"), NotFoundError, "no sweep 'nothing'"),
        (lambda: sweep_report(wrong(5)), InputError, r"word: must be a text: .*\(got 5\)"),
        (
            lambda: submit("a.yaml", settings=wrong(["a=1"])),
            InputError,
            "settings: must be a dictionary",
        ),
        (
            lambda: submit("a.yaml", settings=wrong({3: 3})),
            InputError,
            "settings: must be a dictionary",
        ),
        (
            lambda: submit(shell("true"), settings={"name": "b"}),
            InputError,
            "settings: must be left out for a Job",
        ),
        (lambda: submit(shell("true"), records=wrong(3)), InputError, "records: must be the path"),
        (lambda: submit(shell("true"), site=wrong(3)), InputError, "site: must be the path"),
        (lambda: Run("nothing"), NotFoundError, "no run 'nothing'"),
        (lambda: Run(wrong(5)), InputError, r"word: must be a text: .* job id .*\(got 5\)"),
        (lambda: list_runs(limit=-1), InputError, r"limit: must be .*\(got -1\)"),
        (lambda: list_runs(name=wrong(None)), InputError, "name: must be a name"),
        (lambda: list_runs(state=wrong(["failed"])), InputError, "state: must be a text"),
        (lambda: list_runs(since=wrong(3)), InputError, "since: must be an age"),
        (lambda: list_runs(state="lost"), InputError, "unknown state"),
        (lambda: list_runs(since="soon"), InputError, "must be an age"),
    ],
)
def test_what_is_wrong_is_an_error_of_hpml(call: Any, error: type[Exception], message: str) -> None:
    """The message names the field or the word; nothing is submitted."""
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, HpmlError)
    assert list_runs() == []
