"""Checks whether a node is fit for jobs, for a prolog, a HealthCheckProgram and people."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpml_exporters.core.procfs import text
from hpml_exporters.node.health import Health, read_health

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.files import names_in
from hpml_orchestrator.records.mounts import is_served_type, read_mounts
from hpml_orchestrator.records.texts import first_few

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
    """One check.

    Attributes:
        check: what was looked at, such as `GPUs`.
        result: `ok`; `warning`, with which jobs can run; `error`; or `none` if there is nothing.
        found: in words.
    """

    check: str
    result: str
    found: str


@dataclass(frozen=True)
class Expected:
    """What the node should have, and where to look.

    Attributes:
        gpus: number of GPUs; None: as many as the PCI bus has.
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
    """Return the output of a command; None if it fails or does not end in time."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: one that hangs in the kernel cannot be ended
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
    # Every process that waits for a disk sleeps uninterruptibly for a moment. Only one that did not
    # wake up between the samples is stuck.
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
    """Judge the local ones: an error if one is read-only or full."""
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
    """Judge InfiniBand ports: one with a cable that is not active is an error."""

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
