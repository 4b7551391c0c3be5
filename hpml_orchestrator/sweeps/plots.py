"""Draw a report's plots as SVG text whose colours follow the page, light or dark.

Text stays text, so it has the page's font and can be found and read aloud. Every colour is a CSS
variable with the light colour as its default: a plot also looks right in a file of its own.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.texts import examples
from hpml_orchestrator.sweeps.claims import number, scale_text
from hpml_orchestrator.sweeps.facts import MEASURED, PARTS, Report, Setting
from hpml_orchestrator.sweeps.statistics import Estimate

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

_SERIES = [COLOURS[f"c{number}"] for number in range(1, 7)]
_PARTS = dict(zip(("steps", "staging", "data wait", "start-up", "warm-up", "rendezvous", "evaluation",
                   "checkpoint", "end", "not divided"), [COLOURS[f"c{n}"] for n in range(1, 11)], strict=True))
_STYLE = {
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


@dataclass(frozen=True)
class Plot:
    """A plot: what it shows, the same in words, and the SVG element."""

    name: str
    title: str
    description: str
    svg: str


def draw(report: Report) -> list[Plot]:
    """Return the plots that the data of a report allow, in the order of the page."""
    plots = []
    with rc_context(_STYLE):
        if report.scaling:
            plots = [_speedup(report), _efficiency(report), _phases(report), *_accuracy(report)]
        else:
            plots = [_trace(report), _axes(report)]
    return [plot for plot in plots if plot]


def _plot(name: str, title: str, description: str, figure: Figure) -> Plot:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=144)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", svg)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    label = escape(f"{title}. {description}")
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ([^>]*?)height="[^"]*"', r"<svg \1\2", svg, count=1)
    svg = re.sub(r'height="[\d.]+pt" |width="[\d.]+pt" ', "", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return Plot(name, title, description, svg.strip())


def _figure(height: float = _HEIGHT, panels: tuple[int, int] = (1, 1)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(*panels, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def _series(report: Report) -> Iterable[tuple[str, str, list[Setting]]]:
    """Yield the name, colour and measured settings of the series, as many as have a colour."""
    for (name, settings), colour in zip(report.series.items(), _SERIES, strict=False):
        yield name, colour, [one for one in settings if one.seconds]


def _dots(axis: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Draw all points; very many become one picture, so that the page stays small."""
    many = len(x) > _MOST_VECTORS
    axis.scatter(
        x, y, s=6 if many else 12, color=colour, alpha=0.45, linewidths=0, rasterized=many, zorder=2
    )


def _bars(axis: Axes, x: Sequence[float], estimates: Sequence[Estimate], colour: str, label: str) -> None:
    """Draw medians with their intervals."""
    middles = [one.value for one in estimates]
    ends = [one.interval for one in estimates]
    down = [one.value - end.low if end else 0 for one, end in zip(estimates, ends, strict=True)]
    up = [end.high - one.value if end else 0 for one, end in zip(estimates, ends, strict=True)]
    axis.errorbar(x, middles, yerr=[down, up], color=colour, marker="o", capsize=3, label=label, zorder=3)


def _scale_axis(axis: Axes, report: Report, *, logarithmic: bool = True) -> list[int]:
    """Label the horizontal axis with the scales, and return them."""
    scales = sorted({one.scale for one in report.settings if one.scale})
    if logarithmic:
        axis.set_xscale("log", base=2)
    shown = scales[:: math.ceil(len(scales) / _MOST_TICKS)]
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axis.set_xlabel(report.unit.replace("gpus", "GPUs"))
    return scales


def _speedup(report: Report) -> Plot | None:
    compared = [one for one in report.settings if one.speedup]
    if len(compared) < 2 or not report.baseline:  # noqa: PLR2004 - a baseline and another
        return None
    figure, (axis,) = _figure()
    base = report.baseline
    scales = _scale_axis(axis, report)
    axis.set_yscale("log", base=2)
    ideal = [scale / base for scale in scales]
    axis.plot(scales, ideal, color=COLOURS["quiet"], linestyle=(0, (4, 3)), linewidth=1, label="ideal")
    for name, colour, settings in _series(report):
        known = [one for one in settings if one.speedup and one.scale]
        x = [one.scale for one in known for _ in one.relative]
        _dots(axis, x, [value for one in known for value in one.relative], colour)
        medians = [Estimate(one.speedup.value, one.runs, one.speedup.interval) for one in known]
        _bars(axis, [one.scale for one in known], medians, colour, name or "measured")
    for fit in report.fits[:2]:
        x = [scale * base for scale in fit.scales]
        axis.plot(x, fit.speedups, color=COLOURS["c4"], linewidth=1, linestyle=":", label=fit.model)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_ylabel(f"speedup over {scale_text(base, report.unit)}")
    axis.legend(loc="upper left")
    words = ", ".join(f"{one.label} {number(one.speedup.value)}" for one in compared[:8] if one.speedup)
    return _plot("speedup", "Speedup", f"Every run, medians with 95 % CI, and the ideal line: {words}", figure)


