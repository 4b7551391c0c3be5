"""What the batch script asks of an agent: data to stage, and ranks to bind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging import StageRequest

__all__ = ["Arguments", "Entry", "Limits", "MonitorWish", "Wish", "parse_arguments"]

_STAGE_WORDS = 4
_VERIFY = ("strict", "warn", "off")
_DISTRIBUTIONS = ("auto", "shared", "chain", "sbcast", "partition")
_FLAGS = {"--one-thread": "one_thread", "--keep-threads": "keep_threads", "--no-gpus": "no_gpus"}
_NUMBERS = {  # option: its field and its least value
    "--ranks": ("ranks", 1),
    "--ranks-per-gpu": ("ranks_per_gpu", 1),
    "--loader-workers": ("loader_workers", 0),
}
_LIMITS = {
    "--opens-per-second": "opens_per_second",
    "--opens-per-second-per-job": "opens_per_second_per_job",
    "--metadata-rate": "metadata_rate",
    "--shared-rate": "shared_rate",
    "--link-rate": "link_rate",
    "--disk-rate": "disk_rate",
    "--array-jitter": "array_jitter",
    "--array-tasks": "array_tasks",
}
_MONITOR = {
    "--monitor": "listen",
    "--monitor-interval": "interval",
    "--monitor-web-config": "web_config",
    "--monitor-targets": "targets",
}
_SIZES = frozenset({"shared_rate", "link_rate", "disk_rate"})
_MEBIBYTE = 1 << 20
_MOST = 1_000_000_000


@dataclass(frozen=True)
class Wish:
    """How the ranks of a node are to be bound.

    Attributes:
        ranks: how many the node has.
        policy: the planner's policy.
        verify: `strict`, `warn` or `off`.
        ranks_per_gpu: how many ranks share a GPU.
        loader_workers: processes per rank that load data.
        one_thread: whether ranks get the first hardware thread of each core alone.
        keep_threads: whether OMP_NUM_THREADS stays as the job file has it.
        no_gpus: whether the job asked for no GPUs, so that the node's are nothing to it.
    """

    ranks: int
    policy: str = "gpu-local"
    verify: str = "warn"
    ranks_per_gpu: int = 1
    loader_workers: int = 0
    one_thread: bool = False
    keep_threads: bool = False
    no_gpus: bool = False


@dataclass(frozen=True)
class Entry:
    """One entry of the job file's `stage`.

    Attributes:
        request: what to bring, and to which base directory.
        distribution: how it comes to several nodes.
        hash: whether contents are hashed while they are copied.
        epochs: how often the training reads it; 0 where the job file does not say.
    """

    request: StageRequest
    distribution: str = "auto"
    hash: bool = True
    epochs: int = 0


@dataclass(frozen=True)
class Limits:
    """What the site profile says of its file system; 0: nothing.

    Attributes:
        opens_per_second: most files that one node may open per second.
        opens_per_second_per_job: most that all nodes of the job may, together.
        metadata_rate: files per second that the file system opens for all nodes.
        shared_rate: bytes/s that it reads for all nodes.
        link_rate: bytes/s between two nodes.
        disk_rate: bytes/s that a node's disk writes.
        array_jitter: seconds over which the tasks of an array spread their beginning, at most.
        array_tasks: how many tasks the array has.
    """

    opens_per_second: int = 0
    opens_per_second_per_job: int = 0
    metadata_rate: int = 0
    shared_rate: int = 0
    link_rate: int = 0
    disk_rate: int = 0
    array_jitter: int = 0
    array_tasks: int = 0


@dataclass(frozen=True)
class MonitorWish:
    """How the job is to be monitored.

    Attributes:
        listen: ADDRESS:PORT of the exporter.
        interval: seconds between two readings of GPUs.
        web_config: its file of TLS and users; empty for none.
        targets: directory that Prometheus finds it by; empty for the one beside the records.
    """

    listen: str
    interval: int = 1
    web_config: str = ""
    targets: str = ""


@dataclass(frozen=True)
class Arguments:
    """All that a batch script asks of an agent.

    Attributes:
        attempt: the attempt's directory.
        entries: what to stage, in order.
        wish: how to bind; None without `--ranks`.
        limits: what the site says of its file system.
        interfaces: network interfaces between nodes, the best first.
        monitor: how to monitor the job; None without `--monitor`.
    """

    attempt: Path
    entries: list[Entry] = field(default_factory=list)
    wish: Optional[Wish] = None  # noqa: UP045 - runs on Python 3.9
    limits: Limits = Limits()
    interfaces: tuple[str, ...] = ()
    monitor: Optional[MonitorWish] = None  # noqa: UP045


def parse_arguments(argv: list[str]) -> Arguments:
    """Return what the words say.

    The form is `ATTEMPT [--ranks N --policy P --verify V [--ranks-per-gpu N] [--loader-workers N]
    [--one-thread] [--keep-threads] [--no-gpus]] [--opens-per-second N]
    [--opens-per-second-per-job N] [--metadata-rate N] [--shared-rate SIZE] [--link-rate SIZE]
    [--disk-rate SIZE] [--array-jitter SECONDS --array-tasks N] [--interfaces NAME,…] [--monitor
    ADDRESS:PORT [--monitor-interval SECONDS] [--monitor-web-config FILE] [--monitor-targets
    DIRECTORY]] [--stage NAME KIND SOURCE BASE [--keep] [--distribution HOW] [--outside-links]
    [--no-hash] [--epochs N]]…`; sizes are whole MiB with an M behind them.

    Raises:
        InputError: the words are not of that form.
    """
    if not argv:
        raise InputError("must be the attempt's directory", field="ATTEMPT", value="")
    entries: list[Entry] = []
    wish: dict[str, Any] = {}
    limits: dict[str, int] = {}
    interfaces: tuple[str, ...] = ()
    monitor: dict[str, Any] = {}
    rest = argv[1:]
    while rest:
        word = rest[0]
        if word == "--stage":
            entry, rest = _entry(rest[1:])
            entries.append(entry)
        elif word in _FLAGS:
            wish[_FLAGS[word]] = True
            rest = rest[1:]
        elif word in _LIMITS:
            limits[_LIMITS[word]] = _limit(word, rest[1:])
            rest = rest[2:]
        elif word in _MONITOR:
            told = _word(word, rest[1:])
            number = word == "--monitor-interval"
            monitor[_MONITOR[word]] = _number(word, told, 1) if number else told
            rest = rest[2:]
        elif word == "--interfaces":
            interfaces = tuple(filter(None, _word(word, rest[1:]).split(",")))
            rest = rest[2:]
        else:
            name, value = _value(word, rest[1:])
            wish[name] = value
            rest = rest[2:]
    if wish and "ranks" not in wish:
        raise InputError("must be given with the others", field="--ranks", value="")
    if monitor and "listen" not in monitor:
        raise InputError("must be given with the others", field="--monitor", value="")
    return Arguments(
        Path(argv[0]),
        entries,
        Wish(**wish) if wish else None,
        Limits(**limits),
        interfaces,
        MonitorWish(**monitor) if monitor else None,
    )


def _entry(words: list[str]) -> tuple[Entry, list[str]]:
    """Return an entry of `stage`, with the options that stand behind it, and the words after it.

    Raises:
        InputError: there are too few words, or one of them is wrong.
    """
    if len(words) < _STAGE_WORDS:
        raise InputError(
            "must be --stage NAME KIND SOURCE BASE",
            field="agent",
            value=" ".join(["--stage", *words]),
        )
    name, kind, source, base = words[:_STAGE_WORDS]
    rest = words[_STAGE_WORDS:]
    request = StageRequest(name=name, source=source, kind=kind, target=base)
    entry = Entry(request)
    while rest:
        word = rest[0]
        if word == "--keep":
            request = replace(request, keep=True)
        elif word == "--outside-links":
            request = replace(request, outside_links=True)
        elif word == "--no-hash":
            entry = replace(entry, hash=False)
        elif word == "--distribution":
            how = _word(word, rest[1:])
            if how not in _DISTRIBUTIONS:
                raise InputError(
                    f"must be one of {', '.join(_DISTRIBUTIONS)}", field=word, value=how
                )
            entry = replace(entry, distribution=how)
            rest = rest[1:]
        elif word == "--epochs":
            entry = replace(entry, epochs=_number(word, _word(word, rest[1:]), 1))
            rest = rest[1:]
        else:
            break
        rest = rest[1:]
    return replace(entry, request=request), rest


def _word(option: str, rest: list[str]) -> str:
    if not rest:
        raise InputError("needs a value", field=option, value="")
    return rest[0]


def _number(option: str, word: str, least: int) -> int:
    if not (word.isdecimal() and word.isascii() and least <= int(word[:10]) <= _MOST):
        raise InputError(f"must be a number from {least} on", field=option, value=word)
    return int(word)


def _limit(option: str, rest: list[str]) -> int:
    """Return a limit: a number, or bytes of a size in MiB."""
    word = _word(option, rest)
    if _LIMITS[option] not in _SIZES:
        return _number(option, word, 0)
    if not word.endswith("M"):
        raise InputError("must be whole MiB such as 2048M", field=option, value=word)
    return _number(option, word[:-1], 1) * _MEBIBYTE


def _value(option: str, rest: list[str]) -> tuple[str, Any]:
    """Return the field and the value of an option that has one.

    Raises:
        InputError: there is no such option, or its value is none.
    """
    if option not in (*_NUMBERS, "--policy", "--verify"):
        raise InputError("is no option of the agent", field="agent", value=option)
    word = _word(option, rest)
    if option == "--policy":
        from hpml_orchestrator.placement.planner import POLICIES  # noqa: PLC0415

        if word not in POLICIES:
            raise InputError(f"must be one of {', '.join(POLICIES)}", field=option, value=word)
        return "policy", word
    if option == "--verify":
        if word not in _VERIFY:
            raise InputError(f"must be one of {', '.join(_VERIFY)}", field=option, value=word)
        return "verify", word
    name, least = _NUMBERS[option]
    return name, _number(option, word, least)
