"""Draw a report's plots as SVG text whose colours follow the page, light or dark.

Text stays text, so it has the page's font and can be found and read aloud. Every colour is a CSS
variable with the light colour as its default: a plot also looks right in a file of its own.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, Report
from hpml_orchestrator.sweeps.statistics import Estimate, Interval, Speedup
from hpml_orchestrator.sweeps.wording import axis_text, number, scale_text

__all__ = ["Plot", "draw"]

_Point: TypeAlias = tuple[Estimate | Speedup, Sequence[float]]  # the median, and every run
_COLOURS = {  # on a light page, by the names of the CSS variables
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
_INK, _QUIET, _LINE, _PAGE, *_SERIES = _COLOURS.values()
_OF_PARTS = dict(zip(PARTS, (2, 4, 5, 7, 1, 6, 3, 8, 9, 10), strict=True))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpml",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _QUIET,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK
    ),
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_WIDTH, _HEIGHT = 5.2, 3.5  # inches: 374 pt, so that 9 pt can still be read on a phone
_MOST_VECTORS = 600
_MOST_BARS = 16
_MOST_TICKS = 9
_MOST_PANELS = 6


@dataclass(frozen=True)
class Plot:
    """A plot as an SVG element that can stand beside others in a page."""

    name: str
    title: str
    svg: str


def draw(report: Report) -> list[Plot]:
    """Return the plots that the data of a report allow, in the order of the page."""
    with rc_context(_STYLE):
        return [
            _plot(name, title, figure)
            for name, title, figure in (_curves if report.scaling else _trials)(report)
        ]


def _plot(name: str, title: str, figure: Figure) -> Plot:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=144)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    label = escape(f"{title}; the tables have the figures", quote=True)
    for pattern, text in (
        (r"<metadata>.*?</metadata>", ""),
        (r'(id="|href="#|url\(#)', rf"\g<1>{name}-"),
        (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit"),
        (r' (?:width|height)="[\d.]+pt"', ""),
        (r"\A<svg", f'<svg role="img" aria-label="{label}"'),
    ):
        svg = re.sub(pattern, text, svg, flags=re.DOTALL)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    return Plot(name, title, svg)


def _panels(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _dots(axis: Axes, x: Sequence[Any], y: Sequence[float], colour: str) -> None:
    """Draw all points; very many become one picture, so that the page stays small."""
    many = len(x) > _MOST_VECTORS
    axis.scatter(x, y, s=5 if many else 12, c=colour, alpha=0.45, linewidths=0, rasterized=many)


def _curves(report: Report) -> Iterable[tuple[str, str, Figure]]:
    """Draw what depends on the scale: speedup, efficiency, phases, accuracy, time to accuracy."""
    speedups: dict[int, _Point] = {}
    efficiencies: dict[int, _Point] = {}
    accuracies: dict[int, _Point] = {}
    targets: dict[int, _Point] = {}
    base: dict[str, float] = {
        one.series: one.figure.value
        for one in report.settings
        if one.figure and one.scale == report.baseline
    }
    reached: dict[int, list[float]] = defaultdict(list)
    for attempt in report.attempts:
        if attempt.row.state == MEASURED and attempt.row.accuracy is not None:
            reached[attempt.setting].append(attempt.row.accuracy)
    for one in report.settings:
        if one.speedup and one.efficiency:
            power, share = 1 if report.figure.maximize else -1, 100 / one.speedup.scale
            runs = [(run / base[one.series]) ** power for run in one.figures]
            speedups[one.number] = one.speedup, runs
            efficiencies[one.number] = one.efficiency, [share * run for run in runs]
        if one.accuracy:
            accuracies[one.number] = one.accuracy, reached[one.number]
        if one.target and one.target.seconds is not None:
            low, high = one.target.low, one.target.high or one.target.seconds
            interval = None if low is None else Interval(low, high, 0.95, "")
            targets[one.number] = Estimate(one.target.seconds, one.target.runs, interval), ()
    over = f"speedup over {scale_text(report.baseline, report.unit)}"
    for name, title, label, points in (
        ("speedup", "Speedup", over, speedups),
        ("efficiency", "Parallel efficiency", "parallel efficiency, %", efficiencies),
        ("phases", "Where the time goes", "", {}),
        ("accuracy", "Test accuracy", "test accuracy", accuracies),
        ("target", "Time to accuracy", "seconds to the target accuracy", targets),
    ):
        if name == "phases" and any(one.phases for one in report.settings):
            yield name, title, _phases(report)
        if len(points) > 1:  # one needs no plot
            yield name, title, _over_scales(report, name, label, points)


def _over_scales(report: Report, name: str, label: str, points: Mapping[int, _Point]) -> Figure:
    """Draw runs and medians with intervals over the scales, a colour per series.

    What had more ranks than cores is grey. The ideal and the fits are drawn where they belong.
    """
    figure, (axis,) = _panels(_HEIGHT)
    scales = sorted({one.scale for one in report.settings if one.scale})
    for (series, settings), colour in zip(report.series.items(), _SERIES, strict=False):
        drawn = [one for one in settings if one.number in points]
        x = [one.scale or 1 for one in drawn]
        medians = [points[one.number][0] for one in drawn]
        y = [one.value for one in medians]
        ends = [one.interval or Interval(one.value, one.value, 0, "") for one in medians]
        for shade, doubtful in ((colour, False), (_QUIET, True)):
            shown = [one for one in drawn if bool(one.oversubscribed) is doubtful]
            dots = [  # beside the median, which would hide them
                (1.05 * (one.scale or 1), run) for one in shown for run in points[one.number][1]
            ]
            _dots(axis, [scale for scale, _ in dots], [run for _, run in dots], shade)
            axis.plot(
                [one.scale or 1 for one in shown],
                [points[one.number][0].value for one in shown],
                "D",
                color=shade,
                markerfacecolor=_PAGE,
                markersize=5,
                zorder=4,
            )
        axis.errorbar(
            x,
            y,
            yerr=[
                [value - end.low for value, end in zip(y, ends, strict=True)],
                [max(0, end.high - value) for value, end in zip(y, ends, strict=True)],
            ],
            color=colour,
            capsize=4,
            label=f"{series or 'median'}, 95 % CI",
        )
    ideal: dict[str, Any] = {"color": _QUIET, "linestyle": "--", "linewidth": 1, "label": "ideal"}
    if name == "speedup":
        axis.plot(scales, [scale / (report.baseline or 1) for scale in scales], **ideal)
        for fit, colour in zip(report.fits, _SERIES[3:], strict=False):
            if not fit.series:
                axis.plot(fit.scales, fit.speedups, ":", color=colour, label=f"{fit.model} (fit)")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif name == "efficiency":
        axis.axhline(100, **ideal)
    if name in {"efficiency", "target"}:
        axis.set_ylim(bottom=0)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(scales[:: math.ceil(len(scales) / _MOST_TICKS)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axis.set_xlim(scales[0] / 1.2, scales[-1] * 1.2)
    axis.set_xlabel(report.unit.replace("gpus", "GPUs"))
    axis.set_ylabel(label)
    axis.legend()
    return figure


def _phases(report: Report) -> Figure:
    settings = [one for one in report.settings if one.phases][:_MOST_BARS]
    figure, (axis,) = _panels(1.4 + 0.34 * len(settings))
    places, left = range(len(settings)), [0.0] * len(settings)
    for part, place in _OF_PARTS.items():
        widths = [one.phases.get(part, 0.0) for one in settings]
        if any(widths):
            colour = _COLOURS[f"c{place}"]
            bars = axis.barh(places, widths, 0.62, left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.bar_label(bars, [f"{number(end)} s" for end in left], padding=4)
    axis.set_yticks(places, [one.label for one in settings])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.14)
    axis.set_xlabel("mean seconds of a run, without the queue")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _trials(report: Report) -> Iterable[tuple[str, str, Figure]]:
    """Draw the best figure so far of a search, and the figure against each axis."""
    rows = [attempt.row for attempt in report.attempts if attempt.row.state == MEASURED]
    found = [(row.point, row.metric) for row in rows if row.metric is not None]
    if report.search and found:
        trials, metrics = zip(*found, strict=True)
        best = list(accumulate(metrics, max if report.figure.maximize else min))
        figure, (axis,) = _panels(_HEIGHT)
        _dots(axis, trials, metrics, _SERIES[0])
        axis.step(trials, best, where="post", color=_SERIES[1], label="best so far")
        axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
        axis.set_xlabel("trial")
        axis.set_ylabel(report.figure.name)
        axis.legend()
        yield "trace", "Best so far", figure
    settings = [one for one in report.settings if one.figure]
    names = list(dict.fromkeys(name for one in settings for name in one.values))
    names = [name for name in names if len({str(one.values.get(name)) for one in settings}) > 1]
    if names := names[:_MOST_PANELS]:
        yield "axes", "What each axis does", _effects(report, names)


def _effects(report: Report, names: Sequence[str]) -> Figure:
    """Draw the figure against each axis: every setting, and the median of each listed value."""
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = _panels(0.8 + 2.2 * rows, rows, columns)
    search = report.provenance["sweep file"].get("axes", {}) if report.search else {}
    for place, (name, axis) in enumerate(zip(names, panels, strict=False)):
        points = [(one.values.get(name), one.figure.value) for one in report.settings if one.figure]
        if not all(isinstance(value, (int, float)) for value, _ in points):
            points = [(str(value), height) for value, height in points]
        x, y = zip(*points, strict=True)
        _dots(axis, x, y, _SERIES[0])
        if not report.search:
            medians = {
                value: median(height for other, height in points if other == value) for value in x
            }
            axis.plot(list(medians), list(medians.values()), color=_SERIES[1], marker="_")
        if isinstance(search.get(name), dict) and search[name].get("log"):
            axis.set_xscale("log")
        axis.set_xlabel(axis_text(name))
        axis.set_ylabel("" if place % columns else report.figure.name)
    for axis in panels[len(names) :]:
        axis.set_visible(False)
    return figure
