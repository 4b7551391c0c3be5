"""The words of a sweep's report: figures, scales, values and states, and the templates."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from functools import cache

import jinja2

from hpml_orchestrator.document import templates
from hpml_orchestrator.document.templates import number
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few, printable
from hpml_orchestrator.sweeps.communication import Crossover
from hpml_orchestrator.sweeps.facts import MEASURED, NOT_ATTEMPTED, PARTS, Costs
from hpml_orchestrator.sweeps.rows import TEST_ACCURACIES
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

UNFINISHED = {"WAITING", "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"}
_WIDTH = 100  # of a terminal
_TIMES = 3.0  # from this speedup on it is given as a factor
CONSTANT = {"strong": "batch_global", "weak": "batch_per_rank"}


def estimate_text(
    estimate: Estimate | None, factor: float = 1, text: Callable[[float], str] = number
) -> str:
    """Return `factor` times a figure with its interval, as `1.79 [1.77, 1.83]`."""
    if estimate is None:
        return "-"
    ends = estimate.interval
    high = text(ends.high * factor) if ends and math.isfinite(ends.high) else "∞"
    interval = f" [{text(ends.low * factor)}, {high}]" if ends else ""
    return text(estimate.value * factor) + interval


def change_text(speedup: Speedup) -> str:
    """Return how much faster or slower a speedup is, with its interval.

    >>> from hpml_orchestrator.sweeps.statistics import Interval
    >>> change_text(Speedup(1.18, 6, Interval(1.15, 1.21, ""), 1, Estimate(1.18, 6, None)))
    '18% faster [15, 21]'
    """
    ends, sign = speedup.interval, 1 if speedup.value >= 1 else -1
    values = [speedup.value] if ends is None else [speedup.value, ends.low, ends.high]
    unit = " times as fast"
    if speedup.value < _TIMES:
        unit = "% faster" if sign > 0 else "% slower"
        values = [100 * sign * (value - 1) for value in values]
    digits = 0 if max(map(abs, values)) >= 10 else 1  # noqa: PLR2004 - two digits are enough
    value, *bounds = [f"{value:.{digits}f}" for value in values]
    bounds = bounds[::sign] if speedup.value < _TIMES else bounds
    return f"{value}{unit}" + (f" [{', '.join(bounds)}]" if bounds else "")


def exact_text(estimate: Estimate | None) -> str:
    """Return a figure with four digits, as accuracies need, and its interval."""
    return estimate_text(estimate, text=value_text)


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


def values_text(values: Mapping[str, object]) -> str:
    """Return the values of the axes in one line."""
    return ", ".join(f"{axis_text(name)}={value_text(value)}" for name, value in values.items())


def accuracy_text(names: Collection[str]) -> str:
    """Return what a sweep's accuracies measure, by the program's own names for them.

    >>> accuracy_text({"eval_accuracy"}), accuracy_text({"accuracy"})
    ('test accuracy', '"accuracy" as the program reports it')
    """
    if all(name in TEST_ACCURACIES for name in names):
        return "test accuracy"
    quoted = " or ".join(f'"{name or "accuracy"}"' for name in sorted(names))
    return f"{quoted} as the program reports it"


def attempts_text(states: Mapping[str, int]) -> str:
    """Return the number of attempts by outcome, then the points that were never attempted.

    >>> attempts_text({"FAILED": 1, "COMPLETED": 5, "EXCLUDED": 2})
    '6 attempts: 5 completed, 1 failed; 2 points excluded'
    """
    ordered = sorted(states.items(), key=lambda pair: (pair[0] != MEASURED, -pair[1], pair[0]))
    made = {state: count for state, count in ordered if state not in NOT_ATTEMPTED}
    ended = ", ".join(f"{n} {_state_text(state)}" for state, n in made.items())
    others = [
        f"{counted(count, 'point')} {state.lower()}"
        for state, count in ordered
        if state in NOT_ATTEMPTED
    ]
    attempts = [f"{counted(sum(made.values()), 'attempt')}: {ended}"] * bool(made)
    return "; ".join([*attempts, *others])


def _state_text(state: str) -> str:
    return state.lower().replace("_", " ")


def costs_text(costs: Costs) -> str:
    """Return the known GPU-hours, core-hours, node-hours and energy in one line."""
    parts = [f"{number(costs.core_hours)} core-hours", f"{number(costs.node_hours)} node-hours"]
    if costs.energy_kwh is not None:
        parts.append(f"{number(costs.energy_kwh)} kWh")
    if costs.requested:
        attempts = counted(costs.requested, "attempt")
        parts.append(f"of {attempts} what was requested, since the allocation is not recorded")
    if costs.gpu_hours:
        parts.insert(0, f"{number(costs.gpu_hours)} GPU-hours")
    return ", ".join(parts)


@cache
def environment(form: str) -> jinja2.Environment:
    """Return the environment of the report's templates, for `html`, `md` or `text`."""
    shared = templates.environment(form)
    environment = shared.overlay()  # filters of sweeps are not those of all reports
    environment.globals = {**shared.globals, "parts": PARTS}
    environment.filters = {
        **shared.filters,
        "attempts": attempts_text,
        "axis": axis_text,
        "change": change_text,
        "costs": costs_text,
        "crossover": crossover_text,
        "missing": lambda states: ", ".join(
            f"{n} {_state_text(state)}" for state, n in states.items()
        ),
        "epochs": lambda n: "-" if n is None else "epoch" if n == 1 else f"{number(n)} epochs",
        "estimate": estimate_text,
        "exact": exact_text,
        "filled": _filled,
        "hours": lambda hours: number(hours or None),
        "scale": scale_text,
        "signed": "{:+.0%}".format,
        "time": lambda time: "not reached" if math.isinf(time.value) else estimate_text(time),
        "several": lambda values: first_few([value_text(value) for value in values], 4, none="-"),
        "value": value_text,
    }
    return environment


def _filled(text: str, start: str = "") -> str:
    """Wrap text between words: a hyphen may be part of a run's id or of an option."""
    text, indent = printable(text), " " * len(start)
    return textwrap.fill(
        text, _WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )


def sentences(kind: str, **facts: object) -> tuple[str, ...]:
    """Return the sentences of an answer: those of a macro of `answers.j2` for these facts."""
    macro = getattr(environment("md").get_template("answers.j2").module, kind)
    parts = re.split(r"\n\s*\n", str(macro(**facts)))
    return tuple(text for part in parts if (text := " ".join(part.split())))


def crossover_text(crossover: Crossover) -> str:
    """Return a crossover bandwidth with its interval; an end that was not measured is open."""
    if crossover.interval is None:
        return number(crossover.mbit)
    low, high = crossover.interval.low, crossover.interval.high
    ends = (
        "below all" if not low else number(low),
        "above all" if math.isinf(high) else number(high),
    )
    if ends[0] == ends[1] or (math.isinf(low) or not high):
        return number(crossover.mbit)  # all draws agree that there is none
    return f"{number(crossover.mbit)} [{ends[0]}, {ends[1]}]"


def value_text(value: object) -> str:
    """Return a value of an axis, or an accuracy, with four digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
