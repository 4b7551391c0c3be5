"""Write a rendered job into a directory that the user names."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.script import archive
from hpml_orchestrator.script.render import CODE_DIRECTORY

if TYPE_CHECKING:
    from hpml_orchestrator.runs.prepare import Rendered

__all__ = ["output_directory", "write_rendered"]


def write_rendered(rendered: Rendered, directory: str, *, force: bool = False) -> Path:
    """Write `job.sh`, `hpml-node.pyz` and a snapshot into a directory; return the script's path.

    Raises:
        InputError: the directory cannot be made or written, holds a different `job.sh` (perhaps
            edited by hand) and `force` is not given, or holds a snapshot already; the snapshot
            cannot be taken. A directory that was made is removed again.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field="--output", value=directory, hint=hint)

    target = Path(os.path.abspath(os.path.expanduser(directory)))
    snapshot = rendered.snapshot
    if snapshot is not None and snapshot.holds(target):
        raise refused(
            f"lies inside the repository {snapshot.top!r} that the snapshot is taken of",
            "name a directory outside of it",
        )
    script, code = target / "job.sh", target / CODE_DIRECTORY
    with output_directory(target, value=directory):
        if not force and script.exists() and script.read_bytes() != rendered.script.encode():
            raise refused(
                "holds a job.sh that differs, perhaps edited by hand",
                "name another directory, or replace it with --force",
            )
        if snapshot is not None:
            if os.path.lexists(code):
                raise refused(
                    f"already holds a directory {CODE_DIRECTORY}",
                    f"name another directory, or remove {code}",
                )
            with tempfile.TemporaryDirectory(prefix=f".{CODE_DIRECTORY}.", dir=target) as temporary:
                snapshot.take(Path(temporary, CODE_DIRECTORY))
                os.rename(Path(temporary, CODE_DIRECTORY), code)
        write_text(target / "hpml-node.pyz", archive.build())
        write_text(script, rendered.script, mode=0o755)
    return script


@contextlib.contextmanager
def output_directory(path: Path, *, value: str) -> Iterator[None]:
    """Make a directory for what is written within; it is removed again where that fails.

    Args:
        path: the directory, absolute; one that existed before always stays.
        value: of `--output`, for the error.

    Raises:
        InputError: it cannot be made or written to.
    """
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
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
        cause = error.__cause__ if isinstance(error, RecordError) else error
        raise InputError(
            f"cannot be {verb}: {getattr(cause, 'strerror', None) or cause or error}",
            field="--output",
            value=value,
            hint="name a directory that you may write to and that has room",
        ) from error
