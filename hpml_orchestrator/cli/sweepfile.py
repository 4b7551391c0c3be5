"""From the command line to a sweep's plan: the sweep that its options describe, and its check."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.check.job import refusal
from hpml_orchestrator.check.submission import check_rendered
from hpml_orchestrator.cli.common import chosen_site, refuse_with
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.cli.render import backend_name
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.load import parse_setting, parse_yaml, read_mapping
from hpml_orchestrator.jobfile.sweep import Sweep, make_sweep
from hpml_orchestrator.records.job import JOB_FIELDS
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.sweeps import plan
from hpml_orchestrator.sweeps.expand import make_plan

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.plan import SweepPlan

_CHECKED_SHAPES = 16


def plan_sweep(
    context: typer.Context,
    file: str,
    options: tuple[str, str, list[str], int | None, str, list[str]],
    backend: str,
    *,
    local: bool,
) -> SweepPlan:
    """Plan the sweep of a file, or of a job file and the options; nothing is written.

    `options` are `--strong`, `--weak`, `--grid`, `--repeats`, `--batch` and `--set`.
    """
    sweep = _sweep(file, *options)
    if sweep.searches:
        from hpml_orchestrator.sweeps.search import check_search  # noqa: PLC0415 - loads Optuna

        check_search(sweep)
    return make_plan(
        sweep,
        backend=backend_name(context, file, backend, local=local),
        site=chosen_site(context),
        argv=sys.argv,
        now=time.time(),
    )


def _sweep(
    file: str,
    strong: str,
    weak: str,
    grid: list[str],
    repeats: int | None,
    batch: str,
    settings: list[str],
) -> Sweep:
    if strong:
        refuse_with("--strong", {"--weak": weak})
    fields: dict[str, object] = dict(map(parse_setting, settings))
    source = Path(os.path.abspath(file))
    if not (strong or weak or grid):
        data = read_mapping(source, "sweep file")
        if "mode" not in data and {"launcher", "script", "command", "module"} & set(data):
            raise InputError(
                "is a job file: say what varies",
                field="FILE",
                value=file,
                hint=f"hpml sweep run {file} --strong nodes=1,2,4, or --grid lr=0.1,0.2",
            )
        sweep = make_sweep(data, source)
        update: dict[str, object] = {"set": {**sweep.set, **fields}}
        return sweep.model_copy(update=update | ({"repeats": repeats} if repeats else {}))
    axes = [_axis(text) for text in grid]
    twice = [name for name, count in Counter(name for name, _ in axes).items() if count > 1]
    if twice:
        hint = "give all of its values at once: --grid lr=0.1,0.2"
        raise InputError("is given twice", field="--grid", value=twice[0], hint=hint)
    data = {
        "base": str(source),
        "mode": "strong" if strong else "weak" if weak else "grid",
        "set": fields,
        "axes": dict(axes),
    }
    if strong or weak:
        option = "--strong" if strong else "--weak"
        unit, values = _listed(strong or weak, option, "nodes=1,2,4")
        data["scale"] = {unit: values}
    if repeats:
        data["repeats"] = repeats
    if batch:
        name, _, per = batch.partition(":")
        data["batch"] = {"argument": name, "per": per or "rank"}
    return make_sweep(data, source, where="the command line")


def _listed(text: str, option: str, example: str) -> tuple[str, list[object]]:
    """Return name and values of `name=1,2,4`."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise InputError(f"must be written as {example}", field=option, value=text)
    return name, [parse_yaml(value, option) for value in values.split(",")]


def _axis(text: str) -> tuple[str, list[object]]:
    name, values = _listed(text, "--grid", "lr=0.1,0.2")
    plain = not name.startswith("-") and "." not in name and name not in JOB_FIELDS
    return f"--{name}" if plain else name, values


def check_plan(planned: SweepPlan, store: Store) -> None:
    """Check the job of every shape, of many the largest ones; nothing is submitted.

    Raises:
        InputError: the cluster would not run one of them; names the scale or the axis.
    """
    site = plan.site_of(planned, os.environ)
    shapes = sorted(planned.shapes, key=lambda shape: (shape.nodes, shape.gpus, shape.cores))
    for shape in reversed(shapes[-_CHECKED_SHAPES:]):
        rendered = render_job(plan.job_of(planned, shape, "0", site))
        found = check_rendered(rendered, store, walk_seconds=1.0)
        if found.errors:
            fault = refusal(found.errors)
            values = [f"{name} = {value}" for name, value in shape.fixed.items()]
            where = ", ".join(values)
            fault.hint = f"at {where}; {fault.hint}" if where else fault.hint
            raise fault
        if found.not_asked:
            notice(f"warning: not checked against the cluster: {found.not_asked}")
            return
