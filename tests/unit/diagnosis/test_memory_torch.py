"""What the formulas of memory say about a transformer is what PyTorch does with one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.memory import Transformer

torch: Any = pytest.importorskip("torch")
TorchDispatchMode: Any = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode


def _saved_by_layers(precision: str, shape: Transformer) -> float:
    """Return the bytes that PyTorch saves for the backward pass of pre-norm layers, on the CPU."""
    size, kind = shape.hidden, torch.bfloat16 if precision == "bfloat16" else torch.float32
    blocks = [
        torch.nn.ModuleDict(
            {
                "norm": torch.nn.LayerNorm(size),
                "attend": torch.nn.Linear(size, 3 * size),
                "project": torch.nn.Linear(size, size),
                "second": torch.nn.LayerNorm(size),
                "widen": torch.nn.Linear(size, 4 * size),
                "narrow": torch.nn.Linear(4 * size, size),
            }
        ).to(kind)
        for _ in range(shape.layers)
    ]
    own = {one.data_ptr() for block in blocks for one in block.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.zeros(1, shape.sequence, size, dtype=kind, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        for block in blocks:
            q, k, v = block["attend"](block["norm"](x)).split(size, 2)
            y = torch.nn.functional.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], is_causal=True
            )
            x = x + block["project"](y[:, 0])
            y = torch.nn.functional.gelu(block["widen"](block["second"](x)))
            x = x + block["narrow"](y)
    return sum(saved.values())


class _Peak(TorchDispatchMode):  # type: ignore[misc]
    """The most bytes at once of all tensors made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            storage = one.untyped_storage()
            if storage.data_ptr() not in self.alive:
                self.alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage.data_ptr(), 0)
        self.most = max(self.most, sum(self.alive.values()))
        return made


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_pytorch_keeps_what_the_formulas_say(precision: str) -> None:
    """Tensors saved by layers of a GPT without dropout, and the peak of its loss, on the CPU."""
    shape = Transformer(2, hidden=64, sequence=256, vocabulary=2048)
    layer = _saved_by_layers(precision, shape) / shape.layers
    masks = 2 * shape.sequence * shape.hidden
    casts = 2 * 12 * shape.hidden**2 if precision == "autocast" else 0  # counted as weights
    assert layer - casts == pytest.approx(shape.layer_bytes(precision) - masks, rel=0.03)
    kind = torch.float32 if precision == "float32" else torch.bfloat16
    logits = torch.zeros(shape.sequence, shape.vocabulary, dtype=kind, requires_grad=True)
    labels = torch.zeros(shape.sequence, dtype=torch.int64)
    with _Peak() as peak:
        # autocast casts for cross_entropy by itself on GPUs; other trainings do it like this
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
    needed = logits.nbytes + peak.most
    assert needed == pytest.approx(shape.logits_bytes(precision), rel=0.01)
