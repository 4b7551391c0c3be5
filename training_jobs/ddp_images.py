"""Train a small CNN on folders of PNG files with PyTorch DistributedDataParallel.

    python ddp_images.py --data data/digits
    torchrun --nproc-per-node=2 ddp_images.py --data data/digits --target-accuracy 0.95

Runs alone, under torchrun, and wherever RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
are set (srun under hpml). GPUs are used when there are any: NCCL and mixed precision; otherwise
gloo. `--data` holds one folder per class; a fifth of each class is the test set, chosen by a hash
of the file names, so that it is the same for every seed and number of ranks. Copy next to this file
hpml_checkpoint.py; hpml_channel.py, so that hpml sees the progress and can stop the training;
hpml_waits.py, so that hpml finds a slow rank.

With `--checkpoint DIR` it resumes from the newest checkpoint there, if there is one.

`train_seconds` and `seconds_to_accuracy` are on one clock. It starts before the first step and runs
through warm-up steps, evaluations and checkpoints; a resumed training goes on from its checkpoint's
clock. Imports, rendezvous and building the model come before it. So `seconds_to_accuracy` is never
more than `train_seconds`, all of which (unless resumed) lies in hpml's phases warm-up and training.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import socket
import sys
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from training_jobs import hpml_checkpoint
    from training_jobs.hpml_channel import Channel
    from training_jobs.hpml_waits import Waits, measure_waits
else:
    import hpml_checkpoint

    class Absent:
        """Stands in for a file that was not copied: does nothing, and is false."""

        __bool__ = __exit__ = lambda *_: False
        __enter__ = __call__ = __getattr__ = lambda self, *_, **__: self

    try:
        from hpml_channel import Channel
    except ImportError:
        Channel = Absent()

    try:
        from hpml_waits import Waits, measure_waits
    except ImportError:
        Waits = measure_waits = Absent()

GO, STOP, FAIL = 0, 1, 2  # what ranks agree on; the highest wins
TEST_PART = 5  # every fifth image of a class is for testing
AMPERE = 8  # the first generation of GPUs that computes in bfloat16
PARTS = ("network", "optimizer", "schedule", "scaler")
SAVED = ("epoch", "step", "accuracy", "seconds_to_accuracy", "_steady_samples")
Batch = tuple[Tensor, Tensor, str]


class JobError(Exception):
    """The training cannot go on, and the user can mend it; one line that says what is wrong."""


class Ranks(hpml_checkpoint.Ranks):
    """The processes that train together: who this one is, and what all of them agree on."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Join the process group when the environment names one.

        Raises:
            JobError: the environment is incomplete, or no GPU is there for `--device cuda`.
        """
        self.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.local_rank = _env_int("LOCAL_RANK", _env_int("SLURM_LOCALID", 0))
        self.device = choose_device(options.device, self.local_rank)
        if self.distributed:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise JobError(f"RANK is set, {name} is not: the launcher has to set both")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                rank=_env_int("RANK", 0),
                world_size=_env_int("WORLD_SIZE", 1),
                timeout=timedelta(seconds=options.timeout_seconds),
            )
        super().__init__()

    def sums(self, *values: float) -> list[float]:
        """Return the sums of numbers over the ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.distributed:
            dist.all_reduce(total)
        return [float(one) for one in total]

    def fail_together(self, problem: str) -> None:
        """Raise the same JobError on every rank when any of them has a problem; never hangs."""
        problems = [one for one in self.gather(problem) if one]
        if problems:
            more = len(set(problems)) - 1
            raise JobError(problems[0] + (f" (and {more} more)" if more else ""))

    def use_cores(self) -> None:
        """Share the allowed cores among the ranks that may use the same ones.

        OMP_NUM_THREADS (torchrun and hpml set it) has the last word.
        """
        mine = (socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
        sharers = self.gather(mine).count(mine)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(mine[1]) // sharers))

    def leave(self, status: int) -> NoReturn:
        """End this process, after all ranks came here and everything of DDP is gone.

        With gloo a correct training may die at the interpreter's exit ("terminate called without an
        active exception", pytorch#190489): threads of the DDP model or the group are still there
        when C++ tears down. destroy_process_group() alone is not enough. So: nothing refers to the
        model any more, all ranks meet, the group is destroyed, and the tear-down is left out.
        """
        gc.collect()
        self.part()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def part(self) -> None:
        """Meet the other ranks a last time, and leave the group."""
        if self.distributed and dist.is_initialized():
            with suppress(RuntimeError):  # a rank that died already cannot come
                dist.all_reduce(torch.zeros(1))  # a barrier that touches no GPU
            dist.destroy_process_group()


class Images(Dataset[tuple[Tensor, int, str]]):
    """PNG files as tensors in [-1, 1]: each access reads and decodes one small file.

    A file that cannot be read gives zeros and a message instead of an exception: a rank that
    stopped alone would leave the others waiting in their next collective.
    """

    def __init__(self, files: list[tuple[str, int]], mode: str, size: tuple[int, int]) -> None:
        self.files = files
        self.mode = mode
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        path, label = self.files[index]
        channels = 1 if self.mode == "L" else 3
        pixels = np.zeros((self.size[1], self.size[0], channels), dtype=np.float32)
        problem = ""
        try:
            with Image.open(path) as image:
                if image.size != self.size:
                    problem = f"{path} has {image.size} pixels, others {self.size}"
                else:
                    pixels[:] = np.asarray(image.convert(self.mode)).reshape(pixels.shape)
        except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for a broken file
            problem = f"cannot read the image {path}: {error}"
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()) / 127.5 - 1.0, label, problem


