"""From a sweep file to its plan: points, batches, order, shapes; and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.jobfile.schema import sweep_schema
from hpml_orchestrator.jobfile.sweep import load_sweep
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.site.model import ResolvedSite
from hpml_orchestrator.sweeps import plan
from hpml_orchestrator.sweeps.expand import make_plan

NOW = 1_800_000_000.0
JOB: dict[str, Any] = {
    "name": "toy",
    "launcher": "srun",
    "command": ["python", "train.py"],
    "args": ["--batch-size=32", "--lr", "0.1", "--seed=7", "data.path=x"],
    "resources": {"nodes": 1, "ranks_per_node": 2, "time": "30:00"},
}
STRONG = {"mode": "strong", "scale": {"ranks": [1, 2, 4]}}
GPUS = {"resources": {"gpus": "a100:4", "time": "1:00:00"}}
SAVING = {"checkpoint": True}


def made(
    folder: Path,
    fields: dict[str, Any],
    *,
    backend: str = "slurm",
    site: ResolvedSite | None = None,
    **job: Any,
) -> plan.SweepPlan:
    """The plan of a sweep file, on Slurm: nothing of this machine counts."""
    (folder / "job.yaml").write_text(json.dumps(JOB | job))
    (folder / "sweep.yaml").write_text(json.dumps({"base": "job.yaml"} | fields))
    return make_plan(load_sweep(folder / "sweep.yaml"), backend=backend, site=site, now=NOW)


def test_a_strong_sweep_keeps_the_global_batch(tmp_path: Path) -> None:
    """64 at every scale, which the program is given per rank; six repeats, each with its seed."""
    planned = made(tmp_path, STRONG)
    rows = {(p.scale, p.batch_global, p.batch_per_rank) for p in planned.points}
    assert rows == {(1, 64, 64), (2, 64, 32), (4, 64, 16)}
    assert len(planned.points) == 18
    assert {p.seed for p in planned.points} == {1, 2, 3, 4, 5, 6}
    four = next(p for p in planned.points if p.scale == 4)
    args = planned.shapes[four.shape].job.args
    assert args[0] == "--batch-size={point.batch}"
    assert "--seed={point.seed}" in args
    assert four.variables["batch"] == "16"
    assert planned.baseline == 1
    assert planned.estimate.core_hours == pytest.approx(6 * (1 + 2 + 4) / 2)


def test_a_weak_sweep_keeps_the_batch_of_a_rank(tmp_path: Path) -> None:
    """The learning rate follows the global batch by the rule, for a program that scales it too."""
    rule = {"argument": "--lr", "rule": "linear", "times_ranks": True}
    fields = {"mode": "weak", "scale": {"nodes": [1, 4]}, "learning_rate": rule, "repeats": 1}
    planned = made(tmp_path, fields)
    one, four = sorted(planned.points, key=lambda point: point.scale or 0)
    assert (one.batch_global, four.batch_global) == (64, 256)
    # 0.1 for each of two ranks, as the program multiplies it
    assert [one.learning_rate, four.learning_rate] == pytest.approx([0.2, 0.8])
    assert {one.variables["lr"], four.variables["lr"]} == {"0.1"}


@pytest.mark.parametrize(
    ("scales", "job", "shapes"),
    [
        ({"gpus": [2, 4, 8]}, GPUS, [(1, 2, 2), (1, 4, 4), (2, 8, 8)]),
        ({"nodes": [1, 3]}, GPUS, [(1, 4, 4), (3, 12, 12)]),
        (
            {"ranks": [2, 4]},
            {"resources": {"nodes": 2, "ranks_per_node": 1}},
            [(2, 2, 0), (2, 4, 0)],
        ),
    ],
    ids=["gpus", "nodes", "ranks on two nodes"],
)
def test_scales_become_resources(
    tmp_path: Path, scales: dict[str, Any], job: dict[str, Any], shapes: list[tuple[int, ...]]
) -> None:
    """Nodes are filled in order; the size of a node is that of the base job."""
    planned = made(tmp_path, {"mode": "weak", "scale": scales, "repeats": 1}, **job)
    assert [(s.nodes, s.ranks, s.gpus) for s in planned.shapes] == shapes


def test_a_grid_has_all_combinations_and_few_shapes(tmp_path: Path) -> None:
    """Arguments and variables come from points.sh; fields of the job and flags make shapes."""
    axes = {
        "--lr": [0.1, 1e-5],
        "data.path=": ["a b", "it's"],
        "environment.variables.MODE": ["x", "y"],
        "--amp": [True, False],
        "resources.cpus_per_rank": [1, 2],
    }
    planned = made(tmp_path, {"mode": "grid", "axes": axes, "repeats": 2})
    combinations = {json.dumps(point.values) for point in planned.points}
    assert len(combinations) == 2**5
    assert len(planned.points) == 2**6
    assert len(planned.shapes) == 4
    point = next(
        p
        for p in planned.points
        if p.values == {**p.values, "--lr": 1e-5, "--amp": True, "data.path=": "it's"}
    )
    shape = planned.shapes[point.shape]
    assert point.variables["lr"] == "1e-05"
    assert {"--amp", "--seed={point.seed}", "data.path={point.data_path}"} < set(shape.job.args)
    assert shape.job.args[1:3] == ("--lr", "{point.lr}")
    assert shape.job.environment.variables == {"MODE": "{point.mode}"}
    assert shape.fixed["resources.cpus_per_rank"] == shape.job.resources.cpus_per_rank


@pytest.mark.parametrize("order", ["interleaved", "random", "written"])
def test_the_order_is_fixed_and_complete(tmp_path: Path, order: str) -> None:
    """The same file gives the same order; interleaved, every block has each scale once."""
    fields = {**STRONG, "order": order, "repeats": 4}
    planned, again = made(tmp_path, fields), made(tmp_path, fields)
    assert planned.points == again.points
    numbers = list(itertools.chain.from_iterable(planned.blocks))
    assert numbers == sorted(p.number for p in planned.points) == list(range(12))
    blocks = [[planned.points[number].scale for number in block] for block in planned.blocks]
    if order == "interleaved":
        assert [sorted(map(int, filter(None, block))) for block in blocks] == [[1, 2, 4]] * 4
        assert len({tuple(block) for block in blocks}) > 1
    if order == "written":
        assert blocks == [[1] * 4 + [2] * 4 + [4] * 4]


@pytest.mark.parametrize(
    ("fields", "job", "repeats"),
    [
        ({}, {}, 6),
        ({}, {"args": ["--lr=1"]}, 1),
        ({"seeds": {"argument": "--rng"}}, {"args": ["--lr=1"]}, 6),
        ({"repeats": 3}, {"args": ["--lr=1"]}, 3),
        (STRONG, {"args": ["--batch-size=8"]}, 6),
    ],
)
def test_repeats_need_something_random(
    tmp_path: Path, fields: dict[str, Any], job: dict[str, Any], repeats: int
) -> None:
    """A grid runs each combination once unless its seeds vary, with a note in the plan."""
    planned = made(tmp_path, {"mode": "grid", "axes": {"--lr": [1]}} | fields, **job)
    combination = [point for point in planned.points if point.values == planned.points[0].values]
    assert len({point.repeat for point in combination}) == repeats
    assert any("runs once" in note for note in planned.notes) == (repeats == 1)


def test_excluded_points_stay_in_the_plan_with_their_rule(tmp_path: Path) -> None:
    """They are in no block, and the plan has the reason."""
    fields = {**STRONG, "repeats": 2, "exclude": [{"ranks": [2, 4], "repeat": 1}]}
    planned = made(tmp_path, fields)
    excluded = [point for point in planned.points if point.excluded]
    assert {(p.scale, p.repeat) for p in excluded} == {(2, 1), (4, 1)}
    assert "exclude rule 1" in excluded[0].excluded
    assert sum(map(len, planned.blocks)) == planned.estimate.points == 4


def test_a_plan_on_disk_is_the_same_plan(tmp_path: Path) -> None:
    """It is found by parts of its id; a second one makes a word ambiguous."""
    store = Store(tmp_path / "records")
    planned = made(tmp_path, STRONG)
    plan.write(store, planned)
    assert plan.resolve(store, "last") == plan.resolve(store, planned.id[:12]) == planned
    plan.write(store, replace(planned, id=f"{planned.id[:-6]}abcdef"))
    with pytest.raises(InputError, match="names 2 sweeps"):
        plan.resolve(store, "toy-strong")


def test_a_plan_of_another_version_is_read(tmp_path: Path) -> None:
    """Fields of a job that this version does not know are left out; a damaged job is named."""
    store, planned = Store(tmp_path / "records"), made(tmp_path, STRONG)
    path = plan.write(store, planned) / "plan.json"
    record = json.loads(path.read_text())
    for shape in record["shapes"]:
        shape["job"] |= {"colour": "red"}
        shape["job"]["resources"] |= {"watts": 300}
        del shape["job"]["checkpoint"]  # as before jobs had it
    path.write_text(json.dumps(record))
    assert plan.resolve(store, "last") == planned
    for job, why in (({"name": 7}, "name: 7 is not of type str"), (7, "7 is not a mapping")):
        record["shapes"][0]["job"] = job
        path.write_text(json.dumps(record))
        with pytest.raises(RecordError, match=rf"plan.json is damaged: (.|\n)*{why}"):
            plan.resolve(store, "last")


def test_a_members_checkpoint_selects_its_shape(tmp_path: Path) -> None:
    """A population's first generation has no checkpoint to resume."""
    axes = {"--lr": {"low": 0.001, "high": 0.1, "log": True}}
    planned = made(tmp_path, {"mode": "pbt", "axes": axes})
    first = plan.point_of(planned, 0, {"--lr": 0.01})
    later = plan.point_of(planned, 9, {"--lr": 0.02}, checkpoint="/runs/a/checkpoint.pt")
    jobs = [planned.shapes[point.shape].job.args for point in (first, later)]
    assert [any("--checkpoint-from" in word for word in args) for args in jobs] == [False, True]
    assert later.variables["checkpoint"] == "/runs/a/checkpoint.pt"


