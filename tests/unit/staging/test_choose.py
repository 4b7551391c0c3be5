"""Target `auto`: what fits and pays is chosen, and the answer says why not the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.errors import CapacityError, InputError
from hpml_orchestrator.staging.capacity import Need, Room
from hpml_orchestrator.staging.choose import (
    Candidate,
    Choice,
    Origin,
    choose,
    room_for_data,
)
from hpml_orchestrator.staging.request import IN_PLACE

GIB = 1 << 30
FAR = Origin("/scratch/data")


def room(size: int, *, memory: bool = False, inodes: int | None = None) -> Room:
    return Room(size, "a limit", inodes, 4096, memory)


def place(
    target: str,
    need: int,
    free: int,
    inodes: int | None = None,
    *,
    epoch: float | None = None,
    stage: float | None = None,
) -> Candidate:
    found = room(free, memory=target == "shm", inodes=inodes)
    return Candidate(
        target, f"/{target}", Need(need, 10), found, epoch_seconds=epoch, stage_seconds=stage
    )


def test_ram_comes_first() -> None:
    """What fits into half of the free memory goes there."""
    found = choose(FAR, [place("shm", GIB, 2 * GIB), place("local", GIB, 9 * GIB)])
    assert found.target == "shm"
    assert found.why == "1.0 GiB fit in the 1.0 GiB, half of what is free"
    assert found.others == (
        ("local", "shm comes first"),
        (IN_PLACE, "every epoch would read from afar"),
    )


def test_the_jobs_own_memory_is_left_alone() -> None:
    """More than half of what is free is not taken, though it would fit."""
    found = choose(FAR, [place("shm", GIB + 1, 2 * GIB), place("local", GIB + 1, GIB + 1)])
    assert found.target == "local"
    assert found.others[0] == (
        "shm",
        "needs 1.0 GiB, and half of what is free is 1.0 GiB (a limit)",
    )


def test_inodes_count() -> None:
    """A file system without room for the names is not chosen."""
    found = choose(FAR, [place("shm", 1, GIB), place("local", 1, GIB)])
    assert found.target == "shm"
    found = choose(FAR, [place("shm", 1, GIB, 9), place("local", 1, GIB)])
    assert found.target == "local"
    assert found.others[0] == ("shm", "needs 10 inodes, and 9 are free")


def test_what_fits_nowhere_stays() -> None:
    """The data is used where it is; an archive that must be unpacked is an error."""
    candidates = [place("shm", 3 * GIB, GIB), place("local", 3 * GIB, GIB)]
    found = choose(FAR, candidates)
    assert (found.target, found.why) == (IN_PLACE, "nothing fits")
    assert [target for target, _ in found.others] == ["shm", "local"]
    with pytest.raises(CapacityError, match="shm: needs 3.0 GiB.*local: needs.*must be unpacked"):
        choose(Origin("/scratch/a.tar", usable=False), candidates)
    nowhere = [Candidate(one, "", refused="is not there") for one in ("shm", "local")]
    with pytest.raises(InputError, match="shm: is not there; local: is not there") as caught:
        choose(Origin("/scratch/a.tar", usable=False), nowhere)
    assert not isinstance(caught.value, CapacityError)


def test_own_fast_storage_is_left() -> None:
    """Data on the node's own disk is not copied; an archive there is unpacked all the same."""
    here = Origin("/tmp/data", own="disk (ext4)")
    candidates = [place("shm", 1, GIB), place("local", 1, GIB)]
    found = choose(here, candidates)
    assert (found.target, found.why) == (IN_PLACE, "it is on this node's own disk (ext4) already")
    assert dict(found.others) == dict.fromkeys(("shm", "local"), found.why)
    archive = choose(Origin("/tmp/a.tar", own="disk (ext4)", usable=False), candidates)
    assert archive.target == "shm"
    assert archive.others[-1] == (IN_PLACE, "it must be unpacked")


def test_it_has_to_pay() -> None:
    """What pays: epochs * (t_remote - t_local) > t_stage, with what was measured."""
    slow = Origin("/scratch/data", epoch_seconds=10.0)
    candidates = [place("shm", 1, GIB, epoch=1.0, stage=18.0)]
    assert choose(slow, candidates, epochs=2).target == IN_PLACE  # 18 + 2 against 20
    found = choose(slow, candidates, epochs=3)
    assert found.target == "shm"
    assert "3 epochs: 21 s with staging, 30 s without" in found.why
    assert choose(slow, candidates).target == "shm"  # epochs are not known
    assert choose(FAR, candidates, epochs=1).target == "shm"  # the source was not measured
    stays = choose(slow, candidates, epochs=1)
    assert stays.why == "staging does not pay"
    assert stays.others == (("shm", "1 epoch from there: 19 s with staging, 10 s without"),)


