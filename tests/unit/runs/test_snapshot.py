"""A snapshot is the working tree as it lies there, and stays it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs import snapshot as module
from hpml_orchestrator.runs.snapshot import Snapshot, find
from hpml_orchestrator.runs.submit import render_job
from hpml_orchestrator.runs.worktree import Git
from hpml_orchestrator.spec import load_job
from tests.unit.runs.repositories import Repository, contents, init

pytestmark = pytest.mark.usefixtures("home")


def taken(repository: Repository) -> dict[str, tuple[str, bytes, bool]]:
    """The contents of a snapshot of a repository's working tree."""
    with tempfile.TemporaryDirectory() as directory:
        Snapshot(str(repository.top), "").take(Path(directory, "code"))
        return contents(Path(directory, "code"))


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
    said = "lib' has a .git that is no repository"
    with pytest.raises(InputError, match=said):
        taken(repository)
    (repository.top / "lib" / ".git").unlink()
    (repository.top / "lib" / ".git").mkdir()
    with pytest.raises(InputError, match=said) as caught:
        taken(repository)
    assert "git submodule update --init" in caught.value.hint


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
    assert said == [f"copying the code of {repository.top}: 2 files, 27 bytes"]
    snapshot.take(tmp_path / "fast", notice=said.append, clock=lambda: 1.0)
    assert len(said) == 1


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
            # A directory that its owner may not enter is read by root alone.
            path.chmod(path.stat().st_mode ^ (0o011 if path.is_dir() else 0o111))
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


@example(before=[("write", "lib/a.py"), ("run", "lib")], after=[])
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


def test_the_innermost_repository_counts(repository: Repository, tmp_path: Path) -> None:
    """A job of a submodule's directory has the submodule as its repository."""
    other = init(tmp_path / "other")
    other.write("x.py")
    other.commit()
    repository.git("submodule", "--quiet", "add", other.top, "lib")
    path = tmp_path / "job.yaml"
    path.write_text("name: x\nscript: x.py\nworkdir: code/lib\nsnapshot: true\n")
    assert find(load_job(path).job) == Snapshot(str(repository.top / "lib"), "", "x.py")
