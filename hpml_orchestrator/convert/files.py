"""Read the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 256 * 1024  # bounds the time that an import takes


def read_script(path: Path) -> str:
    """Return the text of a script.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it cannot be read, or is not a text that sbatch accepts.
    """
    hint = "name the script that you give to sbatch"
    if not path.exists():
        raise NotFoundError(f"no such script: {path}", hint=hint)
    if not path.is_file():
        raise InputError(f"{path} is not a regular file", hint=hint)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if not raw.strip() or len(raw) > _MAX_BYTES:
        problem = f"is larger than {_MAX_BYTES // 1024} KiB" if raw else "is empty"
        raise InputError(f"{path} {problem}", hint=hint)
    if b"\0" in raw:
        raise InputError(f"{path} holds a NUL byte: it is a binary file", hint=hint)
    if b"\r\n" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\r\n")) + 1
        raise InputError(
            f"{path} has DOS line ends (line {line}), which sbatch refuses, too",
            hint="`sed -i 's/\\r$//' FILE` removes them",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8 text (line {line})",
            hint="`iconv -f latin1 -t utf-8` converts the text of older editors",
        ) from None
