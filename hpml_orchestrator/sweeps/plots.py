"""Draw a report's plots as SVG text whose colours follow the page, light or dark.

Text stays text, so it has the page's font and can be found and read aloud. Every colour is a CSS
variable with the light colour as its default, so that a plot also looks right in a separate file.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any, TypeAlias

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter
from matplotlib.typing import ColorType

from hpml_orchestrator import assets
from hpml_orchestrator.diagnosis.templates import number
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, SweepFacts
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Interval
from hpml_orchestrator.sweeps.wording import axis_text, scale_text

_FOLDER = assets.path("templates/report")
_LIGHT = (_FOLDER / "style.css").read_text("utf-8").partition("@media")[0]
_COLOURS = dict(re.findall(r"--(\w+): (#\w{6});", _LIGHT))
_QUIET = _COLOURS["quiet"]
_SERIES = [_COLOURS[f"c{place}"] for place in range(1, len(PARTS) + 1)]
_OF_PARTS = [_SERIES[place - 1] for place in (2, 4, 5, 11, 7, 1, 6, 3, 8, 9, 10)]
_RC = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _QUIET),
    **dict.fromkeys(("text.color", "axes.labelcolor"), _COLOURS["ink"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _COLOURS["ink"]),
    "grid.color": _COLOURS["line"],
}
_IDEAL: dict[str, Any] = {"color": _QUIET, "linestyle": "--", "linewidth": 1, "label": "ideal"}
_WIDTH = 5.2  # inches: 374 pt, so that 9 pt can still be read on a phone
_MOST_VECTORS = 600
_MOST_BARS = 16
_MOST_TICKS = 9
_MOST_PANELS = 6

_Drawn: TypeAlias = tuple[str, str, Figure]  # name and title
_Points: TypeAlias = Mapping[int, tuple[Estimate, Sequence[float]]]  # median and runs, by setting


@dataclass(frozen=True)
class Plot:
    """A plot as an SVG element that can be put next to others in a page."""

    name: str
    title: str
    svg: str


def draw(report: SweepFacts) -> list[Plot]:
    """Return the plots that the data of a report allow, in the order of the page."""
    kinds = (_speedups, _phases, _accuracies) if report.scaling else (_trace, _axes)
    with style.context([_FOLDER / "plots.mplstyle", _RC]):
        return [_plot(*drawn) for kind in kinds for drawn in kind(report)]


def _plot(name: str, title: str, figure: Figure) -> Plot:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
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


def _dots(axis: Axes, x: Sequence[float], y: Sequence[float], colour: ColorType) -> None:
    """Draw all points; very many become one picture, so that the page stays small."""
    many = len(x) > _MOST_VECTORS
    axis.scatter(x, y, s=5 if many else 12, c=colour, alpha=0.45, linewidths=0, rasterized=many)


def _speedups(report: SweepFacts) -> Iterable[_Drawn]:
    """Draw speedup and efficiency over the scales, with the ideal and the fits."""
    power = 1 if report.figure.maximize else -1
    bases = {one.series: one for one in report.settings if one.scale == report.baseline}
    speedups: dict[int, tuple[Estimate, list[float]]] = {}
    shares: dict[int, tuple[Estimate, list[float]]] = {}
    for one in report.settings:
        base = bases.get(one.series)
        if one.speedup and base and base.figure:
            runs = [(run / base.figure.value) ** power for run in one.samples["figure"]]
            both = one.blocks.keys() & base.blocks.keys()
            if one is not base and len(both) >= MIN_REPEATS:  # as the speedup itself
                runs = [(one.blocks[n] / base.blocks[n]) ** power for n in sorted(both)]
            speedups[one.number] = one.speedup, runs
            shares[one.number] = one.speedup.efficiency, [run / one.speedup.scale for run in runs]
    label = f"speedup over {scale_text(report.baseline, report.unit)}"
    for figure, axis in _over_scales(report, label, speedups):
        scales = sorted({one.scale for one in report.settings if one.scale})
        axis.plot(scales, [scale / (report.baseline or 1) for scale in scales], **_IDEAL)
        for fit, colour in zip(report.fits, _SERIES[3:], strict=False):
            if not fit.series:
                x, y = zip(*fit.speedups.items(), strict=True)
                axis.plot(x, y, ":", color=colour, label=f"{fit.model} (fit)")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend()
        yield "speedup", "Speedup", figure
    for figure, axis in _over_scales(report, "parallel efficiency", shares):
        axis.axhline(1, **_IDEAL)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.legend()
        yield "efficiency", "Parallel efficiency", figure


def _accuracies(report: SweepFacts) -> Iterable[_Drawn]:
    accuracies = {
        one.number: (one.accuracy, one.samples["accuracy"])
        for one in report.settings
        if one.accuracy
    }
    times = {
        one.number: (one.target.seconds, ())
        for one in report.settings
        if one.target and math.isfinite(one.target.seconds.value)
    }
    name = report.accuracy_name
    for figure, _ in _over_scales(report, name, accuracies):
        yield "accuracy", name[:1].upper() + name[1:], figure
    for figure, axis in _over_scales(report, "seconds to the target accuracy", times):
        axis.set_ylim(bottom=0)
        yield "target", "Time to accuracy", figure


def _over_scales(report: SweepFacts, label: str, points: _Points) -> Iterable[tuple[Figure, Axes]]:
    """Yield a plot of runs and medians with intervals over the scales; one point needs none.

    Each series has a colour; settings with more ranks than cores are grey.
    """
    if len(points) <= 1:
        return
    figure = Figure()
    axis = figure.subplots()
    for (series, settings), colour in zip(report.series.items(), _SERIES, strict=False):
        drawn = [one for one in settings if one.number in points]
        shades = [_QUIET if one.oversubscribed else colour for one in drawn]
        medians = [points[one.number][0] for one in drawn]
        x, y = [one.scale or 1 for one in drawn], [one.value for one in medians]
        dots = [  # next to the median, which would hide them
            (1.05 * (one.scale or 1), run, shade)
            for one, shade in zip(drawn, shades, strict=True)
            for run in points[one.number][1]
        ]
        if dots:
            _dots(axis, *zip(*dots, strict=True))
        ends = [one.interval or Interval(one.value, one.value, "") for one in medians]
        below = [value - end.low for value, end in zip(y, ends, strict=True)]
        above = [  # an open end has none
            end.high - value if math.isfinite(end.high) else 0
            for value, end in zip(y, ends, strict=True)
        ]
        name = (series or "median") + ", 95 % CI" * any(one.interval for one in medians)
        axis.errorbar(x, y, [below, above], color=colour, label=name)
        axis.scatter(x, y, s=25, marker="D", c=_COLOURS["page"], edgecolors=shades, zorder=4)
    scales = sorted({one.scale for one in report.settings if one.scale})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(scales[:: math.ceil(len(scales) / _MOST_TICKS)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlim(scales[0] / 1.2, scales[-1] * 1.2)
    axis.set_xlabel(report.unit.replace("gpus", "GPUs"))
    axis.set_ylabel(label)
    axis.legend()
    yield figure, axis


def _phases(report: SweepFacts) -> Iterable[_Drawn]:
    settings = [one for one in report.settings if one.phases][:_MOST_BARS]
    if not settings:
        return
    figure = Figure((_WIDTH, 1.4 + 0.34 * len(settings)))
    axis = figure.subplots()
    places, left = range(len(settings)), [0.0] * len(settings)
    for part, colour in zip(PARTS, _OF_PARTS, strict=True):
        widths = [one.phases.get(part, 0.0) for one in settings]
        if any(widths):
            bars = axis.barh(places, widths, 0.62, left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.bar_label(bars, [f"{number(end)} s" for end in left], padding=4)
    axis.set_yticks(places, [one.label for one in settings])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.14)
    axis.set_xlabel("mean seconds of a run, without the queue")
    figure.legend(loc="outside lower center", ncols=4)
    yield "phases", "Where the time goes", figure


def _trace(report: SweepFacts) -> Iterable[_Drawn]:
    rows = [attempt.row for attempt in report.attempts if attempt.row.state == MEASURED]
    found = [(row.point, row.metric) for row in rows if row.metric is not None]
    if report.search and found:
        trials, metrics = zip(*found, strict=True)
        best = list(accumulate(metrics, max if report.figure.maximize else min))
        figure = Figure()
        axis = figure.subplots()
        _dots(axis, trials, metrics, _SERIES[0])
        axis.step(trials, best, where="post", color=_SERIES[1], label="best so far")
        axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
        axis.set_xlabel("point, in the order of the plan")
        axis.set_ylabel(report.figure.name)
        axis.legend()
        yield "trace", "Best so far", figure


def _axes(report: SweepFacts) -> Iterable[_Drawn]:
    """Draw the figure against each axis: every setting, and the median of each listed value."""
    settings = [one for one in report.settings if one.figure]
    names = list(dict.fromkeys(name for one in settings for name in one.values))
    names = [name for name in names if len({str(one.values.get(name)) for one in settings}) > 1]
    if not (names := names[:_MOST_PANELS]):
        return
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure((_WIDTH, 0.8 + 2.2 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    ranges = report.provenance["sweep file"].get("axes", {}) if report.search else {}
    for place, (name, axis) in enumerate(zip(names, panels, strict=False)):
        points = [(one.values.get(name), one.figure.value) for one in settings if one.figure]
        if all(isinstance(value, (int, float)) for value, _ in points):
            points.sort()  # the plan is in a random order, and the line goes from point to point
        else:
            points = [(str(value), height) for value, height in points]
        x, y = zip(*points, strict=True)
        _dots(axis, x, y, _SERIES[0])
        if not report.search and len(set(Counter(x).values())) == 1:  # no combination is missing
            medians = {
                value: median(height for other, height in points if other == value) for value in x
            }
            axis.plot(list(medians), list(medians.values()), color=_SERIES[1], marker="_")
        if isinstance(ranges.get(name), dict) and ranges[name].get("log"):
            axis.set_xscale("log")
        axis.set_xlabel(axis_text(name))
        axis.set_ylabel("" if place % columns else report.figure.name)
    for axis in panels[len(names) :]:
        axis.set_visible(False)
    yield "axes", f"{report.figure.name} by axis", figure
