"""A sweep's figures computed again from the raw records, with none of hpml's code."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any


def attempts_of(records: Path, sweep: str) -> list[tuple[dict[str, Any], Path]]:
    """Every task that a sweep has submitted: its point, and the directory of its run."""
    folder = records / "sweeps" / sweep
    points = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    tasks = []
    for path in sorted((folder / "batches").glob("*.json")):
        batch = json.loads(path.read_text())
        for index, (number, _) in enumerate(batch["tasks"]):
            tasks.append((points[number], records / "runs" / f"{batch['sid']}.{index}"))
    return tasks


def recomputed(records: Path, sweep: str) -> dict[int, dict[str, Any]]:
    """By scale: how many runs, and the medians of their seconds, throughput and accuracy."""
    figures: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for point, run in attempts_of(records, sweep):
        result = json.loads((run / "result.json").read_text())
        (attempt,) = (run / "attempts").iterdir()
        events = map(json.loads, (attempt / "events/batch.jsonl").read_text().splitlines())
        started = next(event["time"] for event in events if event["event"] == "started")
        ended = json.loads((attempt / "ended.json").read_text())
        assert ended["exit_code"] == 0
        figures[point["scale"]].append(result | {"seconds": ended["time"] - started})
    return {
        scale: {
            "runs": len(runs),
            "seconds": median(run["seconds"] for run in runs),
            "samples_per_second": median(run["samples_per_second"] for run in runs),
            "accuracy": median(run["test_accuracy"] for run in runs),
            "batch": {(run["batch_size_per_rank"], run["world_size"]) for run in runs},
            "learning_rate": {round(run["learning_rate"], 9) for run in runs},
        }
        for scale, runs in figures.items()
    }
