"""`hpml-bind -- command` in anybody's own script, under real srun and mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

BIND = Path(sys.executable).with_name("hpml-bind")
TELL = """\
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
told = {name: os.environ.get(name) for name in names}
told["cpus"] = sorted(os.sched_getaffinity(0))
with open(os.path.join(sys.argv[1], f"{sys.argv[2]}-{os.getpid()}.json"), "w") as stream:
    json.dump(told, stream)
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --mem=500M --time=5 --wait
unset OMP_NUM_THREADS
{bind} -- {python} tell.py {out} batch
srun --cpu-bind=none {bind} --show -- {python} tell.py {out} srun
if command -v mpirun >/dev/null; then
  mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2 \\
    {bind} -- {python} tell.py {out} mpirun
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
    (directory / "tell.py").write_text(TELL)
    (directory / "job.sh").write_text(
        SCRIPT.format(bind=BIND, python=sys.executable, out=directory)
    )
    done = subprocess.run(
        ["sbatch", "--output=out.txt", "job.sh"],
        env=slurm_cluster.environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    output = (directory / "out.txt").read_text() if (directory / "out.txt").exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{output}"
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(directory.glob("*-*.json")):
        found.setdefault(path.name.split("-")[0], []).append(json.loads(path.read_text()))
    for ranks in found.values():
        ranks.sort(key=lambda one: str(one["RANK"]))
    found["output"] = [{"text": output}]
    return found


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
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in ranks] == [("0", "0"), ("1", "1")]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in ranks} == {("2", "2")}
    assert {one["GROUP_RANK"] for one in ranks} == {"0"}
    first, second = (set(one["cpus"]) for one in ranks)
    if len(os.sched_getaffinity(0)) > 1:
        assert first
        assert second
        assert not first & second, seen["output"]
