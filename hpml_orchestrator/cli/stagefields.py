"""Errors of `hpml stage` in its own words: options, where staging names fields of a job file."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import CapacityError, HpmlError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging import Bases

__all__ = ["told_as_options"]

_OPTIONS = {
    "source": "SRC",
    "name": "--name",
    "kind": "--kind",
    "target": "--to",
    "outside_links": "--outside-links",
}
_WORDS = (
    (re.compile(r"\boutside_links: true\b"), "--outside-links"),
    (re.compile(r"\btarget: (\w+)"), r"--to \1"),
    (re.compile(r"\bkind: (\w+)"), r"--kind \1"),
)
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")  # in the order in which the local directory is looked for


@contextlib.contextmanager
def told_as_options(
    to: str = "", bases: Bases | None = None, local_dir: str | None = None
) -> Iterator[None]:
    """Name options where an error names fields of a job file.

    Args:
        to: what `--to` says.
        bases: what shm and local stand for; a directory of theirs that is wrong is not `--to`'s.
        local_dir: what `--local-dir` says.

    Raises:
        HpmlError: as the body, with option and hint for the command line.
    """
    try:
        yield
    except HpmlError as error:
        for words, option in _WORDS:
            error.hint = words.sub(option, error.hint)
        # what does not fit is told under the name of the data, which may be any word
        if isinstance(error, InputError) and not isinstance(error, CapacityError):
            _rename(error, to, bases, local_dir)
        raise


def _rename(error: InputError, to: str, bases: Bases | None, local_dir: str | None) -> None:
    option = _OPTIONS.get(error.field)
    if option is None:
        return
    base = getattr(bases, to, "") if to in {"shm", "local"} else ""
    if error.field == "target" and base and error.value == base:
        if to == "local" and local_dir:
            option = "--local-dir"
        else:
            error.hint = error.hint or _origin(to, base)
    message = error.message.removeprefix(f"{error.field}: ")
    error.message = f"{option}: {message}"
    error.field = option


def _origin(to: str, base: str) -> str:
    """Return who says that a directory is what a word stands for."""
    given = [name for name in _VARIABLES if os.environ.get(name)][:1] if to == "local" else []
    if given and os.environ[given[0]] == base:
        return f"that is what ${given[0]} says; --local-dir DIR takes another"
    other = "; --local-dir DIR takes another" if to == "local" else ""
    return f"that is what the site profile says for {to}{other}"
