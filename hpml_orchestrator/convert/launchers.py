"""Take launchers and wrappers off a command line: srun, torchrun, mpirun, env, timeout."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import Any

from hpml_orchestrator.convert.report import ALL_GPUS, HIDES_GPUS, Report
from hpml_orchestrator.convert.shell import ASSIGNMENT, split_script
from hpml_orchestrator.convert.values import Values, has_hole, hole_kinds, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import SRUN, HeaderError, Word, read_options

__all__ = ["PYTHON", "Launch", "peel"]

PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: the command line; once the launchers are taken off, the program.
        directory: where it starts; empty where only the job knows.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process.
        sizes: what the line says, as text: `nodes`, `per_node` and `total` (ranks), `cpus`.
        mpi: whether srun is to offer MPI; of an mpirun, that it is not Open MPI's.
        container: of pyxis: engine, image and mounts.
        variables: environment of this line alone.
        python: the interpreter that ran the launcher.
        report: what its options lose; it counts if the job file carries this launch over.
    """

    line: int
    source: str
    words: list[str]
    directory: str
    launcher: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    mpi: bool = False
    container: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    report: Report = field(default_factory=Report)

    @property
    def program(self) -> str:
        """Name of the program without its directory; empty where no word is left."""
        return os.path.basename(self.words[0]) if self.words else ""

    def size(self, name: str) -> int | None:
        """Return one of the sizes as a number above zero; None for all else."""
        text = self.sizes.get(name, "")
        return int(text) if re.fullmatch(r"0*[1-9][0-9]{0,6}", text) else None

    def lost(self, text: str, why: str, todo: str = "") -> None:
        """Report a part of the line that is not carried over."""
        self.report.lost(self.line, shown(text), why, todo)

    def changed(self, why: str, todo: str = "") -> None:
        """Report the line as carried over in another way."""
        self.report.changed(self.line, self.source, why, todo)

    def set(self, setting: str) -> None:
        """Set a variable of its environment by NAME=VALUE."""
        name, equals, value = setting.partition("=")
        if equals:
            self.variables[name] = value


def peel(launch: Launch) -> None:
    """Take the launchers off the words of a launch and fill its fields."""
    before: list[str] = []
    while launch.words and launch.words != before:
        before, program = list(launch.words), launch.program
        rest = [word for word in before[1:] if word not in ("-u", "-O", "-B")]
        if ASSIGNMENT.fullmatch(before[0]):
            launch.set(launch.words.pop(0))
        elif program == "srun":
            _read_srun(launch)
        elif program in ("bash", "sh"):
            _read_shell(launch)
        elif program in _WRAPPERS:
            _read_wrapper(launch)
        elif program in _LAUNCHERS:
            directory = os.path.dirname(before[0])
            if directory:  # a launcher with a path belongs to the Python beside it
                launch.python = os.path.join(directory, "python")
            _read_launcher(launch, _LAUNCHERS[program])
        elif PYTHON.fullmatch(program) and rest[:1] == ["-m"] and "".join(rest[1:2]) in _MODULES:
            launch.python, launch.words = before[0], rest[1:]
            _read_launcher(launch, _MODULES[rest[1]])


@dataclass(frozen=True)
class _Launcher:
    """A launcher and the options that hpml has a counterpart for; the others are reported.

    Attributes:
        launcher: of the job file.
        options: those with a value: `NAME` alone, or `NAME=SIZE` for one of the sizes of a launch,
            `NAME=$VARIABLE` for a variable, `NAME=$` for one whose value is VARIABLE=VALUE.
        flags: options without a value.
        pairs: options with two values, `NAME=$PREFIX`: the first is the rest of a variable's name.
        per_node: ranks on each node where no option says so.
    """

    launcher: str
    options: str
    flags: str
    pairs: str = ""
    per_node: str = ""


