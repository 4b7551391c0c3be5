"""Read a launch line: remove srun, torchrun, mpirun and env, and keep what they ask for.

Each option must be in one of the tables below. A launcher of processes on one node that has another
option stays a part of the program, which a shell then starts as the script does.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.header import GPUS, MEMORY, Header, apply_option
from hpml_orchestrator.convert.report import OUTPUT, ImportReport
from hpml_orchestrator.convert.values import has_hole, shown
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
OPENMP = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
"""Variables that bind a rank's threads a second time."""
OPENMP_REASON = "hpml binds each rank; a bound OpenMP puts all loader workers on one core"
ALL_GPUS = ("each rank sees all GPUs of its node", "choose one by LOCAL_RANK in the program")
HIDES_GPUS = ("gpus-per-task", "gpu-bind", "ntasks-per-gpu")
"""Options of sbatch and srun that show each task only its own GPUs; ALL_GPUS is noted."""

_SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_NUMBER = re.compile(r"0*([1-9][0-9]{0,6})(:\d+)?|\0\"?\$\{\w+:?-([1-9]\d{0,6})\}\"?\0")
_BINDS = "hpml binds the ranks itself"
_OTHER_MPI = "write `srun --mpi=pmi2` or `srun --mpi=pmix` in its place"
_QUIET_PYTHON = ("-u", "-O", "-B")


class _StaysWholeError(Exception):
    """A launcher cannot be removed: hpml has no counterpart of one of its options."""


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: the command line; the program and its arguments after the launchers are removed.
        directory: its working directory; empty if only the job can compute it.
        inner: parses the text of `bash -c` to the words of its commands.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process.
        sizes: what the line requests, as text: `nodes`, and ranks `per_node`, `per_domain`
            (socket) or in `total`.
        outer: sizes of an srun around the launcher.
        options: srun's own options.
        binding: the job file's policy; empty for its default.
        mpi: of srun's `--mpi`.
        container: of pyxis: engine, image and mounts.
        variables: environment of this line alone.
        python: the interpreter that ran the launcher.
        report: what its options change; used if the job file starts this launch.
    """

    line: int
    source: str
    words: list[str]
    directory: str
    inner: Callable[[str], list[list[str]]] = lambda _: []
    launcher: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    outer: dict[str, str] | None = None
    options: list[Option] = field(default_factory=list)
    binding: str = ""
    mpi: str = ""
    container: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    report: ImportReport = field(default_factory=ImportReport)

    @property
    def program(self) -> str:
        """Name of the program without its directory; empty if no word is left."""
        return os.path.basename(self.words[0]) if self.words else ""

    def size(self, name: str) -> int | None:
        """Return one of the sizes; None if the line does not have it, or only the job can tell."""
        if name not in self.sizes:
            return None
        match = _NUMBER.fullmatch(self.sizes[name])
        if match is None or match[2] or match[3]:
            why = "the draft has the number that the line or the header suggests"
            self.lost(self.sizes[name], why, "correct nodes and ranks_per_node in the draft")
        return int(match[1] or match[3]) if match else None

    def lost(self, text: str, why: str, todo: str = "") -> None:
        """Note a part of the line that the job file does not have."""
        self.report.lost(self.line, shown(text), why, todo)

    def changed(self, why: str, todo: str = "", text: str = "") -> None:
        """Note that the job file does this in another way."""
        self.report.changed(self.line, shown(text or self.source), why, todo)

    def set(self, setting: str) -> None:
        """Set a variable of its environment from NAME=VALUE."""
        name, equals, value = setting.partition("=")
        if equals:
            self.variables[name] = value


def remove_launchers(launch: Launch) -> None:
    """Remove the launchers from the words of a launch and set its fields."""
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
        elif program in _LAUNCHERS:
            if directory := os.path.dirname(words[0]):
                # a launcher with a path uses the Python next to it
                launch.python = os.path.join(directory, "python")
            _try_launcher(launch, _LAUNCHERS[program], words)
        elif PYTHON.fullmatch(program) and rest[:1] == ["-m"] and "".join(rest[1:2]) in _MODULES:
            launch.python = words[0]
            _try_launcher(launch, _MODULES[rest[1]], rest[1:])
        else:
            _cut_wrapper(launch)
    _read_cpu_bind(launch)


def _cut_wrapper(launch: Launch) -> None:
    """Take the launcher out of `bash -c 'srun …'`, and out of `timeout 60 srun …`."""
    words = launch.words
    if launch.program in ("bash", "sh") and re.fullmatch(r"-\w*c", "".join(words[1:2])):
        commands = launch.inner(shown(words[2])) if words[2:] else []
        starts = [one for one in commands if one and is_launcher(one)]
        if len(starts) != 1:
            return
        launch.words = starts[0]
        if len(commands) > 1:
            why = "hpml starts the launcher itself, without the other commands of the text"
            launch.lost(launch.source, why, "write them into environment.setup")
        return
    names = [os.path.basename(word) for word in words]
    place = next((n for n, name in enumerate(names) if name in ("srun", *_MPI)), 0)
    if place and not launch.launcher and not PYTHON.fullmatch(launch.program):
        text = " ".join(words[:place])
        launch.lost(text, "hpml starts the launcher itself", "check whether the training needs it")
        launch.words = words[place:]


def is_launcher(words: list[str]) -> bool:
    """Whether a command line starts a launcher."""
    program, rest = os.path.basename(words[0]), [w for w in words[1:] if w not in _QUIET_PYTHON]
    module = PYTHON.fullmatch(program) and rest[:1] == ["-m"] and "".join(rest[1:2]) in _MODULES
    return program == "srun" or program in _LAUNCHERS or bool(module)


def _read_prefix(launch: Launch) -> None:
    rest = launch.words[1:]
    while rest[:1] in (["-p"], ["--"]):
        rest.pop(0)
    if not (rest and rest[0].startswith("-")):
        launch.words = rest


@dataclass(frozen=True)
class _Launcher:
    """A launcher and the options that hpml has a counterpart for.

    Attributes:
        launcher: the launcher in the job file.
        options: options with a value. hpml chooses that of a bare `NAME`; `NAME=SIZE` is one of
            the sizes of a launch, `NAME=$VARIABLE` sets a variable, `NAME=$` is followed by
            VARIABLE=VALUE, `NAME=$PREFIX_` by two values, of which the first ends a variable's
            name, and `NAME!` is noted as lost.
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
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "orterun")
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    **dict.fromkeys(("accelerate", "accelerate-launch"), _ACCELERATE),
    "deepspeed": _DEEPSPEED,
    **dict.fromkeys(_MPI, _MPIRUN),
    "horovodrun": _HOROVODRUN,
}
_MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), _TORCHRUN),
    "accelerate.commands.launch": _ACCELERATE,
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), _DEEPSPEED),
}
_ADDS_LOCAL_RANK = ("deepspeed", "deepspeed.launcher.runner", "torch.distributed.launch")
_OWN_FILE = "accelerate reads ~/.cache/huggingface/accelerate/default_config.yaml, hpml does not"


