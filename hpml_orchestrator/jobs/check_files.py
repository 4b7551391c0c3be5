"""Look at what a job names on this machine: its script, software, container and data."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from hpml_orchestrator.batch.check_finding import Finding, listed
from hpml_orchestrator.batch.check_stage import Seen, check_staging
from hpml_orchestrator.jobs.measure import is_compressed

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Environment, Job, Stage

__all__ = ["Sizes", "check_files", "check_stages"]

_MAX_ENTRIES = 200_000
_NAMED = 5
_MEBIBYTE = 1024**2
_SCRIPT_BYTES = 1 << 20
Level = Literal["error", "warning"]


@dataclass
class Sizes:
    """What will be staged to each node, in MiB, as far as it could be found out."""

    disk_mib: int = 0
    shm_mib: int = 0


@dataclass
class _Walk:
    """What a walk through a source has seen."""

    ends: float
    clock: Callable[[], float]
    entries: int = 0
    size_bytes: int = 0
    closed: list[str] = field(default_factory=list)
    cut: bool = False


def check_files(job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """Return what of a job's program and software is not there, or cannot be read.

    Args:
        job: a complete job.
        environment: of the submitting process, for PATH.
    """
    return [
        *_program(job, environment),
        *_launcher(job, environment),
        *_software(job.environment, environment),
    ]


def check_stages(
    job: Job, *, seconds: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Finding], Sizes]:
    """Return what of the data cannot be staged, and how much there is to stage.

    Args:
        job: a complete job.
        seconds: after which the walk through the data ends.
        clock: seconds that never go back.
    """
    sizes = Sizes()
    found = check_staging(job, {stage.name: _seen(job, stage) for stage in job.stage})
    walk_ends = clock() + seconds
    for index, stage in enumerate(job.stage):
        walk = _Walk(walk_ends, clock)
        try:
            _look(stage.source, walk)
        except OSError as error:
            found.append(_no_source(index, stage, error))
            continue
        place = f"stage.{index}.source"
        if walk.closed:
            found.append(
                Finding(
                    "error",
                    "stage.unreadable",
                    place,
                    stage.source,
                    f"cannot be read by you: {listed(walk.closed[:_NAMED])}"
                    + (" and others" if len(walk.closed) > _NAMED else ""),
                    hint=f"`ls -l {walk.closed[0]}`; ask its owner for the right to read",
                )
            )
        if walk.cut:
            found.append(
                Finding(
                    "warning",
                    "stage.partly",
                    place,
                    stage.source,
                    f"only the first {walk.entries} entries were looked at",
                )
            )
        _add(sizes, stage, walk)
    return found, sizes


def _seen(job: Job, stage: Stage) -> Seen:
    """Look at an entry's source, and where it is partitioned at the program's text."""
    try:
        is_directory = stat.S_ISDIR(os.stat(stage.source).st_mode)
    except OSError:
        is_directory = None
    if stage.distribution != "partition" or job.script is None:
        return Seen(is_directory)
    try:
        with open(job.script, "rb") as stream:
            text = stream.read(_SCRIPT_BYTES)
    except OSError:
        return Seen(is_directory)
    return Seen(is_directory, any(word in text for word in (b"HPML_PART", b"PartSampler")))


def _add(sizes: Sizes, stage: Stage, walk: _Walk) -> None:
    if stage.size is not None:
        mebibytes = int(stage.size.removesuffix("M"))
    elif walk.cut or is_compressed(stage):
        return
    else:
        mebibytes = -(-walk.size_bytes // _MEBIBYTE)
    if stage.target == "local":
        sizes.disk_mib += mebibytes
    elif stage.target == "shm":
        sizes.shm_mib += mebibytes


def _no_source(index: int, stage: Stage, error: OSError) -> Finding:
    # With a size the source is not looked at before the job runs: it may be on the nodes alone.
    level: Level = "error" if stage.size is None else "warning"
    return _missing(
        level,
        "stage.missing",
        f"stage.{index}.source",
        stage.source,
        f"cannot be staged: {error.strerror or error}",
        "" if stage.size else "if only the nodes have it, give its `size`",
    )


def _look(path: str, walk: _Walk) -> None:
    """Walk through a source; a directory that is closed is named, not entered."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        walk.entries += 1
        walk.size_bytes += info.st_size
        if not os.access(path, os.R_OK):
            walk.closed.append(path)
        return
    waiting = [path]
    while waiting:
        here = waiting.pop()
        if not os.access(here, os.R_OK | os.X_OK):
            walk.closed.append(here)
            continue
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if walk.entries >= _MAX_ENTRIES or walk.clock() > walk.ends:
                        walk.cut = True
                        return
                    _count(entry, walk, waiting)
        except OSError as error:
            walk.closed.append(error.filename or here)


