"""A snapshot is the working tree as it lies there, taken without touching it or its repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.jobs import snapshot as module
from hpml_orchestrator.jobs.show import summary_lines, write_rendered
from hpml_orchestrator.jobs.snapshot import Snapshot, find
from hpml_orchestrator.jobs.status import states
from hpml_orchestrator.jobs.submit import render_job
from hpml_orchestrator.jobs.summary import Summary
from hpml_orchestrator.jobs.worktree import Git
from hpml_orchestrator.spec import load_job

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Submission
    from tests.unit.jobs.conftest import World

CONFIG = """\
[user]
name = Ada
email = ada@example.org
[init]
defaultBranch = main
[protocol "file"]
allow = always
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, so that no git settings of the machine matter."""
    directory = tmp_path / "home"
    directory.mkdir()
    (directory / ".gitconfig").write_text(CONFIG)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return directory


class Repository:
    """A git repository on disk."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def git(self, *words: str | Path) -> str:
        """Call git in it."""
        command = ["git", "-C", self.top, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(self, name: str | bytes, content: str | bytes = b"") -> Path:
        """Write a file and the directories that it lies in."""
        path = self.top / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def commit(self) -> str:
        """Commit everything and return the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")
        return self.git("rev-parse", "HEAD").strip()


def init(top: Path) -> Repository:
    top.mkdir(parents=True)
    made = Repository(top)
    made.git("init", "--quiet")
    return made


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository with one commit: two scripts, one in a directory."""
    made = init(tmp_path / "code")
    made.write("train.py", "print('old')\n")
    made.write("tools/eval.py", "print('eval')\n")
    made.commit()
    return made


def contents(root: Path) -> dict[str, tuple[str, bytes, bool]]:
    """What a tree holds but for .git: name -> kind, bytes or target, whether it may be run."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != ".git"]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            shown = str(path.relative_to(root))
            if stat.S_ISLNK(mode):
                found[shown] = ("link", os.fsencode(os.readlink(path)), False)
            elif stat.S_ISREG(mode) and name != ".git":
                found[shown] = ("file", path.read_bytes(), bool(mode & stat.S_IXUSR))
    return found


def digest(root: Path) -> str:
    """A hash of all that lies below a directory: names, modes, bytes."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        found.update(f"{path.relative_to(root)} {path.lstat().st_mode}".encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()


def taken(repository: Repository) -> dict[str, tuple[str, bytes, bool]]:
    """The contents of a snapshot of a repository's working tree."""
    with tempfile.TemporaryDirectory() as directory:
        Snapshot(str(repository.top), "").take(Path(directory, "code"))
        return contents(Path(directory, "code"))


def prepare(world: World, repository: Repository, **fields: Any) -> Submission:
    """Prepare a submission of a job that takes a snapshot of the repository."""
    return world.prepare(snapshot=True, **{"workdir": str(repository.top), **fields})


def refused(world: World, repository: Repository | Path, **fields: Any) -> InputError:
    """The error of such a job; nothing is left of it."""
    top = repository.top if isinstance(repository, Repository) else repository
    with pytest.raises(InputError) as caught:
        world.prepare(snapshot=True, **{"workdir": str(top), **fields})
    assert caught.value.field == "snapshot"
    assert caught.value.exit_code == 2
    left = [path for path in world.store.root.rglob("*") if path.parent != world.store.root]
    assert left == []
    return caught.value


def test_it_is_the_tree_with_all_that_is_uncommitted(repository: Repository) -> None:
    """Staged, unstaged, new, deleted, made executable, linked, binary: all as on disk."""
    repository.write(".gitignore", "*.log\n")
    for name in ("staged", "unstaged", "both", "deleted", "removed", "mode", "to link", "to dir"):
        repository.write(name, "one\n")
    repository.write("from dir/a", "a")
    repository.write("linked dir/a", "a")
    repository.commit()
    repository.write("staged", "two\n")
    repository.write("both", "two\n")
    repository.git("add", "staged", "both")
    repository.write("unstaged", "two\n")
    repository.write("both", "three\n")
    (repository.top / "deleted").unlink()
    repository.git("rm", "--quiet", "removed")
    (repository.top / "mode").chmod(0o755)
    (repository.top / "to link").unlink()
    (repository.top / "to link").symlink_to("train.py")
    (repository.top / "to dir").unlink()
    repository.write("to dir/inside", "new")
    shutil.rmtree(repository.top / "from dir")
    repository.write("from dir", "a file")
    (repository.top / "linked dir").rename(repository.top / "elsewhere")
    (repository.top / "linked dir").symlink_to("elsewhere")
    repository.write("binary", bytes(range(256)) * 5000)
    repository.write("later/intended", "x")
    repository.git("add", "--intent-to-add", "later/intended")
    repository.write("run.log", "ignored")
    os.mkfifo(repository.top / "pipe")
    found = taken(repository)
    assert found == {
        ".gitignore": ("file", b"*.log\n", False),
        "train.py": ("file", b"print('old')\n", False),
        "tools/eval.py": ("file", b"print('eval')\n", False),
        "staged": ("file", b"two\n", False),
        "unstaged": ("file", b"two\n", False),
        "both": ("file", b"three\n", False),
        "mode": ("file", b"one\n", True),
        "to link": ("link", b"train.py", False),
        "to dir/inside": ("file", b"new", False),
        "from dir": ("file", b"a file", False),
        "linked dir": ("link", b"elsewhere", False),
        "elsewhere/a": ("file", b"a", False),
        "binary": ("file", bytes(range(256)) * 5000, False),
        "later/intended": ("file", b"x", False),
    }


def test_names_of_every_kind(repository: Repository) -> None:
    """Newlines, tabs, quotes, colons, bytes that are no text: names are taken as they are."""
    names = [b"new\nline", b"tab\there", b":colon", b'"quoted"', b"-dash", b"caf\xe9", b" blank "]
    for name in names:
        repository.write(name, name)
        repository.write(b"dir" + name + b"/in", name)
    repository.git("add", "--", os.fsdecode(names[0]))
    found = taken(repository)
    for name in names:
        assert found[os.fsdecode(name)] == ("file", name, False)
        assert found[os.fsdecode(b"dir" + name + b"/in")] == ("file", name, False)


def test_bytes_are_those_on_disk(repository: Repository) -> None:
    """Neither export attributes, nor line ends, nor filters change or leave out a file."""
    repository.git("config", "filter.broken.clean", "false")
    repository.git("config", "filter.broken.smudge", "false")
    repository.git("config", "core.autocrlf", "input")
    attributes = "hidden export-ignore\nversion export-subst\n*.txt eol=crlf\n"
    repository.write(".gitattributes", attributes)
    repository.write("hidden", "x\n")
    repository.write("version", "$Format:%H$\n")
    repository.write("unix.txt", "a\nb\n")
    repository.commit()
    repository.write(".gitattributes", attributes + "*.bin filter=broken\n")
    repository.write("mixed.txt", "a\r\nb\n")
    repository.write("large.bin", b"smudged content")
    found = taken(repository)
    assert found["hidden"][1] == b"x\n"
    assert found["version"][1] == b"$Format:%H$\n"
    assert found["unix.txt"][1] == b"a\nb\n"
    assert found["mixed.txt"][1] == b"a\r\nb\n"
    assert found["large.bin"][1] == b"smudged content"


def test_changes_that_git_is_told_not_to_see(repository: Repository) -> None:
    """What is assumed to be unchanged is copied as it is now, and a conflict as it lies there."""
    repository.git("update-index", "--assume-unchanged", "train.py")
    repository.write("train.py", "print('new')\n")
    assert taken(repository)["train.py"][1] == b"print('new')\n"
    repository.git("update-index", "--no-assume-unchanged", "train.py")
    repository.commit()
    repository.git("checkout", "--quiet", "-b", "other", "HEAD~1")
    repository.write("train.py", "print('other')\n")
    repository.commit()
    with pytest.raises(AssertionError):
        repository.git("merge", "main")
    assert taken(repository)["train.py"][1].startswith(b"<<<<<<< HEAD\n")


def test_links_lead_where_they_led(repository: Repository, tmp_path: Path) -> None:
    """Out of the tree they become absolute; to files of the tree they lead to the copy."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").write_text("data")
    links = {
        "tools/out": "../../shared/data",
        "tools/absolute": f"{tmp_path}/shared/data",
        "tools/own": f"{repository.top}/train.py",
        "tools/folder": f"{repository.top}/tools",
        "tools/near": "../train.py",
        "gone": "nowhere",
    }
    for name, target in links.items():
        (repository.top / name).symlink_to(target)
    found = {name: one[1].decode() for name, one in taken(repository).items() if one[0] == "link"}
    assert found == {
        "tools/out": f"{repository.top}/tools/../../shared/data",
        "tools/absolute": f"{tmp_path}/shared/data",
        "tools/own": "../train.py",
        "tools/folder": ".",
        "tools/near": "../train.py",
        "gone": "nowhere",
    }


def test_submodules_come_with_their_own_changes(tmp_path: Path, repository: Repository) -> None:
    """Those that are there as they lie there, nested ones too; an empty one is empty."""
    inner, middle = init(tmp_path / "inner"), init(tmp_path / "middle")
    inner.write("inner.py", "inner")
    inner.commit()
    middle.write("middle.py", "middle")
    middle.git("submodule", "--quiet", "add", inner.top, "deep")
    middle.commit()
    repository.git("submodule", "--quiet", "add", middle.top, "lib/middle")
    repository.git("submodule", "--quiet", "add", inner.top, "unused")
    repository.git("submodule", "--quiet", "update", "--init", "--recursive")
    repository.commit()
    repository.write("lib/middle/middle.py", "changed")
    repository.write("lib/middle/deep/new.py", "new")
    repository.git("submodule", "--quiet", "deinit", "--force", "unused")
    with tempfile.TemporaryDirectory() as directory:
        Snapshot(str(repository.top), "").take(Path(directory, "code"))
        found = contents(Path(directory, "code"))
        assert os.listdir(Path(directory, "code", "unused")) == []
    assert sorted(found) == [
        ".gitmodules",
        "lib/middle/.gitmodules",
        "lib/middle/deep/inner.py",
        "lib/middle/deep/new.py",
        "lib/middle/middle.py",
        "tools/eval.py",
        "train.py",
    ]
    assert found["lib/middle/middle.py"][1] == b"changed"


def test_a_submodule_whose_repository_is_lost(repository: Repository, tmp_path: Path) -> None:
    """It is named, instead of being left out."""
    other = init(tmp_path / "other")
    other.write("x")
    other.commit()
    repository.git("submodule", "--quiet", "add", other.top, "lib")
    repository.write("lib/.git", "gitdir: /nowhere\n")
    with pytest.raises(InputError, match="code/lib'.*no git repository|code/lib.*"):
        taken(repository)
    (repository.top / "lib" / ".git").unlink()
    (repository.top / "lib" / ".git").mkdir()
    with pytest.raises(InputError, match="lib' has a .git that is no repository"):
        taken(repository)


def test_a_repository_inside_counts_as_untracked(repository: Repository) -> None:
    """What was cloned into the tree and not ignored is used by the code, and held to the limits."""
    clone = init(repository.top / "apex")
    clone.write("apex.py", "x")
    clone.write(".gitignore", "*.o\n")
    clone.write("a.o", "object")
    clone.commit()
    assert set(taken(repository)) >= {"apex/apex.py", "apex/.gitignore"}
    assert "apex/a.o" not in taken(repository)
    clone.write("weights", bytes(module.MAX_UNTRACKED_FILE_BYTES + 1))
    clone.commit()
    with pytest.raises(InputError, match=r"'apex/weights' \(10.0 MiB\)"):
        taken(repository)


def test_a_sparse_checkout(repository: Repository) -> None:
    """What is not checked out is not there, as in the working tree."""
    repository.git("sparse-checkout", "set", "--cone", "--sparse-index", "other")
    assert not (repository.top / "tools").exists()
    assert set(taken(repository)) == {"train.py"}


def test_a_linked_worktree(repository: Repository, tmp_path: Path, world: World) -> None:
    """Where .git is a file, its own commit and tree count."""
    repository.git("worktree", "add", "--quiet", "-b", "side", tmp_path / "side")
    side = Repository(tmp_path / "side")
    side.write("train.py", "print('side')\n")
    commit = side.commit()
    submission = prepare(world, side, script="train.py", command=None)
    assert (submission.directory / "code/train.py").read_text() == "print('side')\n"
    noted = submission.record()["provenance"]["snapshot"]
    assert (noted["commit"], noted["branch"]) == (commit, "side")


def test_a_shallow_clone(repository: Repository, tmp_path: Path, world: World) -> None:
    """History is not needed; a commit without a branch has none."""
    repository.write("train.py", "print('two')\n")
    commit = repository.commit()
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.top}", tmp_path / "clone")
    clone = Repository(tmp_path / "clone")
    clone.git("checkout", "--quiet", "--detach")
    noted = prepare(world, clone).record()["provenance"]["snapshot"]
    assert (noted["commit"], noted["branch"], noted["dirty"]) == (commit, "", False)


def test_a_repository_without_a_commit(tmp_path: Path, world: World) -> None:
    """Its files are taken all the same, and `show` says that there is no commit."""
    fresh = init(tmp_path / "fresh")
    fresh.write("train.py", "x")
    submission = prepare(world, fresh)
    assert set(contents(submission.directory / "code")) == {"train.py"}
    noted = submission.record()["provenance"]["snapshot"]
    assert (noted["commit"], noted["branch"], noted["dirty"]) == ("", "main", True)
    (state,) = states(world.store, [submission])
    assert dict(summary_lines(state, Summary()))["code"] == "no commit yet + changes (snapshot)"


def test_the_record_says_what_ran(repository: Repository, world: World) -> None:
    """Commit, branch, changes, how many files and bytes; `show` has a line of it."""
    commit = repository.git("rev-parse", "HEAD").strip()
    clean = prepare(world, repository)
    noted = clean.record()["provenance"]["snapshot"]
    assert noted == {
        "top": str(repository.top),
        "commit": commit,
        "branch": "main",
        "dirty": False,
        "files": 2,
        "bytes": len("print('old')\n") + len("print('eval')\n"),
        "untracked": 0,
    }
    assert world.store.run(clean.sid).record()["provenance"]["snapshot"] == noted
    repository.write("new.py", "xyz")
    repository.write("train.py", "print('new')\n")
    dirty = prepare(world, repository)
    noted = dirty.record()["provenance"]["snapshot"]
    assert (noted["dirty"], noted["files"], noted["untracked"]) == (True, 3, 1)
    assert b"print('new')" in (dirty.directory / "dirty.diff").read_bytes()
    lines = [dict(summary_lines(one, Summary())) for one in states(world.store, [clean, dirty])]
    assert lines[0]["code"] == f"{commit[:7]} (snapshot)"
    assert lines[1]["code"] == f"{commit[:7]} + changes (snapshot)"
    (state,) = states(world.store, [world.prepare()])
    assert "code" not in dict(summary_lines(state, Summary()))


def test_nobody_else_may_look_into_it(repository: Repository, world: World) -> None:
    """The code of a closed home does not become public with the records."""
    assert stat.S_IMODE((prepare(world, repository).directory / "code").stat().st_mode) == 0o700


def test_times_are_kept(repository: Repository, world: World) -> None:
    """Compiled Python beside its source stays valid."""
    os.utime(repository.top / "train.py", (1_000_000_000, 1_000_000_000))
    copy = prepare(world, repository).directory / "code" / "train.py"
    assert copy.stat().st_mtime == 1_000_000_000


def test_paths_of_the_script(repository: Repository, world: World, tmp_path: Path) -> None:
    """Inside the repository they lead into the copy; outside, and of programs, they stay."""
    python = f"{tmp_path}/env/bin/python"
    submission = prepare(
        world,
        repository,
        command=None,
        script="../train.py",
        workdir=str(repository.top / "tools"),
        environment={"python": python},
    )
    text = submission.script.read_text()
    assert '\ncd -- "$hpml_submission"/code/tools\n' in text
    assert f'  {python}\n  "$hpml_submission"/code/train.py\n' in text
    assert str(repository.top) not in text
    assert submission.sid not in text
    outside = tmp_path / "outside.py"
    outside.write_text("x")
    text = prepare(world, repository, command=None, script=str(outside)).script.read_text()
    assert '\ncd -- "$hpml_submission"/code\n' in text
    assert f"\n  {outside}\n" in text


def test_a_working_directory_behind_links(repository: Repository, tmp_path: Path) -> None:
    """The repository is found where the links lead, with names that a shell would split."""
    odd = repository.top / "it's\nodd $HOME"
    odd.mkdir()
    repository.write(f"{odd.name}/go.py", "x")
    (tmp_path / "link").symlink_to(odd)
    path = tmp_path / "job.yaml"
    path.write_text("name: x\nscript: go.py\nworkdir: link\nsnapshot: true\n")
    rendered = render_job(load_job(path))
    assert rendered.snapshot == Snapshot(str(repository.top), odd.name, f"{odd.name}/go.py")
    (tmp_path / "code").rename(tmp_path / "live")
    (tmp_path / "code").mkdir()
    there = tmp_path / "elsewhere"
    there.mkdir()
    Snapshot(str(tmp_path / "live"), odd.name).take(there / "code")
    line = next(one for one in rendered.script.split("\ncd -- ")[1:])
    command = "hpml_submission=$1; cd -- " + line.split("\nexport")[0] + "; pwd; ls"
    done = subprocess.run(
        ["bash", "-c", command, "bash", there], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{there}/code/{odd.name}\ngo.py\n"


def test_an_empty_working_directory(repository: Repository, world: World) -> None:
    """Git does not know it, and there it is all the same."""
    (repository.top / "empty").mkdir()
    submission = prepare(world, repository, workdir=str(repository.top / "empty"))
    assert list((submission.directory / "code" / "empty").iterdir()) == []


def test_taking_it_touches_nothing(repository: Repository, world: World) -> None:
    """Status, index, objects and every other byte of the repository stay, and no hook is run."""
    witness = repository.top.parent / "witness"
    repository.write("train.py", "print('staged')\n")
    repository.git("add", "train.py")
    repository.write("new.py", "new")
    os.utime(repository.top / "tools/eval.py")  # so that a refresh would write the index
    repository.git("config", "core.fsmonitor", str(repository.top.parent / "fsmonitor"))
    repository.git("config", "core.untrackedCache", "true")
    for hook in (".git/hooks/post-index-change", "../fsmonitor"):
        repository.write(hook, f"#!/bin/sh\ntouch '{witness}'\n").chmod(0o755)
    before, tree = digest(repository.top / ".git"), contents(repository.top)
    Snapshot(str(repository.top), "").take(repository.top.parent / "copy")
    assert not witness.exists()
    repository.git("config", "--unset", "core.fsmonitor")
    before = digest(repository.top / ".git")
    prepare(world, repository)
    assert (digest(repository.top / ".git"), contents(repository.top)) == (before, tree)
    assert repository.git("status", "--porcelain") == "M  train.py\n?? new.py\n"


def test_variables_of_the_caller(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called from a hook of another repository, the job's own is taken; settings still count."""
    other = init(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.top / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.top))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "no index"))
    ignored = tmp_path / "ignored"
    ignored.write_text("*.tmp\n")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.excludesFile")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(ignored))
    repository.write("a.tmp")
    assert set(taken(repository)) == {"train.py", "tools/eval.py"}
    assert Git().top(str(repository.top / "tools")) == (str(repository.top), "tools")


