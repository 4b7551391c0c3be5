"""Measure one node: GPUs, processors, memory, disks, file systems and all-reduce.

It reaches the nodes in an archive with the modules that it imports, and needs Python 3.9. Each
part runs in separate processes with a time limit, so that a hanging GPU or file server becomes a
finding. The result is one JSON file per node.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import mmap
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.models import bus_bandwidth
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    import torch

# Figures of `hpml bench`: how the parts repeat, print and bind their measurements.

MIB = 1 << 20
REPEATS = 15
LEAST_REPEATS = 3
ANSWER = "hpml-bench: "
"""Prefix of the lines of a part's output that are answers."""

_SECONDS = 1.0  # for all repeats of one figure
# The period of CPU quotas (Linux: cpu.max, 100 ms by default). Shorter repeats could fit between
# two pauses, and the best ones would hide that the node is throttled.
_REPEAT_SECONDS = 0.1
_MOST_PARTS = 4


Tracks = Sequence[Sequence[float]]


class Unmeasured(Exception):  # noqa: N818 - not a fault
    """A part cannot be measured here, although nothing is broken."""


def answer(**fields: object) -> None:
    """Print an answer at once, so that it counts even if the part hangs afterwards."""
    sys.stdout.write(f"\n{ANSWER}{json.dumps(fields)}\n")
    sys.stdout.flush()


def figure(name: str, tracks: Tracks, unit: str, ranks: int | None = None) -> None:
    """Print a figure and its spread.

    Other processes, hypervisors and interrupts only ever add time. So the fastest repeats are
    closest to what the hardware can do, and vary less between runs than the median (Chen and
    Revels 2016, "Robust benchmarking in noisy environments"; STREAM also reports the fastest
    repeat). The figure is the rate that a tenth of the repeats reach, since the very fastest ones
    may fall between two pauses of a CPU quota, or gain while a neighbour pauses.

    To get the spread, split the repeats into four successive parts and compute the same estimate
    for each: the spread is half the range of the best three. So it excludes the scatter of single
    repeats and one slow part, but includes disturbance or throttling during half of the time.

    Args:
        name: name of the figure.
        tracks: rates of the repeats, in order of time, for each thread that worked separately at
            the same time; the figure is their sum.
        unit: unit of the rates.
        ranks: number of ranks that took part.
    """
    value = sum(map(_best_tenth, tracks))
    parts = sorted(sum(map(_best_tenth, part)) for part in zip(*map(_parts, tracks)))  # noqa: B905
    best = parts[-3:]
    spread = (best[-1] - best[0]) / 2 / value
    made = {"value": value, "unit": unit, "spread": round(spread, 5), "ranks": ranks}
    answer(figures={name: made})


