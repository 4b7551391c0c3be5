"""Read the file of an sbatch script: bounded, UTF-8, as sbatch would take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_script"]

_MAX_BYTES = 256 * 1024  # bounds the time that an import takes


def read_script(path: Path) -> str:
    """Return the text of a script.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read, or is no text that sbatch would take.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file", hint="name the script's file")
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        hint = "`hpml import SCRIPT` reads a script for sbatch"
        raise NotFoundError(f"no such script: {path}", hint=hint) from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        binary = "holds a NUL byte: it is a binary file, and " if b"\0" in raw else ""
        raise InputError(
            f"{path} {binary}is not UTF-8 text (line {line})",
            hint="`iconv -f latin1 -t utf-8` converts the text of older editors",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        raise InputError(f"cannot read {path}: {reason}") from error
    refusals = (
        (len(raw) > _MAX_BYTES, f"is larger than {_MAX_BYTES // 1024} KiB"),
        (not raw.strip(), "is empty"),
        ("\0" in text, "holds a NUL byte: it is a binary file, which sbatch refuses, too"),
    )
    for refused, why in refusals:
        if refused:
            raise InputError(f"{path} {why}", hint="name the script that you give to sbatch")
    if "\r\n" in text:
        line = text.count("\n", 0, text.index("\r\n")) + 1
        raise InputError(
            f"{path} has DOS line ends (line {line}), which sbatch refuses, too",
            hint="`sed -i 's/\\r$//' FILE` removes them",
        )
    return text
