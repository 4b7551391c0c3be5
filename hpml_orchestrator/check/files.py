"""Look at what a job names on this machine: its script, software, container and data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hpml_orchestrator.check.finding import Finding

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Environment, Job

__all__ = ["Level", "check_files"]

Level = Literal["error", "warning"]


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