def grid(values: Any, axis: str = "--lr", mode: str = "grid") -> dict[str, Any]:
    """The fields of a sweep of one axis."""
    return {"mode": mode, "axes": {axis: values}}


def pattern(text: str) -> dict[str, Any]:
    """The fields of a grid that is judged by a pattern of the output."""
    return grid([1, 2]) | {"search": {"metric": {"pattern": text}}}


FIGURES = {"metric": ["validation_accuracy", "total_seconds"]}


def heads(when: dict[str, Any], mode: str = "grid") -> dict[str, Any]:
    """The fields of a sweep, one of whose axes applies under a condition."""
    axes: dict[str, Any] = {
        "--model": ["cnn", "vit"],
        "--heads": {"values": [2, 4], "when": when},
        "--depth": {"values": [1, 2], "when": {"--heads": [4]}},
        "--amp": {"values": [True, False], "when": {"--model": "vit"}},
        "resources.cpus_per_rank": {"values": [1, 2], "when": {"--model": "cnn"}},
    }
    axes |= {"--rate": {"low": 0, "high": 1}} if mode == "bayes" else {}
    return {"mode": mode, "axes": axes, "repeats": 1}


def test_an_axis_with_a_condition_is_left_out_elsewhere(tmp_path: Path) -> None:
    """Each combination occurs once; its job has the argument, flag or field only if it applies."""
    args = ["--model=cnn", "--heads", "8", "--seed=1"]
    planned = made(tmp_path, heads({"--model": "vit"}), args=args)
    cnn = [{"--model": "cnn", "resources.cpus_per_rank": cpus} for cpus in (1, 2)]
    few = [{"--model": "vit", "--heads": 2, "--amp": amp} for amp in (True, False)]
    many = [
        {"--model": "vit", "--heads": 4, "--depth": depth, "--amp": amp}
        for depth, amp in itertools.product((1, 2), (True, False))
    ]
    found = sorted([dict(point.values) for point in planned.points], key=str)
    assert found == sorted([*cnn, *few, *many], key=str)
    for point in planned.points:
        job, values = planned.shapes[point.shape].job, point.values
        given = {"--heads", "--depth", "--amp"} & {word.partition("=")[0] for word in job.args}
        assert given == {name for name in values if values[name] and name.startswith("--")} - {
            "--model"
        }
        assert "8" not in job.args
        assert job.resources.cpus_per_rank == values.get("resources.cpus_per_rank", 1)
        assert planned.placeholders["--depth"] not in point.variables or "--depth" in values
    listed = [many[0], cnn[1]]
    again = made(tmp_path, heads({"--model": "vit"}) | {"combinations": listed})
    assert sorted([dict(point.values) for point in again.points], key=str) == listed[::-1]


