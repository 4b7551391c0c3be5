"""What changes from point to point: arguments, resources, batch size and learning rate.

A strong sweep keeps the global batch, a weak one the batch of a rank; all other modes pass the
value of the job or of the axis. The learning rate follows the global batch by a rule.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.sweep import BatchSize, Sweep

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job, Resources

SEED_ARGUMENTS = "--seed --random-seed --random_seed".split()
"""Usual names of the argument that is the random seed."""

_RANK_BATCH = (
    "--batch-size --batch_size --bs --per-device-train-batch-size --per_device_train_batch_size "
    "--micro-batch-size --train-batch-size -b"
).split()
_OPTION = re.compile(r"-[A-Za-z-]")  # but not a negative number
_GLOBAL_BATCH = "--global-batch-size --global_batch_size --total-batch-size".split()


class ProgramArguments:
    """A program's arguments, as `--name=value`, `--name value` or `name=value`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def _places(self, name: str) -> list[tuple[int, str]]:
        prefix = name if name.endswith("=") else f"{name}="
        found = []
        pairs = itertools.pairwise([*self.words, "--"])
        for index, (word, following) in enumerate(pairs):
            if word.startswith(prefix):
                found.append((index, prefix))
            # `--flag --other` gives the flag no value; a negative number is one.
            elif word == name and not _OPTION.match(following):
                found.append((index + 1, ""))
        return found

    def value(self, name: str) -> str | None:
        """Return the value of an argument, None if it is not given; the last one of several."""
        places = self._places(name)
        # argparse, too, takes the last of several.
        return self.words[places[-1][0]].removeprefix(places[-1][1]) if places else None

    def set(self, name: str, value: str) -> None:
        """Replace an argument's value wherever it is given, or append it."""
        places = self._places(name)
        for index, prefix in places:
            self.words[index] = prefix + value
        if not places:
            self.words.append(f"{name.removesuffix('=')}={value}")

    def remove(self, name: str) -> None:
        """Remove an argument and its value wherever it is given."""
        for index, prefix in reversed(self._places(name)):
            del self.words[index if prefix else index - 1 : index + 1]

    def flag(self, name: str, *, on: bool) -> None:
        """Add an argument without a value, or remove it."""
        self.words = [word for word in self.words if word != name] + [name] * on

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of some arguments that is given."""
        return next((name for name in names if self.value(name) is not None), None)


def check_base(job: Job, file: object) -> None:
    """Check that the base job is a single one whose runs do not share their checkpoints.

    Raises:
        InputError: it is not.
    """
    if job.array is not None:
        raise InputError(
            "a sweep makes the arrays itself; the base job must be a single job",
            field="array",
            value=str(job.array),
            hint=f"remove `array` from {file}",
        )
    if job.checkpoint.enabled and not job.checkpoint.is_per_run:
        raise InputError(
            "would be the directory of every run of the sweep",
            field="checkpoint.directory",
            value=job.checkpoint.directory,
            hint="give a relative path, or put {run.id} into it",
        )


def batch_argument(arguments: ProgramArguments) -> tuple[str, int, bool] | None:
    """Return a program's usual argument for the batch, its value, and whether all ranks share it.

    None if it has none, or no whole number above zero.
    """
    name = arguments.first(_GLOBAL_BATCH + _RANK_BATCH)
    text = arguments.value(name) if name else None
    if name is None or text is None or not re.fullmatch(r"[1-9]\d{0,9}", text):
        return None
    return name, int(text), name in _GLOBAL_BATCH


def scaled(resources: Resources, unit: str, scale: int) -> list[tuple[str, object]]:
    """Return the fields that give the job the size of a scale.

    Raises:
        InputError: the scale does not fit the base job's nodes.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field=f"scale.{unit}", value=scale, hint=hint)

    if unit == "nodes":
        return [("resources.nodes", scale)]
    each = resources.gpu_count
    if unit == "ranks":
        if scale % resources.nodes:
            raise refused(
                f"cannot be divided over the base job's {resources.nodes} nodes",
                f"use multiples of {resources.nodes}, or scale: {{nodes: …}}",
            )
        if each:
            raise refused(
                "the base job has GPUs, whose number would stay the same",
                f"scale: {{gpus: [{scale}, …]}}",
            )
        return [("resources.ranks_per_node", scale // resources.nodes)]
    if not each:
        raise refused("the base job has no GPUs", "give resources.gpus, or scale: {ranks: …}")
    nodes, here = (1, scale) if scale < each else (scale // each, each)
    # `resources.gpus` counts per node, so all nodes of a job have the same number.
    if nodes * here != scale:
        raise refused(
            f"does not fill whole nodes of {each} GPUs", f"use multiples of {each}, or fewer"
        )
    kind, _, _ = str(resources.gpus).rpartition(":")
    fields: list[tuple[str, object]] = [
        ("resources.nodes", nodes),
        ("resources.gpus", f"{kind}:{here}" if kind else str(here)),
    ]
    if resources.ranks_per_node is not None:
        ranks, rest = divmod(resources.ranks_per_node * here, each)
        if rest or not ranks:
            raise refused(
                f"{resources.ranks_per_node} ranks on {each} GPUs cannot be cut down to {here}",
                "leave ranks_per_node out: there is one rank per GPU then",
            )
        fields.append(("resources.ranks_per_node", ranks))
    return fields


def with_batch(sweep: Sweep, arguments: ProgramArguments, base_ranks: int) -> Sweep:
    """Return the sweep with its batch size filled in; None if it has none.

    Raises:
        InputError: a strong or weak sweep has none.
    """
    scaling, batch = sweep.scale is not None, sweep.batch
    argument = batch.argument if batch else arguments.first(_GLOBAL_BATCH + _RANK_BATCH)
    if argument is None:
        if scaling:
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


def _is_global(sweep: Sweep, batch: BatchSize) -> bool:
    return sweep.mode == "strong" or (sweep.mode != "weak" and batch.per == "global")


def base_batch(sweep: Sweep, base_ranks: int) -> int | None:
    """Return the global batch of the base job, None if unknown."""
    batch = sweep.batch
    if batch is None or batch.size is None:
        return None
    return batch.size * (1 if _is_global(sweep, batch) else base_ranks)


def batch_of(
    sweep: Sweep, ranks: int, values: Mapping[str, object]
) -> tuple[int | None, int | None]:
    """Return the batch of one rank and the global one; None if unknown.

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


def base_learning_rate(sweep: Sweep, arguments: ProgramArguments, base_ranks: int) -> float | None:
    """Return the learning rate of the base job's optimiser, None if the sweep sets none.

    Raises:
        InputError: the base job does not give it as a number.
    """
    rule = sweep.learning_rate
    if rule is None:
        return None
    # on an axis, each point has its own rate
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
    values: Mapping[str, object],
) -> float | None:
    """Return the optimiser's learning rate by the sweep's rule; None if the sweep sets none."""
    rule = sweep.learning_rate
    if rule is None or base is None:
        return None
    given = values.get(rule.argument, base)
    rate = float(given) if isinstance(given, (int, float, str)) else base
    growth = batch / base_batch if batch and base_batch else 1.0
    return rate * {"constant": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule.rule]
