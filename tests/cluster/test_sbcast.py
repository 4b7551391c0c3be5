"""Real `sbcast`, and a chain, on the nodes of a real Slurm: each has a /dev/shm of its own."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.staging.many.nodes import CHECKOUT, NODE

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

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


def staged(
    cluster: SlurmCluster, directory: Path, source: Path, method: str, **options: Any
) -> list[dict[str, Any]]:
    """What two nodes say of staging a source; their directories are cleaned up after it."""
    attempt = directory / f"attempt-{method}-{len(list(directory.iterdir()))}"
    attempt.mkdir()
    told = {
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
        sys.executable, script, json.dumps(told),
        env={"PYTHONPATH": str(CHECKOUT)}, check=False, timeout=120,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [line["left"] for line in lines if "left" in line] == ["", ""], done.stdout
    return [line for line in lines if "left" not in line]


def test_a_file_comes_to_every_node(
    slurm_cluster: SlurmCluster, archive: Path, tmp_path: Path
) -> None:
    """Whole, checked by its digest, and as one file."""
    said = staged(slurm_cluster, tmp_path, archive, "sbcast", kind="file")
    results = [one for one in said if "digest" in one]
    assert len(results) == 2, said
    assert {one["method"] for one in results} == {"sbcast"}
    assert {one["bytes"] for one in results} == {archive.stat().st_size}
    read = staged(slurm_cluster, tmp_path, archive, "shared", kind="file")
    assert {one["digest"] for one in (*results, *read) if "digest" in one} == {results[0]["digest"]}


def test_an_archive_comes_to_every_node_and_is_unpacked(
    slurm_cluster: SlurmCluster, archive: Path, tmp_path: Path
) -> None:
    """Nothing of the archive stays."""
    said = staged(slurm_cluster, tmp_path, archive, "sbcast")
    results = [one for one in said if "digest" in one]
    assert [(one["files"], one["bytes"]) for one in results] == [(200, 200 * 40_000)] * 2, said
    assert len({one["digest"] for one in results}) == 1


def test_the_model_can_choose_sbcast(
    slurm_cluster: SlurmCluster, archive: Path, tmp_path: Path
) -> None:
    """For one file on a slow file system; both nodes do what the first one chose."""
    said = staged(
        slurm_cluster, tmp_path, archive, "auto", kind="file",
        rates={"shared_rate": 1e5, "link_rate": 1e9, "node_rate": 1e9},
    )  # fmt: skip
    told = [one["tell"] for one in said if "tell" in one]
    assert len(told) == 1
    assert "sbcast" in told[0]
    methods = {one["method"] for one in said if "digest" in one}
    assert methods == {told[0].split()[1].rstrip(":")}


def test_a_chain_of_slurms_nodes(
    slurm_cluster: SlurmCluster, archive: Path, tmp_path: Path
) -> None:
    """Nodes find each other through the attempt's directory and the host's own address."""
    said = staged(slurm_cluster, tmp_path, archive.parent / "tree", "chain")
    results = [one for one in said if "digest" in one]
    assert [(one["files"], one["method"]) for one in results] == [(200, "chain")] * 2, said
    assert len({one["digest"] for one in results}) == 1


def test_sbcast_that_fails_ends_both_nodes(
    slurm_cluster: SlurmCluster, archive: Path, tmp_path: Path
) -> None:
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
    said = staged(slurm_cluster, tmp_path, archive, "sbcast", before=before)
    errors = [one["error"] for one in said if "error" in one]
    assert len(errors) == 2, said
    assert all("sbcast ended with" in error for error in errors), errors
