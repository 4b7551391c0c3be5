"""The prolog and epilog as a site installs them, for clusters of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator import assets

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["install_prolog"]

_WRAPPER = """\
#!/bin/sh
HPML_RUN={where}/run
export HPML_RUN
exec {script}
"""


def install_prolog(where: Path) -> str:
    """Write scripts that keep their map in `where`/run; returns the lines of slurm.conf."""
    for name in ("prolog", "epilog"):
        script = assets.path(f"templates/prolog/hpml-{name}.sh")
        (where / name).write_text(_WRAPPER.format(where=where, script=script))
        (where / name).chmod(0o755)
    return f"Prolog={where}/prolog\nEpilog={where}/epilog\n"
