"""`hpml report RUN --apply` and `--try` as users type them, with real trainings on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.unit.local_runs import Desk
from tests.unit.training_runs import JOBS

TESTS = Path(__file__).parents[2]
SLOW_OPEN = "0.02"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A user whose data are on a slow server: a fake, see `trialtraining.py`."""
    for path in (TESTS / "trialtraining.py", JOBS / "hpml_channel.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "server").mkdir()
    for number in range(20):
        (tmp_path / "server" / f"{number:02}").write_bytes(os.urandom(20_000))
    return Desk(tmp_path)


def job(desk: Desk, *more: str, samples: int = 400, option: str = "--data", **fields: Any) -> str:
    """A job file of that training."""
    args = [f"{option}={desk.root}/server", "--samples", str(samples), *more]
    return desk.job(
        name="images",
        command=[sys.executable, "trialtraining.py"],
        args=args,
        **{"resources": {"time": "10:00", "memory": "1G"}, **fields},
    )


def slow_disk(desk: Desk) -> list[str]:
    """The arguments that make the server slow."""
    return ["--slow", f"{desk.root}/server", "--open-seconds", SLOW_OPEN]


def test_a_change_is_written_and_tried(desk: Desk) -> None:
    """A trial that was interrupted is continued like any sweep, with its answer at the end."""
    desk.hpml("run", job(desk, *slow_disk(desk)), "--local")
    printed = " ".join(desk.hpml("report", "last").split())
    assert "unknown: whether storage is slow; `monitor: true` measures" in printed
    assert " gain " not in printed
    assert "start more loader workers" in printed
    printed = desk.hpml("report", "last", "--apply", "tuned.yaml")
    assert "+    " not in printed
    assert "changed   stage the data to /dev/shm (waits for data" in printed
    assert "{stage.data}" in (desk.root / "tuned.yaml").read_text()
    applied = json.loads((desk.root / "records/applied/images.jsonl").read_text())
    assert [*applied["kinds"]] == ["waits-for-data"]
    desk.hpml("report", "last", "--apply", "tuned.yaml", code=2)
    desk.hpml("check", "tuned.yaml", "--local")

    with desk.launch("report", "last", "--try", "--repeats", "1", "--minutes", "0.02") as trial:
        plans = desk.root / "records/sweeps"
        eventually(lambda: [*plans.glob("images-try-*/batches/0.json")] or None)
        trial.send_signal(signal.SIGINT)
        assert trial.wait(60) == 130
    printed = desk.hpml("sweep", "resume", "last")

    assert "2 of 2 done" in printed
    assert "times as fast, but 1 pair is not enough" in printed
    assert desk.json("show", "last")["name"] == "images"
    report = desk.json("sweep", "report", "last")
    assert "waiting for data 1" in report["answer"][0]
    reasons = {attempt["row"]["reason"] for attempt in report["attempts"]}
    assert "stopped after 1 s of training" in reasons


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--force"], "--force: needs --apply FILE"),
        (["--minutes", "3"], "--minutes: needs --try"),
        (["--apply", "a.yaml", "--try"], "--apply: cannot be given together with --try"),
        (["--apply", "a.yaml", "--json"], "--json: cannot be given together with --apply"),
        (["--try", "--markdown"], "--markdown: cannot be given together with --try"),
        (["--try", "last"], "RUN RUN: cannot be given together with --try"),
    ],
)
def test_options_that_make_no_sense_together(
    desk: Desk, capfd: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    """They are refused before anything is read."""
    with desk.launch("report", "last", *options) as refused:
        assert refused.wait(60) == 2
    assert part in capfd.readouterr().err


# both ranks on one core; with priority, so that other load of this machine does not decide
SHARED_CORE = "taskset -pc 0 $$ >/dev/null\nchrt -r -p 1 $$ 2>/dev/null || true\n"

FAULTS: dict[str, dict[str, Any]] = {
    # the change is that of the report itself
    "slow disk": {"args": slow_disk, "samples": 1000, "text": "stage the data to /dev/shm"},
    "loader workers": {
        "args": lambda desk: [*slow_disk(desk), "--workers=0"],
        "samples": 1000,
        # hpml does not know that this option is the data's, so staging is advice only
        "option": "--folder",
        "fields": {"resources": {"time": "10:00", "cpus_per_rank": 2}, "monitor": True},
        "text": "loader workers per rank",
    },
    "binding": {
        "args": lambda _desk: ["--rounds", "400000"],
        "samples": 600,
        "fields": {
            "resources": {"time": "10:00", "ranks_per_node": 2},
            "binding": "none",
            "environment": {"setup": SHARED_CORE},
        },
        "text": "have hpml bind the ranks",
    },
}


@pytest.mark.slow
@pytest.mark.timeout(2400)  # twelve runs and more, on a machine that others use
@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_helps_for_real(fault: str, desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    """Six interleaved pairs show that the changed job is faster."""
    case = FAULTS[fault]
    fields = {"samples": case["samples"], **case.get("fields", {})}
    file = job(desk, *case["args"](desk), option=case.get("option", "--data"), **fields)
    desk.hpml("run", file, "--local")
    report = desk.json("report", "last", "--try", "--minutes", "0.1")
    with capfd.disabled():
        sys.stderr.write(f"\n{fault}: {' '.join(report['answer'])}\n")
    assert any(case["text"] in note for note in report["provenance"]["notes"]), json.dumps(report)
    assert report["answer"][0].startswith("The changed job is "), report["answer"]
    assert "slower" not in report["answer"][0]
