"""Take launchers and wrappers off a command line: srun, torchrun, mpirun, containers, env."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.report import Report
from hpml_orchestrator.convert.values import has_hole, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import SRUN, HeaderError, Word, read_options
from hpml_orchestrator.spec.values import parse_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.header import Gpus

__all__ = ["OUTPUT", "PYTHON", "Launch", "peel"]

PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_MAX_LAYERS = 20
_BINDING = ("hpml binds the ranks itself", "`binding` in the job file says how")
_BINDING_OPTIONS = frozenset(
    "cpu-bind gpu-bind mem-bind accel-bind distribution hint numa-binding enable-cpu-affinity "
    "bind-cores-to-rank bind-core-list map-by bind-to bind-to-core rank-by cpus-per-rank "
    "cpus-per-proc rankfile rf cpu-set cpu-list".split()
)


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: the command line; once the launchers are taken off, the program.
        directory: where it starts.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process.
        per_node: ranks on each node, where the line says so.
        total: ranks of all nodes, where the line says so.
        nodes: nodes that the line names.
        single_node: whether torchrun was started on the first node only.
        cpus: of each rank, where srun names them.
        gpus: of each node, where srun names them.
        mpi: whether srun is to offer MPI; of an mpirun, that it is not Open MPI's.
        container: engine, image and mounts.
        variables: environment of this line alone.
        python: the interpreter that ran the launcher.
        report: what its options lose, reported for the launch that is carried over only.
    """

    line: int
    source: str
    words: list[str]
    directory: str
    launcher: str = ""
    per_node: int | str | None = None
    total: int | None = None
    nodes: int | None = None
    single_node: bool = False
    cpus: int | None = None
    gpus: Gpus | None = None
    mpi: bool = False
    container: dict[str, Any] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    report: Report = field(default_factory=Report)

    def also(self, **changes: Any) -> Launch:
        """Return it with other fields."""
        return dataclasses.replace(self, **changes)

    def lost(self, text: str, why: str, todo: str = "") -> None:
        """Report a part of the line that is not carried over."""
        self.report.lost(self.line, text, why, todo)

    def changed(self, report: Report, why: str, todo: str = "") -> None:
        """Report the line as carried over in another way."""
        report.changed(self.line, self.source, why, todo)


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
                _MODULES.get(launch.words[launch.words.index("-m") + 1])
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


def _whole(text: str | None) -> int | None:
    """Return a number above zero, None for all else."""
    return int(text) if text and re.fullmatch(r"0*[1-9][0-9]{0,6}", text) else None


@dataclass(frozen=True)
class _Options:
    """The options of a launcher; `_` in their names counts as `-`.

    Attributes:
        values: options with a value that hpml needs no report for.
        flags: options without a value.
        lost: options with a value that hpml has no counterpart for.
        pairs: options with two values.
        double: whether an option of one dash is read as a long one, as mpirun does.
    """

    values: str
    flags: str
    lost: str = ""
    pairs: str = ""
    double: bool = False

    def read(self, launch: Launch, who: str) -> tuple[dict[str, list[str]], list[str]]:
        """Return values by option and the words that follow; reports options that are lost."""
        arity = dict.fromkeys(f"{self.values} {self.lost}".split(), 1)
        arity |= dict.fromkeys(self.flags.split(), 0) | dict.fromkeys(self.pairs.split(), 2)
        options: dict[str, list[str]] = {}
        words = launch.words[1:]
        while words and words[0].startswith("-") and words[0] != "-":
            word = words.pop(0)
            if word == "--":
                break
            spelling, equals, value = word.lstrip("-").partition("=")
            name = spelling.replace("_", "-")
            if name not in arity and (self.double or word.startswith("--")):
                fits = [option for option in arity if option.startswith(name)]
                name = fits[0] if len(fits) == 1 else name
            if name not in arity:
                launch.lost(f"{who} {shown(word)}", f"hpml does not know this option of {who}")
                continue
            if not equals:
                value = "=".join(words[: arity[name]])
                del words[: arity[name]]
                word = f"{word} {value}".strip()
            options.setdefault(name, []).append(value)
            if name in _BINDING_OPTIONS and value != "none":
                launch.lost(f"{who} {shown(word)}", *_BINDING)
            elif name in {*self.lost.split(), *_LOST_FLAGS} and (name, value) not in _DEFAULTS:
                launch.lost(f"{who} {shown(word)}", "hpml starts the ranks without it")
        return options, words


