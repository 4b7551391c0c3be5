"""Measure one node: GPUs, processors, memory, disks, file systems and all-reduce.

It travels to the nodes in an archive with the modules that it imports, and needs Python 3.9. Each
part runs in separate processes with a time limit, so that a GPU or a file server that hangs is a
finding. The result is one JSON file per node.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from hpml_orchestrator.bench.compute import measure_allreduce, measure_cpu, measure_gpu
from hpml_orchestrator.bench.figures import ANSWER, Unmeasured, answer, cpu_model
from hpml_orchestrator.bench.host import measure_files, measure_memory

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
    """Starts the parts in sequence and collects their answers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.busy = foreign_seconds()
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        self.rank = int(os.environ.get("RANK", "0"))
        self.nodes = int(os.environ.get("WORLD_SIZE", "1"))
        self.children: list[subprocess.Popen[bytes]] = []
        shared = options.shared or options.out
        # Of this run and node alone; who reads the results removes it again if this is killed.
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
        """Measure all parts and write the result; it is written after each part, too."""
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
        """Return how many ranks the all-reduce inside the node has."""
        return self.options.gpus or min(2, int(self.record["cpus"]))

    def compare_gpus(self, seen: int) -> None:
        """Record GPUs that the job has and PyTorch does not see."""
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
                if limit < most:  # it may only be slow
                    self.miss(name, "no time was left")
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2)  # one that hangs in the kernel does not end
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
        """Start the process of a part; it ends with this one, however that ends."""
        # Files, since a part may print more than a pipe holds before it is read.
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
        """Record why something is missing; of several ranks the first one counts."""
        self.record["missing"].setdefault(name, {"reason": reason, "failed": failed})

    def write(self) -> None:
        """Write the result in one step."""
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
        # The two fields left out are idle and iowait. The line is cut before guest time, which
        # user and nice already contain.
        user, nice, system, _, _, *rest = map(int, stream.readline().split()[1:9])
    own = sum(os.times()[:4])  # with children that have ended
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own


def last_line(err: IO[bytes]) -> str:
    """Return the last line of a part's errors."""
    err.seek(0)
    lines = [line.strip() for line in err.read().decode("utf-8", "replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")


def probe() -> None:
    """Find PyTorch and the GPUs, which it lists; without PyTorch nvidia-smi does."""
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
    """Return the GPUs that nvidia-smi lists; none without it."""
    argv = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.partition(",") for line in done.stdout.splitlines())
    return [{"name": name.strip(), "uuid": uuid.strip()} for name, _, uuid in rows]
