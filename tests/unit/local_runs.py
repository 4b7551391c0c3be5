"""A user of the local backend: a directory with its own records, in which hpml is called."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def kill_agent_for_good(pid: int) -> None:
    """Kill the shell that would start an agent again, and the agent."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # its step has ended with that shell
        os.kill(pid, signal.SIGKILL)


class Desk:
    """Somebody who runs jobs on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _command(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("HPML", "SLURM"))}
        own = {
            "HPML_HOME": str(self.root / "records"),
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "HPML_LOCAL_KILL_WAIT": "60",
        }
        words = [sys.executable, "-m", "hpml_orchestrator.cli", *arguments]
        return {"args": words, "cwd": self.root, "env": kept | own, "text": True}

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        """Start hpml, and return its process."""
        return subprocess.Popen(**self._command(arguments), stdout=subprocess.DEVNULL)

    def hpml(self, *arguments: str, code: int = 0) -> str:
        """Call hpml and return what it printed."""
        command = self._command(arguments)
        done = subprocess.run(**command, capture_output=True, timeout=1800, check=False)
        assert done.returncode == code, done.stderr + done.stdout
        printed: str = done.stdout
        return printed

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Call hpml with --json and return what it printed."""
        return json.loads(self.hpml(*arguments, "--json", code=code))

    def job(self, **fields: Any) -> str:
        """Write a job file; JSON is YAML."""
        (self.root / "job.yaml").write_text(json.dumps({"launcher": "srun", **fields}))
        return "job.yaml"
