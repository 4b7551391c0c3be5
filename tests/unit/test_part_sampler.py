"""The sampler of the copyable reader knows whether a node has all data or its part."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from training_jobs.hpml_packed import PartSampler


def ranks(world: int, local: int, *, partition: bool) -> list[dict[str, str]]:
    """The environments of all ranks of a job."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            **({"HPML_PART_DATA": f"{rank // local}/{world // local}"} if partition else {}),
        }
        for rank in range(world)
    ]


def drawn(items: int, env: dict[str, str], **options: Any) -> list[int]:
    """What a rank gets in an epoch."""
    sampler = PartSampler(range(items), "data", environment=env, **options)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


@given(some.integers(1, 300), some.integers(1, 5), some.integers(1, 4), some.booleans())
def test_without_a_part_all_ranks_share_everything(
    items: int, nodes: int, local: int, shuffle: bool
) -> None:
    """Every item is drawn, by no more ranks than it takes to come out even."""
    world = nodes * local
    found = [drawn(items, env, shuffle=shuffle) for env in ranks(world, local, partition=False)]
    assert {len(one) for one in found} == {-(-items // world)}
    everything = [item for one in found for item in one]
    assert set(everything) == set(range(items))
    assert max(map(everything.count, set(everything))) <= -(-len(everything) // items)


@given(some.integers(1, 200), some.integers(2, 5), some.integers(1, 4))
def test_with_a_part_the_ranks_of_a_node_share_it(items: int, nodes: int, local: int) -> None:
    """Each node's ranks draw all of the node's items; all ranks of the job equally many."""
    found = [drawn(items, env) for env in ranks(nodes * local, local, partition=True)]
    assert len({len(one) for one in found}) == 1
    for node in range(nodes):
        mine = found[node * local : (node + 1) * local]
        assert {item for one in mine for item in one} == set(range(items))


def test_epochs_have_orders_of_their_own() -> None:
    """The same on all ranks of an epoch, another one in the next."""
    env = ranks(1, 1, partition=False)[0]
    sampler = PartSampler(range(100), "data", environment=env)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again != list(sampler)
    assert sorted(first) == list(range(100))


def test_unequal_parts_can_be_made_equal() -> None:
    """With the largest part's length all nodes go on for equally many steps."""
    first, second = ranks(2, 1, partition=True)
    assert len(drawn(10, first, length=12)) == len(drawn(12, second, length=12)) == 12


def test_an_empty_data_set_gives_nothing() -> None:
    """No item, no step."""
    assert drawn(0, {}) == []
