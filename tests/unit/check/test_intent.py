"""Requests that are valid and rarely meant: memory in MiB, equal runs, checkpoints elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.check.job import check_intent
from hpml_orchestrator.records.job import Job

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = {"script": "t.py"}
TWO = {"resources": {"ranks_per_node": 2}}
SAVES = {"checkpoint": {"enabled": True}}
HELPER = "import hpml_checkpoint"


@pytest.mark.parametrize(
    ("fields", "text", "code"),
    [
        ({"resources": {"memory": 4}}, "", "memory.little"),
        ({"resources": {"memory": "4G"}}, "", ""),
        ({"resources": {"memory": "50M"}, "command": ["true"], "script": None}, "", ""),
        (TWO, "import torch", "ranks.alone"),
        ({"resources": {"gpus": 2}}, "from torch import nn", "ranks.alone"),
        ({"resources": {"nodes": 2}}, "import sklearn", "ranks.alone"),
        (TWO, "import torch, os\nos.environ['LOCAL_RANK']", ""),
        (TWO, "import torch\nfrom lib import setup", ""),
        (TWO, "import other", ""),  # what it does is not known
        (TWO, "import json, lib.saving", ""),
        (TWO, "from other import (\n    train)", ""),
        (TWO, "open('out', 'w')", "ranks.alone"),
        ({"array": "0-3"}, "", "array.unused"),
        ({"array": "0-3", "args": ["--seed={array.index}"]}, "", ""),
        ({"array": "0-3"}, "os.environ['SLURM_ARRAY_TASK_ID']", ""),
        ({"array": "3"}, "", ""),
        ({"array": "0-3", "script": "none.py"}, "", ""),
        ({"array": "0-3", "command": ["python", "t.py"], "script": None}, "", "array.unused"),
        ({"array": "0-3", "module": "t", "script": None}, "", "array.unused"),
        (SAVES, "torch.save(model, 'out/last.pt')", "checkpoint.unused"),
        (SAVES, HELPER, ""),
        (SAVES, "from lib.saving import save", ""),
        (SAVES, "from .lib import *", "checkpoint.unused"),
        ({**SAVES, "args": ["--out={checkpoint.dir}"]}, "", ""),
        ({**SAVES, "environment": {"variables": {"A": "{run.dir}/checkpoints"}}}, "", ""),
        ({"checkpoint": {"enabled": True, "directory": "/shared/me"}}, "", ""),
        ({}, "", ""),
    ],
)
def test_what_is_rarely_meant(tmp_path: Path, fields: dict[str, Any], text: str, code: str) -> None:
    """Each is a warning; modules beside the script belong to its text."""
    (tmp_path / "t.py").write_text(text)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("import torch.distributed")
    (tmp_path / "lib" / "saving.py").write_text(HELPER)
    job = Job.from_json({"name": "j", "workdir": str(tmp_path), **SCRIPT, **fields})
    findings = [*check_intent(job)]
    assert [one.code for one in findings] == [code] * bool(code)
    assert all(one.level == "warning" and one.hint for one in findings)
