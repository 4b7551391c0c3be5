"""Image files for images_data.py: how they are found, divided into parts, and read as tensors."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from hpml_job import JobError

TEST_PART = 5  # every fifth image of a class is for testing,
VALIDATION_PART = 10  # and every tenth of the others for evaluations during the training
FOLDERS = {"train": "train", "validation": "val", "test": "test"}  # if the data is already split
ENDINGS = (".png", ".jpg", ".jpeg")
SHIFT_PART = 8  # images are shifted by up to an eighth of their size
Files = list[tuple[str, int]]  # paths and labels


class Images(Dataset[tuple[Tensor, int, str]]):
    """Image files as tensors in [-1, 1], with the label and the file's problem, if any.

    An unreadable file does not raise an exception: a rank that ends alone would leave the others
    waiting for it.

    Args:
        files: paths and labels; all images get the colours of the first one.
        options: with a size, images are resized and cropped; otherwise all must have the size of
            the first one.
    """

    def __init__(self, files: Files, options: argparse.Namespace) -> None:
        self.files, self._seed, self._augment = files, options.seed, options.augment
        self._is_resized = options.size > 0
        with Image.open(files[0][0]) as image:
            self.mode = "L" if image.mode in {"1", "L", "LA", "I", "I;16"} else "RGB"
            self.size = (options.size, options.size) if self._is_resized else image.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        # Indices beyond the files: the same files again, changed at random; see `train_batches`.
        draw, index = divmod(index, len(self.files))
        path, label = self.files[index]
        pixels = np.zeros((*self.size[::-1], len(self.mode)), dtype=np.float32)
        problem = ""
        try:
            with Image.open(path) as image:
                if not self._is_resized and image.size != self.size:
                    problem = f"{path} has {image.size} pixels, others {self.size}: use --size"
                else:
                    pixels[:] = np.asarray(self._converted(image)).reshape(pixels.shape)
        except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for a broken file
            problem = f"cannot read the image {path}: {error}"
        if draw:
            pixels = augmented(pixels, self._augment, (self._seed, draw, index))
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()) / 127.5 - 1.0, label, problem

    def _converted(self, image: Image.Image) -> Image.Image:
        if not self._is_resized:
            return image.convert(self.mode)
        image.draft(self.mode, self.size)  # large JPEG: decode no more pixels than needed
        return ImageOps.fit(image.convert(self.mode), self.size, Image.Resampling.BILINEAR)


def augmented(pixels: NDArray[np.float32], how: str, seed: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an image that is shifted at random and, with `flip`, mirrored with probability 1/2."""
    random, (height, width, _) = np.random.default_rng(seed), pixels.shape
    most = max(1, height // SHIFT_PART), max(1, width // SHIFT_PART)
    down, right = (int(random.integers(2 * one + 1)) for one in most)
    padded = np.pad(pixels, (*((one, one) for one in most), (0, 0)), mode="edge")
    pixels = padded[down : down + height, right : right + width]
    return pixels[:, ::-1] if how == "flip" and random.integers(2) else pixels


def find_images(data: Path, most: int = 0) -> tuple[dict[str, Files], int]:
    """Return (path, label) of each image by part, and the number of classes.

    The parts are `train`, `validation` and `test`. With `train/` and `val/` or `test/` the folders
    decide. A part without a folder gets some of all other images, chosen only by their names: the
    seed, the number of ranks and the path do not matter.

    Args:
        data: the directory.
        most: number of images to train with, equally many per class; larger sets include smaller
            ones. 0: all.

    Raises:
        JobError: fewer than two classes have an image for each part, or `most` is too large.
    """
    there = {part for part, name in FOLDERS.items() if (data / name).is_dir()}
    is_split = "train" in there and len(there) > 1
    missing = [part for part in ("test", "validation") if not is_split or part not in there]
    parts: dict[str, Files] = {"train": [], "validation": [], "test": []}
    order: list[tuple[int, str, int]] = []  # training images
    classes: list[str] = []
    for folder in folders_of(data / "train" if is_split else data, data):
        names = [*images_of(folder)]
        if len(names) <= len(missing):
            continue
        taken = {"test": max(1, len(names) // TEST_PART) if "test" in missing else 0}
        rest = len(names) - taken["test"]
        taken["validation"] = max(1, rest // VALIDATION_PART) if "validation" in missing else 0
        for part, count in taken.items():
            parts[part] += [(str(folder / name), len(classes)) for name in names[:count]]
            names = names[count:]
        order += [(n, str(folder / name), len(classes)) for n, name in enumerate(names)]
        classes.append(folder.name)
    if len(classes) <= 1:
        found = f"only {classes[0]}" if classes else "no such folder"
        needed = f"two folders with {len(missing) + 1} PNG or JPEG files or more (CLASS/NAME.png)"
        raise JobError(f"--data {data}: needs {needed}: {found}")
    for part in {"validation", "test"} - {*missing}:
        for folder in folders_of(data / FOLDERS[part], data):
            if folder.name not in classes:
                raise JobError(f"--data {data}: {folder} is not a class of {data / 'train'}")
            label = classes.index(folder.name)
            parts[part] += [(str(folder / name), label) for name in images_of(folder)]
        if not parts[part]:
            raise JobError(f"--data {data}: {data / FOLDERS[part]} has no PNG or JPEG file")
    parts["train"] = first_of(order, most, data)
    return {part: sorted(files) for part, files in parts.items()}, len(classes)


def first_of(order: list[tuple[int, str, int]], most: int, data: Path) -> Files:
    """Return the first `most` training images, taking turns between classes; 0: all."""
    classes = len({label for _, _, label in order})
    if most and not classes <= most <= len(order):
        there = f"{len(order)} of {classes} classes"
        raise JobError(
            f"--train-images {most}: must be one of each class or more: {data} has {there}"
        )
    return [(path, label) for _, path, label in sorted(order)[: most or None]]


def folders_of(directory: Path, data: Path) -> list[Path]:
    """Return the sorted folders in a directory."""
    try:
        return sorted(one for one in directory.iterdir() if one.is_dir() and one.name[0] != ".")
    except OSError as error:
        raise JobError(f"--data {data}: {error.strerror}") from error


def images_of(folder: Path) -> Iterator[str]:
    """Yield the names of a class's images, including subfolders, in a pseudo-random order."""
    names = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, files in os.walk(folder)
        for name in files
        if name.lower().endswith(ENDINGS) and name[0] != "."
    ]
    # With a digest of its name, an image stays in the same part wherever the data is, and
    # neighbouring names, which are often similar images, are spread over the parts.
    digests = [hashlib.sha256(os.fsencode(f"{folder.name}/{name}")).digest() for name in names]
    return (name for _, name in sorted(zip(digests, names)))  # noqa: B905 - Python 3.9
