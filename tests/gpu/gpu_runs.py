"""What the GPU tests of the training scripts share: start them, and print their figures.

Only PyTorch, pytest and the project have to be there. `DEVICE` may be `cpu` for a rehearsal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training_runs import JOBS, finish, free_port, result_of, start

__all__ = ["DEVICE", "JOBS", "Started", "finish_all", "need_gpu", "numbers_text", "print_figures"]

DEVICE = "cuda"
LIMIT_SECONDS = 120.0


def need_gpu() -> Any:
    """Return torch; skip the test without it or without a GPU."""
    torch = pytest.importorskip("torch", reason="HARDWARE: no torch here")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip(
            "HARDWARE: no CUDA device (torch.cuda.is_available() is False with torch "
            f"{torch.__version__}); NCCL and mixed precision were not exercised"
        )
    return torch


class Started:
    """A training script that runs; `output` is its directory.

    Args:
        script: of training_jobs, with its arguments.
        output: gets result.json.
        launcher: arguments of torchrun; without any the script runs alone.
        variables: of the environment.
    """

    def __init__(
        self,
        *script: object,
        output: Path,
        launcher: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        name, *arguments = script
        self.output = output
        command: list[object] = ["-m", "torch.distributed.run", *launcher] if launcher else []
        command += [JOBS / str(name), "--device", DEVICE, "--output", output, *arguments]
        visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        self._process = start(command, **(visible if DEVICE == "cuda" else {}), **(variables or {}))

    @classmethod
    def ranks(cls, count: int, *script: object, output: Path) -> list[Started]:
        """Start the ranks of a script, which share this machine's first GPU."""
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(free_port())
        each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return [cls(*script, output=output, variables={**common, **mine}) for mine in each]

    def kill(self) -> None:
        """End it, if it runs."""
        self._process.kill()

    def finish(self) -> tuple[dict[str, Any], str]:
        """Wait for its end; return result.json and what was printed."""
        done = finish(self._process, LIMIT_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return result_of(self.output), done.stdout + done.stderr


def finish_all(started: Mapping[str, Started]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return what `finish` returns of each; none is left if one fails."""
    try:
        return {name: run.finish() for name, run in started.items()}
    finally:
        for run in started.values():
            run.kill()


def numbers_text(directory: Path) -> Path:
    """Write a text of 50 kB that is the same on every machine."""
    file = directory / "text.txt"
    file.write_text("".join(f"{n} and {n * n} are {n + n * n}. " for n in range(2300)))
    return file


def print_figures(test: str, **figures: Any) -> None:
    """Print a line of JSON: figures, the device and the versions that they belong to."""
    import torch  # noqa: PLC0415 - may be missing

    versions: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        versions["device"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
        nccl: Any = torch.cuda.nccl
        versions["nccl"] = ".".join(map(str, nccl.version()))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, check=False)
        versions["driver"] = asked.stdout.partition("\n")[0]
    print("\n" + json.dumps({"test": test, **figures, **versions}))
