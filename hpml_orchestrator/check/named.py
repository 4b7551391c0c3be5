"""What a job names by sbatch options: reservations, licences, generic resources; and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding, error, warning
from hpml_orchestrator.check.nodes import plain_features
from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.records.texts import first_few

if TYPE_CHECKING:
    from hpml_orchestrator.check.request import Request
    from hpml_orchestrator.scheduler.cluster import Cluster

__all__ = ["named_resources", "not_judged"]

_FIELD = "resources.extra"
_JUDGED = frozenset({"nodelist", "exclude", "overcommit", "time-min"})
_LICENSE = re.compile(r"([^:,|;]+)(?::(\d{1,9}))?")


def named_resources(request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Yield which reservation, licence or generic resource the cluster does not have."""
    option = request.option("reservation")
    if option and cluster.reservations is not None:
        for name in (request.options["reservation"] or "").split(","):
            if name not in cluster.reservations:
                yield _unknown("reservation", "reservation", name, option, cluster.reservations)
    yield from _licenses(request, cluster)
    option = request.option("gres")
    if option and cluster.nodes:
        there = sorted({gres.name for node in cluster.nodes for gres in node.gres})
        for name, _, _ in request.gres:
            if name not in there:
                yield _unknown("gres", "generic resource", name, option, there)


def _licenses(request: Request, cluster: Cluster) -> Iterator[Finding]:
    option, there = request.option("licenses"), cluster.licenses
    if there is None:
        return
    for name, count in _wanted_licenses(request):
        if name not in there:
            yield _unknown("license", "licence", name, option, sorted(there))
            continue
        most, free = there[name]
        if count > most:
            message = f"{count} licences {name} are more than the cluster's {most}"
            yield error("license.most", _FIELD, option, message, most)
        elif count > free:
            message = f"the job will wait: {free} of {most} licences {name} are free"
            yield warning("license.free", _FIELD, option, message, free)


def _wanted_licenses(request: Request) -> list[tuple[str, int]]:
    """Return names and numbers of `a:2,b`; nothing for other forms, which Slurm judges."""
    parts = (request.options.get("licenses") or "").split(",")
    matches = [_LICENSE.fullmatch(part) for part in parts]
    if None in matches:
        return []
    return [(match[1], int(match[2] or 1)) for match in matches if match]


def _unknown(code: str, noun: str, name: str, option: str, there: Iterable[str]) -> Finding:
    names = list(there)
    message = f"there is no {noun} {name} on this cluster; there are {first_few(names)}"
    return error(f"{code}.unknown", _FIELD, option, message, names, did_you_mean(name, names))


def not_judged(request: Request, cluster: Cluster) -> Iterator[str]:
    """Yield the options of a job that are not compared with the cluster."""
    judged = set(_JUDGED)
    if cluster.nodes:
        judged.add("gres")
    if cluster.licenses is not None and _wanted_licenses(request):
        judged.add("licenses")
    for name in request.options:
        if name not in judged:  # that a reservation exists does not mean that it takes the job
            yield request.option(name)
    constraint = request.job.resources.constraint
    if constraint and not plain_features(request):
        yield f"--constraint={constraint}"
