"""Load and render the job that a command names, for the backend that its options name."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import chosen_site, refuse_with
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.spec import find_profiles, load_job, parse_setting

if TYPE_CHECKING:
    from hpml_orchestrator.runs.prepare import Rendered

__all__ = ["backend_name", "rendered_of"]


def rendered_of(
    context: typer.Context,
    job_file: str,
    settings: list[str],
    backend: str,
    after: list[str] | None = None,
) -> Rendered:
    """Load a job file with the site profile in effect, and render its script."""
    values = [parse_setting(setting) for setting in settings]
    values += [("after", after)] if after else []
    chosen = chosen_site(context)
    site = site_for(job_file, os.environ, chosen=chosen, backend=backend)
    if backend == "local" and not chosen:
        _say_unused(job_file)
    return render_job(load_job(job_file, values, site), site=site, here=backend == "local")


def backend_name(backend: str, *, local: bool) -> str:
    """Return `slurm` or `local` for the options `--backend` and `--local`."""
    if local:
        refuse_with("--local", {"--backend": backend not in {"auto", "local"}})
    return choose("local" if local else backend)


def _say_unused(job_file: str) -> None:
    """Say which site profiles a local job does not use; they describe the cluster."""
    with contextlib.suppress(InputError):  # one that cannot be read is not used either
        profiles = find_profiles(job_file, os.environ)
        if profiles:
            names = ", ".join(map(str, profiles))
            note = f"note: a local job uses no site profile or templates of yours ({names})"
            typer.echo(f"hpml: {note}; --site FILE applies one", err=True)
