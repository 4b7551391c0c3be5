"""Lists of nodes in Slurm's compact form, `gpu[01-16]-ib[0-1],login1`, by ClusterShell."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ClusterShell.NodeSet import NodeSet

MAX_NODES = 65_536  # as many as Slurm itself takes in one list
_HINT = "a list of nodes looks like node[1-3,7],login1"
_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_ENTRY = rf"(?:[A-Za-z0-9_.\-]|{_RANGES})+"
_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Return the names in a list of nodes, each once, in numerical order, leading zeros kept.

    Raises:
        InputError: it is not a list of nodes, or names more than 65,536.

    >>> expand("node[1-3,7]")
    ('node1', 'node2', 'node3', 'node7')
    >>> expand("gpu[01-02]-ib[0-1]")
    ('gpu01-ib0', 'gpu01-ib1', 'gpu02-ib0', 'gpu02-ib1')
    """
    text = text.strip()
    if not text:
        return ()
    # ClusterShell's grammar is wider than Slurm's: `@name` is a group there, and `!` and `&`
    # are set operations. Let only plain lists through.
    if not _LIST.fullmatch(text):
        raise InputError("is not a list of nodes", field="nodes", value=text, hint=_HINT)
    if "[" not in text:
        return tuple(dict.fromkeys(text.split(",")))
    entries = re.findall(_ENTRY, text)
    # Count before expanding: `n[1-999999999]` would fill the memory before ClusterShell returned.
    if sum(prod(map(_size, re.findall(_RANGES, entry))) for entry in entries) > MAX_NODES:
        message = f"names more than {MAX_NODES:,} nodes"
        raise InputError(message, field="nodes", value=text, hint=_HINT)
    return tuple(_node_set(text))


def fold(nodes: Iterable[str]) -> str:
    """Return names of nodes as a list in compact form.

    Raises:
        InputError: one of them is not the name of a node.

    >>> fold(["node3", "node1", "node2", "login"])
    'login,node[1-3]'
    """
    names = list(dict.fromkeys(nodes))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name, re.ASCII):
            raise InputError("is not the name of a node", field="nodes", value=name, hint=_HINT)
    return str(_node_set(",".join(names))) if len(names) > 1 else "".join(names)


def _node_set(text: str) -> NodeSet:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - slow

    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except (NodeSetException, ValueError) as error:
        raise InputError("is not a list of nodes", field="nodes", value=text, hint=_HINT) from error


def _size(ranges: str) -> int:
    """Return how many numbers `[1-3,7]` stands for, without expanding it."""
    spans = (part.partition("-") for part in ranges[1:-1].split(","))
    return sum(max(int(last or first) - int(first) + 1, 1) for first, _, last in spans)
