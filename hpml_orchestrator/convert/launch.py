"""A program that the script starts, which one job file may become."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.report import ImportReport
from hpml_orchestrator.convert.values import shown
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.slurm.options import Option


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: the command line; the program and its arguments after the launchers are removed.
        directory: its working directory; empty if only the job can compute it.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process.
        sizes: what the line requests, as text: `nodes`, and ranks `per_node`, `per_domain`
            (socket) or in `total`.
        outer: sizes of an srun around the launcher.
        options: srun's own options.
        binding: the job file's policy; empty for its default.
        mpi: of srun's `--mpi`.
        container: of pyxis: engine, image and mounts.
        variables: environment of this line alone.
        python: the interpreter that ran the launcher.
        report: what its options change; used if the job file starts this launch.
        error: why a job file cannot start it.
    """

    line: int
    source: str
    words: list[str]
    directory: str
    launcher: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    outer: dict[str, str] | None = None
    options: list[Option] = field(default_factory=list)
    binding: str = ""
    mpi: str = ""
    container: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    report: ImportReport = field(default_factory=ImportReport)
    error: InputError | None = None

    @property
    def program(self) -> str:
        """Name of the program without its directory; empty if no word is left."""
        return os.path.basename(self.words[0]) if self.words else ""

    def size(self, name: str) -> int | None:
        """Return one of the sizes as a number; None if the line does not have it.

        Raises:
            InputError: it is not a positive whole number, or only the job can compute it.
        """
        if name not in self.sizes:
            return None
        text = self.sizes[name]
        if not re.fullmatch(r"0*[1-9][0-9]{0,6}", text):
            raise self.refused(text, "a job file needs this number", "write it as a number")
        return int(text)

    def refused(self, text: str, why: str, hint: str) -> InputError:
        """Return the error about a part of the line."""
        return InputError(f"line {self.line}: {shown(text)}: {why}", hint=hint)

    def lost(self, text: str, why: str, todo: str = "") -> None:
        """Report a part of the line that the job file does not have."""
        self.report.lost(self.line, shown(text), why, todo)

    def changed(self, why: str, todo: str = "") -> None:
        """Report that the job file does this in another way."""
        self.report.changed(self.line, self.source, why, todo)

    def set(self, setting: str) -> None:
        """Set a variable of its environment from NAME=VALUE."""
        name, equals, value = setting.partition("=")
        if equals:
            self.variables[name] = value
