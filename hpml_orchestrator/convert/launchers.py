"""Take launchers and wrappers off a command line: srun, torchrun, mpirun, containers, env."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert import parallel
from hpml_orchestrator.convert.header import parse_gpus
from hpml_orchestrator.convert.launch import BINDING, Launch, OptionReader, whole
from hpml_orchestrator.convert.values import has_hole
from hpml_orchestrator.scheduler.slurm.options import SRUN, HeaderError, Word, read_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.values import Expander

__all__ = ["peel"]

_MAX_LAYERS = 20
_PLAIN = frozenset("exec command nohup builtin".split())
_TRAINS = re.compile(
    r"train|fit|pretrain|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE
)
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


def peel(launch: Launch, expander: Expander, report: Report) -> Launch:
    """Return a launch with its launchers taken off the words and put into its fields."""
    for _ in range(_MAX_LAYERS):
        if not launch.words:
            break
        reader = _reader(launch.words)
        if reader is None:
            break
        launch = reader(launch, expander, report)
    program = next((word for word in launch.words if not word.startswith("-")), "")
    if _PYTHON.fullmatch(os.path.basename(program)):
        program = " ".join(launch.words[1:3])
    launch.trains = bool(_TRAINS.search(os.path.basename(program.split(" ")[0]) or program))
    launch.trains = launch.trains or bool(_TRAINS.search(program))
    return launch


def _reader(words: list[str]) -> Callable[[Launch, Expander, Report], Launch] | None:
    name = os.path.basename(words[0])
    if name in _READERS:
        return _READERS[name]
    if _PYTHON.fullmatch(name):
        flags = 1
        while flags < len(words) and words[flags] in ("-u", "-O", "-B"):
            flags += 1
        if words[flags : flags + 1] == ["-m"] and len(words) > flags + 1:
            inner = parallel.MODULES.get(words[flags + 1])
            if inner is not None:
                return lambda launch, expander, report: inner(
                    launch.also(words=launch.words[flags + 1 :], python=launch.words[0]),
                    expander,
                    report,
                )
    if name == "command" and words[1:2] in (["-v"], ["-V"]):
        return lambda launch, _expander, _report: launch.also(words=[], helper=True)
    if name in _PLAIN:
        return lambda launch, _expander, _report: launch.also(words=launch.words[1:])
    return None


def _srun(  # noqa: C901, PLR0912 - one branch per option
    launch: Launch, expander: Expander, report: Report
) -> Launch:
    line = launch.line
    try:
        options, rest = read_options(
            [Word(word, line) for word in launch.words[1:]], SRUN, stop=True
        )
    except HeaderError as error:
        report.lost(line, launch.source, f"srun {error}")
        return launch.also(words=[])
    changes: dict[str, object] = {"launcher": launch.launcher or "srun"}
    container: dict[str, object] = {}
    for option in options:
        value = option.value
        if option.name in ("ntasks", "ntasks-per-node", "nodes"):
            number = whole(value.partition("-")[0])
            if number is None:
                report.lost(
                    line, f"srun {expander.source(option.shown)}", "is known in the job only"
                )
            else:
                field = {"ntasks": "total", "ntasks-per-node": "per_node", "nodes": "nodes"}
                changes[field[option.name]] = number
        elif option.name == "chdir":
            changes["directory"] = value
        elif option.name == "cpus-per-task":
            changes["cpus"] = whole(value)
        elif option.name in ("gpus", "gpus-per-node", "gres"):
            changes["gpus"] = _gpus(value)
        elif option.name.startswith("container-") and value:
            container[option.name] = value
        elif option.name == "export":
            _srun_export(launch, value, report)
        elif option.name == "mpi":
            changes["mpi"] = value not in ("none", "")
        elif (
            option.name in _SRUN_QUIET
            or value in _SRUN_DEFAULT.get(option.name, ())
            or _binds_nothing(option.name, value)
        ):
            pass
        else:
            why, todo = _SRUN_LOST.get(
                option.name, ("hpml chooses the options of its srun itself", "")
            )
            report.lost(line, f"srun {expander.source(option.shown)}", why, todo)
    made = launch.also(words=[word.text for word in rest], **changes)
    return _pyxis(made, container, expander, report)


def _binds_nothing(name: str, value: str) -> bool:
    """Whether it is a --cpu-bind that asks for no binding, however loudly."""
    return name == "cpu-bind" and set(value.split(",")) <= {"none", "no", "v", "verbose", "quiet"}


def _gpus(value: str) -> tuple[tuple[str, int], ...] | None:
    """Return the GPUs of `gpu:a100:2`, `a100:2` or `2`; None for what cannot be read."""
    try:
        return parse_gpus(value.removeprefix("gres:").removeprefix("gpu:"))
    except ValueError:
        return None


_SRUN_QUIET = frozenset(
    # what hpml gives to its own srun, or what follows from the job's size
    "kill-on-bad-exit unbuffered label overlap exact exclusive quiet verbose job-name wait "
    "gpus-per-task ntasks-per-gpu partition account qos pty immediate nodelist jobid input "
    "disable-status propagate preserve-env gpus-per-socket ntasks-per-socket constraint".split()
)
_WHOLE = ("the ranks get all that the job has", "resources.memory is for all ranks of a node")
_SRUN_DEFAULT = {"mem": ("0",)}
"""Values that say what hpml's own srun does anyway."""
_SRUN_LOST = {
    "mem": _WHOLE,
    "mem-per-cpu": _WHOLE,
    "mem-per-gpu": _WHOLE,
    "time": ("the job's time limit ends it", "resources.time"),
    "output": ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it"),
    "error": ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it"),
    "multi-prog": ("a job file runs one program", "make one job file per program"),
    "cpu-bind": BINDING,
    "gpu-bind": BINDING,
    "mem-bind": BINDING,
    "accel-bind": BINDING,
    "distribution": BINDING,
    "hint": BINDING,
}


