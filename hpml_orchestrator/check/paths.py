"""Check the files, data and software that a job names on this machine, and the records."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.check.request import CheckFinding, Level, error, warning
from hpml_orchestrator.errors import SchedulerUnavailable, did_you_mean
from hpml_orchestrator.jobfile.text import PER_RANK, is_image_file
from hpml_orchestrator.records.mounts import own_file_system, private_directory
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.command import Runner

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Environment, Job

_ON_EACH_NODE = ("//", "/usr/", "/opt/")
_HELP_SECONDS = 10
_OPTION_AND_VALUE = re.compile(r"(--?[A-Za-z][\w.-]*)\s+(\S.*)", re.DOTALL)
_HOME = re.compile(r"(?:^|(?<==))~(?=/|$)")
_VARIABLE = re.compile(r"\$(?:([A-Z_][A-Z0-9_]*)\b|\{([A-Z_][A-Z0-9_]*)\})")  # ${name}: OmegaConf
_LAUNCHERS = {
    "mpirun": "load Open MPI's module in `environment.modules`",
    "horovodrun": "name the `environment.venv` or `conda` that Horovod is installed in",
}


def check_program(job: Job, environment: Mapping[str, str]) -> list[CheckFinding]:
    """Return findings about a job's program and software that are missing or unreadable."""
    return [
        *_program(job, environment),
        *_words(job),
        *_software(job.launcher, job.environment, environment),
    ]


def _words(job: Job) -> Iterator[CheckFinding]:
    """Yield arguments and variables that a shell would expand: no shell reads them."""
    words = {
        f"environment.variables.{name}": one for name, one in job.environment.variables.items()
    }
    for name, entries in (("args", job.args), ("command", job.command or ())):
        for index, (before, word) in enumerate(zip(["", *entries], entries, strict=False)):
            if name == "args" or not re.fullmatch("-[a-z]*c", before):  # `bash -c` is a shell
                words[f"{name}.{index}"] = word
    for place, word in words.items():
        in_command_line = not place.startswith("environment")
        if in_command_line and (match := _OPTION_AND_VALUE.fullmatch(word)):
            message = f'the program receives "{word}" as one argument, with the blank'
            hint = f"write {match[1]}={match[2]}, or " if word.startswith("--") else "write "
            hint += f"two entries: {match[1]} and {match[2]}"
            yield warning("args.one_word", place, word, message, None, hint)
        names = {name for found in _VARIABLE.findall(word) for name in found}
        written = _VARIABLE.sub(r"{env.\1\2}", _HOME.sub("{env.HOME}", word))
        hint = f"write {written}"
        if own := sorted(names & PER_RANK):
            hint = f"read {first_few(own)} in the program: each rank has its own"
        elif written == word:
            is_pattern = in_command_line and re.search(r"[*?[]", word)
            if not (is_pattern and any(glob.iglob(word, root_dir=job.workdir))):
                continue
            hint = "list the files, give their directory, or use `command: [bash, -c, LINE]`"
        message = f"the program receives {word} as it is written: no shell expands it"
        yield warning("args.unexpanded", place, word, message, None, hint)


def _program(job: Job, environment: Mapping[str, str]) -> Iterator[CheckFinding]:
    if not os.path.isdir(job.workdir):
        reason = "is not a directory" if os.path.exists(job.workdir) else "does not exist"
        yield _fault("error", "workdir.missing", "workdir", job.workdir, reason)
    if job.launcher in _LAUNCHERS:
        software = job.environment
        if job.launcher == "mpirun":  # mpirun is never the container's
            software = replace(software, container=None)
        hint = _LAUNCHERS[job.launcher]
        yield from _on_path("launcher", job.launcher, job.workdir, software, environment, hint)
    place, program = "environment.python", job.environment.python
    if job.command is not None:
        place, program = "command.0", job.command[0]
    hint = "load a module, name a venv, or give the program's path"
    if job.command is not None and re.search(r"\s", program):
        hint = "write each word as a separate entry: command: [python, train.py]"
    yield from _on_path(place, program, job.workdir, job.environment, environment, hint)
    if job.script is not None:
        level: Level = "warning" if job.environment.container else "error"
        folder = os.path.dirname(job.script)
        if not os.path.exists(job.script):
            hint = "" if os.path.isdir(folder) else f"nor does the directory {folder}"
            yield _fault(level, "script.missing", "script", job.script, "does not exist", hint)
        elif not os.path.isfile(job.script):
            yield _fault(level, "script.kind", "script", job.script, "is not a file")
        elif not os.access(job.script, os.R_OK):
            yield _fault(level, "script.unreadable", "script", job.script, "is not readable by you")


