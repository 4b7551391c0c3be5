"""Commands about the cluster and the installation: init, doctor, schema."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from socket import gethostname
from typing import Annotated, Literal, NamedTuple

import typer
from hpml_exporters.core.procfs import text
from hpml_exporters.node.health import Health, read_health

from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import HpmlError, InputError, counted
from hpml_orchestrator.jobfile.schema import job_schema, sweep_schema
from hpml_orchestrator.records.files import names_in
from hpml_orchestrator.records.mounts import is_served_type, read_mounts
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask
from hpml_orchestrator.scheduler.slurm.messages import clean
from hpml_orchestrator.site.doctor import examine
from hpml_orchestrator.site.initialise import initialise, profile_path, save
from hpml_orchestrator.site.model import site_schema


def init(
    context: typer.Context,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the profile there; `-` prints it.",
            show_default="hpml.toml",
        ),
    ] = "",
    user: Annotated[
        bool,
        typer.Option(
            "--user", help="Write your profile for all projects, ~/.config/hpml/site.toml."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Run a short srun on an idle node of each kind: disks, networks, topology.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Query the cluster and write a site profile.

    Read and edit the profile before you use it. Without Slurm no profile is needed.
    """
    printed = output == "-" and not user
    where = (
        None if printed else profile_path(output, user=user, force=force, environment=os.environ)
    )
    if probe:
        notice("probing idle nodes; this takes up to two minutes")
    profile = initialise(
        SubprocessRunner(),
        os.environ,
        writer=f"{os.environ.get('USER') or os.getuid()}@{gethostname()}",
        when=f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M} UTC",
        look=store_of(context).root if probe else None,
    )
    written = save(profile, where, force=force) if where else []
    if as_json:
        print_json(
            {
                "file": str(where) if where else None,
                "topology_files": [str(path) for path in written[:-1]],
                **profile.to_json(),
            }
        )
        return
    if where is None:
        sys.stdout.write(profile.text)
        return
    for line in profile.lines():
        typer.echo(line)
    for path in written:
        typer.echo(f"wrote       {path}")
    applies = "" if user or where.name == "hpml.toml" else f"--site {shlex.quote(str(where))} "
    typer.echo(f"next: read and edit it, then run: hpml {applies}check job.yaml")


