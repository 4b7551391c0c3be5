"""The whole ladder: what is made, where it is copied to, and how fast each way was."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.packing.rungs import made_pack, own_ways
from hpml_orchestrator.staging.capacity import file_system_type
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.ladder import (
    Data,
    Latency,
    Rung,
    Sizes,
    bench_directory,
    check_room_for,
    climb,
    make_data,
    open_latency,
)
from hpml_orchestrator.staging.peers import peers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Bench", "Sizes", "Target", "run_bench"]


@dataclass(frozen=True)
class Target:
    """A place that was copied to, its file system's type, and how fast each way was."""

    place: str
    type: str
    rungs: list[Rung]


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        machine: host, kernel, CPUs and load, in words.
        origin: where the data was read.
        origin_type: the type of its file system.
        data: what was copied.
        latency: of an open there.
        pack_seconds: making the pack of the small files, once.
        targets: in the order that was asked for.
        skipped: (place, why) of targets that cannot be used.
    """

    machine: str
    origin: str
    origin_type: str
    data: Data
    latency: Latency
    pack_seconds: float
    targets: list[Target]
    skipped: list[tuple[str, str]]


def run_bench(
    origin: str,
    targets: Sequence[tuple[str, str]],
    sizes: Sizes,
    should_stop: Callable[[], bool],
    say: Callable[[str], None] = lambda _text: None,
) -> Bench:
    """Make data, copy it everywhere in every way, and remove all of it.

    Args:
        origin: a directory to make the data in.
        targets: (what it was called, directory); of those that were not named as DIR, one that
            cannot be used is passed over.
        sizes: how much.
        should_stop: asked often.
        say: told what is being done.

    Raises:
        CapacityError: there is no room; found before anything is made.
        InputError: a directory cannot be used.
        StagingStopped: should_stop said so.
        StagingError: the data cannot be made, or something cannot be removed.
    """
    small = sizes.files * sizes.file_bytes
    check_room_for(origin, 2 * small + sizes.large_bytes, sizes.files, field="--from")
    usable, skipped = [], []
    for word, place in targets:
        try:
            if not place:
                raise InputError("this node has no local staging directory", field=word)
            check_room_for(place, max(small, sizes.large_bytes), sizes.files, field=word)
            if not os.access(place, os.W_OK | os.X_OK):
                raise InputError("nothing can be written there", field=word, value=place)
        except InputError as error:
            if word == "DIR":
                raise
            skipped.append((place or word, error.message))
            continue
        usable.append(place)
    with ExitStack() as stack:
        made = stack.enter_context(bench_directory(os.path.abspath(origin), field="--from"))
        say(f"making files in {shown(made)}")
        try:
            data = make_data(made, sizes, should_stop)
            latency = open_latency(data.small)
            packed = f"{made}/pack"
            pack_seconds = made_pack(data, packed)
        except OSError as error:
            raise StagingError(f"cannot write in {shown(made)}: {why(error)}") from error
        ways = peers(data.small, data.large, should_stop) + own_ways(data, packed, should_stop)
        found = []
        for place in usable:
            with bench_directory(os.path.abspath(place)) as target:
                say(f"copying to {shown(target)}")
                rungs = climb(ways, data, target, runs=sizes.runs, should_stop=should_stop)
            found.append(Target(os.path.abspath(place), _type(place), rungs))
    return Bench(
        _machine(),
        os.path.abspath(origin),
        _type(origin),
        data,
        latency,
        pack_seconds,
        found,
        skipped,
    )


def _type(place: str) -> str:
    return file_system_type(place) or "unknown"


def _machine() -> str:
    return (
        f"{platform.node()}, Linux {platform.release()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}"
    )
