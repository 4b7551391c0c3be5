"""Constraints are read as Slurm 22.05 was seen to read them; the cases are from a real one."""

from __future__ import annotations

import pytest

from hpml_orchestrator.check.constraint import features_of, malformed, matches

CPU = frozenset({"cpu", "avx512", "rack1"})
NODES = [CPU, CPU, frozenset({"gpu", "avx512", "rack2"}), frozenset({"gpu", "rack2"})]


@pytest.mark.parametrize(
    ("wish", "nodes", "taken"),
    [
        ("avx512", 3, True),
        ("avx512&rack2", 1, True),
        ("cpu&rack2", 1, False),
        ("cpu|rack2", 4, True),
        ("rack1", 3, False),
        ("[rack1|rack2]", 2, True),
        ("[rack1|rack2]", 3, False),
        ("[rack1]", 2, True),
        ("[rack1]", 4, False),
        ("[rack1*2&rack2*1]", 3, True),
        ("[rack1*2&rack2*2]", 3, False),
        ("[(cpu&avx512)*2&rack2*1]", 3, True),
        ("[avx512*3&rack2*1]", 4, True),
        ("[avx512*1&gpu*1]", 2, True),
        ("[cpu*3&gpu*1]", 4, False),
        ("rack1*2", 3, True),
        ("rack1*3", 4, False),
        ("rack1*2", 1, False),
        ("rack1*1", 2, True),
        ("(cpu|gpu)&avx512", 2, True),
        ("(cpu|gpu)&avx512", 4, False),
        ("gpu|cpu&rack1", 2, True),
        ("gpu|cpu&rack1", 4, False),
        ("gpu|cpu&rack2", 4, False),
        ("rack1|rack2&gpu", 4, False),
        ("cpu&rack1|gpu", 4, True),
        ("rack1*2&avx512", 3, None),
        ("[(cpu|gpu)*2&rack1*1]", 3, None),
        ("[rack1*1&rack2*1]", 3, None),
        ("(cpu)*2&(gpu)*1", 3, None),
    ],
)
def test_a_constraint_is_met_or_not(wish: str, nodes: int, taken: bool | None) -> None:
    """As sbatch answered; None is what is left to Slurm."""
    assert matches(wish, NODES, nodes) is taken


def test_the_features_that_are_named() -> None:
    """Each once, without counts and signs."""
    assert features_of("[(rack1&a-b)*2&rack2*14]|rack1") == ["rack1", "a-b", "rack2"]


@pytest.mark.parametrize("wish", ["(cpu", "cpu)", "[cpu|gpu", ")cpu(", "[cpu&rack1]"])
def test_a_form_that_slurm_refuses(wish: str) -> None:
    """Brackets that do not close; `&` in square brackets without counts."""
    assert malformed(wish)


@pytest.mark.parametrize("wish", ["cpu", "(cpu|gpu)&x", "[a|b]", "[a*1&b*2]", "[(a&b)*2&c*1]"])
def test_a_form_that_slurm_takes(wish: str) -> None:
    """Nothing is said of it."""
    assert malformed(wish) == ""
