"""Train a CNN or a ResNet-18 on folders of PNG files with Horovod: the twin of ddp_images.py.

    horovodrun --gloo --network-interface lo -np 2 -H localhost:2 \
        python horovod_images.py --data digits --target-accuracy 0.95
    mpirun -np 4 --map-by ppr:2:node --bind-to none python horovod_images.py --data digits

It uses the same images_*.py. Different are how ranks find each other, how they begin with the same
state, and how they average gradients: see docs/horovod.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import time
from functools import partial
from typing import Any, NoReturn

import horovod.torch as hvd
import images_common as common
import images_options
import torch
from horovod.common.exceptions import HorovodInternalError
from images_data import JobError
from torch import nn
from torch.profiler import record_function

from hpml_channel import Channel
from hpml_checkpoint import CheckpointError
from hpml_waits import Waits

FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


class Ranks:
    """Exchanges small values between the ranks, for hpml_checkpoint.py."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.group = hvd.rank(), hvd.size(), None

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        values: list[Any] = hvd.allgather_object(value, name="gather")
        return values

    def highest(self, *values: float) -> list[float]:
        """Return the highest of all ranks of each number."""
        found = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Max)
        return [float(number) for number in found]


def parse(arguments: list[str] | None) -> Any:
    """Return the options of the command line."""
    parser = images_options.options_of("Train on folders of images with Horovod.")
    add, number = parser.add_argument, images_options.at_least
    add("--fusion-threshold-mb", type=number(0), metavar="MB", help="average up to MB together")
    add("--cycle-time-ms", type=number(0.01), metavar="MS", help="wait so long for more to average")
    add("--groups", type=int, metavar="N", help="average the gradients in N groups")
    add("--compression", choices=tuple(COMPRESSIONS), default="none", help="of gradients")
    return images_options.parse(parser, arguments)


def set_environment(options: argparse.Namespace) -> None:
    """Set what Horovod reads as it starts, and who this rank is for the channel of hpml."""
    environment = os.environ
    if options.fusion_threshold_mb is not None:
        environment[FUSION] = str(round(options.fusion_threshold_mb * 2**20))
    if options.cycle_time_ms is not None:
        environment[CYCLE] = f"{options.cycle_time_ms:g}"
    environment["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(min(60, options.timeout_seconds))
    environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(options.timeout_seconds)
    for name, theirs in (("RANK", "RANK"), ("LOCAL_RANK", "LOCAL_RANK"), ("WORLD_SIZE", "SIZE")):
        for prefix in ("HOROVOD", "OMPI_COMM_WORLD"):
            if f"{prefix}_{theirs}" in environment:
                environment.setdefault(name, environment[f"{prefix}_{theirs}"])


def begin_equal(run: Any) -> None:
    """Give rank 0's weights and momenta to all ranks, and compare the digests."""
    before = run.ranks.gather(digest(run))
    # Not broadcast_optimizer_state: its step with gradients of zero moves weights by weight decay.
    state = hvd.broadcast_object(run.optimizer.state_dict(), root_rank=0, name="optimizer")
    run.optimizer.load_state_dict(state)
    hvd.broadcast_parameters(run.network.state_dict(), root_rank=0)
    after = run.ranks.gather(digest(run))
    if len(set(after)) > 1:
        raise JobError(f"the ranks begin with different states: {' '.join(after)}")
    different = f"{len(set(before))} different among {len(before)} ranks"
    run.say(f"initial state {after[0]}: {different}, equal after the broadcast")


def digest(run: Any) -> str:
    """Return 12 digits that stand for the weights and the momenta."""
    momenta = [kept["momentum_buffer"] for kept in run.optimizer.state_dict()["state"].values()]
    tensors = [*run.network.state_dict().values(), *filter(torch.is_tensor, momenta)]
    return hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in tensors)).hexdigest()[:12]


def train_epoch(run: Any) -> bool:
    """Train from the position to the epoch's end; return whether the ranks stop before it."""
    batches, stopped = common.begin_epoch(run), False
    while run.position.step < run.data.train_steps and not stopped:
        began = time.perf_counter()
        with record_function("hpml.step"):
            with record_function("hpml.data"):
                images, labels, problems = next(batches)
            waited = time.perf_counter() - began
            run.waits.step()
            images, labels = common.to_device(run, images, labels)
            with run.autocast():
                loss = nn.functional.cross_entropy(run.network(images), labels)
            run.scaler.scale(loss).backward()
            run.waits.meet()
            # Averaged before the scaler looks at them: else ranks could differ about an overflow.
            run.optimizer.synchronize()
            common.set_learning_rate(run)
            with run.optimizer.skip_synchronize():
                run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
        run.problem = run.problem or next(filter(None, problems), "")  # of a file
        stopped = common.end_step(run, loss.detach(), len(labels), waited, began)
    return stopped


def train(options: argparse.Namespace, device: torch.device, channel: Channel) -> None:
    """Train from the newest checkpoint to the last epoch, the target or a stop request."""
    run = common.prepare(options, device, channel, Ranks())
    run.waits = Waits(channel, device=device, highest=partial(hvd.allreduce, op=hvd.Max))
    how: Any = {"compression": COMPRESSIONS[options.compression], "groups": options.groups}
    names = run.network.named_parameters()
    run.optimizer = hvd.DistributedOptimizer(run.optimizer, names, op=hvd.Average, **how)
    common.load(run)
    begin_equal(run)
    stopped = common.begin(run)
    with common.profiler(options, run.ranks.rank) as run.profiler:
        while not stopped and not common.is_over(run):
            stopped = train_epoch(run) or common.end_epoch(run)  # evaluates and saves
    fusion, cycle = os.environ.get(FUSION), os.environ.get(CYCLE)
    common.finish(
        run,
        stopped=stopped,
        controller="mpi" if hvd.mpi_enabled() else "gloo",
        compression=options.compression,
        groups=options.groups,
        fusion_threshold_bytes=int(fusion) if fusion else None,  # None: Horovod's own default
        cycle_time_ms=float(cycle) if cycle else None,
    )


def main(arguments: list[str] | None = None) -> NoReturn:
    """Train and end the process: with 0, or with 2 and one line that says why."""
    options, status = parse(arguments), 0
    set_environment(options)
    channel = Channel.from_env()
    channel.event("rendezvous")
    try:
        hvd.init()
        if (told := int(os.environ.get("WORLD_SIZE", hvd.size()))) != hvd.size():
            problem = f"WORLD_SIZE is {told}, but Horovod sees {hvd.size()} ranks"
            raise JobError(f"{problem}: start this script with horovodrun or mpirun")
        train(options, common.device_of(options.device, hvd.local_rank()), channel)
    except (JobError, CheckpointError) as error:
        status = 2
        if hvd.rank() == 0:
            common.complain(error)
    except HorovodInternalError as error:
        common.complain(RuntimeError(f"another rank ended or came too late: {error}"))
        os._exit(1)
    channel.close()
    gc.collect()
    with contextlib.suppress(HorovodInternalError):  # a rank that died already cannot come
        hvd.allreduce(torch.zeros(1), op=hvd.Sum)
    hvd.shutdown()  # MPI_Finalize, too: without it mpirun takes a rank's end for a crash
    os._exit(status)


if __name__ == "__main__":
    main()
