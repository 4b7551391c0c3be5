"""What a build of PyTorch is, read from its files, beside what it says itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hpml_orchestrator.records.torch_build import READ_BUILD, read_vectors
from tests.unit.training_runs import TRAINS


@TRAINS
def test_the_own_build_is_as_it_says_itself() -> None:
    """Version, libraries and vector level are those that PyTorch gives when it is imported."""
    code = "import torch; print(torch.__version__, torch.backends.mkl.is_available(),"
    code += "torch.backends.mkldnn.is_available(), torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": ""}
    del environment["ATEN_CPU_CAPABILITY"]
    said, read = (
        subprocess.run(
            [sys.executable, "-c", one], env=environment, capture_output=True, check=True
        )
        for one in (code, READ_BUILD)
    )
    build, vectors = json.loads(read.stdout), read_vectors(environment)
    cpu = vectors["cpu"] if vectors else None
    assert said.stdout.decode().split() == [
        *map(str, (build["version"], build["mkl"], build["onednn"], cpu))
    ]
