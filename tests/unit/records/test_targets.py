"""Prometheus finds running jobs by files that appear, live and go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from hpml_orchestrator.records.targets import (
    STALE_SECONDS,
    publish,
    remove_stale,
    renew,
    withdraw,
    withdraw_run,
)

LABELS = {"jobid": "17", "run": "r-1", "user": "ada", "node": "n1", "__scheme__": ""}


def aged(path: Path, seconds: float = 2 * STALE_SECONDS) -> Path:
    """Make a file as old as one whose agent died so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def published(directory: Path, name: str = "r-1.c-17@n1.json") -> Path:
    """A target of ours."""
    publish(directory / name, "10.0.0.1:9445", LABELS)
    return directory / name


def test_a_target_is_as_prometheus_reads_it(tmp_path: Path) -> None:
    """One group with one address; labels without a value are left out; everybody may read it."""
    path = published(tmp_path / "new" / "targets")
    wanted = {"jobid": "17", "run": "r-1", "user": "ada", "node": "n1"}
    assert json.loads(path.read_text()) == [{"targets": ["10.0.0.1:9445"], "labels": wanted}]
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == [path.name]


def test_the_dead_are_swept_and_the_living_stay(tmp_path: Path) -> None:
    """A file without a sign of life for ten minutes goes, with what a killed writer left."""
    dead, alive = published(tmp_path, "dead.c-1@n1.json"), published(tmp_path, "alive.c-2@n1.json")
    aged(dead)
    aged(alive, STALE_SECONDS / 2)
    left = tmp_path / ".dead.c-1@n1.json.x1y2z3"
    left.write_text("[")
    aged(left)
    assert sorted(remove_stale(tmp_path)) == [left.name, dead.name]
    assert os.listdir(tmp_path) == [alive.name]
    assert remove_stale(tmp_path) == []


def test_a_sign_of_life_saves(tmp_path: Path) -> None:
    """A file that is renewed is young; of one that is gone that is known."""
    path = aged(published(tmp_path))
    assert renew(path)
    assert remove_stale(tmp_path) == []
    withdraw(path)
    assert not renew(path)
    withdraw(path)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """By name, kind and owner: several users and other tools may write to the directory."""
    published(tmp_path, "nodes.json")
    published(tmp_path, "r-1.c-17@n1.yml")
    (tmp_path / "r-1.d@n1.json").mkdir()
    os.mkfifo(tmp_path / "r-1.pipe@n1.json")
    (tmp_path / "r-1.link@n1.json").symlink_to("nodes.json")
    if os.getuid() == 0:
        os.chown(published(tmp_path, "r-1.theirs@n1.json"), 65534, 65534)
    for path in list(tmp_path.iterdir()):
        os.utime(path, (1, 1), follow_symlinks=False)
    before = sorted(os.listdir(tmp_path))
    assert remove_stale(tmp_path) == []
    withdraw_run(tmp_path, "r-1")
    assert sorted(os.listdir(tmp_path)) == before
    renew(tmp_path / "r-1.link@n1.json")
    assert (tmp_path / "nodes.json").stat().st_mtime == 1, "links are not followed"


def test_a_run_that_is_over_loses_its_targets(tmp_path: Path) -> None:
    """Those of all of its nodes, and of no other run; an array's name means all of its tasks."""
    for name in ("a.c-1@n1.json", "a.c-1@n2.json", "a.7.c-2@n1.json", "ab.c-3@n1.json"):
        published(tmp_path, name)
    withdraw_run(tmp_path, "a.7")
    assert sorted(os.listdir(tmp_path)) == ["a.c-1@n1.json", "a.c-1@n2.json", "ab.c-3@n1.json"]
    withdraw_run(tmp_path, "a")
    assert os.listdir(tmp_path) == ["ab.c-3@n1.json"]
