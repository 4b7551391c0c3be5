"""Train a small CNN on folders of PNG files with Horovod: the twin of ddp_images.py.

    horovodrun --gloo --network-interface lo -np 2 -H localhost:2 \
        python horovod_images.py --data data/digits --target-accuracy 0.95
    mpirun -np 4 --map-by ppr:2:node --bind-to none python horovod_images.py --data data/digits

Copy ddp_images.py and hpml_checkpoint.py next to this file: data, model, options, checkpoints,
clock and `result.json` are its own, so that the two can be compared. Here is only what Horovod does
in another way: how ranks find each other, how they begin with the same state, and how they average
their gradients.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch import Tensor

    from training_jobs import ddp_images as images
else:
    import ddp_images as images

WARN_AFTER_SECONDS = 60  # Horovod's own default: a rank that waits so long says for whom
FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


class HorovodRanks(images.Ranks):
    """The processes that train together, over MPI or gloo as the launcher has it.

    Args:
        options: of the command line; the settings among them have to be in the environment by now.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Join the others; alone where no launcher is.

        Raises:
            JobError: Horovod knows of other ranks than the environment, or no GPU is there for
                `--device cuda`.
        """
        hvd.init()
        self.distributed, self.group = True, None
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank = hvd.local_rank()
        told = os.environ.get("WORLD_SIZE", str(self.world_size))
        if told != str(self.world_size):
            raise images.JobError(
                f"WORLD_SIZE is {told}, but Horovod sees {self.world_size} ranks: each would train"
                " alone; start this script with horovodrun or mpirun"
            )
        self.device = images.choose_device(options.device, self.local_rank)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        values: list[Any] = hvd.allgather_object(value, name="gather")
        return values

    def sums(self, *values: float) -> list[float]:
        """Return the sums of numbers over the ranks."""
        total = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum)
        return [float(one) for one in total]

    def start_highest(self, flag: Tensor) -> Any:
        """Begin to replace a number by the highest of all ranks; `wait()` of the answer ends it."""
        return Pending(hvd.allreduce_async_(flag, op=hvd.Max))

    def part(self) -> None:
        """Meet the other ranks a last time, and leave the group.

        Without the shutdown, which is MPI_Finalize too, mpirun takes a rank's end for a crash.
        """
        if hvd.is_initialized():
            with suppress(HorovodInternalError):  # a rank that died already cannot come
                hvd.allreduce(torch.zeros(1), op=hvd.Sum)
            hvd.shutdown()


class Pending:
    """An operation of Horovod's that is under way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Return when all ranks have done it."""
        hvd.synchronize(self._handle)


class HorovodTraining(images.Training):
    """The training of ddp_images.py, with Horovod's optimizer around its own."""

    def _distribute(self) -> None:
        options = self.options
        self.waits = images.Waits(  # type: ignore[attr-defined]
            self.channel,
            device=self.ranks.device,
            highest=lambda value: hvd.allreduce(value, op=hvd.Max),
        )
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.network.named_parameters(),
            compression=COMPRESSIONS[options.compression],
            groups=options.groups,
            op=hvd.Average,
        )

    def run(self) -> bool:
        """Give rank 0's state to all ranks, then train; return whether it was stopped.

        Raises:
            JobError: the ranks' states differ all the same.
        """
        before = self.digests()
        # Not broadcast_optimizer_state: to have something to send it takes a step with gradients of
        # zero, and by its weight decay that step moves the weights.
        # Without a name it is that of the value's type; ranks with two names wait for ever.
        state = hvd.broadcast_object(self.optimizer.state_dict(), root_rank=0, name="optimizer")
        self.optimizer.load_state_dict(state)
        hvd.broadcast_parameters(self.network.state_dict(), root_rank=0)
        after = self.digests()
        if set(after) != {before[0]}:
            raise images.JobError(f"the ranks begin with different states: {' '.join(after)}")
        self.say(
            f"initial state {after[0]}: {len(set(before))} different among {len(before)} ranks,"
            " equal after the broadcast"
        )
        return super().run()

    def digests(self) -> list[str]:
        """Return, by rank, 12 digits that stand for the weights and the optimizer's state."""
        digest = hashlib.sha256()
        optimizer = self.optimizer.state_dict()
        digest.update(repr(optimizer["param_groups"]).encode())
        kept = [entry for _, entry in sorted(optimizer["state"].items())]
        for part in (self.network.state_dict(), *kept):
            for name, value in part.items():
                digest.update(name.encode())
                if isinstance(value, torch.Tensor):
                    digest.update(value.detach().cpu().numpy().tobytes())
        return [str(one) for one in self.ranks.gather(digest.hexdigest()[:12])]

    def _apply_gradients(self) -> None:
        self.waits.step()
        self.waits.meet()
        # Averaged before the scaler looks at them: else ranks could differ about an overflow.
        self.optimizer.synchronize()  # type: ignore[attr-defined]
        with self.optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super()._apply_gradients()

    def result(self, *, stopped: bool) -> dict[str, Any]:
        """Return the final figures, and with which settings of Horovod they came about."""
        return {
            **super().result(stopped=stopped),
            "framework": "horovod",
            "controller": "mpi" if hvd.mpi_enabled() else "gloo",
            "compression": self.options.compression,
            "groups": self.options.groups,
            "fusion_threshold_bytes": _number(FUSION),
            "cycle_time_ms": _number(CYCLE),
        }


def _number(name: str) -> float | None:
    """Return a setting of Horovod's; None: its own default counts."""
    text = os.environ.get(name)
    return None if not text else float(text) if "." in text else int(text)


def prepare_environment(options: argparse.Namespace) -> None:
    """Set what Horovod reads as it starts, and who this rank is for the channel of hpml."""
    environment = os.environ
    if options.fusion_threshold_mb is not None:
        environment[FUSION] = str(round(options.fusion_threshold_mb * 2**20))
    if options.cycle_time_ms is not None:
        environment[CYCLE] = f"{options.cycle_time_ms:g}"
    seconds = options.timeout_seconds
    environment["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(min(WARN_AFTER_SECONDS, seconds))
    environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(seconds)
    for name, theirs in (("RANK", "RANK"), ("LOCAL_RANK", "LOCAL_RANK"), ("WORLD_SIZE", "SIZE")):
        for prefix in ("HOROVOD", "OMPI_COMM_WORLD"):
            if f"{prefix}_{theirs}" in environment:
                environment.setdefault(name, environment[f"{prefix}_{theirs}"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = images.options_of("Train a CNN on folders of PNG files with Horovod.")
    add = parser.add_argument
    add(
        "--fusion-threshold-mb",
        type=images.number_from(0),
        metavar="MB",
        help="gradients that are ready at the same time are averaged together up to this size"
        " (2**20 bytes); 0: each alone; default: Horovod's",
    )
    add(
        "--cycle-time-ms",
        type=images.number_from(0.01),
        metavar="MS",
        help="how long to wait for more gradients to average together; default: Horovod's",
    )
    add("--groups", type=images.positive, metavar="N", help="average the gradients in N groups")
    add(
        "--compression",
        choices=tuple(COMPRESSIONS),
        default="none",
        help="fp16: gradients travel in half precision",
    )
    return images.parse(None if arguments is None else list(arguments), parser)


def main() -> NoReturn:
    """Run the command line."""
    options = parse(None)
    prepare_environment(options)
    try:
        images.run(options, HorovodRanks, HorovodTraining)
    except HorovodInternalError as error:
        images.complain(f"another rank ended or came too late: {str(error).splitlines()[0]}")
        os._exit(1)


if __name__ == "__main__":
    main()
