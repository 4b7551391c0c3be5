"""hpml report as a page, for two runs, and in the report of a sweep."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.unit.cli.support import Hpml, Shell

# Counters of a training of 200 s, three fifths of which it waited for data.
TRAINING = """
import sys
sys.path.insert(0, sys.argv[1])
from hpml_channel import Channel
channel = Channel.from_env()
channel.count(steps=1, step_seconds=1, samples=8, data_wait_seconds=0)
channel.count(steps=200, step_seconds=200, samples=1600, data_wait_seconds=120)
channel.result(test_accuracy=0.9)
channel.close()
"""


@pytest.fixture(scope="module")
def runs(shell: Shell) -> list[str]:
    """Two runs of one sweep."""
    command = [sys.executable, "-c", TRAINING, str(ROOT / "training_jobs")]
    resources = {"nodes": 1, "ranks_per_node": 1, "time": "5:00"}
    job = shell.job("waits", command=command, resources=resources)
    words = ("--grid", "lr=0.1,0.25", "--repeats", "1", "--local")
    done = shell.hpml("sweep", "run", job, *words)
    assert done.code == 0, done.err
    report = json.loads(shell.hpml("sweep", "report", "last", "--json").out)
    return [attempt["row"]["run"] for attempt in report["attempts"]]


def test_a_sweep_says_what_held_its_best_setting_back(runs: list[str], hpml: Hpml) -> None:
    """The last sentence of its answer names a run whose report has more."""
    answer = hpml("sweep", "report", "last", "--json").json()["answer"]
    assert answer[-1].startswith("What held it back: waits for data")
    assert answer[-1].split()[-1].strip(").") in runs


def test_pages_are_written(runs: list[str], hpml: Hpml, tmp_path: Path) -> None:
    """To the file that was named."""
    path = tmp_path / "report.html"
    done = hpml("report", runs[0], "--html", str(path))
    assert done.code == 0, done.err
    assert done.out == ""
    assert "aits for data" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_two_runs_stand_side_by_side(runs: list[str], hpml: Hpml, tmp_path: Path) -> None:
    """The argument that differs, the parts of the steps, and the finding of both."""
    done = hpml("report", *runs)
    assert done.code == 0, done.err
    [point] = [line.split() for line in done.out.splitlines() if line.startswith("  lr ")]
    assert point[1:] == ["0.1", "0.25"]
    assert "waiting for data" in done.out
    known = hpml("report", *runs, "--json").json()
    assert known["runs"] == runs
    assert known["comparable"]
    assert known["findings"]["both"]
    assert [pair["verdict"] for pair in known["pairs"]] == ["unknown"]
    assert "| lr | 0.1 | 0.25 |" in hpml("report", *runs, "--markdown").out
    assert hpml("report", *runs, "--html", str(tmp_path / "both.html")).code == 0
    assert "waiting for data" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("{0}", "{0}"), ("RUN", "two different runs")),
        (("{0}", "{1}", "{0}"), ("RUN", "two are compared")),
        (("{0}", "--html", "no/such/directory/page.html"), ("--html", "cannot be written")),
        (("{0}", "--html", "/etc/hostname"), ("--html", "is not a page")),
        (("{0}", "nothing-like-this"), ("nothing-like-this",)),
    ],
)
def test_what_is_wrong_is_named(
    words: tuple[str, ...], parts: tuple[str, ...], runs: list[str], hpml: Hpml
) -> None:
    """With a status that is not 0, and without a traceback."""
    done = hpml("report", *(word.format(*runs) for word in words))
    assert done.code not in {0, 70}
    assert all(part in done.err for part in parts), done.err
    assert "Traceback" not in done.err