def _srun_export(launch: Launch, value: str, report: Report) -> None:
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals:
            launch.variables[name] = text
        elif name == "NONE":
            report.lost(
                launch.line,
                f"srun --export={value}",
                "hpml decides once per job what travels",
                "environment.inherit: minimal gives ranks only what a login has",
            )


def _pyxis(
    launch: Launch, options: dict[str, object], expander: Expander, report: Report
) -> Launch:
    image = str(options.pop("container-image", ""))
    for name, value in options.items():
        if name not in ("container-mounts", "container-workdir"):
            report.lost(
                launch.line,
                f"srun --{name}={expander.source(str(value))}",
                "hpml gives pyxis an image and mounts",
            )
    if not image:
        return launch
    mounts = str(options.get("container-mounts", "")).split(",")
    mounts = [mount for mount in mounts if mount]
    inside = str(options.get("container-workdir", ""))
    if inside:
        launch.directory = _outside(
            inside, mounts, "srun --container-workdir", launch, expander, report
        )
    return _contained(launch, "pyxis", image, mounts, expander, report)


def _outside(
    path: str, mounts: list[str], option: str, launch: Launch, expander: Expander, report: Report
) -> str:
    """Return the nodes' own path of a directory in a container; empty where it is not known."""
    if has_hole(path):
        return path
    for mount in mounts:
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if source.startswith("/") and (path == target or path.startswith(f"{target}/")):
            return source + path[len(target) :]
    shared = [expander.directory, expander.environment.get("HOME", "")]
    if any(one and (path == one or path.startswith(f"{one}/")) for one in shared):
        return path
    report.lost(
        launch.line,
        f"{option} {path}",
        "a directory of the container; hpml starts the ranks in workdir, which it mounts there",
        "name it as workdir if the nodes have it too, else let the program change to it",
    )
    return ""


def _contained(
    launch: Launch,
    engine: str,
    image: str,
    mounts: list[str],
    expander: Expander,
    report: Report,
) -> Launch:
    if has_hole(image):
        report.lost(launch.line, expander.source(image), "the image is known in the job only")
        return launch
    kept = []
    for mount in mounts:
        if has_hole(mount) or not mount.startswith("/"):
            report.lost(
                launch.line,
                expander.source(mount),
                "a mount must be an absolute path that is known before",
                "write it into environment.container.mounts",
            )
        else:
            source, _, rest = mount.partition(":")
            kept.append(source if rest in ("", source) else mount)
    container: dict[str, object] = {"engine": engine, "image": image}
    if kept:
        container["mounts"] = kept
    return launch.also(container=container)


_APPTAINER = OptionReader(
    "bind B mount env env-file pwd home H overlay app scratch S workdir W network add-caps "
    "drop-caps security hostname dns apply-cgroups userns-map fusemount cwd",
    "nv rocm nvccli cleanenv e contain c containall C writable w writable-tmpfs no-home ipc i "
    "pid p uts net fakeroot f userns u keep-privs no-privs no-umask compat no-init no-mount "
    "no-eval sharens unsquash silent s quiet q debug d verbose v allow-setuid disable-cache",
)


