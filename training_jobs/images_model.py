"""Models of ddp_images.py and horovod_images.py, their optimizer, device and precision."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from math import cos, gcd, pi

import torch
from images_data import JobError
from torch import Tensor, nn


def normalization(channels: int) -> nn.Module:
    """Return a GroupNorm: the averages of a BatchNorm would differ between ranks."""
    return nn.GroupNorm(gcd(4, channels), channels)


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution with its normalization and activation."""
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), normalization(outputs), nn.ReLU()]


def cnn(channels: int, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a network of three convolutions."""
    layers = [*convolution(channels, width), *convolution(width, 2 * width), nn.MaxPool2d(2)]
    layers += [*convolution(2 * width, 2 * width), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(8 * width, classes))


class Residual(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        layers = [*convolution(inputs, outputs, stride), *convolution(outputs, outputs)[:-1]]
        # Begin as the identity: at its usual width the network did not learn otherwise.
        nn.init.zeros_(layers[-1].get_parameter("weight"))
        self.inner, self.shortcut = nn.Sequential(*layers), nn.Sequential()  # the input as it is
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride))
            self.shortcut.append(normalization(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of both paths."""
        return nn.functional.relu(self.inner(images) + self.shortcut(images))


def resnet18(channels: int, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a ResNet-18 for small images (its first layer keeps their size); usual width 64."""
    layers, inputs = convolution(channels, width), width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Residual(inputs, width << stage, stride))
            inputs = width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


MODELS = {"cnn": cnn, "resnet18": resnet18}


def make_model(options: Namespace, channels: int, classes: int, device: torch.device) -> nn.Module:
    """Return the model for the options, some of which may be missing."""
    sizes = channels, classes, options.width, options.dropout
    model = MODELS[options.model](*sizes).to(device)
    if getattr(options, "channels_last", False):
        nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    if getattr(options, "compile", False):
        model.compile()
    return model


def make_optimizer(model: nn.Module, options: Namespace) -> torch.optim.Optimizer:
    """Return the optimizer: SGD with Nesterov momentum."""
    parameters = model.parameters()
    return torch.optim.SGD(parameters, options.lr, 0.9, weight_decay=1e-4, nesterov=True)


def learning_rate(step: int, epoch_steps: int, world_size: int, options: Namespace) -> float:
    """Return the rate of a step: from that of one rank to that of all, then a cosine to 0."""
    # The global batch grows with the ranks, and the rate with it; at first that would diverge, so
    # the warm-up begins with the rate of a single rank (Goyal et al. 2017).
    warm_up, total = options.lr_warmup_epochs * epoch_steps, options.epochs * epoch_steps
    if step < warm_up:
        return float(options.lr * (1 + (world_size - 1) * step / warm_up))
    part = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return float(options.lr * world_size * 0.5 * (1 + cos(pi * part)))


def choose_device(options: Namespace) -> torch.device:
    """Return the GPU of this rank or the CPU, and replace `--amp auto` by what is fast there."""
    device, choice = torch.device("cpu"), getattr(options, "device", "auto")
    if choice != "cpu" and torch.cuda.is_available():
        # If only one GPU is visible, the launcher gave each rank its own.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif choice == "cuda":
        raise JobError("--device cuda: PyTorch sees no GPU here")
    if getattr(options, "amp", "") == "auto":  # GPUs from Ampere on are fast in bfloat16
        is_fast = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        options.amp = "bf16" if is_fast else "fp16" if device.type == "cuda" else "off"
    return device


def precision_of(
    options: Namespace, device: torch.device
) -> tuple[Callable[[], torch.autocast], torch.amp.GradScaler]:
    """Return the autocast context and the gradient scaler (fp16 only)."""
    half = torch.float16 if options.amp == "fp16" else torch.bfloat16
    autocast = partial(torch.autocast, device.type, half, enabled=options.amp != "off")
    return autocast, torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")
