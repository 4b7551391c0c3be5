"""Hydra's launcher for submitit starts jobs of hpml, with the file that the documentation has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hpml_orchestrator.records.store import Store
from tests.patience import eventually

PAGE = Path(__file__).parents[3] / "docs" / "submitit.md"
SCRIPT = """\
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    print("training with", config.lr)

if __name__ == "__main__":
    main()
"""


def test_a_multirun_is_a_job_array(tmp_path: Path) -> None:
    """Each combination is a task; parameters of the launcher become fields of the job."""
    block = re.search(r"```python hpml_launcher.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "hpml_launcher.py").write_text(block[1])
    (tmp_path / "fit.py").write_text(SCRIPT)
    options = ["backend=local", "timeout_min=5", "cpus_per_task=1"]
    words = [f"hydra.launcher.{option}" for option in options]
    words += ["hydra/launcher=hpml", "+hydra.launcher.set.binding=none", "+lr=0.1,0.2"]
    done = subprocess.run(
        [sys.executable, "fit.py", "--multirun", *words],
        cwd=tmp_path,
        env={**os.environ, "HPML_HOME": str(tmp_path / "records")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (submission,) = Store(tmp_path / "records").submissions()
    job = submission.record()["job"]
    assert (job["array"], job["binding"]["policy"]) == ("0-1%2", "none")
    outputs = submission.directory / "output"
    # a task writes its result, for which Hydra waits, before the end of its output
    eventually(lambda: "training with 0.1" in (outputs / "0.log").read_text())
    eventually(lambda: "training with 0.2" in (outputs / "1.log").read_text())
