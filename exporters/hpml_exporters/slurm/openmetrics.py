"""Slurm's own OpenMetrics (25.11 and later), relayed under its own names, `slurm_*`."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hpml_orchestrator.errors import SchedulerUnavailable

__all__ = ["Relay"]

_PAGES = ("jobs", "nodes", "partitions", "scheduler")
_NAMED = "jobs-users-accts"  # has users and accounts in its labels
_TIMEOUT_SECONDS = 30.0
_BYTES_MAX = 64 << 20


class Relay:
    """Fetches the controller's pages of metrics."""

    name = "openmetrics"

    def __init__(self, url: str, *, people: bool = False) -> None:
        """Prepare.

        Args:
            url: of the controller, `http://HOST:6817`.
            people: relay the page by users and accounts, too.
        """
        self._url = url.rstrip("/")
        self._pages = (*_PAGES, _NAMED) if people else _PAGES

    def read(self) -> list[Metric]:
        """Fetch all pages once.

        Raises:
            SchedulerUnavailable: one of them did not come whole.
        """
        return [family for page in self._pages for family in self._page(page)]

    def _page(self, page: str) -> Iterator[Metric]:
        try:
            with urllib.request.urlopen(  # noqa: S310 - the scheme is checked by SlurmOptions
                f"{self._url}/metrics/{page}", timeout=_TIMEOUT_SECONDS
            ) as answer:
                text = answer.read(_BYTES_MAX).decode("utf-8", "replace")
            families = list(text_string_to_metric_families(text))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SchedulerUnavailable(f"{self._url}/metrics/{page}: {error}") from error
        return (family for family in families if re.match("slurm_", family.name))
