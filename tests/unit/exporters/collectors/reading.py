"""What the tests of the collectors share: a tree of files as roots, and samples as a mapping."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpml_exporters.core.collector import Collector
from hpml_exporters.jobs.board import JobFacts, Jobs, JobsBoard, JobSeen
from hpml_exporters.options import Context, NodeOptions, Roots

from tests.unit.exporters.collectors.families import values

Series = tuple[str, ...]


def context(**changes: Any) -> Context:
    """A context whose roots are given by name, and options too."""
    roots = {name: str(changes.pop(name)) for name in vars(Roots()) if name in changes}
    return Context(replace(NodeOptions(roots=Roots(**roots)), **changes))


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write a tree of small files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def sampled(collector: Collector, now: float | None = None) -> dict[Series, float]:
    """One reading: (name, value of each label ...) -> value."""
    families = list(collector.sample(time.monotonic() if now is None else now))
    assert {family.name for family in families} <= {spec.family_name for spec in collector.specs}
    return values(families)


def post(board: JobsBoard, jobs: Mapping[str, tuple[int, list[int]]]) -> None:
    """Put jobs on the board: job id, or `local-3fa9c1-7` of a local run -> (uid, process ids)."""
    seen = {}
    for key, (uid, pids) in jobs.items():
        cluster, _, jobid = key.rpartition("-")
        seen[key] = JobSeen(JobFacts(jobid, uid=uid, cluster=cluster), pids=frozenset(pids))
    board.post(Jobs(seen))
