"""Read and write small files atomically, also on NFS and in case of a crash."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from hpml_orchestrator.errors import NotFoundError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA_VERSION = 1
"""Schema version of all records; readers refuse newer ones."""

PathLike = Union[str, "os.PathLike[str]"]


def fsync_dir(directory: PathLike) -> None:
    """Sync a directory to disk, so that its entries survive a crash."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: PathLike, text: Union[str, bytes], *, mode: int = 0o644) -> None:
    """Write a file atomically: temporary file, fsync, rename, fsync of the directory.

    Raises:
        RecordError: the directory cannot be written (full, read-only, quota, permission).
    """
    with _written_sibling(Path(path), text, mode) as temporary:
        os.replace(temporary, path)


def write_users_file(path: PathLike, text: Union[str, bytes]) -> None:
    """Write a file like `write_text`, but with the default permissions of the user's umask.

    Raises:
        RecordError: the directory cannot be written.
    """
    umask = os.umask(0)
    os.umask(umask)
    write_text(path, text, mode=0o666 & ~umask)


def write_json(path: PathLike, record: Mapping[str, object]) -> None:
    """Write a mapping atomically as indented JSON, with `schema_version` first."""
    write_text(path, _json_text(record))


def create_json(path: PathLike, record: Mapping[str, object]) -> bool:
    """Create a file with a mapping durably unless it exists: one of many callers succeeds.

    Returns:
        False if the file exists; it is not changed.

    Raises:
        RecordError: the directory cannot be written, or its file system has no hard links.
    """
    with _written_sibling(Path(path), _json_text(record), 0o644) as temporary:
        try:
            # A hard link fails if the name exists, also on NFS. Rename would replace the other's
            # file, and O_EXCL would expose an empty file.
            os.link(temporary, path)
        except FileExistsError:
            # NFS may repeat a request whose answer was lost: the second one finds the link made by
            # the first.
            return os.path.samefile(temporary, path)
    return True


@contextlib.contextmanager
def _written_sibling(target: Path, text: Union[str, bytes], mode: int) -> Iterator[str]:
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(fd, "wb") as stream:
            stream.write(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
            stream.flush()
            os.fchmod(fd, mode)
            # Sync the content before the rename: otherwise a crash could leave an empty file under
            # the new name.
            os.fsync(fd)
        yield temporary
        fsync_dir(target.parent)
    except OSError as error:
        raise _cannot("write", target, error) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):  # already renamed
                os.unlink(temporary)


def _json_text(record: Mapping[str, object]) -> str:
    body = {"schema_version": SCHEMA_VERSION, **record}
    return json.dumps(body, indent=2, ensure_ascii=False, default=str) + "\n"


def read_text(path: PathLike) -> str:
    """Read a UTF-8 file; invalid bytes survive a round trip.

    Raises:
        NotFoundError: the file does not exist.
        RecordError: it cannot be read.
    """
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise _cannot("read", path, error) from error


def names_in(directory: PathLike) -> list[str]:
    """Return the sorted names in a directory; empty if it is missing or unreadable."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def read_text_or_nothing(path: PathLike) -> str:
    """Read a UTF-8 file; empty if it cannot be read."""
    try:
        return read_text(path)
    except (NotFoundError, RecordError):
        return ""


def read_json(path: PathLike) -> Any:
    """Read a JSON record with this or an older schema version.

    Raises:
        NotFoundError: the file does not exist.
        RecordError: it is not a JSON mapping, or was written by a newer hpml.
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
    """Append a line with a single write, so that lines of several writers never mix."""
    with open(path, "ab", buffering=0) as stream:
        stream.write(f"{line}\n".encode("utf-8", "surrogateescape"))


def read_lines(path: PathLike) -> Iterator[bytes]:
    """Yield the complete lines of a file one by one; skip an incomplete last line.

    Raises:
        NotFoundError: the file does not exist.
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
    """Yield the JSON values of a UTF-8 file's complete lines; skip lines that are not JSON."""
    for line in read_lines(path):
        with contextlib.suppress(ValueError):
            yield json.loads(line.decode("utf-8", "surrogateescape"))


def _cannot(verb: str, path: PathLike, error: OSError) -> RecordError:
    return RecordError(
        f"cannot {verb} {path}: {error.strerror or error}",
        hint="records live under $HPML_HOME: is it there and writable?",
    )
