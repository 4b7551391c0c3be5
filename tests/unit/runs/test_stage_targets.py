"""What goes to RAM is measured where memory is asked for, as RAM will hold it."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.runs.prepare import NodeRoom, resolve_stage_targets, room_of_site
from hpml_orchestrator.script.template import directive
from hpml_orchestrator.site.model import Site
from hpml_orchestrator.staging.pack import PackRequest, pack

GIB = 1024


def resolved(tmp_path: Path, stage: list[dict[str, Any]], memory: str | None = "1G") -> ResolvedJob:
    path = tmp_path / "job.yaml"
    job = {"name": "a", "command": ["x"], "resources": {"memory": memory}, "stage": stage}
    path.write_text(json.dumps(job))
    return load_job(path)


def test_sizes_are_filled_in_and_said_to_be_measured(tmp_path: Path) -> None:
    """Only what goes to RAM and has no size; everything else stays as it is."""
    (tmp_path / "data").write_bytes(b"x" * (3 * 1024**2 + 1))  # and staging's own manifest
    before = resolved(
        tmp_path,
        [
            {"name": "a", "source": "data", "target": "shm"},
            {"name": "b", "source": "data", "target": "local"},
            {"name": "c", "source": "/none", "target": "shm", "size": "7M"},
        ],
    )
    after, _ = resolve_stage_targets(before)
    assert [stage.size for stage in after.job.stage] == [4, None, 7]
    assert after.origins["stage.0.size"] == "measured"
    assert before.origins["stage.0.size"] == "default"
    assert before.job.stage[0].size is None


@pytest.mark.parametrize(
    ("sizes", "memory", "room", "target", "why"),
    [
        (
            ["30G"],
            "4G",
            NodeRoom(64 * GIB),
            "shm",
            "30G are at most half of the 60G of node memory left",
        ),
        (["31G"], "4G", NodeRoom(64 * GIB), "local", "more than half of the 60G"),
        (["1M", "30G"], "4G", NodeRoom(64 * GIB), "local", "30G with 1M of other data are more"),
        (["40G"], "4G", NodeRoom(64 * GIB, 20 * GIB), "shm", "not on a disk of 20G"),
        (["61G"], "4G", NodeRoom(64 * GIB, 20 * GIB), "local", "more than half"),
        (["1M"], "64G", NodeRoom(32 * GIB), "local", "more than half of the 0M"),
        ([None], "4G", NodeRoom(64 * GIB), "local", "its size is not known"),
        (["1M"], None, NodeRoom(), "local", "the job asks for no memory"),
        (["1M"], "4G", NodeRoom(), "local", "node memory is unknown"),
    ],
)
def test_ram_where_it_fits_well(
    tmp_path: Path,
    sizes: list[str | None],
    memory: str | None,
    room: NodeRoom,
    target: str,
    why: str,
) -> None:
    """Half of the memory left by the job; the reason can be written into a script unchanged."""
    names = [f"d{number}" for number in range(len(sizes))]
    entries = [
        {"name": name, "source": f"{name}.tar.zst", "target": "auto", "size": size}
        for name, size in zip(names, sizes, strict=True)
    ]
    after, reasons = resolve_stage_targets(resolved(tmp_path, entries, memory), room)
    reason = reasons[names[-1]]
    assert after.job.stage[-1].target == target
    assert why in reason
    assert directive(reason) == reason


def test_the_least_node_of_the_partition_counts() -> None:
    """Memory and disk of the smallest node, the partition's own limit, and whether it is known."""
    site = Site.model_validate(
        {
            "partitions": {
                "small": {"default": True, "node_types": ["a", "b"]},
                "capped": {"node_types": ["a"], "max_memory_per_node": "32G"},
                "vague": {"node_types": ["a", "c"]},
            },
            "node_types": {
                "a": {"memory": "128G", "local_disk": "1T"},
                "b": {"memory": "64G", "local_disk": "2T"},
                "c": {},
            },
        }
    )

    def room(partition: str | None) -> NodeRoom:
        resources = {"partition": partition} if partition else {}
        job = Job.from_json({"name": "a", "command": ["x"], "resources": resources})
        return room_of_site(job, site)

    assert room(None) == NodeRoom(64 * GIB, 1024 * GIB)
    assert room("capped") == NodeRoom(32 * GIB, 1024 * GIB)
    assert room("vague") == room("unknown") == NodeRoom()


@pytest.mark.parametrize(
    ("kind", "size"), [("auto", 4), ("pack", 4), ("tree", 1), ("damaged", None)]
)
def test_a_pack_is_measured_as_the_tree_that_it_becomes(
    tmp_path: Path, kind: str, size: int | None
) -> None:
    """By its headers: small files take a page each in RAM, which they do not in the pack."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(600):
        (tree / "sub" / f"{number}").write_bytes(b"x")
    pack(PackRequest(str(tree), str(tmp_path / "packed"), workers=1))
    entry = {"name": "a", "source": "packed", "target": "shm", "kind": kind}
    if kind == "damaged":
        os.truncate(tmp_path / "packed" / "data-00000.tar", 1000)
        with pytest.raises(InputError, match=r"stage.0.source: .*data-00000\.tar: not a whole"):
            resolve_stage_targets(resolved(tmp_path, [{**entry, "kind": "pack"}]))
    else:
        assert resolve_stage_targets(resolved(tmp_path, [entry]))[0].job.stage[0].size == size


def test_a_tar_archive_is_measured_by_its_headers(tmp_path: Path) -> None:
    """Small members take a page each in RAM; a compressed one is known by its contents, too."""
    (tmp_path / "one").write_bytes(b"x")
    for mode in ("w", "w:gz"):
        with tarfile.open(tmp_path / f"{mode[2:]}d.tar", mode) as archive:
            for number in range(600):
                archive.add(tmp_path / "one", str(number))
    entry = {"name": "a", "source": "d.tar", "target": "shm"}
    assert resolve_stage_targets(resolved(tmp_path, [entry]))[0].job.stage[0].size == 4
    assert (
        resolve_stage_targets(resolved(tmp_path, [{**entry, "kind": "file"}]))[0].job.stage[0].size
        == 2
    )
    with pytest.raises(InputError, match="stage.0.size: must be given for a compressed archive"):
        resolve_stage_targets(resolved(tmp_path, [{**entry, "source": "gzd.tar"}]))


@pytest.mark.parametrize("name", ["d.tar.gz", "d.tgz", "d.tar.xz", "d.tar.bz2"])
def test_the_size_of_a_compressed_archive_has_to_be_said(tmp_path: Path, name: str) -> None:
    """What it unpacks to cannot be seen; kept as a file it can."""
    (tmp_path / name).write_bytes(b"x")
    stage = {"name": "a", "source": name, "target": "shm"}
    with pytest.raises(InputError, match="stage.0.size: must be given for a compressed archive"):
        resolve_stage_targets(resolved(tmp_path, [stage]))
    as_file, _ = resolve_stage_targets(resolved(tmp_path, [{**stage, "kind": "file"}]))
    assert as_file.job.stage[0].size == 1


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    """The error names the field, the path and the way around."""
    stage = {"name": "a", "source": "none", "target": "shm"}
    with pytest.raises(InputError, match="stage.0.source: cannot be read: No such file") as caught:
        resolve_stage_targets(resolved(tmp_path, [stage]))
    assert caught.value.value == f"{tmp_path}/none"
    assert "give `size`" in caught.value.hint
