"""Two runs side by side: what differs, and whether it may be compared at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.model import Diagnosis
from hpml_orchestrator.diagnosis.page import side_page
from hpml_orchestrator.diagnosis.side import compare, text, to_json
from hpml_orchestrator.errors import InputError
from tests.unit.diagnosis import page_examples as examples

STAGE = [{"name": "digits", "source": "digits", "target": "shm"}]


def second(**changed: Any) -> Diagnosis:
    """A run of the same job, equal but for what is given."""
    findings = changed.pop("findings", ())
    return Diagnosis(examples.facts(**{"run": "digits-9c1b", **changed}), findings)


def faster() -> Diagnosis:
    """The same job with staged data and workers, whose ranks hardly wait for data."""
    ranks = [
        replace(rank, step_seconds=400.0, data_wait_seconds=10.0) for rank in examples.ranks(4)
    ]
    command = ["python", "train.py", "--batch-size", "64", "--workers", "4"]
    return second(
        job={**examples.JOB, "stage": STAGE, "command": command},
        elapsed_seconds=561.0,
        phases={**examples.facts().phases, "rendezvous": 3.4},
        ranks=ranks,
        accuracy={"test accuracy": 0.9689},
        values={"--lr": 0.25, "seed": 1},
        code="9c1bf00",
        findings=[replace(examples.SLOW, verdict="rank 3 works 12% longer than the others")],
    )


def test_what_differs_is_shown_and_nothing_else_of_the_job() -> None:
    """Changed fields, the parts of a step, throughput, accuracy, and findings that came or went."""
    before = examples.gpu_run(values={"--lr": 0.1, "seed": 1}, code="f89fbee + changes")
    side = compare(before, faster())
    assert side.headline == "digits-9c1b processes 40% more samples per second"
    assert not side.doubts
    rows = {(row.group, row.name): row for row in side.rows}
    settings = {name: row.second for (group, name), row in rows.items() if group == "job file"}
    assert settings == {
        "command": "--workers 4",
        "stage.digits.name": "digits",
        "stage.digits.source": "digits",
        "stage.digits.target": "shm",
    }
    point = [row for row in side.rows if row.group == "point of the sweep"]
    assert [(row.name, row.first, row.second) for row in point] == [("lr", "0.1", "0.25")]
    assert rows["code", "commit"].second == "9c1bf00"
    waits = rows["one step, mean of the ranks", "waiting for data"]
    assert (waits.first, waits.second, waits.change_text) == ("216 ms", "12.5 ms", "-94%")
    assert rows["one step, mean of the ranks", "compute"].change_text == "may be noise"
    assert rows["phases", "training"].change_text == ""  # equal
    assert rows["phases", "rendezvous"].change_text == "may be noise"  # 3 s and 3.4 s
    assert rows["throughput", "GPU-hours"].change_text == "-25%"
    accuracy = rows["quality", "test accuracy"]
    assert (accuracy.first, accuracy.second, accuracy.change_text) == ("0.9712", "0.9689", "")
    assert side.gone == (examples.DATA.verdict, examples.BATCH.verdict)
    assert side.new == ()
    assert side.both == (f"{examples.SLOW.verdict}; then: rank 3 works 12% longer than the others",)


@pytest.mark.parametrize(
    ("changed", "doubt"),
    [
        ({"over": False, "state": "RUNNING"}, "digits-9c1b is not over (RUNNING)"),
        ({"state": "FAILED"}, "digits-9c1b did not complete (FAILED)"),
        ({"job": {**examples.JOB, "name": "bert"}}, "different jobs: digits and bert"),
        (
            {"job": {**examples.JOB, "command": ["python", "eval.py"]}},
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
    """The verdict says why in all forms, in either order, and claims no speed."""
    for pair in [(examples.gpu_run(), second(**changed)), (second(**changed), examples.gpu_run())]:
        side = compare(*pair)
        assert side.headline.startswith("Not comparable: ")
        assert len(side.doubts) == 1
        assert "faster" not in side.headline
        assert "samples per second" not in side.headline
        assert not to_json(side)["comparable"]
        assert " ".join(text(side).split()).count(side.headline) == 1
    assert compare(examples.gpu_run(), second(**changed)).doubts == (doubt,)


def rates(seconds: float) -> dict[str, Any]:
    """A run whose steps take that long."""
    return {"ranks": [replace(rank, step_seconds=seconds) for rank in examples.ranks(4)]}


SILENT: dict[str, Any] = {"ranks": (), "channel": False}


@pytest.mark.parametrize(
    ("before", "after", "headline"),
    [
        ({}, rates(700.0), "digits-9c1b processes 20% fewer samples per second"),
        ({}, rates(549.0), "No difference that one run each can show: samples per second +2.0%"),
        ({}, {}, "No difference that one run each can show: samples per second +0.0%"),
        (SILENT, {**SILENT, "elapsed_seconds": 600.8}, "digits-9c1b takes 20% less time"),
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
    assert "one run each: nothing is certain, and differences below 5% may be noise" in text(side)


def test_a_run_is_not_compared_with_itself() -> None:
    """The error names the run."""
    with pytest.raises(InputError, match="two different runs") as error:
        compare(examples.gpu_run(), examples.diagnosed())
    assert error.value.value == "digits-3f2a"


def test_every_form_has_all_rows() -> None:
    """The text for a terminal, the page and the JSON for programs."""
    side = compare(examples.gpu_run(), faster())
    printed, page, known = text(side), side_page(side), to_json(side)
    json.dumps(known, allow_nan=False)
    assert len(known["rows"]) == len(side.rows)
    for row in side.rows:
        assert row.name in printed
        assert f'<th scope="row">{row.name}</th><td>{row.first}</td><td>{row.second}</td>' in page
    for verdict in (*side.gone, *side.new, *side.both):
        assert verdict in " ".join(printed.split())
        assert verdict in page
    assert max(map(len, printed.splitlines())) <= 100