def _on_path(
    place: str,
    program: str,
    workdir: str,
    software: Environment,
    environment: Mapping[str, str],
    hint: str,
) -> Iterator[CheckFinding]:
    """Yield a warning if a program is not found; modules and conda may provide it."""
    # Modules, conda and containers provide programs that this machine cannot see; guessing would
    # only produce false warnings.
    if software.modules or software.conda or software.container or "{" in program:
        return
    search = software.variables.get("PATH", environment.get("PATH", os.defpath))
    if software.venv:
        search = f"{software.venv}/bin:{search}"
    path = os.path.join(workdir, program)
    if "/" not in program:
        if shutil.which(program, path=search) is None:
            message = f"{program} is not on PATH here"
            yield warning("program.missing", place, program, message, None, hint)
    elif not os.path.exists(path):
        yield _fault("warning", "program.missing", place, program, "does not exist", at=path)
    elif not os.access(path, os.X_OK):
        hint = f"`chmod +x {program}`"
        yield _fault("warning", "program.mode", place, program, "is not executable", hint, at=path)


def _engine(software: Environment, environment: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Yield a warning if the container engine is not installed here."""
    place, path = "environment.container.engine", environment.get("PATH")
    engine = software.container.engine if software.container else ""
    is_command = engine in ("apptainer", "enroot")
    if is_command and not software.modules and not shutil.which(engine, path=path):
        hint = "if a module brings it, name it in `environment.modules`"
        yield warning("engine.missing", place, engine, f"{engine} is not on PATH here", None, hint)
    if engine == "pyxis" and (srun := shutil.which("srun", path=path)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            options = subprocess.run(
                [srun, "--help"], capture_output=True, timeout=_HELP_SECONDS, check=False
            ).stdout
            if b"--container-image" not in options:
                message = "srun has no --container-image here: the plugin pyxis is not installed"
                hint = "use `engine: enroot` or `engine: apptainer`, or ask the administrators"
                yield warning("engine.missing", place, engine, message, None, hint)


def _without_torch(
    launcher: str, software: Environment, environment: Mapping[str, str]
) -> Iterator[CheckFinding]:
    named = software.venv or (software.conda if "/" in (software.conda or "") else None)
    elsewhere = software.container or ((software.modules or software.conda) and not named)
    added = software.setup or "PYTHONPATH" in {**environment, **software.variables}
    if launcher != "torchrun" or elsewhere or added or "/" in software.python:
        return
    if named:
        prefix = Path(named)
    elif found := shutil.which(software.python, path=environment.get("PATH")):
        prefix = Path(found).parents[1]
    else:
        return
    settings = prefix / "pyvenv.cfg"
    is_conda = (prefix / "conda-meta").is_dir()
    with contextlib.suppress(OSError):
        # A venv with system packages may get PyTorch from outside, so its own directory proves
        # nothing.
        is_closed = is_conda or "packages = true" not in settings.read_text("utf-8")
        if is_closed and not any(prefix.glob("lib*/python3*/site-packages/torch")):
            place = "environment.venv" if software.venv or not named else "environment.conda"
            message = "has no PyTorch, which `launcher: torchrun` needs"
            hint = f"`{prefix}/bin/python -m pip install torch`, or another launcher"
            yield warning("torch.missing", place, str(prefix), message, None, hint)


def _software(
    launcher: str, software: Environment, environment: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Yield environments, images and mounts that do not exist or are incomplete."""
    paths: list[tuple[Level, str, str, str, str, str]] = []
    if software.venv:
        project = os.path.dirname(os.path.abspath(software.venv))
        hint = f"`python3 -m venv {software.venv}` creates one"
        if os.path.exists(os.path.join(project, "uv.lock")):
            hint = f"`uv sync --project {project}` creates it"
        paths.append(("error", "venv", "venv", software.venv, "bin/activate", hint))
    if software.conda and "/" in software.conda:
        hint = "`conda env list` lists your environments"
        paths.append(("error", "conda", "conda", software.conda, "conda-meta", hint))
    container = software.container
    if container is not None:
        if is_image_file(container.engine, container.image):
            is_sif = container.engine == "apptainer"
            hint = f"`{'apptainer pull' if is_sif else 'enroot import'}` creates one"
            paths.append(("error", "image", "container.image", container.image, "", hint))
        for index, mount in enumerate(container.mounts):
            place = f"container.mounts.{index}"
            paths.append(("warning", "mount", place, mount.split(":")[0], "", ""))
        yield from _engine(software, environment)
    yield from _without_torch(launcher, software, environment)
    for level, code, name, path, part, hint in paths:
        inner = os.path.join(path, part) if part else path
        if not os.path.exists(inner):
            reason = f"has no {part}" if os.path.isdir(path) else "does not exist"
            place = f"environment.{name}"
            yield _fault(level, f"{code}.missing", place, path, reason, hint, at=inner)


def _fault(
    level: Level, code: str, place: str, path: str, reason: str, hint: str = "", *, at: str = ""
) -> CheckFinding:
    try:
        # os.path.exists is also False for a path that may not be accessed, which is another problem
        # with another solution.
        os.stat(at or path)
    except PermissionError as fault:
        parents = [*reversed(Path(at or path).parents)]
        closed = next((top for top in parents if not os.access(top, os.X_OK)), parents[-1])
        reason = f"cannot be checked: {fault.strerror}"
        hint = f"`ls -ld {closed}`; ask its owner for permission to enter it"
    except OSError:
        pass
    return CheckFinding(level, code, place, path, f"{path} {reason}", hint=hint)


# Load each module as soon as it is found: in a hierarchy the next one may become visible only
# then, and one may provide conda. Older systems lack `is-avail`, and their `avail` prints to
# stderr.
_SOFTWARE_SCRIPT = """\
conda=$1; shift
if (($#)) && ! type module >/dev/null 2>&1; then
  for file in "${MODULESHOME:+$MODULESHOME/init/bash}" "${LMOD_PKG:+$LMOD_PKG/init/bash}" \\
      /etc/profile.d/z00_lmod.sh /etc/profile.d/lmod.sh /etc/profile.d/modules.sh \\
      /usr/share/modules/init/bash; do
    if [ -n "$file" ] && [ -r "$file" ]; then . "$file"; break; fi
  done
fi
has() {
  module is-avail "$1" >/dev/null 2>&1 || module -t avail "$1" 2>&1 | grep -qF "$1"
}
if (($#)) && ! type module >/dev/null 2>&1; then
  echo 'no module'; set --
fi
for name; do
  if has "$name"; then
    module load "$name" >/dev/null 2>&1
  else
    printf 'missing %s\\n' "$name"
  fi
done
if [ -n "$conda" ]; then
  echo conda
  "${CONDA_EXE:-conda}" env list --json 2>/dev/null
fi
exit 0
"""


def check_software(
    software: Environment,
    run: Runner,
    environment: Mapping[str, str],
    *,
    timeout: float,
    on_nodes: bool = True,
) -> tuple[list[CheckFinding], list[str]]:
    """Return modules and conda environments that this machine lacks, and those not checked.

    Args:
        software: what the job loads.
        run: starts bash.
        environment: environment of the submitting process, which may define the function `module`.
        timeout: seconds.
        on_nodes: whether the job runs on other machines, which may have other software.
    """
    modules, name = software.modules, software.conda or ""
    conda = "" if "/" in name else name  # `check_program` covers paths
    if not (modules or conda):
        return [], []
    argv = ["bash", "-c", _SOFTWARE_SCRIPT, "bash", conda, *modules]
    try:
        answer = run.run(argv, env=environment, timeout=timeout).stdout
    except SchedulerUnavailable:
        # A hanging module system must not stop a submission: what could not be looked up is listed
        # as unchecked.
        answer = "no answer\nconda\n"
    module_lines, _, conda_text = answer.partition("conda\n")
    lines = module_lines.splitlines()
    level: Level = "warning" if on_nodes else "error"
    where = "on this machine" + "; the nodes may have it" * on_nodes
    answered = "no answer" not in lines
    findings, unseen = [], []
    for index, module in enumerate(modules):
        if f"missing {module}" in lines:
            message, hint = f"there is no module {module} {where}", "`module avail` lists them"
            place = f"environment.modules.{index}"
            findings.append(
                CheckFinding(level, "module.unknown", place, module, message, None, hint)
            )
    if "no module" in lines and not on_nodes:
        message, hint = "there is no `module` command on this machine", "leave the modules out"
        place, value = "environment.modules", ", ".join(modules)
        findings.append(CheckFinding(level, "module.none", place, value, message, None, hint))
    elif modules and ("no module" in lines or not answered):
        unseen.append(f"modules {first_few(modules)} (no `module` command here)")
    known = _conda_environments(conda_text) if conda else [conda]
    if known is None and (on_nodes or not answered):
        unseen.append(f"conda environment {conda} (no conda here)")
    elif known is None or conda not in known:
        message, hint = "there is no conda on this machine", "give its path, or use a venv"
        if known is not None:
            message = f"there is no conda environment {conda} {where}; there are {first_few(known)}"
            hint = did_you_mean(conda, known)
        place = "environment.conda"
        findings.append(CheckFinding(level, "conda.unknown", place, conda, message, known, hint))
    return findings, unseen


def _conda_environments(text: str) -> list[str] | None:
    try:
        return list(dict.fromkeys(["base", *map(os.path.basename, json.loads(text)["envs"])]))
    except (ValueError, LookupError, TypeError):
        return None


def check_records(root: Path) -> Iterator[CheckFinding]:
    """Yield an error if records cannot be written."""
    place = unwritable(root)
    if place:
        message = f"{place} is not writable by you"
        hint = "set HPML_HOME to a directory that you can write and the nodes see"
        yield error("records.unwritable", "--records", str(root), message, None, hint)


def check_shared(job: Job, records: Path) -> Iterator[CheckFinding]:
    """Yield paths that exist only on this machine, for a job that runs on other machines."""
    software, own = job.environment, job.checkpoint
    is_copied = job.snapshot or software.container is not None  # in its records or image
    places = {
        "--records": str(records),
        "workdir": "" if is_copied else job.workdir,
        "script": "" if is_copied else job.script or "",
        "environment.venv": software.venv or "",
        "environment.conda": software.conda or "",
        "environment.container.image": software.container.image if software.container else "",
        **{f"stage.{index}.source": entry.source for index, entry in enumerate(job.stage)},
        **{f"collect.{index}.target": entry.target for index, entry in enumerate(job.collect)},
        # Below /tmp it is an error, which `check_directory` reports.
        "checkpoint.directory": "" if private_directory(own.directory) else own.directory,
    }
    alone: dict[str, list[str]] = {}
    for place, path in places.items():
        if path.startswith("/") and not f"{path}/".startswith(_ON_EACH_NODE):
            alone.setdefault(private_directory(path) or own_file_system(path), []).append(place)
    for reason in filter(None, alone):
        first, *others = alone[reason]
        path, also = places[first], f", as {first_few(others)}," if others else ""
        message = f"{path}{also} is local to this machine ({reason}): the nodes cannot see it"
        code, hint = "paths.local", "give a directory on the shared file system"
        if first == "--records":
            code, hint = "records.local", "set HPML_HOME to a directory that the nodes see"
        hint += "; `hpml init --probe` shows whether they see records"
        yield warning(code, first, path, message, None, hint)


def check_collect(job: Job) -> Iterator[CheckFinding]:
    """Yield targets of results that cannot be written, as seen from this machine."""
    for index, entry in enumerate(job.collect):
        place = "" if entry.target.startswith("{") else unwritable(Path(entry.target))
        if place:
            what = "is not writable by you" if os.path.isdir(place) else "is not a directory"
            where = f"collect.{index}.target"
            yield error("collect.target", where, entry.target, f"{place} {what}")


def unwritable(path: Path) -> str:
    """Return the directory that must become writable for a path; empty if it already is."""
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return "" if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else str(place)
