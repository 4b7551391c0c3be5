"""Read the `#SBATCH` header of a script the way sbatch does, for the local backend.

    header    = line*            up to the first line that is neither blank nor a comment
    directive = "#SBATCH" word*  at the very start of a line
    word      = characters up to a blank; '...' and "..." keep blanks, a backslash keeps the next
                character (not a blank), an unquoted # ends the line

The rules are those of `_get_argument` and `_opt_batch_script` in Slurm's src/sbatch/opt.c.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.arrays import parse_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Directives", "StopSignal", "parse_memory_mb", "parse_time_limit", "read_directives"]

_MAGIC = "#SBATCH"
_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_MEMORY_MB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_DEFAULT_WARNING_SECONDS = 60

_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "J": "job-name",
    "o": "output",
    "G": "gpus",
    "a": "array",
    "d": "dependency",
}
# Short options of sbatch that take no value; every other one takes the rest or the next word.
_SHORT_FLAGS = frozenset("HIOQhksvVW")
_LONG_FLAGS = frozenset(
    {
        "contiguous",
        "disable-stdout-job-summary",
        "exclusive",
        "get-user-env",
        "hold",
        "ignore-pbs",
        "immediate",
        "kill-on-invalid-dep",
        "nice",
        "no-kill",
        "no-requeue",
        "overcommit",
        "oversubscribe",
        "parsable",
        "propagate",
        "quiet",
        "reboot",
        "requeue",
        "spread-job",
        "stepmgr",
        "test-only",
        "use-min-nodes",
        "verbose",
        "wait",
    }
)
# What cannot be left out without changing what the job means.
_REFUSED = {
    "dependency": "submit the second job when the first one is over",
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
    for name, value, shown in _options(list(_words(script))):
        if name in _REFUSED:
            raise SchedulerError(
                f"{shown}: the local backend has no job dependencies", hint=_REFUSED[name]
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


def _words(script: str) -> Iterator[str]:
    for number, line in enumerate(script.split("\n"), start=1):
        if line.startswith(_MAGIC):
            yield from _split(line[len(_MAGIC) :], number)
        elif line.strip(" \t\r\f\v") and not line.lstrip(" \t\r\f\v").startswith("#"):
            return


def _split(text: str, number: int) -> Iterator[str]:
    position = 0
    while True:
        while position < len(text) and text[position] in " \t\r\f\v":
            position += 1
        if text.startswith(":", position):
            raise SchedulerError(
                f"job.sh line {number}: unexpected ':' in {text.strip()!r}",
                hint="an #SBATCH option starts with - or --",
            )
        word, position = _word(text, position, number)
        if not word:
            return  # sbatch stops at an empty word as it does at the end of the line
        yield word


def _word(text: str, position: int, number: int) -> tuple[str, int]:
    word: list[str] = []
    quote = ""
    escaped = False
    while position < len(text) and (quote or text[position] not in " \t\r\f\v"):
        character = text[position]
        if not escaped:
            if character == "\\":
                escaped = True
                position += 1
                continue
            if character == quote:
                quote = ""
                position += 1
                continue
            if not quote and character in "'\"":
                quote = character
                position += 1
                continue
            if not quote and character == "#":
                return "".join(word), len(text)
        escaped = False
        word.append(character)
        position += 1
    if quote:
        raise SchedulerError(
            f"job.sh line {number}: unmatched {quote} in {text.strip()!r}",
            hint="close the quote on the same #SBATCH line",
        )
    return "".join(word), position


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (long name, value, as written) of each option; what is no option is passed over."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            shown = word
            if not equals and name not in _LONG_FLAGS:
                value, shown = _take_value(rest, word, known=name in _READERS)
            yield name, value, shown
        elif word.startswith("-") and word != "-":
            yield from _short_options(word[1:], rest)


def _short_options(letters: str, rest: list[str]) -> Iterator[tuple[str, str, str]]:
    while letters:
        letter, letters = letters[0], letters[1:]
        name = _SHORT.get(letter, letter)
        if letter in _SHORT_FLAGS:
            yield name, "", f"-{letter}"
        elif letters:
            yield name, letters, f"-{letter} {letters}"
            return
        else:
            value, shown = _take_value(rest, f"-{letter}", known=letter in _SHORT)
            yield name, value, shown
            return


def _take_value(rest: list[str], word: str, *, known: bool) -> tuple[str, str]:
    if not rest or (not known and rest[0].startswith("-")):
        if known:
            raise SchedulerError(
                f"{word}: a value is missing", hint="correct the #SBATCH line in job.sh"
            )
        return "", word
    value = rest.pop(0)
    return value, f"{word} {value}"


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
