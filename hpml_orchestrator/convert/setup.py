"""Divide the lines before the launch between fields of `environment` and `environment.setup`.

Module loads and activations are fields as long as no shell line that may matter comes before them.
Exported variables are fields unless a later shell line may need them. What stays keeps its order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.body import OWN, Body, Line
from hpml_orchestrator.convert.values import has_hole, shell_word, stable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PATHS", "Setup"]

PATHS = frozenset("PATH LD_LIBRARY_PATH LIBRARY_PATH MANPATH CPATH MODULEPATH".split())
"""Variables that modules and activations change, too."""

_IN_SETUP = "kept in environment.setup: runs once, on the first node, before the ranks"


class Setup:
    """The lines before the launch.

    Args:
        body: the script.
        names: variables that the command line itself needs from the shell.

    Attributes:
        kept: lines of `environment.setup`.
        variables: exported variables that are fields: value, line and text.
    """

    def __init__(self, body: Body, names: set[str]) -> None:
        self.body = body
        self.report = body.report
        self.kept: list[Line] = []
        self._block()
        carried: list[Line] = []
        later = False  # whether a command that may read variables comes later
        for line in reversed(body.lines):
            stays = line.kind in ("keep", "quiet")
            if line.kind == "assign":
                stays = self._assigns(line, names, carried, later=later)
            later = later or line.kind == "keep"
            if stays:
                self.kept.append(line)
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
        self.kept.reverse()
        self.variables = {
            name: (value, line.line, line.source)
            for line in reversed(carried)
            for name, value in line.assigned.items()
        }
        self._report_kept()

    def _block(self) -> None:
        """Keep modules and activations that come after a shell line where they are."""
        blocked = False
        for line in self.body.lines:
            activates = line.kind in ("module", "purge", "venv", "conda", "hook")
            if (activates and blocked) or PATHS & line.assigned.keys():
                line.kind = "keep"
            blocked = blocked or line.kind == "keep"
        kept = [line.source for line in self.body.lines if line.kind == "keep"]
        if any(re.search(r"\bconda\b.*activate", source) for source in kept):
            for line in self.body.lines:
                line.kind = "keep" if line.kind == "hook" else line.kind

    def _assigns(self, line: Line, names: set[str], carried: list[Line], *, later: bool) -> bool:
        """Whether an assignment stays a shell line; else appends it to those that are fields."""
        needed = bool(names & line.assigned.keys())
        open_ = not all(map(stable, line.assigned.values()))
        own = line.assigned.keys() <= OWN
        source = self.body.launch.source
        written = any(re.search(rf"\$\{{?{name}\b", source) for name in line.assigned)
        if written and any(map(has_hole, line.assigned.values())) and not (needed or later):
            return False  # a part of the command line, carried over with it
        stays = needed or (line.exported and not own and (later or open_))
        if line.exported and not own and (not stays or "OMP_NUM_THREADS" in line.assigned):
            carried.append(line)
        elif not stays and not line.exported and open_:
            why = "nothing else uses it, or hpml does itself what it was for"
            self.report.add("dropped", line.line, line.source, why)
        return stays

    def _report_kept(self) -> None:
        if all(line.source.startswith("set ") for line in self.kept):
            for line in self.kept:
                self.report.add("dropped", line.line, line.source, "no shell line is left")
            self.kept.clear()
        todo = "" if self.body.strict else "a line that fails ends the job: `|| :` behind it helps"
        quiet = [line for line in self.kept if line.kind == "quiet"]
        for line in self.kept:
            if line not in quiet:
                self.report.changed(line.line, line.source, _IN_SETUP, todo)
                todo = ""
        if quiet:
            text = ", ".join(dict.fromkeys(line.source.split()[0] for line in quiet))
            self.report.changed(quiet[0].line, text, _IN_SETUP)

    def fields(self, path: Callable[[str], str]) -> Iterator[tuple[str, Any, Line]]:
        """Yield modules, venv and conda of `environment`: field, value and line."""
        modules: list[str] = []
        first: Line | None = None
        active: Line | None = None
        for line in self.body.lines:
            if line.kind == "module":
                modules += line.value.split()
                first = first or line
            elif line.kind == "purge":
                modules.clear()
                why = "hpml loads modules on top of those that are loaded when you submit"
                todo = "submit from a shell without modules, or write environment.inherit: minimal"
                self.report.changed(line.line, line.source, why, todo)
            elif line.kind in ("venv", "conda"):
                active = line
            elif line.kind == "hook":
                why = "hpml finds conda through CONDA_EXE or PATH"
                todo = "`export CONDA_EXE=…/bin/conda` before `hpml submit` if it finds none"
                self.report.changed(line.line, line.source, why, todo)
        if first is not None:
            yield "modules", modules, first
        if active is not None:
            yield active.kind, path(active.value) if "/" in active.value else active.value, active

    def lines(self, workdir: str) -> list[str]:
        """Return the shell lines; `cd` is added where the script was in another directory."""
        lines: list[str] = []
        current = workdir
        for line in self.kept:
            if line.directory not in ("", current):
                lines.append(f"cd {shell_word(line.directory)}")
                current = line.directory
            lines.append(line.source)
            if re.match(r"(cd|pushd|popd)\b", line.source):
                current = ""
        if current != workdir and self.body.launch.directory == workdir:
            lines.append(f"cd {shell_word(workdir)}")
        return lines
