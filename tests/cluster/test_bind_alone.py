"""`hpml-bind -- command` in anybody's own script, under real srun and mpirun."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster

BIND = Path(sys.executable).with_name("hpml-bind")
WHERE = """\
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
found = {name: os.environ.get(name) for name in names}
found["cpus"] = sorted(os.sched_getaffinity(0))
with open(os.path.join(sys.argv[1], f"{sys.argv[2]}-{os.getpid()}.json"), "w") as stream:
    json.dump(found, stream)
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --mem=500M --time=5 --wait
unset OMP_NUM_THREADS
{bind} -- {python} where.py {out} batch
srun --cpu-bind=none {bind} --show -- {python} where.py {out} srun
if command -v mpirun >/dev/null; then
  mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2 \\
    {bind} -- {python} where.py {out} mpirun
fi
"""


@pytest.fixture(scope="module")
def seen(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What the processes of each launcher found."""
    if not BIND.exists():
        pytest.skip(f"not installed: {BIND}")
    directory = tmp_path_factory.mktemp("alone")
    (directory / "where.py").write_text(WHERE)
    (directory / "job.sh").write_text(
        SCRIPT.format(bind=BIND, python=sys.executable, out=directory)
    )
    output = directory / "out.txt"
    command = ("sbatch", f"--output={output}", "job.sh")
    done = slurm_cluster.run(*command, cwd=directory, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{output.exists() and output.read_text()}"
    ranks: dict[str, list[dict[str, Any]]] = {}
    for path in directory.glob("*-*.json"):
        ranks.setdefault(path.name.split("-")[0], []).append(json.loads(path.read_text()))
    return {
        name: sorted(these, key=lambda rank: str(rank["RANK"])) for name, these in ranks.items()
    }


def test_the_batch_script_itself_is_no_rank(seen: dict[str, list[dict[str, Any]]]) -> None:
    """Slurm sets SLURM_PROCID there, too; a rank of two tasks would wait for the other."""
    (alone,) = seen["batch"]
    assert (alone["RANK"], alone["WORLD_SIZE"]) == (None, None)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_share_out_what_they_have_in_common(
    seen: dict[str, list[dict[str, Any]]], launcher: str
) -> None:
    """Two ranks: their numbers are the launcher's, and no CPU is with both while there are two."""
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    ranks = seen[launcher]
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "1")]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("2", "2")}
    assert {rank["GROUP_RANK"] for rank in ranks} == {"0"}
    first, second = (set(rank["cpus"]) for rank in ranks)
    if len(os.sched_getaffinity(0)) > 1:
        assert first
        assert second
        assert not first & second