def test_listed_combinations_run_and_no_others(tmp_path: Path) -> None:
    """Two of four, each as often as all would."""
    axes = {"--lr": [0.1, 0.2], "resources.cpus_per_rank": [1, 2]}
    listed = [
        {"--lr": 0.1, "resources.cpus_per_rank": 2},
        {"--lr": 0.2, "resources.cpus_per_rank": 1},
    ]
    planned = made(tmp_path, {"mode": "grid", "axes": axes, "combinations": listed, "repeats": 2})
    assert [dict(point.values) for point in planned.points].count(listed[0]) == 2
    assert [dict(point.values) for point in planned.points].count(listed[1]) == 2
    assert len(planned.points) == planned.estimate.points == 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r"val_loss=([\d.]+)", "val_loss"),
        (r"^\s*perplexity\s*:\s*(\d+)", "perplexity"),
        (r"(\d+) %", "figure"),
    ],
)
def test_a_pattern_names_its_figure(tmp_path: Path, text: str, name: str) -> None:
    """By its last word before the number, if the sweep file gives no name."""
    assert str(made(tmp_path, pattern(text)).spec.search.metric) == name


@pytest.mark.parametrize(
    ("fields", "job", "field", "message"),
    [
        ({"mode": "strong"}, {}, "", "scale: must be given"),
        (STRONG | {"mode": "grid"}, {}, "", "scale: belongs to"),
        ({"mode": "grid"}, {}, "", "axes: must name what varies"),
        (grid([]), {}, "axes.--lr", "1 or more entries"),
        (grid([1, 1]), {}, "axes.--lr", "names 1 twice"),
        (grid([[1], 2]), {}, "axes.--lr.0", "a number, a text, true or false"),
        (grid([1, 2], "lr"), {}, "axes.lr", "neither an argument nor a field"),
        (grid({"low": 1, "high": 2}), {}, "", "a range needs a search"),
        (grid({"low": 2, "high": 1}), {}, "axes.--lr", "low below high"),
        (grid({"low": 1, "hih": 2, "high": 3}), {}, "axes.--lr.hih", "did you mean axes.--lr.high"),
        (grid([1], "resources.nods"), {}, "resources.nods", "unknown field"),
        (grid(["x"], "resources.time"), {}, "resources.time", "time"),
        (grid(["{run.dir}/a"], "--out"), {}, "axes.--out", "has no placeholders"),
        (grid([1], "array"), {}, "axes.array", "the sweep sets it"),
        (grid({"low": 1, "high": 2}, "mpi", "bayes"), {}, "axes.mpi", "needs a list"),
        (STRONG | {"repeats": 0}, {}, "repeats", "at least 1"),
        (STRONG | {"version": 2}, {}, "version", "must be 1"),
        (STRONG | {"nonsense": 2}, {}, "nonsense", "unknown field"),
        (STRONG | {"baseline": 3}, {}, "", "none of the scales"),
        (STRONG | {"search": {"metric": "a b"}}, {}, "search.metric", "must match the regular"),
        (pattern("loss=(["), {}, "search.metric.pattern", "is no regular expression: untermin"),
        (pattern("loss=1"), {}, "search.metric.pattern", "one group in parentheses, the number"),
        (pattern("(l)(o)"), {}, "search.metric.pattern", "the number, and has 2"),
        (grid([1, 2]) | {"combinations": [{"--lr": 3}]}, {}, "", "a value of each axis"),
        (grid([1, 2]) | {"combinations": [{}]}, {}, "", "combinations.0: must have a value of"),
        (heads({"--modle": "vit"}), {}, "", "--modle is no axis; did you mean --model"),
        (heads({"--model": "mlp"}), {}, "", "--model never is mlp, but one of cnn, vit"),
        (heads({"--rate": 1}, "bayes"), {}, "", "--rate is a range; name an axis with a list"),
        (heads({"--depth": 1}), {}, "", "axes.--heads.when: --heads and --depth form a circle"),
        (heads({}), {}, "axes.--heads.when", "1 or more entries"),
        (grid([1, 2]) | {"search": FIGURES}, {}, "", "direction: must have one direction for each"),
        (grid([1]) | {"search": {"direction": ["minimize"] * 2}}, {}, "", "as many figures"),
        (
            grid({"low": 1, "high": 2}, mode="pbt")
            | {"search": FIGURES | {"direction": ["maximize", "minimize"]}},
            {},
            "",
            "several figures belong to random, bayes and grid, not pbt",
        ),
        (
            grid({"values": [8], "when": {"--m": 1}}, "--batch-size")
            | {"axes": {"--m": [1, 2], "--batch-size": {"values": [8], "when": {"--m": 1}}}},
            {},
            "axes.--batch-size.when",
            "are planned",
        ),
        (STRONG | {"scale": {"ranks": [1], "nodes": [1]}}, {}, "scale", "one of nodes, ranks"),
        (STRONG | {"scale": {"ranks": [3]}}, {}, "batch.size", "cannot be divided over 3"),
        ({"mode": "weak", "scale": {"nodes": [200_000]}}, {}, "resources.nodes", "at most"),
        (STRONG, {"args": []}, "batch", "has to know the batch size"),
        (STRONG | {"axes": {"--batch-size": [1]}}, {}, "axes.--batch-size", "keeps the batch"),
        (STRONG | {"scale": {"gpus": [1]}}, {}, "scale.gpus", "has no GPUs"),
        (STRONG | {"scale": {"gpus": [6]}}, GPUS, "scale.gpus", "whole nodes of 4"),
        (STRONG | {"scale": {"ranks": [2]}}, GPUS, "scale.ranks", "would stay the same"),
        (STRONG, {"array": "0-3"}, "array", "a single job"),
        (STRONG, {"checkpoint": {"directory": "/a"}}, "checkpoint.directory", "every run of the"),
        (grid(["x", "/a"], "checkpoint.directory"), SAVING, "checkpoint.directory", "every run of"),
        (STRONG | {"exclude": [{"--lr": 1}]}, {}, "exclude.0.--lr", "is not an axis"),
        (STRONG | {"exclude": [{"ranks": [1, 2, 4]}]}, {}, "exclude", "leave nothing to run"),
        (STRONG | {"budget": {"core_hours": 1}}, {}, "budget.core_hours", "suffice for one point"),
        (STRONG | {"budget": {"time": "5"}}, {}, "budget.time", "shorter than the time limit"),
        (STRONG | {"learning_rate": {"argument": "--eta"}}, {}, "learning_rate.argument", "number"),
        (STRONG | {"seeds": {"values": [1, 2]}}, {}, "", "a seed for each of 6"),
        (STRONG | {"base": "nowhere.yaml"}, {}, None, "no such job file"),
        (STRONG | {"base": "sweep.yaml"}, {}, "", "is a sweep file"),
    ],
)
def test_bad_sweep_files_are_refused(
    tmp_path: Path, fields: dict[str, Any], job: dict[str, Any], field: str | None, message: str
) -> None:
    """One clear error each, before anything is written; one in the job names axis or scale."""
    with pytest.raises(HpmlError, match=message) as caught:
        made(tmp_path, fields, **job)
    assert getattr(caught.value, "field", None) == field
    assert caught.value.hint or field
    assert "of the sweep" in caught.value.hint or not (field or "").startswith("resources.")