class EpochSampler(Sampler[int]):
    """This rank's share of an epoch's order, from a position on.

    The order depends on the seed and the epoch alone. Ranks take turns, and the few images that do
    not go round are left out of this epoch, so that all ranks have the same number of steps.
    """

    def __init__(self, images: int, ranks: Ranks, seed: int, batch_size: int) -> None:
        self.per_rank = images // ranks.world_size
        self.steps = math.ceil(self.per_rank / batch_size)
        self.epoch = self.first_step = 0
        self._images, self._ranks, self._seed, self._batch = images, ranks, seed, batch_size

    def __len__(self) -> int:
        return self.per_rank - self.first_step * self._batch

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(self._images, generator=random).tolist()
        mine = order[self._ranks.rank :: self._ranks.world_size][: self.per_rank]
        return iter(mine[self.first_step * self._batch :])


class Training:
    """A model with all that changes while it learns, and what a checkpoint holds of it."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, channel: Channel) -> None:
        self.options, self.ranks, self.channel = options, ranks, channel
        self.epoch = self.step = self.steps_done = self.saved_step = 0
        self.accuracy: float | None = None
        self.seconds_to_accuracy: float | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()
        self._elapsed_before = 0.0
        self.train_seconds = 0.0
        self._steady_samples = self._loss_samples = 0
        self._loss_sum = torch.zeros((), device=ranks.device)
        self.agreement = hpml_checkpoint.StopAgreement(ranks)
        self._load_data()
        self._build()
        self.checkpoints = None
        if options.checkpoint is not None:
            self.checkpoints = hpml_checkpoint.Checkpoints(
                options.checkpoint, job=self._settings(), channel=channel, ranks=ranks
            )

    def _load_data(self) -> None:
        options, ranks, problem = self.options, self.ranks, ""
        train: list[tuple[str, int]] = []
        test: list[tuple[str, int]] = []
        mode, size, self.classes = "L", (1, 1), 0
        try:
            train, test, self.classes = find_images(options.data)
            mode, size = image_format(train[0][0])
            if len(train) < ranks.world_size:
                problem = f"{options.data}: {len(train)} images for {ranks.world_size} ranks"
        except JobError as error:
            problem = str(error)
        self.train_images, self.test_images = len(train), len(test)
        self.sampler = EpochSampler(len(train), ranks, options.seed, options.batch_size)
        self.train_loader = self._loader(Images(train, mode, size), self.sampler)
        mine = test[ranks.rank :: ranks.world_size]  # no image twice, none left out
        self.test_loader = self._loader(Images(mine, mode, size), None)
        # As many for all ranks, although some have one less: they agree after each.
        self.test_batches = math.ceil(math.ceil(len(test) / ranks.world_size) / options.batch_size)
        self.channels = 1 if mode == "L" else 3
        if options.workers and not problem:
            # Workers fork before the first collective: gloo's threads create Python thread states
            # after each one, and up to Python 3.11 a fork in that moment leaves a worker that hangs
            iter(self.train_loader)
            iter(self.test_loader)
        ranks.fail_together(problem)

    def _loader(self, images: Images, sampler: EpochSampler | None) -> DataLoader[Any]:
        workers = self.options.workers
        return DataLoader(
            images,
            batch_size=self.options.batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=self.options.worker_start if workers else None,
            collate_fn=collate,
            pin_memory=self.ranks.device.type == "cuda",
            generator=torch.Generator().manual_seed(self.options.seed),
        )

    def _build(self) -> None:
        options, device = self.options, self.ranks.device
        torch.manual_seed(options.seed + self.ranks.rank)  # rank 0's weights go to all ranks
        self.network = cnn(self.channels, self.classes, options.width).to(device)
        torch.manual_seed(options.seed * 1_000_003 + self.ranks.rank)  # dropout of its own
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.network.parameters(),
            lr=options.lr * self.ranks.world_size,
            momentum=0.9,
            weight_decay=1e-4,
            nesterov=True,
        )
        self.model: nn.Module = self.network
        self.waits = Waits(self.channel, device=device)
        self._distribute()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.amp = amp_of(options.amp, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp is torch.float16)

    def _distribute(self) -> None:
        """Let the ranks average their gradients, and begin with rank 0's weights."""
        device = self.ranks.device
        if self.ranks.distributed:
            devices = [device] if device.type == "cuda" else None
            self.model = DistributedDataParallel(
                self.network, device_ids=devices, gradient_as_bucket_view=True
            )
            self.waits = measure_waits(self.model, self.channel)

    def _rate(self, step: int) -> float:
        """Return the part of the scaled learning rate: from one rank's up, then a cosine to 0."""
        warm_up = self.options.lr_warmup_epochs * self.sampler.steps
        if step < warm_up:
            first = 1 / self.ranks.world_size
            return float(first + (1 - first) * step / warm_up)
        rest = max(1, self.options.epochs * self.sampler.steps - warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / rest)))

    @property
    def elapsed_seconds(self) -> float:
        """The clock: seconds since before the first step, of all the training's runs.

        Start-up, and work that no checkpoint holds, are not in.
        """
        return self._elapsed_before + time.perf_counter() - self._started

    @property
    def global_step(self) -> int:
        """The optimizer's steps since the training began, over all of its runs."""
        return self.epoch * self.sampler.steps + self.step

    def run(self) -> bool:
        """Train to the last epoch, the target or a stop request; return whether it was stopped."""
        options, total = self.options, self.options.epochs * self.sampler.steps
        self.channel.event("warm-up", steps=options.warm_up_steps)
        self.channel.event("training", step=self.global_step, total_steps=total)
        self._started = time.perf_counter()
        last = min(options.epochs, self.epoch + (options.stop_after_epochs or options.epochs))
        stopped = max(self._agree(""), self.agreement.finish()) == STOP  # before the first step
        while not stopped and self.epoch < last and not self._is_good_enough():
            stopped = self._train_epoch() or self._end_epoch()
        if not stopped and self.accuracy is None:
            stopped = self._evaluate(self.epoch)
        if stopped:
            self.say(f"stopping in epoch {self.epoch + 1} after {self.step} steps, as asked")
            if self.global_step != self.saved_step:
                self.save()
            self.channel.event("stopping", epoch=self.epoch, step=self.global_step)
        self.train_seconds = self.elapsed_seconds
        return stopped

    def _agree(self, problem: str) -> int:
        """Send what this rank wants; return what the ranks agreed on."""
        wish = FAIL if problem else STOP if self.channel.stop_requested() else GO
        return self.agreement.exchange(wish)

    def _is_good_enough(self) -> bool:
        return self.options.stop_at_target and self.seconds_to_accuracy is not None

    def _is_save_due(self) -> bool:
        steps = self.options.checkpoint_steps
        return steps is not None and self.global_step % steps == 0

    def _end_epoch(self) -> bool:
        """Evaluate and save if it is time; return whether the ranks agreed to stop meanwhile.

        If they did, the epoch is not over: the resumed training evaluates again.
        """
        options, epoch = self.options, self.epoch + 1
        final = epoch == options.epochs
        self.accuracy = None
        if (final or epoch % options.eval_every == 0) and self._evaluate(epoch):
            return True
        train = self.last_epoch
        self.say(
            f"epoch {epoch}/{options.epochs}: loss {train['loss']:.4f}, test accuracy "
            + ("-" if self.accuracy is None else f"{self.accuracy:.4f}")
            + f", {train['samples_per_second']:.0f} samples/s, "
            f"data wait {train['data_wait_part']:.0%}"
        )
        self.epoch, self.step, self._loss_samples = epoch, 0, 0
        self._loss_sum.zero_()
        is_due = final or self._is_good_enough() or self._is_save_due()
        if is_due or epoch % options.checkpoint_every == 0:
            self.save()
        return False

    def _train_epoch(self) -> bool:
        """Train from the position to the epoch's end; return whether the ranks agreed to stop."""
        self.model.train()
        self.sampler.epoch, self.sampler.first_step = self.epoch, self.step
        mark = time.perf_counter()
        before, told, is_steady, samples, problem = dict(self.seconds), GO, False, 0, ""
        for images, labels, broken in self.train_loader:
            wait = time.perf_counter() - mark
            loss = self._train_step(images, labels)
            self._loss_sum += loss * len(labels)
            self._loss_samples += len(labels)
            samples += len(labels)
            problem = problem or broken
            self.step += 1
            self.steps_done += 1
            if self.steps_done == self.options.warm_up_steps:
                self._synchronize()
            took, mark = time.perf_counter() - mark, time.perf_counter()
            is_steady = self.steps_done > self.options.warm_up_steps
            self._steady_samples += len(labels) * is_steady
            self._add_seconds(took, is_steady=is_steady, data_wait=wait)
            self.channel.gauge(loss=loss, epoch=self.epoch)
            self.channel.count(
                steps=1, samples=len(labels), data_wait_seconds=wait, step_seconds=took
            )
            told = self._agree(problem)
            if told != GO:
                break
            if self.step < self.sampler.steps and self._is_save_due():
                self.save()
                mark = time.perf_counter()
        told = max(told, self.agreement.finish())
        self._synchronize()
        self._add_seconds(time.perf_counter() - mark, is_steady=is_steady)
        if told == FAIL:
            self.ranks.fail_together(problem)
        took, waited = (self.seconds[key] - before.get(key, 0) for key in ("steps", "data_wait"))
        self._summarise(samples, waited, took)
        return told == STOP

    def _add_seconds(self, steps: float, *, is_steady: bool, data_wait: float = 0) -> None:
        self.seconds["steps"] += steps
        self.seconds["steady"] += steps * is_steady
        self.seconds["data_wait"] += data_wait

    def _train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        device = self.ranks.device
        if not self.ranks.distributed:
            self.waits.step()
        if device.type != "cpu":
            with self.waits.timed("transfer_seconds"):
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, self.amp, enabled=self.amp is not None):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._apply_gradients()
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    def _apply_gradients(self) -> None:
        self.scaler.step(self.optimizer)

    def _summarise(self, samples: int, waited: float, took: float) -> None:
        loss, losses = self.ranks.sums(float(self._loss_sum), self._loss_samples)
        total, waits = self.ranks.sums(samples, waited)
        self.last_epoch = {
            "loss": loss / max(1, losses),
            "samples_per_second": total / max(took, 1e-9),
            "data_wait_part": waits / self.ranks.world_size / max(took, 1e-9),
        }

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> bool:
        """Measure the accuracy on the test set, every image of which counts exactly once.

        Returns:
            Whether the ranks agreed to stop before the end; there is no accuracy then.
        """
        began = time.perf_counter()
        device = self.ranks.device
        self.network.eval()  # not through DDP: ranks may have different numbers of batches
        right, problem, told = torch.zeros((), dtype=torch.int64, device=device), "", GO
        batches = iter(self.test_loader)
        for _ in range(self.test_batches):
            for images, labels, broken in islice(batches, 1):
                problem = problem or broken
                with torch.autocast(device.type, self.amp, enabled=self.amp is not None):
                    scores = self.network(images.to(device, non_blocking=True))
                right += (scores.argmax(1) == labels.to(device)).sum()
            told = self._agree(problem)
            if told != GO:
                break
        told = max(told, self.agreement.finish())
        took = time.perf_counter() - began
        self.seconds["evaluation"] += took
        self.channel.count(evaluation_seconds=took)
        if told == FAIL:
            self.ranks.fail_together(problem)
        if told == STOP:
            return True
        (correct,) = self.ranks.sums(float(right))
        self.accuracy = correct / self.test_images
        target = self.options.target_accuracy
        if target is not None and self.seconds_to_accuracy is None and self.accuracy >= target:
            self.seconds_to_accuracy = self.elapsed_seconds
        took = time.perf_counter() - began
        self.channel.gauge(accuracy=self.accuracy)
        self.channel.event("evaluation", seconds=took, accuracy=self.accuracy, epoch=epoch)
        return False

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same for a resumed training to be the same training."""
        names = ("epochs", "batch_size", "lr", "lr_warmup_epochs", "seed", "width")
        settings = {name: getattr(self.options, name) for name in names}
        return {**settings, "world_size": self.ranks.world_size, "train_images": self.train_images}

    def save(self) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            return
        began = time.perf_counter()
        parts = [float(self._loss_sum), self._loss_samples, self.seconds["data_wait"]]
        loss, losses, waits = self.ranks.sums(*parts)
        own = {name: getattr(self, name) for name in SAVED}
        own |= {name: getattr(self, name).state_dict() for name in PARTS}
        seconds = {**self.seconds, "data_wait": waits / self.ranks.world_size}
        sums = {"loss": loss, "losses": losses, "elapsed_seconds": self.elapsed_seconds}
        state = {**own, **sums, "seconds": seconds, "job": self._settings()}
        self.checkpoints.save(state, step=self.global_step)
        self.saved_step = self.global_step
        self.seconds["checkpoint"] += time.perf_counter() - began

    def resume(self) -> bool:
        """Go on from the newest checkpoint; return whether there is one."""
        found = self.checkpoints.load() if self.checkpoints is not None else None
        if found is None:
            return False
        state = found.state
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name in SAVED:
            setattr(self, name, state[name])
        self.seconds.update(state["seconds"])
        self._elapsed_before, self.saved_step = state["elapsed_seconds"], found.step
        if self.ranks.rank == 0:  # they are sums over the ranks
            self._loss_sum += state["loss"]
            self._loss_samples = int(state["losses"])
        self.say(f"resumed from {found.path}: {self.epoch} epochs and {self.step} steps are done")
        return True

    def start_from(self, directory: Path) -> None:
        """Start with the model and the optimizer's momenta of a training with other settings."""
        found = hpml_checkpoint.Checkpoints(directory, job=None, ranks=self.ranks).latest()
        if found is None:
            raise JobError(f"--checkpoint-from {directory}: there is no checkpoint")
        groups = self.optimizer.state_dict()["param_groups"]  # learning rate and such are our own
        state, problem = found.state, ""
        try:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        except (RuntimeError, ValueError):
            width = f"width {state['job']['width']} -> {self.options.width}"
            problem = f"{found.path} has another model: {width}"
        self.ranks.fail_together(problem)
        self.say(f"started from {found.path}, the model of epoch {state['epoch']}")

    def result(self, *, stopped: bool) -> dict[str, Any]:
        """Return the final figures; the same on every rank, but for the seconds."""
        (samples,) = self.ranks.sums(self._steady_samples)
        (waits,) = self.ranks.sums(self.seconds["data_wait"])
        steady = self.seconds["steady"]
        options = self.options
        return {
            "test_accuracy": self.accuracy,
            "target_accuracy": options.target_accuracy,
            "seconds_to_accuracy": self.seconds_to_accuracy,
            "samples_per_second": samples / steady if samples and steady else None,
            "train_seconds": self.train_seconds,
            "step_seconds": self.seconds["steps"],
            "evaluation_seconds": self.seconds["evaluation"],
            "checkpoint_seconds": self.seconds["checkpoint"],
            "data_wait_seconds": waits / self.ranks.world_size,
            "epochs": self.epoch,
            "eval_every_epochs": options.eval_every,
            "world_size": self.ranks.world_size,
            "batch_size_per_rank": options.batch_size,
            "learning_rate": options.lr * self.ranks.world_size,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "seed": options.seed,
            "device": device_name(self.ranks.device),
            "amp": str(self.amp).removeprefix("torch.") if self.amp else "off",
            "stopped": stopped,
        }

    def close(self) -> None:
        """End the reading processes now; found by the garbage collector, each would take 5 s."""
        del self.train_loader, self.test_loader

    def say(self, line: str) -> None:
        """Print a plain line on rank 0."""
        if self.ranks.rank == 0:
            print(line, flush=True)

    def _synchronize(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()


def find_images(data: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]], int]:
    """Return (path, label) of the images to train with and to test with, and how many classes.

    Raises:
        JobError: there is no such directory, or it does not hold two classes with two PNG files.
    """
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    try:
        folders = sorted(one for one in data.iterdir() if one.is_dir() and one.name[0] != ".")
        classes = 0
        for folder in folders:
            names = [name for name in os.listdir(folder) if name.lower().endswith(".png")]
            if len(names) < 2:  # noqa: PLR2004 - one to train, one to test
                continue
            names.sort(key=lambda name: _hash(f"{folder.name}/{name}"))
            tested = max(1, len(names) // TEST_PART)
            test += ((str(folder / name), classes) for name in names[:tested])
            train += ((str(folder / name), classes) for name in names[tested:])
            classes += 1
    except OSError as error:
        raise JobError(f"--data {data}: {error.strerror}") from error
    if not train:
        raise JobError(f"--data {data}: no folders with PNG files (DIR/<class>/<name>.png)")
    if classes == 1:
        raise JobError(f"--data {data}: only one class ({folders[0].name}); needs two or more")
    return sorted(train), sorted(test), classes


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def image_format(path: str) -> tuple[str, tuple[int, int]]:
    """Return whether an image is gray (`L`) or `RGB`, and its width and height.

    Raises:
        JobError: it cannot be read.
    """
    try:
        with Image.open(path) as image:
            gray = image.mode in {"1", "L", "LA", "I", "I;16"}
            return "L" if gray else "RGB", image.size
    except Exception as error:
        raise JobError(f"cannot read the image {path}: {error}") from error


def collate(samples: list[tuple[Tensor, int, str]]) -> Batch:
    """Return a batch of images and labels, and the first problem among them."""
    images, labels, problems = zip(*samples)  # noqa: B905 - Python 3.9 has no strict
    return torch.stack(images), torch.tensor(labels), next(filter(None, problems), "")


def cnn(channels: int, classes: int, width: int) -> nn.Module:
    """Return the network; GroupNorm, because BatchNorm's averages would differ between ranks."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * width, classes),
    )


def amp_of(choice: str, device: torch.device) -> torch.dtype | None:
    """Return the type for mixed precision; `auto` takes what the GPU computes fast, none on CPU."""
    if choice == "auto" and device.type == "cuda":
        choice = "bf16" if torch.cuda.get_device_capability(device)[0] >= AMPERE else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(choice)


def choose_device(choice: str, local_rank: int) -> torch.device:
    """Return where this rank computes; a GPU becomes PyTorch's current one.

    Raises:
        JobError: no GPU is there for `--device cuda`.
    """
    if choice != "cpu" and torch.cuda.is_available():
        # With one GPU in sight, the launcher gave each rank its own.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if choice == "cuda":
        raise JobError("--device cuda: PyTorch sees no GPU here")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Return what computes, as a person would say it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Write the final figures: the whole file, or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.new")
    aside.write_text(json.dumps({"schema_version": 1, **result}, indent=2) + "\n")
    aside.replace(file)


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise JobError(f"{name} is no number: {text!r}") from None


def positive(text: str) -> int:
    """Return a whole number from 1 on; what argparse calls for an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def number_from(least: float) -> Callable[[str], float]:
    """Return what argparse calls for an option that takes a number from `least` on."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more")
        return value

    return number


def _part(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def options_of(description: str) -> argparse.ArgumentParser:
    """Return the command line's options, to which others may be added."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="holds one folder per class")
    add("--epochs", type=positive, default=12)
    add("--batch-size", type=positive, default=32, help="images per rank and step")
    add("--lr", type=float, default=0.05, help="learning rate of one rank; times the world size")
    add("--lr-warmup-epochs", type=int, default=2, help="epochs to reach the scaled learning rate")
    add("--width", type=positive, default=16, help="channels of the first layer, a multiple of 4")
    add("--seed", type=int, default=1)
    add("--workers", type=int, default=1, help="processes per rank that read images; 0: none")
    add("--worker-start", choices=("fork", "spawn", "forkserver"), help="default: the platform's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--amp", choices=("auto", "bf16", "fp16", "off"), default="auto", help="mixed precision")
    add("--target-accuracy", type=_part, metavar="PART", help="report the seconds to reach it")
    add("--stop-at-target", action="store_true", help="end when the target is reached")
    add("--eval-every", type=positive, default=1, metavar="EPOCHS")
    add("--warm-up-steps", type=int, default=20, help="first steps that samples/s leaves out")
    add(
        "--checkpoint",
        type=Path,
        default=os.environ.get("HPML_CHECKPOINT_DIR") or None,
        metavar="DIR",
        help="save there, and resume from the newest checkpoint; default: $HPML_CHECKPOINT_DIR",
    )
    add("--checkpoint-every", type=positive, default=1, metavar="EPOCHS")
    add("--checkpoint-steps", type=positive, metavar="STEPS", help="save every so many steps, too")
    add("--checkpoint-from", type=Path, metavar="DIR", help="start with another run's model")
    add("--stop-after-epochs", type=positive, metavar="N", help="end early; the schedule stays")
    add("--output", type=Path, metavar="DIR", help="write result.json there")
    add("--timeout-seconds", type=positive, default=600, help="how long a rank waits for others")
    return parser


def parse(
    arguments: list[str] | None, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """Return the options of the command line; ends the process where they make no sense."""
    parser = parser or options_of("Train a CNN on folders of PNG files with DDP.")
    options = parser.parse_args(arguments)
    if options.stop_at_target and options.target_accuracy is None:
        parser.error("--stop-at-target needs --target-accuracy PART")
    if options.width % 4:
        parser.error("--width has to be a multiple of 4")
    if options.workers == 0:
        options.worker_start = None
    return options


def train(
    options: argparse.Namespace, ranks: Ranks, channel: Channel, kind: type[Training] = Training
) -> None:
    """Train and report; nothing of the training lives on after the return."""
    training = kind(options, ranks, channel)
    ranks.use_cores()
    try:
        if not training.resume() and options.checkpoint_from is not None:
            training.start_from(options.checkpoint_from)
        stopped = training.run()
    finally:
        training.close()
    result = training.result(stopped=stopped)
    problem = ""
    if ranks.rank == 0:
        channel.result(**result)
        try:
            if options.output is not None:
                write_result(options.output / "result.json", result)
        except OSError as error:
            problem = f"cannot write to {options.output}: {error.strerror or error}"
    ranks.fail_together(problem)
    training.say("done: " + describe(result))


def describe(result: dict[str, Any]) -> str:
    """Return the final figures as one line."""
    accuracy, rate = result["test_accuracy"], result["samples_per_second"]
    text = f"{result['epochs']} epochs in {result['train_seconds']:.1f} s, test accuracy "
    text += "-" if accuracy is None else f"{accuracy:.4f}"
    text += ", " + ("-" if rate is None else f"{rate:.0f}") + " samples/s"
    if result["target_accuracy"] is not None:
        reached = result["seconds_to_accuracy"]
        text += f", {result['target_accuracy']:g} "
        text += "not reached" if reached is None else f"reached after {reached:.1f} s"
    return text + f", {result['world_size']} ranks on {result['device']}"


def run(
    options: argparse.Namespace,
    join: Callable[[argparse.Namespace], Ranks] = Ranks,
    kind: type[Training] = Training,
) -> NoReturn:
    """Join the ranks, train and end the process: with 0, or 2 and one line that says why."""
    channel = Channel.from_env()
    channel.event("rendezvous")
    try:
        ranks = join(options)
    except (JobError, RuntimeError, ValueError) as error:
        complain(str(error).splitlines()[0])
        os._exit(2)
    status = 0
    try:
        train(options, ranks, channel, kind)
    except (JobError, hpml_checkpoint.CheckpointError) as error:
        status = 2
        if ranks.rank == 0:
            complain(str(error))
    channel.close()
    ranks.leave(status)


def complain(problem: str) -> None:
    """Print what is wrong, in one line."""
    print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(parse(None))
