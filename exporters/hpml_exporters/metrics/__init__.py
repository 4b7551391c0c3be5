"""The catalogue: every metric that can be shown, by subject."""

from __future__ import annotations

from importlib import import_module

from hpml_exporters.metric import MetricSpec

__all__ = ["ALL", "SUBJECTS"]

SUBJECTS = (
    "gpu", "job", "node", "train", "exporter",
)  # fmt: skip
"""Modules of this package, in the order of the documentation; a test says that none is missing."""

ALL: tuple[MetricSpec, ...] = tuple(
    spec for subject in SUBJECTS for spec in import_module(f"{__name__}.{subject}").SPECS
)
"""Every metric's description."""
