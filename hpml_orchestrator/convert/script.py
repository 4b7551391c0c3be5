"""Read the file of an sbatch script: bounded, UTF-8, as sbatch would take it."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MAX_BYTES", "decode", "read_script"]

MAX_BYTES = 256 * 1024
"""More than anybody writes by hand; it bounds the time that an import takes."""


def read_script(path: Path) -> str:
    """Return the text of a script.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read, is no regular file, or no script.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path} is no regular file", hint="name the script's file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no such script: {path}", hint="`hpml import SCRIPT` reads a script for sbatch"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {getattr(error, 'strerror', '') or error}"
        ) from error
    return decode(raw, str(path))


def decode(raw: bytes, what: str) -> str:
    """Return the text of a script's bytes.

    Raises:
        InputError: it is empty, too large, binary, not UTF-8, or has DOS line ends.
    """
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{what} has over {MAX_BYTES // 1024} KiB: no script that somebody wrote",
            hint="name the script that you give to sbatch",
        )
    if not raw.strip():
        raise InputError(f"{what} is empty", hint="name the script that you give to sbatch")
    if b"\0" in raw:
        raise InputError(
            f"{what} holds a NUL byte: it is a binary file, which sbatch refuses, too",
            hint="name the script that you give to sbatch",
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(
            f"{what} is not UTF-8 text (line {line}, byte {error.start})",
            hint="`iconv -f latin1 -t utf-8` changes the text of older editors",
        ) from None
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        raise InputError(
            f"{what} has DOS line ends (line {line}), which sbatch refuses, too",
            hint="`sed -i 's/\\r$//' FILE` removes them",
        )
    return text
