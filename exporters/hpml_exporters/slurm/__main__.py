"""`python -m hpml_exporters.slurm OPTIONS_JSON`: the Slurm exporter as a process."""

from __future__ import annotations

import json
import sys

from hpml_exporters.app import run
from hpml_exporters.core.sampler import tell
from hpml_exporters.slurm.options import SlurmOptions
from hpml_orchestrator.errors import HpmlError


def main() -> int:
    """Run the exporter; returns the exit status."""
    try:
        options = SlurmOptions(**json.loads(sys.argv[1]))
        return run(options.server(), options.sources())
    except HpmlError as error:
        tell(f"error: {error}")
        if error.hint:
            tell(f"hint: {error.hint}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
