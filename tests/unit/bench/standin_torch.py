"""STAND-IN for PyTorch with two GPUs, of which the second one hangs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

__version__ = "0.0-standin"
version = SimpleNamespace(cuda="12.4", hip=None)
bfloat16, float16, float32, float64, uint8 = "bfloat16", "float16", "float32", "float64", "uint8"


class _Tensor:
    is_cuda = False

    def to(self, *_: Any) -> _Tensor:
        return self

    def copy_(self, *_: Any, **__: Any) -> None:
        time.sleep(1e-4)

    def __getitem__(self, _: Any) -> _Tensor:
        return self

    def numel(self) -> int:
        return 1 << 28


def randn(*_: Any, **__: Any) -> _Tensor:
    return _Tensor()


zeros = empty_like = randn


def mm(*_: Any, **__: Any) -> None:
    time.sleep(1e-4)


def set_num_threads(_: int) -> None:
    pass


def _set_device(index: int) -> None:
    if index == 1:
        time.sleep(600)


cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_properties=lambda index: SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", uuid=f"uuid{index}", major=9, total_memory=80 << 30
    ),
    set_device=_set_device,
    synchronize=lambda: None,
    empty_cache=lambda: None,
)
backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)))
