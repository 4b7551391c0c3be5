"""Launchers of parallel programs: torchrun, accelerate, deepspeed, mpirun, horovodrun."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.launch import BINDING, Launch, OptionReader, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.values import Expander

__all__ = ["MODULES", "READERS"]

_TORCHRUN = OptionReader(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts "
    "monitor-interval start-method role log-dir r redirects t tee local-ranks-filter node-rank "
    "master-addr master-port local-addr logs-specs numa-binding event-log-handler "
    "signals-to-handle duplicate-stdout-filters duplicate-stderr-filters",
    "standalone m module no-python run-path use-env virtual-local-rank "
    "enable-watchdog shutdown-timeout",
)
_TORCHRUN_QUIET = frozenset(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank master-addr "
    "master-port local-addr standalone m module no-python use-env log-dir r redirects t tee".split()
)


def _given(options: dict[str, list[str]], *names: str) -> str | None:
    return next((options[name][-1] for name in names if name in options), None)


def _tell(
    options: dict[str, list[str]],
    quiet: frozenset[str],
    launch: Launch,
    expander: Expander,
    report: Report,
    known: dict[str, tuple[str, str]],
) -> None:
    """Report the options of a launcher that are not carried."""
    who = os.path.basename(launch.words[0])
    for name, values in options.items():
        if name not in quiet:
            dashes = "-" if len(name) == 1 else "--"
            shown = f"{who} {dashes}{_spelled(name, launch)} {expander.source(values[-1])}".strip()
            why, todo = known.get(name, ("hpml starts the ranks without it", ""))
            report.lost(launch.line, shown, why, todo)


def _spelled(name: str, launch: Launch) -> str:
    """Return an option's name with the underscores that it was written with."""
    other = name.replace("-", "_")
    return other if f"-{other}" in launch.source else name


def _torchrun(launch: Launch, expander: Expander, report: Report) -> Launch:
    options, rest = _TORCHRUN.read(launch.words[1:], launch.line, report, "torchrun")
    known = {
        "max-restarts": ("hpml starts torchrun without restarts of single ranks", ""),
        "numa-binding": BINDING,
    }
    if _given(options, "max-restarts") == "0":
        options.pop("max-restarts")
    _tell(options, _TORCHRUN_QUIET, launch, expander, report, known)
    per_node = _given(options, "nproc-per-node") or "1"
    nnodes = _given(options, "nnodes") or "1"
    least, colon, _ = nnodes.partition(":")
    if colon and nnodes != f"{least}:{least}":
        report.lost(
            launch.line,
            f"torchrun --nnodes={expander.source(nnodes)}",
            "hpml starts a fixed number of nodes",
            "resources.nodes says how many",
        )
    old = os.path.basename(launch.words[0]) == "torch.distributed.launch"
    if old and "use-env" not in options:
        _local_rank(launch, report, "torch.distributed.launch")
    return _programmed(launch, options, rest).also(
        launcher="torchrun",
        per_node=whole(per_node) or per_node,
        nodes=whole(least),
        single_node=not launch.launcher,
        total=None,
    )


def _local_rank(launch: Launch, report: Report, who: str) -> None:
    report.changed(
        launch.line,
        launch.source,
        f"{who} gives each rank an argument --local_rank=N; torchrun, and so hpml, does not",
        "read os.environ['LOCAL_RANK'] in the program",
    )


def _programmed(launch: Launch, options: dict[str, list[str]], rest: list[str]) -> Launch:
    """Return a launch whose words are a program again, with Python before a script or module."""
    python = launch.python or "python"
    before = launch.words[0]
    if "/" in before and os.path.basename(before) in READERS:
        python = os.path.join(os.path.dirname(before), "python")
    if "no-python" in options:
        return launch.also(words=rest)
    if "m" in options or "module" in options:
        return launch.also(words=[python, "-m", *rest])
    return launch.also(words=[python, *rest] if rest else [])


_ACCELERATE = OptionReader(
    "config-file num-processes num-machines machine-rank main-process-ip main-process-port "
    "mixed-precision gpu-ids dynamo-backend num-cpu-threads-per-process rdzv-backend rdzv-conf "
    "same-network max-restarts monitor-interval role deepspeed-config-file zero-stage "
    "gradient-accumulation-steps gradient-clipping offload-optimizer-device offload-param-device "
    "zero3-init-flag zero3-save-16bit-model deepspeed-hostfile deepspeed-exclusion-filter "
    "deepspeed-inclusion-filter deepspeed-multinode-launcher fsdp-version fsdp-offload-params "
    "fsdp-sharding-strategy fsdp-auto-wrap-policy fsdp-min-num-params fsdp-backward-prefetch "
    "fsdp-state-dict-type fsdp-transformer-layer-cls-to-wrap fsdp-use-orig-params "
    "fsdp-cpu-ram-efficient-loading fsdp-sync-module-states fsdp-activation-checkpointing "
    "fsdp-reshard-after-forward log-dir tee dynamo-mode",
    "multi-gpu cpu use-deepspeed use-fsdp use-megatron-lm debug q quiet m module no-python tpu "
    "use-mps-device enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic use-xpu ipex",
)
_ACCELERATE_QUIET = frozenset(
    "num-processes num-machines machine-rank main-process-ip main-process-port multi-gpu "
    "mixed-precision rdzv-backend rdzv-conf same-network quiet q debug m module no-python log-dir "
    "tee num-cpu-threads-per-process role".split()
)


