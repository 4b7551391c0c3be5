"""The measuring program, for real on this machine: its results, its faults, its leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.bench.job import place_program
from hpml_orchestrator.bench.results import clean_up, collect
from tests import patience

HOST = {
    "host.memory.domain0",
    "shm.write",
    "shm.read",
    "disk.write",
    "disk.read",
    "shared.write",
    "shared.read",
    "shared.opens",
}
STANDIN = Path(__file__).with_name("standin_torch.py")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory on a disk, with those that a job has."""
    for name in ("out", "local", "shared", "modules"):
        (tmp_path / name).mkdir()
    return tmp_path


def start(
    place: Path, *options: str, torch: str = "raise ImportError", **env: str
) -> subprocess.Popen[str]:
    """Start the program as a job does, with a replacement of PyTorch."""
    (place / "modules" / "torch.py").write_text(torch)
    program = place_program(place)
    argv = [sys.executable, str(program), "--out", str(place / "out"), "--run", "r1"]
    argv += ["--local", str(place / "local"), "--shm", str(place / "local"), *options]
    argv += [] if "--shared" in options else ["--shared", str(place / "shared")]
    return subprocess.Popen(
        argv,
        env={**os.environ, "PYTHONPATH": str(place / "modules"), "SLURMD_NODENAME": "here", **env},
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def measure(place: Path, *options: str, torch: str = "raise ImportError") -> Mapping[str, Any]:
    """Run the program to its end and return what it wrote."""
    process = start(place, *options, torch=torch)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    record: dict[str, Any] = json.loads((place / "out" / "here.json").read_text())
    return record


def left(place: Path) -> list[str]:
    """Return all files in the directories that it measures."""
    return [
        str(path.relative_to(place))
        for name in ("local", "shared")
        for path in (place / name).rglob("*")
        if path.name != "link.lock"
    ]


def collect_in(place: Path) -> tuple[list[Any], list[Path]]:
    """Collect the results in `out` as those of a run."""
    shutil.copytree(place / "out", place / "run" / "bench", dirs_exist_ok=True)
    return collect(place / "run", "r1", None)


@pytest.mark.alone  # its time limits are a fifth of the usual ones
def test_a_hung_gpu_is_a_finding(place: Path) -> None:
    """The other GPU and the host are measured; the hung one is named, and nothing is left."""
    record = measure(place, "--gpus", "2", "--patience", "0.2", torch=STANDIN.read_text())
    assert record["complete"]
    assert record["missing"]["gpu1"] == {"reason": "no answer within 9 s", "failed": True}
    assert record["missing"]["node"] == {"reason": "needs all GPUs", "failed": False}
    assert "gpu0.matmul.bfloat16" in record["figures"]
    assert not any(name.startswith("gpu1.") for name in record["figures"])
    assert [gpu["uuid"] for gpu in record["gpus"]] == ["uuid0", "uuid1"]
    assert not processes_of(place)
    assert set(record["figures"]) >= HOST
    assert record["seconds"] < 120
    assert 0 <= record["load"] <= 1  # share of the CPUs that others use
    assert left(place) == []
    (made,), damaged = collect_in(place)
    assert not damaged
    assert all(figure.value > 0 for figure in made.figures.values())
    # An independent look at the same memory: a copy by Python itself, on one core.
    data = bytearray(64 << 20)
    seconds = []
    for _ in range(5):  # the fastest is the one that nothing else disturbed
        begin = time.perf_counter()
        bytes(data)
        seconds.append(time.perf_counter() - begin)
    alone = 2 * len(data) / min(seconds)
    assert 0.1 < made.figures["host.memory.domain0"].value / alone < 10 * (os.cpu_count() or 1)


@pytest.mark.slow
def test_a_gpu_that_pytorch_does_not_see_is_a_finding(place: Path) -> None:
    """The job has three GPUs and PyTorch lists two."""
    torch = STANDIN.read_text().replace("time.sleep(600)", "pass")
    record = measure(place, "--gpus", "3", torch=torch)
    assert record["missing"]["GPUs"] == {"reason": "PyTorch sees 2 of 3", "failed": True}
    dtypes = ("bfloat16", "float16", "tf32", "float32", "float64")
    kinds = [*(f"matmul.{dtype}" for dtype in dtypes), "memory", "host_to_device"]
    expected = {f"gpu{index}.{kind}" for index in (0, 1) for kind in kinds}
    assert {name for name in record["figures"] if name.startswith("gpu")} == expected


def processes_of(place: Path) -> list[str]:
    """Return the processes whose command line names the test's directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if str(place) in words and int(path.parent.name) != os.getpid():
            found.append(words.replace("\0", " "))
    return found


def test_a_killed_program_leaves_nothing(place: Path) -> None:
    """SIGKILL in the middle: its processes end, its files have no names or are found by the run."""
    process = start(place)

    def is_at_work() -> bool:
        return any("--part shared" in words for words in processes_of(place))

    patience.eventually(is_at_work, "the part has begun", 120)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    patience.eventually(lambda: not processes_of(place), "its parts have ended", 60)
    clean_up(place / "shared", "r1")
    assert left(place) == []
    (made,), _ = collect_in(place)
    assert made.missing["measurement"].failed


@pytest.mark.skipif(os.geteuid() != 0, reason="not root, who alone mounts a small file system")
def test_a_full_file_system_is_named(place: Path) -> None:
    """The part is left out with the reason; the others are measured."""
    small = place / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", small], check=True)
    try:
        record = measure(place, "--shared", str(small), "--local", str(small))
    finally:
        subprocess.run(["umount", small], check=True)
    assert "needs 896" in record["missing"]["shared"]["reason"]
    assert record["missing"]["disk"]["reason"] == f"{small} is in memory (tmpfs)"
    assert not record["missing"]["shared"]["failed"]
    assert "host.memory.domain0" in record["figures"]


def test_equal_programs_have_equal_names(tmp_path: Path) -> None:
    """The archive has the digest of its content in its name; one that was damaged is replaced."""
    first = place_program(tmp_path)
    content = first.read_bytes()
    first.write_bytes(b"x")
    assert place_program(tmp_path) == first
    assert first.read_bytes() == content
