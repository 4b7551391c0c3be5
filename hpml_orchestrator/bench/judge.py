"""Compare measurements of nodes with specification, own history and siblings; name outliers.

The rules: a figure that is more than 5 % below the median of its siblings, or of the node's own
history, is an outlier, but only if that distance is larger than the figure's own scatter and than
that of what it is compared with. A figure below half of the GPU's specification is one as well.
Nothing is compared with uncertain figures, nor with runs of which most figures are uncertain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpml_orchestrator.bench.results import Measurement, Rate
from hpml_orchestrator.diagnosis.devices import specification

BELOW = 0.05
"""An outlier is further below than this; AMD's node check and ml-engineering use 5 % as well."""

UNCERTAIN = 0.03
"""Repeats that scatter by more than this do not repeat well enough for a verdict."""

BUSY = 0.1
"""Share of a node's CPUs from which on other processes make its CPUs and memory slower."""

_OVERLOADED = 0.5  # share of the CPUs: less time is left than the time limits of parts allow for
_OF_SPECIFICATION = 0.5  # good matrix products reach 0.75 to 0.9, quick ones 0.6
_FEW = 3  # values: too few to leave out the extremes
_LEAST_RUNS = 3  # the median of fewer is one of the extremes, which may be a lucky run


@dataclass(frozen=True)
class Reference:
    """What a figure is compared with."""

    kind: str  # `siblings`, `history` or `specification`
    value: float
    count: int = 1  # how many values it is the median of
    spread: float = 0.0  # of those values


@dataclass(frozen=True)
class FigureComparison:
    """One figure of one node, with its references."""

    node: str
    name: str
    figure: Rate
    references: Sequence[Reference] = ()
    outlier: str = ""  # the kind of reference that it is below
    uncertain: bool = False  # its repeats scatter too much for a verdict, or others disturbed it

    def reference(self, kind: str) -> Reference | None:
        """Return the reference of that kind, if there is one."""
        return next((one for one in self.references if one.kind == kind), None)


@dataclass(frozen=True)
class BenchVerdict:
    """What was found: every figure, and the findings as sentences."""

    figures: Sequence[FigureComparison] = ()
    outliers: Sequence[FigureComparison] = ()
    failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # node -> part -> reason
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def uncertain(self, node: str) -> tuple[int, int]:
        """Return how many figures of a node are uncertain, and how many it has."""
        own = [one.uncertain for one in self.figures if one.node == node]
        return sum(own), len(own)

    def alone(self, node: str) -> int:
        """Return how many certain figures of a node have no reference yet."""
        return sum(
            not one.uncertain and not one.references for one in self.figures if one.node == node
        )

    def is_unclear(self, node: str) -> bool:
        """Return whether no figure of a node could be judged."""
        uncertain, figures = self.uncertain(node)
        return uncertain + self.alone(node) == figures

    @property
    def normal(self) -> bool:
        """Whether no node is an outlier and no part of one failed."""
        return not self.outliers and not self.failed


def judge(measured: Sequence[Measurement], stored: Sequence[Measurement]) -> BenchVerdict:
    """Return the verdict on the nodes of one run.

    Args:
        measured: by this run.
        stored: by earlier runs, oldest first; measurements of this run do not count twice.
    """
    figures = compare(measured, stored)
    outliers = [one for one in figures if one.outlier]
    failed: dict[str, dict[str, str]] = {}
    left_out: dict[str, dict[str, str]] = {}
    for made in measured:
        for part, missing in made.missing.items():
            is_fault = missing.failed and not _has_no_cpus(made, part)
            (failed if is_fault else left_out).setdefault(made.node, {})[part] = missing.reason
    return BenchVerdict(figures, outliers, failed, left_out)


def compare(
    measured: Sequence[Measurement], stored: Sequence[Measurement]
) -> list[FigureComparison]:
    """Return each figure of each node with its specification, own history and siblings."""
    runs = {made.run for made in measured}
    earlier = [_certain(made) for made in stored if made.run not in runs]
    # Each sibling counts once, with its newest result; a node that is measured often would
    # otherwise be the median.
    newest = {made.node: made for made in [*earlier, *map(_certain, measured)]}
    found = []
    for made in measured:
        siblings = [other for other in newest.values() if other.node != made.node]
        history = [other for other in earlier if other.node == made.node]
        for name, figure in made.figures.items():
            references = [
                *_siblings(made, name, siblings),
                *_history(made, name, history),
                *_specification(made, name),
            ]
            uncertain = _is_uncertain(made, name)
            outlier = "" if uncertain else _below(figure, references)
            found.append(FigureComparison(made.node, name, figure, references, outlier, uncertain))
    return found


