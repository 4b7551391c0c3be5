"""Lists of nodes are opened and folded as Slurm reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.model import MAX_NODES, expand, fold


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[1-3,7]", ("node1", "node2", "node3", "node7")),
        ("gpu[09-11]", ("gpu09", "gpu10", "gpu11")),
        ("gpu[1-2]-ib[0-1]", ("gpu1-ib0", "gpu1-ib1", "gpu2-ib0", "gpu2-ib1")),
        ("a,b,a", ("a", "b")),
        ("login,node[1-2]", ("login", "node1", "node2")),
        ("n[1-2].cluster.site", ("n1.cluster.site", "n2.cluster.site")),
    ],
)
def test_a_list_is_opened(text: str, nodes: tuple[str, ...]) -> None:
    """Every node once, zeros in front kept, also with two ranges in one name."""
    assert expand(text) == nodes


@pytest.mark.parametrize(
    "text",
    ["node[", "node[1-", "node[a-b]", "@all", "a!b", "a b", "node[3-1]", ",", "a,,b", "n[1-3/2]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    """Also what ClusterShell would take as a group, a set operation or a step."""
    with pytest.raises(InputError) as caught:
        expand(text)
    assert caught.value.value == text


def test_a_list_that_would_fill_memory_is_refused() -> None:
    """The size is counted before any name is made."""
    with pytest.raises(InputError, match="more than 65,536"):
        expand("n[0-999]-[0-999]")
    assert len(expand(f"n[1-{MAX_NODES}]")) == 65_536


def test_names_are_folded() -> None:
    """Into the form that `srun --nodelist` and `sinfo --nodes` take."""
    assert fold(["node3", "node1", "node2", "login"]) == "login,node[1-3]"
    assert fold(["gpu10", "gpu09"]) == "gpu[09-10]"
    assert fold([]) == ""
    assert fold(["one"]) == "one"
    with pytest.raises(InputError):
        fold(["node1", "node[2-3]"])


@given(st.text(alphabet="an0123456789-,[].@!^/ ", max_size=30))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    """No other error than ours comes out."""
    try:
        nodes = expand(text)
    except InputError:
        return
    assert len(set(nodes)) == len(nodes)