_LOST_FLAGS = frozenset(
    "use-deepspeed use-fsdp autotune cleanenv contain containall e c C writable w fakeroot no-home "
    "use-hwthread-cpus".split()
)
_DEFAULTS = {("bind-to", "none"), ("max-restarts", "0"), ("gpu-ids", "all")}


def _last(options: dict[str, list[str]], *names: str) -> str | None:
    return next((options[name][-1] for name in names if name in options), None)


def _programmed(launch: Launch, options: dict[str, list[str]], rest: list[str]) -> Launch:
    """Return a launch whose words are a program again, with Python before a script or module."""
    before = launch.words[0]
    beside = "/" in before and os.path.basename(before) in _READERS
    python = os.path.join(os.path.dirname(before), "python") if beside else launch.python
    if "no-python" not in options and rest:
        module = ["-m"] if "m" in options or "module" in options else []
        rest = [python or "python", *module, *rest]
    return launch.also(words=rest, launcher="torchrun")


def _without_local_rank(launch: Launch, who: str) -> None:
    launch.changed(
        launch.report,
        f"{who} gives each rank an argument --local_rank=N; torchrun, and so hpml, does not",
        "read os.environ['LOCAL_RANK'] in the program",
    )


_TORCHRUN = _Options(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank master-addr "
    "master-port local-addr log-dir r redirects t tee",
    "standalone m module no-python run-path use-env",
    lost="max-restarts monitor-interval start-method role local-ranks-filter logs-specs "
    "numa-binding",
)


def _torchrun(launch: Launch) -> Launch:
    options, rest = _TORCHRUN.read(launch, "torchrun")
    per_node = _last(options, "nproc-per-node") or "1"
    nnodes = _last(options, "nnodes") or "1"
    least, colon, most = nnodes.partition(":")
    if colon and least != most:
        why = "hpml starts a fixed number of nodes"
        launch.lost(f"torchrun --nnodes={shown(nnodes)}", why, "write resources.nodes")
    if launch.words[0] == "torch.distributed.launch" and "use-env" not in options:
        _without_local_rank(launch, "torch.distributed.launch")
    return _programmed(launch, options, rest).also(
        per_node=_whole(per_node) or per_node,
        nodes=_whole(least),
        single_node=not launch.launcher,
        total=None,
    )


_ACCELERATE = _Options(
    "num-processes num-machines machine-rank main-process-ip main-process-port mixed-precision "
    "rdzv-backend rdzv-conf same-network log-dir tee num-cpu-threads-per-process role",
    "multi-gpu cpu debug q quiet m module no-python use-deepspeed use-fsdp enable-cpu-affinity",
    lost="config-file gpu-ids dynamo-backend max-restarts monitor-interval deepspeed-config-file "
    "zero-stage gradient-accumulation-steps gradient-clipping offload-optimizer-device "
    "offload-param-device zero3-init-flag zero3-save-16bit-model deepspeed-hostfile "
    "deepspeed-multinode-launcher fsdp-version fsdp-offload-params fsdp-sharding-strategy "
    "fsdp-auto-wrap-policy fsdp-state-dict-type fsdp-transformer-layer-cls-to-wrap",
)


