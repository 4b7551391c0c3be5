"""What the batch script asks of an agent: data to stage, and ranks to bind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging import StageRequest

__all__ = ["Wish", "parse_arguments"]

_STAGE_WORDS = 4
_VERIFY = ("strict", "warn", "off")
_FLAGS = {"--one-thread": "one_thread", "--keep-threads": "keep_threads", "--no-gpus": "no_gpus"}
_NUMBERS = {  # option: its field and its least value
    "--ranks": ("ranks", 1),
    "--ranks-per-gpu": ("ranks_per_gpu", 1),
    "--loader-workers": ("loader_workers", 0),
}
_MOST = 1_000_000


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


def parse_arguments(
    argv: list[str],
) -> tuple[Path, list[StageRequest], Optional[Wish]]:  # noqa: UP045 - runs on Python 3.9
    """Return the attempt's directory, what to stage, and how to bind; None without `--ranks`.

    The form is `ATTEMPT [--ranks N --policy P --verify V [--ranks-per-gpu N] [--loader-workers N]
    [--one-thread] [--keep-threads] [--no-gpus]] [--stage NAME KIND SOURCE BASE]…`.

    Raises:
        InputError: the words are not of that form.
    """
    if not argv:
        raise InputError("must be the attempt's directory", field="ATTEMPT", value="")
    requests: list[StageRequest] = []
    given: dict[str, Any] = {}
    rest = argv[1:]
    while rest:
        word = rest[0]
        if word == "--stage":
            if len(rest) <= _STAGE_WORDS:
                raise InputError(
                    "must be --stage NAME KIND SOURCE BASE", field="agent", value=" ".join(rest)
                )
            name, kind, source, base = rest[1 : _STAGE_WORDS + 1]
            requests.append(StageRequest(name=name, source=source, kind=kind, target=base))
            rest = rest[_STAGE_WORDS + 1 :]
        elif word in _FLAGS:
            given[_FLAGS[word]] = True
            rest = rest[1:]
        else:
            name, value = _value(word, rest[1:])
            given[name] = value
            rest = rest[2:]
    if given and "ranks" not in given:
        raise InputError("must be given with the others", field="--ranks", value="")
    return Path(argv[0]), requests, Wish(**given) if given else None


def _value(option: str, rest: list[str]) -> tuple[str, Any]:
    """Return the field and the value of an option that has one.

    Raises:
        InputError: there is no such option, or its value is none.
    """
    if option not in (*_NUMBERS, "--policy", "--verify"):
        raise InputError("is no option of the agent", field="agent", value=option)
    if not rest:
        raise InputError("needs a value", field=option, value="")
    word = rest[0]
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
    if not (word.isdecimal() and word.isascii() and least <= int(word[:9]) <= _MOST):
        raise InputError(f"must be a number from {least} on", field=option, value=word)
    return name, int(word)
