"""A test that waits in vain says for what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.stuck import told_of


def test_the_stack_of_a_process_that_waits_is_told(tmp_path: Path) -> None:
    """Found by its directory; where py-spy may look, its function is named."""
    code = "import time\ndef in_vain():\n    print(flush=True)\n    time.sleep(600)\nin_vain()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        told = told_of(tmp_path)
        process.kill()
    assert f"--- {process.pid}:" in told
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is not None and os.geteuid() == 0:
        assert "in_vain" in told
