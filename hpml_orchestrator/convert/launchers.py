"""Remove launchers from a command line: srun, torchrun, mpirun, env.

Each option must be in one of the tables below. Other options are refused, because they may change
how the program starts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.binding import lose_cpu_bind, read_binding, read_cpu_bind
from hpml_orchestrator.convert.launch import Launch
from hpml_orchestrator.convert.report import ALL_GPUS, HIDES_GPUS, OUTPUT
from hpml_orchestrator.convert.values import has_hole, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import (
    SRUN,
    HeaderError,
    Option,
    OptionWord,
    read_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)


def remove_launchers(launch: Launch) -> None:
    """Remove the launchers from the words of a launch and set its fields.

    Raises:
        InputError: hpml has no counterpart of an option.
    """
    before: list[str] = []
    # Launchers nest, as in `srun env NAME=1 torchrun`. Each pass removes the outermost one.
    while launch.words and launch.words != before:
        before, words = list(launch.words), launch.words
        if match := re.fullmatch(r'\0"?\$\((?:which|command -v) ([\w.+-]+)\)"?\0', words[0]):
            words[0] = match[1]  # PATH is searched again where the program starts
        program, rest = launch.program, [word for word in words[1:] if word not in _QUIET_PYTHON]
        if _SETTING.fullmatch(words[0]):
            launch.set(words.pop(0))
        elif program in _READERS:
            _READERS[program](launch)
        elif program in LAUNCHERS:
            if directory := os.path.dirname(words[0]):
                # a launcher with a path uses the Python next to it
                launch.python = os.path.join(directory, "python")
            _read_launcher(launch, LAUNCHERS[program])
        elif PYTHON.fullmatch(program) and rest[:1] == ["-m"] and "".join(rest[1:2]) in _MODULES:
            launch.python, launch.words = words[0], rest[1:]
            _read_launcher(launch, _MODULES[rest[1]])
    read_cpu_bind(launch)


def _read_prefix(launch: Launch) -> None:
    rest = launch.words[1:]
    while rest[:1] in (["-p"], ["--"]):
        rest.pop(0)
    if not (rest and rest[0].startswith("-")):
        launch.words = rest


_QUIET_PYTHON = ("-u", "-O", "-B")


@dataclass(frozen=True)
class _Launcher:
    """A launcher and the options that hpml has a counterpart for; others are refused.

    Attributes:
        launcher: the launcher in the job file.
        options: options with a value. hpml chooses that of a bare `NAME`; `NAME=SIZE` is one of
            the sizes of a launch, `NAME=$VARIABLE` sets a variable, `NAME=$` is followed by
            VARIABLE=VALUE, `NAME=$PREFIX_` by two values, of which the first ends a variable's
            name, and `NAME!` is reported as lost.
        flags: options without a value; `!` as above.
        per_node: default number of ranks on each node.
    """

    launcher: str
    options: str
    flags: str
    per_node: str = ""


_TORCHRUN = _Launcher(
    "torchrun",
    "nnodes=nodes nproc-per-node=per_node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank "
    "master-addr master-port local-addr log-dir r redirects t tee role start-method "
    "max-restarts! monitor-interval! numa-binding!",
    "standalone m module no-python use-env",
    per_node="1",
)
_ACCELERATE = _Launcher(
    "torchrun",
    "num-processes=total num-machines=nodes machine-rank main-process-ip main-process-port "
    "mixed-precision=$ACCELERATE_MIXED_PRECISION num-cpu-threads-per-process=$OMP_NUM_THREADS "
    "rdzv-backend rdzv-conf same-network! log-dir tee role",
    "multi-gpu debug q quiet m module no-python",
    per_node="gpu",
)
_DEEPSPEED = _Launcher(
    "torchrun",
    "num-gpus=per_node num-nodes=nodes H=hosts hostfile=hosts master-port master-addr launcher "
    "launcher-args ssh-port",
    "module no-python no-local-rank no-ssh-check force-multi save-pid no-ssh bind-cores-to-rank!",
    per_node="gpu",
)
_MPIRUN = _Launcher(
    "mpirun",
    "np=total n=total c=total npernode=per_node N=per_node x=$ hostfile=hosts machinefile=hosts "
    "H=hosts host=hosts prefix default-hostfile display map-by=map_by bind-to=bind_to "
    "rank-by! rf! rankfile! mca=$OMPI_MCA_ gmca=$OMPI_MCA_ pmixmca=$PMIX_MCA_ prtemca=$PRTE_MCA_",
    "oversubscribe allow-run-as-root report-bindings display-map tag-output v q verbose quiet "
    "nooversubscribe",
)
_HOROVODRUN = _Launcher(
    "horovodrun",
    "np=total n=total num-proc=total H hosts p ssh-port i ssh-identity-file start-timeout "
    "output-filename!",
    "gloo mpi verbose",
)
LAUNCHERS = {
    "torchrun": _TORCHRUN,
    **dict.fromkeys(("accelerate", "accelerate-launch"), _ACCELERATE),
    "deepspeed": _DEEPSPEED,
    **dict.fromkeys("mpirun mpiexec mpiexec.hydra mpirun.openmpi orterun".split(), _MPIRUN),
    "horovodrun": _HOROVODRUN,
}
_MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), _TORCHRUN),
    "accelerate.commands.launch": _ACCELERATE,
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), _DEEPSPEED),
}
_ADDS_LOCAL_RANK = ("deepspeed", "deepspeed.launcher.runner", "torch.distributed.launch")
_OWN_FILE = "accelerate reads ~/.cache/huggingface/accelerate/default_config.yaml, hpml does not"


def _read_launcher(launch: Launch, table: _Launcher) -> None:
    who = launch.program
    if who == "accelerate" and launch.words[1:2] != ["launch"]:
        return
    if launch.launcher == "srun":
        lose_cpu_bind(launch)
        launch.outer = launch.sizes
    launch.launcher, launch.words = table.launcher, launch.words[1 + (who == "accelerate") :]
    if who == "mpiexec.hydra":
        why = "hpml starts Open MPI's mpirun only"
        raise launch.refused(who, why, "write `srun --mpi=pmi2` or `srun --mpi=pmix` in its place")
    launch.sizes = {}
    names = _read_options(launch, table, who)
    read_binding(launch, names, who)
    hosts = launch.sizes.pop("hosts", "")
    if hosts and not {"per_node", "per_domain", "total"} & {*launch.sizes}:
        why = "the list of hosts decides the number of ranks"
        raise launch.refused(hosts, why, f"write the number as an option of {who}")
    if table == _MPIRUN and ":" in launch.words:
        problem = "mpirun starts several programs; hpml starts one"
        raise launch.refused(launch.source, problem, "have one program choose by its RANK")
    if table.launcher == "torchrun":
        _add_python(launch, names, who)
        if "total" not in launch.sizes:
            launch.sizes.setdefault("per_node", table.per_node)
    if table is _ACCELERATE:
        launch.changed(_OWN_FILE, "check that there is none, or that it changes nothing")


def _add_python(launch: Launch, names: set[str], who: str) -> None:
    if launch.words and "no-python" not in names:
        module = ["-m"] if {"m", "module"} & names else []
        launch.words = [launch.python or "python", *module, *launch.words]
    if who in _ADDS_LOCAL_RANK and not {"no-local-rank", "use-env"} & names:
        why = "the program gets no argument --local_rank=N"
        launch.changed(why, "read os.environ['LOCAL_RANK'] in it, as with torchrun")


def _read_options(launch: Launch, table: _Launcher, who: str) -> set[str]:
    """Remove the options of a launcher from the words and return their names."""
    targets = dict(
        option.replace("!", "=!").partition("=")[::2] for option in table.options.split()
    )
    flags = {flag.rstrip("!"): flag[-1] == "!" for flag in table.flags.split()}
    words, names = launch.words, set()
    while words and words[0][:1] in ("-", "\0") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("\0"):
            why = f"only the job can compute it, and it may be options of {who}"
            raise launch.refused(word, why, f"write the options of {who} and the program there")
        spelling, equals, value = word.lstrip("-").partition("=")
        name = spelling.replace("_", "-")
        target = targets.get(name, "")
        if name in targets and not equals and words:
            value = words.pop(0)
            value += f"={words.pop(0)}" if target.endswith("_") and words else ""
            word = f"{word} {value}"
        elif name not in targets and name not in flags:
            why = "hpml starts the ranks itself and has no counterpart of this option"
            raise launch.refused(f"{who} {word}", why, "remove it, or write the job file by hand")
        names.add(name)
        if (target == "!" and value not in ("none", "0")) or flags.get(name):
            why = f"hpml starts and binds the ranks itself, by {table.launcher}"
            launch.lost(f"{who} {word}", why, "check whether the training needs it")
        elif target.startswith("$"):
            launch.set(f"{target[1:]}={value}" if target[-1] not in "$_" else target[1:] + value)
        elif target not in ("", "!"):
            launch.sizes[target] = value
    return names


_SRUN_SIZES = {"ntasks": "total", "ntasks-per-node": "per_node", "nodes": "nodes"}
_SRUN_QUIET = frozenset(  # what hpml gives its own srun, or what means the same in its job
    "kill-on-bad-exit unbuffered label overlap exact exclusive quiet verbose job-name wait pty "
    "immediate jobid input disable-status propagate preserve-env container-mount-home "
    "no-kill".split()
)
_SRUN_RESOURCES = frozenset(
    "nodes ntasks ntasks-per-node cpus-per-task cpus-per-gpu gres gpus gpus-per-node gpus-per-task "
    "ntasks-per-gpu mem mem-per-cpu mem-per-gpu time partition account qos constraint reservation "
    "nodelist exclude".split()
)
_BINDS = "hpml binds the ranks itself"
_SRUN_BINDING = frozenset(
    "gpu-bind mem-bind distribution hint threads-per-core accel-bind ntasks-per-socket "
    "ntasks-per-core".split()
)


def _read_srun(launch: Launch) -> None:
    try:
        words = [OptionWord(word, launch.line) for word in launch.words[1:]]
        options, rest = read_options(words, SRUN, stop=True)
    except HeaderError as error:
        raise InputError(f"line {launch.line}: srun {error}", hint=error.hint) from None
    launch.launcher, launch.words = launch.launcher or "srun", [word.text for word in rest]
    if launch.words and re.fullmatch(r'\0(?!"?\$\((which|command -v) )[^\0]*\0', launch.words[0]):
        why = "only the job can compute it, and it may be options of srun"
        raise launch.refused(launch.words[0], why, "write the options and the program there")
    if ":" in launch.words:
        why = "it starts several programs at once, a heterogeneous job step"
        raise launch.refused("srun … : …", why, "write a script for each of them")
    for option in options:
        if option.name in _SRUN_SIZES:
            launch.sizes[_SRUN_SIZES[option.name]] = option.value.partition("-")[0]
        if option.name in _SRUN_RESOURCES:
            launch.options.append(option)
        elif option.name == "cpu-bind":
            launch.sizes["cpu_bind"] = option.value
        elif option.name not in _SRUN_QUIET:
            _srun_option(launch, option)


def _srun_option(launch: Launch, option: Option) -> None:
    name, value = option.name, option.value
    mounts = [re.sub(r"^(.*):\1$", r"\1", mount) for mount in value.split(",")]
    plain = not has_hole(value)
    if name == "mpi" and re.fullmatch(r"none|pmi2|pmix(_v\d)?", value):
        launch.mpi = value.partition("_")[0]
    elif name == "container-image" and plain:
        launch.container |= {"engine": "pyxis", "image": value}
        why = "the program starts in the job's directory, not in that of the image"
        launch.report.changed(launch.line, shown(f"srun {option.shown}"), why)
    elif name == "container-mounts" and plain and all(m.startswith("/") for m in mounts):
        launch.container["mounts"] = mounts
    elif name == "chdir" and plain and launch.directory:
        launch.directory = os.path.normpath(os.path.join(launch.directory, value))
    elif name == "export" and "NONE" not in mounts:
        for setting in mounts:
            launch.set(setting)
    elif name in ("output", "error"):
        launch.report.changed(launch.line, shown(f"srun {option.shown}"), *OUTPUT)
    elif name in _SRUN_BINDING:
        why, todo = ALL_GPUS if name in HIDES_GPUS else (_BINDS, "see `binding`")
        if value != "none":
            launch.lost(f"srun {option.shown}", why, todo)
    else:
        why = "a job file has no counterpart of this option"
        hint = (
            "use none, pmix or pmi2" if name == "mpi" else "remove it, or write `command` by hand"
        )
        raise launch.refused(f"srun {option.shown}", why, hint)


def _refuse_binding(launch: Launch) -> None:
    raise launch.refused(launch.program, _BINDS, "remove it; set `binding` in the job file")


_READERS: dict[str, Callable[[Launch], None]] = {
    "srun": _read_srun,
    **dict.fromkeys(("exec", "command", "nohup", "time", "env"), _read_prefix),
    **dict.fromkeys(("numactl", "taskset"), _refuse_binding),
}
