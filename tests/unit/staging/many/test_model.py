"""How long each way takes by the model, and which is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.distribution import METHODS, Rates, choose, seconds_of


def test_by_hand() -> None:
    """100 GB in a million files to 64 nodes: 1,280 s of bytes and 3,200 s of opens, or 101 s."""
    known = Rates(5e9, 2.5e9, 2e9, 20_000)
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
    """The line of docs/staging.md is that of these data, with the default rates."""
    found = choose(size=round(137.6 * 2**30), files=1_281_167, nodes=16)
    page = (Path(__file__).parents[4] / "docs" / "staging.md").read_text(encoding="utf-8")
    assert f"hpml: images: {found.reason}" in page