def _efficiency(report: Report) -> Plot | None:
    compared = [one for one in report.settings if one.speedup]
    if len(compared) < 2:  # noqa: PLR2004 - a baseline and another
        return None
    figure, (axis,) = _figure()
    _scale_axis(axis, report)
    axis.axhline(100, color=COLOURS["quiet"], linestyle=(0, (4, 3)), linewidth=1)
    for name, colour, settings in _series(report):
        known = [one for one in settings if one.speedup and one.scale]
        shares = [
            Estimate(100 * one.speedup.efficiency, one.runs,
                     one.speedup.efficiency_interval and one.speedup.efficiency_interval.scaled(100))
            for one in known
        ]
        x = [one.scale for one in known for _ in one.relative]
        y = [100 * value / one.speedup.scale for one in known for value in one.relative]
        _dots(axis, x, y, colour)
        _bars(axis, [one.scale for one in known], shares, colour, name or "measured")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("parallel efficiency, %")
    if len(report.series) > 1:
        axis.legend(loc="lower left")
    words = ", ".join(f"{one.label} {100 * one.speedup.efficiency:.0f} %" for one in compared[:8] if one.speedup)
    return _plot("efficiency", "Parallel efficiency", f"Every run and medians with 95 % CI: {words}", figure)


def _phases(report: Report) -> Plot | None:
    settings = [one for one in report.settings if one.phases][:_MOST_BARS]
    if not settings:
        return None
    figure, (axis,) = _figure(1.5 + 0.36 * len(settings))
    places = range(len(settings))
    left = [0.0] * len(settings)
    for part in PARTS:
        widths = [one.phases.get(part, 0.0) for one in settings]
        if any(widths):
            axis.barh(places, widths, left=left, height=0.62, color=_PARTS[part], label=part,
                      edgecolor=COLOURS["page"], linewidth=0.6)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axis.annotate(f"{number(end)} s", (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_yticks(places, [one.label for one in settings])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.12)
    axis.set_xlabel("mean seconds per run, without the queue")
    figure.legend(loc="outside lower center", ncols=4)
    words = "; ".join(
        f"{one.label}: " + ", ".join(f"{part} {number(seconds)} s" for part, seconds in one.phases.items())
        for one in settings[:4]
    )
    return _plot("phases", "Where the time goes", f"Mean seconds by phase. {words}", figure)


def _accuracy(report: Report) -> Iterable[Plot]:
    known = [one for one in report.settings if one.accuracy and one.scale]
    if known:
        figure, (axis,) = _figure(3.0)
        _scale_axis(axis, report)
        for name, colour, settings in _series(report):
            chosen = [one for one in settings if one.accuracy]
            points = [(one.scale, attempt.row.accuracy) for one in chosen for attempt in report.attempts
                      if attempt.setting == one.number and attempt.row.state == MEASURED and attempt.row.accuracy]
            _dots(axis, [x for x, _ in points], [y for _, y in points], colour)
            _bars(axis, [one.scale for one in chosen], [one.accuracy for one in chosen], colour, name)
        axis.set_ylabel("test accuracy")
        words = ", ".join(f"{one.label} {number(one.accuracy.value)}" for one in known[:8] if one.accuracy)
        yield _plot("accuracy", "Test accuracy", f"Every run and medians with 95 % CI: {words}", figure)
    timed = [one for one in report.settings if one.target and one.target.seconds and one.scale]
    if timed:
        figure, (axis,) = _figure(3.0)
        _scale_axis(axis, report)
        for name, colour, settings in _series(report):
            chosen = [one for one in settings if one in timed]
            _bars(axis, [one.scale for one in chosen], [_time(one) for one in chosen], colour, name)
        for one in timed:
            text = f"{one.target.reached}/{one.target.runs}"
            axis.annotate(text, (one.scale, one.target.seconds), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("seconds to the target accuracy")
        words = ", ".join(f"{one.label} {number(one.target.seconds)} s" for one in timed[:8] if one.target)
        yield _plot("target", "Time to accuracy", f"Medians with 95 % CI, and how many runs reached it: {words}", figure)
