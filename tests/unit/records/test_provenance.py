"""The provenance of a run, read from real git repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.records import provenance
from hpml_orchestrator.records.schema import ProvenanceRecord
from hpml_orchestrator.version import __version__


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments], check=True, capture_output=True, timeout=120
    )
    return done.stdout.decode()


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep git away from this machine's settings."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and a directory in it."""
    top = tmp_path / "repo"
    (top / "code").mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    git(top, "config", "user.email", "t@example.org")
    git(top, "config", "user.name", "t")
    (top / "code" / "train.py").write_text("print(1)\n")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    return top


def collect(directory: Path) -> tuple[ProvenanceRecord, bytes]:
    return provenance.collect(str(directory), argv=["hpml", "run"], environment={"USER": "me"})


def test_a_clean_tree(repository: Path) -> None:
    """Commit, branch and top are recorded, without a diff."""
    record, diff = collect(repository / "code")
    assert record["git"] == {
        "commit": git(repository, "rev-parse", "HEAD").strip(),
        "branch": "main",
        "top": str(repository),
        "dirty": False,
        "untracked": [],
    }
    assert diff == b""


@pytest.mark.parametrize(
    ("changes", "dirty"),
    [
        (["results/run/n1/log.txt"], False),
        (["results/run/n1/log.txt", "resultset.py"], True),
        (["code/results/mine.py"], True),
        (["results/run/n1/log.txt", "code/train.py"], True),
    ],
    ids=["own", "a name with that beginning", "elsewhere", "code too"],
)
def test_what_hpml_wrote_is_no_change(repository: Path, changes: list[str], *, dirty: bool) -> None:
    """Untracked files in the directory that results are brought to; a change of code counts."""
    for name in changes:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("x\n")
    (repository.parent / "link").symlink_to(repository)
    for own in (repository / "results", repository.parent / "link" / "results"):
        record, _ = provenance.collect(
            str(repository / "code"), argv=[], environment={}, own=[own, repository / "none"]
        )
        found = record["git"] or {}
        assert found["dirty"] is dirty
        assert "results/" not in found["untracked"]


def test_a_dirty_tree_can_be_made_again(repository: Path, tmp_path: Path) -> None:
    """The diff, binary files included, applies to a clone of the commit."""
    (repository / "code" / "train.py").write_text("print(2)\n")
    (repository / "code" / "blob").write_bytes(b"\0\xff\n")
    git(repository, "add", "code/blob")
    (repository / "notes é.txt").write_text("x")
    record, diff = collect(repository / "code")
    found = record["git"] or {}
    assert (found["dirty"], found["diff"]) == (True, "dirty.diff")
    assert len(found["untracked"]) == 1
    git(tmp_path, "clone", "-q", str(repository), "clone")
    (tmp_path / "dirty.diff").write_bytes(diff)
    git(tmp_path / "clone", "apply", str(tmp_path / "dirty.diff"))
    assert (tmp_path / "clone" / "code" / "train.py").read_text() == "print(2)\n"
    assert (tmp_path / "clone" / "code" / "blob").read_bytes() == b"\0\xff\n"


def test_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a removed directory can still submit."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert collect(tmp_path)[0]["directory"] == ""
    finally:
        os.chdir(tmp_path)


def test_filters_count_and_no_hook_or_monitor_is_run(repository: Path, tmp_path: Path) -> None:
    """A file of a clean filter, as of Git LFS, is not changed; what else git may start is not."""
    for name in ("monitor", "hooks/post-index-change"):
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
        script.chmod(0o755)
    git(repository, "config", "filter.upper.clean", "tr a-z A-Z")
    (repository / ".gitattributes").write_text("*.big filter=upper\n")
    (repository / "one.big").write_text("data\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "two")
    assert git(repository, "show", "HEAD:one.big") == "DATA\n"
    (repository / "one.big").touch()
    os.utime(repository / "one.big", (1, 1))
    git(repository, "config", "core.fsmonitor", str(tmp_path / "monitor"))
    git(repository, "config", "core.hooksPath", str(tmp_path / "hooks"))
    git(repository, "status", "--porcelain")
    assert (tmp_path / "was-run").exists(), "git would run them"
    (tmp_path / "was-run").unlink()
    os.utime(repository / "one.big", (2, 2))
    record, diff = collect(repository)
    assert (record["git"] or {})["dirty"] is False
    assert diff == b""
    assert not (tmp_path / "was-run").exists()


def test_settings_and_variables_do_not_spoil_the_diff(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's colours and another diff program, and a hook's variables, change nothing."""
    (repository / "code" / "train.py").write_text("print(2)\n")
    _, plain = collect(repository)
    git(repository, "config", "color.ui", "always")
    git(repository, "config", "diff.external", "echo")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert collect(repository)[1] == plain
    assert b"+print(2)" in plain


def test_without_a_repository_or_git(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit; the rest of the record is there all the same."""
    git(tmp_path, "init", "-q", "empty")
    for directory in (tmp_path, tmp_path / "none", tmp_path / "empty"):
        assert collect(directory)[0]["git"] is None
    monkeypatch.setenv("PATH", "/nowhere")
    record, diff = collect(repository)
    assert (record["git"], diff, record["hpml"]) == (None, b"", __version__)
    assert (record["user"], record["command_line"]) == ("me", ["hpml", "run"])
