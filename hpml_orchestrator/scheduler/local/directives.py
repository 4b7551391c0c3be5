"""What a script's `#SBATCH` header asks for, for the local backend."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.arrays import parse_tasks
from hpml_orchestrator.scheduler.slurm.options import (
    SBATCH,
    HeaderError,
    header_words,
    read_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Directives", "StopSignal", "parse_memory_mb", "parse_time_limit", "read_directives"]

_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_MEMORY_MB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_DEFAULT_WARNING_SECONDS = 60

# What cannot be left out without changing what the job means.
_REFUSED = {
    "dependency": "name the other run in `after` of the job file, or by --after",
}


@dataclass(frozen=True)
class StopSignal:
    """`--signal=[B:]SIGNAL[@SECONDS]`: a warning before the time limit.

    Attributes:
        number: the signal.
        seconds: how long before the limit it is sent.
        batch_shell_only: `B:`: only the batch shell gets it; otherwise only the steps do.
    """

    number: int
    seconds: int
    batch_shell_only: bool


@dataclass(frozen=True)
class Directives:
    """What a script asks for; None where it does not say.

    Attributes:
        time_limit_seconds: None for no limit.
        gpus: GPUs of the whole job from `--gpus`, `--gpus-per-node` or `--gres=gpu:`.
        memory_mb: memory of the node in MiB, from `--mem`; 0 is all of it.
        array: the tasks of a job array, as written; empty for a single job.
        ignored: the options that mean nothing here, as written.
        written: option name -> value as written, for messages.
    """

    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus: int | None = None
    gpus_per_task: int | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    memory_per_gpu_mb: int | None = None
    time_limit_seconds: int | None = None
    stop_signal: StopSignal | None = None
    exclusive: bool = False
    job_name: str = ""
    array: str = ""
    ignored: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()


def read_directives(script: str) -> Directives:
    r"""Return what the header of a script asks for.

    Raises:
        SchedulerError: sbatch would refuse the header, or this machine cannot honour it.

    >>> read_directives("#!/bin/bash\n#SBATCH -n 2 --time=1:30 # both\n").time_limit_seconds
    90
    """
    if not script.startswith("#!"):
        raise SchedulerError(
            "this does not look like a batch script",
            hint="its first line must be #! and the path of an interpreter, as sbatch asks",
        )
    values: dict[str, object] = {}
    written: dict[str, str] = {}
    ignored: list[str] = []
    try:
        options, _ = read_options(list(header_words(script)), SBATCH)
    except HeaderError as error:
        raise SchedulerError(f"job.sh line {error.line}: {error}", hint=error.hint) from error
    for option in options:
        name, value, shown = option.name, option.value, option.shown
        if name in _REFUSED:
            raise SchedulerError(
                f"{shown}: the local backend knows no such dependency", hint=_REFUSED[name]
            )
        if name == "output":
            continue  # the submission names the file, as an option on the command line would
        if name == "exclusive":
            values["exclusive"] = True
        elif name in _READERS:
            field, reader = _READERS[name]
            try:
                parsed = reader(value)
            except ValueError as error:
                raise SchedulerError(
                    f"{shown}: {error}", hint=f"correct the #SBATCH line with --{name} in job.sh"
                ) from error
            if name == "gres" and parsed is None:
                ignored.append(shown)
                continue
            values[field] = parsed
            written[field] = shown
        else:
            ignored.append(shown)
    return Directives(**values, ignored=tuple(ignored), written=tuple(written.items()))  # type: ignore[arg-type]


def parse_time_limit(text: str) -> int | None:
    """Return a time limit in seconds, None for no limit.

    Forms: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, UNLIMITED, INFINITE, -1; zero is
    no limit too. Slurm rounds up to whole minutes, the local backend does not.

    Raises:
        ValueError: it is none of these.

    >>> parse_time_limit("1-12"), parse_time_limit("90"), parse_time_limit("UNLIMITED")
    (129600, 5400, None)
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, ...")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        units: tuple[int, ...] = (_HOUR, _MINUTE, 1)
    else:
        units = ((_MINUTE,), (_MINUTE, 1), (_HOUR, _MINUTE, 1))[len(parts) - 1]
    seconds = int(days or 0) * _DAY
    seconds += sum(part * unit for part, unit in zip(parts, units, strict=False))
    return seconds or None


