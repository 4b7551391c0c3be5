"""`hpml report` of real local runs, of runs that have not started, and of damaged records."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from hpml_orchestrator.bench.measure import cpu_model
from hpml_orchestrator.bench.results import Measurement, Rate, keep
from tests.unit.cli.support import Hpml, Shell

pytestmark = pytest.mark.xdist_group("local runs")

CHANNEL = Path(__file__).parents[3] / "training_jobs"
TRAINING = """\
import sys
sys.path.insert(0, sys.argv[1])
from hpml_channel import Channel
channel = Channel.from_env()
channel.event("training")
for _ in range(40):
    channel.count(samples=8, steps=1, step_seconds=1.0, data_wait_seconds=0.5, comm_seconds=0)
channel.result(test_accuracy=0.9)
channel.close()
"""


@pytest.fixture(scope="module")
def trained(shell: Shell) -> str:
    """The id of a run that reports waiting for data half of its time."""
    (shell.root / "train.py").write_text(TRAINING)
    job = shell.job("waits", command=["python3", str(shell.root / "train.py"), str(CHANNEL)])
    return str(shell.hpml("run", "--local", "--json", job).json()["id"])


@pytest.fixture(scope="module")
def array(shell: Shell) -> str:
    """The id of a job array of two tasks."""
    job = shell.job("tasks", array="0-1")
    return str(shell.hpml("run", "--local", "--json", job).json()["id"])


def test_a_report(hpml: Hpml, shell: Shell, trained: str) -> None:
    """The same finding as text, Markdown, JSON, page, and in one line of `hpml show`."""
    verdict = "waits for data: 50% of each step"
    printed = hpml("report", trained).out.splitlines()
    assert printed[0].startswith(f"run       {trained}  COMPLETED in ")
    assert printed[1] == f"verdict   {verdict}"
    assert f"**{verdict}**" in hpml("report", trained, "--markdown").out
    found = hpml("report", trained, "--json").json()
    assert found["headline"] == verdict
    assert [one["kind"] for one in found["findings"]] == ["waits-for-data"]
    assert found["facts"]["ranks"][0]["data_wait_seconds"] == pytest.approx(19.5)
    assert f"diagnosis  {verdict}; hpml report {trained}\n" in hpml("show", trained).out
    assert hpml("show", trained, "--json").json()["diagnosis"] == verdict
    assert hpml("report", trained, "--html", "page.html").code == 0
    assert verdict in (shell.root / "page.html").read_text("utf-8")


def test_a_profile(hpml: Hpml, shell: Shell, trained: str) -> None:
    """Traces in the run's directory are summed up; a damaged one is named and costs no report."""
    directory = Path(hpml("show", trained, "--json").json()["directory"]) / "profile"
    directory.mkdir()
    event = {"ph": "X", "cat": "user_annotation", "name": "hpml.step", "ts": 0, "dur": 4000}
    trace = directory / "trace-rank0.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    line = "CPU in 1 step of 4 ms, 1 rank: compute 0%, idle 100%"
    assert f"\nprofile   {line}\n" in hpml("report", trained).out
    assert f"\n## Profile\n\n{line}\n" in hpml("report", trained, "--markdown").out
    assert hpml("report", trained, "--json").json()["facts"]["profile"]["idle"] == 1
    assert hpml("report", trained, "--html", "profile.html").code == 0
    assert line in (shell.root / "profile.html").read_text("utf-8")
    trace.write_bytes(b"cut off")
    done = hpml("report", trained)
    assert done.code == 0
    assert f"warning: {trace} is not a trace" in done.err
    shutil.rmtree(directory)


AVERAGING = """\
import os, sys
sys.path.insert(0, sys.argv[1])
from hpml_channel import Channel
channel = Channel.from_env()
print("peak", os.environ["HPML_PEAK_TFLOPS"], os.environ.get("HPML_PEAK_TFLOPS_BF16"))
channel.event("training")
channel.gauge(gradient_bytes=20e6, gradient_buckets=100)
for _ in range(40):
    channel.count(samples=8, steps=1, step_seconds=1.0, comm_seconds=0.4, wait_seconds=0)
if os.environ["RANK"] == "0":
    channel.result(flops_per_sample=1e8, samples_per_second=23, bubble=0.25, bubble_formula=0.2)
channel.close()
"""
RESOURCES = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "time": "5:00"}


