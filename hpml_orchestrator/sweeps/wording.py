"""Figures, intervals, scales and values as a report words them, and its templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2

from hpml_orchestrator import assets
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, Target
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

__all__ = [
    "axis_text",
    "environment",
    "estimate_text",
    "exact_text",
    "number",
    "percent",
    "scale_text",
    "states_text",
    "values_text",
]


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


def estimate_text(estimate: Estimate | Speedup | None, factor: float = 1) -> str:
    """Return `factor` times a figure with its interval, as `1.79 [1.77, 1.83]`."""
    if estimate is None:
        return "-"
    ends = estimate.interval
    interval = f" [{number(ends.low * factor)}, {number(ends.high * factor)}]" if ends else ""
    return number(estimate.value * factor) + interval


def exact_text(estimate: Estimate | None) -> str:
    """Return a figure with four digits, as accuracies need, and its interval."""
    if estimate is None:
        return "-"
    ends = estimate.interval
    return f"{estimate.value:.4g}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")


def scale_text(scale: int | None, unit: str) -> str:
    """Return a scale with its unit.

    >>> scale_text(1, "nodes"), scale_text(4, "gpus")
    ('1 node', '4 GPUs')
    """
    return counted(scale or 0, unit.removesuffix("s").replace("gpu", "GPU"))


def axis_text(name: str) -> str:
    """Return an axis' name without the dashes of an argument.

    >>> axis_text("--batch-size"), axis_text("lr=")
    ('batch-size', 'lr')
    """
    return name.removeprefix("--").removesuffix("=")


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values of the axes in one line."""
    return ", ".join(f"{axis_text(name)}={_value_text(value)}" for name, value in values.items())


def states_text(states: Mapping[str, int]) -> str:
    """Return how many attempts are in each state, completed ones first."""
    ordered = sorted(states.items(), key=lambda pair: (pair[0] != MEASURED, -pair[1], pair[0]))
    return ", ".join(f"{count} {state.lower().replace('_', ' ')}" for state, count in ordered)


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
    environment.globals |= {"format": form, "tidy": _tidy, "parts": PARTS}
    environment.filters |= {
        "axis": axis_text,
        "cell": lambda value: str(value).replace("|", "\\|").replace("\n", " "),
        "estimate": estimate_text,
        "exact": exact_text,
        "number": number,
        "percent": percent,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
        "scale": scale_text,
        "several": lambda values: examples([_value_text(value) for value in values], 4) or "-",
        "states": states_text,
        "target": _target_text,
        "value": _value_text,
    }
    return environment


def _value_text(value: Any) -> str:
    """Return a value of an axis, or an accuracy, with four digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _target_text(target: Target | None) -> str:
    """Return the seconds to the target; the interval of censored runs may be open."""
    if target is None or target.seconds is None:
        return "not reached" if target else "-"
    high = "open" if target.high is None else number(target.high)
    interval = "" if target.low is None else f" [{number(target.low)}, {high}]"
    return number(target.seconds) + interval


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
