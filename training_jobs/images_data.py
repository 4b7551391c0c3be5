"""Folders of images for ddp_images.py and horovod_images.py: what a rank reads, and when."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks
from hpml_job import JobError, make_directories, raise_together
from images_files import Images, find_images

# A checkpoint with other settings is refused. Settings of the second line are newer: a checkpoint
# contains them only if they differ from the defaults, with which older ones were trained.
SAME = ["model", "width", "dropout", "epochs", "batch_size", "lr", "lr_warmup_epochs", "seed"]
USUAL = {"optimizer": "nesterov", "weight_decay": 1e-4, "size": 0, "augment": "off"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the data that are not numbers."""
    add = parser.add_argument
    text = "has one folder per class, or train/ and val/ with one per class"
    add("--data", type=Path, required=True, metavar="DIR", help=text)
    text = "shift images at random, in each epoch anew; flip: mirror them, too"
    add("--augment", choices=("off", "shift", "flip"), default="off", help=text)
    text = "from such an epoch N times the batch, at a constant rate: 6:2,9:4"
    add("--batch-schedule", type=read_schedule, default=(), metavar="EPOCH:N,…", help=text)


def read_schedule(text: str) -> list[tuple[int, int]]:
    """Return the pairs of `6:2,9:4`."""
    try:
        pairs = [
            (int(epoch), int(times)) for epoch, times in (p.split(":") for p in text.split(","))
        ]
    except ValueError:
        pairs = []
    epochs = [epoch for epoch, _ in pairs]
    if not pairs or min(map(min, pairs)) < 1 or epochs != sorted(set(epochs)):
        # argparse shows the text of this exception.
        raise argparse.ArgumentTypeError(f"{text!r} must be rising epochs with factors, as 6:2,9:4")
    return pairs


@dataclass
class Position:
    """The progress of a training of ddp_images.py, over all restarts."""

    epochs: int = 0
    step: int = 0
    validation_accuracy: float | None = None
    test_accuracy: float | None = None
    seconds_to_accuracy: float | None = None
    train_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    steady_seconds: float = 0.0  # on this rank, after the warm-up
    steady_samples: int = 0


class ImageData:
    """The images of one rank.

    Args:
        options: from `add_options`, and data, output, profile, batch_size, epochs, workers, seed,
            size and train_images.
        ranks: see hpml_checkpoint.py, or another object with rank, world_size and gather.
        device: device that uses the images.

    Attributes:
        problem: the problem of an image that was read, if any.
        images: numbers of images on all ranks, by part: `train`, `validation` and `test`.
        classes: number of the model's classes.
        shape: shape of an image: channels, height, width.
        train_steps: steps of the first epoch.
        starts: the step at which each epoch starts, and the step at which the last one ends.

    Raises:
        JobError: the data or a directory cannot be used; on all ranks.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._options = ranks, options
        self._order: list[list[int]] = []  # the images of each batch
        self._evaluated: list[list[int]] = []
        self._files = 0
        self._mine: dict[str, range] = {}  # this rank's images for validation and test
        self.problem, self.images = "", dict[str, int]()
        load = partial(
            DataLoader,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=device.type == "cuda",
            # A loader draws a seed for its workers in each epoch. With the global generator that
            # would change the random numbers of dropout, and a resumed run would differ from an
            # uninterrupted one.
            generator=torch.Generator().manual_seed(options.seed),
        )
        try:
            parts, self.classes = find_images(options.data, options.train_images)
            self.images = {part: len(files) for part, files in parts.items()}
            files = parts["train"]
            if len(files) < ranks.world_size:
                few = f"{len(files)} images for {ranks.world_size} ranks"
                raise JobError(f"--data {options.data}: {few}")
            for part in ("validation", "test"):
                # The ranks synchronize in each batch of an evaluation (`is_stopped` in
                # ddp_images.py): a rank with one batch less would leave the others waiting.
                padding = [(files[0][0], -1)] * (-self.images[part] % ranks.world_size)
                first, files = len(files), [*files, *parts[part], *padding]
                self._mine[part] = range(first + ranks.rank, len(files), ranks.world_size)
            images, self._files = Images(files, options), len(files)
            self.shape = len(images.mode), *images.size[::-1]
            self._train = load(images, batch_sampler=self._order)
            self._evaluation = load(images, batch_sampler=self._evaluated)
            # Start workers before the first collective: after it, gloo's threads create Python
            # thread states, and up to Python 3.11 a fork at that moment leaves a hanging worker.
            for loader in (self._train, self._evaluation) if options.workers else ():
                iter(loader)
        except (JobError, OSError) as error:
            self.problem = str(error)
        raise_together(ranks, self.problem)
        make_directories(options, ranks)
        share = self.images["train"] // ranks.world_size
        steps = (-(-share // self._batch_size(epoch)) for epoch in range(options.epochs))
        self.starts = [*accumulate(steps, initial=0)]
        self.train_steps = self.starts[1]

    def _batch_size(self, epoch: int) -> int:
        """Return the images per rank and step of an epoch, counted from 0."""
        past = [times for first, times in self._options.batch_schedule if first <= epoch + 1]
        return int(self._options.batch_size * (past[-1] if past else 1))

    def train_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels from a step, counted over all epochs, to the end of its epoch."""
        epoch = bisect_right(self.starts, step) - 1
        order = order_of(epoch, self.images["train"], self._options.seed, self._ranks)
        if self._options.augment != "off":  # the augmentation depends on image and epoch only
            order = [number + (epoch + 1) * self._files for number in order]
        # In place: this list is the loader's sampler, whose workers persist across epochs.
        size, done = self._batch_size(epoch), step - self.starts[epoch]
        self._order[:] = cut(order, size)[done:]
        return self._batches(self._train)

    def evaluation_batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels of `validation` or `test`: equally many batches on all ranks.

        To make that possible, some ranks get one more image with the label -1, which is no class.
        """
        self._evaluated[:] = cut([*self._mine[part]], self._options.batch_size)
        return self._batches(self._evaluation)

    def _batches(
        self, loader: DataLoader[tuple[Tensor, int, str]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, problems in loader:
            self.problem = self.problem or next(filter(None, problems), "")
            yield images, labels


def cut(numbers: list[int], size: int) -> list[list[int]]:
    """Divide numbers into batches; the last one may be smaller."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def order_of(epoch: int, images: int, seed: int, ranks: Ranks) -> list[int]:
    """Return this rank's share of an epoch's order, which depends only on the seed and the epoch.

    Ranks take turns; a remainder of images is left out of this epoch, so that all ranks have the
    same number of steps.
    """
    # Not `seed + epoch`: epoch 2 of seed 1 must not have the order of epoch 1 of seed 2.
    random = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(images, generator=random).tolist()
    return order[ranks.rank : images - images % ranks.world_size : ranks.world_size]


def checkpoints_of(
    options: argparse.Namespace, data: ImageData, channel: Channel, ranks: Ranks
) -> Checkpoints | None:
    """Return the checkpoints of a training, if there is a directory for them."""
    if options.checkpoint is None:
        return None
    job = {name: getattr(options, name) for name in SAME}
    later = {**USUAL, "batch_schedule": ()}
    job.update({name: value for name in later if (value := getattr(options, name)) != later[name]})
    # The position in an epoch depends on both: otherwise images would repeat or be left out.
    job.update(world_size=ranks.world_size, train_images=data.images["train"])
    return Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
