"""Whether the shell program that a job's command runs passes its arguments on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHELLS = frozenset(["bash", "dash", "ksh", "sh", "zsh"])
_WITH_VALUE = frozenset(["-o", "+o", "-O", "+O", "--rcfile", "--init-file"])
_SHEBANG = re.compile(r"#!\s*\S*/(?:env\s+(?:-S\s+)?)?(?:bash|dash|ksh|sh|zsh)\b")
# What uses the arguments of a shell program: $@, ${1}, shift, `for x; do`, a file that is sourced.
_POSITIONAL = re.compile(
    r"\$[@*#1-9]|\$\{[@*#!1-9]|\b(?:shift|getopts|source|BASH_ARGV)\b|(?:^|[;&|])\s*\.\s"
    r"|\bfor\s+\w+\s*(?:;|\n)\s*do\b",
    re.MULTILINE,
)
_MOST_BYTES = 1_000_000


def ignores_arguments(command: Sequence[str], workdir: str) -> bool:
    """Return whether a command is a shell program that is known to use none of its arguments.

    That is `bash -c TEXT`, `bash FILE`, or a script; a file that cannot be read here is not known.

    Args:
        command: the words of the command.
        workdir: what a relative path of a file refers to.
    """
    text = _shell_text(list(command), workdir)
    return text is not None and not _POSITIONAL.search(text)


def _shell_text(words: list[str], workdir: str) -> str | None:
    for place, word in enumerate(words):
        if os.path.basename(word) not in _SHELLS:
            continue
        options, rest = [], words[place + 1 :]
        while rest and rest[0][:1] in ("-", "+"):
            options.append(rest[0])
            rest = rest[2 if rest[0] in _WITH_VALUE else 1 :]
        if not rest:
            return None
        if any(option[:2] != "--" and "c" in option[1:] for option in options):
            return rest[0]
        return _read(workdir, rest[0])
    text = _read(workdir, words[0]) if words and "/" in words[0] else None
    return text if text and _SHEBANG.match(text) else None


def _read(workdir: str, path: str) -> str | None:
    try:
        with Path(workdir, path).open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_BYTES)
    except OSError:
        return None