def _try_launcher(launch: Launch, table: _Launcher, words: list[str]) -> None:
    before, report = copy.copy(launch), launch.report
    launch.words, launch.report = list(words), ImportReport()
    launch.sizes, launch.variables = dict(launch.sizes), dict(launch.variables)
    try:
        _read_launcher(launch, table)
    except _StaysWholeError as error:
        vars(launch).update(vars(before))
        why = f"{error}: a shell starts {before.program} as the script does"
        launch.lost(launch.source, why, "hpml cannot bind or watch its ranks by themselves")
    else:
        report.extend(launch.report)
    launch.report = report


def _read_launcher(launch: Launch, table: _Launcher) -> None:
    who = launch.program
    if who == "accelerate" and launch.words[1:2] != ["launch"]:
        return
    if launch.launcher == "srun":
        if (value := launch.sizes.pop("cpu_bind", "none")) != "none":
            _lose_binding(launch, f"srun --cpu-bind={value}")
        launch.outer = launch.sizes
    launch.launcher, launch.words = table.launcher, launch.words[1 + (who == "accelerate") :]
    if who == "mpiexec.hydra":
        launch.lost(who, "hpml starts Open MPI's mpirun only", _OTHER_MPI)
    launch.sizes = {}
    names = _read_options(launch, table, who)
    _read_binding(launch, names, who)
    hosts = launch.sizes.pop("hosts", "")
    if hosts and not {"per_node", "per_domain", "total"} & {*launch.sizes}:
        launch.lost(hosts, "the list of hosts decides the number of ranks", "correct it")
    if table == _MPIRUN:
        _cut_second(launch, "mpirun starts several programs; hpml starts the first")
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


def _cut_second(launch: Launch, why: str) -> None:
    if ":" in launch.words:
        place = launch.words.index(":")
        launch.lost(" ".join(launch.words[place:]), why, "write a job file for each program")
        del launch.words[place:]