def _accelerate(launch: Launch) -> Launch:
    if launch.words[:2] == [launch.words[0], "launch"]:
        launch = launch.also(words=[launch.words[0], *launch.words[2:]])
    elif os.path.basename(launch.words[0]) == "accelerate":
        return launch.also(words=[])
    options, rest = _ACCELERATE.read(launch, "accelerate")
    for option, variable in (
        ("mixed-precision", "ACCELERATE_MIXED_PRECISION"),
        ("num-cpu-threads-per-process", "OMP_NUM_THREADS"),
    ):
        if value := _last(options, option):
            launch.variables[variable] = value
    total = _last(options, "num-processes")
    return _programmed(launch, options, rest).also(
        total=_whole(total),
        per_node="gpu" if total is None else None if _whole(total) else total,
        nodes=_whole(_last(options, "num-machines")),
        single_node=not launch.launcher and "num-machines" not in options,
    )


_DEEPSPEED = _Options(
    "H hostfile num-nodes num-gpus master-port master-addr node-rank launcher launcher-args "
    "ssh-port",
    "module no-python no-local-rank no-ssh-check force-multi save-pid bind-cores-to-rank no-ssh",
    lost="i include e exclude autotuning bind-core-list",
)


def _deepspeed(launch: Launch) -> Launch:
    options, rest = _DEEPSPEED.read(launch, "deepspeed")
    if "no-local-rank" not in options:
        _without_local_rank(launch, "deepspeed")
    per_node = _last(options, "num-gpus") or "gpu"
    return _programmed(launch, options, rest).also(
        per_node=_whole(per_node) or per_node,
        nodes=_whole(_last(options, "num-nodes")),
        total=None,
    )


_MPIRUN = _Options(
    "np n c npernode N ppn perhost x hostfile machinefile f H host hosts genvlist envlist wdir wd "
    "prefix launcher bootstrap rmk default-hostfile display",
    "oversubscribe allow-run-as-root report-bindings envall genvall display-map tag-output v q "
    "verbose quiet pernode nooversubscribe prepend-rank l print-rank-map use-hwthread-cpus",
    lost="map-by bind-to rank-by output-filename timeout iface cpus-per-rank path mpi rankfile rf "
    "cpu-set cpu-list output",
    pairs="mca gmca genv env pmixmca prtemca omca",
    double=True,
)
# Whose parameters an option sets: Open MPI's, or those of what version 5 is built on.
_MCA = {"mca": "OMPI", "gmca": "OMPI", "omca": "OMPI", "pmixmca": "PMIX", "prtemca": "PRTE"}
_OF_MPIRUN = re.compile(r"(plm|rmaps|hwloc|orte|prte|ras|routed|oob|odls)")
_HYDRA = frozenset(  # options of MPICH's and Intel's mpirun that Open MPI's does not have
    "ppn perhost hosts genv env genvlist envlist genvall envall bootstrap rmk iface l prepend-rank "
    "print-rank-map".split()
)


def _mpirun(launch: Launch) -> Launch:
    options, rest = _MPIRUN.read(launch, "mpirun")
    if ":" in rest:
        first = rest.index(":")
        why = "hpml starts one program for all ranks"
        launch.lost(" ".join(rest[first:]), why, "have one program choose by its RANK")
        rest = rest[:first]
    for name, prefix in _MCA.items():
        for value in options.get(name, []):
            parameter, _, setting = value.partition("=")
            if not _OF_MPIRUN.match(parameter):
                launch.variables[f"{prefix}_MCA_{parameter}"] = setting
    for value in [*options.get("x", []), *options.get("genv", []), *options.get("env", [])]:
        variable, equals, setting = value.partition("=")
        if equals:
            launch.variables[variable] = setting
    per_node = "1" if "pernode" in options else _last(options, "npernode", "N", "ppn", "perhost")
    hydra = os.path.basename(launch.words[0]) == "mpiexec.hydra"
    return launch.also(
        words=rest,
        launcher="mpirun",
        mpi=hydra or bool(_HYDRA & options.keys()),
        total=_whole(_last(options, "np", "n", "c")) or launch.total,
        per_node=_whole(per_node),
        directory=_last(options, "wdir", "wd") or launch.directory,
    )


_HOROVODRUN = _Options(
    "np n num-proc H hosts hostfile p ssh-port i ssh-identity-file start-timeout slots-per-host "
    "output-filename",
    "gloo mpi verbose autotune disable-cache check-build",
    lost="network-interfaces network-interface fusion-threshold-mb cycle-time-ms cache-capacity "
    "timeline-filename log-level mpi-args config-file",
)


