"""Four algorithms for a convolution layer, used by convolutions.py, and the cost of each.

All take images (batch, channels, height, width) and filters (filters, channels, kernel, kernel),
and return the layer's output with stride 1 and kernel // 2 zeros around the image.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv2d, fold, pad, unfold

# Winograd's F(2x2, 3x3): tiles of 4x4 pixels give 2x2 outputs (Lavin and Gray 2016). The matrices
# are Kronecker products: they transform rows and columns of a flattened tile at once.
_B = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
_G = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_A = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]])
IMAGE, FILTER, OUTPUT = (torch.kron(one, one) for one in (_B, _G, _A))


def direct(images: Tensor, filters: Tensor, *, tries: bool = False) -> Tensor:
    """Run PyTorch's own: oneDNN's; on GPUs cuDNN's choice or, with `tries`, the fastest found."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=tries, allow_tf32=False):
        return conv2d(images, filters, padding=filters.shape[-1] // 2)


def im2col(images: Tensor, filters: Tensor) -> Tensor:
    """Copy the pixels of each output into a column, and multiply two matrices."""
    count, kernel = len(filters), filters.shape[-1]
    columns = unfold(images, kernel, padding=kernel // 2)
    size = images.shape[-1] + 2 * (kernel // 2) - kernel + 1
    return (filters.reshape(count, -1) @ columns).view(len(images), count, size, size)


def fft_size(image: int, kernel: int) -> int:
    """Return a transform's length: at least the padded image, with prime factors 2, 3 and 5."""
    size = image + 2 * (kernel // 2)
    while 30**9 % size:  # finds all such numbers up to 512, some beyond
        size += 1
    return size


def fft(images: Tensor, filters: Tensor) -> Tensor:
    """Multiply in the frequency domain, where a convolution is an element-wise product."""
    image, kernel = images.shape[-1], filters.shape[-1]
    size, before = fft_size(image, kernel), kernel // 2
    padded = pad(images, (before, size - image - before) * 2)
    spectra = torch.fft.rfft2(padded)
    weights = torch.fft.rfft2(filters, s=(size, size)).conj()
    products = torch.einsum("ncxy,kcxy->nkxy", spectra, weights)
    whole: Tensor = torch.fft.irfft2(products, s=(size, size))
    end = image + 2 * before - kernel + 1
    return whole[..., :end, :end].contiguous()


def winograd(images: Tensor, filters: Tensor) -> Tensor:
    """Transform tiles of 4x4 pixels, so that 16 multiplications give 4 outputs instead of 36."""
    (count, channels, image, _), kinds = images.shape, len(filters)
    side = -(-image // 2)  # tiles per row
    tiles = unfold(pad(images, (1, 2 * side - image + 1) * 2), 4, stride=2)
    tiles = tiles.view(count, channels, 16, side * side)
    inputs = torch.einsum("ab,ncbt->acnt", IMAGE.to(images), tiles).reshape(16, channels, -1)
    weights = torch.einsum("ab,kcb->akc", FILTER.to(images), filters.reshape(kinds, channels, 9))
    products = (weights @ inputs).view(16, kinds, count, -1)
    outputs = torch.einsum("ab,bknt->nkat", OUTPUT.to(images), products)
    whole = fold(outputs.reshape(count, kinds * 4, -1), 2 * side, 2, stride=2)
    return whole[..., :image, :image].contiguous()


ALGORITHMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "direct": direct,
    "im2col": im2col,
    "fft": fft,
    "winograd": winograd,
    "benchmark": partial(direct, tries=True),  # torch.backends.cudnn.benchmark, only on GPUs
}


def costs(name: str, batch: int, options: argparse.Namespace) -> tuple[int, int]:
    """Return the multiplications of an algorithm, and the bytes of all tensors that it creates."""
    channels, kinds, kernel, image = (
        getattr(options, one) for one in ("channels", "filters", "kernel", "image")
    )
    outputs = (image + 2 * (kernel // 2) - kernel + 1) ** 2
    pairs = batch * kinds * channels
    if name == "fft":
        size = fft_size(image, kernel)
        numbers, maps = size * (size // 2 + 1), (batch + kinds) * channels + batch * kinds
        transforms = maps * size * size * math.ceil(math.log2(size * size))
        made = 4 * size * size * batch * (channels + kinds) + 8 * numbers * maps
        return 4 * pairs * numbers + transforms, made
    if name == "winograd":
        tiles = batch * (-(-image // 2)) ** 2
        made = tiles * (2 * 16 * channels + 16 * kinds + 2 * 4 * kinds) + 16 * kinds * channels
        padded = batch * channels * (2 * -(-image // 2) + 2) ** 2
        return 16 * tiles * kinds * channels, 4 * (made + padded)
    columns = 4 * batch * channels * kernel * kernel * outputs if name == "im2col" else 0
    return pairs * kernel * kernel * outputs, columns