def _accelerate(launch: Launch, expander: Expander, report: Report) -> Launch:
    words = launch.words[1:]
    if os.path.basename(launch.words[0]) == "accelerate":
        if words[:1] != ["launch"]:
            return launch.also(words=[], helper=True)
        words = words[1:]
    options, rest = _ACCELERATE.read(words, launch.line, report, "accelerate launch")
    known = {
        "config-file": (
            "hpml starts torchrun, which reads no file of accelerate",
            "what matters in it goes to environment.variables (ACCELERATE_…) or into the program",
        ),
        "max-restarts": ("hpml starts torchrun without restarts of single ranks", ""),
        "gpu-ids": ("Slurm chooses the GPUs", ""),
        "enable-cpu-affinity": BINDING,
        "use-deepspeed": _PLUGIN,
        "use-fsdp": _PLUGIN,
    }
    if _given(options, "gpu-ids") == "all":
        options.pop("gpu-ids")
    if _given(options, "dynamo-backend") == "no":
        options.pop("dynamo-backend")
    _tell(options, _ACCELERATE_QUIET, launch, expander, report, known)
    precision = _given(options, "mixed-precision")
    if precision:
        launch.variables["ACCELERATE_MIXED_PRECISION"] = precision
        report.changed(
            launch.line,
            f"accelerate --mixed_precision {precision}",
            f"carried as a variable that accelerate reads: ACCELERATE_MIXED_PRECISION={precision}",
        )
    total = _given(options, "num-processes")
    nodes = whole(_given(options, "num-machines") or "")
    if total is not None and whole(total) is None:
        report.lost(
            launch.line,
            f"--num_processes {expander.source(total)}",
            "is known in the job only",
            "write resources.ranks_per_node; left out, there is one rank per GPU",
        )
    return _programmed(launch, options, rest).also(
        launcher="torchrun",
        total=whole(total or ""),
        per_node=None if whole(total or "") else "gpu",
        nodes=nodes,
        single_node=not launch.launcher,
        threads=_given(options, "num-cpu-threads-per-process"),
    )


_PLUGIN = (
    "hpml starts torchrun, which knows no plug-ins of accelerate",
    "give it to Accelerator(…) in the program, or set its variables in environment.variables",
)

_DEEPSPEED = OptionReader(
    "H hostfile i include e exclude num-nodes min-elastic-nodes max-elastic-nodes num-gpus "
    "master-port master-addr node-rank launcher launcher-args elastic-training autotuning "
    "bind-core-list ssh-port venv-script",
    "module no-python no-local-rank no-ssh-check force-multi save-pid enable-each-rank-log "
    "bind-cores-to-rank no-ssh",
)
_DEEPSPEED_QUIET = frozenset(
    "H hostfile num-nodes num-gpus master-port master-addr node-rank launcher launcher-args module "
    "no-python no-local-rank no-ssh-check force-multi no-ssh ssh-port save-pid".split()
)


def _deepspeed(launch: Launch, expander: Expander, report: Report) -> Launch:
    options, rest = _DEEPSPEED.read(launch.words[1:], launch.line, report, "deepspeed")
    which = ("Slurm chooses nodes and GPUs", "")
    known = {"bind-cores-to-rank": BINDING, "bind-core-list": BINDING}
    known |= dict.fromkeys(("include", "i", "exclude", "e"), which)
    _tell(options, _DEEPSPEED_QUIET, launch, expander, report, known)
    if "no-local-rank" not in options:
        _local_rank(launch, report, "deepspeed")
    per_node = _given(options, "num-gpus") or "gpu"
    return _programmed(launch, options, rest).also(
        launcher="torchrun",
        per_node=whole(per_node) or per_node,
        nodes=whole(_given(options, "num-nodes") or ""),
        total=None,
        single_node=False,
    )


