"""Two runs side by side: what differs, and whether it may be compared at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Finding
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.reporting import to_html, to_json, to_markdown
from hpml_orchestrator.sweeps.reporting import to_text as text
from hpml_orchestrator.sweeps.tworuns import ComparedFigure, RunComparison
from hpml_orchestrator.sweeps.tworuns import compare_runs as compare
from tests.unit.diagnosis import page_examples as examples

NOTHING: dict[str, Any] = {"gone": (), "new": (), "both": (), "not_judged": ()}
STAGE = [{"name": "digits", "source": "/nfs/digits", "target": "shm"}]


def change(row: ComparedFigure) -> str:
    """The change of a figure, as it is printed."""
    if row.change is None or row.first == row.second:
        return ""
    return "may be noise" if row.may_be_noise else f"{row.change:+.0%}"


def verdicts(side: RunComparison) -> list[str]:
    """The verdicts that only one of the runs has."""
    return [*side.findings["gone"], *side.findings["new"]]


def second(**changed: Any) -> Diagnosis:
    """A run of the same job, equal but for what is given; everything was judged."""
    findings = changed.pop("findings", ())
    facts = examples.facts(**{"run": "digits-9c1b", **changed})
    return Diagnosis(facts, findings, judged=tuple(THRESHOLDS))


def faster() -> Diagnosis:
    """The same job with staged data, whose ranks hardly wait for it."""
    ranks = [
        replace(rank, step_seconds=400.0, data_wait_seconds=10.0) for rank in examples.ranks(4)
    ]
    command = ["python", "train.py", "--batch-size", "64", "--data={stage.digits}"]
    return second(
        job={**examples.JOB, "stage": STAGE, "command": command},
        elapsed_seconds=561.0,
        phases={**examples.facts().phases, "rendezvous": 3.4},
        ranks=ranks,
        accuracy={"test accuracy": 0.9689},
        code="9c1bf00",
        findings=[replace(examples.SLOW, verdict="rank 3 works 12% longer than the others")],
    )


def test_what_differs_is_shown_and_nothing_else_of_the_job() -> None:
    """Changed fields, the parts of a step, throughput, accuracy, and findings that came or went."""
    command = [*examples.JOB["command"], "--data=/nfs/digits"]
    before = examples.gpu_run(job={**examples.JOB, "command": command}, code="f89fbee + changes")
    side = compare(before, faster())
    assert side.headline == "digits-9c1b processes 40% more samples per second"
    assert not side.doubts
    rows = {(row.group, row.name): row for row in side.rows}
    settings = {name: row.second for (group, name), row in rows.items() if group == "job file"}
    assert settings == {
        "command": "--data={stage.digits}",
        "stage.digits.source": "/nfs/digits",
        "stage.digits.target": "shm",
    }
    assert rows["code", "commit"].second == "9c1bf00"
    waits = rows["one step, mean of the ranks", "waiting for data"]
    assert (waits.first, waits.second, change(waits)) == ("216 ms", "12.5 ms", "-94%")
    assert change(rows["one step, mean of the ranks", "compute"]) == "may be noise"
    assert change(rows["phases", "training"]) == ""  # equal
    assert change(rows["phases", "rendezvous"]) == "may be noise"  # 3 s and 3.4 s
    assert change(rows["throughput", "GPU-hours"]) == "-25%"
    assert change(rows["run", "run time"]) == "-25%"
    accuracy = rows["quality", "test accuracy"]
    assert (accuracy.first, accuracy.second, change(accuracy)) == ("0.9712", "0.9689", "")
    assert side.findings["gone"] == (examples.DATA.verdict, examples.BATCH.verdict)
    assert (side.findings["new"], side.findings["not_judged"]) == ((), ())
    assert side.findings["both"] == (
        f"{examples.SLOW.verdict}; then: rank 3 works 12% longer than the others",
    )


@pytest.mark.parametrize(
    ("changed", "doubt"),
    [
        ({"over": False, "state": "RUNNING"}, "digits-9c1b is not over (RUNNING)"),
        ({"state": "FAILED"}, "digits-9c1b did not complete (FAILED)"),
        ({"job": {**examples.JOB, "name": "bert"}}, "different jobs: digits and bert"),
        (
            {"job": {**examples.JOB, "command": ["python", "eval.py", "--batch-size", "64"]}},
            "different programs: python train.py and python eval.py",
        ),
        ({"world_size": 8}, "different ranks: 4 and 8"),
        ({"gpu_count": 0}, "different GPUs: 4 and 0"),
        ({"node_count": 2}, "different nodes: 1 and 2"),
        (
            {"ranks": [replace(rank, samples=102_400) for rank in examples.ranks(4)]},
            "different samples per step and rank: 64 and 128",
        ),
        (
            {
                "nodes": [
                    replace(node, gpus=[replace(gpu, name="NVIDIA A100") for gpu in node.gpus])
                    for node in examples.facts().nodes
                ]
            },
            "different types of GPU: NVIDIA H100 and NVIDIA A100",
        ),
        ({"ranks": ()}, "only digits-3f2a reports its steps"),
    ],
)
def test_runs_that_differ_otherwise_are_not_compared(changed: dict[str, Any], doubt: str) -> None:
    """The verdict has the reason in all forms, in either order, and claims no speed."""
    for pair in [(examples.gpu_run(), second(**changed)), (second(**changed), examples.gpu_run())]:
        side = compare(*pair)
        assert side.headline.startswith("Not comparable: ")
        assert len(side.doubts) == 1
        assert "faster" not in side.headline
        assert "samples per second" not in side.headline
        assert not to_json(side)["comparable"]
        assert not [row for row in side.rows if row.change is not None]
        assert " ".join(text(side).split()).count(side.headline) == 1
        assert side.findings == NOTHING
    assert compare(examples.gpu_run(), second(**changed)).doubts == (doubt,)


def rates(seconds: float) -> dict[str, Any]:
    """A run whose steps take that long."""
    return {"ranks": [replace(rank, step_seconds=seconds) for rank in examples.ranks(4)]}


SILENT: dict[str, Any] = {"ranks": (), "channel": False}


@pytest.mark.parametrize(
    ("before", "after", "headline"),
    [
        ({}, rates(700.0), "digits-9c1b processes 20% fewer samples per second"),
        ({}, rates(549.0), "No difference that one run each can show: samples per second +2%"),
        ({}, {}, "No difference that one run each can show: samples per second +0%"),
        (SILENT, {**SILENT, "elapsed_seconds": 600.8}, "digits-9c1b takes 20% less time"),
        (
            {},
            rates(560 / 1.0449),
            "No difference that one run each can show: samples per second +4%",
        ),
        ({}, rates(560 / 1.0451), "digits-9c1b processes 5% more samples per second"),
        (
            {**SILENT, "elapsed_seconds": 2.0},
            {**SILENT, "elapsed_seconds": 1.2},
            "No difference that one run each can show: time 2 s and 1.2 s",
        ),
        (
            {**SILENT, "elapsed_seconds": 2},
            {**SILENT, "elapsed_seconds": 1},
            "digits-9c1b takes 50% less time",
        ),
        (
            {**SILENT, "elapsed_seconds": None},
            SILENT,
            "Neither speed nor time of both runs is known",
        ),
    ],
)
def test_the_verdict_names_the_faster_run_if_one_run_each_can_show_it(
    before: dict[str, Any], after: dict[str, Any], headline: str
) -> None:
    """Samples per second if both count them, the run time otherwise; the rest is noise."""
    side = compare(examples.diagnosed(**before), second(**after))
    assert side.headline == headline
    caution = "differences below 5%, or of less than 1 s of the run, may be noise"
    assert caution in " ".join(text(side).split())
    for row in side.rows:
        if change(row) not in ("", "may be noise"):
            assert int(change(row).strip("+-%")) >= 5
    hours = (
        next(row for row in side.rows if row.name == "GPU-hours")
        if "GPU-hours" in text(side)
        else None
    )
    took = next((row for row in side.rows if row.name == "run time"), None)
    assert hours is None or took is None or hours.may_be_noise == took.may_be_noise


def test_one_run_each_is_a_sweep_of_two_settings() -> None:
    """With the ratio of their rates, or times, and a verdict that is not known."""
    for before, after, ratio in (
        (examples.gpu_run(), faster(), 1.4),
        (examples.diagnosed(**SILENT), second(**SILENT, elapsed_seconds=375.5), 2.0),
    ):
        side = compare(before, after)
        [pair] = side.pairs
        assert (pair.verdict, pair.speedup and pair.speedup.interval) == ("unknown", None)
        assert pair.speedup
        assert pair.speedup.value == pytest.approx(ratio)
        assert pair.after
        assert pair.after.runs == 1
        assert side.costs[0].gpu_hours == pytest.approx(4 * 751 / 3600)
    [pair] = compare(examples.gpu_run(), second(state="FAILED")).pairs
    assert (pair.after, pair.speedup) == (None, None)


def test_a_run_is_not_compared_with_itself() -> None:
    """The error names the run."""
    with pytest.raises(InputError, match="two different runs") as error:
        compare(examples.gpu_run(), examples.diagnosed())
    assert error.value.value == "digits-3f2a"


def test_every_form_has_all_rows() -> None:
    """The text for a terminal, the page, Markdown, and the JSON for programs."""
    side = compare(examples.gpu_run(), faster())
    printed, known = text(side), to_json(side)
    json.dumps(known, allow_nan=False)
    assert len(known["rows"]) == len(side.rows)
    for row in side.rows:
        assert row.name in printed
        assert f"| {row.name} | {row.first} | {row.second} |" in to_markdown(side)
        assert f">{row.name}</td>" in to_html(side)
    for verdict in sum(side.findings.values(), ()):
        assert verdict in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


def with_args(*words: str, **more: Any) -> dict[str, Any]:
    """A job of the same program with other words."""
    return {"job": {**examples.JOB, "workdir": "/home/u", "args": list(words), **more}}


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (
            with_args("--epochs", "10"),
            with_args("--epochs", "1"),
            "different arguments: --epochs 10 and --epochs 1",
        ),
        (with_args(), with_args("--workers=4"), "different arguments: - and --workers=4"),
        (
            with_args("--data", "/nfs/a"),
            with_args("--data", "{stage.d}", stage=[{"name": "d", "source": "/nfs/b"}]),
            "different arguments: --data /nfs/a and --data /nfs/b",
        ),
        (
            with_args("--data", "sets/a"),
            with_args("--data", "{stage.d}", stage=[{"name": "d", "source": "/home/u/sets/a"}]),
            "",
        ),
        (
            with_args(stage=[{"name": "d", "source": "/nfs/a"}]),
            with_args(stage=[{"name": "d", "source": "/nfs/b"}]),
            "different data: /nfs/a and /nfs/b",
        ),
        (
            with_args(stage=[{"name": "d", "source": "/nfs/a"}]),
            with_args(stage=[{"name": n, "source": f"/nfs/{n}"} for n in "ab"]),
            "",
        ),
        (
            {"data_files": 10.0, "data_bytes": 4096.0},
            {"data_files": 20.0, "data_bytes": 8192.0},
            "different data: 10 files of 4.0 KiB and 20 files of 8.0 KiB",
        ),
        (
            {},
            {
                "ranks": [
                    replace(r, samples=512, steps=8, step_seconds=5.6) for r in examples.ranks(4)
                ]
            },
            "different numbers of samples: 204,800 and 2,048",
        ),
        (
            with_args(environment={"variables": {"EPOCHS": "3"}}),
            with_args(environment={"variables": {"EPOCHS": "4"}}),
            "different variables: EPOCHS=3 and EPOCHS=4",
        ),
        (
            with_args(environment={"variables": {"CODE": "import a\n\na.b()"}}),
            with_args(environment={"variables": {"CODE": "import c"}}),
            "different variables: CODE=import a a.b() and CODE=import c",
        ),
        (
            {"values": {"--lr": 0.1, "seed": 1}},
            {"values": {"--lr": 0.25, "seed": 1}},
            "different values of the sweep: lr=0.1 and lr=0.25",
        ),
        (with_args(resources={"cpus_per_rank": 2}), with_args(resources={"cpus_per_rank": 4}), ""),
    ],
)
def test_times_of_different_work_are_not_compared(
    before: dict[str, Any], after: dict[str, Any], difference: str
) -> None:
    """Rates per sample are, with the difference named; without them nothing is."""
    took = {"elapsed_seconds": 600.0}
    side = compare(examples.diagnosed(**before), second(**{**took, **after}))
    changed = {row.group for row in side.rows if row.change is not None}
    assert side.differences == ((difference,) if difference else ())
    assert ("run" in changed) == ("phases" in changed) == (not difference)
    assert "throughput" in changed
    assert [row.name for row in side.rows if row.name == "GPU-hours" and row.change] == (
        [] if difference else ["GPU-hours"]
    )
    if difference:
        assert side.headline.endswith(f"; {difference}: only rates are compared")
    silent = compare(
        examples.diagnosed(**{**before, **SILENT}), second(**{**after, **took, **SILENT})
    )
    if difference and "samples" not in difference:
        assert silent.headline == f"Not comparable: {difference}"
    else:
        assert silent.headline == "digits-9c1b takes 20% less time"


@pytest.mark.parametrize(
    ("changed", "kind", "why"),
    [
        ({"ranks": examples.ranks(4, waits=False)}, "slow-rank", "it needs `wait_seconds`"),
        ({"nodes": (), "monitored": False}, "tensor-cores-idle", "it needs `monitor: true`"),
        ({"nodes": (), "monitored": False}, "faulty-gpu", "it needs `monitor: true`"),
        ({"elapsed_seconds": 30.0}, "time-over-asked", "it needs a run of 10 minutes"),
        ({"phases": {}}, "slow-start", "it has no figures for it"),
        ({}, "time-over-asked", ""),
        ({}, "faulty-gpu", ""),
        ({}, "communication", ""),
        ({"stages": ()}, "slow-staging", ""),
    ],
)
def test_a_finding_is_gone_only_if_the_other_run_was_judged(
    changed: dict[str, Any], kind: str, why: str
) -> None:
    """Else it is not judged, with the reason; in either order, and in all forms."""
    finding = Finding(kind, "warning", "something is slow")
    with_it = Diagnosis(examples.facts(), [finding], judged=[kind])
    other = replace(diagnose(examples.facts(run="digits-9c1b", **changed)), findings=())
    for side in (compare(with_it, other), compare(other, with_it)):
        printed = " ".join(text(side).split())
        if not why:
            assert side.findings["not_judged"] == ()
            assert verdicts(side) == [finding.verdict]
            continue
        assert verdicts(side) == []
        (line,) = side.findings["not_judged"]
        assert line.startswith(
            f"something is slow in digits-3f2a; not judged in digits-9c1b: {why}"
        )
        assert f"unknown {line}" in printed
        shown: Any = to_json(side)
        assert shown["findings"]["not_judged"] == [line]


def test_settings_that_nobody_wrote_are_not_listed() -> None:
    """Of an entry that one job has, only the written fields; what both have is compared whole."""
    stage = {
        "name": "d",
        "source": "/d",
        "target": "shm",
        "kind": "auto",
        "keep": False,
        "hash": True,
    }
    before = {**examples.JOB, "stage": [], "binding": {"verify": "warn"}}
    after = {**examples.JOB, "stage": [stage], "binding": {"verify": "off"}}
    side = compare(examples.diagnosed(job=before), second(job=after))
    rows = {row.name: (row.first, row.second) for row in side.rows if row.group == "job file"}
    assert rows == {
        "stage.d.source": ("-", "/d"),
        "stage.d.target": ("-", "shm"),
        "binding.verify": ("warn", "off"),
    }


@pytest.mark.parametrize("form", [0, 1])
def test_no_line_ends_within_a_word(form: int) -> None:
    """Ids and options stay whole, whatever their hyphens; nothing is cut off at 100 columns."""
    run = "imagenet-resnet-50-large-batch-2026-11-24-3f2a"
    verdict = (
        f"rank 3 of {run} is slow: compare it with no-other-run-that-has-hyphens-9c1b in detail"
    )
    change = (
        f"compare the storage and the loader of rank 3 with the others' in {run} and {run}-2 too"
    )
    finding = replace(
        examples.SLOW, verdict=verdict, changes=[Change(change, "stage.0.target", "shm")]
    )
    first = Diagnosis(examples.facts(run=run), [finding], notes=[finding])
    other = second()
    printed = str(Report(first)) if form else text(compare(first, other))
    words = " ".join(printed.split())
    assert verdict in words
    assert form == 0 or f"{change}: `stage.0.target: shm`" in words
    assert all(line.split()[-1] in words.split() for line in printed.splitlines() if line)
    assert not [line for line in printed.splitlines() if line.endswith("-") or len(line) > 100]
