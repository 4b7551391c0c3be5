"""Read the script, and write the text of the job file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

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


def job_text(job: dict[str, object], comments: list[str]) -> str:
    """Return the text of a job file: shell lines as a block, lists of words on one line."""
    yaml = YAML()
    yaml.width = 96
    yaml.allow_unicode = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(_styled(job), stream)
    return "".join(f"# {comment}\n" for comment in comments) + stream.getvalue()


def _styled(value: object) -> object:
    if isinstance(value, dict):
        return {name: _styled(item) for name, item in value.items()}
    if isinstance(value, list):
        styled = CommentedSeq(_styled(item) for item in value)
        if not any(isinstance(item, dict) for item in value):
            styled.fa.set_flow_style()
        return styled
    if not isinstance(value, str):
        return value
    if not all(row.isprintable() for row in value.split("\n")):
        return DoubleQuotedScalarString(value)  # escaped: YAML folds some of them as line ends
    if "\n" in value and value[0] not in " \n":
        return LiteralScalarString(value)
    return value