_MPIRUN = OptionReader(
    "np n c npernode N ppn perhost map-by bind-to rank-by x hostfile machinefile f H host hosts "
    "genvlist wdir wd prefix output-filename timeout launcher bootstrap rmk iface cpus-per-proc "
    "cpus-per-rank envlist bind-to-core path mpi pernode-count tune rankfile rf cpu-set cpu-list "
    "default-hostfile display output runtime-options",
    "oversubscribe allow-run-as-root report-bindings envall genvall display-map tag-output v q "
    "verbose quiet pernode nooversubscribe display-allocation prepend-rank l print-rank-map "
    "use-hwthread-cpus bynode byslot nolocal",
    pairs="mca gmca genv env pmixmca prtemca omca",
    double=True,
)
_MPIRUN_QUIET = frozenset(
    "np n c npernode N ppn perhost pernode x hostfile machinefile f H host hosts genvlist genv env "
    "wdir wd mca gmca pmixmca prtemca omca oversubscribe allow-run-as-root report-bindings envall "
    "default-hostfile genvall display-map display tag-output v q verbose quiet launcher bootstrap "
    "rmk prefix l".split()
)

# Whose parameters an option sets: Open MPI's own, or those of what version 5 is built upon.
_MCA = {"mca": "OMPI", "gmca": "OMPI", "omca": "OMPI", "pmixmca": "PMIX", "prtemca": "PRTE"}

_HYDRA = frozenset(  # options of MPICH's and Intel's mpirun, which Open MPI's does not know
    "ppn perhost hosts genv env genvlist envlist genvall envall bootstrap rmk iface l prepend-rank "
    "print-rank-map".split()
)


def _mpirun(launch: Launch, expander: Expander, report: Report) -> Launch:
    options, rest = _MPIRUN.read(launch.words[1:], launch.line, report, "mpirun")
    known = dict.fromkeys(
        "map-by bind-to bind-to-core rank-by cpus-per-rank cpus-per-proc rankfile rf cpu-set "
        "cpu-list".split(),
        BINDING,
    )
    if ":" in rest:
        first = rest.index(":")
        report.lost(
            launch.line,
            " ".join(rest[first:]),
            "hpml starts one program for all ranks, and this is a second one",
            "have one program choose by its RANK, or keep the script",
        )
        rest = rest[:first]
    if _given(options, "bind-to") == "none":
        options.pop("bind-to")
    _tell(options, _MPIRUN_QUIET, launch, expander, report, known)
    for name, of in _MCA.items():
        for value in options.get(name, []):
            parameter, _, setting = value.partition("=")
            if re.match(r"(plm|rmaps|hwloc|orte|prte|ras|routed|oob|odls)", parameter):
                continue  # of mpirun itself, whose work is hpml's and Slurm's here
            launch.variables[f"{of}_MCA_{parameter}"] = setting
    for value in [*options.get("x", []), *options.get("genv", []), *options.get("env", [])]:
        variable, equals, setting = value.partition("=")
        if equals:
            launch.variables[variable] = setting
    total = _given(options, "np", "n", "c")
    per_node = _given(options, "npernode", "N", "ppn", "perhost")
    if "pernode" in options:
        per_node = "1"
    directory = _given(options, "wdir", "wd")
    return launch.also(
        words=rest,
        launcher="mpirun",
        mpi=os.path.basename(launch.words[0]) == "mpiexec.hydra" or bool(_HYDRA & set(options)),
        total=whole(total or "") or launch.total,
        per_node=whole(per_node or ""),
        directory=directory or launch.directory,
    )


_HOROVODRUN = OptionReader(
    "np n num-proc H hosts hostfile p ssh-port i ssh-identity-file start-timeout "
    "network-interfaces network-interface min-np max-np min-num-proc max-num-proc slots-per-host "
    "host-discovery-script fusion-threshold-mb cycle-time-ms cache-capacity timeline-filename "
    "autotune-log-file stall-check-warning-time-seconds log-level output-filename mpi-args "
    "config-file thread-affinity gloo-timeout-seconds num-nccl-streams reset-limit",
    "gloo mpi jsrun verbose autotune disable-cache no-stall-check tcp check-build v version "
    "hierarchical-allreduce hierarchical-allgather prefix-output-with-timestamp",
)
_HOROVODRUN_QUIET = frozenset(
    "np n num-proc H hosts hostfile p ssh-port i ssh-identity-file start-timeout gloo mpi verbose "
    "slots-per-host output-filename".split()
)


def _horovodrun(launch: Launch, expander: Expander, report: Report) -> Launch:
    options, rest = _HOROVODRUN.read(launch.words[1:], launch.line, report, "horovodrun")
    if "check-build" in options:
        return launch.also(words=[], helper=True)
    _tell(options, _HOROVODRUN_QUIET, launch, expander, report, {})
    return launch.also(
        words=rest,
        launcher="horovodrun",
        total=whole(_given(options, "np", "n", "num-proc") or "") or launch.total,
    )


READERS: dict[str, Callable[[Launch, Expander, Report], Launch]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "deepspeed": _deepspeed,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
    "mpiexec.hydra": _mpirun,
    "mpirun.openmpi": _mpirun,
    "orterun": _mpirun,
    "prterun": _mpirun,
    "horovodrun": _horovodrun,
}

MODULES: dict[str, Callable[[Launch, Expander, Report], Launch]] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "accelerate.commands.launch": _accelerate,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed": _deepspeed,
}
