"""`hpml report RUN --apply FILE`: the job file of a run with the changes of its diagnosis."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.apply import job_of_run
from hpml_orchestrator.runs.load import load_job
from tests.unit.runs.tuning import Desk, chosen

JOB = """\
# The images of my thesis
name: digits
launcher: srun
script: train.py # next to this file
args:
  - --data={data}
  - --workers=2 # per rank
  - --lr=0.05

resources:
  # what the queue takes
  ranks_per_node: 2
  time: 30:00 # MM:SS
binding: numa
"""
STAGED = """\
name: digits
launcher: srun
command: [bash, -c, 'train "$@"', bash, "{stage.digits}"]
stage:
  - name: digits
    source: {data} # the server's
    target: local
environment:
  setup: |
    # from the sbatch script
    module() { :; }
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A new one."""
    return Desk(tmp_path)


WORKERS = Change("start 4 workers", "args.1", "--workers=4", also={"resources.cpus_per_rank": 5})
STAGE = Change("stage", "stage", [{"name": "data", "source": "{data}", "target": "shm"}])
MEMORY = Change("ask for 8G", "resources.memory", "8G")


@pytest.mark.parametrize(
    ("text", "change", "lines"),
    [
        (JOB, WORKERS, ["+  - --workers=4 # per rank", "+  cpus_per_rank: 5"]),
        (
            JOB,
            STAGE,
            ["+  - --data={stage.data}", "+stage: [{name: data, source: {data}, target: shm}]"],
        ),
        (JOB, MEMORY, ["+  memory: 8G"]),
        (JOB, Change("one", "resources.ranks_per_node", None), []),
        (JOB, Change("loaders", "binding.loader_workers", 1), ["+binding: {policy: numa, lo"]),
        (JOB, Change("bind", "binding", "gpu-local"), ["+binding: {policy: gpu-local}"]),
        (JOB, Change("TF32", "environment.variables.A", "1"), ["+environment: {variables: {A: "]),
        (STAGED, Change("shm", "stage.0.target", "shm"), ["+    target: shm"]),
        (STAGED, Change("keep", "stage.0.keep", True), ["+    keep: true"]),
    ],
)
def test_a_change_is_made_where_the_user_wrote_it(
    desk: Desk, text: str, change: Change, lines: list[str]
) -> None:
    """Comments, order and all else stay; the new job is the old one with that change."""
    run = desk.ran(text)
    value = json.loads(json.dumps(change.value).replace("{data}", str(desk.data)))
    made = desk.tuned(run, replace(change, value=value))
    old, new = (desk.root / "job.yaml").read_text(), made.path.read_text()
    added = [line for line in made.diff[2:] if line.startswith("+")]
    for line in lines:
        wanted = line.replace("{data}", str(desk.data))
        assert [one for one in added if one.startswith(wanted)], made.diff
    removed = [line for line in made.diff[2:] if line.startswith("-")]
    assert len(removed) <= len(added)
    kept = [line for line in old.splitlines() if "-" + line not in removed]
    assert [line for line in new.splitlines() if "+" + line not in added] == kept
    assert f"# {change.text} (fault 0), in {run.label}" in new
    assert load_job(made.path).job == made.resolved.job != load_job(desk.root / "job.yaml").job


@pytest.mark.parametrize("source", ["job.yaml", "job.toml", "gone.yaml"])
def test_the_run_counts_and_not_the_file_as_it_is_now(desk: Desk, source: str) -> None:
    """What --set changed is part of the new file, also if the old one was edited or removed."""
    text = JOB
    if source == "job.toml":
        args = f'args = ["--data={desk.data}", "--workers=2", "--lr=0.05"]'
        text = f'name = "digits"\nlauncher = "srun"\nscript = "train.py"\n{args}\n'
        text += '[resources]\nranks_per_node = 2\ntime = "30:00"\n[binding]\npolicy = "numa"\n'
    run = desk.ran(text, "resources.nodes=3", 'args.2="--lr=0.1"', name=source)
    if source == "gone.yaml":
        (desk.root / source).unlink()
    made = desk.tuned(run, WORKERS)
    job = load_job(made.path).job
    assert job.args == (f"--data={desk.data}", "--workers=4", "--lr=0.1")
    assert (job.resources.nodes, job.resources.cpus_per_rank, job.resources.time) == (
        3,
        5,
        1800,
    )
    assert job.script == str(desk.root / "train.py")
    assert bool(made.notes) == (source != "job.yaml")
    assert ("my thesis" in made.text) == (source == "job.yaml")


def test_relative_paths_stay_right_in_another_directory(desk: Desk) -> None:
    """Those of the job file and of the program's working directory."""
    (desk.root / "env").mkdir()
    fields = "stage: [{name: d, source: data, target: local}]\nenvironment: {venv: env}\n"
    run = desk.ran(JOB.replace("{data}", "{stage.d}") + fields)
    (desk.root / "elsewhere").mkdir()
    job = desk.tuned(run, WORKERS, to="elsewhere/tuned.yaml").resolved.job
    same = desk.tuned(run, WORKERS).resolved.job
    assert job == same
    assert (job.workdir, job.script) == (str(desk.root), str(desk.root / "train.py"))
    assert job.stage[0].source == str(desk.data)


