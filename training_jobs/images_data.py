"""Folders of PNG files for ddp_images.py and horovod_images.py: what a rank reads, and when."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks

TEST_PART = 5  # every fifth image of a class is for testing,
VALIDATION_PART = 10  # and every tenth of the others for the evaluations during the training
# A checkpoint with other settings is refused.
SAME = ["model", "width", "dropout", "epochs", "batch_size", "lr", "lr_warmup_epochs", "seed"]


class JobError(Exception):
    """A problem that the user can fix; the message is one line."""


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
    steady_seconds: float = 0.0  # of this rank, after the warm-up
    steady_samples: int = 0


def say(ranks: Ranks, text: str) -> None:
    """Print a line, on rank 0 only."""
    if ranks.rank == 0:
        print(text, flush=True)


def raise_together(ranks: Ranks, problem: str) -> None:
    """Raise a JobError on all ranks if one of them has a problem: otherwise the others wait."""
    if problems := [*filter(None, ranks.gather(problem))]:
        raise JobError(problems[0])


def report(
    result: Mapping[str, object], channel: Channel, output: Path | None, ranks: Ranks
) -> None:
    """Report the result of a training, and write it to result.json in a directory; on rank 0."""
    if ranks.rank == 0:
        channel.result(**result)
    if ranks.rank == 0 and output is not None:
        (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")


class Images(Dataset[tuple[Tensor, int, str]]):
    """PNG files as tensors in [-1, 1], with the label and what is wrong with the file, if anything.

    A file that cannot be read is not an exception: a rank that ended alone would leave the others
    waiting for it.

    Args:
        files: paths and labels; all images have the size and the colours of the first one.
    """

    def __init__(self, files: list[tuple[str, int]]) -> None:
        self.files = files
        with Image.open(files[0][0]) as image:
            self.mode = "L" if image.mode in {"1", "L", "LA", "I", "I;16"} else "RGB"
            self.size = image.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        path, label = self.files[index]
        pixels = np.zeros((*self.size[::-1], len(self.mode)), dtype=np.float32)
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


def find_images(data: Path) -> tuple[dict[str, list[tuple[str, int]]], int]:
    """Return (path, label) of the images of `train`, `validation` and `test`; and how many classes.

    An image's part depends on its name only: not on the seed, the number of ranks or the place of
    the data.

    Raises:
        JobError: fewer than two folders have three PNG files.
    """
    parts: dict[str, list[tuple[str, int]]] = {"train": [], "validation": [], "test": []}
    classes: list[str] = []
    try:
        folders = sorted(one for one in data.iterdir() if one.is_dir() and one.name[0] != ".")
    except OSError as error:
        raise JobError(f"--data {data}: {error.strerror}") from error
    for folder in folders:
        names = [name for name in os.listdir(folder) if name.lower().endswith(".png")]
        # By a digest of its name an image stays for testing wherever the data lie, and neighbouring
        # names, which are often alike, are spread over the parts.
        digests = [hashlib.sha256(os.fsencode(f"{folder.name}/{name}")).digest() for name in names]
        files = [(str(folder / name), len(classes)) for _, name in sorted(zip(digests, names))]  # noqa: B905 - Python 3.9
        if len(files) >= len(parts):
            tested = max(1, len(files) // TEST_PART)
            end = tested + max(1, (len(files) - tested) // VALIDATION_PART)
            parts["test"] += files[:tested]
            parts["validation"] += files[tested:end]
            parts["train"] += files[end:]
            classes.append(folder.name)
    if len(classes) <= 1:
        found = f"only {classes[0]}" if classes else "no such folder"
        needed = "two folders with three PNG files or more (CLASS/NAME.png)"
        raise JobError(f"--data {data}: needs {needed}: {found}")
    return {part: sorted(files) for part, files in parts.items()}, len(classes)


class ImageData:
    """The images of one rank.

    Args:
        options: has data, output, profile (may be missing), batch_size, workers and seed.
        ranks: of hpml_checkpoint.py, or another object with rank, world_size and gather.
        device: that the images are for.

    Attributes:
        problem: what is wrong with an image that was read, if anything.
        images: of all ranks, by part: `train`, `validation` and `test`.
        classes, channels: of the model.
        shape: of an image: channels, height, width.
        train_steps: of an epoch.

    Raises:
        JobError: the data or a directory cannot be used; on all ranks.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._seed, self._batch_size = ranks, options.seed, options.batch_size
        self._order: list[int] = []
        self._evaluated: list[int] = []
        self._mine: dict[str, range] = {}  # this rank's images to validate or to test with
        self.problem, self.images = "", dict[str, int]()
        load = partial(
            DataLoader,
            batch_size=options.batch_size,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=device.type == "cuda",
            # A loader draws a seed for its workers in each epoch. With the global generator that
            # would move the random numbers of dropout, and a resumed run would differ from an
            # uninterrupted one.
            generator=torch.Generator().manual_seed(options.seed),
        )
        try:
            parts, self.classes = find_images(options.data)
            self.images = {part: len(files) for part, files in parts.items()}
            files = parts["train"]
            if len(files) < ranks.world_size:
                few = f"{len(files)} images for {ranks.world_size} ranks"
                raise JobError(f"--data {options.data}: {few}")
            for part in ("validation", "test"):
                # In each batch of an evaluation the ranks meet (see `is_stopped` in ddp_images.py):
                # a rank with a batch less would leave the others waiting.
                padding = [(files[0][0], -1)] * (-self.images[part] % ranks.world_size)
                first, files = len(files), [*files, *parts[part], *padding]
                self._mine[part] = range(first + ranks.rank, len(files), ranks.world_size)
            images = Images(files)
            self.channels = len(images.mode)
            self.shape = self.channels, *images.size[::-1]
            self._train = load(images, sampler=self._order)
            self._evaluation = load(images, sampler=self._evaluated)
            # Workers start before the first collective: after it, gloo's threads create Python
            # thread states, and up to Python 3.11 a fork in that moment leaves a worker that hangs.
            for loader in (self._train, self._evaluation) if options.workers else ():
                iter(loader)
            for directory in filter(None, (options.output, getattr(options, "profile", None))):
                directory.mkdir(parents=True, exist_ok=True)
        except (JobError, OSError) as error:
            self.problem = str(error)
        raise_together(ranks, self.problem)
        self.train_steps = -(-(self.images["train"] // ranks.world_size) // options.batch_size)

    def train_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return images and labels from a step, counted over all epochs, to its epoch's end."""
        epoch, done = divmod(step, self.train_steps)
        order = order_of(epoch, self.images["train"], self._seed, self._ranks)
        # In place: this list is the loader's sampler, whose workers stay from epoch to epoch.
        self._order[:] = order[done * self._batch_size :]
        return self._batches(self._train)

    def evaluation_batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Return images and labels of `validation` or `test`: equally many batches on all ranks.

        For that some ranks have an image more, with a label of no class: -1.
        """
        self._evaluated[:] = self._mine[part]
        return self._batches(self._evaluation)

    def _batches(
        self, loader: DataLoader[tuple[Tensor, int, str]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, problems in loader:
            self.problem = self.problem or next(filter(None, problems), "")
            yield images, labels


def order_of(epoch: int, images: int, seed: int, ranks: Ranks) -> list[int]:
    """Return this rank's share of an epoch's order, which depends on the seed and the epoch alone.

    Ranks take turns; the few images that do not go round are left out of this epoch, so that all
    ranks have the same number of steps.
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
    # The position in an epoch depends on both: with others images would repeat or be left out.
    job.update(world_size=ranks.world_size, train_images=data.images["train"])
    return Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
