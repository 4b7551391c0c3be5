"""A snapshot is the working tree as it is on disk; later edits do not change it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs import snapshot as module
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import render_job, write_rendered
from hpml_orchestrator.runs.reporting.summary import Summary
from hpml_orchestrator.runs.reporting.text import array_lines, summary_lines
from hpml_orchestrator.runs.snapshot import Snapshot
from hpml_orchestrator.runs.status import states
from tests.unit.runs.repositories import Repository, contents, digest, init

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World

pytestmark = pytest.mark.usefixtures("home")


def taken(repository: Repository) -> dict[str, tuple[str, bytes, bool]]:
    """The contents of a snapshot of a repository's working tree."""
    with tempfile.TemporaryDirectory() as directory:
        Snapshot(str(repository.top), "").take(Path(directory, "code"))
        return contents(Path(directory, "code"))


def prepare(world: World, repository: Repository, **fields: Any) -> Submission:
    """Prepare a submission of a job that takes a snapshot of the repository."""
    return world.prepare(snapshot=True, **{"workdir": str(repository.top), **fields})


def refused(world: World, top: Path, **fields: Any) -> InputError:
    """The error of such a job; nothing is left of it."""
    with pytest.raises(InputError) as caught:
        world.prepare(snapshot=True, **{"workdir": str(top), **fields})
    assert (caught.value.field, caught.value.exit_code) == ("snapshot", 2)
    left = [path for path in world.store.root.rglob("*") if path.parent != world.store.root]
    assert left == []
    return caught.value


def test_it_is_the_tree_with_all_that_is_uncommitted(repository: Repository) -> None:
    """Staged, unstaged, new, deleted, executable, linked, binary, odd names: all as on disk."""
    repository.write(".gitignore", "*.log\n")
    repository.write(".gitattributes", "hidden export-ignore\n*.txt eol=crlf\n")
    for name in ("staged", "both", "deleted", "mode", "to link", "to dir", "linked dir/a"):
        repository.write(name, "one\n")
    repository.write("hidden", "x\n")
    repository.write("unix.txt", "a\nb\n")
    repository.commit()
    repository.write("staged", "two\n")
    repository.write("both", "two\n")
    repository.git("add", "staged", "both")
    repository.write("both", "three\n")
    (repository.top / "deleted").unlink()
    (repository.top / "mode").chmod(0o755)
    (repository.top / "to link").unlink()
    (repository.top / "to link").symlink_to("train.py")
    (repository.top / "to dir").unlink()
    repository.write("to dir/inside", "new")
    (repository.top / "linked dir").rename(repository.top / "elsewhere")
    (repository.top / "linked dir").symlink_to("elsewhere")
    repository.write("binary", bytes(range(256)) * 5000)
    repository.write(b'new\n"line\xe9', "odd")
    repository.write("run.log", "ignored")
    os.mkfifo(repository.top / "pipe")
    found = taken(repository)
    del found[".gitignore"], found[".gitattributes"]
    texts: dict[str, str | bytes] = {
        "train.py": "print('old')\n",
        "tools/eval.py": "print('eval')\n",
        "staged": "two\n",
        "both": "three\n",
        "hidden": "x\n",
        "unix.txt": "a\nb\n",
        "to dir/inside": "new",
        **dict.fromkeys(("mode", "elsewhere/a"), "one\n"),
        "binary": bytes(range(256)) * 5000,
        os.fsdecode(b'new\n"line\xe9'): "odd",
    }
    assert {name: one for name, one in found.items() if one[0] == "file"} == {
        name: ("file", text if isinstance(text, bytes) else text.encode(), name == "mode")
        for name, text in texts.items()
    }
    links = {name: one[1] for name, one in found.items() if one[0] == "link"}
    assert links == {"to link": b"train.py", "linked dir": b"elsewhere"}


def test_links_lead_where_they_led(repository: Repository, tmp_path: Path) -> None:
    """Out of the tree they become absolute; to files of the tree they lead to the copy."""
    links = {
        "tools/out": ("../../data", f"{repository.top}/tools/../../data"),
        "tools/absolute": (f"{tmp_path}/data", f"{tmp_path}/data"),
        "tools/own": (f"{repository.top}/train.py", "../train.py"),
        "tools/folder": (f"{repository.top}/tools", "."),
        "tools/near": ("../train.py", "../train.py"),
        "tools/top": (f"{repository.top}", ".."),
        "gone": ("nowhere", "nowhere"),
        "dots": ("..hidden/train.py", "..hidden/train.py"),
    }
    for name, (target, _) in links.items():
        (repository.top / name).symlink_to(target)
    found = {name: one[1].decode() for name, one in taken(repository).items() if one[0] == "link"}
    assert found == {name: target for name, (_, target) in links.items()}


