"""Lists of nodes in Slurm's compact form, `gpu[01-16]-ib[0-1],login1`, by ClusterShell."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["expand", "fold"]

MAX_NODES = 65_536  # as many as Slurm itself takes in one list
_HINT = "a list of nodes looks like node[1-3,7],login1"
_NAME = r"[A-Za-z0-9_.\-]"
_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_ENTRY = rf"(?:{_NAME}|{_RANGES})+"
_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Return the names of a list of nodes, each once; numbers in order, zeros in front kept.

    Raises:
        InputError: it is no list of nodes, or names more than 65,536.

    >>> expand("node[1-3,7]")
    ('node1', 'node2', 'node3', 'node7')
    >>> expand("gpu[01-02]-ib[0-1]")
    ('gpu01-ib0', 'gpu01-ib1', 'gpu02-ib0', 'gpu02-ib1')
    """
    text = text.strip()
    if not text:
        return ()
    if not _LIST.fullmatch(text):
        raise InputError("is no list of nodes", field="nodes", value=text, hint=_HINT)
    if "[" not in text:
        return tuple(dict.fromkeys(text.split(",")))
    _check_size(text)
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415

    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except (NodeSetException, ValueError) as error:
        raise InputError("is no list of nodes", field="nodes", value=text, hint=_HINT) from error


def fold(nodes: Iterable[str]) -> str:
    """Return names of nodes as a list in compact form.

    Raises:
        InputError: one of them is no name of a node.

    >>> fold(["node3", "node1", "node2", "login"])
    'login,node[1-3]'
    """
    wanted = list(dict.fromkeys(nodes))
    for name in wanted:
        if not re.fullmatch(f"{_NAME}+", name, re.ASCII):
            raise InputError("is no name of a node", field="nodes", value=name, hint=_HINT)
    if len(wanted) < 2:  # noqa: PLR2004 - nothing to fold
        return "".join(wanted)
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415

    try:
        return str(NodeSet.fromlist(wanted, resolver=RESOLVER_NOGROUP))
    except (NodeSetException, ValueError) as error:  # pragma: no cover - names are checked above
        raise InputError("are no names of nodes", field="nodes", hint=_HINT) from error


def _check_size(text: str) -> None:
    """Refuse `node[1-999999999]` before anybody makes a list of it."""
    total = 0
    for entry in re.findall(_ENTRY, text):
        sizes = []
        for ranges in re.findall(_RANGES, entry):
            size = 0
            for part in ranges[1:-1].split(","):
                first, _, last = part.partition("-")
                size += int(last or first) - int(first) + 1
                if int(last or first) < int(first):
                    raise InputError(
                        "has a range that runs backwards", field="nodes", value=text, hint=_HINT
                    )
            sizes.append(size)
        total += prod(sizes)
        if total > MAX_NODES:
            raise InputError(
                f"names more than {MAX_NODES:,} nodes", field="nodes", value=text, hint=_HINT
            )
