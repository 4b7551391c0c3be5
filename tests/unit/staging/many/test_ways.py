"""From what a job asks for to what each node does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.staging.many.nodes import Nodes


@pytest.mark.parametrize(("rate", "method"), [(1e5, "chain"), (1e12, "copy")])
def test_the_first_node_chooses_for_all(
    job: Callable[..., Nodes], big: Path, rate: float, method: str
) -> None:
    """By the model; one line gives the choice and the reason."""
    nodes = job(big, 3, method="auto", rates={"shared_rate": rate, "metadata_rate": 1e9})
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert {end["method"] for end in ends} == {method}
    assert ends[0]["reported"].startswith("data: ")
    assert "64.0 MiB in 16 files to 3 nodes, by the model shared" in ends[0]["reported"]
    assert "reported" not in ends[1]


def test_one_node_reads_for_itself(job: Callable[..., Nodes], tree: Path) -> None:
    """Whatever was requested; nothing is printed."""
    for method in ("auto", "chain"):
        nodes = job(tree, 1, method=method)
        nodes.attempt = method
        nodes.start()
        end = nodes.ends()[0]
        assert end["status"] == 0
        assert "reported" not in end


def test_a_choice_that_fails_is_told(job: Callable[..., Nodes], tree: Path) -> None:
    """The others do not wait for a first node that cannot look at the source."""
    os.mkfifo(tree / "fifo")
    nodes = job(tree, 2, method="auto")
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8], ends
    assert "is a device, fifo or socket" in ends[1]["error"]
