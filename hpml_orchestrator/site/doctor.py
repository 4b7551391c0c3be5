"""Check the installation, the scheduler and this machine, and report what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator import assets
from hpml_orchestrator.assets import own_interpreter
from hpml_orchestrator.errors import HpmlError, SchedulerUnavailable
from hpml_orchestrator.records.mounts import own_file_system, private_directory
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.records.torch_build import (
    READ_BUILD,
    read_vectors,
    torch_text,
    torch_warnings,
)
from hpml_orchestrator.scheduler.command import (
    ConfigurationMissing,
    SubprocessRunner,
    check_configuration,
)
from hpml_orchestrator.scheduler.slurm.client import is_one_machine, slurm_version
from hpml_orchestrator.site.profile import site_for, topology_faults
from hpml_orchestrator.topology.sysfs import list_gpus
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.schema import SoftwareRecord
    from hpml_orchestrator.records.store import Store

_TIMEOUT_SECONDS = 15
_OLDEST_SLURM = (22, 5)
_CUDA = re.compile(r"Driver Version: *([\d.]+).*CUDA Version: *([\d.]+)")
_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was checked."""

    check: str
    result: str  # `ok`, `none` (absent, and hpml works without), `warning`, or `missing`
    found: str
    hint: str = ""  # what to do, where something is missing or does not fit

    def to_json(self) -> dict[str, object]:
        """Return the finding for programs."""
        return asdict(self)


def examine(store: Store, *, site: str = "") -> list[DoctorFinding]:
    """Return the findings in a fixed order; runs a few short commands.

    Args:
        store: where records live.
        site: the site profile that was chosen by name, if any.
    """
    interpreter = own_interpreter()
    # The nodes start it in just this way, without site-packages; `zipimport` is what reads the
    # archive.
    starts = _output([interpreter, "-I", "-S", "-c", "import json, zipimport"]) is not None
    bash = _output(["bash", "-c", "echo $BASH_VERSION"])
    git = _output(["git", "--version"])
    gpus = list_gpus()
    mpirun = (_output(["mpirun", "--version"]) or "not on PATH").partition("\n")[0]
    return [
        DoctorFinding("hpml", "ok", f"{__version__} on Python {platform.python_version()}"),
        _finding(
            "interpreter for the nodes",
            interpreter if starts else None,
            f"{interpreter} does not start with -I -S",
            "install hpml into a virtual environment made with `python3 -m venv`",
        ),
        _templates(),
        _finding("bash", bash, "not on PATH", "install bash 4 or newer"),
        _finding("git", git, "not on PATH: records have no commit and no snapshots"),
        _records(store),
        _site(site),
        *_slurm(),
        _space("RAM staging (/dev/shm)", "/dev/shm"),  # noqa: S108 - the node's RAM
        _space("local staging (/tmp)", "/tmp"),  # noqa: S108 - the node's local directory
        _finding("GPUs of this machine", gpus and f"{len(gpus.splitlines())}", "no NVIDIA driver"),
        _torch(has_gpus=bool(gpus)),
        _finding(
            "mpirun",
            mpirun if "Open MPI" in mpirun else None,
            f"{mpirun[:60]}: `launcher: mpirun` needs Open MPI's",
        ),
        _finding(
            "horovodrun",
            shutil.which("horovodrun"),
            "not on PATH: `launcher: horovodrun` needs it",
        ),
    ]


def _finding(check: str, found: str | None, absent: str, hint: str = "") -> DoctorFinding:
    if found:
        return DoctorFinding(check, "ok", found)
    return DoctorFinding(check, "missing" if hint else "none", absent, hint)


def _templates() -> DoctorFinding:
    try:
        return DoctorFinding("templates", "ok", str(assets.path("templates/sbatch")))
    except HpmlError as error:
        return DoctorFinding("templates", "missing", str(error), error.hint)