def _horovodrun(launch: Launch) -> Launch:
    options, rest = _HOROVODRUN.read(launch, "horovodrun")
    total = _whole(_last(options, "np", "n", "num-proc")) or launch.total
    return launch.also(words=rest, launcher="horovodrun", total=total)


_SRUN_QUIET = frozenset(
    # what hpml gives its own srun, or what follows from the job's size
    "kill-on-bad-exit unbuffered label overlap exact exclusive quiet verbose job-name wait "
    "gpus-per-task ntasks-per-gpu partition account qos pty immediate nodelist jobid input "
    "disable-status propagate preserve-env constraint".split()
)
OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")


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
        number = _whole(value.partition("-")[0])
        if name in fields and number is not None:
            changes[fields[name]] = number
        elif name == "chdir":
            changes["directory"] = value
        elif name in ("gpus", "gpus-per-node", "gres"):
            changes["gpus"] = _gpus(value)
        elif name.startswith("container-") and value:
            container[name] = value
        elif name == "export":
            _export(launch, value)
        elif name == "mpi":
            changes["mpi"] = value not in ("none", "")
        elif name == "cpu-bind" and set(value.split(",")) <= {"none", "no", "v", "verbose"}:
            pass
        elif name in _BINDING_OPTIONS:
            launch.lost(f"srun {shown(option.shown)}", *_BINDING)
        elif name in ("output", "error"):
            launch.lost(f"srun {shown(option.shown)}", *OUTPUT)
        elif name not in _SRUN_QUIET and (name, value) != ("mem", "0"):
            why = (
                "is known in the job only" if name in fields else "steps of hpml have no such limit"
            )
            launch.lost(f"srun {shown(option.shown)}", why, "write it into resources")
    launch = launch.also(words=[word.text for word in rest], **changes)
    image = container.pop("container-image", "")
    if not image:
        return launch
    mounts = container.pop("container-mounts", "").split(",")
    inside = container.pop("container-workdir", "")
    for name, value in container.items():
        launch.lost(f"srun --{name}={shown(value)}", "hpml gives pyxis an image and mounts")
    return _contained(launch, "pyxis", image, mounts, inside)


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


_APPTAINER = _Options(
    "bind B env pwd cwd",
    "nv rocm cleanenv e contain c containall C writable w writable-tmpfs no-home ipc i pid p uts "
    "net fakeroot f userns u compat no-init silent s quiet q debug d verbose v",
    lost="mount env-file home H overlay app scratch S workdir W network hostname",
)


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
    inside = _last(options, "pwd", "cwd") or ""
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


_NICE = "ranks run with the priority of the job"
_READERS: dict[str, Callable[[Launch], Launch]] = {
    "srun": _srun,
    "apptainer": _apptainer,
    "singularity": _apptainer,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "deepspeed": _deepspeed,
    **dict.fromkeys("mpirun mpiexec mpiexec.hydra mpirun.openmpi orterun prterun".split(), _mpirun),
    "horovodrun": _horovodrun,
    "env": _env,
    **dict.fromkeys("exec command nohup builtin".split(), _wrapper("", "")),
    "numactl": _wrapper("N m C i p cpunodebind membind physcpubind interleave", *_BINDING),
    "taskset": _wrapper("", *_BINDING, operands=1),
    "nice": _wrapper("n", _NICE),
    "ionice": _wrapper("c n", _NICE),
    "stdbuf": _wrapper("i o e", "hpml sets PYTHONUNBUFFERED=1 itself"),
    "time": _wrapper("o f output format", "`hpml show RUN` says how long each phase took"),
    "timeout": _wrapper(
        "k s signal kill-after", "the job's time limit ends it: resources.time", operands=1
    ),
}
_MODULES: dict[str, Callable[[Launch], Launch]] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "accelerate.commands.launch": _accelerate,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed": _deepspeed,
}
