"""What goes to RAM is measured where memory is asked for, as RAM will hold it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobs.measure import measured, tree_bytes
from hpml_orchestrator.spec import ResolvedJob, load_job

PAGE = 4096


def resolved(tmp_path: Path, stage: list[dict[str, Any]], memory: str | None = "1G") -> ResolvedJob:
    path = tmp_path / "job.yaml"
    job = {"name": "a", "command": ["x"], "resources": {"memory": memory}, "stage": stage}
    path.write_text(json.dumps(job))
    return load_job(path)


def test_files_take_whole_pages(tmp_path: Path) -> None:
    """Each file and directory is rounded up; links count as one page and are not followed."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "empty").touch()
    (tree / "one").write_bytes(b"x")
    (tree / "sub" / "page").write_bytes(b"x" * PAGE)
    (tree / "sub" / "more").write_bytes(b"x" * (PAGE + 1))
    os.symlink("/usr", tree / "link")
    assert tree_bytes(str(tree)) == PAGE * (2 + 0 + 1 + 1 + 2 + 1)
    assert tree_bytes(str(tree / "one")) == PAGE


def test_sizes_are_filled_in_and_said_to_be_measured(tmp_path: Path) -> None:
    """Only what goes to RAM and has no size; everything else stays as it is."""
    (tmp_path / "data").write_bytes(b"x" * (3 * 1024**2 + 1))
    before = resolved(
        tmp_path,
        [
            {"name": "a", "source": "data", "target": "shm"},
            {"name": "b", "source": "data", "target": "local"},
            {"name": "c", "source": "/none", "target": "shm", "size": "7M"},
        ],
    )
    after = measured(before)
    assert [stage.size for stage in after.job.stage] == ["4M", None, "7M"]
    assert after.origins["stage.0.size"] == "measured"
    assert before.origins["stage.0.size"] == "default"
    assert before.job.stage[0].size is None


def test_without_memory_nothing_is_looked_at(tmp_path: Path) -> None:
    """A source that is not here, or not yet, is no matter then."""
    before = resolved(tmp_path, [{"name": "a", "source": "/none", "target": "shm"}], memory=None)
    assert measured(before) is before


@pytest.mark.parametrize("name", ["d.tar.gz", "d.tgz", "d.tar.xz", "d.tar.bz2"])
def test_the_size_of_a_compressed_archive_has_to_be_said(tmp_path: Path, name: str) -> None:
    """What it unpacks to cannot be seen; kept as a file it can."""
    (tmp_path / name).write_bytes(b"x")
    stage = {"name": "a", "source": name, "target": "shm"}
    with pytest.raises(InputError, match="stage.0.size: must be given for a compressed archive"):
        measured(resolved(tmp_path, [stage]))
    as_file = measured(resolved(tmp_path, [{**stage, "kind": "file"}]))
    assert as_file.job.stage[0].size == "1M"


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    """The error names the field, the path and the way around."""
    stage = {"name": "a", "source": "none", "target": "shm"}
    with pytest.raises(InputError, match="stage.0.source: cannot be read: No such file") as caught:
        measured(resolved(tmp_path, [stage]))
    assert caught.value.value == f"{tmp_path}/none"
    assert "give `size`" in caught.value.hint
