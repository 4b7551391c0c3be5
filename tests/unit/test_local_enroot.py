"""Jobs with ranks in a container of enroot, with a fake of `enroot start` that isolates them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.unit.local_runs import Desk

FAKE = Path(__file__).parent / "data" / "fake-enroot"
NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "mount",
    "-t",
    "tmpfs",
    "a",
    "/mnt",
]
PROBE = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MINE", "GIVEN", "EXPORTED", "QUOTED", "PATH", "HOME")
found = {name: os.environ.get(name) for name in names}
found |= {"cwd": os.getcwd(), "args": sys.argv[1:], "data": os.listdir(sys.argv[2])}
found["hidden"] = os.path.exists(os.environ["HIDDEN"])
with open(os.path.join(sys.argv[1], found["RANK"]), "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk with the fake on PATH, an image and data."""
    if subprocess.run(NAMESPACES, capture_output=True, check=False).returncode:
        pytest.skip("this machine has no user namespaces with mounts")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "enroot").symlink_to(FAKE)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/local/bin:/usr/bin:/bin")
    (tmp_path / "image.sqsh" / "etc").mkdir(parents=True)
    environment = 'PATH="/usr/local/bin:/usr/bin:/bin:/opt"\nMINE=image\nGIVEN=image\n'
    (tmp_path / "image.sqsh" / "etc" / "environment").write_text(environment)
    for name in ("work", "data", "hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "a.bin").touch()
    return Desk(tmp_path)


def job(desk: Desk, *command: str, **environment: Any) -> str:
    """Write the file of a job with two ranks in a container."""
    container = {"engine": "enroot", "image": "image.sqsh"}
    return desk.job(
        name="inside",
        workdir="work",
        command=[*command],
        resources={"ranks_per_node": 2, "time": "2m"},
        stage=[{"name": "data", "source": "data", "target": str(desk.root / "target")}],
        environment={"python": "python3", "container": container, **environment},
    )


def test_ranks_find_the_jobs_environment_and_mounts(desk: Desk) -> None:
    """The image's variables stay unless the job file has them, and so do PATH and HOME."""
    (desk.root / "target").mkdir()
    (desk.root / "work" / "probe.py").write_text(PROBE)
    setup = "export MINE=host EXPORTED=setup LINES=$'a\\nb=c' QUOTED='\"a b\" \"c\"'"
    variables = {"GIVEN": "job file", "HIDDEN": str(desk.root / "hidden")}
    command = ("python3", "probe.py", "{run.dir}", "{stage.data}", "it's a $word")
    ran = desk.json("run", "--local", job(desk, *command, setup=setup, variables=variables))
    (directory,) = desk.root.glob("records/runs/*")
    for rank in "01":
        found = json.loads((directory / rank).read_text())
        assert found == {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MINE": "image",
            "GIVEN": "job file",
            "EXPORTED": "setup",
            "QUOTED": '"a b" "c"',
            "PATH": "/usr/local/bin:/usr/bin:/bin:/opt",
            "HOME": "/root",
            "cwd": str(desk.root / "work"),
            "args": [str(directory), found["args"][1], "it's a $word"],
            "data": ["a.bin"],
            "hidden": False,
        }
    assert "2 of 2 ranks bound as planned" in ran["summary"]["binding"]


def test_sigterm_reaches_the_ranks(desk: Desk) -> None:
    """`hpml cancel` lets them end by themselves: enroot becomes the rank, and is not around it."""
    (desk.root / "target").mkdir()
    script = "trap 'touch $0/ended.$RANK; exit 1' TERM; touch $0/ready.$RANK; sleep 100 & wait"
    run = desk.json("submit", "--local", job(desk, "bash", "-c", script, "{run.dir}"))
    directory = Path(run["directory"])
    eventually(lambda: len([*directory.glob("ready.*")]) == 2)
    desk.hpml("cancel", run["id"])
    desk.hpml("wait", run["id"], code=6)
    assert len([*directory.glob("ended.*")]) == 2


def test_torchrun_starts_in_the_container(desk: Desk) -> None:
    """Its program is the image's: here that of the tests' environment, which is mounted."""
    pytest.importorskip("torch")
    mounts = [sys.prefix, sys.base_prefix]  # where its Python is
    script = """
import os, sys, torch.distributed as d
d.init_process_group("gloo")
os.mkdir(f"{sys.argv[1]}/rank{d.get_rank()}")
d.destroy_process_group()
"""
    file = desk.job(
        name="elastic",
        launcher="torchrun",
        command=[sys.executable, "-c", script, "{run.dir}"],
        resources={"ranks_per_node": 2, "time": "5m"},
        environment={
            "python": sys.executable,
            "container": {"engine": "enroot", "image": "image.sqsh", "mounts": mounts},
        },
        checkpoint=True,
    )
    desk.hpml("run", "--local", file)
    assert len([*desk.root.glob("records/runs/*/rank[01]")]) == 2
