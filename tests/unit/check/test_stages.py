"""Whether data can be staged, and how much there is, by a look at this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.stages import check_stages, check_targets
from hpml_orchestrator.records.job import Job


def job(*stage: dict[str, Any], **resources: Any) -> Job:
    """A job of two nodes that stages these entries."""
    entries = [{"name": "d", "source": "/none", **entry} for entry in stage]
    resources = {"nodes": 2, **resources}
    return Job.from_json({"name": "a", "command": ["x"], "resources": resources, "stage": entries})


def found(entry: dict[str, Any], **more: Any) -> list[tuple[str, str, str]]:
    """Code, level and message of what is found of one entry."""
    findings, _ = check_stages(job(entry, **more), seconds=9)
    assert all(finding.field.startswith("stage.0.") for finding in findings)
    return [(finding.code, finding.level, finding.message) for finding in findings]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory of 3 MiB."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "x").write_bytes(b"x" * (3 * 1024**2))
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({}, {"local": 3}),
        ({"target": "shm"}, {"shm": 3}),
        ({"target": "/scratch"}, {"/scratch": 3}),
        ({"size": "7M"}, {"local": 7}),
    ],
)
def test_data_are_measured(tree: Path, entry: dict[str, Any], wanted: dict[str, int]) -> None:
    """Sizes add up by target."""
    findings, sizes = check_stages(job({"source": str(tree), **entry}), seconds=9)
    assert (findings, sizes) == ([], wanted)


@pytest.mark.parametrize(
    ("entry", "nodes", "code", "level", "message"),
    [
        ({"keep": True, "target": "shm"}, 2, "stage.keep_ram", "warning", "stays in the memory"),
        ({"distribution": "chain"}, 1, "stage.one_node", "warning", "nothing to distribute"),
        ({"distribution": "auto"}, 1, "", "", ""),
        ({"keep": True}, 2, "", "", ""),
        ({"distribution": "chain"}, 2, "", "", ""),
    ],
)
def test_options_that_do_not_go_together(
    tree: Path, entry: dict[str, Any], nodes: int, code: str, level: str, message: str
) -> None:
    """Warnings if it may not be intended."""
    findings = found({**entry, "source": str(tree)}, nodes=nodes)
    assert [finding[:2] for finding in findings] == [(code, level)] * bool(code)
    assert all(message in finding[2] for finding in findings)


def test_data_that_do_not_exist() -> None:
    """An error; a warning where the user gave a size: then only the nodes need them."""
    (finding,), _ = check_stages(job({}), seconds=9)
    assert (finding.code, finding.level) == ("stage.missing", "error")
    assert "give its `size`" in finding.hint
    ((code, level, _),) = found({"size": "1M"})
    assert (code, level) == ("stage.missing", "warning")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("tree", "pack", "not a directory of tar shards"),
        ("tree", "tar", "has kind tar, but is a directory"),
        ("no.tar", "auto", "no.tar"),
        ("no.zip", "auto", "no.zip"),
    ],
)
def test_sources_of_another_kind_are_errors(tree: Path, name: str, kind: str, message: str) -> None:
    """A tree that is not a pack, a directory for a tar, and files that are not archives."""
    source = tree.parent / name
    if name != "tree":
        source.write_bytes(b"x" * 2000)
    ((code, level, text),) = found({"source": str(source), "kind": kind})
    assert (code, level) == ("stage.kind", "error")
    assert message in text


def test_what_staging_refuses_of_a_tree(tmp_path: Path) -> None:
    """Links that lead out, and fifos."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "in").symlink_to("..")
    (tree / "sub" / "up").symlink_to("../..")
    (tree / "etc").symlink_to("/etc")
    (finding,), _ = check_stages(job({"source": f"{tree}/"}), seconds=9)
    assert finding.code == "stage.refused"
    assert "etc: symbolic link to an absolute path (/etc)" in finding.message
    assert "sub/up: symbolic link that leaves the tree (../..)" in finding.message
    assert "sub/in" not in finding.message
    assert "outside_links: true" in finding.hint
    assert "follow_links: true" in finding.hint
    assert found({"source": str(tree), "outside_links": True}) == []
    (tree / "etc").unlink()
    ((_, level, message),) = found({"source": str(tree), "follow_links": True})
    assert (level, "/sub/in: symbolic link to a directory above it" in message) == ("error", True)
    (tmp_path / "beside").mkdir()
    for link in ("in", "up"):
        (tree / "sub" / link).unlink()
    (tree / "sub" / "on").symlink_to("../../beside")
    assert found({"source": str(tree), "follow_links": True}) == []
    os.mkfifo(tree / "sub" / "pipe")
    ((code, _, message),) = found({"source": str(tree), "outside_links": True})
    assert code == "stage.refused"
    assert "sub/pipe: is a device, fifo or socket" in message


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("s3://b/images", "`aws s3 cp --recursive s3://b/images /data/images`, or in environment"),
        ("gs://b/x.tar", "`gcloud storage cp gs://b/x.tar /data/x.tar`"),
        ("https://a.example/x.zip?v=1", "`wget -O /data/x.zip 'https://a.example/x.zip?v=1'`"),
        ("swift://b/x", "`rclone copy REMOTE:b/x /data/x`"),
        ("file:///data/x", "write the path: /data/x"),
    ],
)
def test_urls_are_downloaded_before(source: str, hint: str) -> None:
    """An error with the command to type, and its target."""
    asked = replace(job({"source": source}), workdir="/data")
    (finding,), sizes = check_stages(asked, seconds=9)
    assert (finding.code, finding.level, sizes) == ("stage.url", "error", {})
    assert hint in finding.hint


