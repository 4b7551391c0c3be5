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
from itertools import accumulate, compress, pairwise
from statistics import median
from typing import Any, Literal, TypeAlias

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)
from matplotlib.typing import ColorType

from hpml_orchestrator import assets
from hpml_orchestrator.document.templates import number
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, SweepFacts
from hpml_orchestrator.sweeps.selection import times_to
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Interval
from hpml_orchestrator.sweeps.wording import axis_text, scale_text, value_text

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
_DIAMOND: dict[str, Any] = {"marker": "D", "ms": 5, "mfc": _COLOURS["page"], "zorder": 3}
_WIDTH = 5.2  # inches: 374 pt, so that 9 pt can still be read on a phone
_MOST_VECTORS = 600
_MOST_BARS = 16
_MOST_TICKS = 9
_MOST_RATIOS = 16  # ticks of a logarithmic axis of ratios, so that their labels do not touch
_RUNS = "single runs"
_MOST_PANELS = 6
_MOST_LISTED = 5  # gaps between values that a small plot can label one by one

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
    kinds = (_speedups, _phases, _accuracies) if report.scaling else (_trace, _front, _axes)
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


def _dots(
    axis: Axes, x: Sequence[float], y: Sequence[float], colour: ColorType, label: str = ""
) -> None:
    """Draw all points; very many become one picture, so that the page stays small."""
    many = len(x) > _MOST_VECTORS
    size, name = 5 if many else 14, label or None
    axis.scatter(x, y, size, colour, alpha=0.7, linewidths=0, rasterized=many, label=name)


