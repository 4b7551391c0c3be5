"""Figures, intervals, scales and values as a report words them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2

from hpml_orchestrator import assets
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, Setting, Target
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.statistics import Estimate, Interval, Speedup

__all__ = [
    "axis_text",
    "environment",
    "exact_text",
    "interval_text",
    "number",
    "percent",
    "phases_text",
    "scale_text",
    "states_text",
    "value_text",
    "values_text",
]

_MOST_RANKED = 50
_COLLAPSED_ABOVE = 300


def number(value: float | None) -> str:
    """Return a figure with three significant digits.

    >>> number(12345.6), number(0.98765), number(None)
    ('12,346', '0.988', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"  # noqa: PLR2004 - 3 digits


def percent(value: float | None) -> str:
    """Return a share in percent.

    >>> percent(0.8349)
    '83 %'
    """
    return "-" if value is None else f"{100 * value:.0f} %"


def interval_text(interval: Interval | None, factor: float = 1) -> str:
    """Return an interval as ` [low, high]`, or nothing where there is none."""
    if interval is None:
        return ""
    return f" [{number(interval.low * factor)}, {number(interval.high * factor)}]"


def scale_text(scale: int | None, unit: str) -> str:
    """Return a scale with its unit.

    >>> scale_text(1, "nodes"), scale_text(4, "gpus")
    ('1 node', '4 GPUs')
    """
    noun = {"nodes": "node", "ranks": "rank", "gpus": "GPU"}.get(unit, unit)
    return counted(scale or 0, noun)


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values of the axes in one line."""
    return ", ".join(f"{axis_text(name)}={value_text(value)}" for name, value in values.items())


def axis_text(name: str) -> str:
    """Return an axis' name without the dashes of an argument.

    >>> axis_text("--batch-size"), axis_text("lr=")
    ('batch-size', 'lr')
    """
    return name.removeprefix("--").removesuffix("=")


def value_text(value: Any) -> str:
    """Return a value of an axis, or an accuracy, with four digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def states_text(states: Mapping[str, int]) -> str:
    """Return how many attempts are in each state, completed ones first."""
    ordered = sorted(states.items(), key=lambda pair: (pair[0] != MEASURED, -pair[1], pair[0]))
    return ", ".join(f"{count} {state.lower().replace('_', ' ')}" for state, count in ordered)


def phases_text(setting: Setting) -> str:
    """Return the mean seconds of the phases of a setting's runs."""
    return ", ".join(f"{name} {number(seconds)} s" for name, seconds in setting.phases.items())


def exact_text(estimate: Estimate | None) -> str:
    """Return a figure with four digits, as accuracies need, and its interval."""
    if estimate is None:
        return "-"
    value = estimate.value
    ends = estimate.interval
    return f"{value:.4g}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")


@cache
def environment(form: str) -> jinja2.Environment:
    """Return the environment of the report's templates, for `html` or `md`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets.path("templates/report")),
        autoescape=jinja2.select_autoescape(default=form == "html", default_for_string=False),
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "format": form,
        "tidy": _tidy,
        "parts": PARTS,
        "most": _MOST_RANKED,
        "collapse": _COLLAPSED_ABOVE,
    }
    environment.filters |= {
        "cell": lambda value: str(value).replace("|", "\\|").replace("\n", " "),
        "efficiency": _efficiency,
        "estimate": _estimate,
        "exact": exact_text,
        "mark": _mark,
        "number": number,
        "percent": percent,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
        "remarks": _remarks,
        "scale": scale_text,
        "several": _several,
        "axis": axis_text,
        "value": value_text,
        "states": states_text,
        "target": _target,
    }
    return environment


def _tidy(
    head: Sequence[str], rows: Sequence[Sequence[Any]], align: str
) -> tuple[list[str], list[list[Any]], str]:
    """Return a table without the columns that nothing is known for."""
    align = align.ljust(len(head), align[-1])
    kept = [
        column
        for column in range(len(head))
        if column == 0 or any(row[column] not in {"-", ""} for row in rows)
    ]
    cells = [[row[column] for column in kept] for row in rows]
    return [head[column] for column in kept], cells, "".join(align[column] for column in kept)


def _estimate(estimate: Estimate | Speedup | None, factor: float = 1) -> str:
    if estimate is None:
        return "-"
    interval = interval_text(estimate.interval, factor)
    return number(estimate.value * factor) + interval


def _efficiency(speedup: Speedup | None) -> str:
    if speedup is None:
        return "-"
    interval = interval_text(speedup.efficiency_interval, 100)
    return number(100 * speedup.efficiency) + interval


def _target(target: Target | None) -> str:
    if target is None or target.seconds is None:
        return "not reached" if target else "-"
    if target.low is None:
        return number(target.seconds)
    high = "open" if target.high is None else number(target.high)
    return f"{number(target.seconds)} [{number(target.low)}, {high}]"


def _several(values: Sequence[float]) -> str:
    return examples([f"{value:g}" for value in values], 4) or "-"


def _mark(setting: Setting) -> str:
    return (" ‡" if setting.oversubscribed else "") + (" †" if setting.unverified else "")


def _remarks(row: Row) -> str:
    remarks = [row.reason] if row.reason else []
    if row.oversubscribed:
        remarks.append("more ranks than cores")
    if row.total_seconds and row.verified is not True:
        remarks.append("binding not verified" + (f": {row.binding}" if row.binding else ""))
    return "; ".join(remarks)