def test_predictions_from_a_bench(hpml: Hpml, shell: Shell) -> None:
    """Peaks for the ranks, the averaging of each scale, the buckets that follow, the roofline."""
    here, cpus = socket.gethostname().partition(".")[0], len(os.sched_getaffinity(0))
    curve = [(2, n, 2 * 1e-3 + n * 1e-8) for n in (4096.0, 1e6, 16e6)]  # 1 ms, 100 MB/s
    figures = {"cpu.matmul.float32": Rate(cpus * 23e9, "FLOP/s"), "host.memory": Rate(4e9, "B/s")}
    measured = Measurement(
        here, "kind", "bench-1", time.time(), cpus, cpu_model(), figures=figures,
        curves={"node": curve},
    )  # fmt: skip
    (shell.root / "averaging.py").write_text(AVERAGING)
    command = ["python3", str(shell.root / "averaging.py"), str(CHANNEL)]
    args = ["--batch-size=8", "--bucket-mb=0.2"]
    job = shell.job("averages", command=command, args=args, resources=RESOURCES)
    keep([measured], [shell.records / "bench"])
    try:
        scales = ("--strong", "ranks=2", "--repeats", "1")
        assert hpml("sweep", "run", job, *scales, "--local").code == 0
        swept = hpml("sweep", "report", "last", "--markdown").out
        facts = hpml("sweep", "report", "last", "--json").json()
        run = facts["attempts"][0]["row"]["run"]
        said = " ".join(hpml("report", run).out.split())
        reported = hpml("report", run, "--json").json()
        assert hpml("report", run, "--html", "averaging.html").code == 0
    finally:
        shutil.rmtree(shell.records / "bench")
    # One of the node's CPUs for each rank; bfloat16 was not measured.
    assert hpml("logs", run).out.count("peak 0.023 None\n") == 2
    assert "| 2 ranks | 2 | 20 | 100 | 400 | 400 | 400 | 1,000 | 1 |" in swept
    assert [*facts["averaging"]] == ["0"]
    assert "20 MB of gradients in 100 buckets by 2 ranks take 400 ms per step" in said
    assert "change enlarge DDP's buckets to 2 MiB (`bucket_cap_mb=2`): 10 buckets instead" in said
    assert "save about 180 ms of 400 ms per step" in said
    assert reported["findings"][0]["changes"][0]["value"] == "--bucket-mb=2"
    assert reported["facts"]["achieved_flops"] == pytest.approx(2.3e9)
    page = (shell.root / "averaging.html").read_text("utf-8")
    assert 'class="roofline"' in page
    assert "it has at least 0.575 FLOP/byte" in page
    # What the training compares with a formula of its own.
    assert "formulas bubble 0.25 (0.2 by formula)" in said
    assert "bubble 0.25 (0.2 by formula)" in page
    # Without the bench the same run has no prediction, and its report names what it needs.
    assert "take 400 ms per step; predicted: unknown (needs `hpml bench`)" in " ".join(
        hpml("report", run).out.split()
    )
    assert "| 400 | unknown | unknown |" in hpml("sweep", "report", "last", "--markdown").out


def test_two_runs(hpml: Hpml, trained: str, array: str) -> None:
    """Two are compared, three are refused."""
    compared = hpml("report", trained, f"{array}.0")
    assert (compared.code, compared.err) == (0, "")
    assert trained in compared.out
    assert hpml("report", trained, trained, trained).refuses(2, "RUN", "two are compared")


def test_two_runs_with_other_data(hpml: Hpml, shell: Shell, trained: str) -> None:
    """Of the job files only what was written is listed; times of other work are not compared."""
    (shell.root / "set").mkdir()
    (shell.root / "to").mkdir()
    (shell.root / "set" / "file").write_text("data")
    stage = [{"name": "d", "source": str(shell.root / "set"), "target": str(shell.root / "to")}]
    command = ["python3", str(shell.root / "train.py"), str(CHANNEL), "--epochs", "2"]
    job = shell.job("waits", command=command, stage=stage)
    second = hpml("run", "--local", "--json", job).json()["id"]
    compared = hpml("report", trained, second, "--json").json()
    listed = {row["name"] for row in compared["rows"] if row["group"] == "job file"}
    assert listed == {"command", "stage.d.source", "stage.d.target"}
    assert compared["differences"] == ["different arguments: - and --epochs 2"]
    assert compared["comparable"]
    changed = {row["group"] for row in compared["rows"] if row["change"] is not None}
    assert changed == {"one step, mean of the ranks", "throughput"}


