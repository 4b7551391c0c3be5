"""A byte-level GPT, and what MFU needs: its FLOPs and the peaks of devices; used by lm.py."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PEAKS = {  # TFLOP/s of dense matrix products by specification: float32 (not TF32), bfloat16
    "NVIDIA A30": (10.3, 165),
    "NVIDIA A40": (37.4, 149.7),
    "NVIDIA A100-SXM4-40GB": (19.5, 312),
    "NVIDIA A100-SXM4-80GB": (19.5, 312),
    "NVIDIA A100-PCIE-40GB": (19.5, 312),
    "NVIDIA A100 80GB PCIe": (19.5, 312),
    "NVIDIA L4": (30.3, 121),
    "NVIDIA L40S": (91.6, 362),
    "NVIDIA H100 80GB HBM3": (67, 989),
    "NVIDIA H100 PCIe": (51, 756),
    "NVIDIA H100 NVL": (60, 836),
    "NVIDIA H200": (67, 989),
    "NVIDIA GH200 480GB": (67, 990),
    "NVIDIA B200": (75, 2250),
    "AMD Instinct MI300X": (163.4, 1307.4),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm and a residual connection."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block: (sequences, bytes, width), as x."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv  # each (sequences, heads, bytes, numbers of a head)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A pre-norm transformer over bytes. Its head is not tied to the embedding."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.recompute, self.is_mixed = options.recompute, options.amp == "bf16"
        self.byte_embedding = nn.Embedding(256, options.width)
        self.place_embedding = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, 256)
        for matrix in (one for one in self.parameters() if one.dim() > 1):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss of each window's bytes, given those before them, in nats."""
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.is_mixed):
            places = torch.arange(windows.shape[1] - 1, device=windows.device)
            x = self.byte_embedding(windows[:, :-1]) + self.place_embedding(places)
            for block in self.blocks:
                # Only a backward pass needs activations again.
                is_recomputed = self.recompute and self.training
                x = checkpoint(block, x, use_reentrant=False) if is_recomputed else block(x)
            scores = self.head(self.norm(x)).float().transpose(1, 2)
        return nn.functional.cross_entropy(scores, windows[:, 1:], reduction="none").mean(1)


def flops_per_token(network: nn.Module, options: Namespace) -> int:
    """Return 6 N + 12 L H Q T, of a forward and a backward pass; recomputation does not count.

    N parameters without embeddings, L layers, H heads of Q numbers each, T bytes in a sequence.
    """
    sizes = {name: one.numel() for name, one in network.named_parameters()}
    parameters = sum(size for name, size in sizes.items() if "embedding" not in name)
    head: int = options.width // options.heads
    attention: int = 12 * options.layers * options.heads * head * options.sequence
    return 6 * parameters + attention


def peak_flops(device: torch.device, options: Namespace) -> tuple[float | None, str]:
    """Return the FLOP/s of a device, None if unknown, and a text about them to print."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    dtype = "bfloat16" if options.amp == "bf16" else "float32"
    tflops = options.peak_tflops or PEAKS.get(name, (0, 0))[dtype == "bfloat16"]
    origin = "measured" if options.peak_tflops else "specification" if tflops else "unknown"
    return tflops * 1e12 or None, f"{tflops or '-'} TFLOP/s ({dtype} on {name}, {origin})"