def _count(entry: os.DirEntry[str], walk: _Walk, waiting: list[str]) -> None:
    walk.entries += 1
    if entry.is_dir(follow_symlinks=False):
        waiting.append(entry.path)
    elif entry.is_file(follow_symlinks=False):
        walk.size_bytes += entry.stat(follow_symlinks=False).st_size
        if not os.access(entry.path, os.R_OK):
            walk.closed.append(entry.path)


def _program(job: Job, environment: Mapping[str, str]) -> Iterator[Finding]:
    inside = job.environment.container is not None
    if not os.path.isdir(job.workdir):
        yield _missing(
            "error",
            "workdir.missing",
            "workdir",
            job.workdir,
            "is no directory here" if os.path.exists(job.workdir) else "is not there",
            "",
        )
    if job.script is not None:
        yield from _script(job.script, "warning" if inside else "error")
        yield from _on_path("environment.python", job.environment.python, job, environment)
    elif job.module is not None:
        yield from _on_path("environment.python", job.environment.python, job, environment)
    elif job.command is not None:
        yield from _on_path("command.0", job.command[0], job, environment)


_LAUNCHERS = {
    "mpirun": "load Open MPI's module in `environment.modules`",
    "horovodrun": "name the `environment.venv` or `conda` that Horovod is installed in",
}


def _launcher(job: Job, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Return a warning where the program that starts the ranks is not found."""
    hint = _LAUNCHERS.get(job.launcher)
    if hint is None:
        return
    if job.launcher == "mpirun":  # is not the container's
        software = job.environment.model_copy(update={"container": None})
        job = job.model_copy(update={"environment": software})
    for found in _on_path("launcher", job.launcher, job, environment):
        yield replace(found, hint=hint)


def _script(path: str, level: Level) -> Iterator[Finding]:
    if not os.path.exists(path):
        folder = os.path.dirname(path)
        hint = "" if os.path.isdir(folder) else f"there is no directory {folder} either"
        yield _missing(level, "script.missing", "script", path, "is not there", hint)
    elif not os.path.isfile(path):
        yield _missing(level, "script.kind", "script", path, "is no file", "")
    elif not os.access(path, os.R_OK):
        yield _missing(level, "script.unreadable", "script", path, "cannot be read by you", "")


def _on_path(
    place: str, program: str, job: Job, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Return a warning where a program is not found; modules and conda bring their own."""
    software = job.environment
    if software.modules or software.conda or software.container or "{" in program:
        return
    if "/" in program:
        path = os.path.join(job.workdir, program)
        if not os.path.exists(path):
            yield _missing("warning", "program.missing", place, program, "is not there", "")
        elif not os.access(path, os.X_OK):
            yield _missing(
                "warning",
                "program.mode",
                place,
                program,
                "is not executable",
                f"`chmod +x {program}`",
            )
        return
    search = software.variables.get("PATH", environment.get("PATH", os.defpath))
    if software.venv:
        search = f"{software.venv}/bin:{search}"
    if shutil.which(program, path=search) is None:
        yield _missing(
            "warning",
            "program.missing",
            place,
            program,
            "is not on PATH here",
            "load a module, name a venv, or give the program's path",
        )


def _software(software: Environment, environment: Mapping[str, str]) -> Iterator[Finding]:
    if software.venv is not None:
        script = os.path.join(software.venv, "bin", "activate")
        if not os.path.exists(script):
            there = os.path.isdir(software.venv)
            yield _missing(
                "error",
                "venv.missing",
                "environment.venv",
                software.venv,
                "has no bin/activate" if there else "is not there",
                f"`python3 -m venv {software.venv}` makes one",
            )
    conda = software.conda
    if conda is not None and "/" in conda and not os.path.isdir(os.path.join(conda, "conda-meta")):
        there = os.path.isdir(conda)
        yield _missing(
            "error",
            "conda.missing",
            "environment.conda",
            conda,
            "is no conda environment (it has no conda-meta)" if there else "is not there",
            "`conda env list` shows those that there are",
        )
    container = software.container
    if container is None or container.engine != "apptainer":
        return
    if "://" not in container.image and not os.path.exists(container.image):
        yield _missing(
            "error",
            "image.missing",
            "environment.container.image",
            container.image,
            "is not there",
            "`apptainer pull` makes one of an image in a registry",
        )
    if not software.modules and shutil.which("apptainer", path=environment.get("PATH")) is None:
        yield _missing(
            "warning",
            "engine.missing",
            "environment.container.engine",
            container.engine,
            "is not on PATH here",
            "if a module brings it, name it in `environment.modules`",
        )
    for index, mount in enumerate(container.mounts):
        path = mount.split(":")[0]
        if not os.path.exists(path):
            place = f"environment.container.mounts.{index}"
            yield _missing("warning", "mount.missing", place, path, "is not there", "")


def _missing(level: Level, code: str, place: str, value: str, message: str, hint: str) -> Finding:
    return Finding(level, code, place, value, f"{value} {message}", hint=hint)
