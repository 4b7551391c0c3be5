"""A GPT for lm.py, and what MFU needs: its FLOPs and the peaks of devices."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

PEAKS = {  # specified TFLOP/s of dense matrix products: float32 (not TF32), bfloat16
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
    """Attention and a feed-forward network, each with a norm and a residual connection."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        width, self.head_width = options.width, options.width // options.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # The rows of qkv are grouped by head: its queries, keys and values. So a slice of the rows
        # is a slice of the heads, as tensor parallelism needs.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block: (sequences, tokens, width), like x."""
        heads = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)  # each (sequences, heads, tokens, head width)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A pre-norm transformer. Its head shares the token embedding's matrix, unless --untied."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.recompute, self.is_mixed = options.recompute, options.amp == "bf16"
        self.is_first = self.is_last = True
        self.token_embedding = nn.Embedding(options.vocabulary, options.width)
        self.place_embedding = nn.Embedding(options.sequence, options.width)
        # Keyed by number, which stays the same if a pipeline stage has only some of them.
        self.blocks = nn.ModuleDict({str(one): Block(options) for one in range(options.layers)})
        self.norm = nn.LayerNorm(options.width)
        if options.untied:
            self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        for name, one in self.named_parameters():
            # 2 L branches add to the residual stream; scale them so that the sum has the size of
            # one.
            is_branch = name.endswith(("out.weight", "down.weight"))
            if one.dim() > 1:
                nn.init.normal_(one, std=0.02 / (math.sqrt(2 * options.layers) if is_branch else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(one)

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drop the parts of other pipeline stages; a tied head keeps a copy of the embedding."""
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        layers = len(self.blocks)
        for name in list(self.blocks):
            if int(name) * stages // layers != stage:
                del self.blocks[name]
        if not self.is_first:
            del self.place_embedding
        if not self.is_last:
            del self.norm
        if hasattr(self, "head") and not self.is_last:
            del self.head
        if not self.is_first and (hasattr(self, "head") or not self.is_last):
            del self.token_embedding

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return each sequence's mean loss in nats; without targets, the scores of next tokens.

        Args:
            x: tokens, (sequences, tokens); in later stages of a pipeline, the output of the
                previous
                stage, (sequences, tokens, width), which all stages but the last return.
            targets: the tokens that follow, (sequences, tokens).
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.is_mixed):
            if self.is_first:
                places = torch.arange(x.shape[1], device=x.device)
                x = self.token_embedding(x) + self.place_embedding(places)
            for block in self.blocks.values():
                # Only a backward pass needs activations again.
                is_recomputed = self.recompute and self.training
                x = checkpoint(block, x, use_reentrant=False) if is_recomputed else block(x)
            if not self.is_last:
                return x
            head = self.head if hasattr(self, "head") else self.token_embedding
            scores = nn.functional.linear(self.norm(x), head.weight).float()
        if targets is None:
            return scores
        losses = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
        return losses.mean(1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Group parameters for an optimizer: norms, biases and embeddings do not decay.

    Parameters that are divided over ranks (DTensor) have separate groups.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, one in model.named_parameters():
        decays = one.dim() > 1 and "embedding" not in name
        groups.setdefault((decays, isinstance(one, DTensor)), []).append(one)
    return [
        {"params": ones, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), ones in groups.items()
    ]


def flops_per_token(network: nn.Module, options: Namespace) -> int:
    """Return 6 N + 12 L H Q T, for a forward and a backward pass, without recomputation.

    N parameters, L layers, H heads of width Q, T tokens per sequence. Embeddings do not count,
    because rows are looked up; the matrix that a tied head multiplies with does.
    """
    lookups = ("place_embedding", "token_embedding") if options.untied else ("place_embedding",)
    sizes = {name: one.numel() for name, one in network.named_parameters()}
    parameters = sum(size for name, size in sizes.items() if not name.startswith(lookups))
    head: int = options.width // options.heads
    attention: int = 12 * options.layers * options.heads * head * options.sequence
    return 6 * parameters + attention


def peak_flops(device: torch.device, options: Namespace) -> tuple[float | None, str]:
    """Return a device's FLOP/s, None if unknown, and a text about it to print."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    dtype = "bfloat16" if options.amp == "bf16" else "float32"
    tflops, origin = options.peak_tflops or 0.0, "--peak-tflops"
    if not tflops:
        origin = "measured by hpml bench"
        with suppress(ValueError):
            tflops = float(os.environ.get("HPML_PEAK_TFLOPS", "0"))
    if not 0 < tflops < math.inf:
        tflops = PEAKS.get(name, (0.0, 0.0))[dtype == "bfloat16"]
        origin = "specification" if tflops else "unknown"
    return tflops * 1e12 or None, f"{tflops or '-'} TFLOP/s ({dtype} on {name}, {origin})"
