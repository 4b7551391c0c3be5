"""What goes to RAM is measured where memory is asked for, as RAM will hold it."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.packing.pack import PackRequest, pack
from hpml_orchestrator.runs.measure import NodeRoom, chosen_targets, measured, tree_bytes
from hpml_orchestrator.script.render import memory_mebibytes
from hpml_orchestrator.spec import ResolvedJob, load_job
from hpml_orchestrator.staging.capacity import INODE_BYTES

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
    assert tree_bytes(str(tree)) == PAGE * (2 + 0 + 1 + 1 + 2 + 1) + 7 * INODE_BYTES
    assert tree_bytes(str(tree / "one")) == PAGE + INODE_BYTES


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


def test_auto_becomes_a_target_with_its_reason(tmp_path: Path) -> None:
    """Measured like RAM; what the earlier entries take of it counts, and the reason is kept."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * (30 * 1024**2 - 4096))
    entries = [{"name": name, "source": name, "target": "auto"} for name in ("a", "b")]
    entries.append({"name": "c", "source": "c.tar.zst", "target": "auto"})
    before = resolved(tmp_path, entries)
    after = measured(before, NodeRoom(1024 + 100))
    assert [stage.target for stage in after.job.stage] == ["shm", "local", "local"]
    assert after.job.stage[0].size == "30M"
    assert memory_mebibytes(after.job) == 1024 + 30
    told = chosen_targets(after)
    assert told["a"] == "30M are at most half of the 100M that a node has beside the 1G of the job"
    assert told["b"].startswith("30M with 30M of other data are more than half")
    assert told["c"].startswith("its size is not known")
    assert after.origins["stage.0.target"] == f"auto: {told['a']}"
    assert chosen_targets(before) == {}
    assert measured(after, NodeRoom(1)).job == after.job, "what is chosen stays"


def test_auto_without_memory_or_room_is_the_disk(tmp_path: Path) -> None:
    """Nothing is measured for it, so a source may be on the nodes alone."""
    entry = {"name": "a", "source": "/none", "target": "auto"}
    assert measured(resolved(tmp_path, [entry], memory=None)).job.stage[0].target == "local"
    sized = resolved(tmp_path, [{**entry, "size": "1G"}])
    assert measured(sized).job.stage[0].target == "local"


@pytest.mark.parametrize("kind", ["auto", "pack"])
def test_a_pack_is_measured_as_the_tree_that_it_becomes(tmp_path: Path, kind: str) -> None:
    """By its index: small files take a page each in RAM, which they do not in the pack."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(600):
        (tree / "sub" / f"{number}").write_bytes(b"x")
    pack(PackRequest(str(tree), str(tmp_path / "packed"), workers=1))
    entry = {"name": "a", "source": "packed", "target": "shm", "kind": kind}
    assert measured(resolved(tmp_path, [entry])).job.stage[0].size == "3M"
    as_it_is = {**entry, "kind": "tree"}
    assert measured(resolved(tmp_path, [as_it_is])).job.stage[0].size == "1M"
    index = tmp_path / "packed" / "pack.index"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(InputError, match="stage.0.source: .* is damaged"):
        measured(resolved(tmp_path, [entry]))


def test_a_tar_archive_is_measured_by_its_headers(tmp_path: Path) -> None:
    """Small members take a page each in RAM; a compressed one is known by its contents, too."""
    (tmp_path / "one").write_bytes(b"x")
    for mode in ("w", "w:gz"):
        with tarfile.open(tmp_path / f"{mode[2:]}d.tar", mode) as archive:
            for number in range(600):
                archive.add(tmp_path / "one", str(number))
    entry = {"name": "a", "source": "d.tar", "target": "shm"}
    assert measured(resolved(tmp_path, [entry])).job.stage[0].size == "3M"
    assert measured(resolved(tmp_path, [{**entry, "kind": "file"}])).job.stage[0].size == "2M"
    with pytest.raises(InputError, match="stage.0.size: must be given for a compressed archive"):
        measured(resolved(tmp_path, [{**entry, "source": "gzd.tar"}]))


@pytest.mark.parametrize("name", ["d.tar.gz", "d.tgz", "d.tar.xz", "d.tar.bz2", "d.sfs"])
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