def test_submodules_come_with_their_own_changes(tmp_path: Path, repository: Repository) -> None:
    """Initialised ones as they lie there; others are empty; a broken one is refused."""
    inner = init(tmp_path / "inner")
    inner.write("inner.py", "inner")
    inner.commit()
    for name in ("lib/used", "unused"):
        repository.git("submodule", "--quiet", "add", inner.top, name)
    repository.commit()
    repository.write("lib/used/inner.py", "changed")
    repository.write("lib/used/new.py", "new")
    repository.git("submodule", "--quiet", "deinit", "--force", "unused")
    clone = init(repository.top / "apex")  # a nested repository, not a submodule
    clone.write("apex.py", "x")
    with tempfile.TemporaryDirectory() as directory:
        made = Snapshot(str(repository.top), "").take(Path(directory, "code"))
        found = contents(Path(directory, "code"))
        assert os.listdir(Path(directory, "code", "unused")) == []
    assert found["lib/used/inner.py"][1] == b"changed"
    assert set(found) >= {"lib/used/new.py", "apex/apex.py", "train.py"}
    assert made["untracked"] == 2
    (repository.top / "lib/used/.git").unlink()
    (repository.top / "lib/used/.git").mkdir()
    with pytest.raises(InputError, match="has a .git that is not a repository"):
        taken(repository)


