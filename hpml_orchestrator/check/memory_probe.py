"""Measure a training's memory: run its program for a few optimizer steps, then end it.

    python memory_probe.py SPEC.json [ARGUMENT...]

Started by `hpml advise` with the user's interpreter and in a scratch directory; needs only the
standard library, PyTorch and Python 3.9. Whatever the program would write elsewhere is refused.
The figures are written to `output` of SPEC.json after each step, so that a program that is killed
leaves those of its last step.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import ModuleType

    import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit events whose first arguments name paths that change
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.rename": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
}
_LINKS = ("os.link", "os.symlink")
_WINDOW, _FLAT = 4, 1.003  # no growth by more over so many steps
_ANYWHERE = ("/dev/", "/proc/")


class Guard:
    """Refuses changes outside the scratch directory.

    Inside are links to the user's files: one that is opened for writing becomes a copy first.
    """

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.realpath(scratch)
        self.refused: list[str] = []
        self._busy = threading.local()

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        """Look at one audit event; raises PermissionError to refuse it."""
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._check(path, keep=not flags & os.O_TRUNC, opens=True)
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                self._check(path)
        elif event in _LINKS:
            self._check(args[1])

    def _check(self, path: object, *, keep: bool = False, opens: bool = False) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            text = os.path.abspath(os.fsdecode(path))
            if opens and os.path.islink(text):
                self._copy(text, keep=keep)
            # The last part is not followed: to remove or rename a link leaves its target alone.
            folder = os.path.realpath(os.path.dirname(text))
            real = os.path.realpath(text) if opens else os.path.join(folder, os.path.basename(text))
            if real.startswith(_ANYWHERE) or (real + os.sep).startswith(self.scratch + os.sep):
                return
        finally:
            self._busy.now = False
        self.refused.append(text)
        raise PermissionError(
            13, "hpml advise refuses to write outside its scratch directory", text
        )

    def _copy(self, link: str, *, keep: bool) -> None:
        folder = os.path.realpath(os.path.dirname(link))
        if not (folder + os.sep).startswith(self.scratch + os.sep) or os.path.isdir(link):
            return
        content = b""
        if keep and os.path.exists(link):
            with open(link, "rb") as stream:
                content = stream.read()
        os.unlink(link)
        with open(link, "wb") as stream:
            stream.write(content)


class _Saved:
    """A tensor that the backward pass needs; counted until it is released."""

    __slots__ = ("_probe", "key", "tensor")

    def __init__(self, probe: Probe, tensor: torch.Tensor, key: int) -> None:
        self._probe, self.tensor, self.key = probe, tensor, key

    def __del__(self) -> None:
        self._probe.release(self.key)


class Probe:
    """Counts what a training holds, from its first optimizer step to the last one wanted."""

    def __init__(self, spec: dict[str, Any], guard: Guard) -> None:
        self.spec, self.guard = spec, guard
        self.steps = 0
        self._by_optimizer: dict[int, int] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._known: set[int] = set()  # storages of parameters and buffers
        self._saved: dict[int, list[int]] = {}  # storage -> [how often it is saved, bytes]
        self._bytes = 0
        self._context: torch.autograd.graph.saved_tensors_hooks | None = None
        self._pid = os.getpid()
        self._peaks: list[int] = []  # after each step
        self._began = time.monotonic()  # the first forward pass
        self._until = time.monotonic() + spec["seconds"]
        self.figures: dict[str, Any] = {"steps": 0, "end": "killed"}

    def install(self) -> None:
        """Register the hooks.

        Raises:
            ImportError: there is no PyTorch, or one that is too old.
        """
        import torch  # noqa: PLC0415 - the user's Python may lack it
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415 - as above

        self.torch = torch
        register_optimizer_step_post_hook(self._stepped)
        self._first = torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        if self.spec.get("saved", True):
            self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            self._context.__enter__()
        self._watch_loaders()
        self.figures["imported_bytes"] = memory().get("VmRSS", 0)

    def _watch_loaders(self) -> None:
        """Record the size of a batch, and how many batches a loader prepares ahead."""
        from torch.utils.data import dataloader  # noqa: PLC0415 - as in install()

        kind = dataloader._BaseDataLoaderIter  # noqa: SLF001
        original = kind.__next__

        def following(loader: dataloader._BaseDataLoaderIter) -> object:
            batch = original(loader)
            with contextlib.suppress(Exception):
                self._note_batch(loader, batch)
            return batch

        setattr(kind, "__next__", following)  # noqa: B010 - mypy knows it as a method

    def _note_batch(self, loader: object, batch: object) -> None:
        size = tensor_bytes(self.torch, batch)
        if size <= self.figures.get("batch_bytes", 0):
            return
        workers = int(getattr(loader, "_num_workers", 0))
        ahead = workers * int(getattr(loader, "_prefetch_factor", None) or 2) if workers else 1
        self.figures.update(
            batch_bytes=size,
            workers=workers,
            ahead=ahead,
            pins=bool(getattr(loader, "_pin_memory", False)),
        )

    def _forward(self, *_: object) -> None:
        """Record the memory before the first forward pass, with model and data loaded."""
        self._first.remove()
        self._began = time.monotonic()
        self.figures["before_bytes"] = memory().get("VmRSS", 0)
        self._know_modules()

    def _know_modules(self) -> list[torch.nn.Module]:
        kind = self.torch.nn.Module
        models = [one for one in gc.get_objects() if issubclass(type(one), kind)]
        for model in models:
            with contextlib.suppress(Exception):
                for tensor in (*model._parameters.values(), *model._buffers.values()):  # noqa: SLF001
                    if tensor is not None:
                        self._known.add(storage(tensor)[0])
        return models

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        try:
            key, size = storage(tensor)
            # Parameters are saved too, but they are counted as weights. A forked loader worker
            # inherits the hooks and must not count for the rank.
            if key in self._known or os.getpid() != self._pid:
                return tensor
            entry = self._saved.setdefault(key, [0, size])
        except Exception:  # noqa: BLE001 - a tensor without a storage, as of torch.func
            return tensor
        entry[0] += 1
        if entry[0] == 1:
            self._bytes += size
            if self._bytes > self.figures.get("activations", 0):
                self.figures["activations"] = self._bytes
        return _Saved(self, tensor, key)

    def release(self, key: int) -> None:
        """Count one saved tensor less."""
        entry = self._saved[key]
        entry[0] -= 1
        if not entry[0]:
            del self._saved[key]
            self._bytes -= entry[1]

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        number = self._by_optimizer[id(optimizer)] = self._by_optimizer.get(id(optimizer), 0) + 1
        self._optimizers[id(optimizer)] = optimizer
        if number <= self.steps:
            return
        self.steps = number
        self.figures["stepping_seconds"] = time.monotonic() - self._began
        if number == 1:
            if self._context is not None:  # one step suffices; the others run without hooks
                self._context.__exit__(None, None, None)
            self._describe()
        self._count_states()
        self.write("killed")
        self._peaks.append(self.figures["peak_bytes"])
        if number >= self.spec["steps"] and self._is_settled(number):
            self.end("steps")

    def _is_settled(self, number: int) -> bool:
        """Whether the peak has stopped growing, or enough time or steps have gone into it.

        The C library's allocator adapts its thresholds to the largest blocks that it has seen, so
        that a process grows over its first steps.
        """
        if number >= self.spec["most_steps"] or time.monotonic() > self._until:
            return True
        return self._peaks[-1] <= _FLAT * self._peaks[-_WINDOW:][0]

    def _describe(self) -> None:
        """Record the size and the depth of the model."""
        models = self._know_modules()
        sizes: dict[int, int] = {}
        parameters: dict[int, int] = {}
        kinds: dict[str, int] = {}
        leaves = 0
        for model in models:
            own = list(model._parameters.values())  # noqa: SLF001
            for tensor in (*own, *model._buffers.values()):  # noqa: SLF001
                if tensor is not None:
                    with contextlib.suppress(Exception):
                        key, size = storage(tensor)
                        sizes[key] = size
            for tensor in own:
                if tensor is not None:
                    parameters[id(tensor)] = tensor.numel()
            leaves += bool(own)
            kind = type(model)
            is_own = not kind.__module__.startswith("torch.nn.modules")
            if model._modules and (is_own or kind.__name__.endswith("Layer")):  # noqa: SLF001
                kinds[kind.__qualname__] = kinds.get(kind.__qualname__, 0) + 1
        self.figures["weights"] = sum(sizes.values())
        self.figures["parameters"] = sum(parameters.values())
        self.figures["ddp"] = any(type(one).__name__ == "DistributedDataParallel" for one in models)
        repeated = max(kinds.values(), default=0)
        self.figures["layers"] = repeated if repeated > 1 else max(1, leaves)
        if not self.figures.get("gradients"):
            self.figures["gradients"] = self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        sizes = {}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        size = one.grad.numel() * one.grad.element_size()
                        sizes[one.grad.data_ptr()] = size
        return sum(sizes.values())

    def _count_states(self) -> None:
        states = [optimizer.state for optimizer in self._optimizers.values()]
        self.figures["optimizer"] = sum(
            tensor_bytes(self.torch, list(one.values())) for one in states
        )

    def write(self, end: str) -> None:
        """Write the figures, whole or not at all."""
        now = memory()
        self.figures.update(
            end=end,
            steps=self.steps,
            peak_bytes=now.get("VmHWM", 0),
            file_bytes=now.get("RssFile", 0),
            refused=self.guard.refused[:3],
        )
        torch = getattr(self, "torch", None)
        if torch is not None:
            self.figures["torch"] = str(torch.__version__)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                reserved = torch.cuda.memory_reserved()
                self.figures.update(
                    cuda_bytes=torch.cuda.max_memory_allocated(),
                    cuda_reserved_bytes=torch.cuda.max_memory_reserved(),
                    cuda_context_bytes=max(0, total - free - reserved),
                    device_bytes=total,
                    device=torch.cuda.get_device_name(),
                )
        target = self.spec["output"]
        with open(f"{target}.new", "w", encoding="utf-8") as stream:
            json.dump(self.figures, stream)
        # The program may be killed at any moment, for example because it runs out of memory. A torn
        # file would lose the figures of all earlier steps.
        os.replace(f"{target}.new", target)

    def end(self, end: str) -> NoReturn:
        """End the process at once, so that the program saves nothing."""
        self.write(end)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return an id of a tensor's storage, and its size in bytes."""
    whole = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
    return whole.data_ptr(), whole.nbytes()


