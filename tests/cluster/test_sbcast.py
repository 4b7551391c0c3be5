"""Real `sbcast`, and a chain, on the nodes of a real Slurm: each has a /dev/shm of its own."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.unit.staging.many.nodes import CHECKOUT, NODE

FROM_SLURM = """
told["index"] = int(os.environ["SLURM_NODEID"])
told["nodes"] = int(os.environ["SLURM_NNODES"])
"""
LISTING = """
import subprocess
words = ["find", told["base"], "-name", "*sbcast-*"]
print(json.dumps({"left": subprocess.run(words, capture_output=True, text=True).stdout}))
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Give an archive of 200 files, 8 MB."""
    top = tmp_path / "tree"
    top.mkdir()
    for number in range(200):
        (top / f"{number}.bin").write_bytes(os.urandom(40_000))
    with tarfile.open(tmp_path / "data.tar", "w") as made:
        made.add(top, ".")
    return tmp_path / "data.tar"


Stage = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def stage(slurm_cluster: SlurmCluster, tmp_path: Path) -> Stage:
    """Return what stages a source on two nodes, and cleans up after it."""
    return partial(_staged, slurm_cluster, tmp_path)


def results(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of the nodes' words are results, of both and with the same contents."""
    ends = [line for line in said if "digest" in line]
    assert len(ends) == 2, said
    assert ends[0]["digest"] == ends[1]["digest"]
    return ends


def _staged(
    cluster: SlurmCluster, directory: Path, source: Path, method: str, **options: Any
) -> list[dict[str, Any]]:
    attempt = directory / f"attempt-{method}-{len(list(directory.iterdir()))}"
    attempt.mkdir()
    order = {
        "source": str(source),
        "base": "/dev/shm",
        "attempt": str(attempt),
        "method": method,
        "kind": "auto",
        "timeout": 60.0,
        "join_seconds": 60.0,
        "options": {},
        "rates": {},
        "interfaces": [],
        "room": None,
        "umask": None,
        "before": FROM_SLURM,
        "stay": False,
        "clean": True,
        **options,
    }
    script = attempt / "node.py"
    script.write_text(NODE.replace('if told["stay"]', f'{LISTING}\nif told["stay"]'))
    done = cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--export=ALL",
        sys.executable, script, json.dumps(order),
        env={"PYTHONPATH": str(CHECKOUT)}, check=False, timeout=120,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [line["left"] for line in lines if "left" in line] == ["", ""], done.stdout
    return [line for line in lines if "left" not in line]


def test_a_file_comes_to_every_node(stage: Stage, archive: Path) -> None:
    """Whole, checked by its digest, and as one file."""
    sent, read = (results(stage(archive, how, kind="file")) for how in ("sbcast", "shared"))
    whole = ("sbcast", archive.stat().st_size, read[0]["digest"])
    assert [(node["method"], node["bytes"], node["digest"]) for node in sent] == [whole] * 2


@pytest.mark.parametrize("method", ["sbcast", "chain"])
def test_a_tree_comes_to_every_node(stage: Stage, archive: Path, method: str) -> None:
    """An archive is unpacked and goes; a chain's nodes find each other by the host's address."""
    source = archive if method == "sbcast" else archive.parent / "tree"
    nodes = results(stage(source, method))
    assert [(node["files"], node["method"]) for node in nodes] == [(200, method)] * 2


def test_the_model_can_choose_sbcast(stage: Stage, archive: Path) -> None:
    """For one file on a slow file system; both nodes do what the first one chose."""
    rates = {"shared_rate": 1e5, "link_rate": 1e9, "node_rate": 1e9}
    said = stage(archive, "auto", kind="file", rates=rates)
    (choice,) = [line["tell"] for line in said if "tell" in line]
    assert "sbcast" in choice
    assert {node["method"] for node in results(said)} == {choice.split()[1].rstrip(":")}


def test_sbcast_that_fails_ends_both_nodes(stage: Stage, archive: Path) -> None:
    """The real command finds a file of the same name on one node, which it does not overwrite."""
    before = FROM_SLURM + (
        "\nimport secrets; secrets.token_hex = lambda n=4: '00' * n"
        "\nimport hpml_orchestrator.staging.many.sbcast as B"
        "\nreal = B.Broadcast._check_room"
        "\ndef check(self, sent):"
        "\n    real(self, sent)"
        "\n    told['index'] and open(self._copy, 'w').close()"
        "\nB.Broadcast._check_room = check"
    )
    said = stage(archive, "sbcast", before=before)
    errors = [line["error"] for line in said if "error" in line]
    assert len(errors) == 2, said
    assert all("sbcast ended with" in error for error in errors), errors
