"""What a line of the script starts, and how: the record that all readers of launchers fill."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.findings import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.convert.header import Gpus

__all__ = ["BINDING", "Launch", "OptionReader", "whole"]

BINDING = ("hpml binds the ranks itself", "`binding` in the job file says how")
"""What is said of options by which another launcher would bind them, and what to do."""


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: what is left of the command line once the launchers are taken off: the program.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process on the
            first node.
        per_node: ranks on each node, where the line says so.
        total: ranks in all, where the line says so.
        nodes: nodes that the line names.
        single_node: whether torchrun was started on the first node only.
        cpus: of each rank, where srun names them.
        gpus: of each node, where srun names them.
        mpi: whether srun is to offer MPI; of an mpirun, that its options are not Open MPI's.
        container: engine, image and mounts.
        variables: environment of this line alone, name -> value.
        trains: whether it looks like the training.
        helper: whether it is one of the small commands that prepare a training.
        standard_input: what the program is given to read, where that is known.
        directory: where the launcher starts it, if it says so.
        on_node: whether that is a directory of the node's own.
        threads: what OMP_NUM_THREADS is to be, if the launcher says so.
        python: the interpreter that ran the launcher.
        looped: line of the loop that starts it, 0 for none.
        notes: what its options lose; told only of the launch that is carried.
        exported: variables of the script that it finds -> line, text, value (None: not known).
    """

    line: int
    source: str
    words: list[str]
    launcher: str = ""
    per_node: int | str | None = None
    total: int | None = None
    nodes: int | None = None
    single_node: bool = False
    cpus: int | None = None
    gpus: Gpus | None = None
    mpi: bool = False
    container: dict[str, Any] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    trains: bool = False
    helper: bool = False
    standard_input: str | None = None
    directory: str = ""
    on_node: bool = False
    threads: str | None = None
    python: str = ""
    looped: int = 0
    notes: Report = field(default_factory=Report)
    exported: dict[str, tuple[int, str, str | None]] = field(default_factory=dict)
    modules: tuple[tuple[str, int], ...] = ()
    conda: tuple[str, int] | None = None
    venv: tuple[str, int] | None = None

    def also(self, **changes: Any) -> Launch:
        """Return it with other fields."""
        return dataclasses.replace(self, **changes)


def whole(text: str) -> int | None:
    """Return a number above zero, None for all else."""
    return int(text) if re.fullmatch(r"0*[1-9]\d{0,6}", text, re.ASCII) else None


class OptionReader:
    """Reads the options of a launcher up to its program.

    Args:
        values: options that take one value, without dashes; `_` counts as `-`.
        flags: options that take none.
        pairs: options that take two.
        double: whether an option of one dash is read as a long one, as mpirun does.
    """

    def __init__(
        self, values: str, flags: str = "", *, pairs: str = "", double: bool = False
    ) -> None:
        self.arity = {
            **dict.fromkeys(flags.split(), 0),
            **dict.fromkeys(values.split(), 1),
            **dict.fromkeys(pairs.split(), 2),
        }
        self.double = double

    def read(
        self, words: Sequence[str], line: int, report: Report, who: str
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Return the options and the words that follow them.

        Of each option all its values in order; a flag has empty ones. What is not known is
        reported and taken to have no value.
        """
        found: dict[str, list[str]] = {}
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if word == "--":
                break
            if not word.startswith("-") or word == "-":
                position -= 1
                break
            spelling, equals, value = word.lstrip("-").partition("=")
            name = self._name(spelling.replace("_", "-"), long=word.startswith("--"))
            if name is None:
                report.lost(line, word, f"no option of {who} that hpml knows")
                continue
            arity = self.arity[name]
            if equals:
                found.setdefault(name, []).append(value)
            else:
                taken = list(words[position : position + arity])
                position += arity
                found.setdefault(name, []).append("=".join(taken))
        return found, list(words[position:])

    def _name(self, spelling: str, *, long: bool) -> str | None:
        if spelling in self.arity:
            return spelling
        if not long and not self.double:
            return None
        fits = [name for name in self.arity if name.startswith(spelling) and len(spelling) > 1]
        return fits[0] if len(fits) == 1 else None
