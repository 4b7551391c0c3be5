"""The software of a run, as its last attempt recorded it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError, counted
from hpml_orchestrator.records.run import SOFTWARE
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.torch_build import torch_text, torch_warnings

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import SoftwareRecord
    from hpml_orchestrator.runs.state import State

_NAMED = ("torch", "tensorflow", "jax", "lightning", "transformers", "horovod", "xgboost")
"""Packages whose version a reader looks for first."""
_SHOWN_MODULES = 6
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*==v?[0-9][A-Za-z0-9.!_-]*(\+[\w.]+)?", re.ASCII
)
"""Anything else in a requirements file could be an option of pip."""


def read_software(state: State) -> SoftwareRecord | None:
    """Return the record of the last attempt's software with its `file`; None without one."""
    try:
        attempt = None if state.tasks else state.run.newest()
        record = attempt.software if attempt else None
    except HpmlError:  # another user's
        return None
    return {**record, "file": str(attempt.directory / SOFTWARE)} if attempt and record else None


def requirements(state: State) -> str:
    """Return the text of a requirements file with the packages of a run's last attempt.

    Raises:
        InputError: it is a job array, whose tasks each have their own.
        NotFoundError: nothing is recorded.
    """
    label = state.submission.label
    if state.tasks:
        message = "each task of a job array has its own packages"
        hint = f"name one: hpml show {state.tasks[0].submission.label} --requirements"
        raise InputError(message, field="--requirements", hint=hint)
    software = read_software(state) or {}
    if not isinstance(software.get("packages"), dict):
        hint = "they are recorded some seconds after the ranks start, and not in a container"
        raise NotFoundError(f"run {label} has no record of its Python packages", hint=hint)
    return requirements_text(software, label)


def requirements_text(software: SoftwareRecord, label: str) -> str:
    """Return the text of a requirements file; `label` names the run in its comments."""
    python = f"{software.get('python_version') or '(unknown version)'}, {software.get('python')}"
    modules = ", ".join(map(str, software.get("modules") or [])) or "none"
    lines = [
        f"# Packages of run {label}: `pip install -r` in a new environment installs them again.",
        f"# Python {python}; loaded modules: {modules}",
        "# Python packages only: not what conda, a module or the system installs besides. Of a",
        "# package from a directory or repository the version is here, and not the place.",
    ]
    for name, version in (software.get("packages") or {}).items():
        line = f"{name}=={version}"
        match = _REQUIREMENT.fullmatch(line)
        if match and match[1]:
            lines.append(f"# {match[1]} is in another package index: give pip its --index-url")
        if name != "pip":
            lines.append(line if match else f"# left out, no plain version: {line}")
    return "\n".join(map(_printable, lines))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


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


def torch_lines(software: SoftwareRecord) -> list[str]:
    """Return PyTorch's build in one line, and what of it does not fit the node."""
    try:
        text, warnings = torch_text(software), torch_warnings(software)
    except (LookupError, TypeError, ValueError, AttributeError):  # damaged
        return []
    return [*filter(None, [text]), *(f"warning: {one}" for one in warnings)]
