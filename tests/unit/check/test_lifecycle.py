"""`checkpoint` is compared with the time limit, its directory and the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.job import check_directory, check_lifecycle, cluster_notes
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.scheduler.cluster import Cluster, ClusterLimits, Partition
from hpml_orchestrator.site.model import Site


def job(own: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job with `checkpoint`, and a limit of an hour unless it has another."""
    own = {"enabled": True, **(own or {})}
    return Job.from_json({"name": "a", "command": ["x"], "checkpoint": own, **fields})


def limited(time: str, **own: Any) -> Job:
    return job(own, resources={"time": time})


@pytest.mark.parametrize(
    ("asked", "profile", "expected"),
    [
        (limited("10:00"), {}, {}),
        (limited("10:00", enabled=False, lead="1h"), {}, {}),
        (limited("10:00", lead="9:59"), {}, {}),
        (limited("10:00", lead="10:00"), {}, {"checkpoint.lead": "error"}),
        (limited("10:00", lead=90), {}, {"checkpoint.lead": "error"}),
        (limited("10:00", lead=90), {"directives": {"time": {"omit": True}}}, {}),
        (limited("10:00", lead="20s"), {}, {"checkpoint.short": "warning"}),
        (limited("2:00"), {}, {}),
        (limited("1:59"), {}, {"checkpoint.short": "warning"}),
        (limited("10:00", hang="10:00"), {}, {"checkpoint.hang": "warning"}),
        (limited("10:00", hang="off"), {}, {}),
        (limited("10:00", attempts=1), {}, {"checkpoint.attempts": "warning"}),
        (limited("10:00", attempts=1, requeue=[]), {}, {}),
        (limited("10:00"), {"requeue": "no"}, {"checkpoint.node_failure": "warning"}),
        (limited("10:00", requeue=["hang"]), {"requeue": "no"}, {}),
        (
            job(resources={"extra": ["--nodelist=n1"]}),
            {},
            {"checkpoint.nodelist": "warning"},
        ),
        (job({"avoid_failed_nodes": False}, resources={"extra": ["--nodelist=n1"]}), {}, {}),
    ],
)
def test_what_does_not_fit(asked: Job, profile: dict[str, Any], expected: dict[str, str]) -> None:
    """Times that contradict each other, and ends after which the run cannot continue."""
    site = Site.model_validate(profile) if profile else None
    assert {one.code: one.level for one in check_lifecycle(asked, site)} == expected


def codes(asked: Job, records: Path, site: Site | None = None, *, on_nodes: bool) -> dict[str, str]:
    """What is found of a directory, without what depends on this machine's disk."""
    found = check_directory(asked, records, site, on_nodes=on_nodes)
    return {one.code: one.level for one in found if one.code != "checkpoint.space"}


@pytest.mark.parametrize(
    ("directory", "profile", "code"),
    [
        ("/dev/shm/states", {}, "checkpoint.local"),
        ("/dev/shm", {}, "checkpoint.local"),
        ("/tmp/states/{run.id}", {}, "checkpoint.local"),
        ("/scratch/me", {"paths": {"scratch": "/scratch"}}, "checkpoint.local"),
        ("/scratches/me", {"paths": {"scratch": "/scratch"}}, "checkpoint.unwritable"),
        ("/dev/null/states", {}, "checkpoint.unwritable"),
    ],
)
def test_a_directory_that_cannot_keep_checkpoints(
    tmp_path: Path, directory: str, profile: dict[str, Any], code: str
) -> None:
    """Local to a node, or closed to the user."""
    if directory.startswith("/scratches") and os.access("/", os.W_OK):
        code = ""  # root may make it
    site = Site.model_validate(profile)
    found = codes(job({"directory": directory}), tmp_path, site, on_nodes=True)
    assert found == ({code: "error"} if code else {})
    local = codes(job({"directory": "/tmp/states"}), tmp_path, on_nodes=False)
    assert "checkpoint.local" not in local
    assert "checkpoint.memory" in codes(job({"directory": "/dev/shm/s"}), tmp_path, on_nodes=False)


def test_a_directory_with_what_another_run_saved(tmp_path: Path) -> None:
    """A warning names the newest; a directory per run holds nothing of another."""
    for age, name in enumerate(["step-200", "step-100", "step-50", "step-10"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (10_000 - age, 10_000 - age))
    asked = job({"directory": str(tmp_path)})
    (found,) = (
        one
        for one in check_directory(asked, tmp_path, None, on_nodes=False)
        if one.code != "checkpoint.space"
    )
    assert (found.code, found.level) == ("checkpoint.used", "warning")
    assert "step-200" in found.message
    own = job({"directory": f"{tmp_path}/{{run.id}}"})
    assert codes(own, tmp_path, on_nodes=False) == {}
    assert codes(job(), tmp_path, on_nodes=False) == {}
    earlier = tmp_path / "runs" / "a-1" / "checkpoints"
    (earlier / "step-1").mkdir(parents=True)
    assert codes(job({"directory": str(earlier)}), tmp_path, on_nodes=False) == {}


@pytest.mark.parametrize(
    ("free_mib", "inodes", "code"),
    [(0, 5, "full"), (100, 5, "space"), (100_000, 0, "full"), (100_000, 5, "")],
)
@pytest.mark.parametrize("directory", ["checkpoints", "/new/directory"])
def test_a_full_file_system(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: str,
    free_mib: int,
    inodes: int,
    code: str,
) -> None:
    """An error without space or inodes, a warning with little, wherever checkpoints go."""
    state = (4096, 4096, 10**9, free_mib * 256, free_mib * 256, 1000, inodes, inodes, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(state))
    where = str(tmp_path / "new") if directory.startswith("/") else directory
    found = check_directory(job({"directory": where}), tmp_path, None, on_nodes=False)
    assert [one.code for one in found] == [f"checkpoint.{code}"] * bool(code)


PREEMPTS = ClusterLimits(preemption="REQUEUE")


@pytest.mark.parametrize(
    ("limits", "partition", "own", "profile", "notes"),
    [
        (ClusterLimits(), {}, {}, {}, []),
        (PREEMPTS, {}, {}, {}, ["has only Slurm's KillWait to save"]),
        (PREEMPTS, {"grace_seconds": 90}, {}, {}, ["has 00:01:30 to save (GraceTime)"]),
        (PREEMPTS, {"priority_tier": 10}, {}, {}, []),
        (PREEMPTS, {"preemption": "OFF"}, {}, {}, []),
        (PREEMPTS, {"preemption": "SUSPEND"}, {}, {}, ["is suspended and continues by itself"]),
        (PREEMPTS, {}, {"requeue": ["hang"]}, {}, []),
        (PREEMPTS, {}, {"enabled": False}, {}, []),
        (ClusterLimits(), {}, {}, {"requeue": "no"}, ["the run continues as a new job"]),
    ],
)
def test_what_a_run_can_expect_of_the_cluster(
    limits: ClusterLimits,
    partition: dict[str, Any],
    own: dict[str, Any],
    profile: dict[str, Any],
    notes: list[str],
) -> None:
    """Time to save at preemption, how it continues, and nodes that it cannot leave out."""
    low = Partition("low", priority_tier=partition.get("priority_tier", 1) // 2 or 1)
    cluster = Cluster(limits, (Partition("main", default=True, **partition), low))
    site = Site.model_validate(profile)
    said = cluster_notes(job(own, resources={"nodes": 2}), cluster, site)
    assert len(said) == len(notes)
    assert all(part in note for part, note in zip(notes, said, strict=True))