def test_a_run_without_a_channel(hpml: Hpml, array: str) -> None:
    """A task of an array is reported by its name; nothing is accused without data."""
    one = hpml("report", f"{array}.1")
    assert (one.code, one.err) == (0, "")
    assert "verdict   not enough data to say what holds it back" in one.out
    words = " ".join(one.out.split())  # on a busy machine it lasts long enough to be judged
    assert ("needs a longer run: this one ended after" in words) != ("needs the channel" in words)
    assert "diagnosis" not in hpml("show", f"{array}.1").out


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("nope",), 3, ("no run 'nope'",)),
        (("999999",), 3, ("no run '999999'",)),
        (("ARRAY",), 2, ("is a job array of 2 tasks", "name one")),
        (("TRAINED", "--json", "--markdown"), 2, ("--markdown", "--json")),
        (("TRAINED", "--markdown", "--html", "x"), 2, ("--html", "--markdown")),
        (("TRAINED", "--html", ""), 2, ("--html", "must not be empty")),
        (("TRAINED", "--html", "no/such/x.html"), 2, ("--html", "no/such/x.html")),
        (("TRAINED", "--prometheus", "ftp://x"), 2, ("--prometheus", "ftp://x")),
    ],
)
def test_refusals(
    hpml: Hpml, trained: str, array: str, words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    """Each names the word that is wrong and what would be right."""
    known = {"TRAINED": trained, "ARRAY": array}
    assert hpml("report", *(known.get(word, word) for word in words)).refuses(code, *parts)


def test_a_prometheus_that_does_not_answer(hpml: Hpml, trained: str) -> None:
    """The report is made of the records, with a warning."""
    printed = hpml("report", trained, "--prometheus", "http://127.0.0.1:1")
    assert printed.code == 0
    assert "figures are from records" in printed.err
    assert "waits for data" in printed.out


def test_a_run_that_never_started(hpml: Hpml, shell: Shell) -> None:
    """Its state and what to call next; waiting and running ones alike."""
    first = hpml("submit", "--local", "--json", shell.job("sleeps", command=["sleep", "60"])).json()
    waits = shell.job("after", after=[f"ok:{first['id']}"])
    second = hpml("submit", "--local", "--json", waits).json()
    assert hpml("report", second["id"]).refuses(3, "nothing to report", "has not started", "show")
    hpml("cancel", first["id"], second["id"])
    assert hpml("report", second["id"]).refuses(3, "nothing to report", "never started")


def test_a_run_that_crashed(hpml: Hpml, shell: Shell) -> None:
    """The report has the reason, and the command that prints the output."""
    command = ["python3", "-c", "raise RuntimeError('no such thing')"]
    crashed = hpml("run", "--local", "--json", shell.job("crashes", command=command)).json()["id"]
    printed = " ".join(hpml("report", crashed).out.split())
    assert "verdict it ended FAILED: " in printed
    assert "RuntimeError: no such thing" in printed
    assert "needs a run that gets to its steps" in printed
    assert f"next hpml logs {crashed}" in printed


def test_a_damaged_record(hpml: Hpml, shell: Shell, trained: str, array: str) -> None:
    """It is named, with the status of damaged records."""
    plan = shell.records / "runs" / trained / "run.json"
    whole_plan = plan.read_bytes()
    plan.write_bytes(whole_plan[:100])
    try:
        assert hpml("report", trained).refuses(7, "run.json")
    finally:
        plan.write_bytes(whole_plan)
    record = shell.records / "submissions" / array / "submit.json"
    whole = record.read_text()
    for text in ("{", json.dumps({**json.loads(whole), "job": {}})):
        record.write_text(text)
        try:
            assert hpml("report", f"{array}.0").refuses(7, array)
        finally:
            record.write_text(whole)
