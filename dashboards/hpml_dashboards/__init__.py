"""Grafana dashboards of hpml's metrics: built from Python, shown without Grafana, or pushed to one.

`json/` holds what `hpml dashboards build` writes; it is in the repository, so showing
and pushing need no SDK.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["JSON"]

JSON = Path(__file__).parent / "json"
"""Directory of the built dashboards, one file each, named by its uid: `hpml-job.json`."""
