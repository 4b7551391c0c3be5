"""What tests of the training jobs share: a script as a module or a process, and its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpml_orchestrator.node import startup

JOBS = Path(__file__).parents[2] / "training_jobs"
DIGITS = JOBS / "make_digits.py"
LIMIT_SECONDS = 400
# Found, not imported: every worker collects all tests, and PyTorch takes seconds to import.
TRAINS = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn", "PIL")),
    reason="the training jobs need the extra 'train'",
)

# Runs in sequence, whose ranks are forked: PyTorch is imported once. Of each: its number
# of ranks, its arguments, and Python code that changes the script (`job`) on each `rank`.
FORKED = f"""
import gc, importlib, json, os, sys
sys.path.insert(0, {str(JOBS)!r})
name, wanted, preload = json.loads(sys.argv[1])
from hpml_orchestrator.node.startup import free_port
job = importlib.import_module(name)
for module in ("torch._dynamo", *preload):  # each rank's first step would import it: a second
    importlib.import_module(module)
gc.freeze()  # what is there is not searched by the ranks

for number, (world, arguments, change) in enumerate(wanted):
    port, pids = str(free_port(f"{{os.getpid()}} {{number}}")), []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        if world > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        exec(change, {{"job": job, "rank": rank}})
        sys.argv = [f"{{name}}.py", "--device=cpu", *arguments]
        job.main()
    print(number, [os.waitpid(pid, 0)[1] for pid in pids], flush=True)
"""


def run_forked(
    directory: Path,
    name: str,
    wanted: Sequence[tuple[int, list[str], str]],
    preload: Sequence[str] = (),
) -> str:
    """Train with a script as FORKED describes; return what was printed.

    Args:
        directory: for a temporary script.
        name: of the script, without `.py`.
        wanted: the runs.
        preload: modules to import once, which the script imports later.
    """
    script = directory / "forked.py"
    script.write_text(FORKED)
    done = run([script, json.dumps([name, wanted, preload])])
    assert done.returncode == 0, done.stderr
    statuses = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    expected = [f"{number} {[0] * world}" for number, (world, *_) in enumerate(wanted)]
    assert statuses == expected, done.stderr
    return done.stdout


def load(script: Path) -> ModuleType:
    """Import a file as a separate module."""
    spec = importlib.util.spec_from_file_location(f"{script.stem}_under_test", script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more: str) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HPML_CHANNEL")
    clean = {key: value for key, value in os.environ.items() if key not in ours}
    return {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def start(command: Sequence[object], **more: str) -> subprocess.Popen[str]:
    return launch([sys.executable, *command], **more)


def launch(command: Sequence[object], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(
    process: subprocess.Popen[str], limit_seconds: float = LIMIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = process.communicate(timeout=limit_seconds)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(command: Sequence[object], **more: str) -> subprocess.CompletedProcess[str]:
    return finish(start(command, **more))


def result_of(directory: Path) -> Any:
    return json.loads((directory / "result.json").read_text())


def run_ranks(
    count: int, command: Sequence[object], **more: str
) -> list[subprocess.CompletedProcess[str]]:
    return [finish(rank) for rank in start_ranks(count, command, **more)]


def start_ranks(count: int, command: Sequence[object], **more: str) -> list[subprocess.Popen[str]]:
    """Start as srun would: one process per rank, which knows its rank from its environment.

    In the values of other variables, {rank} is replaced.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    ranks = []
    for rank in map(str, range(count)):
        mine = {name: value.replace("{rank}", rank) for name, value in common.items()}
        ranks.append(start(command, **mine, WORLD_SIZE=str(count), RANK=rank, LOCAL_RANK=rank))
    return ranks


def write_text(directory: Path) -> Path:
    """Write a text of 50 kB that is the same on every machine."""
    file = directory / "text.txt"
    file.write_text("".join(f"{n} and {n * n} are {n + n * n}. " for n in range(2300)))
    return file


def free_port() -> int:
    """Return a port that is free on all addresses; use it soon, as others look for ports too."""
    return startup.free_port(uuid.uuid4().hex)
