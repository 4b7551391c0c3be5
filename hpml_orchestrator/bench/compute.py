"""Measure processors, GPUs and all-reduce, all with PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from hpml_orchestrator.bench.figures import (
    MIB,
    REPEATS,
    answer,
    cpu_flags,
    domains,
    figure,
    repeated,
)
from hpml_orchestrator.diagnosis.models import bus_bandwidth

if TYPE_CHECKING:
    import torch

_GPU_DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
_ALLREDUCE_SECONDS = 12.0
_CPU_SIZE = 1024  # of matrices: three of a core are 12 MiB
_CPU_SECONDS = 6.0
_AMPERE = 8  # the first architecture with bfloat16 and TF32


def measure_cpu() -> None:
    """Multiply matrices on all cores, on each by itself: a disturbed one does not stop the rest."""
    import torch  # noqa: PLC0415 - nodes may lack it

    cpus = [cpu for several in domains().values() for cpu in several]
    native = bool(cpu_flags() & _BFLOAT16_FLAGS)  # else it is converted, and very slow
    names = ("float32", "bfloat16") if native else ("float32",)
    for name in names:
        # All cores begin together: a core that computes alone runs at a higher clock.
        gate = threading.Barrier(len(cpus))

        def multiply(cpu: int, name: str = name, gate: threading.Barrier = gate) -> list[float]:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
            torch.set_num_threads(1)
            shape = _CPU_SIZE, _CPU_SIZE
            left, right = (torch.randn(*shape).to(getattr(torch, name)) for _ in range(2))
            work = partial(torch.mm, left, right, out=torch.empty_like(left))
            gate.wait()
            return repeated(work, 2.0 * _CPU_SIZE**3, _CPU_SECONDS / len(names))

        with ThreadPoolExecutor(len(cpus)) as pool:
            figure(f"cpu.matmul.{name}", list(pool.map(multiply, cpus)), "FLOP/s")


# --- GPUs


def measure_gpu(index: int, shm: str) -> None:
    """Measure one GPU: matrix products, its memory, and the link from the host."""
    import torch  # noqa: PLC0415 - nodes may lack it

    torch.cuda.set_device(index)
    about = torch.cuda.get_device_properties(index)
    is_hip = getattr(torch.version, "hip", None) is not None
    modern = is_hip or about.major >= _AMPERE

    def timed(work: Callable[[], object], amount: float) -> list[float]:
        def many() -> None:
            for _ in range(4):
                work()
            torch.cuda.synchronize()

        return repeated(many, 4 * amount)

    for name in _GPU_DTYPES:
        if (name == "bfloat16" and not modern) or (name == "tf32" and (is_hip or not modern)):
            continue
        wide = name in ("float32", "float64")
        size = 4096 if wide else 8192
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        c = torch.empty_like(a)
        rates = timed(partial(torch.mm, a, b, out=c), 2.0 * size**3)
        figure(f"gpu{index}.matmul.{name}", [rates], "FLOP/s")
    del a, b, c
    torch.cuda.empty_cache()
    size = int(min(1 << 30, about.total_memory // 8))
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    figure(f"gpu{index}.memory", [timed(lambda: target.copy_(source), 2.0 * size)], "B/s")
    with alone(shm):  # GPUs share links and the memory of the host
        bound = gpu_domain(about)
        pinned = []
        for number, cpus in domains().items():
            os.sched_setaffinity(0, cpus)
            host = torch.zeros(256 * MIB, dtype=torch.uint8, pin_memory=True)
            pinned.append(host)  # kept: freed memory would be used again, in the wrong domain
            device = target[: 256 * MIB]
            copy = partial(device.copy_, host, non_blocking=True)
            rates = timed(copy, float(device.numel()))
            name = "host_to_device" if number == bound or bound is None else "host_to_device_remote"
            figure(f"gpu{index}.{name}", [rates], "B/s")
            if bound is None:
                break


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """Run the body in one process of this node at a time."""
    with open(os.path.join(directory or tempfile.gettempdir(), "link.lock"), "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def gpu_domain(about: object) -> int | None:
    """Return the NUMA domain of a GPU; None if that is unknown, or this process may not use it."""
    try:
        domain, bus, slot = (getattr(about, f"pci_{one}_id") for one in ("domain", "bus", "device"))
        place = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        with open(f"/sys/bus/pci/devices/{place}/numa_node", encoding="utf-8") as stream:
            number = int(stream.read())
    except (AttributeError, OSError, ValueError):
        return None
    # The kernel writes -1 if it does not know the domain, and that is in no list.
    return number if number in domains() else None


# --- all-reduce


def measure_allreduce(part: str, options: argparse.Namespace) -> None:
    """Measure all-reduce over sizes; rank 0 of each node prints the curve."""
    import torch  # noqa: PLC0415 - nodes may lack it
    from torch import distributed  # noqa: PLC0415 - torch is slow

    rank, world, local = options.index, options.world, max(1, options.gpus)
    on_gpu = bool(options.gpus)
    device = torch.device("cuda", rank % local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=options.meet,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=25),
    )
    sizes = [4096, 65536, MIB, 16 * MIB, *([256 * MIB] if on_gpu else [])]
    deadline = time.perf_counter() + _ALLREDUCE_SECONDS
    curve: list[tuple[int, int, float]] = []
    for size in sizes:
        values = torch.ones(size // 4, device=device)
        curve += [(world, size, took) for took in _allreduce_seconds(values, deadline)]
    if rank % (world if part == "node" else local) == 0:
        answer(curves={part: curve})
        if curve and curve[-1][1] == sizes[-1]:  # smaller messages have lower rates
            rates = [bus_bandwidth(*one) for one in curve if one[1] == sizes[-1]]
            figure(f"{part}.allreduce", [rates], "B/s", ranks=world)
    distributed.destroy_process_group()


def _allreduce_seconds(values: torch.Tensor, deadline: float) -> list[float]:
    """Return the seconds of an all-reduce, once per repeat; none after the deadline."""
    import torch  # noqa: PLC0415 - nodes may lack it
    from torch import distributed  # noqa: PLC0415 - torch is slow

    def work() -> None:
        distributed.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()

    work()
    begin = time.perf_counter()
    work()
    once = max(time.perf_counter() - begin, 1e-6)
    late = time.perf_counter() > deadline
    agreed = torch.tensor([0 if late else max(1, min(200, int(0.1 / once)))], device=values.device)
    distributed.broadcast(agreed, 0)  # all ranks make the same calls
    calls, seconds = int(agreed), []
    for _ in range(REPEATS if calls else 0):
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds
