"""Jobs, sites and scripts that the tests of this folder share."""

from __future__ import annotations

import shlex
from typing import Any

from hpml_orchestrator.jobfile.rules import job_adapter
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.script.render import Capabilities

CANARY = "canary-of-hpml"
HERE = Capabilities(interpreter="/opt/hpml/bin/python3.11")
LAUNCHERS = ("torchrun", "srun", "mpirun", "horovodrun")
APPTAINER = {"engine": "apptainer", "image": "/i m.sif", "mounts": ["/data:/data:ro"]}
ENROOT = {"engine": "enroot", "image": "/i.sqsh", "mounts": ["/data:/inside:ro"]}
PYXIS = {"engine": "pyxis", "image": "nvcr.io#nvidia/pytorch:24.05-py3", "mounts": ["/d"]}


def job(**fields: Any) -> Job:
    """A job that is complete but for these fields."""
    program = {} if {"script", "module", "command"} & set(fields) else {"script": "/w/train.py"}
    fields = {"name": "probe", "workdir": "/w d", **program, **fields}
    return job_adapter().validate_python(fields)


def words(code: str) -> list[str]:
    """The words of a command that takes several lines; variables stay as they are written."""
    return shlex.split(code.replace("\\\n ", ""))


def launch(script: str) -> list[str]:
    """The words of the script's last command, which starts the ranks."""
    return words(script.rpartition("\nhpml_run ")[2])


def program(script: str) -> list[str]:
    """The words of what each rank becomes."""
    command = launch(script)
    return command[command.index("${hpml_bind[@]}") + 1 :]