def _read_options(launch: Launch, table: _Launcher, who: str) -> set[str]:
    """Remove the options of a launcher from the words and return their names."""
    targets = dict(
        option.replace("!", "=!").partition("=")[::2] for option in table.options.split()
    )
    flags = {flag.rstrip("!"): flag[-1] == "!" for flag in table.flags.split()}
    words, names = launch.words, set()
    while words and re.match(r'-.|\0[^"\0][^\0]*\0$', words[0]):
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("\0"):
            raise _StaysWholeError(f"{shown(word)} may be options of {who}, known in the job only")
        spelling, equals, value = word.lstrip("-").partition("=")
        name = spelling.replace("_", "-")
        target = targets.get(name, "")
        if name in targets and not equals and words:
            value = words.pop(0)
            value += f"={words.pop(0)}" if target.endswith("_") and words else ""
            word = f"{word} {value}"
        elif name not in targets and name not in flags:
            if table.launcher == "torchrun":
                raise _StaysWholeError(f"hpml has no counterpart of {shown(word)}")
            target = "!"
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
_RANKS = ("nodes", "ntasks", "ntasks-per-node")
_SHARES = (*GPUS, "cpus-per-task", "cpus-per-gpu", "ntasks-per-gpu")
_SRUN_RESOURCES = frozenset(
    (
        *_RANKS,
        *_SHARES,
        *MEMORY,
        *"time partition account qos constraint reservation nodelist exclude".split(),
    )
)
_SRUN_BINDING = frozenset(
    "gpu-bind mem-bind distribution hint threads-per-core accel-bind ntasks-per-socket "
    "ntasks-per-core".split()
)


def _read_srun(launch: Launch) -> None:
    words = [OptionWord(word, launch.line) for word in launch.words[1:]]
    try:
        options, rest = read_options(words, SRUN, stop=True)
    except HeaderError as error:
        launch.lost(launch.source, str(error), error.hint)
        options, rest = [], words
    launch.launcher, launch.words = launch.launcher or "srun", [word.text for word in rest]
    while launch.words and re.fullmatch(r"\0[^\"\0](?!\((which|command))[^\0]*\0", launch.words[0]):
        why = "only the job can compute it, and it may be options of srun"
        if not launch.words[1:]:
            break
        launch.lost(launch.words.pop(0), why, "write the options into the draft's resources")
    _cut_second(launch, "a heterogeneous job step; hpml starts the first program")
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
    plain, text = not has_hole(value), f"srun {option.shown}"
    if name == "mpi" and re.fullmatch(r"none|pmi2|pmix(_v\d)?", value):
        launch.mpi = value.partition("_")[0]
    elif name == "container-image" and plain:
        launch.container |= {"engine": "pyxis", "image": value}
        launch.changed("the program starts in the job's directory, not in the image's", text=text)
    elif name == "container-mounts" and plain and all(m.startswith("/") for m in mounts):
        launch.container["mounts"] = mounts
    elif name == "chdir" and plain and launch.directory:
        launch.directory = os.path.normpath(os.path.join(launch.directory, value))
    elif name == "export" and "NONE" not in mounts:
        for setting in mounts:
            launch.set(setting)
    elif name in ("output", "error"):
        launch.changed(*OUTPUT, text=text)
    elif name in _SRUN_BINDING:
        if value != "none":
            launch.lost(text, *(ALL_GPUS if name in HIDES_GPUS else (_BINDS, "see `binding`")))
    else:
        todo = "use none, pmix or pmi2" if name == "mpi" else "write `command` by hand if needed"
        launch.lost(text, "a job file has no counterpart of this option", todo)


def _note_binding(launch: Launch) -> None:
    why = "hpml binds the ranks, and this does so again"
    launch.lost(launch.program, why, "remove it from `command`, or set `binding: none`")


_READERS: dict[str, Callable[[Launch], None]] = {
    "srun": _read_srun,
    **dict.fromkeys(("exec", "command", "nohup", "time", "env"), _read_prefix),
    **dict.fromkeys(("numactl", "taskset"), _note_binding),
}

# What options say about placement.

_POLICIES = {  # of a unit of mpirun's --bind-to and --map-by, and of srun's --cpu-bind
    **dict.fromkeys(("socket", "package", "sockets"), "socket"),
    **dict.fromkeys(("numa", "ldoms"), "numa"),
    **dict.fromkeys(("core", "hwthread", "cores", "threads"), "spread"),
    "none": "none",
}
_REASONS = {
    "socket": "`binding: socket`: each rank gets cores of one socket",
    "numa": "`binding: numa`: each rank gets cores of one NUMA domain",
    "spread": "`binding: spread`: each rank gets an equal part of the cores, not a single one",
    "none": "`binding: none`: hpml binds no rank",
}
_DEFAULT = "without the line hpml binds each rank to the cores next to its GPU"
_PER_DOMAIN = re.compile(r"ppr:(\d+):(\w+)")
_ASSUMED_SOCKETS = 2


