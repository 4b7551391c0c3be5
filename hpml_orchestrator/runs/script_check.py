"""Checks of what is a user's own in a script: `environment.setup`, and what his templates made."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import (
    SBATCH,
    HeaderError,
    Option,
    Word,
    header_words,
    read_options,
)
from hpml_orchestrator.spec.site import NEEDED_DIRECTIVES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_script", "check_setup"]

_HPMLS = NEEDED_DIRECTIVES | {
    "comment",
    "cpus-per-task",
    "error",
    "export-file",
    "get-user-env",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "input",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "test-only",
    "wait",
    "wrap",
}
"""Options that a template may not add: hpml finds the job by them, or counts its ranks."""

_BASH_SECONDS = 10.0
_LEFT_OPEN = "a quote, a bracket or an `if` or its like is left open"
_HEAD = "#SBATCH"


def check_script(script: str, own: Sequence[str], directory: str) -> None:
    """Refuse a script whose templates took away, changed or broke what hpml needs.

    Args:
        script: what the templates made.
        own: sbatch options as hpml would write them.
        directory: of the user's templates.

    Raises:
        InputError: names the template and its line, or the line of the script.
    """
    made = _Made(script, directory)
    made.check_directives(own)
    made.check_shell()


def check_setup(lines: str, origin: str) -> None:
    """Refuse an `environment.setup` that bash cannot read by itself: it must leave nothing open.

    Args:
        lines: the user's shell lines.
        origin: where they come from, for the hint.

    Raises:
        InputError: names the line.
    """
    fault = _shell_fault(lines)
    if fault is None:
        return
    number, words, at_end = fault
    raise InputError(
        f"line {number}: bash cannot read it: {words}",
        field="environment.setup",
        hint=f"{_LEFT_OPEN} in the {origin}" if at_end else f"fix it in the {origin}",
    )


def _shell_fault(script: str) -> tuple[int, str, bool] | None:
    """Return line and words of bash's first complaint about a script, and whether it is at the end.

    There bash only gave up: the mistake may be far before it. Nothing of the script is run.
    """
    environment = {key: value for key, value in os.environ.items() if key != "BASH_ENV"}
    options = ["-O", "extglob"] if "extglob" in script else []  # which -n does not switch on
    try:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", *options, "-n"],
            input=script.encode("utf-8", "surrogateescape"),
            env={**environment, "LC_ALL": "C"},
            capture_output=True,
            timeout=_BASH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no bash here: the nodes have one, and will say it
    said = done.stderr.decode("utf-8", "replace").strip()
    # A here-document without its end is a warning, and swallows the rest of the script.
    if done.returncode == 0 and "here-document" not in said:
        return None
    first = said.split("\n", 1)[0]
    match = re.match(r"(?:bash: )?line (\d+): (.*)", first)
    number, words = (int(match[1]), match[2]) if match else (0, first)
    begun = re.search(r"(?:on|at) line (\d+)", words)
    at_end = begun is None and ("EOF" in words or "end of file" in words)
    return int(begun[1]) if begun else number, words, at_end


class _Made:
    """A script, and where its lines come from."""

    def __init__(self, script: str, directory: str) -> None:
        self._script = script
        self._lines = script.split("\n")
        self._directory = directory

    def check_directives(self, own: Sequence[str]) -> None:
        wanted: dict[str, list[str]] = {}
        for option in read_options([Word(line) for line in own], SBATCH)[0]:
            wanted.setdefault(option.name, []).append(option.value)
        try:
            options, others = read_options(list(header_words(self._script)), SBATCH)
        except HeaderError as error:
            raise self._wrong(error.line, str(error), error.hint) from error
        for option in options:
            self._check_option(option, wanted.get(option.name))
        for word in others:
            if word.text in ("hetjob", "packjob"):
                raise self._wrong(
                    word.line,
                    "makes it a heterogeneous job, which hpml cannot start",
                    "leave the line out",
                )
        there = {option.name for option in options}
        for line in own:
            name = line.removeprefix("--").partition("=")[0]
            if name not in there:
                raise InputError(
                    f"{self._directory}: the script lacks `{_HEAD} {line}`",
                    field="templates",
                    hint="write {{ super() }} in the block 'directives'; an option that this site "
                    f"does not want is left out by [directives.{name}] of the site profile",
                )
        self._check_late()

    def _check_option(self, option: Option, wanted: list[str] | None) -> None:
        if wanted is not None and option.value not in wanted:
            usual = f"--{option.name}={wanted[-1]}" if wanted[-1] else f"--{option.name}"
            raise self._wrong(
                option.line,
                f"{option.shown} changes {usual}, which hpml writes for this job",
                "change the job file, or the defaults or [directives] of the site profile",
            )
        if wanted is None and option.name in _HPMLS:
            raise self._wrong(
                option.line,
                f"{option.shown}: hpml sees to --{option.name} itself",
                "leave the line out",
            )

    def _check_late(self) -> None:
        """Refuse directives that sbatch does not read any more."""
        begun = False
        for number, line in enumerate(self._lines, start=1):
            if begun and line.startswith(_HEAD):
                raise self._wrong(
                    number,
                    f"`{line}` stands behind the first command, where sbatch reads no directive",
                    "write it into the block 'directives', behind {{ super() }}",
                )
            begun = begun or not (not line.strip() or line.lstrip().startswith("#"))

    def check_shell(self) -> None:
        """Have bash read the script, and run nothing of it."""
        fault = _shell_fault(self._script)
        if fault is None:
            return
        number, words, at_end = fault
        words = f"bash cannot read the script: {words}"
        if at_end:
            raise InputError(
                f"{self._directory}: {words}",
                field="templates",
                hint=f"{_LEFT_OPEN} in one of these templates",
            )
        raise self._wrong(number, words, "mend the block that this line is in")

    def _wrong(self, number: int, words: str, hint: str) -> InputError:
        return InputError(f"{self._place(number)}: {words}", field="templates", hint=hint)

    def _place(self, number: int) -> str:
        """Name a line of the script by the template that has it, word for word."""
        text = self._lines[number - 1].strip() if 0 < number <= len(self._lines) else ""
        if text:
            for path in sorted(Path(self._directory).rglob("*")):
                for count, line in enumerate(_lines_of(path), start=1):
                    if line.strip() == text:
                        return f"{path}:{count}"
        shown = f" ({text})" if text else ""
        return f"{self._directory}: line {number} of the script{shown}"


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    except OSError:
        return []