def tensor_bytes(torch: ModuleType, value: object) -> int:
    """Return the bytes of all tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(torch, one) for one in value)
    return 0


def memory() -> dict[str, int]:
    """Return this process's memory by the names of /proc/self/status, in bytes."""
    found = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        for line in stream:
            name, _, rest = line.partition(":")
            if name.startswith(("Vm", "Rss")):
                found[name] = int(rest.split()[0]) * 1024
    return found


def main() -> NoReturn:
    """Run the program that the file in the command line describes."""
    with open(sys.argv[1], encoding="utf-8") as stream:
        spec = json.load(stream)
    guard = Guard(spec["scratch"])
    probe = Probe(spec, guard)
    try:
        probe.install()
    except ImportError as error:
        probe.figures["error"] = str(error)
        probe.end("no-torch")
    sys.argv = [spec["script"] or spec["module"], *sys.argv[2:]]
    sys.path[0] = os.path.dirname(spec["script"]) if spec["script"] else spec["workdir"]
    sys.addaudithook(guard)
    try:
        if spec["script"]:
            runpy.run_path(spec["script"], run_name="__main__")
        else:
            runpy.run_module(spec["module"], run_name="__main__", alter_sys=True)
    except SystemExit as status:
        probe.figures["error"] = str(status.code) if isinstance(status.code, str) else ""
        probe.end("ended" if status.code in (None, 0) else "failed")
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its end
        lines = str(error).strip().splitlines()
        probe.figures["error"] = f"{type(error).__name__}: {lines[0] if lines else ''}"
        probe.end("failed")
    probe.end("ended")


if __name__ == "__main__":
    main()
