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
# Not apptainer: notes its arguments, and runs what stands after the image.
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


def fake_apptainer(sandbox: Sandbox) -> Path:
    path = sandbox.bin / "apptainer"
    path.write_text(FAKE)
    path.chmod(0o755)
    return sandbox.root / "apptainer.called"


def container_job(sandbox: Sandbox, **more: Any) -> dict[str, Any]:
    source = sandbox.root / "source"
    source.mkdir()
    (source / "x").write_text("x")
    return {
        "name": "probe",
        "launcher": "srun",
        "command": [sys.executable, str(sandbox.root / "recorder.py"), "it's $(x)"],
        "args": ["{stage.data}"],
        "workdir": str(sandbox.root),
        "stage": [{"name": "data", "source": str(source), "target": str(sandbox.root / "tar get")}],
        "environment": {
            "python": sys.executable,
            "variables": {"VALUE": "a b"},
            "container": {
                "engine": "apptainer",
                "image": str(sandbox.root / "my image.sif"),
                "mounts": ["/data/set:/data:ro"],
            },
        },
        **more,
    }


def test_ranks_run_in_the_container(sandbox: Sandbox) -> None:
    """Records, work directory, staged data, mounts and the GPU driver; then the rank runs."""
    called = fake_apptainer(sandbox)
    (sandbox.root / "tar get").mkdir()
    seen = sandbox.run(render(sandbox.load(container_job(sandbox)).job, Capabilities()))
    staged = f"{sandbox.root}/tar get/hpml-{os.getuid()}/sandbox-1/data"
    assert seen["argv"] == ["it's $(x)", staged]
    assert (seen["env"]["VALUE"], seen["env"]["RANK"]) == ("a b", "0")
    words = called.read_text().rstrip("\0\n").split("\0")
    run = f"{sandbox.submission}/runs/1"
    binds = [words[index + 1] for index, word in enumerate(words) if word == "--bind"]
    assert binds == [
        str(sandbox.submission),
        run,
        str(sandbox.root),
        "/data/set:/data:ro",
        staged,
    ]
    assert words[words.index("--pwd") + 1 :][:2] == [
        str(sandbox.root),
        f"{sandbox.root}/my image.sif",
    ]
    assert "--nv" not in words
    binding = json.loads(Path(run, "attempts/0/binding/node1.jsonl").read_text())
    assert binding["program"] == sys.executable


def test_a_snapshot_comes_with_the_submission(sandbox: Sandbox) -> None:
    """The container begins in the copy of the code; the live tree is not to be seen in it."""
    called = fake_apptainer(sandbox)
    (sandbox.root / "tar get").mkdir()
    (sandbox.submission / "code" / "my dir").mkdir(parents=True)
    data = container_job(sandbox, workdir="/live: tree")
    seen = sandbox.run(
        render(sandbox.load(data).job, Capabilities(), snapshot=SnapshotPaths("my dir"))
    )
    assert seen["cwd"] == f"{sandbox.submission}/code/my dir"
    words = called.read_text().rstrip("\0\n").split("\0")
    assert words[words.index("--pwd") + 1] == f"{sandbox.submission}/code/my dir"
    assert str(sandbox.submission) in words
    assert not [word for word in words if "live" in word]


def test_torchrun_runs_in_the_container_too(sandbox: Sandbox) -> None:
    """With torchrun, the launcher and its ranks are inside: one container per node."""
    pytest.importorskip("torch")
    called = fake_apptainer(sandbox)
    (sandbox.root / "tar get").mkdir()
    data = container_job(sandbox, launcher="torchrun", resources={"ranks_per_node": 1})
    seen = sandbox.run(render(sandbox.load(data).job, Capabilities()))
    assert (seen["env"]["WORLD_SIZE"], seen["env"]["LOCAL_RANK"]) == ("1", "0")
    assert called.read_text().count("\n") == 1
