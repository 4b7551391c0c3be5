"""Warnings about what runs found besides their settings: nodes, CPUs, and speedups above ideal."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from hpml_orchestrator.diagnosis.templates import percent
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.model import expand, fold
from hpml_orchestrator.sweeps.facts import MEASURED, Notice, SweepFacts
from hpml_orchestrator.sweeps.wording import estimate_text, scale_text

_Nodes = frozenset[str]


def conditions(report: SweepFacts) -> Iterable[Notice]:
    """Yield warnings about conditions under which times do not compare the settings."""
    if report.scaling:
        yield from _own_nodes(report)
    yield from _contention(report)


def _own_nodes(report: SweepFacts) -> Iterable[Notice]:
    """Yield a warning about scales whose runs all used nodes that no other scale used."""
    used: dict[int, list[_Nodes]] = defaultdict(list)
    for one in report.attempts:
        scale = report.settings[one.setting].scale
        if scale and one.row.state == MEASURED and (nodes := _nodes(one.row.nodes)):
            used[scale].append(nodes)
    found = {scale: (own, len(used[scale])) for scale, own in _apart(used).items()}
    texts = [
        f"{n} runs at {scale_text(scale, report.unit)} ran on {fold(sorted(own))}"
        for scale, (own, n) in found.items()
    ]
    if texts:
        several = len(texts) > 1 or any(len(own) > 1 for own, _ in found.values())
        text = (
            f"All {first_few(texts)}, which no other scale used: a difference may come from the "
            f"node{'s' if several else ''}."
        )
        yield Notice("A scale on separate nodes", text, "loud")


def _apart(used: Mapping[int, Sequence[_Nodes]]) -> Mapping[int, _Nodes]:
    """Return by scale the nodes that it alone used, in all its runs."""
    found: dict[int, _Nodes] = {}
    for scale, runs in used.items():
        own, others = _own(used, scale)
        if others and all(own & nodes and not nodes & others for nodes in runs):
            found[scale] = own
    # The other scales share nodes. Of these, a run larger than what the rest used needs new ones.
    sharing = {scale: runs for scale, runs in used.items() if scale not in found}
    for scale, runs in sharing.items():
        own, others = _own(sharing, scale)
        if all(own & nodes and len(nodes) <= len(others) for nodes in runs):
            found[scale] = own
    return dict(sorted(found.items()))


def _own(used: Mapping[int, Sequence[_Nodes]], scale: int) -> tuple[_Nodes, _Nodes]:
    """Return the nodes of most runs of a scale that no other used, and those of all others."""
    others = frozenset().union(*(nodes for one in used if one != scale for nodes in used[one]))
    times = Counter(node for nodes in used[scale] for node in nodes - others)
    # On a large cluster each run has other nodes, and none of them is a cause.
    least = max(2, len(used[scale]) / 2)
    return frozenset(node for node, n in times.items() if n >= least), others


@cache
def _nodes(text: str) -> _Nodes:
    with contextlib.suppress(HpmlError):
        return frozenset(expand(text))
    return frozenset()


def _contention(report: SweepFacts) -> Iterable[Notice]:
    shares = [
        (report.settings[one.setting].label, one.row.cpu_contention)
        for one in report.attempts
        if one.row.state == MEASURED
    ]
    known = [(label, share) for label, share in shares if share is not None]
    high = [(label, share) for label, share in known if THRESHOLDS["cpu-contention"].level(share)]
    if not high:
        return
    most = percent(max(share for _, share in high))
    text = (
        f"In {len(high)} of {counted(len(shares), 'complete run')} other processes had the CPUs of "
        f"a rank for up to {most} of its training: times of these runs do not show how fast the "
        "settings are."
    )
    if left := len(shares) - len(known):
        text += f" For {counted(left, 'run')} this was not measured."
    tally = Counter(label for label, _ in high).most_common(8)
    details = tuple(f"{label}: {counted(n, 'run')}" for label, n in tally)
    timed = report.scaling or "second" in report.figure.name
    yield Notice("CPU contention", text, "loud" if timed else "", details)


def above_ideal(report: SweepFacts) -> Iterable[Notice]:
    """Yield a warning about efficiencies above 100 %, beyond the noise."""
    found = [
        f"{one.label} ({estimate_text(one.speedup.efficiency, 100)} %)"
        for one in report.settings
        if one.speedup and (ends := one.speedup.efficiency.interval) and ends.low > 1
    ]
    if found:
        text = (
            f"More than ideal: {first_few(found)}. Usually the data or the model fits into the "
            "caches or the memory of more nodes, or the baseline's runs were slow: check those "
            "before you report it."
        )
        yield Notice("Efficiency above 100 %", text)
