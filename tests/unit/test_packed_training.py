"""ddp_images.py trains on packed digits as on loose ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpml_orchestrator.packing import PackRequest, pack
from tests.unit.training_runs import JOBS, TRAINS, result_of, run

pytestmark = TRAINS

TRAIN = JOBS / "ddp_images.py"


def test_training_on_a_pack_is_the_same_training(digits: Path, tmp_path: Path) -> None:
    """Two ranks under torchrun with reading processes: the same figures to the bit, no PNG file."""
    pack(PackRequest(str(digits), str(tmp_path / "pack")))
    assert not list((tmp_path / "pack").rglob("*.png"))
    results = []
    for data in (digits, tmp_path / "pack"):
        out = tmp_path / f"out-{data.name}"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN]
        done = run([*command, "--data", data, "--epochs", 3, "--output", out])
        assert done.returncode == 0, done.stderr
        results.append(result_of(out))
    loose, packed = (
        {key: value for key, value in one.items() if "second" not in key} for one in results
    )
    assert packed == loose
    assert packed["train_images"] == 1442
    assert packed["test_accuracy"] > 0.9


def test_what_a_pack_needs_is_told(digits: Path, tmp_path: Path) -> None:
    """Without hpml_packed.py, and with a damaged index: one line that says so."""
    dest = tmp_path / "pack"
    pack(PackRequest(str(digits), str(dest)))
    (tmp_path / "alone").mkdir()
    for name in ("ddp_images.py", "hpml_checkpoint.py"):
        shutil.copy(JOBS / name, tmp_path / "alone")
    done = run([tmp_path / "alone" / "ddp_images.py", "--data", dest])
    assert done.returncode == 2
    assert "is a pack: copy hpml_packed.py" in done.stderr.splitlines()[-1]
    os.truncate(dest / "pack.index", 100)
    done = run([TRAIN, "--data", dest])
    assert done.returncode == 2
    assert "pack.index: damaged" in done.stderr.splitlines()[-1]