def _ratio_ticks(low: float, high: float, most: int) -> list[float]:
    """Return ticks of a logarithmic axis: as many round numbers as have room, coarse ones first."""
    octaves = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    finer = [part * 2**n for part in (1.5, 1.25, 1.75) for n in octaves if n >= 0]
    twentieths = [n / 20 for n in range(15, 26)]
    tenths = [0.8, 0.9, *(n / 10 for n in range(1, 13))]
    powers = [1.0, *(4.0**n for n in octaves), *(2.0**n for n in octaves)]
    ticks: list[float] = []
    for tick in [*powers, *finer[: len(octaves)], *tenths, *finer, *twentieths]:
        near = min((abs(math.log2(tick / other)) for other in ticks), default=math.inf)
        if low <= tick <= high and near >= math.log2(high / low) / most:
            ticks.append(tick)
    return sorted(ticks)


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
    label = f"speedup over {scale_text(report.baseline, report.unit)} (logarithmic)"
    for figure, axis in _over_scales(report, label, speedups):
        scales = sorted({one.scale for one in report.settings if one.scale})
        axis.plot(scales, [scale / (report.baseline or 1) for scale in scales], **_IDEAL)
        for fit, colour in zip(report.fits, _SERIES[3:], strict=False):
            if not fit.series:
                x, y = zip(*fit.speedups.items(), strict=True)
                axis.plot(x, y, ":", color=colour, label=f"{fit.model} (fit)")
        axis.set_yscale("log", base=2)
        ends = axis.get_ylim()
        axis.yaxis.set_major_locator(FixedLocator(_ratio_ticks(*ends, _MOST_RATIOS)))
        axis.yaxis.set_minor_locator(FixedLocator(_ratio_ticks(*ends, 4 * _MOST_RATIOS)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
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
    runs: dict[int, list[tuple[float, bool]]] = {}
    for one in report.settings:
        if one.target:
            rows = [start.row for start in report.attempts if start.setting == one.number]
            runs[one.number] = times_to(rows, one.target.accuracy)
    times = {
        one.number: (one.target.seconds, [time for time, met in runs[one.number] if met])
        for one in report.settings
        if one.target and math.isfinite(one.target.seconds.value)
    }
    name = report.accuracy_name
    for figure, _ in _over_scales(report, name, accuracies):
        yield "accuracy", name[:1].upper() + name[1:], figure
    for figure, axis in _over_scales(report, "seconds to the target accuracy", times):
        missed = [
            (1.05 * (one.scale or 1), time)
            for one in report.settings
            for time, met in runs.get(one.number, ())
            if not met
        ]
        if missed:
            label = "end of a run that missed it"
            x, y = zip(*missed, strict=True)
            axis.scatter(x, y, s=22, marker="x", c=_QUIET, label=label)
        axis.set_ylim(bottom=0)
        axis.legend()
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
            places, heights, colours = zip(*dots, strict=True)
            _dots(axis, places, heights, colours)
        ends = [one.interval or Interval(one.value, one.value, "") for one in medians]
        below = [value - end.low for value, end in zip(y, ends, strict=True)]
        is_open = [math.isinf(end.high) for end in ends]
        above = [
            0 if unlimited else end.high - value
            for value, end, unlimited in zip(y, ends, is_open, strict=True)
        ]
        top, arrow = axis.get_xaxis_transform(), {"arrowstyle": "->", "color": colour}
        for place, value in compress(zip(x, y, strict=True), is_open):
            axis.annotate(
                "", (place, 1), (place, value), xycoords=top, textcoords="data", arrowprops=arrow
            )
        name = f"{series}: median" if series else "median"
        name += ", 95 % CI" * any(one.interval for one in medians)
        name += " (arrow: open)" * any(is_open)
        axis.errorbar(x, y, [below, above], color=colour, label=name, **_DIAMOND)
        axis.scatter(x, y, s=25, marker="D", c=_COLOURS["page"], edgecolors=shades, zorder=4)
    if any(runs for _, runs in points.values()):
        _dots(axis, [], [], _SERIES[0] if len(report.series) == 1 else _QUIET, _RUNS)
    scales = sorted({one.scale for one in report.settings if one.scale})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(scales[:: math.ceil(len(scales) / _MOST_TICKS)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlim(scales[0] / 1.2, scales[-1] * 1.2)
    axis.set_xlabel(f"{report.unit.replace('gpus', 'GPUs')} (logarithmic)")
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
    axis.set_xlabel("seconds of the median run, without the queue")
    figure.legend(loc="outside lower center", ncols=4)
    yield "phases", "Where the time goes", figure


def _trace(report: SweepFacts) -> Iterable[_Drawn]:
    rows = [attempt.row for attempt in report.attempts if attempt.row.state == MEASURED]
    found = [(row.point, row.metric) for row in rows if row.metric is not None]
    if report.search and found and not report.objectives:
        trials, metrics = zip(*found, strict=True)
        best = list(accumulate(metrics, max if report.figure.maximize else min))
        figure = Figure()
        axis = figure.subplots()
        _dots(axis, trials, metrics, _SERIES[0], _RUNS)
        axis.step(trials, best, where="post", color=_SERIES[1], label="best so far")
        axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
        axis.set_xlabel("point, in the order of the plan")
        axis.set_ylabel(report.figure.name)
        axis.legend()
        yield "trace", "Best so far", figure


def _front(report: SweepFacts) -> Iterable[_Drawn]:
    """Draw the first figure against each other one, with a line through the front."""
    first, *others = report.objectives or [""]
    measured = [one.objectives for one in report.settings if one.objectives]
    front = [report.settings[number].objectives for number in report.front]
    for place, other in enumerate(others if measured else []):
        figure = Figure()
        axis = figure.subplots()
        _dots(
            axis,
            [one[other].value for one in measured],
            [one[first].value for one in measured],
            _SERIES[0],
            "medians" if any(one[first].n > 1 for one in measured) else _RUNS,
        )
        x, y = zip(*sorted((one[other].value, one[first].value) for one in front), strict=True)
        if len(others) == 1:  # what was reached with so much of the other: a step, not a line
            where: Literal["pre", "post"] = "pre" if report.objectives[other] else "post"
            axis.step(x, y, where=where, color=_SERIES[1], alpha=0.6)
        axis.scatter(x, y, 30, _SERIES[1], label="not dominated", zorder=3)
        for name, set_label in ((other, axis.set_xlabel), (first, axis.set_ylabel)):
            set_label(f"{name} ({'more' if report.objectives[name] else 'less'} is better)")
        axis.legend()
        yield f"pareto{place}", f"{first} against {other}", figure


def _axes(report: SweepFacts) -> Iterable[_Drawn]:
    """Draw the figure against each axis: every run, and the median of each listed value."""
    settings = [(one, one.figure.value) for one in report.settings if one.figure]
    names = list(dict.fromkeys(name for one, _ in settings for name in one.values))
    names = [name for name in names if len({str(one.values.get(name)) for one, _ in settings}) > 1]
    if not (names := names[:_MOST_PANELS]):
        return
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure((_WIDTH, 1.1 + 2.2 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    ranges = report.provenance["sweep file"].get("axes", {}) if report.search else {}
    for place, (name, axis) in enumerate(zip(names, panels, strict=False)):
        axis.set_ylabel("" if place % columns else report.figure.name)
        having = [pair for pair in settings if name in pair[0].values]  # else it does not apply
        x = _placed(axis, name, [one.values[name] for one, _ in having], ranges.get(name))
        runs = [
            (at, run)
            for at, (one, _) in zip(x, having, strict=True)
            for run in one.samples["figure"]
        ]
        places, heights = zip(*runs, strict=True)
        _dots(axis, places, heights, _SERIES[0], _RUNS)
        if not report.search and len(set(Counter(x).values())) == 1:  # no combination is missing
            values = sorted(set(x))
            medians = [median(run for at, run in runs if at == value) for value in values]
            label = "median of all runs with the value"
            axis.plot(values, medians, color=_SERIES[1], marker="_", label=label)
        elif len(runs) > len(having):
            figures = [value for _, value in having]
            axis.scatter(x, figures, s=60, marker="_", c=_SERIES[1], label="median")
    for axis in panels[len(names) :]:
        axis.set_visible(False)
    handles = [panel.get_legend_handles_labels() for panel in panels]
    legend = {label: handle for pair in handles for handle, label in zip(*pair, strict=True)}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2)
    yield "axes", f"{report.figure.name} by axis", figure


def _placed(axis: Axes, name: str, values: Sequence[Any], declared: object) -> list[float]:
    """Return where the values of a sweep's axis are drawn; the plot's axis gets scale and ticks."""
    numeric = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)
    known = sorted(set(values)) if numeric else list(dict.fromkeys(values))
    logarithmic = numeric and _is_logarithmic(known, declared)
    if not numeric or (logarithmic and known[0] <= 0):  # 0 has no logarithm: evenly spaced then
        axis.set_xlabel(axis_text(name))
        axis.set_xticks(range(len(known)), [value_text(one) for one in known])
        return [float(known.index(one)) for one in values]
    axis.set_xlabel(axis_text(name) + " (logarithmic)" * logarithmic)
    if logarithmic:
        axis.set_xscale("log")
    logs = [math.log(one) if logarithmic else one for one in known]
    if min((b - a for a, b in pairwise(logs)), default=0) * _MOST_LISTED >= logs[-1] - logs[0]:
        axis.xaxis.set_major_locator(FixedLocator(known))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    return [float(one) for one in values]


def _is_logarithmic(known: Sequence[float], declared: object) -> bool:
    """Return whether sorted values belong on a logarithmic axis: over a decade, or geometric."""
    if isinstance(declared, dict) and declared.get("log"):
        return True
    positive = [one for one in known if one > 0]
    ratios = [high / low for low, high in pairwise(positive)]
    geometric = len(ratios) > 1 and max(ratios) < 1.01 * min(ratios)
    return geometric or math.prod(ratios) > 9.99  # noqa: PLR2004 - a decade, up to rounding
