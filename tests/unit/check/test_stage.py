"""What a check finds in the entries of `stage`."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.check.stage import (
    Seen,
    check_staging,
    check_staging_room,
    target_notes,
)
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.site import Site


def job(*stage: dict[str, Any], **resources: Any) -> Job:
    entries = [{"name": "d", "source": "/data/d", **one} for one in stage]
    resources = {"nodes": 2, **resources}
    return Job.model_validate(
        {"name": "a", "command": ["x"], "resources": resources, "stage": entries}
    )


@pytest.mark.parametrize(
    ("entry", "seen", "code", "level", "words"),
    [
        ({"keep": True, "target": "shm"}, Seen(), "stage.keep_ram", "warning", "stays in the memo"),
        ({"distribution": "sbcast"}, Seen(True), "stage.sbcast", "error", "is a directory"),
        ({"distribution": "partition"}, Seen(False), "stage.partition", "error", "is one file"),
        (
            {"distribution": "partition"},
            Seen(True, False),
            "stage.sampler",
            "warning",
            "the program does not read HPML_PART_D,",
        ),
        ({"distribution": "partition"}, Seen(True), "stage.sampler", "warning", "misses the rest"),
    ],
)
def test_what_does_not_go_together(
    entry: dict[str, Any], seen: Seen, code: str, level: str, words: str
) -> None:
    """One finding each, at its field, with what would do."""
    (found,) = check_staging(job(entry), {"d": seen})
    assert (found.code, found.level) == (code, level)
    assert found.field.startswith("stage.0.")
    assert words in found.message
    assert found.hint


@pytest.mark.parametrize(
    ("entry", "seen"),
    [
        ({}, Seen(True)),
        ({"keep": True}, Seen(True)),
        ({"target": "shm"}, Seen(True)),
        ({"distribution": "sbcast"}, Seen(False)),
        ({"distribution": "sbcast"}, Seen()),
        ({"distribution": "chain"}, Seen(True)),
        ({"distribution": "partition"}, Seen(True, True)),
    ],
)
def test_what_goes_together_has_no_finding(entry: dict[str, Any], seen: Seen) -> None:
    """Nor has a source that cannot be looked at here."""
    assert check_staging(job(entry), {"d": seen}) == []


def test_one_node_has_nothing_to_distribute() -> None:
    """Which is no error: the same job file may serve for one node and for several."""
    (found,) = check_staging(job({"distribution": "chain"}, nodes=1), {})
    assert (found.code, found.level) == ("stage.one_node", "warning")
    assert check_staging(job({"distribution": "auto"}, nodes=1), {}) == []


SITE = Site.model_validate(
    {
        "partitions": {
            "both": {"default": True, "node_types": ["a", "b"]},
            "small": {"node_types": ["a"]},
            "vague": {"node_types": ["a", "c"]},
        },
        "node_types": {
            "a": {"memory": "64G", "local_disk": "100G"},
            "b": {"memory": "256G", "local_disk": "2T"},
            "c": {},
        },
    }
)


@pytest.mark.parametrize(
    ("partition", "disk", "level"),
    [
        ("small", 100, ""),
        ("small", 101, "error"),
        (None, 101, "warning"),
        (None, 3000, "error"),
        ("vague", 101, "warning"),
    ],
)
def test_local_disks_of_the_site_profile(partition: str | None, disk: int, level: str) -> None:
    """Too small everywhere is an error; in some of the nodes, or unknown in others, a warning."""
    found = check_staging_room(job(partition=partition), SITE, disk_mib=disk * 1024)
    assert [one.level for one in found] == [level] * bool(level)
    if found:
        assert found[0].code == "stage.local_disk"
        assert "nodes of type a" in found[0].message
        assert ("constraint" in found[0].hint) == (level == "warning")


def test_memory_of_the_site_profile_with_what_goes_to_ram() -> None:
    """The job's own memory and the staged data together; else memory is not the topic."""
    entry = {"target": "shm", "size": "30G"}
    resources = {"memory": "40G", "partition": "small"}
    (found,) = check_staging_room(job(entry, **resources), SITE, disk_mib=0)
    assert (found.code, found.level, found.limit) == ("stage.memory", "error", "64G")
    assert "needs 70G of memory" in found.message
    assert check_staging_room(job(**resources), SITE, disk_mib=0) == []
    assert check_staging_room(job(entry, **resources), None, disk_mib=1 << 30) == []


def test_what_auto_became_is_told() -> None:
    """A line per entry that said auto."""
    one = job({"target": "shm"}, {"name": "e", "target": "local"})
    assert target_notes(one, {"e": "its size is not known"}) == [
        "stage.1.target: auto is local here: its size is not known"
    ]
    assert target_notes(one, {}) == []
