"""The documentation's statements about Slurm, checked on a real one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.pages import Reader, pages_with
from tests.unit.training_runs import TRAINS

pytestmark = TRAINS


@pytest.fixture
def reader(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Reader]:
    """A reader on the login node, after the tutorial's earlier step that writes the digits."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_CONF": str(slurm_cluster.slurm_conf),
    }
    assert shutil.which("sbatch", path=environment["PATH"])
    made = Reader(tmp_path / "digits", environment)
    written = made.call("python make_digits.py digits")
    assert written.returncode == 0, written.stdout
    yield made
    made.leave()


@pytest.mark.parametrize("page", pages_with("console slurm"))
def test_commands_for_slurm_do_what_the_page_says(page: str, reader: Reader) -> None:
    """Every `console slurm` block runs, with the exit status and the output that stand there."""
    tags = ["console slurm"]
    if page == "docs/install-cluster.md":
        reader.administer()
        tags.append("console")  # installs what the others use
    assert reader.follow(page, *tags)
