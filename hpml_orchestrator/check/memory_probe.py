"""Measure a training's memory: run its program for a few optimizer steps, then end it.

    python memory_probe.py FIGURES SECONDS hooks|plain SCRIPT|-m MODULE [ARGUMENT...]

`hpml advise` starts it with the user's interpreter; it needs only the standard library, PyTorch
and Python 3.9. It writes the figures to the file FIGURES after each step, so that a killed program
leaves those of its last step. A program whose memory still grows is ended after SECONDS.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

_LEAST_STEPS, _MOST_STEPS = 4, 20
_WINDOW, _FLAT = 4, 1.003  # flat: no more growth than this over so many steps


class _Saved:
    """A tensor that the backward pass needs; counted until it is released."""

    __slots__ = ("key", "probe", "tensor")

    def __init__(self, probe: Probe, tensor: torch.Tensor, key: int) -> None:
        self.probe, self.tensor, self.key = probe, tensor, key

    def __del__(self) -> None:
        entry = self.probe.saved[self.key]
        entry[0] -= 1
        if not entry[0]:
            del self.probe.saved[self.key]
            self.probe.saved_bytes -= entry[1]


class Probe:
    """Counts what a training holds, from its first forward pass to the last measured step."""

    def __init__(self, target: str, seconds: float, *, hooks: bool) -> None:
        self.target, self.pid = target, os.getpid()
        self.until = time.monotonic() + seconds
        self.figures: dict[str, Any] = {"steps": 0, "activations": 0, "batch_bytes": 0}
        self.steps: dict[torch.optim.Optimizer, int] = {}
        self.weights: dict[int, int] = {}  # bytes of parameters and buffers, by storage
        self.saved: dict[int, list[int]] = {}  # storage -> [times saved, bytes]
        self.saved_bytes = 0
        self.peaks: list[int] = []  # after each step
        register_optimizer_step_post_hook(self._stepped)
        self.first = torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        self.hooks = contextlib.ExitStack()
        if hooks:
            self.hooks.enter_context(
                torch.autograd.graph.saved_tensors_hooks(
                    self._pack, lambda one: one.tensor if isinstance(one, _Saved) else one
                )
            )

        following, save = _BaseDataLoaderIter.__next__, torch.save

        def next_batch(loader: _BaseDataLoaderIter) -> object:
            batch = following(loader)
            with contextlib.suppress(Exception):
                self._note_batch(loader, batch)
            return batch

        def end_or_save(*args: Any, **options: Any) -> None:
            # Two steps suffice, and the checkpoint could overwrite one of a real run.
            if self.figures["steps"] > 1:
                os._exit(0)
            save(*args, **options)

        setattr(_BaseDataLoaderIter, "__next__", next_batch)  # noqa: B010 - mypy knows it as a method
        setattr(torch, "save", end_or_save)  # noqa: B010 - as above

    def _forward(self, *_: object) -> None:
        """Record the memory before the first forward pass, with model and data loaded."""
        self.first.remove()
        self.figures["before_bytes"] = _memory("VmRSS")
        self._models()

    def _models(self) -> list[torch.nn.Module]:
        """Return all existing modules, and record the storages of their parameters and buffers."""
        models = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        self.weights.clear()
        for model in models:
            for name in ("_parameters", "_buffers"):
                for tensor in getattr(model, name, {}).values():
                    with contextlib.suppress(Exception):  # None, or without a storage
                        whole = tensor.untyped_storage()
                        self.weights[whole.data_ptr()] = whole.nbytes()
        return models

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        try:
            whole = tensor.untyped_storage()
            key = whole.data_ptr()
        except Exception:  # noqa: BLE001 - a tensor without a storage, as of torch.func
            return tensor
        # Parameters are saved too, but count as weights. A forked loader worker inherits the hooks
        # and must not count for the rank.
        if key in self.weights or os.getpid() != self.pid:
            return tensor
        entry = self.saved.setdefault(key, [0, whole.nbytes()])
        entry[0] += 1
        if entry[0] == 1:
            self.saved_bytes += entry[1]
            self.figures["activations"] = max(self.figures["activations"], self.saved_bytes)
        return _Saved(self, tensor, key)

    def _note_batch(self, loader: Any, batch: object) -> None:
        size = _tensor_bytes(batch)
        if size > self.figures["batch_bytes"]:
            ahead = loader._num_workers * (getattr(loader, "_prefetch_factor", None) or 2)  # noqa: SLF001
            self.figures.update(batch_bytes=size, ahead=ahead or 1, pins=loader._pin_memory)  # noqa: SLF001

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        number = self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if number <= self.figures["steps"]:  # another optimizer in the same step
            return
        self.figures["steps"] = number
        if number == 1:
            self.hooks.close()  # one step suffices; later ones run without hooks
            self._describe()
        self.figures["optimizer"] = _tensor_bytes([one.state for one in self.steps])
        self._write()
        self.peaks.append(self.figures["peak_bytes"])
        # The C library's allocator adapts its thresholds to the largest blocks so far, so a process
        # grows during its first steps.
        settled = self.peaks[-1] <= _FLAT * self.peaks[-_WINDOW:][0]
        over = number >= _MOST_STEPS or time.monotonic() > self.until
        if number >= _LEAST_STEPS and (settled or over):
            os._exit(0)  # immediately, so that the program saves nothing

    def _describe(self) -> None:
        """Record the size of weights and gradients, and the depth of the model."""
        models = self._models()
        # nn.Sequential is not a layer; nn.TransformerEncoderLayer and the user's own modules are.
        kinds = Counter(str(type(one)) for one in models if getattr(one, "_modules", None))
        blocks = [n for kind, n in kinds.items() if "'torch.nn.mod" not in kind or "Layer'" in kind]
        repeated = max(blocks, default=0)
        leaves = sum(bool(getattr(model, "_parameters", None)) for model in models)
        groups = [group["params"] for one in self.steps for group in one.param_groups]
        gradients = [one.grad for group in groups for one in group if one.grad is not None]
        self.figures.update(
            weights=sum(self.weights.values()),
            gradients=sum({one.data_ptr(): _tensor_bytes(one) for one in gradients}.values()),
            ddp=any(type(one).__name__ == "DistributedDataParallel" for one in models),
            layers=repeated if repeated > 1 else max(1, leaves),
        )

    def _write(self) -> None:
        """Write the figures atomically: the program may be killed at any moment."""
        self.figures.update(peak_bytes=_memory("VmHWM"), file_bytes=_memory("RssFile"))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.figures["cuda_bytes"] = torch.cuda.max_memory_allocated()
            self.figures["device_bytes"] = torch.cuda.mem_get_info()[1]
            self.figures["device"] = torch.cuda.get_device_name()
        with open(f"{self.target}.new", "w", encoding="utf-8") as stream:
            json.dump(self.figures, stream)
        os.replace(f"{self.target}.new", self.target)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    value = list(value.values()) if isinstance(value, dict) else value
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _memory(name: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        return next((int(one.split()[1]) * 1024 for one in stream if one.startswith(name)), 0)


def main() -> None:
    """Run the program given on the command line."""
    target, seconds, hooks, program, *rest = sys.argv[1:]
    Probe(target, float(seconds), hooks=hooks == "hooks")
    if program == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [program, *rest], os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