def _is_uncertain(made: Measurement, name: str) -> bool:
    return made.figures[name].spread > UNCERTAIN or (made.load > BUSY and _of_cpus(made, name))


def _certain(made: Measurement) -> Measurement:
    """Return a measurement with the figures that others may be compared with."""
    kept = {n: one for n, one in made.figures.items() if not _is_uncertain(made, n)}
    return replace(made, figures=kept if 2 * len(kept) >= len(made.figures) else {})


def _below(figure: Rate, references: Sequence[Reference]) -> str:
    for reference in references:
        distance = 1 - figure.value / reference.value
        least = BELOW
        if reference.kind == "specification":
            least = 1 - _OF_SPECIFICATION
        if distance > max(least, figure.spread + reference.spread):
            return reference.kind
    return ""


def _has_no_cpus(made: Measurement, part: str) -> bool:
    """Return whether a CPU-only part is late because other processes use the CPUs."""
    late = made.missing[part].reason.startswith("no answer ")
    figure = f"{part}.allreduce" if part in ("node", "nodes") else f"{part}."
    return late and made.load > _OVERLOADED and _of_cpus(made, figure)


def _of_cpus(made: Measurement, name: str) -> bool:
    on_cpus = name.endswith(".allreduce") and not made.gpus
    return on_cpus or name.startswith(("cpu.", "host.", "shm."))


def _siblings(made: Measurement, name: str, others: Sequence[Measurement]) -> Iterator[Reference]:
    part, _, rest = name.partition(".")
    values = []
    if _number(part) is not None:  # the other GPUs of this node
        values += _same(made, made, rest, but=name)
    elif part == "host":
        values += [
            one.value
            for other, one in made.figures.items()
            if other.startswith("host.") and other != name
        ]
    for other in others:
        if other.type != made.type or not _same_conditions(made, other, name):
            continue
        if name == "nodes.allreduce":
            continue  # it belongs to several nodes: history has it
        if _number(part) is not None:
            values += _same(made, other, rest)
        elif name in other.figures and other.figures[name].ranks == made.figures[name].ranks:
            values.append(other.figures[name].value)
    if values:
        yield _reference("siblings", values)


def _same(made: Measurement, other: Measurement, rest: str, but: str = "") -> list[float]:
    kinds = {gpu.name for gpu in made.gpus}
    found = []
    for index, gpu in enumerate(other.gpus):
        figure = other.figures.get(name := f"gpu{index}.{rest}")
        if figure is not None and name != but and gpu.name in kinds:
            found.append(figure.value)
    return found


def _history(made: Measurement, name: str, earlier: Sequence[Measurement]) -> Iterator[Reference]:
    index = _number(name.partition(".")[0])
    values = []
    for other in earlier:
        figure = other.figures.get(name)
        if figure is None or figure.ranks != made.figures[name].ranks:
            continue
        if index is not None and other.gpus[index] != made.gpus[index]:
            continue  # it was replaced
        if other.type == made.type and _same_conditions(made, other, name):
            values.append(figure.value)
    if len(values) >= _LEAST_RUNS:
        yield _reference("history", values)


def _specification(made: Measurement, name: str) -> Iterator[Reference]:
    part, _, rest = name.partition(".")
    index = _number(part)
    peaks = specification(made.gpus[index].name) if index is not None else None
    if peaks is None:
        return
    value = {"memory": peaks.memory_bandwidth, "host_to_device": peaks.host_to_device}.get(rest)
    value = value or peaks.flops.get(rest.removeprefix("matmul."))
    if value:
        yield Reference("specification", value)


def _same_conditions(made: Measurement, other: Measurement, name: str) -> bool:
    if made.cpus != other.cpus:
        return False
    uses_torch = "matmul" in name or "allreduce" in name
    return made.torch == other.torch or not uses_torch


def _number(part: str) -> int | None:
    """Return the index of `gpu3`; None for other parts."""
    index = part.removeprefix("gpu")
    return int(index) if part.startswith("gpu") and index.isdecimal() else None


def _reference(kind: str, values: Sequence[float]) -> Reference:
    ordered, median = sorted(values), statistics.median(values)
    # One slow sibling would widen the spread of the reference so far that no outlier could be
    # named, itself included. So the extremes do not count.
    middle = ordered[1:-1] if len(ordered) > _FEW else ordered
    return Reference(kind, median, len(values), (middle[-1] - middle[0]) / 2 / median)
