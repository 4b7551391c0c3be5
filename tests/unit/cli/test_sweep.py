"""hpml sweep as its users type it: a small sweep from plan to comparison, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.support import HPML, Hpml, Shell, in_terminal

WORK = 'echo "$@"; for word in "$@"; do [[ $word != --fail=yes ]] || exit 3; done'
RESOURCES = {"nodes": 1, "ranks_per_node": 1, "time": "5:00"}


@pytest.fixture(scope="module")
def job(shell: Shell) -> str:
    """A job whose program fails on request."""
    command = ["bash", "-c", WORK, "program"]
    return shell.job("toy", command=command, args=["--batch-size=8"], resources=RESOURCES)


@pytest.fixture(scope="module")
def swept(shell: Shell, job: str) -> list[str]:
    """Two sweeps of that job that have ended, the second with points that failed."""
    for fails in ("no", "no,yes"):
        words = ("--grid", "lr=0.1,0.25", "--grid", f"fail={fails}", "--repeats", "1")
        done = shell.hpml("sweep", "run", job, *words, "--local")
        assert done.code == (6 if "yes" in fails else 0), done.err
    return [state["id"] for state in json.loads(shell.hpml("sweep", "status", "--json").out)]


def test_a_sweep_with_failed_points_says_where_to_look(swept: list[str], hpml: Hpml) -> None:
    """Every point is in the table and in the report; nothing is dropped."""
    status = hpml("sweep", "status", "last")
    assert "4 of 4 done" in status.out
    assert status.out.count("FAILED") == 3
    report = hpml("sweep", "report", "last", "--json").json()
    assert report["states"] == {"COMPLETED": 2, "FAILED": 2}
    assert [len(setting["values"]) for setting in report["settings"]] == [2] * 4
    markdown = hpml("sweep", "report", "last", "--markdown").out
    assert markdown.startswith("# toy-grid\n")
    page = Path(hpml("sweep", "report", swept[1]).out.strip())
    assert page.read_text().startswith("<!doctype html>")
    # a second resume has nothing to do, and reports again how it ended
    again = hpml("sweep", "resume", "last")
    assert again.code == 6
    assert "hpml logs " in again.err
    assert "nothing to cancel" in hpml("sweep", "cancel", "last").out


def test_show_names_a_point_with_its_values(swept: list[str], hpml: Hpml) -> None:
    """The arguments are those that the program received, placeholders filled in."""
    points = [
        hpml("show", "--json", task["run"]).json()
        for run in hpml("list", "--all", "--json").json()
        for task in run["tasks"]
    ]
    failed = [point for point in points if point["values"].get("--fail") == "yes"]
    assert {point["sweep"] for point in failed} == {swept[0]}
    assert sorted(point["values"]["--lr"] for point in failed) == [0.1, 0.25]
    for point in failed:
        assert point["command"][-2:] == [f"--lr={point['values']['--lr']}", "--fail=yes"]
        lines = hpml("show", point["id"]).out
        values = f"lr {point['values']['--lr']}, fail yes"
        assert f"\npoint      {point['point']} of {swept[0]}: {values}\n" in lines


def test_missing_points_run_again(shell: Shell) -> None:
    """What failed, and nothing else; every attempt stays in the report."""
    command = ["bash", "-c", "[[ $1 != --lr=2 || -e mended ]]", "bash"]
    shell.job("mends", command=command, args=["--lr=1"], resources=RESOURCES)
    done = shell.hpml("sweep", "run", "mends.yaml", "--grid", "lr=1,2", "--local")
    assert (done.code, "--top-up` runs what is missing" in done.err) == (6, True)
    name = re.findall(r"mends-grid-[\w-]+", done.out)[0]
    (shell.root / "mended").touch()
    done = shell.hpml("sweep", "run", name, "--top-up")
    assert done.code == 0, done.err
    assert f"1 point of {name} without a complete run" in done.err
    assert "2 of 2 done, 2 COMPLETED" in done.out
    report = shell.hpml("sweep", "report", name, "--json").json()
    assert report["states"] == {"COMPLETED": 2, "FAILED": 1}
    done = shell.hpml("sweep", "run", name, "--top-up")
    assert (done.code, "nothing is missing" in done.out) == (0, True)


@pytest.mark.parametrize("mode", ["random", "evolution"])
def test_the_best_of_a_search_are_repeated(shell: Shell, mode: str) -> None:
    """With seeds that the search has not used, and compared by a figure of the output."""
    command = ["bash", "-c", 'for word; do echo "$word"; done', "bash"]
    shell.job("score", command=command, args=["--score=1", "--seed=1"], resources=RESOURCES)
    search = {"trials": 4, "metric": {"pattern": "score=([0-9.]+)"}, "population": 2}
    axes = {"--score": {"low": 0.1, "high": 0.9}, "--flag": [True, False]}
    sweep = {"base": "score.yaml", "mode": mode, "axes": axes, "search": search}
    (shell.root / "search.yaml").write_text(json.dumps(sweep))
    done = shell.hpml("sweep", "run", "search.yaml", "--local")
    assert done.code == 0, done.err
    name = re.findall(rf"score-{mode}-[\w-]+", done.out)[0]
    before = shell.hpml("sweep", "report", name, "--json").json()
    best = sorted((one["figure"]["value"] for one in before["settings"]), reverse=True)[:2]
    used = {attempt["seed"] for attempt in before["attempts"]}
    done = shell.hpml("sweep", "repeat", name, "--best", "2", "--repeats", "2")
    assert done.code == 0, done.err
    assert f"note      repeats the best 2 settings of {name}, with the seeds" in done.err
    after = shell.hpml("sweep", "report", "last", "--json").json()
    assert after["name"] == f"score-{mode}-repeat"
    found = sorted((one["figure"]["value"] for one in after["settings"]), reverse=True)
    assert found == pytest.approx(best)
    assert after["states"] == {"COMPLETED": 4}
    assert not used & {attempt["seed"] for attempt in after["attempts"]}


def test_a_plan_says_which_difference_it_finds(swept: list[str], hpml: Hpml) -> None:
    """By the noise of an earlier sweep of the job, else by an assumed one."""
    planned = hpml("sweep", "plan", "toy.yaml", "--strong", "ranks=1,2", "--local")
    assert re.search(
        r"\nfinds     differences of 1\d % or more between two scales, with 80 % power "
        r"\(6 runs each, 5 % noise assumed\)\n",
        planned.out,
    )
    planned = hpml("sweep", "plan", "toy.yaml", "--grid", "lr=1,2", "--local")
    assert "finds     no difference: 1 run each, and hpml gives intervals from 6" in planned.out
    assert swept


def test_sweeps_are_listed(swept: list[str], hpml: Hpml) -> None:
    """By `list`, and by `status` without a sweep."""
    listed = hpml("sweep", "list")
    assert listed.out.splitlines()[0] == "SWEEP\tMODE\tDONE\tSTATE"
    assert all(name in listed.out for name in swept)
    assert hpml("sweep", "status").out == listed.out


def test_two_sweeps_of_one_kind_compare(swept: list[str], hpml: Hpml, tmp_path: Path) -> None:
    """Before and after, as text and as a page."""
    newest, oldest = swept
    assert "lr=0.1" in hpml("sweep", "compare", oldest, newest).out
    page = tmp_path / "compare.html"
    assert hpml("sweep", "compare", oldest, newest, "-o", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_terminal_shows_a_bar(shell: Shell, job: str) -> None:
    """It goes away at the end; the table stays."""
    words = ("--grid", "lr=1,2", "--repeats", "1", "--local")
    printed = in_terminal([HPML, "sweep", "run", job, *words], shell.environment())
    assert "━" in printed
    assert "2 of 2 done" in printed


def test_a_detached_sweep_goes_on_by_itself(shell: Shell, job: str) -> None:
    """Its id is printed at once; `resume` in another shell follows until the end."""
    words = ("--grid", "lr=5,6", "--repeats", "1", "--local", "--detach")
    started = shell.hpml("sweep", "run", job, *words)
    assert started.code == 0, started.err
    name = started.out.strip()
    shown = shell.hpml("sweep", "status", name, "--watch")
    assert "2 of 2 done" in shown.out


def test_a_point_counts_by_its_last_start(shell: Shell) -> None:
    """It failed, was started again and completed."""
    command = ["bash", "-c", ': "$@"; [[ -e again ]] || { touch again; exit 3; }', "bash"]
    shell.job("fails", command=command, args=["lr=1"], resources=RESOURCES)
    sweep = {"base": "fails.yaml", "mode": "grid", "axes": {"lr=": [1]}, "retry": {"FAILED": 1}}
    (shell.root / "again.yaml").write_text(json.dumps(sweep | {"repeats": 1}))
    done = shell.hpml("sweep", "run", "again.yaml", "--local")
    assert done.code == 0, done.err
    assert "lr=1\t1/1\t-\t" in done.out


@pytest.mark.parametrize("command", ["run toy.yaml --grid lr=1,2", "resume", "tick", "report"])
def test_a_missing_package_is_named_at_once(
    command: str, swept: list[str], hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours, when the report is due; nothing is planned."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = sorted((shell.records / "sweeps").iterdir())
    done = hpml("sweep", *command.split())
    assert done.refuses(2, "matplotlib", "'PATH[sweep]'")
    assert sorted((shell.records / "sweeps").iterdir()) == before
    assert swept


def test_a_full_disk_leaves_no_plan_behind(swept: list[str], shell: Shell) -> None:
    """Not even a hidden directory: files of this shell may have 4 KiB."""
    values = ",".join(map(str, range(200)))
    words = ["sweep", "run", "toy.yaml", "--grid", f"lr={values}", "--local", "--no-check"]
    before = sorted((shell.records / "sweeps").iterdir())
    done = shell.bash('ulimit -f 4; "$@"', *words)
    assert done.refuses(7, "cannot write", "File too large")
    assert sorted((shell.records / "sweeps").iterdir()) == before
    assert swept


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("plan toy.yaml", 2, ["FILE: is a job file", "--strong nodes=1,2,4"]),
        ("plan nowhere.yaml --grid lr=1,2", 3, ["no such job file"]),
        ("plan nowhere.yaml", 3, ["no such sweep file"]),
        ("plan toy.yaml --strong nodes", 2, ["--strong: must be written as nodes=1,2,4"]),
        ("plan toy.yaml --strong nods=1", 2, ["scale.nods", "unknown field"]),
        ("plan toy.yaml --strong ranks=3", 2, ["batch.size", "cannot be divided over 3"]),
        ("plan toy.yaml --strong ranks=1 --weak ranks=1", 2, ["--weak", "only one"]),
        ("plan toy.yaml --grid nods.x=1,2", 2, ["axes.nods.x", "neither an argument nor a field"]),
        ("plan toy.yaml --grid lr=", 2, ["--grid: must be written"]),
        ("plan toy.yaml --grid lr=1 --grid lr=2", 2, ["--grid: is given twice (got '--lr')"]),
        ("plan toy.yaml --grid lr=1,2 --repeats 0", 2, ["--repeats"]),
        ("run toy.yaml --grid resources.time=1-0,nonsense --local", 2, ["resources.time"]),
        ("run toy.yaml --weak nodes=1,2 --local", 2, ["resources.nodes", "at nodes = 2"]),
        ("run sweep.yaml --strong nodes=1,2", 2, ["sweep.yaml is a sweep file", "hpml sweep run"]),
        ("report nix", 3, ["no sweep 'nix'", "lists all"]),
        ("status toy-grid", 2, ["SWEEP: names", "give more of the id"]),
        ("toy.yaml --grid lr=1,2", 2, ["did you mean `hpml sweep run toy.yaml --grid lr=1,2`?"]),
        ("run last --top-up --grid lr=1", 2, ["--grid", "--top-up"]),
        ("run toy.yaml --top-up", 3, ["no sweep 'toy.yaml'", "hpml sweep list"]),
        ("repeat last --best 0", 2, ["--best"]),
        ("repeat last", 2, ["SWEEP: has no run that reports"]),
        ("report last --json --open", 2, ["--open", "only one"]),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(
    words: str, code: int, parts: list[str], swept: list[str], shell: Shell, hpml: Hpml
) -> None:
    """One error with what would be right; no sweep is written."""
    (shell.root / "sweep.yaml").write_text("{base: toy.yaml, mode: grid, axes: {--lr: [1]}}")
    before = sorted((shell.records / "sweeps").iterdir())
    assert hpml("sweep", *words.split()).refuses(code, *parts)
    assert sorted((shell.records / "sweeps").iterdir()) == before
    assert swept


@pytest.mark.parametrize("command", ["status", "run"])
def test_records_that_cannot_be_are_named(
    command: str, job: str, tmp_path: Path, hpml: Any
) -> None:
    """A file where the directory should be: one line, and nothing half-done."""
    (tmp_path / "file").write_text("")
    words = ["run", job, "--grid", "lr=1,2", "--local"] if command == "run" else ["status"]
    done = hpml("--records", str(tmp_path / "file"), "sweep", *words)
    assert done.code in (2, 7)
    assert "file" in done.err
    assert "bug in hpml" not in done.err
