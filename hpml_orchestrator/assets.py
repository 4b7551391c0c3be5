"""Find what this installation has: its Python, templates, training jobs, manual pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpml_orchestrator.errors import NotFoundError

_PACKAGE = Path(__file__).resolve().parent


def path(name: str) -> Path:
    """Return the path of an asset such as ``templates/sbatch`` in a wheel or in a checkout.

    Raises:
        NotFoundError: when the installation lacks it.
    """
    for root in (_PACKAGE / "_assets", _PACKAGE.parent):
        candidate = root / name
        if candidate.exists():
            return candidate
    raise NotFoundError(
        f"this installation of hpml has no {name!r}",
        hint="install hpml-orchestrator again; the wheel holds it under _assets/",
    )


def own_interpreter() -> str:
    """Return the path of the Python that runs hpml, the same however hpml was started.

    A virtual environment has its Python under several names; `sys.executable` is the one that was
    used, and a script should not depend on that.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    usual = os.path.join(sys.prefix, "bin", name)
    return usual if os.access(usual, os.X_OK) else sys.executable
