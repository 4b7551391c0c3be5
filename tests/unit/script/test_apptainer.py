"""A job in an apptainer container runs as its script says.

There is no container runtime on the test machine: `apptainer` is a FAKE here, a shell script that
writes down what it was called with and runs the rest outside of any container.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.script.render import SnapshotPaths

if TYPE_CHECKING:
    from tests.unit.script.conftest import Sandbox

FAKE = """\
#!/bin/bash
[[ $1 = exec ]] || exit 9
{ printf '%s\\0' "$@"; printf '\\n'; } >> "${0%/*}/../apptainer.called"
shift
while (($#)); do
  case $1 in
    --nv) shift ;;
    --bind|--pwd) shift 2 ;;
    *) break ;;
  esac
done
[[ $1 = *.sif ]] || exit 8
shift
exec "$@"
"""


def run(
    sandbox: Sandbox, snapshot: SnapshotPaths | None = None, **more: Any
) -> tuple[dict[str, Any], list[str]]:
    """Run a job in the fake container; return what its program saw, and apptainer's arguments."""
    fake = sandbox.bin / "apptainer"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    (sandbox.root / "tar get").mkdir()
    source = sandbox.root / "source"
    source.mkdir()
    (source / "x").write_text("x")
    image = {"engine": "apptainer", "image": f"{sandbox.root}/my image.sif"}
    data = {
        "name": "probe",
        "launcher": "srun",
        "command": [sys.executable, str(sandbox.root / "recorder.py"), "it's $(x)"],
        "args": ["{stage.data}"],
        "workdir": str(sandbox.root),
        "stage": [{"name": "data", "source": str(source), "target": str(sandbox.root / "tar get")}],
        "environment": {
            "python": sys.executable,
            "variables": {"VALUE": "a b"},
            "container": {**image, "mounts": ["/data/set:/data:ro"]},
        },
        **more,
    }
    seen = sandbox.run(render(sandbox.load(data).job, Capabilities(), snapshot=snapshot))
    (call,) = (sandbox.root / "apptainer.called").read_text().splitlines()
    return seen, call.rstrip("\0").split("\0")


def test_ranks_run_in_the_container(sandbox: Sandbox) -> None:
    """Records, work directory, staged data and mounts are bound; then the rank runs."""
    seen, argv = run(sandbox)
    staged = f"{sandbox.root}/tar get/hpml-{os.getuid()}/sandbox-1/data"
    assert seen["argv"] == ["it's $(x)", staged]
    assert (seen["env"]["VALUE"], seen["env"]["RANK"]) == ("a b", "0")
    attempt = Path(f"{sandbox.submission}/runs/1/attempts/0")
    mounts = [sandbox.submission, attempt.parents[1], sandbox.root, "/data/set:/data:ro", staged]
    binds = [option for mount in mounts for option in ("--bind", str(mount))]
    where = ["--pwd", str(sandbox.root), f"{sandbox.root}/my image.sif"]
    assert argv[: len(binds) + 4] == ["exec", *binds, *where]
    binding = json.loads((attempt / "binding/node1.jsonl").read_text())
    assert binding["program"] == sys.executable


def test_a_snapshot_comes_with_the_submission(sandbox: Sandbox) -> None:
    """The container begins in the copy of the code, with the GPU driver; no live tree is bound."""
    (sandbox.submission / "code" / "my dir").mkdir(parents=True)
    seen, argv = run(sandbox, SnapshotPaths("my dir"), workdir="/live: tree", resources={"gpus": 1})
    assert seen["cwd"] == f"{sandbox.submission}/code/my dir"
    assert argv[argv.index("--pwd") + 1] == f"{sandbox.submission}/code/my dir"
    assert argv[1] == "--nv"
    assert not [argument for argument in argv if "live" in argument]


def test_torchrun_runs_in_the_container_too(sandbox: Sandbox) -> None:
    """With torchrun, the launcher and its ranks are inside: one container per node."""
    pytest.importorskip("torch")
    seen, _ = run(sandbox, launcher="torchrun", resources={"ranks_per_node": 1})
    assert (seen["env"]["WORLD_SIZE"], seen["env"]["LOCAL_RANK"]) == ("1", "0")
