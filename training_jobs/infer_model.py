"""What infer.py serves: the images of requests, and the model in float32, bf16 or int8."""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

import images_model
from hpml_checkpoint import Checkpoints, Ranks
from hpml_job import JobError
from images_files import Images, find_images

CALIBRATION = 256  # validation images that determine int8's ranges


class Data(NamedTuple):
    """Images for the requests, and images that determine int8's ranges."""

    images: Tensor
    labels: Tensor | None
    calibration: Tensor
    classes: int


def load_weights(options: argparse.Namespace, ranks: Ranks) -> dict[str, Tensor] | None:
    """Return the weights of --checkpoint-from; copy its model and image size to the options."""
    if not options.checkpoint_from:
        return None
    found = Checkpoints(options.checkpoint_from, ranks=ranks).latest()
    if found is None:
        raise JobError(f"--checkpoint-from {options.checkpoint_from}: there is no checkpoint")
    trained = json.loads((found.path / "checkpoint.json").read_text())["job"]
    options.model, options.width = trained["model"], trained["width"]
    options.trained_size = trained.get("size", 0)  # 0: size of the files
    weights: dict[str, Tensor] = found.state["network"]
    return weights


def read_data(options: argparse.Namespace) -> Data:
    """Return the images of the test part, or random ones."""
    if options.data is None:
        random = torch.Generator().manual_seed(options.seed)
        noise = torch.randn(2 * CALIBRATION, 3, options.size, options.size, generator=random)
        return Data(noise[:CALIBRATION], None, noise[CALIBRATION:], 10)
    parts, classes = find_images(options.data)
    size = getattr(options, "trained_size", 0)
    plain = argparse.Namespace(seed=options.seed, augment="off", size=size)
    read: dict[str, list[tuple[Tensor, int, str]]] = {}
    for part in ("validation", "test"):
        images = Images(parts[part], plain)
        read[part] = [images[number] for number in range(len(images))]
    if problem := next((one[2] for found in read.values() for one in found if one[2]), ""):
        raise JobError(problem)
    stacks = {part: torch.stack([one[0] for one in found]) for part, found in read.items()}
    labels = torch.tensor([one[1] for one in read["test"]])
    return Data(stacks["test"], labels, stacks["validation"][:CALIBRATION], classes)


def make_model(
    options: argparse.Namespace, data: Data, weights: dict[str, Tensor] | None
) -> nn.Module:
    """Return the model in float32 on the CPU, with loaded or random weights."""
    options.dropout = 0.0
    torch.manual_seed(options.seed)
    shape = tuple(data.images.shape[1:])
    model = images_model.make_model(options, shape, data.classes, torch.device("cpu"))
    if weights:
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = "was trained with other images than --data has"
            raise JobError(f"--checkpoint-from {options.checkpoint_from}: {reason}") from error
    return model.eval()


def quantized(model: nn.Module, images: Tensor) -> nn.Module:
    """Return the model with 8-bit convolutions and linear layers: weights and activations.

    Calibration images determine the ranges once; weights have one range per channel. Layers in
    between, such as normalizations, stay in float32.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch announces a successor package
        try:
            from torch.ao.quantization import get_default_qconfig_mapping  # noqa: PLC0415
            from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: PLC0415

            usual = get_default_qconfig_mapping("x86")
            prepared = prepare_fx(copy.deepcopy(model), usual, (images[:1],))
            prepared(images)
            changed: nn.Module = convert_fx(prepared)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise JobError(f"--dtype int8: PyTorch cannot convert this model: {reason}") from error
    return changed


def converted(
    model: nn.Module, data: Data, options: argparse.Namespace, device: torch.device
) -> nn.Module:
    """Return the model in the type in which it is served."""
    if options.dtype == "int8":
        if device.type == "cuda":
            raise JobError("--dtype int8: PyTorch's quantised layers need --device cpu")
        return quantized(model, data.calibration)
    half = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    return copy.deepcopy(model).to(device, half)


def scores_of(model: nn.Module, images: Tensor, options: argparse.Namespace) -> Tensor:
    """Return the scores of images as a CPU tensor, which means that the answer is complete."""
    half = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    place = "cpu" if options.dtype == "int8" else next(model.parameters()).device
    scores: Tensor = model(images.to(place, half))
    return scores.float().cpu()
