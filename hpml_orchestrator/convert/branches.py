"""What depends on tests: chains of commands, and branches that are not walked through."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.commands import HANDLERS, PREPARES
from hpml_orchestrator.convert.syntax import Branches, Command, Loop, Script

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.convert.syntax import Item, Node

__all__ = ["acts", "chains", "joined", "sets"]

_SETS = frozenset("export declare typeset local readonly".split())
_READS = frozenset("read mapfile readarray unset".split())
_ACTS = (HANDLERS.keys() | PREPARES.keys()) - frozenset("set unset rm mkdir trap".split())


def sets(bodies: Iterable[Script]) -> dict[str, int]:
    """Return the variables that the bodies may set, and where."""
    found: dict[str, int] = {}
    for command in _commands(bodies):
        name = command.words[0].source if command.words else ""
        if not command.words or name in _SETS:
            for one in command.assignments:
                found.setdefault(one.name, one.line)
        if name in _READS:
            for word in command.words[1:]:
                if word.source.isidentifier():
                    found.setdefault(word.source, command.line)
    return found


def acts(bodies: Iterable[Script]) -> bool:
    """Say whether the bodies do what matters to a job file: modules, directories, exports."""
    for command in _commands(bodies):
        name = os.path.basename(command.words[0].source) if command.words else ""
        if name == "export" or name in _ACTS:
            return True
    return False


def chains(items: Sequence[Item]) -> list[list[Item]]:
    """Return commands that `&&` and `||` join, list by list."""
    chains: list[list[Item]] = []
    for item in items:
        if chains and item.join in ("&&", "||"):
            chains[-1].append(item)
        else:
            chains.append([item])
    return chains


def joined(chain: Sequence[Item]) -> str:
    """Return a chain as it was written."""
    first, *others = chain
    return first.pipeline.source + "".join(f" {one.join} {one.pipeline.source}" for one in others)


def _commands(bodies: Iterable[Script]) -> Iterator[Command]:
    for body in bodies:
        for item in body.items:
            for node in item.pipeline.nodes:
                yield from _inside(node)


def _inside(node: Node) -> Iterator[Command]:
    if isinstance(node, Command):
        yield node
    elif isinstance(node, Script):
        yield from _commands([node])
    elif isinstance(node, Loop):
        yield from _commands([node.body])
    elif isinstance(node, Branches):
        yield from _commands(node.bodies)
