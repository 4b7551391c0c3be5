"""`hpml usage` sums up what the recording rules keep of jobs for weeks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.monitoring.backfill_support import backfill
from tests.monitoring.prometheus_support import Prometheus, booted_prometheus
from tests.monitoring.test_joins import ask, exporter
from tests.unit.local_runs import Desk

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

HOUR = 3600
JOBS = {  # user, account, name, GPUs, share of the time with a kernel, watts per GPU, hours
    "1": ("ada", "vision", "images", 4, 0.25, 300, 10),
    "2": ("ada", "vision", "notebook", 1, 0.0, 70, 100),
    "3": ("bob", "vision", "lm", 8, 0.95, 650, 20),
    "10": ("cyd", "speech", "asr", 2, None, None, 5),  # MIG instances have no activity
}
HELD = {("1", "waits-for-data"): 9, ("1", "slow-rank"): 2, ("2", "gpu-unused"): 99}


def test_the_rules_keep_an_hour_of_each_job(promtool: Promtool, tmp_path: Path) -> None:
    """A job that is scraped twice, on two nodes, has its GPU-seconds once."""
    who = {"user": "ada", "account": "vision", "partition": "gpu", "name": "images"}
    jobs, gpu = {"1": who}, {"1": "1"}
    series = exporter("main", "n1", jobs, G1=gpu) | exporter("main", "n2", jobs, G2=gpu)
    series |= exporter("main", "n1", jobs, scope="job", G1=gpu)
    labels = ", ".join(f'{name}="{value}"' for name, value in who.items())
    # 15 or 16 minutes: promtool evaluates groups in any order
    for name, per_second in {
        "gpu_seconds": 2,
        "gpu_busy_seconds": 1,
        "gpu_energy_joules": 200,
    }.items():
        one = f"hpml:job_{name}:increase1h{{{labels}}} / {60 * per_second}"
        ask(promtool, tmp_path, series, f"count({one} > 12 < 17)", {"{}": 1})
        ask(promtool, tmp_path, series, f"count(hpml:job_{name}:increase1h)", {"{}": 1})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with a sample per job and hour, of jobs that have ended; the newest is old."""
    end, lines = time.time() - HOUR, dict[str, list[str]]()

    def keep(figure: str, labels: str, value: float, hours: int) -> None:
        name = f"hpml:job_{figure}:increase1h"
        lines.setdefault(name, []).extend(
            f"{name}{{{labels}}} {value} {end - hour * HOUR:.3f}" for hour in reversed(range(hours))
        )

    for jobid, (user, account, name, gpus, busy, watts, hours) in JOBS.items():
        labels = f'cluster="main",jobid="{jobid}",user="{user}",account="{account}",name="{name}"'
        keep("gpu_seconds", labels, gpus * HOUR, hours)
        if busy is not None and watts is not None:
            keep("gpu_busy_seconds", labels, gpus * busy * HOUR, hours)
            keep("gpu_energy_joules", labels, gpus * watts * HOUR, hours)
        for (other, finding), held in HELD.items():
            if other == jobid:
                keep("holdback_seconds", f'{labels},finding="{finding}"', HOUR, held)
    folder = tmp_path_factory.mktemp("usage")
    text = [*(line for name in sorted(lines) for line in lines[name]), "# EOF\n"]
    backfill(folder, "\n".join(text))
    with booted_prometheus(folder, []) as booted:
        yield booted


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.split("\n\n")[1].splitlines()]


def test_jobs_of_everybody_the_largest_waste_first(server: Prometheus, tmp_path: Path) -> None:
    """A job whose activity is unknown is not called unused and is listed last."""
    text = Desk(tmp_path).hpml("usage", "--all-users", "--prometheus", server.url)
    assert text.startswith("4 jobs since ")
    assert "310 GPU-hours; 54% of that time a kernel ran; 138 GPU-hours unused; 123 kWh" in text
    assert rows(text) == [
        ["JOB", "NAME", "USER", "ACCOUNT", "GPU-HOURS", "ACTIVE", "UNUSED", "KWH", "HELD BACK BY"],
        ["2", "notebook", "ada", "vision", "100", "0%", "100", "7.0", "gpu-unused 99 h"],
        ["1", "images", "ada", "vision", "40", "25%", "30", "12", "waits-for-data 9.0 h"],
        ["3", "lm", "bob", "vision", "160", "95%", "8.0", "104", "-"],
        ["10", "asr", "cyd", "speech", "10", "-", "-", "-", "-"],
    ]


def test_users_accounts_and_time(server: Prometheus, tmp_path: Path) -> None:
    """Every selection counts what it names and nothing else; a name is not a pattern."""
    hpml = Desk(tmp_path).hpml
    common = ("usage", "--prometheus", server.url)
    by_user = rows(hpml(*common, "--all-users", "--by", "user"))
    assert by_user[1] == ["ada", "2", "140", "7%", "130", "19", "gpu-unused 99 h"]
    assert [row[0] for row in by_user] == ["USER", "ada", "bob", "cyd"]
    by_account = rows(hpml(*common, "--account", "vision", "--by", "account"))
    assert [row[:3] for row in by_account[1:]] == [["vision", "3", "300"]]
    assert [row[0] for row in rows(hpml(*common, "--user", "ada", "-n", "1"))] == ["JOB", "2"]
    recent = rows(hpml(*common, "--user", "ada", "--since", "6h"))
    assert [row[2] for row in recent[1:]] in (["5.0", "20"], ["6.0", "24"], ["20", "5.0"])
    far = rows(hpml(*common, "--all-users", "--min-unused", "50"))
    assert [row[0] for row in far] == ["JOB", "2"]
    assert hpml(*common, "--user", "a.*") == ""  # and the reason on stderr
    assert hpml(*common) == ""  # the user who runs the tests has no jobs here
    told = json.loads(hpml(*common, "--user", "bob", "--json"))
    assert told["total"]["gpu_hours"] == pytest.approx(160)
    assert told["rows"][0]["name"] == "lm"
    assert told["rows"][0]["active"] == pytest.approx(0.95)
    assert told["rows"][0]["finding"] is None


def test_the_documented_letters(server: Prometheus, tmp_path: Path) -> None:
    """Users who left many GPU-hours unused get a letter; nobody else does."""
    page = (Path(__file__).parents[2] / "docs/usage.md").read_text("utf-8")
    program = page.split("```python letters.py\n")[1].split("```")[0]
    words = ("usage", "--prometheus", server.url, "--by", "user", "--all-users", "--json")
    figures = Desk(tmp_path).hpml(*words, "--min-unused", "100")
    letters = subprocess.run(
        [sys.executable, "-c", program], input=figures, capture_output=True, text=True, check=True
    )
    assert letters.stdout.startswith("To: ada\nSubject: 130 of your 140 GPU-hours ")
    assert letters.stdout.count("To: ") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all-users"], "--all-users: needs a Prometheus"),
        (["--since", "last week"], "--since"),
        (["--user", ""], "--user: must not be empty"),
        (["--prometheus", "http://127.0.0.1:1"], "no answer: Connection refused"),
    ],
)
def test_bad_words(words: list[str], message: str, tmp_path: Path) -> None:
    """An error names the option, and nothing is written."""
    words = [sys.executable, "-m", "hpml_orchestrator.cli", "usage", *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "d").exists()