def _best_tenth(rates: Sequence[float]) -> float:
    return sorted(rates)[-1 - (len(rates) - 1) // 10]


def _parts(rates: Sequence[float]) -> list[Sequence[float]]:
    number = min(_MOST_PARTS, len(rates))
    ends = [len(rates) * (index + 1) // number for index in range(number)]
    return [rates[begin:end] for begin, end in zip([0, *ends], ends)]  # noqa: B905 - Python 3.9


def repeated(work: Callable[[], object], amount: float, seconds: float = _SECONDS) -> list[float]:
    """Return the rates of repeats, each with as many calls as fill the time of a repeat."""
    work()  # warm up
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < LEAST_REPEATS or time.perf_counter() < end:
        calls, took, begin = 0, 0.0, time.perf_counter()
        while took < _REPEAT_SECONDS:
            work()
            calls += 1
            took = time.perf_counter() - begin
        rates.append(amount * calls / took)
    return rates


def cpu_model() -> str:
    """Return the model name of the processor."""
    return _cpuinfo("model name") or platform.machine()


def cpu_flags() -> set[str]:
    """Return the processor's feature flags, such as `avx512_bf16`."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _cpuinfo(wanted: str) -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return " ".join(value.split())
    return ""


def domains() -> dict[int, list[int]]:
    """Return the CPUs of each NUMA domain that this process may use, one per core."""
    allowed, found = os.sched_getaffinity(0), {}
    for path in glob.glob("/sys/devices/system/node/node[0-9]*/cpulist"):
        number = int(os.path.basename(os.path.dirname(path))[4:])
        with open(path, encoding="utf-8") as stream:
            cpus = _one_per_core(allowed.intersection(parse_list(stream.read())))
        if cpus:
            found[number] = cpus
    return dict(sorted(found.items())) or {0: _one_per_core(allowed)}


def _one_per_core(cpus: set[int]) -> list[int]:
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="utf-8") as stream:
                cores.setdefault(stream.read().strip(), cpu)
        except OSError:
            cores[str(cpu)] = cpu
    return sorted(cores.values())


# Measure memory, /dev/shm, the local disk and the shared file system, without PyTorch.

_MEMORY_BYTES = 512 * MIB  # per domain: far larger than any cache
_MEMORY_SECONDS, _DOMAIN_SECONDS = 6.0, 2.0  # for all domains, and at least per domain
_OPEN_SECONDS = 2.0
_FILE_REPEATS = 7
_FILE_BYTES = 64 * MIB  # per repeat
_BLOCK_BYTES = 4 * MIB
_READERS = 4
_SMALL_FILES, _SMALL_BYTES, _OPENERS = 512, 4096, 8
_WRITE_SECONDS = 8


def measure_memory() -> None:
    """Copy memory with one thread per core of each domain; bytes read and written both count."""
    found = domains()
    seconds = max(_DOMAIN_SECONDS, _MEMORY_SECONDS / len(found))
    for number, cpus in found.items():
        size = _MEMORY_BYTES // 2 // len(cpus) // 4096 * 4096
        size = max(size, 2 * MIB)
        gate = threading.Barrier(len(cpus) + 1)
        loops = [0]

        def copy(
            cpu: int, size: int = size, gate: threading.Barrier = gate, loops: list[int] = loops
        ) -> None:
            os.sched_setaffinity(0, {cpu})  # binds only this thread
            pages = mmap.mmap(-1, 2 * size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            ctypes.memset(address, 1, 2 * size)  # allocates the pages in this thread's domain
            while True:
                gate.wait()
                if not loops[0]:
                    return
                for _ in range(loops[0]):
                    ctypes.memmove(address + size, address, size)  # releases the GIL
                gate.wait()

        threads = [threading.Thread(target=copy, args=(cpu,), daemon=True) for cpu in cpus]
        for thread in threads:
            thread.start()

        def work(gate: threading.Barrier = gate, loops: list[int] = loops) -> None:
            loops[0] = 2
            gate.wait()
            gate.wait()

        rates = repeated(work, 2 * 2 * size * len(cpus), seconds)
        loops[0] = 0
        gate.wait()
        for thread in threads:
            thread.join()
        figure(f"host.memory.domain{number}", [rates], "B/s")


def measure_files(part: str, options: argparse.Namespace) -> None:
    """Measure /dev/shm, the local disk, or the shared file system."""
    nodes = int(os.environ.get("WORLD_SIZE", "1"))
    directory = {"shm": options.shm, "disk": options.local}.get(part, options.shared)
    if not directory:
        raise Unmeasured("no directory was given")
    kind = filesystem(directory)
    if part == "disk" and kind in ("tmpfs", "ramfs"):
        raise Unmeasured(f"{directory} is in memory ({kind})")
    os.makedirs(directory, exist_ok=True)
    ranks = nodes if part == "shared" else None
    try:
        measure_stream(part, directory, ranks)
        if part == "shared":
            measure_opens(directory, ranks)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unmeasured(f"{error.strerror}: {directory}") from error
        raise


def filesystem(path: str) -> str:
    """Return the type of the file system that a path is on."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            words = line.split(" ")
            point = words[1].replace("\\040", " ")
            inside = real == point or real.startswith(f"{point.rstrip('/')}/")
            if inside and len(point) >= len(best):
                best, kind = point, words[2]
    return kind


def measure_stream(part: str, directory: str, ranks: int | None) -> None:
    """Write a file, with fsync in each repeat, and read it back past the page cache.

    The file has no name while it is written, so nothing is left of it, however this process ends.
    """
    about = os.statvfs(directory)
    free = about.f_bavail * about.f_frsize
    size = _FILE_BYTES * _FILE_REPEATS
    if free < 2 * size:
        raise Unmeasured(f"{free // MIB} MiB are free in {directory}; needs {2 * size // MIB}")
    block = os.urandom(8 * MIB)
    descriptor, path = tempfile.mkstemp(prefix="hpml-bench-", dir=directory)
    os.unlink(path)
    try:
        writes, limit = [], time.perf_counter() + _WRITE_SECONDS
        for _ in range(_FILE_REPEATS):
            begin = time.perf_counter()
            for _ in range(_FILE_BYTES // len(block)):
                write_all(descriptor, block)
            os.fsync(descriptor)
            writes.append(_FILE_BYTES / (time.perf_counter() - begin))
            if len(writes) >= LEAST_REPEATS and time.perf_counter() > limit:
                break
        figure(f"{part}.write", [writes], "B/s", ranks)
        with DiskReader(descriptor) as reader:
            rates = [reader.rate(repeat * _FILE_BYTES) for repeat in range(len(writes))]
        figure(f"{part}.read", [rates], "B/s", ranks)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, block: bytes) -> None:
    """Write a complete block; `os.write` may write only part of it."""
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


class DiskReader:
    """Reads a file with several threads, using O_DIRECT if the file system supports it."""

    def __init__(self, descriptor: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        path = f"/proc/self/fd/{descriptor}"
        self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_READERS)]
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                # Some file systems accept O_DIRECT at `open` but refuse it at the first read.
                os.preadv(self._descriptor, self._buffers[:1], 0)
            except OSError:
                os.close(self._descriptor)
                raise
            return
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> DiskReader:  # noqa: PYI034 - Self is of Python 3.11
        self._pool = ThreadPoolExecutor(_READERS)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)

    def rate(self, offset: int) -> float:
        """Return the bytes per second of one repeat's part of the file."""

        def read(number: int) -> None:
            for place in range(number, _FILE_BYTES // _BLOCK_BYTES, _READERS):
                at = offset + place * _BLOCK_BYTES
                got = os.preadv(self._descriptor, [self._buffers[number]], at)
                if got != _BLOCK_BYTES:
                    raise OSError(errno.EIO, f"read {got} bytes of {_BLOCK_BYTES}")

        begin = time.perf_counter()
        list(self._pool.map(read, range(_READERS)))
        return _FILE_BYTES / (time.perf_counter() - begin)


def measure_opens(directory: str, ranks: int | None) -> None:
    """Open, read and close small files with several threads."""
    made = tempfile.mkdtemp(prefix="hpml-bench-", dir=directory)
    try:
        paths = [os.path.join(made, f"{number}.bin") for number in range(_SMALL_FILES)]
        block = os.urandom(_SMALL_BYTES)
        for path in paths:
            with open(path, "wb") as stream:
                stream.write(block)

        def read(path: str) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.read(descriptor, _SMALL_BYTES)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

        with ThreadPoolExecutor(_OPENERS) as pool:

            def read_all() -> None:
                list(pool.map(read, paths, chunksize=16))

            rates = repeated(read_all, float(_SMALL_FILES), _OPEN_SECONDS)
        figure("shared.opens", [rates], "1/s", ranks)
    finally:
        shutil.rmtree(made, ignore_errors=True)


# Measure processors, GPUs and all-reduce with PyTorch.

_GPU_DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
_ALLREDUCE_SECONDS = 12.0
_CPU_SIZE = 1024  # of matrices: three per core take 12 MiB
_CPU_SECONDS = 6.0
_AMPERE = 8  # the first architecture with bfloat16 and TF32


def measure_cpu() -> None:
    """Multiply matrices on all cores, each separately, so that a slow core delays no other."""
    import torch  # noqa: PLC0415 - nodes may lack it

    cpus = [cpu for several in domains().values() for cpu in several]
    native = bool(cpu_flags() & _BFLOAT16_FLAGS)  # otherwise it is emulated, and very slow
    names = ("float32", "bfloat16") if native else ("float32",)
    for name in names:
        # Start all cores together: a core that computes alone runs at a higher clock rate.
        gate = threading.Barrier(len(cpus))

        def multiply(cpu: int, name: str = name, gate: threading.Barrier = gate) -> list[float]:
            os.sched_setaffinity(0, {cpu})  # binds only this thread
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
    with alone(shm):  # GPUs share links and host memory
        bound = gpu_domain(about)
        pinned = []
        for number, cpus in domains().items():
            os.sched_setaffinity(0, cpus)
            host = torch.zeros(256 * MIB, dtype=torch.uint8, pin_memory=True)
            pinned.append(host)  # keep it: freed memory would be reused in the wrong domain
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
    """Return the NUMA domain of a GPU; None if it is unknown, or closed to this process."""
    try:
        domain, bus, slot = (getattr(about, f"pci_{one}_id") for one in ("domain", "bus", "device"))
        place = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        with open(f"/sys/bus/pci/devices/{place}/numa_node", encoding="utf-8") as stream:
            number = int(stream.read())
    except (AttributeError, OSError, ValueError):
        return None
    # The kernel writes -1 if it does not know the domain, and -1 is never in the list.
    return number if number in domains() else None


# --- all-reduce


def measure_allreduce(part: str, options: argparse.Namespace) -> None:
    """Measure all-reduce for several sizes; rank 0 of each node prints the curve."""
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
    """Return the seconds of an all-reduce, one value per repeat; empty after the deadline."""
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
    distributed.broadcast(agreed, 0)  # all ranks make the same number of calls
    calls, seconds = int(agreed), []
    for _ in range(REPEATS if calls else 0):
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds


_PARTS = {  # time limits in seconds
    "probe": 30,
    "nodes": 40,
    "gpu": 45,
    "node": 40,
    "host": 40,
    "shm": 40,
    "disk": 40,
    "shared": 40,
    "cpu": 40,
}
_LEAST_SECONDS = 2
_PR_SET_PDEATHSIG = 1
_NEEDS_PYTORCH = "needs PyTorch"


def main() -> int:
    """Measure this node, or one part of it in a process that another call has started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    parser.add_argument("--local", default="")
    parser.add_argument("--shm", default="")
    parser.add_argument("--run", default="")
    parser.add_argument("--shared", default="")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--patience", type=float, default=1.0)  # scales the time limits of parts
    parser.add_argument("--part", default="")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--meet", default="")
    options = parser.parse_args()
    if not options.part:
        return NodeBench(options).measure()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        part_of(options)
    except Unmeasured as why:
        answer(missing={options.part: {"reason": str(why), "failed": False}})
    return 0


def part_of(options: argparse.Namespace) -> None:
    """Measure one part and print the answers."""
    part = options.part
    if part == "probe":
        probe()
    elif part == "gpu":
        measure_gpu(options.index, options.shm)
    elif part in ("node", "nodes"):
        measure_allreduce(part, options)
    elif part == "host":
        measure_memory()
    elif part == "cpu":
        measure_cpu()
    else:
        measure_files(part, options)


class NodeBench:
    """Runs the parts in sequence and collects their answers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.busy = foreign_seconds()
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        self.rank = int(os.environ.get("RANK", "0"))
        self.nodes = int(os.environ.get("WORLD_SIZE", "1"))
        self.children: list[subprocess.Popen[bytes]] = []
        shared = options.shared or options.out
        # Specific to this run and node; if this process is killed, the reader of the results
        # removes it.
        self.work = os.path.join(shared, f".hpml-bench-{options.run}-{self.name}")
        self.record: dict[str, Any] = {
            "schema_version": 1,
            "node": self.name,
            "time": time.time(),
            "complete": False,
            "cpus": len(os.sched_getaffinity(0)),
            "cpu_model": cpu_model(),
            "load": 0.0,
            "torch": "",
            "gpus": [],
            "figures": {},
            "missing": {},
            "curves": {},
        }

    def measure(self) -> int:
        """Measure all parts and write the result, also after each part."""
        os.makedirs(self.options.out, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            self.write()
            self.run("probe")
            if self.record["torch"]:
                self.run_gpus_and_links()
            elif "probe" not in self.record["missing"]:
                self.miss("matmul, all-reduce", _NEEDS_PYTORCH)
            for part in ("host", "shm", "disk", "shared"):
                self.run(part)
            if self.record["torch"]:
                self.run("cpu")
            self.record["complete"] = True
            return 0
        finally:
            for child in self.children:
                child.kill()
            shutil.rmtree(self.work, ignore_errors=True)
            self.write()

    def run_gpus_and_links(self) -> None:
        """Measure all-reduce between nodes first, while all are in step; then the GPUs."""
        gpus = len(self.record["gpus"])
        self.compare_gpus(gpus)
        local = self.options.gpus or 1
        if self.nodes > 1:
            place = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            first = self.rank * local
            self.run("nodes", ranks=range(first, first + local), meet=place)
        if gpus:
            self.run("gpu", ranks=range(gpus))
        ranks = self.ranks_inside()
        if any(name.lower().startswith("gpu") for name in self.record["missing"]) and local > 1:
            self.miss("node", "needs all GPUs")
        elif ranks > 1:
            meet = f"file://{self.options.shm or tempfile.gettempdir()}/meet-{os.getpid()}"
            self.run("node", ranks=range(ranks), meet=meet)

    def ranks_inside(self) -> int:
        """Return the number of ranks of the all-reduce inside the node."""
        return self.options.gpus or min(2, int(self.record["cpus"]))

    def compare_gpus(self, seen: int) -> None:
        """Record GPUs that the job has but PyTorch does not find."""
        wanted, torch = self.options.gpus, self.record["torch"]
        if torch and seen < wanted:
            if self.record.pop("no_gpu_support", False):
                self.miss("GPUs", "this PyTorch has no GPU support")
                self.options.gpus = 0
            else:
                self.miss("GPUs", f"PyTorch sees {seen} of {wanted}", failed=True)
        self.record.pop("no_gpu_support", None)

    def run(self, part: str, ranks: range | None = None, meet: str = "") -> None:
        """Run a part, once or as several ranks at the same time, within its time limit."""
        left = self.options.seconds - (time.monotonic() - self.begin)
        most = _PARTS[part] * self.options.patience
        limit = min(most, left)
        if limit < _LEAST_SECONDS:
            self.miss(part, "no time was left")
            return
        began = [self.start(part, rank, meet) for rank in (range(1) if ranks is None else ranks)]
        deadline = time.monotonic() + limit
        for rank, (child, out, err) in zip(ranks or range(1), began):  # noqa: B905 - Python 3.9
            name = f"gpu{rank}" if part == "gpu" else part
            try:
                status = child.wait(max(0.0, deadline - time.monotonic()))
                failed = f"ended with status {status}" if status else ""
            except subprocess.TimeoutExpired:
                failed = f"no answer within {limit:.0f} s"
                if limit < most:  # it may just be slow
                    self.miss(name, "no time was left")
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2)  # a process that hangs in the kernel does not end
            self.children.remove(child)
            self.take(out)
            if failed:
                reason = last_line(err)
                self.miss(name, f"{failed}: {reason}" if reason else failed, failed=True)
        if part == "shared":
            shutil.rmtree(self.work, ignore_errors=True)
        self.write()

    def start(
        self, part: str, index: int, meet: str
    ) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
        """Start the process of a part; it dies with this process."""
        # Files, since a part may print more than a pipe can buffer.
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        argv = [sys.executable, os.path.abspath(sys.argv[0]), "--part", part, "--index", str(index)]
        argv += ["--shared", self.work, "--meet", meet]
        argv += ["--local", self.options.local, "--shm", self.options.shm]
        argv += ["--gpus", str(self.options.gpus)]
        world = self.ranks_inside() if part == "node" else self.nodes * (self.options.gpus or 1)
        argv += ["--world", str(world)]
        libc = ctypes.CDLL(None)
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
        self.children.append(child)
        return child, out, err

    def take(self, out: IO[bytes]) -> None:
        """Add a part's answers to the record."""
        out.seek(0)
        for line in out.read().decode("utf-8", "replace").splitlines():
            if line.startswith(ANSWER):
                for name, value in json.loads(line[len(ANSWER) :]).items():
                    if isinstance(value, dict):
                        self.record[name].update(value)
                    else:
                        self.record[name] = value

    def miss(self, name: str, reason: str, *, failed: bool = False) -> None:
        """Record why something is missing; with several ranks, only the first reason counts."""
        self.record["missing"].setdefault(name, {"reason": reason, "failed": failed})

    def write(self) -> None:
        """Write the result atomically."""
        seconds = time.monotonic() - self.begin
        self.record["seconds"] = round(seconds, 1)
        used = foreign_seconds() - self.busy
        self.record["load"] = round(max(0.0, used / seconds / (os.cpu_count() or 1)), 4)
        path = os.path.join(self.options.out, f"{self.name}.json")
        with open(f"{path}.tmp", "w", encoding="utf-8") as stream:
            json.dump(self.record, stream)
        os.replace(f"{path}.tmp", path)


def foreign_seconds() -> float:
    """Return the CPU seconds of this node that neither this process nor its parts used."""
    with open("/proc/stat", encoding="ascii") as stream:
        # The two omitted fields are idle and iowait. Stop before guest time, which user and nice
        # already include.
        user, nice, system, _, _, *rest = map(int, stream.readline().split()[1:9])
    own = sum(os.times()[:4])  # including ended children
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own


def last_line(err: IO[bytes]) -> str:
    """Return the last line of a part's errors."""
    err.seek(0)
    lines = [line.strip() for line in err.read().decode("utf-8", "replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")


def probe() -> None:
    """List the GPUs with PyTorch, or with nvidia-smi if PyTorch is missing."""
    try:
        import torch  # noqa: PLC0415 - nodes may lack it
    except ImportError:
        answer(torch="", gpus=listed_gpus())
        return
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            gpus.append({"name": str(about.name), "uuid": str(getattr(about, "uuid", ""))})
    lacks = torch.version.cuda is None and getattr(torch.version, "hip", None) is None
    answer(torch=str(torch.__version__), gpus=gpus, no_gpu_support=lacks)


def listed_gpus() -> list[dict[str, str]]:
    """Return the GPUs that nvidia-smi lists; empty without it."""
    argv = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.partition(",") for line in done.stdout.splitlines())
    return [{"name": name.strip(), "uuid": uuid.strip()} for name, _, uuid in rows]
