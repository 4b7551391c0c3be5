"""Plan files for the tests of hpml-bind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.planfile import write

MINE = sorted(os.sched_getaffinity(0))
CHANNEL = "hpml-0-of-this-test"


def put_plan(attempt: str | Path, *ranks: RankPlan, policy: str = "gpu-local", **head: str) -> Path:
    """Write the plan of node n1, as its agent does."""
    path = Path(attempt, "plan", "n1.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write(Plan(ranks, policy), {"channel": CHANNEL, **head}), "ascii")
    return path


def one_each(count: int = 2) -> tuple[RankPlan, ...]:
    """A plan that gives each rank one of this test's own CPUs, in turn."""
    return tuple(
        RankPlan(local_rank=rank, cpus=(MINE[rank % len(MINE)],), cores=(rank,), threads=rank + 3)
        for rank in range(count)
    )


def records(attempt: str | Path) -> list[dict[str, Any]]:
    """What the ranks of node n1 wrote down."""
    text = Path(attempt, "binding", "n1.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]
