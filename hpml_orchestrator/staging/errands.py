"""One request after the other, each to the target that suits it; what a command line asks for."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError, StagingError, nearest
from hpml_orchestrator.staging.auto import NO_ROOM, Choice, choose_target
from hpml_orchestrator.staging.faults import UNREADABLE, shown, why
from hpml_orchestrator.staging.request import IN_PLACE, SUFFIXES, Bases, StageRequest, StageResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.stager import CopyStager
    from hpml_orchestrator.staging.supply import LocalSupply

__all__ = ["AUTO", "Errand", "Outcome", "name_of", "names_of", "requests_for", "run_errand"]

AUTO = "auto"
_COMMANDS = ("ls", "verify", "clean")
_PATH_CHARACTERS = 4096
_WORD_CHARACTERS = 40
_NAME_CHARACTERS = 31
_WORDS = (AUTO, "shm", "local")


@dataclass(frozen=True)
class Errand:
    """What is to be staged, and whether its target is still to be chosen."""

    request: StageRequest
    auto: bool


@dataclass(frozen=True)
class Outcome:
    """What became of one request; `choice` where the target was to be chosen."""

    request: StageRequest
    result: StageResult
    choice: Choice | None = None


def requests_for(
    sources: Sequence[str],
    to: str,
    *,
    name: str = "",
    kind: str = "auto",
    keep: bool = False,
    outside_links: bool = False,
    trust_mtime: bool = False,
) -> list[Errand]:
    """Return a request for each source, by names made of theirs.

    Args:
        sources: paths, relative ones too.
        to: "auto", "shm", "local" or a directory's path.
        name: of the only source; made of its path when empty.
        kind: of all of them.
        keep: leave it in the node's cache.
        outside_links: take symbolic links that leave the tree as they are.
        trust_mtime: see `StageRequest`.

    Raises:
        InputError: nothing is to be staged, two sources have the same name, a value is wrong.
    """
    if not sources:
        raise InputError("must be given", field="SRC", hint="hpml stage data --to shm")
    for source in sources:
        if not source or "\0" in source:
            raise InputError("must name a directory or a file", field="SRC", value=source)
    if name and len(sources) > 1:
        raise InputError(
            f"names one source, and there are {len(sources)}", field="--name", value=name
        )
    target = _target(to)
    names = [name] if name else names_of(sources)
    return [
        Errand(
            StageRequest(
                name=one,
                source=os.path.abspath(source),
                kind=kind,
                target="local" if target == AUTO else target,
                keep=keep,
                outside_links=outside_links,
                trust_mtime=trust_mtime,
            ),
            target == AUTO,
        )
        for one, source in zip(names, sources)
    ]


def name_of(source: str) -> str:
    """Return a valid name made of the last part of a path.

    >>> name_of("/scratch/ImageNet-1k.tar.gz"), name_of("2024/"), name_of("/")
    ('imagenet_1k', 'data_2024', 'data')
    """
    last = os.path.basename(os.path.abspath(source)).lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if last.endswith(suffix):
            last = last[: -len(suffix)]
            break
    plain = re.sub(r"[^a-z0-9]+", "_", last).strip("_")
    if not re.match("[a-z]", plain):
        plain = f"data_{plain}" if plain else "data"
    return plain[:_NAME_CHARACTERS]


def names_of(sources: Sequence[str]) -> list[str]:
    """Return a name for each source.

    Raises:
        InputError: two of them would have the same; names both.
    """
    whose: dict[str, str] = {}
    for source in sources:
        name = name_of(source)
        if name in whose:
            raise InputError(
                f"{shown(whose[name])} and {shown(source)} would both be called {name}",
                field="SRC",
                hint="stage one after the other, each with a --name of its own",
            )
        whose[name] = source
    return list(whose)


def run_errand(
    errand: Errand,
    stager: CopyStager,
    bases: Bases,
    supply_of: Callable[[StageRequest, Room], LocalSupply],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Choose the target where that is asked for, and stage.

    Args:
        errand: what is wanted.
        stager: brings it.
        bases: what "shm" and "local" stand for.
        supply_of: opens the source where a target is to be chosen; it is looked at once.
        clock: seconds.

    Raises:
        HpmlError: as `CopyStager.stage`.
    """
    request = errand.request
    if not _is_there(request.source):
        raise NotFoundError(
            f"no such file or directory: {_brief(request.source)}",
            hint=_meant(os.path.basename(request.source)),
        )
    if not errand.auto:
        return Outcome(request, stager.stage(request))
    begin = clock()
    opened: list[LocalSupply] = []

    def plan(room: Room) -> Plan:
        opened.append(supply_of(request, room))
        return opened[0].plan()

    try:
        try:
            choice = choose_target(
                request,
                bases,
                plan,
                room=stager.room_without_idle,
                most=lambda base: stager.most_room(replace(request, target=base)),
                has=lambda target: stager.has(replace(request, target=target), opened[0]),
            )
            if choice.target == IN_PLACE:
                found = opened[0].plan() if opened else plan(NO_ROOM)
                return Outcome(request, _in_place(request, found, clock() - begin), choice)
        except OSError as error:
            raise StagingError(f"cannot read {shown(request.source)}: {why(error)}") from error
        chosen = replace(request, target=choice.target)
        return Outcome(chosen, stager.stage(chosen, opened[0]), choice)
    finally:
        for supply in opened:
            supply.close()


def _target(to: str) -> str:
    if to in _WORDS:
        return to
    if "/" not in to:
        raise InputError(
            "must be auto, shm, local or the path of a directory",
            field="--to",
            value=to,
            hint=f"a directory of that name: --to {_brief(f'./{to}')}" if to else "",
        )
    return os.path.abspath(to)


def _meant(word: str) -> str:
    near = nearest(word[:_WORD_CHARACTERS], _COMMANDS)
    if near:
        return f"did you mean `hpml stage {near}`? its options stand behind it"
    return f"`hpml stage` also has the commands {', '.join(_COMMANDS)}"


def _is_there(path: str) -> bool:
    """Say whether there is something at a path.

    Raises:
        StagingError: nobody could say, because a directory on the way is closed to this user.
    """
    try:
        os.lstat(path)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {_brief(path)}: {why(error)}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return False
    return True


def _brief(path: str) -> str:
    """Return a path for a message, the middle of an absurd one left out."""
    text = shown(path)
    if len(text) <= _PATH_CHARACTERS:
        return text
    half = _PATH_CHARACTERS // 2
    return f"{text[:half]}…{text[-half:]} ({len(text)} characters)"


def _in_place(request: StageRequest, plan: Plan, seconds: float) -> StageResult:
    path = os.path.realpath(request.source)
    return StageResult(
        name=request.name,
        path=path if os.path.isdir(path) else os.path.dirname(path),
        bytes=plan.bytes,
        files=plan.file_count,
        seconds=seconds,
        method=IN_PLACE,
        reused=False,
    )
