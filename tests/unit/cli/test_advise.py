"""`hpml advise`: short runs of real trainings against the peak of full ones, and formulas."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.staging.space import Headroom
from tests.unit.cli.support import Hpml, Result, Shell

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

GPUS = "gpus: 'a100:4'"
SHAPE = "layers=2,hidden=256,sequence=64,batch=4"


@pytest.mark.parametrize(
    ("resources", "words", "code", "verdict"),
    [
        (GPUS, "1B", 0, "not known: weights, gradients and optimizer states alone need 16.8 GiB"),
        (GPUS, "7B", 1, "does not fit: weights, gradients and optimizer states alone need 117.3"),
        (GPUS, "90B", 1, "does not fit: weights, gradients and optimizer states alone need 1.5 T"),
        ("gpus: 'a100:1'", "1B", 0, "not known: weights, gradients and optimizer states alone"),
        ("memory: 8G", "10M", 0, "not known: weights, gradients and optimizer states alone need"),
        ("memory: 8G", "7B", 1, "does not fit: weights, gradients and optimizer states alone need"),
        (GPUS, f"1B,{SHAPE}", 0, "fits one GPU, with a batch up to about "),
        ("memory: 8G", f"10M,{SHAPE}", 0, "the node's memory suffices: "),
    ],
)
def test_without_activations_nothing_is_said_to_fit(
    resources: str, words: str, code: int, verdict: str, hpml: Hpml, shell: Shell
) -> None:
    """States alone show that a model does not fit, never that it fits; a note names the words."""
    text = f"name: a\ncommand: [python, train.py]\nresources: {{{resources}}}\n"
    (shell.root / "model.yaml").write_text(text)
    done = hpml("advise", "model.yaml", "--model", words)
    assert done.code == code, done
    (line,) = [line for line in done.out.splitlines() if line.startswith("verdict")]
    assert line.split(None, 1)[1].startswith(verdict)
    known = "layers" in words
    assert ("activations are not counted: give the model's shape" in done.out) is not known
    assert not known or "side by side" not in line
    told = hpml("advise", "model.yaml", "--model", words, "--json").json()
    assert told["fits"] is (False if code else True if known else None)
    assert told["counts_activations"] is known


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


class Advised:
    """Runs `hpml advise` on a program of its own directory."""

    def __init__(self, hpml: Hpml, shell: Shell, work: Path) -> None:
        self.hpml, self.shell, self.work = hpml, shell, work

    def __call__(self, program: str | None, *words: str, **fields: Any) -> Result:
        """Write the program to train.py unless `fields` name another one, and advise on it."""
        if program is not None:
            (self.work / "train.py").write_text(program)
            fields = {"script": str(self.work / "train.py"), **fields}
        fields = {"environment": {"python": sys.executable}, "command": None, **fields}
        job = self.shell.job("advised", launcher=None, workdir=str(self.work), **fields)
        return self.hpml("advise", job, *words)


@pytest.fixture
def advised(hpml: Hpml, shell: Shell, tmp_path: Path) -> Advised:
    """The command on a small program."""
    return Advised(hpml, shell, tmp_path)


@TRAINS
@pytest.mark.parametrize(
    ("kind", "size", "batch", "others"),
    [
        ("mlp", [], 2048, (512, 3584)),
        pytest.param("transformer", [], 16, (24, 32, 64), marks=pytest.mark.slow),
        pytest.param("images", ["--width=32"], 32, (24, 48, 64), marks=pytest.mark.slow),
        # The three above settled the allowance for later steps; the three below did not.
        pytest.param(
            "mlp", ["--width=896", "--depth=4"], 2000, (1500, 3000), marks=pytest.mark.slow
        ),
        pytest.param(
            "transformer", ["--width=192", "--depth=7"], 12, (20, 40), marks=pytest.mark.slow
        ),
        pytest.param("images", ["--width=56"], 20, (30, 50), marks=pytest.mark.slow),
    ],
)
def test_advice_is_near_the_peak_of_a_full_run(
    kind: str, size: list[str], batch: int, others: tuple[int, ...], advised: Advised
) -> None:
    """Extrapolated to other batches, a rank's resident memory is within 10 % of the real peak."""
    script, words = SMALL, ["--model", kind, *size]
    if kind == "images":
        pictures(advised.work / "data")
        script = JOBS / "ddp_images.py"
        words = ["--data", str(advised.work / "data"), "--epochs=2", *size]
    args = [*words, f"--batch-size={batch}"]
    host = advised(None, "--json", script=str(script), args=args).json()["host"]
    for other in others:
        real = peak_bytes(script, *words, f"--batch-size={other}")
        process = host["process"]["base"] + other * host["process"]["per_sample"]
        assert process + host["shared"] == pytest.approx(real, rel=0.1), f"{kind} at {other}"


