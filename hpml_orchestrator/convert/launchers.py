"""Launchers of parallel programs: torchrun, accelerate, deepspeed, mpirun, horovodrun."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.launch import Launch, LauncherOptions, last_value, positive
from hpml_orchestrator.convert.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LAUNCHERS", "MODULES"]


def _programmed(launch: Launch, options: dict[str, list[str]], rest: list[str]) -> Launch:
    """Return a launch whose words are a program again, with Python before a script or module."""
    before = launch.words[0]
    beside = "/" in before and os.path.basename(before) in LAUNCHERS
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


_TORCHRUN = LauncherOptions(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank master-addr "
    "master-port local-addr log-dir r redirects t tee",
    "standalone m module no-python use-env",
)


def _torchrun(launch: Launch) -> Launch:
    options, rest = _TORCHRUN.read(launch, "torchrun")
    per_node = last_value(options, "nproc-per-node") or "1"
    nnodes = last_value(options, "nnodes") or "1"
    least, colon, most = nnodes.partition(":")
    if colon and least != most:
        why = "hpml starts a fixed number of nodes"
        launch.lost(f"torchrun --nnodes={shown(nnodes)}", why, "write resources.nodes")
    if launch.words[0] == "torch.distributed.launch" and "use-env" not in options:
        _without_local_rank(launch, "torch.distributed.launch")
    return _programmed(launch, options, rest).also(
        per_node=positive(per_node) or per_node,
        nodes=positive(least),
        single_node=not launch.launcher,
        total=None,
    )


_ACCELERATE = LauncherOptions(
    "num-processes num-machines machine-rank main-process-ip main-process-port mixed-precision "
    "rdzv-backend rdzv-conf same-network log-dir tee num-cpu-threads-per-process role",
    "multi-gpu debug q quiet m module no-python",
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
        if value := last_value(options, option):
            launch.variables[variable] = value
    total = last_value(options, "num-processes")
    return _programmed(launch, options, rest).also(
        total=positive(total),
        per_node="gpu" if total is None else None if positive(total) else total,
        nodes=positive(last_value(options, "num-machines")),
        single_node=not launch.launcher and "num-machines" not in options,
    )


_DEEPSPEED = LauncherOptions(
    "H hostfile num-nodes num-gpus master-port master-addr node-rank launcher launcher-args "
    "ssh-port",
    "module no-python no-local-rank no-ssh-check force-multi save-pid no-ssh",
)


def _deepspeed(launch: Launch) -> Launch:
    options, rest = _DEEPSPEED.read(launch, "deepspeed")
    if "no-local-rank" not in options:
        _without_local_rank(launch, "deepspeed")
    per_node = last_value(options, "num-gpus") or "gpu"
    return _programmed(launch, options, rest).also(
        per_node=positive(per_node) or per_node,
        nodes=positive(last_value(options, "num-nodes")),
        total=None,
    )


_MPIRUN = LauncherOptions(
    "np n c npernode N ppn perhost x hostfile machinefile f H host hosts genvlist envlist wdir wd "
    "prefix launcher bootstrap rmk default-hostfile display",
    "oversubscribe allow-run-as-root report-bindings envall genvall display-map tag-output v q "
    "verbose quiet pernode nooversubscribe prepend-rank l print-rank-map",
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
    per_node = (
        "1" if "pernode" in options else last_value(options, "npernode", "N", "ppn", "perhost")
    )
    hydra = os.path.basename(launch.words[0]) == "mpiexec.hydra"
    return launch.also(
        words=rest,
        launcher="mpirun",
        mpi=hydra or bool(_HYDRA & options.keys()),
        total=positive(last_value(options, "np", "n", "c")) or launch.total,
        per_node=positive(per_node),
        directory=last_value(options, "wdir", "wd") or launch.directory,
    )


_HOROVODRUN = LauncherOptions(
    "np n num-proc H hosts hostfile p ssh-port i ssh-identity-file start-timeout slots-per-host "
    "output-filename",
    "gloo mpi verbose check-build",
)


def _horovodrun(launch: Launch) -> Launch:
    options, rest = _HOROVODRUN.read(launch, "horovodrun")
    total = positive(last_value(options, "np", "n", "num-proc")) or launch.total
    return launch.also(words=rest, launcher="horovodrun", total=total)


LAUNCHERS: dict[str, Callable[[Launch], Launch]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "deepspeed": _deepspeed,
    **dict.fromkeys("mpirun mpiexec mpiexec.hydra mpirun.openmpi orterun prterun".split(), _mpirun),
    "horovodrun": _horovodrun,
}
"""Readers by program; each takes its launcher off the words and fills the launch's fields."""

MODULES: dict[str, Callable[[Launch], Launch]] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "accelerate.commands.launch": _accelerate,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed": _deepspeed,
}
