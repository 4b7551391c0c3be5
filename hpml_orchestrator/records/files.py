"""Write and read small files so that a crash, a reader or NFS never sees half of one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from hpml_orchestrator.errors import NotFoundError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "SCHEMA_VERSION",
    "append_line",
    "fsync_dir",
    "read_json",
    "read_json_lines",
    "read_text",
    "write_json",
    "write_text",
]

SCHEMA_VERSION = 1
"""Version of every record that this hpml writes; a reader refuses what is newer."""

PathLike = Union[str, "os.PathLike[str]"]


def fsync_dir(directory: PathLike) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: PathLike, text: Union[str, bytes], *, mode: int = 0o644) -> None:
    """Publish a file in one step: temporary sibling, fsync, rename, fsync of the directory.

    Raises:
        RecordError: the directory cannot be written (full, read-only, quota, permission).
    """
    target = Path(path)
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise _cannot("write", target, error) from error
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise _cannot("write", target, error) from error


def write_json(path: PathLike, record: Any) -> None:
    """Publish a mapping as indented JSON with `schema_version` in front."""
    body = {"schema_version": SCHEMA_VERSION, **record}
    write_text(path, json.dumps(body, indent=2, ensure_ascii=False, default=str) + "\n")


def read_text(path: PathLike) -> str:
    """Read a UTF-8 file; bytes that are none survive a round trip.

    Raises:
        NotFoundError: there is no such file.
        RecordError: it cannot be read.
    """
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise _cannot("read", path, error) from error


def read_json(path: PathLike) -> Any:
    """Read a JSON record of this or an older schema version.

    Raises:
        NotFoundError: there is no such file.
        RecordError: it is no JSON mapping, or was written by a newer hpml.
    """
    text = read_text(path)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path} holds no JSON object")
    version = record.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema_version {version!r}; this hpml reads up to {SCHEMA_VERSION}",
            hint="use the newer hpml that wrote it",
        )
    return record


def append_line(path: PathLike, line: str) -> None:
    """Append one line with a single write, so that lines of several writers never mix."""
    try:
        data = (line + "\n").encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        data = (line + "\n").encode("utf-8", "backslashreplace")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def read_json_lines(path: PathLike) -> list[Any]:
    """Read the complete JSON lines of a file; a torn last line is left out."""
    # Not splitlines(): that also splits at U+2028 and its like, which JSON leaves as they are.
    return list(_json_lines(read_text(path).split("\n")[:-1]))


def _json_lines(lines: Iterable[str]) -> Iterable[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _cannot(verb: str, path: PathLike, error: OSError) -> RecordError:
    return RecordError(
        f"cannot {verb} {path}: {error.strerror or error}",
        hint="records live under $HPML_HOME (or --records DIR): is it there and writable?",
    )
