"""Directories that a command writes to at a user's word: told by their option where they fail."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpml_orchestrator.errors import InputError, RecordError

__all__ = ["output_directory", "reason_of"]


@contextlib.contextmanager
def output_directory(path: Path, *, value: str) -> Iterator[None]:
    """Make a directory for what is written within; what was made is gone again where that fails.

    Args:
        path: the directory, absolute; one that is there already stays, whatever happens.
        value: of `--output`, for the error.

    Raises:
        InputError: it cannot be made, or not be written to.
    """
    made = [one for one in (path, *path.parents) if not os.path.lexists(one)]
    verb = "made"
    try:
        path.mkdir(parents=True, exist_ok=True)
        verb = "written"
        yield
    except BaseException as error:
        if path in made:
            shutil.rmtree(path, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if not isinstance(error, (OSError, RecordError)):
            raise
        raise InputError(
            f"cannot be {verb}: {reason_of(error)}",
            field="--output",
            value=value,
            hint="name a directory that you may write to and that has room",
        ) from error


def reason_of(error: OSError | RecordError) -> str:
    """Return in words why something could not be written: the system's, without its number."""
    cause = error.__cause__ if isinstance(error, RecordError) else error
    return getattr(cause, "strerror", None) or str(cause or error)
