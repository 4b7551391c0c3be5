"""What an axis changes in a program's or function's arguments, and a scale in a job's resources."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, did_you_mean
from hpml_orchestrator.spec.job import Job

if TYPE_CHECKING:
    from hpml_orchestrator.spec.job import Resources
    from hpml_orchestrator.spec.sweep import Sweep

__all__ = ["Arguments", "check_function", "scaled"]


class Arguments:
    """A program's arguments, as `--name=value`, `--name value` or `name=value`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def _place(self, name: str) -> tuple[int, str] | None:
        """Return the index of the word with an argument's value, and what precedes it there."""
        prefix = name if name.endswith("=") else f"{name}="
        for index, word in enumerate(self.words):
            if word.startswith(prefix):
                return index, prefix
            if word == name and index + 1 < len(self.words):
                return index + 1, ""
        return None

    def value(self, name: str) -> str | None:
        """Return the value of an argument, None where it is not given."""
        place = self._place(name)
        return self.words[place[0]].removeprefix(place[1]) if place else None

    def set(self, name: str, value: str) -> None:
        """Replace an argument's value, or append it."""
        place = self._place(name)
        if place:
            self.words[place[0]] = place[1] + value
        else:
            self.words.append(f"{name.removesuffix('=')}={value}")

    def flag(self, name: str, *, on: bool) -> None:
        """Give an argument without a value, or leave it out."""
        self.words = [word for word in self.words if word != name] + [name] * on

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of some arguments that is given."""
        return next((name for name in names if self.value(name) is not None), None)


def scaled(resources: Resources, unit: str, scale: int) -> list[tuple[str, Any]]:
    """Return the fields of the job that make it as large as a scale says.

    Args:
        resources: of the base job.
        unit: `nodes`, `ranks` or `gpus`, in all.
        scale: how many.

    Raises:
        InputError: the scale does not fit the base job's nodes.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field=f"scale.{unit}", value=scale, hint=hint)

    if unit == "nodes":
        return [("resources.nodes", scale)]
    each = resources.gpu_count
    if unit == "ranks":
        if scale % resources.nodes:
            raise refused(
                f"cannot be divided over the base job's {resources.nodes} nodes",
                f"use multiples of {resources.nodes}, or scale: {{nodes: …}}",
            )
        if each:
            raise refused(
                "the base job has GPUs, whose number would stay the same",
                f"scale: {{gpus: [{scale}, …]}}",
            )
        return [("resources.ranks_per_node", scale // resources.nodes)]
    if not each:
        raise refused("the base job has no GPUs", "give resources.gpus, or scale: {ranks: …}")
    nodes, here = (1, scale) if scale < each else (scale // each, each)
    if nodes * here != scale:
        raise refused(
            f"does not fill whole nodes of {each} GPUs", f"use multiples of {each}, or fewer"
        )
    kind, _, _ = resources.gpus.rpartition(":")
    fields: list[tuple[str, Any]] = [
        ("resources.nodes", nodes),
        ("resources.gpus", f"{kind}:{here}" if kind else str(here)),
    ]
    if resources.ranks_per_node is not None:
        ranks, rest = divmod(resources.ranks_per_node * here, each)
        if rest or not ranks:
            raise refused(
                f"{resources.ranks_per_node} ranks on {each} GPUs cannot be cut down to {here}",
                "leave ranks_per_node out: there is one rank per GPU then",
            )
        fields.append(("resources.ranks_per_node", ranks))
    return fields


def check_function(sweep: Sweep) -> None:
    """Check that a sweep's function is in its file and takes the axes; its code is not run.

    Raises:
        InputError: it is not there, or an axis is none of its arguments.
    """
    place, _, name = (sweep.function or "").rpartition(":")
    for axis in sweep.axes:
        if axis.startswith("-") or axis.endswith("="):
            plain = axis.strip("-=").replace("-", "_")
            message, hint = "is no argument of a function", f"write it without dashes: {plain}"
            raise InputError(message, field=f"axes.{axis}", value=axis, hint=hint)
    if not place.endswith(".py"):
        return  # a module of the job's environment
    try:
        tree = ast.parse(Path(place).read_text("utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise InputError(message, field="function", value=sweep.function) from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        if any(isinstance(node, ast.ImportFrom) for node in tree.body) or "." in name:
            return  # perhaps it is imported, or a method
        message, hint = f"{place} has no function {name}", did_you_mean(name, functions)
        raise InputError(message, field="function", value=sweep.function, hint=hint)
    arguments = functions[name].args
    given = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    for axis in sweep.axes:
        if "." not in axis and axis not in (*given, *Job.model_fields) and not arguments.kwarg:
            message = f"{name} has no argument of that name"
            hint = did_you_mean(axis, given) or f"it takes {', '.join(given)}"
            raise InputError(message, field=f"axes.{axis}", value=axis, hint=hint)
