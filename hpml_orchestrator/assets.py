"""Find the files that are not Python modules: templates, training jobs, manual pages."""

from __future__ import annotations

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
