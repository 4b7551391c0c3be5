"""The shell program that a job's command runs, and whether it passes arguments on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ShellProgram", "shell_program"]

_SHELLS = frozenset("bash dash ksh sh zsh".split())
_WITH_VALUE = frozenset("-o +o -O +O --rcfile --init-file".split())
_SHEBANG = re.compile(r"#!\s*\S*/(?:env\s+(?:-S\s+)?)?(?:bash|dash|ksh|sh|zsh)\b")
# What uses the arguments of a shell program: $@, ${1}, shift, `for x; do`, a file that is sourced.
_POSITIONAL = re.compile(
    r"\$[@*#1-9]|\$\{[@*#!1-9]|\b(?:shift|getopts|source|BASH_ARGV)\b|(?:^|[;&|])\s*\.\s"
    r"|\bfor\s+\w+\s*(?:;|\n)\s*do\b",
    re.MULTILINE,
)
_MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class ShellProgram:
    """A program for a shell.

    Attributes:
        text: its text; None if the command runs no shell, or a file that cannot be read here.
        inline: whether it is the text of `bash -c TEXT`, not a file.
        rest: the words of the command behind the text or the file.
    """

    text: str | None
    inline: bool
    rest: Sequence[str]

    @property
    def ignores_arguments(self) -> bool:
        """Whether it is known to use none of its arguments."""
        return self.text is not None and not _POSITIONAL.search(self.text)


def shell_program(command: Sequence[str], workdir: str) -> ShellProgram:
    """Return the shell program that a command runs: `bash -c TEXT`, `bash FILE`, or a script.

    Args:
        command: the words of the command.
        workdir: what a relative path of a file refers to.
    """
    words = list(command)
    for place, word in enumerate(words):
        if os.path.basename(word) not in _SHELLS:
            continue
        options, rest = [], words[place + 1 :]
        while rest and rest[0][:1] in ("-", "+"):
            options.append(rest[0])
            rest = rest[2 if rest[0] in _WITH_VALUE else 1 :]
        if not rest:
            return ShellProgram(None, inline=False, rest=[])
        if any(option[:2] != "--" and "c" in option[1:] for option in options):
            return ShellProgram(rest[0], inline=True, rest=rest[1:])
        return ShellProgram(_read(workdir, rest[0]), inline=False, rest=rest[1:])
    text = _read(workdir, words[0]) if words and "/" in words[0] else None
    is_shell = bool(text and _SHEBANG.match(text))
    return ShellProgram(text if is_shell else None, inline=False, rest=words[1:])


def _read(workdir: str, path: str) -> str | None:
    try:
        with Path(workdir, path).open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_BYTES)
    except OSError:
        return None
