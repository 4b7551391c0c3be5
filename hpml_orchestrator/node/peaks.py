"""The peaks that `hpml bench` measured, for the ranks of a job: HPML_PEAK_TFLOPS."""

from __future__ import annotations

import contextlib
import json
import os
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DTYPES = {"peak": "float32", "peak_bf16": "bfloat16"}


def rank_peaks(
    results: Path, node: str, cpu_model: str, *, cpus: float, gpus: int = 0, ranks_per_gpu: int = 1
) -> dict[str, str]:
    """Return the TFLOP/s of one rank, as keys of the plan's header; empty without a bench.

    Args:
        results: of `hpml bench`, in the user's records.
        node: this one; without results of its own, those of a node with the same processor count.
        cpu_model: of the node, as the kernel names it.
        cpus: of one rank.
        gpus: that the node's ranks use.
        ranks_per_gpu: that share one.
    """
    cpu_model = cpu_model or os.uname().machine  # as the bench has it where the kernel has no name
    # Names of results begin with their time. Of other nodes one of each type is enough.
    own = sorted(results.glob(f"*/{node}/*.json"), key=lambda path: path.name)[-1:]
    others = [max(one.glob("*/*.json"), default=None) for one in results.glob("*")]
    for path in filter(None, [*own, *others]):
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError, AttributeError):
            made = json.loads(path.read_text("utf-8"))
            if made["cpu_model"] == cpu_model and bool(made["gpus"]) == bool(gpus):
                share = 1 / ranks_per_gpu if gpus else cpus / made["cpus"]
                found = {}
                for key, dtype in _DTYPES.items():
                    part = ("gpu" if gpus else "cpu", ".matmul." + dtype)
                    rates = [
                        rate["value"]
                        for name, rate in made["figures"].items()
                        if name.startswith(part[0]) and name.endswith(part[1])
                    ]
                    if rates:
                        found[key] = f"{median(rates) * share / 1e12:.6g}"
                return found
    return {}
