"""Present the results of `hpml bench`: a table of figures, the findings, and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpml_orchestrator.bench.results import BUSY, Measurement, fits
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import rate_text

if TYPE_CHECKING:
    from hpml_orchestrator.bench.results import BenchVerdict, FigureComparison

HEADER = (
    "figure",
    "median",
    "lowest",
    "where",
    "spread",
    "siblings",
    "history",
    "specification",
)

_LABELS = (
    (r"gpu\d+\.matmul\.(\w+)", r"GPU matmul \1"),
    (r"gpu\d+\.memory", "GPU memory"),
    (r"gpu\d+\.host_to_device", "host to GPU, bound domain"),
    (r"gpu\d+\.host_to_device_remote", "host to GPU, remote domain"),
    (r"node\.allreduce", "all-reduce inside the node"),
    (r"nodes\.allreduce", "all-reduce between nodes"),
    (r"host\.memory\.domain\d+", "memory of a NUMA domain"),
    (r"shm\.(\w+)", r"/dev/shm \1"),  # noqa: S108 - RAM is the point
    (r"disk\.write", "local disk write, fsynced"),
    (r"disk\.read", "local disk read"),
    (r"shared\.write", "shared file system write"),
    (r"shared\.read", "shared file system read"),
    (r"shared\.opens", "shared file system opens"),
    (r"cpu\.matmul\.(\w+)", r"CPU matmul \1"),
)
_REFERENCES = ("siblings", "history", "specification")


def _label(name: str) -> str:
    return _ordered_label(name)[1]


def _ordered_label(name: str) -> tuple[int, str]:
    for place, (pattern, words) in enumerate(_LABELS):
        if match := re.fullmatch(pattern, name):
            return place, match.expand(words)
    return len(_LABELS), name


def _place(compared: FigureComparison) -> str:
    part, *_, last = compared.name.split(".")
    device = part if part[-1:].isdecimal() else last if last[-1:].isdecimal() else ""
    is_device = re.fullmatch(r"(gpu|domain)\d+", device)
    return f"{compared.node} {device}" if is_device else compared.node


def rows(verdict: BenchVerdict) -> list[tuple[str, ...]]:
    """Return a row for each kind of figure: the median and the lowest over nodes and GPUs.

    Spread and references belong to the lowest one.
    """
    kinds: dict[tuple[int, str], list[FigureComparison]] = {}
    for one in verdict.figures:
        kinds.setdefault(_ordered_label(one.name), []).append(one)
    made = []
    for place, label in sorted(kinds):
        several = sorted(kinds[place, label], key=lambda one: one.figure.value)
        lowest, middle = several[0], several[len(several) // 2]
        spread = f"{lowest.figure.spread:.1%}" + ("?" if lowest.uncertain else "")
        made.append(
            (
                label,
                rate_text(middle.figure.value, middle.figure.unit),
                rate_text(lowest.figure.value, lowest.figure.unit) if len(several) > 1 else "",
                _place(lowest) if len(several) > 1 else "",
                spread,
                *(_against(lowest, kind) for kind in _REFERENCES),
            )
        )
    return made


def _against(compared: FigureComparison, kind: str) -> str:
    reference = compared.reference(kind)
    if reference is None:
        return ""
    if kind == "specification":
        return f"{compared.figure.value / reference.value:.0%}"
    return f"{compared.figure.value / reference.value - 1:+.1%} of {reference.count}"


def findings(
    measured: Sequence[Measurement], verdict: BenchVerdict, lost: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a line for each node, then one for each problem.

    Args:
        measured: measurements of this run.
        verdict: the verdict on them.
        lost: nodes without a result.
    """
    width = max((len(name) for name in [*(one.node for one in measured), *lost]), default=0)
    for made in measured:
        below = [one for one in verdict.outliers if one.node == made.node]
        failed = verdict.failed.get(made.node, {})
        wrong = [*map(_outlier, below), *(f"{part}: {why}" for part, why in failed.items())]
        left_out = verdict.left_out.get(made.node, {})
        notes = [f"not measured: {part}: {why}" for part, why in left_out.items()]
        uncertain, figures = verdict.uncertain(made.node)
        if uncertain:
            notes.append(f"{uncertain} of {counted(figures, 'figure')} are too uncertain to judge")
        if alone := verdict.alone(made.node):
            text = f"{alone} of {counted(figures, 'figure')} have nothing to be compared with yet"
            notes.append(text)
        if made.load > BUSY:
            text = f"other processes used {made.load:.0%} of its CPUs meanwhile"
            notes.append(f"{text}: CPU and memory are not judged")
        word = "unclear" if verdict.is_unclear(made.node) else "normal"
        yield f"{made.node:<{width}}  {'; '.join(wrong) or word}"
        for note in notes:
            yield f"{'':<{width}}  {note}"
    for name in lost:
        yield f"{name:<{width}}  left no result"


def _outlier(compared: FigureComparison) -> str:
    reference = compared.reference(compared.outlier)
    if reference is None:  # it is itself one of the references
        return compared.name
    figure, unit = compared.figure, compared.figure.unit
    part = _place(compared).removeprefix(compared.node).strip()
    name = f"{part} {_label(compared.name)}".strip()
    below = 1 - figure.value / reference.value
    text = f"{name} {rate_text(figure.value, unit)}, {below:.0%} below "
    value = rate_text(reference.value, unit)
    if compared.outlier == "specification":
        return f"{text}its specification of {value}"
    if compared.outlier == "history":
        earlier = counted(reference.count, "earlier run")
        return f"{text}the median of {earlier} of this node, {value}"
    return f"{text}the median of {counted(reference.count, 'sibling')}, {value}"


def to_json(
    measured: Sequence[Measurement], verdict: BenchVerdict, lost: Sequence[str], kept: str
) -> dict[str, object]:
    """Return everything for programs."""
    by_node: dict[str, list[Mapping[str, object]]] = {}
    for one in verdict.figures:
        by_node.setdefault(one.node, []).append(
            {
                "name": one.name,
                **asdict(one.figure),
                "uncertain": one.uncertain,
                "outlier": one.outlier or None,
                "references": [asdict(reference) for reference in one.references],
            }
        )
    return {
        "normal": verdict.normal
        and not lost
        and not any(verdict.is_unclear(made.node) for made in measured),
        "nodes": [
            {
                **{
                    name: value
                    for name, value in asdict(made).items()
                    if name not in ("figures", "missing")
                },
                "figures": by_node.get(made.node, []),
                "unclear": verdict.is_unclear(made.node),
                "failed": verdict.failed.get(made.node, {}),
                "not_measured": verdict.left_out.get(made.node, {}),
            }
            for made in measured
        ],
        "lost": list(lost),
        "allreduce": {name: asdict(fit[0]) for name, fit in fits(measured).items()},
        "kept": kept or None,
    }
