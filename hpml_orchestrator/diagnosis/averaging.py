"""The averaging of gradients: predicted by `hpml bench` and measured; the buckets that follow."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import AllReduce, Change
from hpml_orchestrator.diagnosis.models import predict_averaging
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import duration_text

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts

FACTOR = 2.0
"""The model does not explain a measurement that differs from the prediction by more."""

_LATENCY_SHARE = 0.1  # of a bucket's transfer
_WORTH = 0.05  # share of the averaging that other buckets must save
_MIB = 1 << 20  # the unit of `bucket_cap_mb`
_OPTION = re.compile(r"(--bucket-mb)(?:=(.*))?")
_HAS_OPTION = "ddp_images.py"


@dataclass(frozen=True)
class Averaging:
    """How a run averages its gradients in one step."""

    ranks: int
    gradient_bytes: float
    buckets: int
    seconds: float | None  # measured, of the median rank; without waiting for slower ranks
    link: AllReduce | None = None  # None: `hpml bench` has not measured it
    origin: str = ""  # of the link's figures
    predicted: Mapping[str, float] = field(default_factory=dict)  # seconds by algorithm

    @property
    def ratio(self) -> float | None:
        """Measured time over the ring's, the algorithm of gloo and NCCL for large buckets."""
        return self.seconds / self.predicted["ring"] if self.seconds and self.predicted else None


def averaging(facts: Facts) -> Averaging | None:
    """Return the averaging of a run's gradients; None if the training did not report it."""
    ranks, size, buckets = facts.world_size, facts.gradient_bytes, facts.gradient_buckets
    if ranks <= 1 or not size or not buckets:
        return None
    took = [
        rank.comm_seconds / rank.steps for rank in facts.ranks if rank.comm_seconds and rank.steps
    ]
    known = Averaging(ranks, size, buckets, median(took) if took else None)
    peaks = facts.peaks
    links = peaks.allreduce.get("nodes" if facts.node_count > 1 else "node") if peaks else None
    if not peaks or not links:
        return known
    link = min(links, key=lambda one: one.ranks != ranks)  # the newest, if none has as many
    predicted = predict_averaging(link, ranks, size, buckets)
    return Averaging(ranks, size, buckets, known.seconds, link, peaks.origin, predicted)


def bucket_bytes(link: AllReduce, ranks: int) -> float:
    """Return the size of the smallest bucket of a ring whose latency is a tenth of its transfer.

    The latency is 2 (P-1) L and the transfer 2 b G (P-1)/P, so b = P L / G / 0.1.
    """
    return ranks * link.alpha / link.beta / _LATENCY_SHARE if link.beta else math.inf


def larger_buckets(facts: Facts) -> list[Change]:
    """Return the size of DDP's buckets that follows from the link, if it saves time."""
    found = averaging(facts)
    if found is None or found.link is None or found.ratio is None or not found.seconds:
        return []
    if not 1 / FACTOR <= found.ratio <= FACTOR:
        return []  # the model does not describe this run
    cap = min(bucket_bytes(found.link, found.ranks), found.gradient_bytes)
    megabytes = max(1, math.ceil(cap / _MIB))
    buckets = math.ceil(found.gradient_bytes / (megabytes * _MIB))
    saved = (found.buckets - buckets) * 2 * (found.ranks - 1) * found.link.alpha
    if saved < _WORTH * found.seconds:
        return []
    off = max(found.ratio, 1 / found.ratio) - 1
    sure = f"the ring's model is {off:.0%} off this run and {found.link.residual:.0%} off the bench"
    text = (
        f"enlarge DDP's buckets to {megabytes} MiB (`bucket_cap_mb={megabytes}`): "
        f"{counted(buckets, 'bucket')} instead of {found.buckets} save about "
        f"{duration_text(saved)} of {duration_text(found.seconds)} per step; {sure}"
    )
    return [_of_argument(facts, text, megabytes)]


def _of_argument(facts: Facts, text: str, megabytes: int) -> Change:
    args = [*facts.job.args]
    for place, word in enumerate(args):
        if match := _OPTION.fullmatch(word):
            joined = match[2] is not None
            value = f"--bucket-mb={megabytes}" if joined else str(megabytes)
            return Change(text, f"args.{place + (not joined)}", value)
    if os.path.basename(facts.job.script or "") == _HAS_OPTION:
        return Change(text, "args", [*args, f"--bucket-mb={megabytes}"])
    return Change(text)