@pytest.mark.parametrize(
    ("axis", "job", "args"),
    [
        (
            "--lr",
            {"args": ["--lr=1", "--seed=7", "--lr", "2"]},
            ["--lr={}", "--seed=7", "--lr", "{}"],
        ),
        ("--lr", {"args": ["--lr", "-1", "--", "x"]}, ["--lr", "{}", "--", "x"]),
        ("--steps", {"args": ["--steps", "--lr=1"]}, ["--steps", "--lr=1", "--steps={}"]),
        (
            "environment.variables.LR",
            {"command": ["bash", "-c", 'LR=${LR:-0.1}; ./train "$LR"'], "args": []},
            [],
        ),
    ],
)
def test_an_axis_is_set_in_the_arguments_or_the_variable(
    tmp_path: Path, axis: str, job: dict[str, Any], args: list[str]
) -> None:
    """An argument that is given several times is set wherever it is."""
    planned = made(tmp_path, grid([1, 2], axis), **job)
    name = planned.placeholders[axis]
    wanted = [word.format(f"{{point.{name}}}") for word in args]
    found = planned.shapes[0].job.args
    assert [word.replace("{point.seed}", "7") for word in found] == wanted


def test_the_schema_accepts_what_is_accepted(tmp_path: Path) -> None:
    """An editor with the schema agrees with hpml on good files and on unknown fields."""
    schema = sweep_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    conditional = {"values": [2, 4], "when": {"--lr": ["x", True]}}
    axes = {"--lr": [0.1, "x", True], "--heads": conditional}
    good = {"base": "job.yaml", **STRONG, "axes": axes, "repeats": 2}
    several = FIGURES | {"direction": ["maximize", "minimize"]}
    made(tmp_path, good)
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "nonsense": 1}, schema)
    jsonschema.validate({"base": "job.yaml", **grid([1, 2]), "search": several}, schema)
