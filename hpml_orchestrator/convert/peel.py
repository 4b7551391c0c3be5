"""Take launchers and wrappers off a command line: srun, containers, env, numactl and their like."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.launch import (
    BINDING,
    BINDING_OPTIONS,
    OUTPUT,
    PYTHON,
    Launch,
    LauncherOptions,
    last_value,
    positive,
)
from hpml_orchestrator.convert.launchers import LAUNCHERS, MODULES
from hpml_orchestrator.convert.values import has_hole, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import SRUN, HeaderError, Word, read_options
from hpml_orchestrator.spec.values import parse_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.header import Gpus

__all__ = ["peel"]

_MAX_LAYERS = 20


def peel(launch: Launch) -> Launch:
    """Return a launch with its launchers taken off the words and put into its fields."""
    for _ in range(_MAX_LAYERS):
        if not launch.words:
            break
        name = os.path.basename(launch.words[0])
        if name in _READERS:
            launch = _READERS[name](launch)
        elif PYTHON.fullmatch(name):
            words = [word for word in launch.words[1:3] if word not in ("-u", "-O", "-B")]
            inner = (
                MODULES.get(launch.words[launch.words.index("-m") + 1])
                if (words[:1] == ["-m"] and launch.words[-1] != "-m")
                else None
            )
            if inner is None:
                break
            rest = launch.words[launch.words.index("-m") + 1 :]
            launch = inner(launch.also(words=rest, python=launch.words[0]))
        else:
            break
    return launch


_SRUN_QUIET = frozenset(
    # what hpml gives its own srun, or what follows from the job's size
    "kill-on-bad-exit unbuffered label overlap exact exclusive quiet verbose job-name wait "
    "gpus-per-task ntasks-per-gpu partition account qos pty immediate nodelist jobid input "
    "disable-status propagate preserve-env constraint".split()
)


def _srun(launch: Launch) -> Launch:
    words = [Word(word, launch.line) for word in launch.words[1:]]
    try:
        options, rest = read_options(words, SRUN, stop=True)
    except HeaderError as error:
        raise InputError(f"line {launch.line}: srun {error}", hint=error.hint) from None
    changes: dict[str, Any] = {"launcher": launch.launcher or "srun"}
    container: dict[str, str] = {}
    fields = {"ntasks": "total", "ntasks-per-node": "per_node", "nodes": "nodes"}
    fields["cpus-per-task"] = "cpus"
    for option in options:
        name, value = option.name, option.value
        number = positive(value.partition("-")[0])
        if name in fields and number is not None:
            changes[fields[name]] = number
        elif name == "chdir":
            changes["directory"] = value
        elif name in ("gpus", "gpus-per-node", "gres"):
            changes["gpus"] = _gpus(value)
        elif name.startswith("container-") and value:
            container[name] = value
        elif name == "mpi":
            changes["mpi"] = value not in ("none", "")
        else:
            _report_step_option(launch, name, value, option.shown)
    launch = launch.also(words=[word.text for word in rest], **changes)
    image = container.pop("container-image", "")
    if not image:
        return launch
    mounts = container.pop("container-mounts", "").split(",")
    inside = container.pop("container-workdir", "")
    for name, value in container.items():
        launch.lost(f"srun --{name}={shown(value)}", "hpml gives pyxis an image and mounts")
    return _contained(launch, "pyxis", image, mounts, inside)


def _report_step_option(launch: Launch, name: str, value: str, text: str) -> None:
    """Read `--export`; report other options of srun that hpml's own srun does not get."""
    if name == "export":
        _export(launch, value)
        return
    unbound = name == "cpu-bind" and set(value.split(",")) <= {"none", "no", "v", "verbose"}
    if unbound or name in _SRUN_QUIET or (name, value) == ("mem", "0"):
        return
    why, todo = "hpml's steps have no limit or number of their own", "write it into resources"
    if name in BINDING_OPTIONS:
        why, todo = BINDING
    elif name in ("output", "error"):
        why, todo = OUTPUT
    launch.lost(f"srun {shown(text)}", why, todo)


def _gpus(value: str) -> Gpus | None:
    try:
        return parse_gpus(value.removeprefix("gres:").removeprefix("gpu:")).kinds
    except ValueError:
        return None


def _export(launch: Launch, value: str) -> None:
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals:
            launch.variables[name] = text
        elif name == "NONE":
            todo = "environment.inherit: minimal passes on only what a login has"
            launch.lost(f"srun --export={value}", "one environment travels with the job", todo)


