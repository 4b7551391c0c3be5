"""Horovod trains through hpml: four ranks on two nodes of a real Slurm, two by horovodrun here."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import MPIRUN_AS_ROOT, ROOT, Desk, eventually

PYTHON = sys.executable
pytestmark = pytest.mark.alone


@pytest.fixture(scope="module", autouse=True)
def _horovod() -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("NO HOROVOD TESTS: horovod is not installed (make horovod)")
    if not shutil.which("mpirun"):
        pytest.skip("NO HOROVOD TESTS: openmpi-bin is not installed")


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk with the training, its job file, and the digits."""
    return with_training(slurm_cluster, tmp_path)


@pytest.fixture
def local_desk(tmp_path: Path) -> Desk:
    """The same without a cluster."""
    return with_training(SlurmCluster(tmp_path, tmp_path / "no-slurm.conf", (), (), {}), tmp_path)


def with_training(cluster: SlurmCluster, place: Path) -> Desk:
    """Copy the training, its job file and the digits to a desk."""
    jobs = ROOT / "training_jobs"
    for file in (*jobs.glob("*.py"), jobs / "digits_horovod.yaml"):
        shutil.copy(file, place)
    subprocess.run([PYTHON, "make_digits.py", "digits"], cwd=place, check=True, timeout=120)
    # As root, who alone may use the real-time class: without it these ranks starve (see `patient`)
    return Desk(cluster, place, MPIRUN_AS_ROOT, as_root=True)


# Root may let its ranks take turns by the real-time class; for others the call fails, and no more.
PATIENT = """
#define _GNU_SOURCE
#include <sched.h>
#include <unistd.h>

int sched_yield(void) { return usleep(100), 0; }

__attribute__((constructor)) static void take_turns(void) {
  struct sched_param lowest = {.sched_priority = 1};
  sched_setscheduler(0, SCHED_RR, &lowest);
}
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shim: a waiting rank's sched_yield is a short sleep, and ranks on a core take turns.

    Both nodes are this machine, whose cores are fewer than the ranks, so that two sessions share
    each core. Linux 6.18 serves them unevenly by its fair class, for minutes: seen here as ranks
    at 95 % and 3 % of one core with sched_yield, and with sleeps in its place as a rank that was
    in the kernel's nanosleep at 100 % while the other was ready to run and never ran. That is
    also why these tests run alone.
    """
    if not shutil.which("gcc"):
        pytest.skip("NO HOROVOD TESTS: gcc is not installed")
    made = tmp_path_factory.mktemp("patient") / "patient.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", made],
        input=PATIENT.encode(),
        check=True,
        timeout=120,
    )
    return made


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_four_ranks_on_two_nodes_reach_the_accuracy(desk: Desk, patient: Path, how: str) -> None:
    """Between nodes Horovod goes through mpirun, or through srun with PMIx."""
    fields = {
        "launcher": how,
        "mpi": "pmix" if how == "srun" else "none",
        "resources.nodes": 2,
        "resources.memory": "4G",
        "environment.python": PYTHON,
        "args.1": "--epochs=9",
        "environment.variables.OMPI_MCA_mpi_yield_when_idle": "1",
        "environment.variables.LD_PRELOAD": str(patient),
    }
    sets = [f"--set={name}={value}" for name, value in fields.items()]
    ran = desk.json("run", *sets, "digits_horovod.yaml")
    assert ran["state"] == "COMPLETED"
    result = ran["summary"]["result"]
    assert result["test_accuracy"] >= 0.95
    assert result["world_size"] == 4
    assert ran["summary"]["ranks"] == 4


def test_two_ranks_by_horovodrun(desk: Desk) -> None:
    """The job file as it is, but for its epochs, on the local backend."""
    sets = (f"--set=environment.python={PYTHON}", "--set=args.1=--epochs=1")
    ran = desk.json("run", "--local", *sets, "digits_horovod.yaml")
    assert ran["state"] == "COMPLETED"
    assert ran["summary"]["result"]["world_size"] == ran["summary"]["ranks"] == 2


def weights(run: dict[str, Any]) -> dict[str, str]:
    """Return the weights in the newest checkpoint of a run."""
    newest = max(Path(run["directory"], "checkpoints").glob("step-*"))
    code = (
        "import sys, torch; model = torch.load(sys.argv[1])['state']['network']; "
        "print({name: tensor.numpy().tobytes().hex() for name, tensor in model.items()})"
    )
    done = subprocess.run(
        [PYTHON, "-c", code, newest / "state.pt"], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = ast.literal_eval(done.stdout)
    return found


@pytest.mark.slow
def test_a_stop_by_horovodrun(local_desk: Desk) -> None:
    """Asked to save and continue after some epochs: two attempts, and the weights of one."""
    sets = (f"--set=environment.python={PYTHON}", "--set=args.1=--epochs=6")
    stopped = local_desk.json("submit", "--local", *sets, "digits_horovod.yaml")
    events = Path(stopped["directory"], "attempts", "0", "events")

    def has_saved() -> bool:
        return any('"checkpoint"' in path.read_text() for path in events.glob("*.jsonl"))

    eventually(has_saved, what="a checkpoint")
    local_desk.hpml("requeue", stopped["id"])
    done = local_desk.json("wait", stopped["id"])
    assert (done["state"], done["attempts"]) == ("COMPLETED", 2)
    whole = local_desk.json("run", "--local", *sets, "digits_horovod.yaml")
    assert whole["attempts"] == 1
    assert weights(stopped) == weights(whole)
