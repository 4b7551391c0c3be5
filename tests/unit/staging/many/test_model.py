"""How long each way takes by the model, and which is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.distribution import METHODS, Rates, choose, seconds_of

sizes = some.integers(0, 1 << 50)
counts = some.integers(0, 100_000_000)
jobs = some.integers(1, 4096)
speeds = some.floats(1e6, 1e12)
rates = some.builds(
    Rates,
    shared_rate=speeds,
    node_rate=speeds,
    link_rate=speeds,
    disk_rate=speeds,
    metadata_rate=some.floats(100, 1e7),
    open_seconds=some.floats(1e-6, 0.1),
    parallel=some.integers(1, 256),
)
RATE_NAMES = ("shared_rate", "node_rate", "link_rate", "disk_rate", "metadata_rate")
EASE = 1 + 1e-9  # floating point


@given(some.sampled_from(METHODS), sizes, counts, jobs, rates)
def test_seconds_are_a_time(method: str, size: int, files: int, nodes: int, known: Rates) -> None:
    """Finite and not negative, whatever is given."""
    found = seconds_of(method, size=size, files=files, nodes=nodes, rates=known)
    assert 0 <= found < float("inf")


@given(some.sampled_from(METHODS), sizes, counts, jobs, rates, some.integers(1, 1 << 40))
def test_more_data_takes_no_less(
    method: str, size: int, files: int, nodes: int, known: Rates, more: int
) -> None:
    """Neither more bytes nor more files are faster."""
    base = seconds_of(method, size=size, files=files, nodes=nodes, rates=known)
    assert (
        base <= seconds_of(method, size=size + more, files=files, nodes=nodes, rates=known) * EASE
    )
    assert (
        base <= seconds_of(method, size=size, files=files + more, nodes=nodes, rates=known) * EASE
    )


@given(
    some.sampled_from(METHODS), sizes, counts, jobs, rates,
    some.sampled_from(RATE_NAMES), some.floats(1, 100),
)  # fmt: skip
def test_better_hardware_takes_no_longer(
    method: str, size: int, files: int, nodes: int, known: Rates, name: str, times: float
) -> None:
    """Whichever rate grows."""
    better = replace(known, **{name: getattr(known, name) * times})
    before = seconds_of(method, size=size, files=files, nodes=nodes, rates=known)
    assert seconds_of(method, size=size, files=files, nodes=nodes, rates=better) <= before * EASE


@given(some.sampled_from(METHODS), sizes, counts, jobs, rates)
def test_more_nodes_take_no_less(
    method: str, size: int, files: int, nodes: int, known: Rates
) -> None:
    """Every node has all of the data."""
    few = seconds_of(method, size=size, files=files, nodes=nodes, rates=known)
    assert few <= seconds_of(method, size=size, files=files, nodes=nodes + 1, rates=known) * EASE


@given(sizes, counts, jobs, rates)
def test_the_choice_is_never_much_worse_than_reading(
    size: int, files: int, nodes: int, known: Rates
) -> None:
    """One node reads for itself."""
    choice = choose(size=size, files=files, nodes=nodes, rates=known)
    assert choice.seconds[choice.method] <= choice.seconds["shared"] or nodes == 1
    assert "\n" not in choice.reason
    if nodes == 1:
        assert choice.method == "shared"


@given(some.integers(1 << 41, 1 << 50), counts, rates)
def test_a_chain_wins_in_the_end(size: int, files: int, known: Rates) -> None:
    """Where the file system is the limit, reading grows with the nodes, the chain hardly."""
    slowest = min(getattr(known, name) for name in RATE_NAMES[:4])
    one_node = known.parallel / known.open_seconds
    opens = min(known.metadata_rate, one_node)  # or the one that reads would be the limit
    known = replace(known, shared_rate=slowest, metadata_rate=opens)
    assert choose(size=size, files=files, nodes=1024, rates=known).method == "chain"


def test_by_hand() -> None:
    """100 GB in a million files to 64 nodes: 1,280 s of bytes and 3,200 s of opens, or 101 s."""
    known = Rates(5e9, 2.5e9, 2.5e9, 2e9, 20_000, 1e-3, 64)
    many = {"size": 100 * 10**9, "files": 1_000_000, "nodes": 64, "rates": known}
    assert seconds_of("shared", **many) == pytest.approx(1280 + 3200)  # type: ignore[arg-type]
    chain = 0.5 + 50 + 50 + 63 * ((4 << 20) / 2.5e9 + 1e-3)
    assert seconds_of("chain", **many) == pytest.approx(chain)  # type: ignore[arg-type]
    choice = choose(**many)  # type: ignore[arg-type]
    assert choice.method == "chain"
    assert choice.reason == (
        "chain: 93.1 GiB in 1000000 files to 64 nodes, by the model shared 4480.0 s, chain 100.7 s"
    )


def test_small_data_is_read_by_every_node() -> None:
    """The chain's start takes longer than reading a few files."""
    assert choose(size=1 << 20, files=10, nodes=4).method == "shared"


def test_what_is_asked_for_is_taken() -> None:
    """Also what the model finds slow; anything else is refused with the field's name."""
    for method in METHODS:
        assert choose(size=1, files=1, nodes=2, wanted=method).method == method
    assert choose(size=1, files=1, nodes=1, wanted="chain").method == "shared"
    with pytest.raises(InputError, match="must be auto or one of shared, chain") as caught:
        choose(size=1, files=1, nodes=2, wanted="tree")
    assert caught.value.field == "distribution"


def test_the_page_prints_what_the_model_says() -> None:
    """The line of docs/staging.md is that of these data, with rates that nobody has told."""
    found = choose(size=round(137.6 * 2**30), files=1_281_167, nodes=16)
    page = (Path(__file__).parents[4] / "docs" / "staging.md").read_text(encoding="utf-8")
    assert f"hpml: images: {found.reason}" in page
