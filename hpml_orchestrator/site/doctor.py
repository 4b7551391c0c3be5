"""Look at the installation, the scheduler and the machine, and say what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator import __version__, assets
from hpml_orchestrator.errors import HpmlError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import (
    ConfigurationMissing,
    SubprocessRunner,
    check_configuration,
)
from hpml_orchestrator.scheduler.slurm.ask import slurm_version
from hpml_orchestrator.script.render import own_interpreter
from hpml_orchestrator.site.profile import site_for, topology_faults
from hpml_orchestrator.staging.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.store import Store

__all__ = ["Finding", "examine"]

_TIMEOUT_SECONDS = 15
_OLDEST_SLURM = (22, 5)
_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what.
        result: `ok`, `none` (absent, and hpml does without), or `missing`.
        found: what there is.
        hint: what would do, where something is missing.
    """

    check: str
    result: str
    found: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding for programs."""
        return asdict(self)


def examine(store: Store, *, site: str = "") -> list[Finding]:
    """Return what there is, in a fixed order; runs a few short commands.

    Args:
        store: where records live.
        site: the site profile that was chosen by name, if any.
    """
    return [
        Finding("hpml", "ok", f"{__version__} on Python {platform.python_version()}"),
        _interpreter(),
        _assets(),
        _bash(),
        _git(),
        _records(store),
        _site(site),
        *_slurm(),
        _room("RAM staging (/dev/shm)", "/dev/shm"),  # noqa: S108 - the node's RAM
        _room("local staging (/tmp)", "/tmp"),  # noqa: S108 - the node's local directory
        _gpus(),
        _mpirun(),
        _horovodrun(),
    ]


def _interpreter() -> Finding:
    command = [own_interpreter(), "-I", "-S", "-c", "import json, zipimport"]
    if _output(command) is None:
        return Finding(
            "interpreter for the nodes",
            "missing",
            f"{own_interpreter()} does not start with -I -S",
            "install hpml into a virtual environment made with `python3 -m venv`",
        )
    return Finding("interpreter for the nodes", "ok", own_interpreter())


def _assets() -> Finding:
    try:
        return Finding("templates", "ok", str(assets.path("templates/sbatch")))
    except HpmlError as error:
        return Finding("templates", "missing", str(error), error.hint)


def _bash() -> Finding:
    version = _output(["bash", "-c", "echo $BASH_VERSION"])
    if version is None:
        return Finding("bash", "missing", "no bash on PATH", "install bash 4 or newer")
    return Finding("bash", "ok", version)


def _git() -> Finding:
    version = _output(["git", "--version"])
    if version is None:
        return Finding("git", "none", "not found: runs are recorded without their commit")
    return Finding("git", "ok", version)


def _records(store: Store) -> Finding:
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.root):
            pass
    except OSError as error:
        return Finding(
            "records",
            "missing",
            f"{store.root}: {error.strerror or error}",
            "set HPML_HOME to a directory that you can write and the nodes see",
        )
    return Finding("records", "ok", str(store.root))


def _site(chosen: str) -> Finding:
    check = "site profile"
    try:
        found = site_for(Path.cwd() / "job.yaml", os.environ, chosen=chosen)
    except HpmlError as error:
        return Finding(check, "missing", str(error).replace("\n", "; "), error.hint)
    if found is None:
        return Finding(check, "none", "none here: `hpml init` writes one")
    faults = topology_faults(found)
    if faults:
        told = "; ".join(str(error).replace("\n", "; ") for error in faults)
        return Finding(check, "missing", told, "; ".join(dict.fromkeys(one.hint for one in faults)))
    return Finding(check, "ok", ", ".join(str(path) for path in found.sources))


def _slurm() -> list[Finding]:
    absent = [name for name in _SLURM_COMMANDS if shutil.which(name) is None]
    if len(absent) == len(_SLURM_COMMANDS):
        return [Finding("Slurm", "none", "no commands on PATH: jobs run on this machine")]
    if absent:
        return [
            Finding("Slurm", "missing", f"not on PATH: {', '.join(absent)}", "load Slurm's module")
        ]
    try:
        check_configuration("scontrol", os.environ)
    except ConfigurationMissing as error:
        return [Finding("Slurm", "missing", error.message, error.hint)]
    version = _output(["sbatch", "--version"]) or "of unknown version"
    ping = _output(["scontrol", "ping"])
    if ping is None or " is UP" not in ping:
        return [
            Finding(
                "Slurm",
                "missing",
                f"{version}, and its controller does not answer",
                "`scontrol ping` says more; is SLURM_CONF right?",
            )
        ]
    found = [_supported(version)]
    accounting = _output(["sacct", "-n", "-X", "-S", "now", "-o", "jobid"])
    found.append(
        Finding("accounting", "ok", "sacct answers")
        if accounting is not None
        else Finding(
            "accounting", "none", "sacct does not answer: ends come from squeue and records"
        )
    )
    return found


def _supported(version: str) -> Finding:
    """Return the finding about a cluster that answers: whether hpml is made for its version."""
    try:
        numbers = slurm_version(SubprocessRunner(), fresh=True)
    except SchedulerUnavailable:
        numbers = ()
    if numbers and numbers[:2] < _OLDEST_SLURM:
        hint = "hpml is made for Slurm 22.05 and newer; look at what `hpml render` prints"
        return Finding("Slurm", "missing", f"{version} is too old", hint)
    return Finding("Slurm", "ok", f"{version}, controller is up")


def _room(check: str, path: str) -> Finding:
    try:
        info = os.statvfs(path)
    except OSError as error:
        return Finding(check, "none", f"{path}: {error.strerror}")
    return Finding(check, "ok", f"{human_bytes(info.f_bavail * info.f_frsize)} free in {path}")


def _gpus() -> Finding:
    listed = _output(["nvidia-smi", "-L"])
    if not listed:
        return Finding("GPUs of this machine", "none", "no NVIDIA driver here")
    return Finding("GPUs of this machine", "ok", f"{len(listed.splitlines())}")


def _mpirun() -> Finding:
    told = _output(["mpirun", "--version"])
    if told is None:
        return Finding("mpirun", "none", "not on PATH: only `launcher: mpirun` needs it")
    first = told.partition("\n")[0]
    if "Open MPI" not in first:
        return Finding("mpirun", "none", f"{first[:60]}: `launcher: mpirun` needs Open MPI's")
    return Finding("mpirun", "ok", first)


def _horovodrun() -> Finding:
    path = shutil.which("horovodrun")
    if path is None:
        return Finding("horovodrun", "none", "not on PATH: only `launcher: horovodrun` needs it")
    return Finding("horovodrun", "ok", path)


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
