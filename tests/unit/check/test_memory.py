"""Memory advice: short runs of real trainings against the peak of full ones, and its refusals."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.memory import (
    Advice,
    advise,
    check_memory,
    extension_notes,
    needs_of,
    save_advice,
)
from hpml_orchestrator.check.memory_run import Measured, measure, program_of
from hpml_orchestrator.errors import InputError, JobFailedError
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.sweeps.scaling import ProgramArguments

JOBS = Path(__file__).parents[3] / "training_jobs"
SMALL = Path(__file__).with_name("memory_jobs.py")
# Found, not imported: every worker collects all tests, and PyTorch takes seconds to import.
TRAINS = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "PIL")),
    reason="the training jobs need the extra 'train'",
)
# A small parent: the peak of a child begins with the memory that its parent has at the fork.
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
)


def job_of(tmp_path: Path, **fields: Any) -> Job:
    fields = {"name": "a", "workdir": str(tmp_path), **fields}
    if "command" not in fields:
        fields.setdefault("environment", {"python": sys.executable})
    return Job.model_validate(fields)


def with_batch(words: Any, batch: int) -> list[str]:
    changed = ProgramArguments(words)
    changed.set("--batch-size", str(batch))
    return changed.words


def measured(job: Job, *batches: int, seconds: float = 300) -> Measured:
    return measure(
        job,
        program_of(job),
        batches=batches,
        with_batch=with_batch if batches else None,
        limit_seconds=seconds,
        environment=os.environ,
    )


def peak_bytes(script: Path, *words: str) -> int:
    """The largest resident memory of a process of a full run, as the kernel counts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PEAK, sys.executable, str(script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def pictures(directory: Path) -> None:
    from PIL import Image  # noqa: PLC0415

    for number in range(320):
        folder = directory / "abcd"[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.frombytes("RGB", (32, 32), os.urandom(32 * 32 * 3))
        image.save(folder / f"{number}.png")


@TRAINS
@pytest.mark.parametrize(
    ("kind", "size", "probed", "batches"),
    [
        ("mlp", [], (1024, 3072), (512, 2048, 3584)),
        pytest.param("transformer", [], (8, 16), (24, 32, 64), marks=pytest.mark.slow),
        pytest.param("images", ["--width=32"], (16, 32), (24, 48, 64), marks=pytest.mark.slow),
        # The three above settled the allowance for later steps; the three below did not.
        pytest.param(
            "mlp", ["--width=896", "--depth=4"], (1000, 2000), (1500, 3500), marks=pytest.mark.slow
        ),
        pytest.param(
            "transformer", ["--width=192", "--depth=7"], (6, 12), (20, 40), marks=pytest.mark.slow
        ),
        pytest.param("images", ["--width=56"], (10, 20), (30, 50), marks=pytest.mark.slow),
    ],
)
def test_advice_is_near_the_peak_of_a_full_run(
    kind: str, size: list[str], probed: tuple[int, int], batches: tuple[int, ...], tmp_path: Path
) -> None:
    """Extrapolated to other batches, a rank's resident memory is within 10 % of the real peak."""
    script, words = SMALL, ["--model", kind, *size]
    if kind == "images":
        pictures(tmp_path / "data")
        script = JOBS / "ddp_images.py"
        words = ["--data", str(tmp_path / "data"), "--epochs=2", *size]
    job = job_of(tmp_path, script=str(script), args=words)
    host, _ = needs_of(measured(job, *probed), job)
    for batch in batches:
        real = peak_bytes(script, *words, f"--batch-size={batch}")
        advised = host.process.at(batch) + host.shared
        print(f"{kind} at {batch}: advised {advised / 1e6:.0f} MB, was {real / 1e6:.0f} MB")
        assert advised == pytest.approx(real, rel=0.1), f"{kind} at batch {batch}"


TRAINING = """\
import os, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@TRAINS
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('no such thing')", "failed after 0 steps: ValueError: no such thing"),
        ("open('data/missing.csv')", "failed after 0 steps: FileNotFoundError"),
        ("raise SystemExit('--data is required')", "failed after 0 steps: --data is required"),
        ("print('hello')", "ended and used no PyTorch model"),
        (f"{TRAINING}model(torch.ones(4))", "ended without a step of a PyTorch optimizer"),
        (f"{TRAINING}train(1)", "ended after one step of a PyTorch optimizer"),
        ("import os; assert int(os.environ['WORLD_SIZE']) > 1, 'two ranks'", "AssertionError"),
        ("open('OUTSIDE/out.txt', 'w')", "out.txt before its second step"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "failed after 0 steps: exit"),
    ],
    ids="raises no-data exits no-torch never-steps one-step ranks writes crashes".split(),
)
def test_a_program_that_cannot_be_measured(program: str, said: str, tmp_path: Path) -> None:
    """The error has the program's message or what it did not do; the user's files stay the same."""
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (work / "train.py").write_text(program.replace("OUTSIDE", str(outside)))
    job = Job.model_validate(
        {
            "name": "a",
            "workdir": str(work),
            "script": str(work / "train.py"),
            "environment": {"python": sys.executable},
        }
    )
    with pytest.raises(JobFailedError) as caught:
        measured(job)
    assert said in str(caught.value)
    assert "--model" in caught.value.hint
    assert [*outside.iterdir()] == []
    assert os.listdir(work) == ["train.py"]


def job_with_own_torch(tmp_path: Path) -> Job:
    """A job that imports the torch.py of this directory."""
    environment = {"python": sys.executable, "variables": {"PYTHONPATH": str(tmp_path)}}
    return job_of(tmp_path, script=str(tmp_path / "train.py"), environment=environment)


def test_a_python_without_torch(tmp_path: Path) -> None:
    """It is named, with the error of its import; the program is not started."""
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')")
    (tmp_path / "train.py").write_text("open('started', 'w')")
    job = job_with_own_torch(tmp_path)
    with pytest.raises(JobFailedError, match="no usable PyTorch .no such torch.") as caught:
        measured(job)
    assert sys.executable in str(caught.value)
    assert not (tmp_path / "started").exists()


def test_a_program_that_is_too_slow(tmp_path: Path) -> None:
    """It is ended at the limit, with the processes that it started."""
    (tmp_path / "torch.py").write_text(
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    (tmp_path / "train.py").touch()
    job = job_with_own_torch(tmp_path)
    with pytest.raises(JobFailedError, match="made 0 optimizer steps of 4 in") as caught:
        measured(job, seconds=5)
    assert "--time-limit 10" in caught.value.hint
    child = read_stat((tmp_path / "pid").read_text())
    assert child is None or child.ended


@TRAINS
def test_what_the_program_writes_stays_in_the_scratch_directory(tmp_path: Path) -> None:
    """New and changed files are copies, saved models too, also as a module of a command."""
    (tmp_path / "log.txt").write_text("old")
    (tmp_path / "train.py").write_text(
        f"{TRAINING}import sys\nopen('log.txt', 'a').write('new')\nos.makedirs('runs/1')\n"
        "torch.save(model.state_dict(), 'runs/1/model.pt')\nassert sys.argv[1:] == ['--a b']\n"
        "os.remove('log.txt')\ntrain(99)\nopen('after', 'w')"
    )
    command = [sys.executable, "-m", "train", "--a b"]
    found = measured(job_of(tmp_path, command=command))
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "train.py"]
    assert (tmp_path / "log.txt").read_text() == "old"
    weights = 4 * (4 * 4 + 4)
    figures = found.last
    assert figures["weights"] == figures["gradients"] == figures["optimizer"] == weights
    assert 4 <= figures["steps"] <= 20


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"script": "gone.py"}, "script"),
        ({"script": "."}, "script"),
        ({"command": ["bash", "-c", "python train.py"]}, "command"),
        ({"command": ["python", "-c", "print()"]}, "command"),
        ({"command": ["python", "gone.py"]}, "command"),
        (
            {"script": "a.py", "environment": {"container": {"engine": "pyxis", "image": "a"}}},
            "environment.container",
        ),
    ],
)
def test_a_job_without_a_python_program(fields: Any, field: str, tmp_path: Path) -> None:
    """The field that names the program is wrong, or names something else than a Python program."""
    if "script" in fields:
        fields = {**fields, "script": str(tmp_path / fields["script"])}
    with pytest.raises(InputError) as caught:
        program_of(job_of(tmp_path, **fields))
    assert caught.value.field == field


@pytest.mark.parametrize("stage", ["gone", "data.tar", "data.tbz2", "data.txz"])
def test_staged_data_that_cannot_be_used_where_it_lies(stage: str, tmp_path: Path) -> None:
    """A source that does not exist or would be unpacked ends it before the program starts."""
    for name in ("train.py", "data.tar", "data.tbz2", "data.txz"):
        (tmp_path / name).touch()
    entry = {"name": "data", "source": str(tmp_path / stage)}
    job = job_of(tmp_path, script=str(tmp_path / "train.py"), stage=[entry])
    with pytest.raises(InputError, match="stage.data.source: (does not exist|is an archive)"):
        measured(job)


FIGURES = {
    "weights": 4e9, "gradients": 4e9, "optimizer": 8e9, "activations": 10e9, "layers": 16,
    "peak_bytes": 30e9, "file_bytes": 1e9, "before_bytes": 6e9, "batch_bytes": 1e6, "ahead": 4,
    "pins": True,
}  # fmt: skip


def advice_of(job: Job, **given: Any) -> Advice:
    half = {**FIGURES, "activations": 5e9, "peak_bytes": 24e9, "batch_bytes": 5e5}
    host, device = needs_of(Measured({8: half, 16: FIGURES}, {8: 0.0, 16: 5e8}, 1.0), job)
    return advise(job, how="measured", batch=16, host=host, device=device, **given)


def test_host_and_device_of_a_job_with_gpus(tmp_path: Path) -> None:
    """Measured on a CPU, model and activations are on the device, the rest on the host."""
    (tmp_path / "train.py").touch()
    fields = {"script": str(tmp_path / "train.py"), "resources": {"gpus": "a100:1", "memory": "8G"}}
    advice = advice_of(job_of(tmp_path, **fields), device_memory=(40e9, "a100"))
    assert advice.host is not None
    # 6 GB before the first step without 1 GB of libraries and 4 GB of weights, CUDA, four batches
    assert advice.host.per_rank(16) == pytest.approx(1e9 + 2 * 1024**3 + 4e6 + 5e8)
    assert advice.options[0].need == pytest.approx(28e9)  # 16 GB of states, 10 + 2 GB
    assert (advice.fits, advice.replicas, advice.largest_batch) == (True, 1, 26)
    small = advice_of(job_of(tmp_path, **fields), device_memory=(24e9, "a10"))
    assert small.fits is False
    assert small.way is not None
    assert small.way.name == "gradient accumulation (micro-batch 1)"
    assert advice_of(job_of(tmp_path, **fields)).device_fits is None


@pytest.mark.parametrize(
    ("peaks", "batch", "noted"),
    [
        ((30e9, 30e9), 32, True),
        ((30e9, 30e9), 16, False),  # it ran at that batch
        ((24e9, 30e9), 32, False),
        ((30e9, 30e9), None, False),
    ],
)
def test_memory_that_does_not_grow_yet(
    peaks: tuple[float, float], batch: int | None, noted: bool, tmp_path: Path
) -> None:
    """Beyond the batches that ran, activations that their peak hides are named."""
    (tmp_path / "train.py").touch()
    job = job_of(tmp_path, script=str(tmp_path / "train.py"))
    half = {**FIGURES, "activations": 5e9, "peak_bytes": peaks[0]}
    found = Measured({8: half, 16: {**FIGURES, "peak_bytes": peaks[1]}}, {8: 0.0, 16: 0.0}, 1.0)
    notes = [*extension_notes(found, *needs_of(found, job), batch)]
    assert ["9.3 GiB more than listed at batch 32" in note for note in notes] == [True] * noted


def test_host_of_a_job_without_gpus(tmp_path: Path) -> None:
    """All of a process counts once per rank, libraries once per node; the batch is made smaller."""
    (tmp_path / "train.py").touch()
    fields: dict[str, Any] = {"script": str(tmp_path / "train.py")}
    advice = advice_of(job_of(tmp_path, **fields, resources={"ranks_per_node": 2, "memory": "50G"}))
    assert advice.host_bytes == pytest.approx(2 * (1.03 * 30e9 - 1e9 + 5e8) + 1e9)
    assert (advice.fits, advice.device_fits, advice.largest_batch) == (False, None, 11)
    assert advice.way is not None
    assert advice.way.name.startswith("gradient accumulation")
    assert advice_of(job_of(tmp_path, **fields, resources={"memory": "64G"})).fits is True


def test_check_warns_by_a_stored_advice(tmp_path: Path) -> None:
    """The same program with the same arguments needs more than is asked for; else it is silent."""
    script, store = tmp_path / "train.py", Store(tmp_path / "records")
    script.touch()

    def codes(args: list[str], **resources: Any) -> list[str]:
        job = job_of(tmp_path, script=str(script), args=args, resources=resources)
        return [finding.code for finding in check_memory(job, store)]

    assert codes([], memory="8G") == []  # no advice yet
    job = job_of(tmp_path, script=str(script))
    save_advice(store, job, advice_of(job))
    assert codes([], memory="8G") == ["memory.advice"]
    assert codes([], memory="64G") == []
    assert codes([], memory="40G", ranks_per_node=2) == ["memory.advice"]
    assert codes([], memory="8G", gpus="a100:1") == []  # measured for another kind of job
    assert codes(["--batch-size=8"], memory="8G") == []
    assert codes([]) == []  # asks for no memory
    gpu = job_of(tmp_path, script=str(script), resources={"gpus": "a10:1", "memory": "64G"})
    save_advice(store, gpu, advice_of(gpu, device_memory=(24e9, "a10")))
    assert codes([], memory="64G", gpus="a10:1") == ["memory.device"]
    assert codes([], memory="64G", gpus="a10:2") == []
    os.utime(script, (1, 1))  # changed since
    assert codes([], memory="64G", gpus="a10:1") == []
    next((tmp_path / "records/advice").iterdir()).write_text("{")
    assert codes([], memory="8G") == []


@pytest.mark.parametrize(
    ("state", "peak", "now", "expected"),
    [
        ("OUT_OF_MEMORY", 0, {}, ["memory.last_run"]),
        ("OUT_OF_MEMORY", 0, {"memory": "16G"}, []),
        ("OUT_OF_MEMORY", 0, {"ranks_per_node": 4}, []),
        ("FAILED", 0, {}, []),
        ("COMPLETED", 0.98, {}, ["memory.last_run"]),
        ("COMPLETED", 0.9, {}, []),
    ],
)
def test_check_warns_by_the_last_run(
    state: str, peak: float, now: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    """It was killed for memory, or nearly, with no less memory and the same arguments."""
    store = Store(tmp_path / "records")
    (tmp_path / "train.py").touch()

    def job(**more: Any) -> Job:
        resources = {"memory": "8G", **more.pop("resources", {})}
        return job_of(tmp_path, script=str(tmp_path / "train.py"), resources=resources, **more)

    sid = "a-20260102-030405-abcdef"
    record = {
        "name": "a",
        "created": 1767322984,
        "job": job().model_dump(mode="json"),
        "backend": "slurm",
    }
    store.prepare(sid, script="", shared={}, submit=record, runs={0: {}})
    attempt = store.runs_dir / sid / "attempts" / "1"
    (attempt / "nodes").mkdir(parents=True)
    write_json(attempt / "ended.json", {"exit_code": 137, "state": state, "reason": "", "time": 1})
    used = {"memory_peak_bytes": peak * 8e9, "memory_limit_bytes": 8e9}
    write_json(attempt / "nodes" / "n1.monitor.json", {"seconds": 900, "job": used})
    found = check_memory(job(resources=now), store)
    assert [finding.code for finding in found] == expected
    assert check_memory(job(args=["--batch-size=8"]), store) == []
    assert check_memory(job(name="a-20260102"), store) == []
    if expected:
        assert sid in found[0].message


@TRAINS
def test_memory_shared_with_a_forked_worker_counts_once(tmp_path: Path) -> None:
    """Pages of the rank are not its worker's, not even when the rank ends first."""
    (tmp_path / "train.py").write_text(
        f"{TRAINING}import time\nblock = bytearray(os.urandom(1)) * 200_000_000\n"
        "if not os.fork():\n    time.sleep(600)\nfor _ in range(20):\n"
        "    time.sleep(0.05)\n    train(1)"
    )
    found = measured(job_of(tmp_path, script=str(tmp_path / "train.py")))
    assert found.last["peak_bytes"] > 200e6
    assert found.workers[0] < 100e6