def while_copying(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Have something done to the tree each time that a file is copied."""
    copy = shutil.copy2

    def slow(*paths: Any, **options: Any) -> None:
        copy(*paths, **options)
        act()

    monkeypatch.setattr(shutil, "copy2", slow)


def test_code_that_changes_all_the_time(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file; an untracked log may grow."""
    sizes = iter(range(100))
    while_copying(monkeypatch, lambda: repository.write("run.out", "x" * next(sizes)))
    repository.write("run.out")
    Snapshot(str(repository.top), "").take(tmp_path / "with log")
    while_copying(monkeypatch, lambda: repository.write("train.py", "x" * next(sizes)))
    with pytest.raises(InputError, match="changes while it is copied: ./train.py"):
        Snapshot(str(repository.top), "").take(tmp_path / "copy")


def test_taking_it_touches_nothing(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of the repository stays, no hook is run, a caller's GIT_DIR does not count."""
    witness = tmp_path / "witness"
    repository.write("train.py", "print('staged')\n")
    repository.git("add", "train.py")
    repository.write("new.py", "new")
    os.utime(repository.top / "tools/eval.py", (1_000_000_000, 1_000_000_000))
    repository.git("config", "core.fsmonitor", str(tmp_path / "fsmonitor"))
    for hook in (".git/hooks/post-index-change", "../fsmonitor"):
        repository.write(hook, f"#!/bin/sh\ntouch '{witness}'\n").chmod(0o755)
    before, tree = digest(repository.top / ".git"), contents(repository.top)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    Snapshot(str(repository.top), "").take(tmp_path / "copy")
    assert (digest(repository.top / ".git"), contents(repository.top)) == (before, tree)
    assert not witness.exists()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "copy/tools/eval.py").stat().st_mtime == 1_000_000_000


def test_the_record_says_what_ran(repository: Repository, world: World) -> None:
    """Commit, branch, changes, number of files and bytes; `show` has a line of it."""
    commit = repository.git("rev-parse", "HEAD").strip()
    clean = prepare(world, repository)
    snapshot = clean.record()["provenance"]["snapshot"]
    assert snapshot == {
        "top": str(repository.top),
        "commit": commit,
        "branch": "main",
        "dirty": False,
        "files": 2,
        "bytes": len("print('old')\n") + len("print('eval')\n"),
        "untracked": 0,
    }
    assert world.store.run(clean.sid).record()["provenance"]["snapshot"] == snapshot
    repository.write("new.py", "xyz")
    repository.write("train.py", "print('new')\n")
    dirty = prepare(world, repository, array="0-3")
    snapshot = dirty.record()["provenance"]["snapshot"]
    assert (snapshot["dirty"], snapshot["files"], snapshot["untracked"]) == (True, 3, 1)
    diff = dirty.directory / "dirty.diff"
    assert b"print('new')" in diff.read_bytes()
    assert (diff.stat().st_mode & 0o777, (dirty.directory / "code").stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    one, array, plain = states(world.store, [clean, dirty, world.prepare()])
    assert dict(summary_lines(one, Summary()))["code"] == f"{commit[:7]} (snapshot)"
    assert dict(array_lines(array))["code"] == f"{commit[:7]} + changes (snapshot)"
    assert "snapshot" not in dict(summary_lines(plain, Summary()))["code"]


def test_paths_of_the_script(repository: Repository, world: World, tmp_path: Path) -> None:
    """Inside the repository they lead into the copy, also through links; outside they stay."""
    (tmp_path / "link").symlink_to(repository.top / "tools")
    fields = {"command": None, "script": "eval.py", "environment": {"python": "/env/python"}}
    submission = prepare(world, repository, workdir=str(tmp_path / "link"), **fields)
    text = submission.script.read_text()
    assert '\ncd -- "$hpml_submission"/code/tools\n' in text
    assert '\n  /env/python "$hpml_submission"/code/tools/eval.py\n' in text
    assert str(repository.top) not in text
    outside = tmp_path / "outside.py"
    outside.write_text("x")
    text = prepare(world, repository, command=None, script=str(outside)).script.read_text()
    assert '\ncd -- "$hpml_submission"/code\n' in text
    assert f" {outside}\n" in text


@pytest.mark.parametrize("place", ["records", "."])
def test_records_inside_the_repository(repository: Repository, world: World, place: str) -> None:
    """Earlier snapshots do not become part of later ones."""
    world.store.root = repository.top / place
    for _ in range(2):
        submission = prepare(world, repository)
        assert set(contents(submission.directory / "code")) == {"train.py", "tools/eval.py"}


def test_what_cannot_be_copied_is_refused(
    world: World, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No repository, ignored files, no git, somebody else's: the field and what to do."""
    top = repository.top
    (tmp_path / "plain").mkdir()
    error = refused(world, tmp_path / "plain")
    assert (str(error), "git init" in error.hint) == (
        f"snapshot: '{tmp_path}/plain' is not in a git repository",
        True,
    )
    assert "no such workdir" in str(refused(world, tmp_path / "nowhere"))
    assert "git cannot read" in str(refused(world, top / ".git"))
    repository.write(".gitignore", "my_*.py\n/out/\n")
    repository.write("my_train.py", "x")
    repository.write("out/x")
    error = refused(world, top, command=None, script="my_train.py")
    assert f"git ignores the script '{top}/my_train.py'" in str(error)
    assert "no such script" in str(refused(world, top, command=None, script="tarin.py"))
    repository.write("outside.md", "x")  # not in out/, whatever its name begins with
    assert f"git ignores the workdir '{top}/out'" in str(refused(world, top / "out"))
    # The real git, with its own variable for tests, behaves as if all belonged to others.
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    real = shutil.which("git")
    git.write_text(f'#!/bin/sh\nGIT_TEST_ASSUME_DIFFERENT_OWNER=1 exec {real} "$@"\n')
    git.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{git.parent}:{path}")
    error = refused(world, top)
    assert f"git config --global --add safe.directory {top}" in error.hint
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the command git is not on PATH" in str(refused(world, top))


def test_untracked_files_have_a_limit(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together: the largest are named, and what to do; tracked files have none."""
    monkeypatch.setattr(module, "MAX_UNTRACKED_BYTES", 6 * 1024)
    for index in range(7):
        repository.write(f"many/{index}", bytes(1000 + index))
    error = refused(world, repository.top)
    assert str(error).startswith(
        f"snapshot: the repository '{repository.top}' has 6.9 KiB in 7 files that git neither "
        "tracks nor ignores, over 6.0 KiB: 'many/6' (1006 bytes), "
    )
    assert str(error).endswith("'many/2' (1002 bytes) and 2 more")
    assert error.hint == "list what is not code in .gitignore, or commit it"
    repository.git("add", "--intent-to-add", "many")
    prepare(world, repository)


def test_rendering_into_a_directory_brings_the_code(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script and code stand as in a submission; code that exists is never replaced."""
    path = tmp_path / "job.yaml"
    path.write_text(f"name: x\nscript: train.py\nworkdir: {repository.top}\nsnapshot: true\n")
    rendered = render_job(load_job(path))
    script = write_rendered(rendered, str(tmp_path / "out"))
    assert contents(tmp_path / "out" / "code") == contents(repository.top)
    files = ["agent.json", "code", "hpml-job.sh", "hpml-node.pyz", "job.sh"]
    assert sorted(os.listdir(script.parent)) == files
    with pytest.raises(InputError, match="--output: already holds a directory code"):
        write_rendered(rendered, str(tmp_path / "out"), force=True)
    with pytest.raises(InputError, match="--output: is inside the repository"):
        write_rendered(rendered, str(repository.top / "out"))
    monkeypatch.setattr(module, "MAX_UNTRACKED_BYTES", -1)
    with pytest.raises(InputError, match="neither tracks nor ignores"):
        write_rendered(rendered, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
