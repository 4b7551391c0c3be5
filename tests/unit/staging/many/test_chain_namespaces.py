"""A chain between four network namespaces: real addresses, a real cable to pull."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import eventually
from tests.unit.staging.conftest import same
from tests.unit.staging.many.networks import Network, NoNetworkError
from tests.unit.staging.many.nodes import SLOW_SOURCE, Nodes, begun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    """Give four joined namespaces; skips if they are not available."""
    try:
        with Network(4) as made:
            yield made
    except NoNetworkError as error:
        pytest.skip(f"NO NETWORK NAMESPACES: {error}")


def start(nodes: Nodes, network: Network, **options: object) -> None:
    """Start all nodes, each in its namespace."""
    for index in range(nodes.count):
        prefix = network.prefix(index)
        nodes.start(index, prefix=prefix, interfaces=["nosuch", "eth0"], **options)


def test_the_chain_uses_the_interface_that_was_named(
    job: Callable[..., Nodes], big: Path, network: Network
) -> None:
    """All nodes get the data at that address; while data come, none listens for others."""
    nodes = job(big, 4)
    start(nodes, network, before=SLOW_SOURCE)
    eventually(begun(nodes, 3))
    for index in range(1, 4):
        words = [*network.prefix(index), "ss", "-Hant"]
        found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        sockets = [line.split() for line in found.splitlines()]
        assert {one[3].rpartition(":")[0] for one in sockets} == {network.address(index)}
        assert "LISTEN" not in {one[0] for one in sockets}
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * 4, ends
    assert len({end["digest"] for end in ends}) == 1
    assert all(same(big, nodes.data(index)) for index in range(4))


def test_without_an_interface_the_node_list_counts(
    job: Callable[..., Nodes], tree: Path, network: Network
) -> None:
    """Nodes reach one another by the names of the node list, which are addresses here."""
    nodes = job(tree, 2)
    for index in range(2):
        name = network.address(index)
        nodes.start(index, prefix=network.prefix(index), interfaces=["nosuch"], node=name)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0], ends


def test_a_pulled_cable_is_noticed(job: Callable[..., Nodes], big: Path, network: Network) -> None:
    """Packets of a node are lost: after the timeout all nodes end and name a neighbour."""
    nodes = job(big, 4, timeout=2.0)
    start(nodes, network, before=SLOW_SOURCE)
    eventually(begun(nodes, 3))
    network.cut(2)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8] * 4, ends
    assert "n2" in ends[0]["error"]
    assert "n2" in ends[1]["error"]
    assert "n2" in ends[3]["error"]
    assert not any(nodes.data(index).exists() for index in range(4))
    assert nodes.leftovers() == []
