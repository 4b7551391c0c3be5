"""How files are shared out: each exactly once, in batches of like effort."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.staging.batches import FILE_COST_BYTES, WHOLE, share_out
from hpml_orchestrator.staging.plan import Entry, Plan

MIB = 1 << 20


def plan_of(sizes: list[int]) -> Plan:
    files = [Entry(f"f{n}", 0o644, 0, size, size) for n, size in enumerate(sizes)]
    return Plan("/", Entry("", 0o755, 0), files=files)


@given(
    sizes=st.lists(st.integers(0, 10 * MIB), max_size=300),
    workers=st.integers(1, 64),
    streams=st.integers(1, 16),
    expected=st.booleans(),
)
def test_every_byte_is_in_one_batch(
    sizes: list[int], workers: int, streams: int, *, expected: bool
) -> None:
    """Whole files and pieces together are the plan, and no digest has the slot of another."""
    plan = plan_of(sizes)
    plan.expected = [bytes(16)] * len(sizes) if expected else []
    shares = share_out(plan, workers, piece_bytes=3 * MIB, streams=streams)
    whole: list[int] = []
    pieces: dict[int, int] = {}
    slots = []
    for batch in shares.batches:
        if batch.end == WHOLE:
            whole += range(batch.first, batch.last)
        else:
            assert batch.start == pieces.get(batch.first, 0)  # in order, without a gap
            pieces[batch.first] = batch.end
            slots.append(batch.slot)
    assert pieces == {n: size for n, size in enumerate(sizes) if size > 3 * MIB and not expected}
    assert sorted(whole + list(pieces)) == list(range(len(sizes)))
    assert sorted(slots + whole) == sorted(set(slots + whole))
    assert all(slot < shares.slots for slot in slots)


def test_batches_take_about_as_long() -> None:
    """One larger file weighs as many small ones; none has far more than its share."""
    sizes = [1000] * 5000 + [8 * MIB] * 40
    batches = share_out(plan_of(sizes), 2, piece_bytes=256 * MIB).batches
    costs = [
        sum(sizes[n] + FILE_COST_BYTES for n in range(batch.first, batch.last)) for batch in batches
    ]
    assert len(batches) > 16
    assert max(costs) < 2 * (sum(costs) / len(costs)) + 8 * MIB


def test_processes_work_in_different_parts() -> None:
    """Neighbours in the queue lie far apart in the tree."""
    batches = share_out(plan_of([1000] * 4000), 2, piece_bytes=MIB, streams=2).batches
    assert abs(batches[0].first - batches[1].first) > 1500