def test_conflicting_changes_are_not_both_made(desk: Desk) -> None:
    """The first finding wins; the other one is named with its advice."""
    run = desk.ran(JOB)
    other = Change("start 9 workers", "args.1", "--workers=9")
    advice = Change("read less")
    taken = chosen(run, WORKERS, other, MEMORY, advice)
    assert [one.change.text for one in taken.made] == ["start 4 workers", "ask for 8G"]
    assert [*taken.left] == [
        "fault 1: start 9 workers: not together with: start 4 workers",
        "fault 3: read less",
    ]
    assert desk.tuned(run, WORKERS, other, MEMORY).resolved.job.args[1] == "--workers=4"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ([], "hpml report"),
        ([Change("pin the memory")], "fault 0: pin the memory"),
        ([Change("numa", "binding", "numa")], "numa: the job file has that already"),
        (
            [Change("stage", "stage", [{"name": "d", "source": "/other", "target": "shm"}])],
            "no argument of the program is /other",
        ),
    ],
)
def test_without_a_change_of_the_job_file_nothing_is_written(
    desk: Desk, changes: list[Change], hint: str
) -> None:
    """The hint names an alternative."""
    with pytest.raises(InputError, match="no advice for this run changes its job file") as caught:
        desk.tuned(desk.ran(JOB), *changes)
    assert hint in caught.value.hint
    assert not (desk.root / "tuned.yaml").exists()


def test_a_task_keeps_its_array_and_a_point_gets_its_values(desk: Desk) -> None:
    """The tasks of an array share the job file; the point of a sweep is a separate job."""
    task = replace(desk.ran(JOB + "array: 0-3\n"), index=2)
    assert desk.tuned(task, WORKERS).resolved.job.written("array") == "0-3"
    base = JOB.replace("--lr=0.05", "--lr=0.5")
    point = desk.ran(base, 'args.2="--lr={point.lr}"', "array=0-1", sweep="s", placeholders=["lr"])
    (point.directory / "points.sh").write_text(
        "export HPML_SWEEP=s\ncase x in\n"
        "0) export HPML_POINT=4 HPML_POINT_LR=0.1 ;;\n1) export HPML_POINT=5 HPML_POINT_LR=0.2 ;;\n"
    )
    job = desk.tuned(replace(point, index=1), WORKERS).resolved.job
    assert (job.array, job.args[2]) == (None, "--lr=0.2")
    assert job_of_run(replace(point, index=0)).args[2] == "--lr=0.1"
    assert "my thesis" in (desk.root / "tuned.yaml").read_text()


def test_a_shared_value_is_changed_in_one_place(desk: Desk) -> None:
    """The field that had the same value by an alias keeps it."""
    text = JOB.replace("time: 30:00 # MM:SS", "time: &t 30:00\n  qos: *t")
    made = desk.tuned(desk.ran(text), Change("ask for 5:00", "resources.time", "5:00"))
    assert (made.resolved.job.resources.time, made.resolved.job.resources.qos) == (300, "30:00")
    assert "my thesis" in made.text


def test_a_file_that_cannot_be_changed_alone_is_left_to_the_user(desk: Desk) -> None:
    """Nothing is written; the hint has the fields and their values."""
    stages = "stage:\n- &s {name: a, source: train.py, target: local}\n- {<<: *s, name: b}\n"
    run = desk.ran(JOB + stages)
    with pytest.raises(InputError, match=r"stage\.1\.target would not become") as caught:
        desk.tuned(run, Change("shm", "stage.0.target", "shm"))
    assert caught.value.hint == f"change {desk.root}/job.yaml by hand: stage.0.target: shm"
    assert not (desk.root / "tuned.yaml").exists()


def test_lines_that_ruamel_writes_in_another_way_are_in_the_diff(desk: Desk) -> None:
    """Odd indentation becomes even, and a list with comments in brackets has a line per entry."""
    text = JOB.replace("  ranks_per_node", "     ranks_per_node").replace("  time", "     time")
    text = text.replace("  # what", "     # what")
    words = "args: [\n  --data={data},\n  --workers=2,  # per rank\n  --lr=0.05]\n"
    text = re.sub(r"args:\n(  - .*\n)+", words, text)
    made = desk.tuned(desk.ran(text), MEMORY)
    assert "-     time: 30:00 # MM:SS" in made.diff
    assert "+  - --workers=2 # per rank" in made.diff
    assert "# what the queue takes" in made.text
    assert not made.notes


def test_a_comment_that_ruamel_drops_is_not_lost_silently(desk: Desk) -> None:
    """A note says so."""
    made = desk.tuned(
        desk.ran(JOB + "checkpoint: {enabled: true, # save\n  attempts: 3}\n"), MEMORY
    )
    assert made.notes == (
        f"without the comments of {desk.root}/job.yaml that are between brackets",
    )