def _records(store: Store) -> DoctorFinding:
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.root):
            pass
    except OSError as error:
        hint = "set HPML_HOME to a directory that you can write to and that the nodes see"
        return DoctorFinding("records", "missing", f"{store.root}: {error.strerror or error}", hint)
    root, hint = str(store.root), ""
    has_nodes = shutil.which("sbatch") is not None and not is_one_machine(os.environ)
    if has_nodes and (kind := private_directory(root) or own_file_system(root)):
        root += f" (local to this machine: {kind})"
        hint = "`hpml init --probe` shows whether the nodes see it; else set HPML_HOME"
    return DoctorFinding("records", "ok", root, hint)


def _site(chosen: str) -> DoctorFinding:
    errors: Sequence[HpmlError]
    try:
        site = site_for(Path.cwd() / "job.yaml", os.environ, chosen=chosen)
        errors = topology_faults(site) if site is not None else ()
    except HpmlError as error:
        site, errors = None, [error]
    if errors:
        found = "; ".join(str(error).replace("\n", "; ") for error in errors)
        hints = "; ".join(dict.fromkeys(error.hint for error in errors))
        return DoctorFinding("site profile", "missing", found, hints)
    sources = ", ".join(str(path) for path in site.sources) if site is not None else ""
    return _finding("site profile", sources, "none here: `hpml init` writes one")


def _slurm() -> list[DoctorFinding]:
    absent = [name for name in _SLURM_COMMANDS if shutil.which(name) is None]
    if len(absent) == len(_SLURM_COMMANDS):
        return [DoctorFinding("Slurm", "none", "no commands on PATH: jobs run on this machine")]
    if absent:
        return [_slurm_fault(f"not on PATH: {', '.join(absent)}", "load Slurm's module")]
    try:
        # Before any command of Slurm's: without a configuration each of them would retry for a
        # minute.
        check_configuration("scontrol", os.environ)
    except ConfigurationMissing as error:
        return [_slurm_fault(error.message, error.hint)]
    version = _output(["sbatch", "--version"]) or "Slurm of an unknown version"
    if " is UP" not in (_output(["scontrol", "ping"]) or ""):
        hint = "`scontrol ping` shows the reason; is SLURM_CONF right?"
        return [_slurm_fault(f"{version}, and its controller does not answer", hint)]
    try:
        is_old = () < slurm_version(SubprocessRunner())[:2] < _OLDEST_SLURM
    except SchedulerUnavailable:
        is_old = False
    if is_old:
        return [_slurm_fault(f"{version} is too old", "hpml needs Slurm 22.05 or newer")]
    accounting = _output(["sacct", "-n", "-X", "-S", "now", "-o", "jobid"])
    return [
        DoctorFinding("Slurm", "ok", f"{version}, controller is up"),
        _finding(
            "accounting",
            None if accounting is None else "sacct answers",
            "sacct does not answer: job ends come from squeue and records",
        ),
    ]


def _slurm_fault(found: str, hint: str) -> DoctorFinding:
    return DoctorFinding("Slurm", "missing", found, hint)


def _torch(*, has_gpus: bool) -> DoctorFinding:
    """Return PyTorch's build of the Python that a job would take from this shell."""
    python = shutil.which("python") or shutil.which("python3") or sys.executable
    build = json.loads(_output([python, "-c", READ_BUILD]) or "null")
    if not build:
        return DoctorFinding("PyTorch", "none", f"{python} has none")
    software: SoftwareRecord = {"torch": build, "vectors": read_vectors(os.environ)}
    software["has_gpus"] = has_gpus
    if has_gpus and (shown := _CUDA.search(_output(["nvidia-smi"]) or "")):
        software["nvidia_driver"], software["cuda"] = shown.groups()
    warnings = torch_warnings(software)
    result = "warning" if warnings else "ok"
    return DoctorFinding("PyTorch", result, torch_text(software), "; ".join(warnings))


def _space(check: str, path: str) -> DoctorFinding:
    try:
        info = os.statvfs(path)
    except OSError as error:
        return DoctorFinding(check, "none", f"{path}: {error.strerror}")
    return DoctorFinding(
        check, "ok", f"{human_bytes(info.f_bavail * info.f_frsize)} free in {path}"
    )


def _output(command: Sequence[str]) -> str | None:
    """Return the output of a command; None if it fails."""
    try:
        done = SubprocessRunner().run(command, env=os.environ, timeout=_TIMEOUT_SECONDS)
    except SchedulerUnavailable:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
