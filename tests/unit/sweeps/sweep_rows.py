"""Sweeps that never ran: plans and the rows that a controller would have made of their runs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpml_orchestrator.sweeps.plan import Point, SweepEstimate, SweepPlan
from hpml_orchestrator.sweeps.rows import PointRow

MINUTE = 60.0
BEGAN = 1_790_000_000.0
IMAGES = 60_000


def plan_of(mode: str, points: Sequence[Point], **fields: Any) -> SweepPlan:
    """A plan of these points, on a cluster."""
    names = {name for point in points for name in point.values}
    varied: dict[str, Any] = {
        "axes": {
            name: sorted({point.values[name] for point in points if name in point.values}, key=str)
            for name in sorted(names)
        }
    }
    if mode in ("strong", "weak"):
        varied["scale"] = {"nodes": sorted({point.scale for point in points if point.scale})}
    usual = {
        "id": f"digits-{mode}-20260921-101500-abc123",
        "name": f"digits-{mode}",
        "sweep": {
            "base": "/home/ada/digits.yaml",
            "mode": mode,
            "order": "interleaved",
            **varied,
        },
        "unit": "",
        "baseline": None,
    }
    return SweepPlan(
        mode=mode,
        backend="slurm",
        host="",
        site="/etc/hpml/site.toml",
        argv=("hpml", "sweep", "run", "digits.yaml"),
        created=BEGAN,
        base_batch=512,
        base_learning_rate=0.1,
        placeholders={},
        shapes=(),
        points=tuple(points),
        blocks=(),
        estimate=SweepEstimate(len(points), 1.0, 1.0, 1.0),
        notes=("--batch-size was taken for the batch size",),
        **(usual | fields),
    )


def completed(point: Point, phases: Mapping[str, float], **fields: Any) -> PointRow:
    """The row of a run that went well."""
    total = sum(seconds for name, seconds in phases.items() if name not in {"queue", *INNER})
    ranks = point.scale or 4
    usual: dict[str, Any] = {
        "run": f"sub-1.{point.number}",
        "job_id": f"4711_{point.number}",
        "state": "COMPLETED",
        "over": True,
        "started": BEGAN + MINUTE * point.number,
        "ended": BEGAN + MINUTE * point.number + total,
        "total_seconds": total,
        "training_seconds": phases.get("training"),
        "data_wait_ratio": 0.05,
        "accuracy": 0.962,
        "accuracy_name": "test_accuracy",
        "allocated": 1.0,
        "world_size": ranks,
        "nodes": f"node[1-{ranks}]",
        "gpu_hours": 4 * ranks * total / 3600,
        "core_hours": 32 * ranks * total / 3600,
        "node_hours": ranks * total / 3600,
        "energy_kwh": 1.2 * ranks * total / 3600,
        "gpu_active": 0.9,
        "cpu_contention": 0.01,
        "data_reused": False,
        "binding": "16 of 16 ranks bound as planned",
        "verified": True,
        "device": "NVIDIA H100 80GB HBM3",
        "hardware": "2 x AMD EPYC 9454, 4 x NVIDIA H100 80GB HBM3",
        "code": "2f6c1b0",
        "environment": "sha256:77aa",
        "batch_per_rank": point.batch_per_rank,
        "batch_global": point.batch_global,
        "learning_rate": point.learning_rate,
        "steps": 10 * IMAGES // (point.batch_global or 512),
        "epochs": 10,
        "result": {"train_images": IMAGES},
    }
    return PointRow(point=point.number, phases=phases, **(usual | fields))


INNER = ("evaluation", "checkpoint")


def scaling(
    mode: str = "strong",
    scales: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 6,
    *,
    target: float | None = 0.95,
    change: Callable[[PointRow], PointRow] = lambda row: row,
) -> tuple[SweepPlan, list[PointRow]]:
    """A strong or weak sweep of nodes: a twentieth of the steps is serial, start-up is constant.

    The last run at the largest scale misses the target; `change` is applied to each row.
    """
    noise = random.Random(7)
    points: list[Point] = []
    rows = []
    for repeat, scale in itertools.product(range(repeats), scales):
        batch = 512 if mode == "strong" else 64 * 4 * scale
        point = Point(
            number=len(points),
            shape=0,
            scale=scale,
            repeat=repeat,
            seed=repeat + 1,
            batch_global=batch,
            batch_per_rank=batch // (4 * scale),
            learning_rate=0.1 if mode == "strong" else 0.1 * scale,
        )
        points.append(point)
        slower = noise.lognormvariate(0, 0.02)
        training = slower * 200 * (0.05 + 0.95 / scale) * 1.004**scale
        phases = {
            "queue": 30 * noise.random(),
            "staging": 3 + noise.random(),
            "start-up": 4 * slower,
            "launch": 0.5,
            "rendezvous": 0.4 * slower,
            "warm-up": 2.5,
            "training": training,
            "evaluation": 0.03 * training,
            "checkpoint": 1.0,
            "end": 0.3,
        }
        missed = scale == scales[-1] and repeat == repeats - 1
        row = completed(
            point,
            phases,
            samples_per_second=10 * IMAGES / (0.95 * training),
            accuracy=0.962 - 0.002 * noise.random() - (0.012 if missed else 0),
            target_accuracy=target,
            evaluation_every=1.0,
            seconds_to_accuracy=None if missed or target is None else 0.7 * training,
        )
        rows.append(change(row))
    plan = plan_of(mode, points, unit="nodes", baseline=scales[0])
    return plan, rows


def grid(axes: Mapping[str, Sequence[Any]], repeats: int = 6) -> tuple[SweepPlan, list[PointRow]]:
    """A grid: more --lr is better up to 0.1, a larger --batch-size faster and a little worse."""
    noise = random.Random(3)
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    points = [
        Point(
            number,
            0,
            values=values,
            repeat=repeat,
            seed=repeat + 1,
            batch_global=512,
            batch_per_rank=128,
            learning_rate=values.get("--lr"),
        )
        for number, (repeat, values) in enumerate(itertools.product(range(repeats), combinations))
    ]
    return plan_of("grid", points), [_trial(point, noise) for point in points]


def search(trials: int = 20) -> tuple[SweepPlan, list[PointRow]]:
    """A search of --lr (logarithmic) and --layers; some trials are pruned, some fail."""
    noise = random.Random(5)
    points = [
        Point(
            number, 0, values={"--lr": 10 ** noise.uniform(-4, 0), "--layers": noise.randint(1, 6)}
        )
        for number in range(trials)
    ]
    rows = []
    for point in points:
        row = _trial(point, noise)
        row = dataclasses.replace(row, metric=row.accuracy)
        if point.number % 7 == 5:
            row = dataclasses.replace(row, state="PRUNED", reason="below the median at epoch 3")
        elif point.number % 11 == 9:
            row = PointRow(
                point.number,
                state="OUT_OF_MEMORY",
                over=True,
                started=BEGAN,
                gpu_hours=0.01,
                node_hours=0.01,
            )
        rows.append(row)
    sweep = {
        "base": "/home/ada/digits.yaml",
        "mode": "bayes",
        "axes": {"--lr": {"low": 1e-4, "high": 1, "log": True}, "--layers": {"low": 1, "high": 6}},
        "search": {"metric": "test_accuracy", "direction": "maximize"},
    }
    return plan_of("bayes", points, sweep=sweep), rows


def _trial(point: Point, noise: random.Random) -> PointRow:
    rate, size = point.values.get("--lr", 0.1), point.values.get("--batch-size", 64)
    training = 4000 / size * noise.lognormvariate(0, 0.02)
    accuracy = 0.96 - 0.05 * abs(rate - 0.1) - 0.0001 * size - 0.002 * noise.random()
    phases = {"staging": 3.0, "start-up": 4.0, "training": training, "end": 0.3}
    return completed(point, phases, accuracy=accuracy, samples_per_second=IMAGES / training)
