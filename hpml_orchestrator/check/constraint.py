"""What `--constraint` asks for, read as Slurm reads it.

Seen with 22.05: operators are taken from left to right, `&` does not bind closer than `|`;
parentheses come first. `[a|b]` wants one of them on all nodes; `[a*2&b*1]` wants so many nodes of
each, all in all those of the job; `a*2` wants at least two such nodes among all. What mixes these,
and counts that do not add up to all nodes, are Slurm's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["features_of", "malformed", "matches", "per_node"]

Features: TypeAlias = frozenset[str]
_NAME = re.compile(r"[^\[\]()&|*]+")
_COUNT = re.compile(r"\*\d+")
_COUNTED = re.compile(r"(\([^()]*\)|[^\[\]()&|*]+)\*(\d+)")


def features_of(constraint: str) -> list[str]:
    """Return the features that it names.

    >>> features_of("[(rack1|rack2)*1&(rack3)*2]")
    ['rack1', 'rack2', 'rack3']
    """
    return list(dict.fromkeys(_NAME.findall(_COUNT.sub("", _plain(constraint)))))


def _plain(constraint: str) -> str:
    """Return it with `&` for the comma, which means the same."""
    return constraint.replace(",", "&")


def malformed(constraint: str) -> str:
    """Return what is wrong with its form; empty where nothing is."""
    depth = 0
    for letter in constraint:
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            break
    if depth:
        return "has brackets that do not close"
    inner = re.fullmatch(r"\[(.*)\]", constraint)
    if inner and "&" in re.sub(r"\([^()]*\)", "", inner[1]) and "*" not in constraint:
        return "needs a count for each feature that & joins in square brackets, as [a*1&b*2]"
    return ""


def per_node(constraint: str) -> Callable[[Features], bool] | None:
    """Return whether a node's features will do, where that can be told of each node alone."""
    constraint = _plain(constraint)
    if any(letter in constraint for letter in "[]*"):
        return None
    parts = re.findall(r"[()&|]|[^()&|]+", constraint)
    return lambda features: _value(list(parts), features)


def matches(constraint: str, nodes: Sequence[Features], wanted: int) -> bool | None:
    """Return whether `wanted` of these nodes satisfy it together; None where only Slurm knows."""
    constraint = _plain(constraint)
    alone = per_node(constraint)
    if alone is not None:
        return sum(map(alone, nodes)) >= wanted
    counted = _COUNTED.fullmatch(constraint)
    if counted:
        return _at_least(counted[1], int(counted[2]), nodes, wanted)
    inner = re.fullmatch(r"\[([^\[\]]*)\]", constraint)
    if not inner:
        return None
    if "*" not in inner[1]:
        return _one_for_all(inner[1], nodes, wanted)
    terms = re.split(r"&(?![^()]*\))", inner[1])
    parts = [_COUNTED.fullmatch(term) for term in terms]
    if "|" in inner[1] or None in parts:
        return None
    wishes = [(part[1], int(part[2])) for part in parts if part]
    return _so_many_of_each(wishes, nodes, wanted)


def _value(parts: list[str], features: Features) -> bool:
    """Evaluate from left to right, up to the end or a closing parenthesis; uses the parts up."""
    result, operator = False, "|"
    while parts:
        part = parts.pop(0)
        if part == ")":
            break
        if part in "&|":
            operator = part
            continue
        value = _value(parts, features) if part == "(" else part in features
        result = (result and value) if operator == "&" else (result or value)
    return result


def _at_least(term: str, count: int, nodes: Sequence[Features], wanted: int) -> bool | None:
    has = per_node(term)
    if has is None:
        return None
    return count <= wanted <= len(nodes) and sum(map(has, nodes)) >= count


def _one_for_all(inner: str, nodes: Sequence[Features], wanted: int) -> bool | None:
    options = [per_node(option) for option in re.split(r"\|(?![^()]*\))", inner)]
    return any(sum(map(option, nodes)) >= wanted for option in options if option is not None)


def _so_many_of_each(
    wishes: Sequence[tuple[str, int]], nodes: Sequence[Features], wanted: int
) -> bool | None:
    """Whether so many different nodes of each kind can be found: a matching, path by path."""
    tests = [per_node(term) for term, count in wishes for _ in range(count)]
    if len(tests) < wanted:
        return None  # seen taken and seen refused
    if len(tests) > wanted:
        return False
    taken: dict[int, int] = {}

    def find(wish: int, seen: set[int]) -> bool:
        test = tests[wish]
        for index, features in enumerate(nodes):
            if index in seen or test is None or not test(features):
                continue
            seen.add(index)
            if index not in taken or find(taken[index], seen):
                taken[index] = wish
                return True
        return False

    return all(find(wish, set()) for wish in range(len(tests)))