_TORCHRUN = _Launcher(
    "torchrun",
    "nnodes=nodes nproc-per-node=per_node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank "
    "master-addr master-port local-addr log-dir r redirects t tee",
    "standalone m module no-python use-env",
    per_node="1",
)
_ACCELERATE = _Launcher(
    "torchrun",
    "num-processes=total num-machines=nodes machine-rank main-process-ip main-process-port "
    "mixed-precision=$ACCELERATE_MIXED_PRECISION num-cpu-threads-per-process=$OMP_NUM_THREADS "
    "rdzv-backend rdzv-conf same-network log-dir tee role",
    "multi-gpu debug q quiet m module no-python",
    per_node="gpu",
)
_DEEPSPEED = _Launcher(
    "torchrun",
    "num-gpus=per_node num-nodes=nodes H hostfile master-port master-addr node-rank launcher "
    "launcher-args ssh-port",
    "module no-python no-local-rank no-ssh-check force-multi save-pid no-ssh",
    per_node="gpu",
)
_MPIRUN = _Launcher(
    "mpirun",
    "np=total n=total c=total npernode=per_node N=per_node ppn=per_node perhost=per_node x=$ "
    "hostfile machinefile f H host hosts genvlist envlist prefix launcher bootstrap rmk "
    "default-hostfile display",
    "oversubscribe allow-run-as-root report-bindings envall genvall display-map tag-output v q "
    "verbose quiet nooversubscribe prepend-rank l print-rank-map",
    "mca=$OMPI_MCA_ gmca=$OMPI_MCA_ pmixmca=$PMIX_MCA_ prtemca=$PRTE_MCA_ genv=$ env=$",
)
_HOROVODRUN = _Launcher(
    "horovodrun",
    "np=total n=total num-proc=total H hosts hostfile p ssh-port i ssh-identity-file "
    "start-timeout slots-per-host output-filename",
    "gloo mpi verbose",
)
_LAUNCHERS = {
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
_OTHER_FLAGS = frozenset(  # options without a value that hpml has no counterpart for
    "use-deepspeed use-fsdp cpu use-hwthread-cpus enable-cpu-affinity bind-cores-to-rank".split()
)
_ADDS_LOCAL_RANK = ("deepspeed", "deepspeed.launcher.runner", "torch.distributed.launch")
_HYDRA = frozenset("ppn perhost hosts genv env genvlist envlist bootstrap rmk".split())


def _read_launcher(launch: Launch, table: _Launcher) -> None:
    """Take a launcher and its options off the words."""
    who = launch.program
    if who == "accelerate" and launch.words[1:2] != ["launch"]:
        return
    launch.launcher, launch.words = table.launcher, launch.words[1 + (who == "accelerate") :]
    if table.launcher == "torchrun":  # an srun before it starts one of it per node
        launch.sizes.clear()
    names = _read_options(launch, table, who)
    if launch.words[:1] and launch.words[0].startswith("\0"):
        problem = f"line {launch.line}: {who} {shown(launch.words[0])}: only the job knows it"
        raise InputError(problem, hint=f"write the options of {who} and the program there")
    if table.launcher == "torchrun":
        if "total" not in launch.sizes:
            launch.sizes.setdefault("per_node", table.per_node)
        if launch.words and "no-python" not in names:
            module = ["-m"] if {"m", "module"} & names else []
            launch.words = [launch.python or "python", *module, *launch.words]
        if who in _ADDS_LOCAL_RANK and not {"no-local-rank", "use-env"} & names:
            why = "the program gets no argument --local_rank=N"
            launch.changed(why, "read os.environ['LOCAL_RANK'] in it, as with torchrun")
    launch.mpi = who == "mpiexec.hydra" or bool(table == _MPIRUN and _HYDRA & names)
    if table == _MPIRUN and ":" in launch.words:
        problem = f"line {launch.line}: mpirun starts several programs; hpml starts one"
        raise InputError(problem, hint="have one program choose by its RANK")


def _read_options(launch: Launch, table: _Launcher, who: str) -> set[str]:
    """Take the options of a launcher off the words and return their names."""
    pairs = dict(option.split("=") for option in table.pairs.split())
    targets = dict(option.partition("=")[::2] for option in table.options.split()) | pairs
    words, names = launch.words, set()
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        spelling, equals, value = word.lstrip("-").partition("=")
        name = spelling.replace("_", "-")
        flag = name in table.flags.split() or name in _OTHER_FLAGS
        # An option that hpml does not know takes the next word unless that begins the program.
        guess = name not in targets and bool(words) and re.match(r"-|.*\.py$", words[0])
        if not (equals or flag or guess) and words:
            value = words.pop(0)
            if name in pairs and words:
                value += f"={words.pop(0)}"
            word = f"{word} {value}"
        names.add(name)
        target = targets.get(name, "")
        if target.startswith("$"):
            launch.set(f"{target[1:]}={value}" if target[-1] not in "$_" else target[1:] + value)
        elif target:
            launch.sizes[target] = value
        elif name not in targets and name not in table.flags.split() and value not in ("none", "0"):
            why = f"hpml starts the ranks itself, by {table.launcher}, without this option"
            launch.lost(f"{who} {word}", why, "check whether the training needs it")
    return names


_SRUN_SIZES = {
    "ntasks": "total",
    "ntasks-per-node": "per_node",
    "nodes": "nodes",
    "cpus-per-task": "cpus",
}
_SRUN_QUIET = frozenset(
    # what hpml gives its own srun, or what follows from the job's size
    "kill-on-bad-exit unbuffered label overlap exact exclusive quiet verbose job-name wait gpus "
    "gpus-per-node gres partition account qos pty immediate nodelist "
    "jobid input disable-status propagate preserve-env constraint container-mount-home".split()
)


def _read_srun(launch: Launch) -> None:
    try:
        words = [Word(word, launch.line) for word in launch.words[1:]]
        options, rest = read_options(words, SRUN, stop=True)
    except HeaderError as error:
        raise InputError(f"line {launch.line}: srun {error}", hint=error.hint) from None
    launch.launcher, launch.words = launch.launcher or "srun", [word.text for word in rest]
    for option in options:
        name, value = option.name, option.value
        mounts = [re.sub(r"^(.*):\1$", r"\1", mount) for mount in value.split(",")]
        if name in _SRUN_SIZES:
            launch.sizes[_SRUN_SIZES[name]] = value.partition("-")[0]
        elif name == "mpi":
            launch.mpi = value not in ("none", "")
        elif name == "container-image" and not has_hole(value):
            launch.container |= {"engine": "pyxis", "image": value}
        elif name == "container-mounts" and all(re.match("/[^\0]*$", mount) for mount in mounts):
            launch.container["mounts"] = mounts
        elif name == "export" and "NONE" not in mounts:
            for setting in mounts:
                launch.set(setting)
        elif name not in _SRUN_QUIET and f"{name}={value}" not in ("mem=0", "cpu-bind=none"):
            why = ALL_GPUS if name in HIDES_GPUS else ("hpml starts and binds the ranks itself",)
            launch.lost(f"srun {option.shown}", *why)


def _read_shell(launch: Launch) -> None:
    """Read `bash -c TEXT` where the text starts one program, and each rank starts the same."""
    if len(launch.words) != len(("bash", "-c", "TEXT")) or launch.words[1] not in ("-c", "-lc"):
        return
    try:
        statements = split_script(shown(launch.words[2]))
    except InputError:
        return
    commands = [command for statement in statements for command in statement.commands]
    if len(commands) != 1 or commands[0].redirects or statements[0].source != commands[0].source:
        return
    words = Values({}, {}, launch.directory).words(commands[0].words)
    inner = dataclasses.replace(launch, words=words, sizes={}, variables={}, report=Report())
    peel(inner)
    known = inner.launcher == "torchrun" or PYTHON.fullmatch(inner.program)
    kinds = {kind for word in inner.words for kind in hole_kinds(word)}
    if known and kinds <= {"array", "job", "local"}:  # all else may differ between ranks
        launch.words = words


_WRAPPERS = {
    **dict.fromkeys("exec command nohup builtin env".split(), ("", 0)),
    "time": ("o f output format", 0),
    "numactl": ("N m C i p cpunodebind membind physcpubind interleave", 0),
    "taskset": ("", 1),
    "nice": ("n", 0),
    "stdbuf": ("i o e", 0),
    "timeout": ("k s signal kill-after", 1),
}
"""Programs that run another one: options with a value, number of operands."""


def _read_wrapper(launch: Launch) -> None:
    values, operands = _WRAPPERS[launch.program]
    words = launch.words[1:]
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        if option.lstrip("-") in values.split() and words:
            words.pop(0)
    taken = launch.words[: len(launch.words) - len(words) + operands]
    if set(taken[1:]) - {"-p", "--"}:
        launch.lost(" ".join(taken), "hpml starts and binds the ranks itself")
    launch.words = words[operands:]
