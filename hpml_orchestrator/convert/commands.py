"""What single commands of a batch script mean: modules, environments, directories."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.staging import is_local
from hpml_orchestrator.convert.values import has_hole

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.body import Walk
    from hpml_orchestrator.convert.syntax import Command

__all__ = ["EFFECTLESS", "HANDLERS", "PREPARES"]

EFFECTLESS = frozenset(
    "echo printf set shopt nvidia-smi rocm-smi date hostname wait exit true false : pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep deactivate [ test sync uptime "
    "lsb_release return shift break continue jobs cat head tail squeue sinfo scontrol sacct "
    "nproc "
    "lsmem lspci ibstat ifconfig ip numastat unset let hash times top ps seq wc "
    "sstat seff tput clear module-info alias".split()
)
"""Commands that print, test or wait: a job file has no place for them and needs none."""

PREPARES = {
    "trap": (
        "the job's script is hpml's: ranks get SIGTERM when it ends early",
        "handle the signal in the program",
    ),
    "umask": ("files are made with the mask of a login", "set it in the program"),
    "pip": ("installs software", "do it once, before the job: every job would do it again"),
    "pip3": ("installs software", "do it once, before the job: every job would do it again"),
    "uv": ("installs software", "do it once, before the job, or write `command: [uv, run, …]`"),
    "git": (
        "hpml records the state of the code when a job is submitted",
        "do it before you submit",
    ),
    "wandb": ("prepares the training, and is no part of it", "do it once by hand"),
    "huggingface-cli": ("prepares the training, and is no part of it", "do it once by hand"),
    "wget": ("hpml downloads nothing", "do it once by hand, and stage the file"),
    "curl": ("hpml downloads nothing", "do it once by hand, and stage the file"),
    "sbatch": ("one job file is one job", "submit the next when this one is over: `hpml wait RUN`"),
    "scancel": ("one job file is one job", "`hpml cancel RUN` cancels"),
    "ulimit": ("hpml sets no limits", "limits of your shell travel: set them before `hpml submit`"),
    "rm": ("hpml removes what it staged itself", ""),
    "mv": ("hpml runs one program", "do it by hand, or in the program"),
    "cp": ("hpml runs one program", "do it by hand, or bring the file with an entry of stage"),
    "rsync": ("hpml runs one program", "do it by hand, or bring the data with an entry of stage"),
    "ln": ("hpml runs one program", "do it once by hand"),
    "tar": ("hpml runs one program", "do it by hand, or bring the archive with an entry of stage"),
    "unzip": ("hpml runs one program", "do it once by hand"),
    "touch": ("hpml runs one program", "do it by hand, or in the program"),
    "chmod": ("hpml runs one program", "do it once by hand"),
    "sed": ("hpml runs one program", "do it by hand, or in the program"),
    "awk": ("hpml runs one program", "do it by hand, or in the program"),
    "grep": ("hpml runs one program", "do it by hand, or in the program"),
    "find": ("hpml runs one program", "do it by hand, or in the program"),
    "make": ("hpml runs one program", "do it once by hand"),
    "nvidia-cuda-mps-control": ("hpml starts no MPS daemon", ""),
    "spack": (
        "hpml loads modules only",
        "write the modules that spack made into environment.modules",
    ),
    "ssh": ("hpml starts ranks through Slurm only", ""),
    "scp": ("hpml runs one program", "do it by hand, or bring the data with an entry of stage"),
    "kill": ("hpml ends what it started", ""),
    "pkill": ("hpml ends what it started", ""),
    "tensorboard": ("one job file runs one program", "start it by hand"),
    "jupyter": ("one job file runs one program", "start it by hand"),
    "mail": ("Slurm sends the mail", "write resources.mail"),
    "enable_lmod": ("hpml finds the module system itself", ""),
}
"""Commands that do something around the training: reported with what to do instead."""


def _module(  # noqa: C901 - one branch per verb
    walk: Walk, words: list[str], command: Command
) -> bool:
    """Note `module load`, `swap`, `purge` …; `ml` is short for it."""
    report, line = walk.report, command.line
    rest = [word for word in words[1:] if not word.startswith("--") and word not in ("-q", "-s")]
    verbs = "load add purge unload rm del use unuse swap switch list avail av spider show display "
    verbs += "help whatis keyword restore save reset refresh is-loaded try-load info-loaded"
    verb, rest = (rest[0], rest[1:]) if rest and rest[0] in verbs.split() else ("load", rest)
    if verb in ("load", "add", "try-load", "swap", "switch"):
        if verb in ("swap", "switch"):
            unloaded, rest = rest[:-1], rest[-1:]
            for name in unloaded:
                _unload(walk, name, command)
        for name in rest:
            if name.startswith("-"):
                _unload(walk, name.removeprefix("-"), command)
            elif has_hole(name):
                report.lost(line, command.source, "the module's name is known in the job only")
            else:
                walk.found.modules.append((name, line))
    elif verb in ("unload", "rm", "del"):
        for name in rest:
            _unload(walk, name, command)
    elif verb in ("purge", "reset"):
        walk.found.modules.clear()
        report.changed(
            line,
            command.source,
            "hpml loads modules on top of those that are loaded when you submit",
            "submit from a shell without modules, or write environment.inherit: minimal",
        )
    elif verb in ("use", "unuse", "restore"):
        report.lost(
            line,
            command.source,
            "hpml only loads modules",
            "do it in your shell before `hpml submit`: MODULEPATH travels with the job",
        )
    return True


def _unload(walk: Walk, name: str, command: Command) -> None:
    before = len(walk.found.modules)
    walk.found.modules[:] = [
        one for one in walk.found.modules if one[0] != name and one[0].split("/")[0] != name
    ]
    if len(walk.found.modules) == before:
        walk.report.lost(
            command.line,
            command.source,
            f"hpml only loads modules: {name} is not unloaded",
            "unload it in your shell before `hpml submit`",
        )


def _source(walk: Walk, words: list[str], command: Command) -> bool:
    """Note `source ENV/bin/activate` and its like."""
    if len(words) < 2:  # noqa: PLR2004 - source and a file
        return True
    path, line = words[1], command.line
    name = os.path.basename(path)
    if name == "activate":
        directory = os.path.dirname(os.path.dirname(path))
        if len(words) > 2:  # noqa: PLR2004 - source activate NAME
            _set_conda(walk, words[2], command)
        elif not directory:
            _set_conda(walk, "base", command)
        elif has_hole(directory):
            walk.report.lost(
                line,
                command.source,
                "the environment is known in the job only",
                "write environment.venv",
            )
        elif re.search(r"(conda|mamba|miniforge)\d*$", directory):
            _set_conda(walk, "base", command)
        else:
            walk.found.venv = (os.path.join(walk.expander.directory, directory), line)
            walk.found.conda = None
    elif name in ("conda.sh", "mamba.sh", "conda_init.sh"):
        _conda_hint(walk, command)
    elif name in (".bashrc", ".bash_profile", ".profile", "bashrc"):
        walk.report.changed(
            line, command.source, "what your shell has set when you submit travels with the job"
        )
    elif re.search(r"(lmod|modules?|modules)\.sh$|init/bash$|/etc/profile", path):
        walk.found.quiet.setdefault(f"{words[0]} {name}", line)
    else:
        walk.report.lost(
            line,
            command.source,
            "hpml reads no other script",
            "write what it sets into environment, or source it before `hpml submit`: variables "
            "travel with the job",
        )
    return True


def _set_conda(walk: Walk, name: str, command: Command) -> None:
    if has_hole(name):
        walk.report.lost(
            command.line,
            command.source,
            "the environment is known in the job only",
            "write environment.conda",
        )
        return
    if "/" in name:
        name = os.path.join(walk.expander.directory, name)
    walk.found.conda = (name, command.line)
    walk.found.venv = None


def _conda_hint(walk: Walk, command: Command) -> None:
    walk.report.changed(
        command.line,
        command.source,
        "hpml finds conda through CONDA_EXE or the path",
        "if it finds none: `export CONDA_EXE=…/bin/conda` before `hpml submit`, or load its module",
    )


def _conda(walk: Walk, words: list[str], command: Command) -> bool:
    """Note `conda activate NAME`; `conda run -n NAME` is activation and a program."""
    verb = words[1] if len(words) > 1 else ""
    if verb == "activate":
        _set_conda(walk, words[2] if len(words) > 2 else "base", command)  # noqa: PLR2004
        return True
    if verb == "run":
        rest = words[2:]
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if option in ("-n", "--name", "-p", "--prefix") and rest:
                _set_conda(walk, rest.pop(0), command)
            elif option == "--cwd" and rest:
                rest.pop(0)
        walk.launch(rest, command)
        return True
    if verb in ("install", "create", "env", "update"):
        walk.report.lost(command.line, command.source, *PREPARES["pip"])
    return True


def _eval(walk: Walk, words: list[str], command: Command) -> bool:
    text = walk.expander.source(" ".join(words[1:]))
    if re.search(r"(conda|mamba|micromamba)\b.*hook|CONDA_EXE", text):
        _conda_hint(walk, command)
    else:
        walk.report.lost(command.line, command.source, "makes its commands in the job only")
    return True


def _cd(walk: Walk, words: list[str], command: Command) -> bool:
    rest = [word for word in words[1:] if word not in ("--", "-P", "-L", "-e")]
    target = rest[0] if rest else walk.expander.environment.get("HOME", "~")
    stays = walk.on_node and not has_hole(target) and not os.path.isabs(target)
    below = target == walk.start or target.startswith(f"{walk.start}/")
    walk.on_node = stays or (is_local(target, walk.expander) and not below)
    if walk.on_node:
        walk.expander.directory = os.path.join(walk.expander.directory, target)
        return True
    if has_hole(target) or target == "-":
        walk.report.lost(
            command.line,
            command.source,
            "the directory is known in the job only ($0 is a copy that Slurm makes)",
            "write workdir",
        )
        return True
    walk.expander.directory = os.path.normpath(os.path.join(walk.expander.directory, target))
    return True


def _mkdir(walk: Walk, words: list[str], command: Command) -> bool:
    skip = False
    for word in words[1:]:
        if skip or word.startswith("-"):
            skip = word in ("-m", "--mode")
            continue
        if is_local(word, walk.expander):
            walk.staging.directory(word)
        else:
            walk.found.directories.append((word, command.line))
    return True


def _rm(walk: Walk, words: list[str], command: Command) -> bool:
    paths = [word for word in words[1:] if not word.startswith("-")]
    if all(is_local(path, walk.expander) for path in paths):
        walk.found.quiet.setdefault("rm", command.line)
        return True
    return False


def _set(walk: Walk, words: list[str], command: Command) -> bool:
    if "-a" in words or words[1:3] == ["-o", "allexport"]:
        walk.exports_all = True
    elif "+a" in words or words[1:3] == ["+o", "allexport"]:
        walk.exports_all = False
    walk.found.quiet.setdefault("set", command.line)
    return True


def _unset(walk: Walk, words: list[str], command: Command) -> bool:
    for word in words[1:]:
        if word in walk.found.exported:
            del walk.found.exported[word]
        elif word.isidentifier() and word in walk.expander.environment:
            walk.report.lost(
                command.line,
                command.source,
                "hpml takes no variable away",
                "unset it in your shell before `hpml submit`",
            )
        walk.expander.variables.pop(word, None)
    return True


HANDLERS: dict[str, Callable[[Walk, list[str], Command], bool]] = {
    "module": _module,
    "ml": _module,
    "source": _source,
    ".": _source,
    "conda": _conda,
    "mamba": _conda,
    "micromamba": _conda,
    "eval": _eval,
    "cd": _cd,
    "pushd": _cd,
    "mkdir": _mkdir,
    "rm": _rm,
    "set": _set,
    "unset": _unset,
}
"""Commands that set something up: they change the walk and say whether they knew what to do."""
