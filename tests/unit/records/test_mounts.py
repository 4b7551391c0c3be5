"""Whether other machines may see a path, by its file system and what this machine exports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.mounts import (
    file_system_type,
    is_own_type,
    own_file_system,
    private_directory,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_system_that_is_exported_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path need not exist; a head node often serves /home from its own disk."""
    exports = tmp_path / "exports"
    monkeypatch.setattr("hpml_orchestrator.records.mounts._EXPORTS", (str(exports),))
    kind = file_system_type(str(tmp_path))
    path = str(tmp_path / "new" / "directory")
    assert own_file_system(path) == (kind if is_own_type(kind) else "")
    exports.write_text("# exported\n\n/elsewhere *(rw)\n")
    assert own_file_system(path) == (kind if is_own_type(kind) else "")
    exports.write_text(f"{os.path.realpath(tmp_path)}\t10.0.0.0/8(rw,sync)\n")
    assert own_file_system(path) == ""


@pytest.mark.parametrize(
    ("path", "top"),
    [("/dev/shm/x", "/dev/shm"), ("/tmp", "/tmp"), ("/tmpx/y", ""), ("/usr/tmp2", "")],
)
def test_directories_of_each_machine(path: str, top: str) -> None:
    """Below them other machines see other files."""
    assert private_directory(path) == top