def test_many_files_that_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning on Lustre and GPFS only, and not about what the program writes."""
    monkeypatch.setattr("hpml_orchestrator.check.stages._MANY_FILES", 3)
    for index in range(4):
        (tmp_path / str(index % 2)).mkdir(exist_ok=True)
        (tmp_path / str(index % 2) / f"{index}.png").touch()
    words = [f"--data={tmp_path}", "--train", str(tmp_path), f"--output={tmp_path}", "--lr=.", "0"]
    asked = replace(job(), args=tuple(words), workdir=str(tmp_path))
    for kind, fields in (("lustre", ["args.0", "args.2"]), ("nfs4", [])):
        monkeypatch.setattr(
            "hpml_orchestrator.check.stages.file_system_type", lambda _, kind=kind: kind
        )
        findings, _ = check_stages(asked, seconds=9)
        assert [finding.field for finding in findings] == fields
        assert all("more than 3 files on lustre" in one.message for one in findings)
        assert all(f"`hpml pack {tmp_path} DEST`" in one.hint for one in findings)


def test_the_walk_through_data_ends(tmp_path: Path) -> None:
    """After its time limit it reports the number of entries and no size."""
    for index in range(5):
        (tmp_path / f"{index}").write_bytes(b"x" * 1024**2)
    ticks = iter(range(100))
    asked = job({"source": str(tmp_path)})
    (finding,), sizes = check_stages(asked, seconds=3, clock=lambda: float(next(ticks)))
    assert (finding.code, finding.level) == ("stage.partly", "warning")
    assert "only the first 3 entries" in finding.message
    assert sizes == {}


def test_targets_of_this_machine() -> None:
    """Only those given by path: hpml chooses the others itself."""
    (finding,) = check_targets(job({"target": "/nosuch/dir"}), {}, {})
    assert (finding.code, finding.field) == ("stage.target", "stage.0.target")
    assert finding.message.startswith("no such directory on this node")
    two = job({"target": "/dev/shm"}, {"name": "e", "target": "local"})
    assert list(check_targets(two, {}, {})) == []


def test_data_that_do_not_fit_here() -> None:
    """More than is free is a warning, because kept data may be there; more than all an error."""
    two = job({"size": "900T", "target": "shm"}, {"name": "e", "size": "1M", "target": "local"})
    _, sizes = check_stages(two, seconds=9)
    (finding,) = check_targets(two, sizes, {"shm": "/dev/shm", "local": "/tmp"})
    assert (finding.level, finding.field) == ("error", "stage.0.target")
    assert "the data are 900.0 TiB, and " in finding.message
    assert " are available in /dev/shm (" in finding.message
    figures = os.statvfs("/tmp")
    free = figures.f_bavail * figures.f_frsize
    sizes = {"local": (free + figures.f_blocks * figures.f_frsize) // 2 // 1024**2}
    assert [each.level for each in check_targets(two, sizes, {"local": "/tmp"})] == ["warning"]