def _read_binding(launch: Launch, names: set[str], who: str) -> None:
    """Set `binding`, and ranks by node or socket, by mpirun's options."""
    if "report-bindings" in names:
        why = "`hpml show RUN` prints where each rank is bound"
        launch.report.add("dropped", launch.line, f"{who} --report-bindings", why)
    bind_to, map_by = launch.sizes.pop("bind_to", ""), launch.sizes.pop("map_by", "")
    if bind_to:
        _set_policy(launch, f"{who} --bind-to {bind_to}", bind_to.partition(":")[0].lower())
    if not map_by:
        return
    text, ppr = f"{who} --map-by {map_by}", _PER_DOMAIN.match(map_by.lower())
    domain = ppr[2] if ppr else map_by.partition(":")[0].lower()
    if ppr and domain == "node":
        launch.sizes.setdefault("per_node", ppr[1])
    elif ppr and _POLICIES.get(domain) in ("socket", "numa"):
        launch.sizes |= {"per_domain": ppr[1], "domain": domain}
    if _POLICIES.get(domain) in ("socket", "numa") and not launch.binding:
        _set_policy(launch, text, domain)
    elif ppr and (domain == "node" or "per_domain" in launch.sizes):
        launch.changed("it decides resources.ranks_per_node", text=text)
    else:
        _lose_binding(launch, text)


def _read_cpu_bind(launch: Launch) -> None:
    if value := launch.sizes.pop("cpu_bind", ""):
        unit = value.removeprefix("verbose,").removeprefix("quiet,")
        _set_policy(launch, f"srun --cpu-bind={value}", unit)


def _set_policy(launch: Launch, text: str, unit: str) -> None:
    if policy := _POLICIES.get(unit, ""):
        launch.binding = policy
        launch.changed(_REASONS[policy], _DEFAULT, text)
    else:
        _lose_binding(launch, text)


def _lose_binding(launch: Launch, text: str) -> None:
    launch.lost(text, "hpml starts and binds the ranks itself", "see `binding`")


def ranks_per_domain(launch: Launch, header: Header, tasks_per_node: int | None) -> int | None:
    """Return the ranks of a node by `--map-by ppr:N:socket`; None if the launch has none.

    Args:
        launch: its `per_domain` is N.
        header: may say how many sockets a node has.
        tasks_per_node: of the header; used if the sockets are unknown.
    """
    each = launch.size("per_domain")
    if each is None:
        return None
    domain = launch.sizes["domain"]
    sockets = header.text("sockets-per-node") or header.text("extra-node-info").partition(":")[0]
    if sockets.isdigit() and int(sockets) and domain != "numa":
        return each * int(sockets)
    ranks, source = each * _ASSUMED_SOCKETS, f"hpml assumes {_ASSUMED_SOCKETS}"
    if tasks_per_node:
        ranks, source = tasks_per_node, f"the header has {tasks_per_node} tasks on each node"
    why = f"the script has no number of {domain}s of a node; {source}: ranks_per_node is {ranks}"
    todo = f"write resources.ranks_per_node: {each} x {domain}s (`sinfo -o '%n %X'` has sockets)"
    launch.lost(f"mpirun --map-by ppr:{each}:{domain}", why, todo)
    return ranks


def add_srun_options(header: Header, launch: Launch) -> None:
    """Add the resources that the srun of a launch requests and the header does not."""
    for option in launch.options:
        name, value, family = option.name, option.value, [option.name]
        for group in (GPUS, MEMORY):
            family = [*group] if name in group else family
        earlier, text = header.option(*family), f"srun {option.shown}"
        if (name, value) == ("mem", "0"):
            continue  # all of the job's memory
        if has_hole(value):
            if name not in _RANKS:
                launch.lost(text, "only the job can compute it", "write the number into resources")
        # The header wins: srun runs inside of its allocation and cannot get more.
        elif earlier is None or (name == "gres" and "gpu" not in value):
            apply_option(header, option, launch.report)
        elif (name, value) == (earlier.name, earlier.value) or name in _RANKS:
            continue
        else:
            why = f"the header has {earlier.shown}, which counts in the job file"
            todo = "a job file gives the ranks all of the job" if name in _SHARES else ""
            launch.lost(text, why, todo)
