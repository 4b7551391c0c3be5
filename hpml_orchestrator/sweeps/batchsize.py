"""The batch sizes and learning rates of a sweep's points.

A strong sweep keeps the global batch, a weak one the batch of a rank; all other modes give the
program what the job says, or the axis. The learning rate follows the global batch by a rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.sweep import BatchSize, Sweep
from hpml_orchestrator.sweeps.scaling import Arguments

__all__ = [
    "base_batch",
    "base_learning_rate",
    "batch_note",
    "batch_of",
    "learning_rate_of",
    "with_batch",
]

_RANK_BATCH = (
    "--batch-size --batch_size --bs --per-device-train-batch-size --per_device_train_batch_size "
    "--micro-batch-size --train-batch-size -b"
).split()
_GLOBAL_BATCH = "--global-batch-size --global_batch_size --total-batch-size".split()


def with_batch(sweep: Sweep, arguments: Arguments, base_ranks: int) -> Sweep:
    """Return the sweep with the batch size that counts, None where there is none.

    Args:
        sweep: as the file has it.
        arguments: of the base job.
        base_ranks: ranks of the base job.

    Raises:
        InputError: a strong or weak sweep has none.
    """
    scaling, batch = sweep.scale is not None, sweep.batch
    argument = batch.argument if batch else arguments.first(_GLOBAL_BATCH + _RANK_BATCH)
    if argument is None:
        if scaling and not sweep.function:
            raise InputError(
                f"a {sweep.mode} sweep has to know the batch size, and the job's arguments have "
                "none by a usual name",
                field="batch",
                hint="give it in the job's args, or name its argument: batch: "
                "{argument: --my-batch, per: rank} or, on the command line, --batch --my-batch",
            )
        return sweep
    if scaling and argument in sweep.axes:
        message = f"a {sweep.mode} sweep keeps the batch; vary it in a grid"
        raise InputError(message, field=f"axes.{argument}")
    per = batch.per if batch else ("global" if argument in _GLOBAL_BATCH else "rank")
    size = batch.size if batch else None
    if size is None:
        text = arguments.value(argument)
        if text is None or not re.fullmatch(r"[1-9]\d{0,9}", text):
            if not scaling:
                return sweep.model_copy(update={"batch": None})
            raise InputError(
                "must be given in the job's args, as a whole number above zero",
                field=argument,
                value=text,
                hint=f"add {argument}=64 to args, or give batch.size",
            )
        size = int(text)
        if sweep.mode == "strong" and per == "rank":
            size *= base_ranks
        if sweep.mode == "weak" and per == "global":
            size //= base_ranks
    return sweep.model_copy(update={"batch": BatchSize(argument=argument, per=per, size=size)})


def batch_note(mode: str, batch: BatchSize) -> str:
    """Return which argument was taken for the batch size of a scaling sweep, and what is kept."""
    whose = "one rank" if batch.per == "rank" else "all ranks"
    kept = "global batch" if mode == "strong" else "batch of a rank"
    return f"{batch.argument} is the batch of {whose}; the {kept} stays {batch.size}"


def _is_global(sweep: Sweep, batch: BatchSize) -> bool:
    """Whether `batch.size` is the batch of all ranks."""
    return sweep.mode == "strong" or (sweep.mode != "weak" and batch.per == "global")


def base_batch(sweep: Sweep, base_ranks: int) -> int | None:
    """Return the global batch of the base job, None where it is not known."""
    batch = sweep.batch
    if batch is None or batch.size is None:
        return None
    return batch.size if _is_global(sweep, batch) else batch.size * base_ranks


def batch_of(sweep: Sweep, ranks: int, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the batch of one rank and the global one; None where not known.

    Raises:
        InputError: the global batch of a strong sweep cannot be divided over the ranks.
    """
    batch = sweep.batch
    size = values.get(batch.argument, batch.size) if batch else None
    if batch is None or not isinstance(size, int):
        return None, None
    if not _is_global(sweep, batch):
        return size, size * ranks
    if size % ranks and sweep.mode == "strong":
        near = sorted({size - size % ranks or ranks, size - size % ranks + ranks})
        raise InputError(
            f"a global batch of {size} cannot be divided over {ranks} ranks",
            field="batch.size",
            value=size,
            hint=f"{' and '.join(map(str, near))} can be: a strong sweep keeps the global batch; "
            "set batch.size to a multiple of every number of ranks",
        )
    return None if size % ranks else size // ranks, size


def base_learning_rate(sweep: Sweep, arguments: Arguments, base_ranks: int) -> float | None:
    """Return the learning rate of the base job's optimiser, None where the sweep sets none.

    Raises:
        InputError: the base job does not give it as a number.
    """
    rule = sweep.learning_rate
    if rule is None:
        return None
    # of an axis, each point has its own
    text = "1" if rule.argument in sweep.axes else arguments.value(rule.argument)
    try:
        rate = float(text or "")
    except ValueError:
        raise InputError(
            f"must be given in the job's args as a number, since {rule.argument} follows the rule "
            f"{rule.rule}",
            field="learning_rate.argument",
            value=text or rule.argument,
            hint=f"add {rule.argument}=0.1 to args",
        ) from None
    return rate * (base_ranks if rule.times_ranks else 1)


def learning_rate_of(
    sweep: Sweep,
    base: float | None,
    base_batch: int | None,
    batch: int | None,
    values: Mapping[str, Any],
) -> float | None:
    """Return the optimiser's learning rate by the sweep's rule; None where it sets none.

    Args:
        sweep: the sweep.
        base: learning rate of the base job's optimiser.
        base_batch: its global batch.
        batch: the point's global batch.
        values: the axes' values.
    """
    rule = sweep.learning_rate
    if rule is None or base is None:
        return None
    rate = float(values.get(rule.argument, base))
    growth = batch / base_batch if batch and base_batch else 1.0
    return rate * {"constant": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule.rule]
