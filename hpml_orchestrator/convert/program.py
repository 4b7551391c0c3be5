"""From the words of a launch to the fields of a job file: program, arguments, variables."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.launch import Launch
    from hpml_orchestrator.convert.staging import Staging
    from hpml_orchestrator.convert.values import Expander

__all__ = ["Placer", "Program", "program"]

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_HOLE = re.compile("\0(\\d+)\0")
_PLACEHOLDER = re.compile(r"\{(?:stage|run|array)\.\w+\}")
_PLACE = re.compile(
    r"(^|[-_])(out|dir|log|save|ckpt|checkpoint|path|run|result|work)", re.IGNORECASE
)


@dataclass(frozen=True)
class Program:
    """What a job file runs: one of script, module and command, and its arguments."""

    script: str | None = None
    module: str | None = None
    command: list[str] | None = None
    args: list[str] = field(default_factory=list)
    python: str | None = None


class Placer:
    """Tells values in the words of a job file."""

    def __init__(self, expander: Expander, staging: Staging, report: Report) -> None:
        self.expander = expander
        self.staging = staging
        self.report = report

    def place(self, value: str, line: int, before: str = "") -> str:
        """Return a value with staged paths, the run's directory and the array's index as such.

        Args:
            value: the value; what is known in the job only stays a hole.
            line: where it stands, for the report.
            before: the word before it, which may be its option.
        """
        for found in _PLACEHOLDER.findall(value):
            self.report.lost(
                line, found, "hpml reads this as a place of its own", "name the file otherwise"
            )
        value = self.staging.replaced(value)
        kinds = {hole.kind for hole in self.expander.holes_of(value)}
        if "job" in kinds:
            value = self._run_directory(value, line, before)
        if "array" in kinds:
            value = _HOLE.sub(
                lambda match: (
                    "{array.index}"
                    if self.expander.holes[int(match[1])].kind == "array"
                    else match[0]
                ),
                value,
            )
        return value

    def _run_directory(self, value: str, line: int, before: str) -> str:
        """Tell a path that has the job's id in it as the run's directory."""
        option, equals, path = value.partition("=")
        if not equals or not re.fullmatch(r"-{0,2}[\w.-]+", option):
            option, equals, path = "", "", value
        if "/" not in path and not _PLACE.search(option or before.lstrip("-")):
            return value
        parts = path.split("/")
        jobs = [
            index
            for index, part in enumerate(parts)
            if any(hole.kind == "job" for hole in self.expander.holes_of(part))
        ]
        if not jobs:
            return value
        made = "/".join(["{run.dir}", *parts[jobs[-1] + 1 :]])
        self.report.changed(
            line,
            self.expander.source(value),
            f"a job's id is not known before; each run has a directory of its own: {made}",
        )
        return f"{option}{equals}{made}"


def program(launch: Launch, placer: Placer) -> Program:
    """Return the fields of a launch's program; what only a shell can say is left to one."""
    words = _without_arguments(launch, placer)
    before = ["", *words]
    placed = [placer.place(word, launch.line, before[index]) for index, word in enumerate(words)]
    if any("\0" in word for word in placed):
        return _in_shell(launch, placed, placer)
    first = placed[0]
    if not _PYTHON.fullmatch(os.path.basename(first)):
        return Program(command=placed)
    python = None if first == "python" else first
    rest = placed[1:]
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Program(module=rest[1], args=rest[2:], python=python)
    if not rest or rest[0].startswith("-"):
        return Program(command=placed)
    return Program(script=rest[0], args=rest[1:], python=python)


def _without_arguments(launch: Launch, placer: Placer) -> list[str]:
    """Return the words without `"$@"`, which a job file has no place for."""
    kept = []
    for word in launch.words:
        holes = placer.expander.holes_of(word)
        everything = len(holes) == 1 and holes[0].source.strip("${}:1") in ("@", "*")
        if everything and holes[0].kind == "argument" and _HOLE.fullmatch(word):
            placer.report.lost(
                launch.line,
                holes[0].source,
                "`hpml submit` takes no arguments for the program",
                "write what you give behind the script's name into args",
            )
        else:
            kept.append(word)
    return kept


def _in_shell(launch: Launch, placed: list[str], placer: Placer) -> Program:
    """Return a program that bash starts, which fills in what is known in the job only."""
    expander, report = placer.expander, placer.report
    holes = [hole for word in placed for hole in expander.holes_of(word)]
    sources = ", ".join(dict.fromkeys(hole.source for hole in holes))
    definitions = expander.needed(placed)
    lost = any(hole.kind == "argument" for hole in holes) or not all(definitions)
    lost = lost or any("\0" in definition for definition in definitions)
    if lost:
        report.lost(
            launch.line,
            sources,
            "is known in the job only: the program would get this text letter by letter",
            "write its value into the job file",
        )
        return Program(command=[expander.source(word) for word in placed])
    report.changed(
        launch.line,
        sources,
        "is known in the job only: the program is started through bash, which fills it in",
    )
    for hole in holes:
        moved = (
            not launch.on_node and launch.directory and hole.directory not in ("", launch.directory)
        )
        if moved and ("$(" in hole.source or "`" in hole.source):
            report.changed(
                launch.line,
                hole.source,
                f"ran in {expander.source(hole.directory)}, and runs in "
                f"{expander.source(launch.directory)} now",
                "write absolute paths into it",
            )
    command = " ".join(expander.shell(word) for word in placed)
    text = "\n".join([*definitions, f"exec {command}"])
    return Program(command=["bash", "-c", text])


def quoted(words: list[str]) -> str:
    """Return words as one would type them."""
    return " ".join(shlex.quote(word) for word in words)