def _apptainer(launch: Launch, expander: Expander, report: Report) -> Launch:
    words = launch.words[1:]
    _, words = _APPTAINER.read(words, launch.line, report, "apptainer")
    verb, *words = words or [""]
    if verb not in ("exec", "run"):
        return launch.also(words=[], helper=True)
    options, words = _APPTAINER.read(words, launch.line, report, "apptainer")
    image, *words = words or [""]
    if verb == "run":
        report.lost(
            launch.line,
            f"apptainer run {image}",
            "hpml starts a program in the image, not the image's own runscript",
            "write what `apptainer inspect --runscript` shows into command",
        )
    mounts = [
        part for name in ("bind", "B") for one in options.pop(name, []) for part in one.split(",")
    ]
    changes: dict[str, object] = {"words": words}
    for name in ("pwd", "cwd"):
        for value in options.pop(name, []):
            changes["directory"] = _outside(
                value, mounts, f"apptainer --{name}", launch, expander, report
            )
    for one in options.pop("env", []):
        for part in one.split(","):
            variable, _, value = part.partition("=")
            launch.variables[variable] = value
    quiet = {"nv", "silent", "s", "quiet", "q", "verbose", "v", "debug", "d"}
    for name, values in options.items():
        if name not in quiet:
            shown = f"--{name}" if len(name) > 1 else f"-{name}"
            shown += f" {expander.source(values[-1])}" if values[-1] else ""
            report.lost(
                launch.line, f"apptainer {shown}", "hpml gives apptainer --nv, --bind, --pwd"
            )
    return _contained(launch.also(**changes), "apptainer", image, mounts, expander, report)


def _env(launch: Launch, expander: Expander, report: Report) -> Launch:
    words = launch.words[1:]
    while words:
        word = words[0]
        if re.match(r"[A-Za-z_]\w*=", word):
            name, _, value = word.partition("=")
            launch.variables[name] = value
        elif word in ("-u", "--unset", "-C", "--chdir"):
            report.lost(
                launch.line,
                f"env {word} {expander.source(' '.join(words[1:2]))}",
                "hpml takes no variable away",
            )
            words.pop(0)
        elif word.startswith("-") and word != "-":
            report.lost(
                launch.line,
                f"env {word}",
                "hpml takes no variable away",
                "environment.inherit: minimal gives ranks only what a login has",
            )
        else:
            break
        words = words[1:]
    return launch.also(words=words, helper=not words)


def _wrapper(values: str, why: str, todo: str = "") -> Callable[[Launch, Expander, Report], Launch]:
    """Return a reader of a program that runs another one; its options with a value are given."""
    reader = OptionReader(values, double=False)

    def read(launch: Launch, expander: Expander, report: Report) -> Launch:
        name = os.path.basename(launch.words[0])
        words = launch.words[1:]
        if name == "time" and not (words and words[0].startswith("-")):
            return launch.also(words=words)
        while words and words[0].startswith("-"):
            option = words.pop(0)
            bare = option.lstrip("-").partition("=")[0]
            if option == "--":
                break
            if bare in reader.arity and "=" not in option and words:
                words.pop(0)
        if name in ("taskset", "timeout") and words:
            words.pop(0)
        taken = launch.words[: len(launch.words) - len(words)]
        report.lost(launch.line, expander.source(" ".join(taken)), why, todo)
        return launch.also(words=words)

    return read


_READERS: dict[str, Callable[[Launch, Expander, Report], Launch]] = {
    "srun": _srun,
    "apptainer": _apptainer,
    "singularity": _apptainer,
    "env": _env,
    "numactl": _wrapper("N m C i p cpunodebind membind physcpubind interleave preferred", *BINDING),
    "taskset": _wrapper("", *BINDING),
    "likwid-pin": _wrapper("c", *BINDING),
    "nice": _wrapper("n", "ranks run with the priority of the job"),
    "ionice": _wrapper("c n", "ranks run with the priority of the job"),
    "stdbuf": _wrapper("i o e", "hpml sets PYTHONUNBUFFERED=1 itself"),
    "time": _wrapper("o f output format", "`hpml show RUN` says how long each phase took"),
    "timeout": _wrapper("k s signal kill-after", "the job's time limit ends it: resources.time"),
    **parallel.READERS,
}