@pytest.mark.parametrize("place", ["records", "."])
def test_records_inside_the_repository(repository: Repository, world: World, place: str) -> None:
    """Earlier snapshots do not become part of later ones."""
    world.store.root = repository.top / place
    for _ in range(2):
        submission = prepare(world, repository)
        assert set(contents(submission.directory / "code")) == {"train.py", "tools/eval.py"}


def test_the_first_error_is_where_there_is_no_repository(world: World, tmp_path: Path) -> None:
    """A directory that is in none, or is not there, is named."""
    (tmp_path / "plain").mkdir()
    error = refused(world, tmp_path / "plain")
    assert f"'{tmp_path}/plain' lies in no git repository" in str(error)
    assert "git init" in error.hint
    assert "is not there" in str(refused(world, tmp_path / "nowhere"))


def test_no_working_tree(world: World, repository: Repository) -> None:
    """Inside of .git there is no code."""
    assert "in no working tree" in str(refused(world, repository.top / ".git"))


def test_git_is_not_installed(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refused(world, repository)
    assert "there is no command git" in str(error)
    assert "leave out `snapshot: true`" in error.hint


def test_somebody_elses_repository(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Git refuses it, and the hint is the setting that allows it.

    It is the real git, told by its own variable for tests that all belongs to others.
    """
    script = tmp_path / "bin" / "git"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\nGIT_TEST_ASSUME_DIFFERENT_OWNER=1 exec {shutil.which("git")} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    error = refused(world, repository)
    assert "belongs to somebody else" in str(error)
    assert f"git config --global --add safe.directory {repository.top}" in error.hint


def test_a_script_that_git_ignores(world: World, repository: Repository) -> None:
    """It would be missing in the snapshot: it is named, and so is one that is not there."""
    repository.write(".gitignore", "my_*.py\n")
    repository.write("my_train.py", "x")
    error = refused(world, repository, command=None, script="my_train.py")
    assert f"git ignores the script '{repository.top}/my_train.py'" in str(error)
    error = refused(world, repository, command=None, script="tarin.py")
    assert f"the script '{repository.top}/tarin.py' is not there" in str(error)
    repository.git("add", "--force", "my_train.py")
    submission = prepare(world, repository, command=None, script="my_train.py")
    assert (submission.directory / "code/my_train.py").exists()


def test_a_working_directory_that_git_ignores(world: World, repository: Repository) -> None:
    """It is named, unless something in it is tracked."""
    repository.write(".gitignore", "/out/\n")
    repository.write("out/x")
    error = refused(world, repository, workdir=str(repository.top / "out"))
    assert f"git ignores the workdir '{repository.top}/out'" in str(error)
    repository.git("add", "--force", "out/x")
    assert prepare(world, repository, workdir=str(repository.top / "out"))


def test_untracked_files_have_a_limit(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too large and all of them together: the largest are named, and what to do."""
    limit = 10 * 1024 * 1024
    repository.write("data/fits", bytes(limit))
    prepare(world, repository)
    shutil.rmtree(world.store.root)
    repository.write("data/too large", bytes(limit + 1))
    repository.write("data/larger", bytes(3 * limit))
    error = refused(world, repository)
    assert str(error) == (
        f"snapshot: the repository '{repository.top}' has files that git neither tracks nor "
        "ignores, over 10.0 MiB: 'data/larger' (30.0 MiB), 'data/too large' (10.0 MiB)"
    )
    assert error.hint == "name what is no code in .gitignore, or commit it"
    repository.git("add", "--intent-to-add", "data")
    prepare(world, repository)
    shutil.rmtree(world.store.root)
    monkeypatch.setattr(module, "MAX_UNTRACKED_BYTES", 6 * 1024)
    for index in range(7):
        repository.write(f"many/{index}", bytes(1000 + index))
    error = refused(world, repository)
    assert "has 6.9 KiB in 7 files that git neither tracks nor ignores, over 6.0 KiB in all" in str(
        error
    )
    assert str(error).endswith("'many/2' (1002 B) and 2 more")


def test_a_file_that_cannot_be_read(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named; root may read everything, so that the refusal is made up here."""
    opened = os.open

    def locked(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if os.fsdecode(path) == f"{repository.top}/train.py":
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr("os.open", locked)
    error = refused(world, repository)
    assert str(error) == (f"snapshot: cannot copy '{repository.top}/train.py': Permission denied")


class Clock:
    """A clock that does something to the tree at each look: once per file and some more."""

    def __init__(self, *acts: Any, every: Any = None, step: float = 0) -> None:
        self.step = step
        self.acts = list(acts)
        self.every = every
        self.looks = 0

    def __call__(self) -> float:
        """Return seconds, so many more at each look."""
        self.looks += 1
        if self.acts and self.looks > 1:
            self.acts.pop(0)()
        if self.every is not None:
            self.every(self.looks)
        return self.step * self.looks


def test_a_branch_switch_while_it_is_taken(repository: Repository, tmp_path: Path) -> None:
    """The copy is of one state, not of two: it is made again."""
    repository.git("checkout", "--quiet", "-b", "other")
    repository.write("train.py", "print('other')\n")
    repository.write("tools/eval.py", "print('other')\n")
    other = repository.commit()
    repository.git("checkout", "--quiet", "main")
    clock = Clock(lambda: repository.git("checkout", "--quiet", "other"))
    made = Snapshot(str(repository.top), "").take(tmp_path / "copy", clock=clock)
    assert (made.commit, made.branch) == (other, "other")
    assert {one[1] for one in contents(tmp_path / "copy").values()} == {b"print('other')\n"}


def test_code_that_changes_all_the_time(repository: Repository, tmp_path: Path) -> None:
    """After some tries the error names the file; nothing is left."""
    clock = Clock(every=lambda looks: repository.write("train.py", "x" * looks))
    with pytest.raises(InputError, match="changes while it is copied: 'train.py'"):
        Snapshot(str(repository.top), "").take(tmp_path / "copy", clock=clock)
    assert not (tmp_path / "copy").exists()


def test_a_log_that_grows_is_no_change(repository: Repository, tmp_path: Path) -> None:
    """What is not tracked may be written to, and may vanish."""
    repository.write("slurm-1.out", "one")
    repository.write("a.tmp", "gone soon")
    clock = Clock(
        (repository.top / "a.tmp").unlink,
        every=lambda looks: repository.write("slurm-1.out", "one" * looks),
    )
    made = Snapshot(str(repository.top), "").take(tmp_path / "copy", clock=clock)
    assert made.files == 3
    assert set(contents(tmp_path / "copy")) == {"train.py", "tools/eval.py", "slurm-1.out"}


def test_one_line_is_shown_when_it_takes_long(repository: Repository, tmp_path: Path) -> None:
    """Only past two seconds, only once, with the size of the work."""
    said: list[str] = []
    snapshot = Snapshot(str(repository.top), "")
    snapshot.take(tmp_path / "slow", notice=said.append, clock=Clock(step=3))
    assert said == [f"copying the code of {repository.top}: 2 files, 27 B"]
    snapshot.take(tmp_path / "fast", notice=said.append, clock=lambda: 1.0)
    assert len(said) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from hpml_orchestrator.jobs import snapshot
from hpml_orchestrator.jobs.submit import prepare, render_job
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.spec import load_job
snapshot._PATIENCE_SECONDS = -1
rendered = render_job(load_job(sys.argv[2]))
prepare(Store(Path(sys.argv[1])), rendered, backend="slurm", argv=[], environment={},
        notice=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_hpml_leaves_no_submission(world: World, repository: Repository) -> None:
    """Killed in the midst of copying: there is no such run, and a later submission cleans up."""
    path = repository.write(
        "../job.yaml", "name: x\ncommand: ['true']\nworkdir: code\nsnapshot: true"
    )
    done = subprocess.run(
        [sys.executable, "-c", KILLED, world.store.root, path], check=False, timeout=60
    )
    assert done.returncode == -9
    assert list(world.store.submissions()) == []
    assert list(world.store.runs_dir.iterdir()) == []
    (left,) = world.store.submissions_dir.iterdir()
    prepare(world, repository)
    assert left.exists()  # it may be at work still
    os.utime(left, (0, 0))
    prepare(world, repository)
    assert not left.exists()
    assert len(list(world.store.submissions())) == 2


def test_a_full_disk_leaves_nothing(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that cannot be written are told of as such."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(RecordError, match="No space left on device"):
        prepare(world, repository)
    assert list(world.store.submissions_dir.iterdir()) == []


def rendered_into(repository: Repository, directory: Path, *, force: bool = False) -> Path:
    path = repository.top.parent / "job.yaml"
    path.write_text(f"name: x\nscript: train.py\nworkdir: {repository.top}\nsnapshot: true\n")
    return write_rendered(render_job(load_job(path)), str(directory), force=force)


def test_rendering_into_a_directory_brings_the_code(
    repository: Repository, world: World, tmp_path: Path
) -> None:
    """Script and code stand as in a submission; code that is there is never replaced."""
    script = rendered_into(repository, tmp_path / "out")
    submission = prepare(
        world, repository, command=None, script="train.py", name="x", launcher="torchrun"
    )
    assert contents(tmp_path / "out" / "code") == contents(submission.directory / "code")
    assert sorted(path.name for path in script.parent.iterdir()) == [
        "code",
        "hpml-node.pyz",
        "job.sh",
    ]
    for force in (False, True):
        with pytest.raises(InputError, match="--output: holds a code already"):
            rendered_into(repository, tmp_path / "out", force=force)
    with pytest.raises(InputError, match="--output: lies inside the repository"):
        rendered_into(repository, repository.top / "out")
    repository.write("large", bytes(11 * 1024 * 1024))
    with pytest.raises(InputError, match="'large'"):
        rendered_into(repository, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not (repository.top / "out").exists()


NAMES = st.sampled_from(["a.py", "b.py", "lib/a.py", "lib/sub/b.py", "lib", "x.log"])
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["write", "delete", "run", "link", "add", "commit", "switch"]), NAMES
    ),
    max_size=12,
)


def edit(repository: Repository, act: str, name: str, number: int) -> None:
    path = repository.top / name
    try:
        if act == "write":
            repository.write(name, f"{number} {name}")
        elif act == "delete":
            path.unlink()
        elif act == "run":
            path.chmod(path.stat().st_mode ^ 0o111)
        elif act == "link":
            path.symlink_to("a.py")
        elif act == "add":
            repository.git("add", "--all")
        elif act == "commit":
            repository.git("add", "--all")
            repository.git("commit", "--quiet", "--allow-empty", "--message", "x")
        else:
            repository.git("stash", "--include-untracked")
            repository.git("checkout", "--quiet", "-B", f"branch{number % 2}", "HEAD")
    except (OSError, AssertionError):
        pass  # the tree has no such file, or git has nothing to put aside


@settings(max_examples=25, deadline=None)
@given(before=EDITS, after=EDITS)
def test_later_edits_change_nothing(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    """Whatever was done to the tree: the copy is that tree, and stays it whatever is done after."""
    with tempfile.TemporaryDirectory() as directory:
        repository = init(Path(directory, "code"))
        repository.write(".gitignore", "*.log\n")
        repository.commit()
        for number, (act, name) in enumerate(before):
            edit(repository, act, name, number)
        tree = contents(repository.top)
        index = (repository.top / ".git" / "index").read_bytes()
        Snapshot(str(repository.top), "").take(Path(directory, "copy"))
        copy = contents(Path(directory, "copy"))
        assert copy == {name: one for name, one in tree.items() if not name.endswith(".log")}
        assert (repository.top / ".git" / "index").read_bytes() == index
        for number, (act, name) in enumerate(after, 100):
            edit(repository, act, name, number)
        assert contents(Path(directory, "copy")) == copy


def test_the_job_finds_its_repository_once(repository: Repository, tmp_path: Path) -> None:
    """A job of a submodule's directory has the submodule as its repository."""
    other = init(tmp_path / "other")
    other.write("x.py")
    other.commit()
    repository.git("submodule", "--quiet", "add", other.top, "lib")
    path = tmp_path / "job.yaml"
    path.write_text("name: x\nscript: x.py\nworkdir: code/lib\nsnapshot: true\n")
    assert find(load_job(path).job) == Snapshot(str(repository.top / "lib"), "", "x.py")