def test_the_least_time_in_all_wins() -> None:
    """With epochs, a disk that is faster than the RAM is taken; odd, but measured."""
    slow = Origin("/scratch/data", epoch_seconds=10.0)
    candidates = [
        place("shm", 1, GIB, epoch=2.0, stage=5.0),
        place("local", 1, GIB, epoch=1.0, stage=5.0),
    ]
    found = choose(slow, candidates, epochs=10)
    assert found.target == "local"
    assert found.others[0] == ("shm", "takes 25 s in all, local 15 s")


SIZES = st.integers(min_value=0, max_value=1 << 44)
SECONDS = st.none() | st.floats(min_value=0, max_value=1e6)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    need = Need(draw(SIZES), draw(st.integers(0, 1 << 24)), draw(st.booleans()))
    found = []
    for target in ("shm", "local"):
        known = draw(st.booleans())
        inodes = draw(st.none() | st.integers(0, 1 << 24))
        found.append(
            Candidate(
                target,
                f"/{target}",
                need if known else None,
                Room(draw(SIZES), "a limit", inodes, 4096, draw(st.booleans())) if known else None,
                draw(st.sampled_from(["", "", "", "cannot be written"])),
                draw(SECONDS),
                draw(SECONDS),
            )
        )
    return found


def origins() -> st.SearchStrategy[Origin]:
    return st.builds(
        Origin,
        where=st.just("/scratch/data"),
        own=st.sampled_from(["", "", "disk (ext4)"]),
        usable=st.booleans(),
        epoch_seconds=SECONDS,
    )


EPOCHS = st.none() | st.integers(1, 10_000)


def chosen(origin: Origin, places: list[Candidate], epochs: int | None) -> Choice | None:
    try:
        return choose(origin, places, epochs=epochs)
    except InputError:
        assert not origin.usable
        return None


@given(origins(), candidates(), EPOCHS)
def test_what_does_not_fit_is_never_chosen(
    origin: Origin, places: list[Candidate], epochs: int | None
) -> None:
    """Not in bytes, not in inodes, not in more than half of the memory, not where it is refused."""
    found = chosen(origin, places, epochs)
    if found is None or found.target == IN_PLACE:
        return
    (one,) = [one for one in places if one.target == found.target]
    assert not one.refused
    assert one.need is not None
    assert one.room is not None
    assert one.need.bytes <= room_for_data(one.room) <= one.room.bytes
    assert one.room.inodes is None or one.need.inodes <= one.room.inodes
    if one.room.in_memory:
        assert one.need.bytes * 2 <= one.room.bytes


@given(origins(), candidates(), EPOCHS)
def test_an_answer_says_why_and_why_not(
    origin: Origin, places: list[Candidate], epochs: int | None
) -> None:
    """Every target is there once: chosen with a reason, or not chosen with one."""
    found = chosen(origin, places, epochs)
    if found is None:
        return
    targets = [found.target, *(target for target, _ in found.others)]
    assert sorted(targets) == sorted({"shm", "local", IN_PLACE})
    assert all([found.why, *(why for _, why in found.others)])


@given(origins(), candidates(), EPOCHS)
def test_an_archive_is_never_left_packed(
    origin: Origin, places: list[Candidate], epochs: int | None
) -> None:
    """What a training cannot read where it is goes somewhere, or is an error."""
    found = chosen(origin, places, epochs)
    if found is not None and not origin.usable:
        assert found.target != IN_PLACE


@given(origins(), candidates(), st.integers(1, 10_000))
def test_what_was_measured_as_a_loss_is_not_chosen(
    origin: Origin, places: list[Candidate], epochs: int
) -> None:
    """Whatever is known of the times is kept to."""
    found = chosen(origin, places, epochs)
    if found is None or found.target == IN_PLACE or not origin.usable:
        return
    (one,) = [one for one in places if one.target == found.target]
    if None in (one.stage_seconds, one.epoch_seconds, origin.epoch_seconds):
        return
    assert one.stage_seconds is not None
    assert one.epoch_seconds is not None
    assert origin.epoch_seconds is not None
    assert one.stage_seconds + epochs * one.epoch_seconds < epochs * origin.epoch_seconds
