"""Draw a report's plots as SVG text whose colours follow the page, light or dark.

Text stays text, so it has the page's font and can be found and read aloud. Every colour is a CSS
variable with the light colour as its default: a plot also looks right in a file of its own.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any, TypeAlias

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.texts import examples
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, Report
from hpml_orchestrator.sweeps.statistics import Estimate, Interval
from hpml_orchestrator.sweeps.wording import axis_text, number, phases_text, scale_text

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
except ModuleNotFoundError as error:
    raise InputError(
        "the report's plots need matplotlib", hint="pip install 'hpml-orchestrator[sweep]'"
    ) from error

__all__ = ["COLOURS", "Plot", "draw"]

COLOURS = {
    "ink": "#24292f",
    "quiet": "#6e7781",
    "line": "#d7dce1",
    "page": "#fefefe",
    "c1": "#1f6fb4",
    "c2": "#c9601b",
    "c3": "#2a8b57",
    "c4": "#8a56ac",
    "c5": "#b8860f",
    "c6": "#1b8f9c",
    "c7": "#b0486f",
    "c8": "#7a6652",
    "c9": "#8d99a6",
    "c10": "#b4bdc6",
}
"""The plots' colours on a light page by the names of the CSS variables, `--ink` and so on."""

_Point: TypeAlias = tuple[Estimate, Sequence[float]]  # the median, and every run
_SERIES = [COLOURS[f"c{number}"] for number in range(1, 7)]
_PARTS = {
    part: COLOURS[f"c{place}"]
    for part, place in zip(PARTS, (2, 4, 5, 7, 1, 6, 3, 8, 9, 10), strict=True)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpml",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["quiet"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["quiet"],
    "ytick.color": COLOURS["quiet"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}
_WIDTH, _HEIGHT = 5.2, 3.5  # inches: 374 pt, so that 9 pt can still be read on a phone
_MOST_VECTORS = 600
_MOST_BARS = 16
_MOST_TICKS = 9
_MOST_PANELS = 6
_FEWEST_POINTS = 2  # one needs no plot


@dataclass(frozen=True)
class Plot:
    """A plot: what it shows, the same in words, and the SVG element."""

    name: str
    title: str
    description: str
    svg: str


def draw(report: Report) -> list[Plot]:
    """Return the plots that the data of a report allow, in the order of the page."""
    with rc_context(_STYLE):
        plots = list(_curves(report)) if report.scaling else [_trace(report), _effects(report)]
    return [plot for plot in plots if plot]


def _plot(name: str, title: str, description: str, figure: Figure) -> Plot:
    """Return a figure as an SVG element that can stand beside others in a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=144)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    label = escape(f"{title}. {description}", quote=True)
    for pattern, text in (
        (r"<metadata>.*?</metadata>", ""),
        (r'(id="|href="#|url\(#)', rf"\g<1>{name}-"),
        (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit"),
        (r' (?:width|height)="[\d.]+pt"', ""),
        (r"\A<svg", f'<svg role="img" aria-label="{label}"'),
    ):
        svg = re.sub(pattern, text, svg, flags=re.DOTALL)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    return Plot(name, title, description, svg)


def _panels(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _dots(axis: Axes, points: Sequence[tuple[Any, float]], colour: str) -> None:
    """Draw all points; very many become one picture, so that the page stays small."""
    x, y = zip(*points, strict=True) if points else ((), ())
    many = len(x) > _MOST_VECTORS
    axis.scatter(
        x, y, s=5 if many else 12, color=colour, alpha=0.45, linewidths=0, rasterized=many, zorder=2
    )


def _over_scales(
    report: Report,
    name: str,
    title: str,
    label: str,
    points: Mapping[int, _Point],
    finish: Callable[[Axes], object] = lambda _: None,
) -> Plot | None:
    """Draw runs and medians with intervals over the scales, a colour per series.

    Args:
        report: its settings are drawn.
        name: of the plot.
        title: of the plot, for the reader.
        label: of the vertical axis.
        points: median and runs by the settings' numbers.
        finish: draws what else this plot has.
    """
    if len(points) < _FEWEST_POINTS:
        return None
    figure, (axis,) = _panels(_HEIGHT)
    scales = sorted({one.scale for one in report.settings if one.scale})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(scales[:: math.ceil(len(scales) / _MOST_TICKS)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axis.set_xlim(scales[0] / 1.2, scales[-1] * 1.2)
    axis.set_xlabel(report.unit.replace("gpus", "GPUs"))
    axis.set_ylabel(label)
    for (series, settings), colour in zip(report.series.items(), _SERIES, strict=False):
        drawn = [(one.scale, *points[one.number]) for one in settings if one.number in points]
        medians = [median for _, median, _ in drawn]
        ends = [one.interval or Interval(one.value, one.value, 0, "") for one in medians]
        tops = [end.high if math.isfinite(end.high) else end.low for end in ends]
        # runs stand side by side, so that equal ones do not hide each other
        dots = [
            ((scale or 1) * 2 ** (0.12 * ((place + 0.5) / len(runs) - 0.5)), run)
            for scale, _, runs in drawn
            for place, run in enumerate(runs)
        ]
        _dots(axis, dots, colour)
        axis.errorbar(
            [scale or 1 for scale, _, _ in drawn],
            [one.value for one in medians],
            yerr=[
                [one.value - end.low for one, end in zip(medians, ends, strict=True)],
                [max(0, top - one.value) for one, top in zip(medians, tops, strict=True)],
            ],
            color=colour,
            marker="D",
            markerfacecolor=COLOURS["page"],
            capsize=4,
            label=(series or "median")
            + (", 95 % CI" if any(one.interval for one in medians) else "")
            + ("; dots are runs" if dots else ""),
            zorder=3,
        )
    finish(axis)
    axis.legend(loc="best")
    listed = [
        f"{one.label}: {number(points[one.number][0].value)}"
        for one in report.settings
        if one.number in points
    ]
    words = f"{label}: every run, medians with 95 % CI. {examples(listed, 8)}"
    return _plot(name, title, words, figure)


def _curves(report: Report) -> Iterable[Plot | None]:
    """Draw speedup and efficiency, accuracy and time to accuracy over the scales."""
    bases = {one.series: one.figure for one in report.settings if one.scale == report.baseline}
    speedups: dict[int, _Point] = {}
    efficiencies: dict[int, _Point] = {}
    for one in report.settings:
        base = bases.get(one.series)
        if one.speedup is None or base is None:
            continue
        runs = [
            run / base.value if report.figure.maximize else base.value / run for run in one.figures
        ]
        speedups[one.number] = Estimate(one.speedup.value, one.runs, one.speedup.interval), runs
        interval, share = one.speedup.efficiency_interval, 100 / one.speedup.scale
        efficiencies[one.number] = (
            Estimate(100 * one.speedup.efficiency, one.runs, interval and interval.scaled(100)),
            [share * run for run in runs],
        )
    ideal: dict[str, Any] = {
        "color": COLOURS["quiet"],
        "linestyle": "--",
        "linewidth": 1,
        "label": "ideal",
    }

    def finish_speedup(axis: Axes) -> None:
        scales = sorted({one.scale for one in report.settings if one.scale})
        axis.plot(scales, [scale / (report.baseline or 1) for scale in scales], **ideal)
        for fit, colour in zip(report.fits, _SERIES[3:], strict=False):
            if not fit.series:
                axis.plot(fit.scales, fit.speedups, ":", color=colour, label=f"{fit.model} (fit)")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    def finish_efficiency(axis: Axes) -> None:
        axis.axhline(100, **ideal)
        axis.set_ylim(bottom=0)

    label = f"speedup over {scale_text(report.baseline, report.unit)}"
    yield _over_scales(report, "speedup", "Speedup", label, speedups, finish_speedup)
    label = "parallel efficiency, %"
    yield _over_scales(
        report, "efficiency", "Parallel efficiency", label, efficiencies, finish_efficiency
    )
    yield _phases(report)
    reached: dict[int, list[float]] = defaultdict(list)
    for attempt in report.attempts:
        if attempt.row.state == MEASURED and attempt.row.accuracy is not None:
            reached[attempt.setting].append(attempt.row.accuracy)
    accuracies = {
        one.number: (one.accuracy, reached[one.number]) for one in report.settings if one.accuracy
    }
    yield _over_scales(report, "accuracy", "Test accuracy", "test accuracy", accuracies)
    yield _time_to_accuracy(report)


def _time_to_accuracy(report: Report) -> Plot | None:
    targets = [(one, one.target) for one in report.settings if one.target and one.scale]
    points: dict[int, _Point] = {}
    for one, target in targets:
        if target.seconds is not None:
            high = math.inf if target.high is None else target.high
            interval = None if target.low is None else Interval(target.low, high, 0.95, "")
            points[one.number] = Estimate(target.seconds, target.runs, interval), ()

    def finish(axis: Axes) -> None:
        for one, target in targets:
            missing = "" if target.seconds else ",\nmedian not reached"
            place = one.scale or 1, target.seconds or 0
            text = f"{target.reached} of {target.runs}{missing}"
            axis.annotate(text, place, xytext=(7, 5), textcoords="offset points", fontsize=8)
        axis.set_xlim(right=axis.get_xlim()[1] * 1.25)
        axis.set_ylim(bottom=0)

    label = "seconds to the target accuracy"
    return _over_scales(report, "target", "Time to accuracy", label, points, finish)


def _phases(report: Report) -> Plot | None:
    settings = [one for one in report.settings if one.phases][:_MOST_BARS]
    if not settings:
        return None
    figure, (axis,) = _panels(1.4 + 0.34 * len(settings))
    left = [0.0] * len(settings)
    for part, colour in _PARTS.items():
        widths = [one.phases.get(part, 0.0) for one in settings]
        if any(widths):
            bars = axis.barh(range(len(settings)), widths, 0.62, left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.bar_label(bars, [f"{number(end)} s" for end in left], padding=4)
    axis.set_yticks(range(len(settings)), [one.label for one in settings])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.14)
    axis.set_xlabel("mean seconds of a run, without the queue")
    figure.legend(loc="outside lower center", ncols=4)
    listed = [f"{one.label}: {phases_text(one)}" for one in settings]
    return _plot("phases", "Where the time goes", examples(listed, 4), figure)


def _trace(report: Report) -> Plot | None:
    values = [
        (attempt.row.point, attempt.row.metric)
        for attempt in report.attempts
        if attempt.row.metric is not None and attempt.row.state == MEASURED
    ]
    if not (report.search and values):
        return None
    figure, (axis,) = _panels(_HEIGHT)
    _dots(axis, values, COLOURS["c1"])
    trials = [trial for trial, _ in report.trace] + [max(trial for trial, _ in values)]
    best = [value for _, value in report.trace] + [report.trace[-1][1]]
    axis.step(trials, best, where="post", color=COLOURS["c2"], label="best so far")
    axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
    axis.set_xlabel("trial")
    axis.set_ylabel(report.figure.name)
    axis.legend(loc="best")
    words = f"{len(values)} trials; the best is {number(best[-1])}, of trial {trials[-2]}."
    return _plot("trace", "Best so far", words, figure)


def _effects(report: Report) -> Plot | None:
    """Draw the figure against each axis: every setting, and the median of each listed value."""
    measured = [one for one in report.settings if one.figure]
    axes = list(dict.fromkeys(name for one in measured for name in one.values))[:_MOST_PANELS]
    axes = [name for name in axes if len({str(one.values.get(name)) for one in measured}) > 1]
    if not axes:
        return None
    columns = min(2, len(axes))
    rows = math.ceil(len(axes) / columns)
    figure, panels = _panels(0.8 + 2.2 * rows, rows, columns)
    for place, (name, axis) in enumerate(zip(axes, panels, strict=False)):
        points = [(one.values.get(name), one.figure.value) for one in measured if one.figure]
        if not all(isinstance(value, (int, float)) for value, _ in points):
            points = [(str(value), figure) for value, figure in points]
        _dots(axis, points, COLOURS["c1"])
        by_value: dict[Any, list[float]] = defaultdict(list)
        for value, height in points:
            by_value[value].append(height)
        if not report.search:
            medians = {value: median(by_value[value]) for value in by_value}
            axis.plot(list(medians), list(medians.values()), color=COLOURS["c2"], marker="_")
        if name in report.log_axes:
            axis.set_xscale("log")
        axis.set_xlabel(axis_text(name))
        axis.set_ylabel("" if place % columns else report.figure.name)
    for axis in panels[len(axes) :]:
        axis.set_visible(False)
    line = "" if report.search else ", with the median of each value"
    words = f"Each setting's {report.figure.name} against {examples(axes, 6)}{line}."
    return _plot("axes", "What each axis does", words, figure)
