"""Fit the models of scaling to the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterable

from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import FittedModel, SweepFacts
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS
from hpml_orchestrator.sweeps.wording import scale_text

_SCALES_OF_A_LAW = 3  # fewest that Amdahl's or Gustafson's law is fitted to
_SCALES_OF_USL = 5
_LACK_OF_FIT = 0.05  # highest p-value of a curve that does not fit


def fits_of(report: SweepFacts) -> Iterable[FittedModel]:
    """Fit the laws of scaling to each series with speedups at three scales or more, USL at five."""
    strong = report.mode == "strong"
    for series, settings in report.series.items():
        compared = {
            one.scale: one
            for one in settings
            if one.speedup and one.scale and not one.oversubscribed
        }
        if len(compared) < _SCALES_OF_A_LAW or not report.baseline:
            continue
        unit = min(compared)
        units = [scale / unit for scale, one in compared.items() for _ in one.samples["figure"]]
        values = [value for one in compared.values() for value in one.samples["figure"]]
        repeats = [repeat for one in compared.values() for repeat in one.blocks]
        rates = [1 / value for value in values] if strong else values
        notes = [f"scales count in units of {scale_text(unit, report.unit)}"] * (unit > 1)
        if strong:
            fits = {"Amdahl": statistics.fit_amdahl(units, values, repeats)}
        else:
            fits = {"Gustafson": statistics.fit_gustafson(units, rates, repeats)}
        if len(compared) >= _SCALES_OF_USL:
            fits["Universal Scalability Law"] = statistics.fit_usl(units, rates, repeats)
        for name, fit in fits.items():
            base = fit.predict(report.baseline / unit)
            power = -1 if name == "Amdahl" else 1  # Amdahl's law gives seconds, the others rates
            yield FittedModel(
                model=name,
                formula=fit.formula,
                series=series,
                parameters=fit.parameters,
                residual=fit.residual,
                lack_of_fit=fit.lack_of_fit,
                speedups={scale: (fit.predict(scale / unit) / base) ** power for scale in compared},
                note="; ".join([*notes, *_peak(fit, unit, report.unit), *_limits(fit)]),
            )


def _peak(fit: statistics.Fit, unit: int, noun: str) -> Iterable[str]:
    if "b" in fit.parameters:
        peak = statistics.usl_peak(fit.parameters["a"].value, fit.parameters["b"].value)
        limit = 2 * fit.largest_scale
        if peak <= limit:
            yield f"highest throughput at about {unit * peak:.0f} {noun}"
        else:
            yield f"no peak up to {unit * limit:.0f} {noun}, twice the largest measured scale"


def _limits(fit: statistics.Fit) -> Iterable[str]:
    if not all(one.interval for one in fit.parameters.values()):
        yield f"no 95 % CI: that takes {MIN_REPEATS} repeats"
    if fit.outliers:
        yield f"without weight: {fit.outliers} of {fit.n} runs, far outside of the scatter"
    if fit.lack_of_fit is None:
        yield "whether it fits is not known: that takes repeats, and more scales than parameters"
    elif fit.lack_of_fit < _LACK_OF_FIT:
        yield "does not fit: it misses the scales by more than the runs scatter, do not build on it"
