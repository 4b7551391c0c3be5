"""Write and read small files so that a crash, a reader or NFS never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from hpml_orchestrator.errors import NotFoundError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "SCHEMA_VERSION",
    "append_line",
    "create_json",
    "fsync_dir",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_text",
    "write_json",
    "write_text",
]

SCHEMA_VERSION = 1
"""Version of every record that this hpml writes; a reader refuses what is newer."""

_NO_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)
"""What `link` says where a file system knows no hard links."""

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
    temporary = _temporary(target, data, mode)
    try:
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise _cannot("write", target, error) from error


def write_json(path: PathLike, record: Any) -> None:
    """Publish a mapping as indented JSON with `schema_version` in front."""
    write_text(path, _json_text(record))


def create_json(path: PathLike, record: Any) -> bool:
    """Publish a mapping durably unless there is such a file: of many callers one succeeds.

    Returns:
        False when the file is there already; it stays as it is.

    Raises:
        RecordError: the directory cannot be written.
    """
    target = Path(path)
    data = _json_text(record).encode("utf-8", "surrogateescape")
    temporary = _temporary(target, data, 0o644)
    try:
        try:
            os.link(temporary, target)
        except FileExistsError:
            # NFS may repeat a request whose answer was lost, and then finds our own link.
            if not os.path.samefile(temporary, target):
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not _create_in_place(target, data):
                return False
        fsync_dir(target.parent)
    except OSError as error:
        raise _cannot("write", target, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return True


def _create_in_place(target: Path, data: bytes) -> bool:
    """Create a file exclusively where hard links cannot be had; a reader may see half of it."""
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return True


def _temporary(target: Path, data: bytes, mode: int) -> str:
    """Write a temporary sibling of a file durably, and return its path."""
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
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise _cannot("write", target, error) from error
    return temporary


def _json_text(record: Any) -> str:
    body = {"schema_version": SCHEMA_VERSION, **record}
    return json.dumps(body, indent=2, ensure_ascii=False, default=str) + "\n"


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


def read_lines(path: PathLike) -> Iterator[bytes]:
    """Yield the complete lines of a file without holding it; a torn last one is left out.

    Raises:
        NotFoundError: there is no such file.
        RecordError: it cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise _cannot("read", path, error) from error


def read_json_lines(path: PathLike) -> Iterator[Any]:
    """Yield what the complete lines of a UTF-8 file hold; what is no JSON is passed over."""
    for line in read_lines(path):
        with contextlib.suppress(ValueError):
            yield json.loads(line.decode("utf-8", "surrogateescape"))


def _cannot(verb: str, path: PathLike, error: OSError) -> RecordError:
    return RecordError(
        f"cannot {verb} {path}: {error.strerror or error}",
        hint="records live under $HPML_HOME (or --records DIR): is it there and writable?",
    )
