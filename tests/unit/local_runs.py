"""A user of the local backend: a directory with records of its own, in which hpml is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Desk"]


class Desk:
    """Somebody who runs jobs on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hpml(self, *arguments: str, code: int = 0) -> str:
        """Call hpml and return what it printed."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("HPML", "SLURM"))}
        done = subprocess.run(
            [sys.executable, "-m", "hpml_orchestrator.cli", *arguments],
            cwd=self.root,
            env={
                **kept,
                "HPML_HOME": str(self.root / "records"),
                "XDG_CONFIG_HOME": str(self.root / "config"),
                "HPML_LOCAL_KILL_WAIT": "60",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Call hpml with --json and return what it printed."""
        return json.loads(self.hpml(*arguments, "--json", code=code))

    def job(self, **fields: Any) -> str:
        """Write a job file; JSON is YAML."""
        (self.root / "job.yaml").write_text(json.dumps({"launcher": "srun", **fields}))
        return "job.yaml"