def parse_memory_mb(text: str) -> int:
    """Return a memory size in MiB: a number with K, M (the default), G or T, rounded up.

    Raises:
        ValueError: it is no size.

    >>> parse_memory_mb("2G"), parse_memory_mb("512"), parse_memory_mb("1K")
    (2048, 512, 1)
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no memory size: a number and K, M, G or T")
    return int(-(-int(match[1]) * _MEMORY_MB[match[2]] // 1))


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < 1:
        raise ValueError(f"{text!r} is no number above zero")
    return int(text)


def _nodes(text: str) -> int:
    """Return the least number of nodes: `2`, `1-4`."""
    least, dash, most = text.partition("-")
    if dash and _count(most) < _count(least):
        raise ValueError(f"{text!r}: the most is below the least")
    return _count(least)


def _gpus(text: str) -> int:
    """Return the sum of `[type:]number[,...]`."""
    total = 0
    for part in text.split(","):
        number = part.rpartition(":")[2]
        if not re.fullmatch(r"\d+", number, re.ASCII):
            raise ValueError(f"{part!r} is no number of GPUs")
        total += int(number)
    return total


def _gres(text: str) -> int | None:
    """Return the GPUs of `gpu[:type][:number][,...]`, None where it names other things only."""
    total: int | None = None
    for part in text.split(","):
        name, *rest = part.removeprefix("gres:").split("(")[0].replace("=", ":").split(":")
        if name != "gpu":
            continue
        last = rest[-1] if rest else "1"
        number = int(last) if re.fullmatch(r"\d+", last, re.ASCII) else 1
        total = (total or 0) + number
    return total


def _stop_signal(text: str) -> StopSignal:
    body, at, seconds = text.partition("@")
    flags, colon, name = body.rpartition(":")
    if colon and not set(flags.upper()) <= {"B", "R"}:
        raise ValueError(f"{flags!r} is neither B nor R")
    if at and not re.fullmatch(r"\d+", seconds, re.ASCII):
        raise ValueError(f"{seconds!r} is no number of seconds")
    if re.fullmatch(r"\d+", name, re.ASCII):
        number = int(name)
    else:
        word = name.upper().removeprefix("SIG")
        try:
            number = int(signal.Signals[f"SIG{word}"])
        except KeyError:
            raise ValueError(f"{name!r} is no signal") from None
    if not 0 < number < signal.NSIG:
        raise ValueError(f"{name!r} is no signal")
    return StopSignal(
        number=number,
        seconds=int(seconds) if at else _DEFAULT_WARNING_SECONDS,
        batch_shell_only="B" in flags.upper(),
    )


def _array(text: str) -> str:
    parse_tasks(text)
    return text


_READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "nodes": ("nodes", _nodes),
    "ntasks": ("ntasks", _count),
    "ntasks-per-node": ("ntasks_per_node", _count),
    "cpus-per-task": ("cpus_per_task", _count),
    "cpus-per-gpu": ("cpus_per_gpu", _count),
    "gpus": ("gpus", _gpus),
    "gpus-per-node": ("gpus", _gpus),
    "gres": ("gpus", _gres),
    "gpus-per-task": ("gpus_per_task", _gpus),
    "mem": ("memory_mb", parse_memory_mb),
    "mem-per-cpu": ("memory_per_cpu_mb", parse_memory_mb),
    "mem-per-gpu": ("memory_per_gpu_mb", parse_memory_mb),
    "time": ("time_limit_seconds", parse_time_limit),
    "signal": ("stop_signal", _stop_signal),
    "job-name": ("job_name", str),
    "output": ("output", str),
    "array": ("array", _array),
}