def _contained(launch: Launch, engine: str, image: str, mounts: list[str], inside: str) -> Launch:
    """Return a launch in a container; `inside` is the directory there, if the line names one."""
    container: dict[str, Any] = {"engine": engine, "image": image, "mounts": []}
    directory = ""
    for mount in filter(None, mounts):
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if has_hole(mount) or not mount.startswith("/"):
            why = "a mount must be an absolute path that is known before the job starts"
            launch.lost(shown(mount), why, "write it into environment.container.mounts")
            continue
        container["mounts"].append(source if rest in ("", source) else mount)
        if f"{inside}/".startswith(f"{target}/"):
            directory = source + inside[len(target) :]
    if inside == launch.directory:
        directory = inside
    if inside and not directory:
        launch.lost(
            f"{engine}: working directory {shown(inside)}",
            "a directory of the container; hpml starts the ranks in workdir, which it mounts there",
            "write workdir if the nodes have it too, else let the program change to it",
        )
    if has_hole(image):
        launch.lost(shown(image), "the image is known in the job only", "write it into container")
        return launch
    if not container["mounts"]:
        del container["mounts"]
    return launch.also(container=container, directory=directory or launch.directory)


_APPTAINER = LauncherOptions("bind B env pwd cwd", "nv rocm silent s quiet q debug d verbose v")


def _apptainer(launch: Launch) -> Launch:
    _, words = _APPTAINER.read(launch, "apptainer")
    verb = words[0] if words else ""
    if verb not in ("exec", "run"):
        return launch.also(words=[])
    options, words = _APPTAINER.read(launch.also(words=words), "apptainer")
    image, *words = words or [""]
    if verb == "run":
        why = "hpml starts a program in the image, not the image's runscript"
        todo = "write what `apptainer inspect --runscript` shows into command"
        launch.lost(f"apptainer run {shown(image)}", why, todo)
    binds = ",".join(options.get("bind", []) + options.get("B", []))
    for part in ",".join(options.get("env", [])).split(","):
        name, equals, value = part.partition("=")
        if equals:
            launch.variables[name] = value
    inside = last_value(options, "pwd", "cwd") or ""
    return _contained(launch.also(words=words), "apptainer", image, binds.split(","), inside)


def _env(launch: Launch) -> Launch:
    words = launch.words[1:]
    while words and (words[0].startswith("-") or "=" in words[0]):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            launch.variables[name] = value
            continue
        if word in ("-u", "--unset", "-C", "--chdir") and words:
            word = f"{word} {words.pop(0)}"
        launch.lost(f"env {shown(word)}", "hpml removes no variable from the environment")
    return launch.also(words=words)


def _wrapper(
    values: str, why: str, todo: str = "", operands: int = 0
) -> Callable[[Launch], Launch]:
    """Return a reader of a program that runs another one; its options with a value are given."""
    taking = frozenset(values.split())

    def read(launch: Launch) -> Launch:
        words = launch.words[1:]
        while words and words[0].startswith("-"):
            option = words.pop(0)
            if option == "--":
                break
            if option.lstrip("-") in taking and words:
                words.pop(0)
        del words[:operands]
        taken = launch.words[: len(launch.words) - len(words)]
        plain = os.path.basename(taken[0]) == "time" and set(taken[1:]) <= {"-p", "--"}
        if why and not plain:
            launch.lost(shown(" ".join(taken)), why, todo)
        return launch.also(words=words)

    return read


_READERS: dict[str, Callable[[Launch], Launch]] = {
    "srun": _srun,
    "apptainer": _apptainer,
    "singularity": _apptainer,
    **LAUNCHERS,
    "env": _env,
    **dict.fromkeys("exec command nohup builtin".split(), _wrapper("", "")),
    "numactl": _wrapper("N m C i p cpunodebind membind physcpubind interleave", *BINDING),
    "taskset": _wrapper("", *BINDING, operands=1),
    "nice": _wrapper("n", "ranks run with the priority of the job"),
    "stdbuf": _wrapper("i o e", "hpml sets PYTHONUNBUFFERED=1 itself"),
    "time": _wrapper("o f output format", "`hpml show RUN` says how long each phase took"),
    "timeout": _wrapper(
        "k s signal kill-after", "the job's time limit ends it: resources.time", operands=1
    ),
}
