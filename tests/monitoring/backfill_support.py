"""Known data for every query of a dashboard: what its selectors want, of three jobs and nodes.

Each job has a different node, user and GPU, so that joins on any of these labels find one
partner.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import zlib
from typing import TYPE_CHECKING, Any

import promql_parser

from tests.monitoring.prometheus_support import program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

END = 1_767_225_600
"""Unix seconds of the last sample."""
SECONDS = 3600
_STEP = 30
_BUCKETS = ("30", "300", "3600", "+Inf")
_JOBS = [
    {
        "cluster": "main",
        "job": "hpml",
        "sweep": "scaling",
        "partition": ("gpu", "gpu", "debug")[number],
        "node": f"gpu0{number + 1}",
        "instance": f"gpu0{number + 1}:9445",
        "jobid": str(1201 + number),
        "point": f"nodes={2**number}",
        "user": ("ada", "bob", "cyd")[number],
        "account": "vision",
        "name": ("digits", "imagenet", "llama")[number],
        "uuid": f"GPU-{number}",
        "index": str(number),
    }
    for number in range(3)
]
VALUES = {"datasource": "prometheus", **_JOBS[0]}
"""What the dashboards' variables become."""


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, those of folded rows too, without the rows."""
    for panel in dashboard["panels"]:
        yield from panels(panel) if panel["type"] == "row" and "panels" in panel else ()
        if panel["type"] != "row":
            yield panel


def resolved(expression: str, step: int = 15, others: Mapping[str, str] = VALUES) -> str:
    """An expression with the variables' values, or others, as a panel with that step has it."""
    values = {
        **VALUES,
        **others,
        "__interval": f"{step}s",
        "__rate_interval": f"{max(step + 15, 60)}s",
        "__range": f"{SECONDS}s",
    }
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], expression)


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """Every expression of its panels, and the selectors of its variables."""
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield resolved(target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]  # text, or as Grafana's own editor writes it
            text = query["query"] if isinstance(query, dict) else query
            yield resolved(re.sub(r"^label_values\((.*),\s*\w+\)$", r"\1", text))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        yield from _selectors(getattr(node, part)) if hasattr(node, part) else ()
    for argument in getattr(node, "args", ()):
        yield from _selectors(argument)


def _series(dashboards: Iterable[dict[str, Any]]) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """Metric -> the label values that its selectors use in addition to those of the jobs."""
    wanted: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for text in itertools.chain.from_iterable(map(expressions, dashboards)):
        for selector in _selectors(promql_parser.parse(text)):
            matchers = [
                (matcher.name, matcher.value.split("|"))
                for matcher in selector.matchers.matchers
                if matcher.name not in _JOBS[0]
                and matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re)
            ]
            choices = itertools.product(*[[(n, v) for v in vs] for n, vs in matchers])
            wanted.setdefault(str(selector.name), set()).update(map(frozenset, choices))
    return {name: labels - {frozenset()} or labels for name, labels in wanted.items()}


def _value(name: str, key: str, second: int) -> float:
    """A number of the metric's kind: a wave for gauges, always more for counters."""
    seed = zlib.crc32(f"{name}{key}".encode()) % 97
    wave = 0.55 + 0.25 * math.sin((second + 40 * seed) / 400) + seed / 500
    if name.endswith(("_info", ":info", "_present")):
        return 1
    if "timestamp" in name:
        return END - SECONDS + 10 * seed
    if name.endswith(("_total", "_bucket", "_sum", "_count")):
        return second * (1 + seed) / 400
    if "bytes" in name:
        return wave * 64e9
    if "watts" in name:
        return wave * 600
    if "celsius" in name:
        return wave * 80
    return wave if re.search(r"ratio|busy|active|wait", name) else round(8 * wave)


def openmetrics(dashboards: Iterable[dict[str, Any]]) -> str:
    """The data as promtool backfills it."""
    lines = []
    for name, extras in sorted(_series(dashboards).items()):
        for extra, job in itertools.product(sorted(map(sorted, extras)), _JOBS):
            bounds: Iterable[str] = _BUCKETS if name.endswith("_bucket") else [""]
            for place, bound in enumerate(bounds, 1):
                labels = job | dict(extra) | ({"le": bound} if bound else {})
                shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
                for second in range(0, SECONDS + 1, _STEP):
                    value = place * _value(name, f"{extra}{job['jobid']}", second)
                    lines.append(f"{name}{{{shown}}} {value:.6g} {END - SECONDS + second}")
    return "\n".join([*lines, "# EOF", ""])


def backfill(folder: Path, text: str) -> None:
    """Write data of this form for a Prometheus that is booted in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "data.txt"
    raw.write_text(text)
    create: list[str | Path] = ["tsdb", "create-blocks-from", "openmetrics", raw, folder / "data"]
    subprocess.run([program("promtool"), *create], check=True, capture_output=True, timeout=300)