TRAINING = """\
import os, sys, time, torch
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
        ("open('data/missing.csv')", "train.py ended after 0 optimizer steps: FileNotFoundError"),
        ("raise SystemExit('--data is required')", "0 optimizer steps: --data is required"),
        ("import pandas_gone", "pandas_gone'\nhint: check environment.venv"),
        (f"{TRAINING}train(1)", "ended after 1 optimizer step: two are needed"),
        ("import os; os.kill(os.getpid(), 11)", "0 optimizer steps: exit status -11"),
    ],
    ids="no-data exits no-module one-step crashes".split(),
)
def test_a_program_that_cannot_be_measured(program: str, said: str, advised: Advised) -> None:
    """The error has the program's own message, or what it did not do."""
    assert advised(program).refuses(6, said, "--model")


def test_a_python_without_torch(advised: Advised) -> None:
    """It is named, with the error of its import; the program is not started."""
    (advised.work / "torch.py").write_text("raise ImportError('no such torch')")
    environment = {"python": sys.executable, "variables": {"PYTHONPATH": str(advised.work)}}
    done = advised("open('started', 'w')", environment=environment)
    assert done.refuses(6, "ImportError: no such torch", f"python ({sys.executable})")
    assert not (advised.work / "started").exists()


def test_a_program_that_is_too_slow(advised: Advised) -> None:
    """It is ended at the limit, with the processes that it started."""
    (advised.work / "torch.py").write_text(
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(advised.work / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    environment = {"python": sys.executable, "variables": {"PYTHONPATH": str(advised.work)}}
    done = advised("", "--time-limit=3", environment=environment)
    assert done.refuses(6, "after 0 optimizer steps: 3 s, its share of --time-limit, are over")
    child = read_stat((advised.work / "pid").read_text())
    assert child is None or child.ended


@TRAINS
def test_a_program_that_needs_too_much(advised: Advised, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended before the machine has no memory left."""
    name = "hpml_orchestrator.check.memory_run.memory_headroom"
    monkeypatch.setattr(name, lambda: Headroom(400_000_000, ""))
    done = advised(f"{TRAINING}block = b'1' * 500_000_000\ntime.sleep(600)")
    assert done.refuses(6, "it took more than the 305.2 MiB that this machine can spare")


@TRAINS
def test_the_program_runs_as_in_the_job_and_saves_nothing(advised: Advised) -> None:
    """It reads and writes in its working directory; an earlier run's checkpoint is not replaced."""
    (advised.work / "data.txt").write_text("data")
    (advised.work / "model.pt").write_text("of a real run")
    program = (
        f"{TRAINING}open('log.txt', 'w').write(open('data.txt').read())\n"
        "open(f'{sys.argv[1]}/result', 'w'); open(os.environ['TMPDIR'] + '/a', 'w')\n"
        "assert [*sys.argv[2:], os.environ['WHO']] == ['--a b', 'me']\n"
        "train(3)\ntorch.save(model.state_dict(), 'model.pt')\nopen('after', 'w')"
    )
    command = [sys.executable, "-m", "train", "{run.dir}", "--a b"]
    environment = {"setup": "false || WHO=me", "variables": {"WHO": "{env.WHO}"}}
    fields = {"script": None, "command": command, "environment": environment}
    told = advised(program, "--json", **fields, resources={"gpus": "a100:1"}).json()
    weights = 4 * (4 * 4 + 4)
    device = told["device"]
    assert device["weights"] == device["gradients"] == device["optimizer"] == weights
    assert (advised.work / "log.txt").read_text() == "data"
    assert (advised.work / "model.pt").read_text() == "of a real run"
    assert not (advised.work / "after").exists()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"script": "gone.py"}, "script"),
        ({"script": "."}, "script"),
        ({"command": ["bash", "-c", "python train.py"]}, "command"),
        ({"command": ["python", "-c", "print()"]}, "command"),
        ({"command": ["python", "gone.py"]}, "command"),
        (
            {"command": ["a"], "environment": {"container": {"engine": "pyxis", "image": "a"}}},
            "environment.container",
        ),
    ],
)
def test_a_job_without_a_python_program(fields: Any, field: str, advised: Advised) -> None:
    """The field that names the program is wrong, or names something else than a Python program."""
    assert advised(None, **fields).refuses(2, f"hpml: error: {field}: ")


@pytest.mark.parametrize("source", ["gone", "data.tar", "data.tbz2", "data.txz"])
def test_staged_data_that_cannot_be_used_where_it_lies(source: str, advised: Advised) -> None:
    """A source that does not exist or would be unpacked ends it before the program starts."""
    if source != "gone":
        (advised.work / source).touch()
    stage = [{"name": "data", "source": str(advised.work / source)}]
    assert advised("", stage=stage).refuses(2, "stage.data.source: ")


@TRAINS
def test_memory_shared_with_a_forked_worker_counts_once(advised: Advised) -> None:
    """Pages of the rank are not its worker's, not even when the rank ends first."""
    program = (
        f"{TRAINING}block = bytearray(os.urandom(1)) * 200_000_000\n"
        "if not os.fork():\n    time.sleep(600)\nfor _ in range(20):\n"
        "    time.sleep(0.05)\n    train(1)"
    )
    host = advised(program, "--json").json()["host"]
    assert host["process"]["base"] > 200e6
    assert host["workers"]["base"] < 100e6