def doctor(
    context: typer.Context,
    node: Annotated[
        bool, typer.Option("--node", help="Instead, check whether this node is fit for jobs.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=0,
            help="With --node: how many GPUs it should have.",
            show_default="those on the PCI bus",
        ),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="With --node: drain it in Slurm if it is not fit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, Slurm and this machine, or with --node a node's hardware.

    The exit status is 1 if something that hpml needs is missing; with --node, if the node is not
    fit
    for jobs.
    """
    if node:
        check_node(gpus, drain=drain, as_json=as_json)
        return
    for option, given in {"--gpus": gpus is not None, "--drain": drain}.items():
        if given:
            raise InputError("needs --node", field=option, hint=f"hpml doctor --node {option}")
    findings = examine(store_of(context), site=chosen_site(context))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_table(
            ("CHECK", "RESULT", "FOUND"),
            [(finding.check, finding.result, finding.found) for finding in findings],
        )
        for finding in findings:
            if finding.hint:
                typer.echo(f"hint: {finding.check}: {finding.hint}", err=True)
    if any(finding.result == "missing" for finding in findings):
        raise typer.Exit(1)


def schema(
    what: Annotated[
        Literal["job", "site", "sweep"],
        typer.Argument(metavar="job|site|sweep", help="Job files, site profiles or sweep files."),
    ] = "job",
) -> None:
    """Print the JSON Schema of job files, profiles or sweeps.

    Editors use it to complete and check these files.
    """
    print_json({"job": job_schema, "site": site_schema, "sweep": sweep_schema}[what]())


# Check whether a node is fit for jobs, for a prolog, a HealthCheckProgram and people.

_STUCK_SECONDS = 1.0  # between the two samples of processes
_COMMAND_SECONDS = 20.0
_MOUNT_SECONDS = 5.0
_MANY_ZOMBIES = 100
_FULL, _NEARLY_FULL = 0.98, 0.9
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")
_SHOWN = 3
_QUERY = {
    "remapped_rows.failure": "a memory row could not be replaced: exchange the GPU",
    "remapped_rows.pending": "a memory row waits for a reset of the GPU",
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the driver loaded",
}


class NodeFinding(NamedTuple):
    """Result of one check.

    Attributes:
        check: subject of the check, such as `GPUs`.
        result: `ok`; `warning` (jobs can run); `error`; or `none` if there is nothing to check.
        found: the result in words.
    """

    check: str
    result: str
    found: str


@dataclass(frozen=True)
class Expected:
    """What the node should have, and where to look.

    Attributes:
        gpus: number of GPUs; None for the number on the PCI bus.
        proc: mount point of procfs.
        sys: mount point of sysfs.
        nvidia_smi: the command.
    """

    gpus: int | None = None
    proc: str = "/proc"
    sys: str = "/sys"
    nvidia_smi: str = "nvidia-smi"


def examine_node(expected: Expected) -> list[NodeFinding]:
    """Return findings in a fixed order; takes a second, or half a minute if something hangs."""
    before = read_health(expected.proc, expected.sys)
    gpus = _gpus(expected)
    served = _served(expected.proc)
    time.sleep(_STUCK_SECONDS)
    health = read_health(expected.proc, expected.sys)
    return [
        gpus,
        _clock(health),
        _processes(health, before, expected.proc),
        _memory(health),
        _file_systems(health),
        served,
        _heat(health),
        _ports(f"{expected.sys}/class/infiniband"),
    ]


def _output(command: Sequence[str], seconds: float) -> str | None:
    """Return the output of a command; None if it fails or times out."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait: a process that hangs in the kernel cannot be ended
        return None
    return output.decode("utf-8", "replace") if process.returncode == 0 else None


def _gpus(expected: Expected) -> NodeFinding:
    on_bus = _on_bus(f"{expected.sys}/bus/pci/devices")
    wanted = on_bus if expected.gpus is None else expected.gpus
    if not wanted and not on_bus:
        return NodeFinding("GPUs", "none", "no NVIDIA GPU on the PCI bus")
    query = f"--query-gpu=index,{','.join(_QUERY)}"
    answer = _output([expected.nvidia_smi, query, "--format=csv,noheader"], _COMMAND_SECONDS)
    if answer is None:
        missing = shutil.which(expected.nvidia_smi) is None
        why = "nvidia-smi is not installed" if missing else "nvidia-smi fails or hangs"
        found = f"0 of {wanted} answer: {why}; {on_bus} on the PCI bus"
        return NodeFinding("GPUs", "error", found)
    gpus = [line.split(", ") for line in answer.splitlines() if line.strip()]
    if len(gpus) < wanted:
        return NodeFinding("GPUs", "error", f"{len(gpus)} of {wanted} answer")
    faults = [
        (name, f"GPU {index}: {_QUERY[name]}")
        for index, *values in gpus
        for name, value in zip(_QUERY, values, strict=False)
        if value.strip().lower() == "yes" or (value.strip().isdecimal() and int(value))
    ]
    if not faults:
        return NodeFinding("GPUs", "ok", f"{len(gpus)} answer, without memory faults")
    failed = any(name != "remapped_rows.pending" for name, _ in faults)
    texts = first_few([fault for _, fault in faults], _SHOWN)
    return NodeFinding("GPUs", "error" if failed else "warning", texts)


def _on_bus(directory: str) -> int:
    return sum(
        text(f"{directory}/{entry}/vendor") == _NVIDIA
        and text(f"{directory}/{entry}/class").startswith(_DISPLAY)
        for entry in names_in(directory)
    )


def _clock(health: Health) -> NodeFinding:
    error = health.clock_error_seconds
    if error is None:
        return NodeFinding("clock", "none", f"cannot be read: {health.clock_refused}")
    if not health.synchronized:
        return NodeFinding("clock", "warning", "not synchronised: is chronyd or ntpd running?")
    return NodeFinding("clock", "ok", f"synchronised, off by {error:.3f} s at most")


def _processes(health: Health, before: Health, proc: str) -> NodeFinding:
    # Every process that waits for a disk sleeps uninterruptibly for a moment. Only one that does
    # not wake up between the samples is stuck.
    stuck = sorted(pid for pid, *_ in health.sleeping & before.sleeping)
    names = [f"{text(f'{proc}/{pid}/comm') or 'process'} ({pid})" for pid in stuck]
    if names:
        found = f"stuck in the kernel: {first_few(names, _SHOWN)}"
        return NodeFinding("processes", "warning", found)
    if health.zombies > _MANY_ZOMBIES:
        return NodeFinding("processes", "warning", counted(health.zombies, "zombie"))
    return NodeFinding(
        "processes", "ok", f"none stuck in the kernel, {counted(health.zombies, 'zombie')}"
    )


def _memory(health: Health) -> NodeFinding:
    if health.uncorrected_errors is None:
        return NodeFinding("memory", "none", "the kernel watches no memory controller (EDAC)")
    if health.uncorrected_errors:
        found = f"{health.uncorrected_errors} uncorrected errors since boot"
        return NodeFinding("memory", "error", found)
    found = f"no uncorrected errors, {health.corrected_errors or 0} corrected ones since boot"
    return NodeFinding("memory", "ok", found)


def _file_systems(health: Health) -> NodeFinding:
    """Judge local file systems: a read-only or full one is an error."""
    faults: list[tuple[bool, str]] = []
    for (point, _), is_read_only in health.read_only.items():
        try:
            space = os.statvfs(point)
        except OSError:
            continue
        used = 1 - space.f_bavail / space.f_blocks if space.f_blocks else 0.0
        if is_read_only:
            faults.append((True, f"{point} is read-only"))
        elif used > _NEARLY_FULL:
            faults.append((used > _FULL, f"{point} is {used:.0%} full"))
    if not faults:
        return NodeFinding("local file systems", "ok", f"{len(health.read_only)} writable")
    result = "error" if any(is_error for is_error, _ in faults) else "warning"
    return NodeFinding("local file systems", result, first_few([one for _, one in faults], _SHOWN))


def _served(proc: str) -> NodeFinding:
    points = [
        mount.point for mount in read_mounts(f"{proc}/self/mountinfo") if is_served_type(mount.kind)
    ]
    silent = [point for point in points if _output(["stat", "-f", point], _MOUNT_SECONDS) is None]
    if silent:
        found = f"no answer from {first_few(silent, _SHOWN)}"
        return NodeFinding("file servers", "error", found)
    if not points:
        return NodeFinding("file servers", "none", "none mounted")
    return NodeFinding("file servers", "ok", f"{len(points)} answer")


def _heat(health: Health) -> NodeFinding:
    hot = [
        f"{name} has {chip.celsius:.0f} °C of {chip.critical:.0f} °C"
        for name, chip in health.chips.items()
        if chip.critical is not None and chip.celsius >= chip.critical
    ]
    if hot:
        return NodeFinding("temperatures", "error", first_few(hot, _SHOWN))
    if not health.chips:
        return NodeFinding("temperatures", "none", "no sensors")
    name, chip = max(health.chips.items(), key=lambda item: item[1].celsius)
    return NodeFinding("temperatures", "ok", f"hottest is {name} with {chip.celsius:.0f} °C")


def _ports(directory: str) -> NodeFinding:
    """Judge InfiniBand ports: one that has a cable but is not active is an error."""

    def ports() -> Iterator[tuple[str, str, str]]:
        for device in names_in(directory):
            for port in names_in(f"{directory}/{device}/ports"):
                path = f"{directory}/{device}/ports/{port}"
                yield f"{device}/{port}", text(f"{path}/state"), text(f"{path}/phys_state")

    found = list(ports())
    if not found:
        return NodeFinding("InfiniBand", "none", "no RDMA device")
    bad = [
        f"{name} is {_word(state)}"
        for name, state, physical in found
        if not state.startswith("4:") and physical.startswith(("5:", "6:"))  # LinkUp, LinkErrorRec
    ]
    if bad:
        return NodeFinding("InfiniBand", "error", first_few(bad, _SHOWN))
    active = sum(state.startswith("4:") for _, state, _ in found)
    result = "ok" if active == len(found) else "warning"
    return NodeFinding("InfiniBand", result, f"{active} of {len(found)} ports active")


def _word(state: str) -> str:
    return re.sub(r"^\d+: ", "", state) or "unknown"


# `hpml doctor --node`: check a node, and drain it in Slurm if it is not fit for jobs.

_REASON_CHARS = 200
_SECONDS = 30.0


def check_node(gpus: int | None, *, drain: bool, as_json: bool) -> None:
    """Print the findings; the exit status is 1 after an error, 0 after warnings alone."""
    findings = examine_node(Expected(gpus=gpus))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("CHECK", "RESULT", "FOUND"), findings)
    errors = [finding for finding in findings if finding.result == "error"]
    for finding in errors:  # the form that users of Slurm and NHC look for in the log
        typer.echo(f"ERROR: hpml: {finding.check}: {finding.found}", err=True)
    if errors and drain:
        _drain(errors)
    if errors:
        raise typer.Exit(1)


def _drain(errors: Sequence[NodeFinding]) -> None:
    node = gethostname().partition(".")[0]
    reason = "; ".join(f"{error.check}: {error.found}" for error in errors)[:_REASON_CHARS]
    shown = _scontrol("show", "node", node, "--oneliner")
    # The health check must not replace an administrator's reason at every run.
    if "DRAIN" in shown.partition(" State=")[2].partition(" ")[0].upper():
        notice(f"{node} is drained already")
        return
    _scontrol("update", f"nodename={node}", "state=drain", f"reason=hpml: {reason}")
    notice(f"drained {node}")


def _scontrol(*words: str) -> str:
    done = ask(SubprocessRunner(), ["scontrol", *words], timeout=_SECONDS)
    if done.returncode != 0:
        raise HpmlError(f"cannot drain this node: {clean(done.stderr) or clean(done.stdout)}")
    return done.stdout
