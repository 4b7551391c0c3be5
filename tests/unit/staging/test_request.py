"""Requests, targets and kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases, Kind, kind_of
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("key", [".hidden", "a/b", "..", "a b", "a\n"])
def test_job_keys_are_plain_names(key: str) -> None:
    """A job key that would leave the root or hide in it is refused."""
    with pytest.raises(InputError):
        CopyStager(key)


def test_local_needs_a_directory() -> None:
    """Target local is refused on a node that has none."""
    with pytest.raises(InputError, match="no local staging directory"):
        Bases().resolve("local")
    assert Bases(local="/scratch").resolve("local") == "/scratch"
    assert Bases().resolve("/mnt/x") == "/mnt/x"


def test_kind_must_fit_the_source(tmp_path: Path) -> None:
    """A directory is not a file, a file is not a tree, and a device is neither."""
    wrong: list[tuple[str, Kind]] = [
        (str(tmp_path), "tar"),
        ("/etc/passwd", "tree"),
        ("/dev/null", "auto"),
    ]
    for source, kind in wrong:
        with pytest.raises(InputError):
            kind_of(Stage("a", source, kind=kind))
