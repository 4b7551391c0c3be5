"""The software of a run, as its last attempt recorded it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.records.run import SOFTWARE
from hpml_orchestrator.records.texts import first_few

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import SoftwareRecord
    from hpml_orchestrator.runs.state import State

_NAMED = ("torch", "tensorflow", "jax", "lightning", "transformers", "horovod", "xgboost")
"""Packages whose version a reader looks for first."""
_SHOWN_MODULES = 6


def read_software(state: State) -> SoftwareRecord | None:
    """Return the record of the last attempt's software with its `file`; None without one."""
    try:
        attempt = None if state.tasks else state.run.newest()
        record = attempt.software if attempt else None
    except HpmlError:  # another user's
        return None
    return {**record, "file": str(attempt.directory / SOFTWARE)} if attempt and record else None


def script_change(state: State, software: SoftwareRecord) -> str:
    """Return a sentence if the script that ran is not the submitted one; else an empty text."""
    try:
        script = state.submission.record()["provenance"]["script"]
        if software["files"][script["path"]] == script["sha256"]:
            return ""
        copy = state.submission.directory / script["copy"]
    except (HpmlError, LookupError, TypeError):  # no copy, or a damaged record
        return ""
    return f"{script['path']} changed between submission and start; as submitted: {copy}"


def software_line(software: SoftwareRecord) -> str:
    """Return Python, packages, modules and driver in one line."""
    parts = [str(software.get("python") or "Python unknown")]
    packages = software.get("packages")
    if isinstance(packages, dict):
        named = [f"{name} {packages[name]}" for name in _NAMED if name in packages]
        count = counted(len(packages), "package")
        parts.append(f"{count} ({', '.join(named)})" if named else count)
    if modules := software.get("modules"):
        parts.append(f"modules {first_few([*map(str, modules)], _SHOWN_MODULES)}")
    if driver := software.get("nvidia_driver"):
        cuda = f" (CUDA {software['cuda']})" if software.get("cuda") else ""
        parts.append(f"driver {driver}{cuda}")
    return ", ".join(parts)
