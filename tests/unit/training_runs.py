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


def load(script: Path) -> ModuleType:
    """Import a file as a module of its own."""
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


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
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
    """Start as srun would: one process per rank, told who it is by its environment.

    In the values of other variables, {rank} is replaced.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    ranks = []
    for rank in map(str, range(count)):
        mine = {name: value.replace("{rank}", rank) for name, value in common.items()}
        ranks.append(start(command, **mine, WORLD_SIZE=str(count), RANK=rank, LOCAL_RANK=rank))
    return ranks


def free_port() -> int:
    """Return a port that is free on all addresses; use it soon, as others look for ports too."""
    return startup.free_port(uuid.uuid4().hex)
