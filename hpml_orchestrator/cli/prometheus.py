"""The Prometheus that commands ask for figures of jobs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.common import chosen_site
from hpml_orchestrator.jobfile.text import read_credentials
from hpml_orchestrator.runs.prometheus import Prometheus
from hpml_orchestrator.site.profile import prometheus_of_site

if TYPE_CHECKING:
    import typer


def chosen_prometheus(context: typer.Context, url: str, credentials: str) -> Prometheus | None:
    """Return the Prometheus of the command line, else that of the site; None if there is none.

    Args:
        context: of the command, for the site profile.
        url: its address; `none` for no Prometheus, empty for that of the site.
        credentials: file with `user:password` or a token; read only if there is a Prometheus.

    Raises:
        InputError: the address, the file or the site profile is wrong.
    """
    url = url or prometheus_of_site(os.environ, chosen=chosen_site(context)) or "none"
    return None if url == "none" else Prometheus(url, read_credentials(credentials))
