"""Jobs that take a snapshot: what is recorded, what is refused, what is left behind."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.runs import snapshot as module
from hpml_orchestrator.runs.show import array_lines, summary_lines, write_rendered
from hpml_orchestrator.runs.snapshot import Snapshot
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.runs.submit import render_job
from hpml_orchestrator.runs.summary import Summary
from hpml_orchestrator.spec import load_job
from tests.unit.runs.repositories import Repository, contents, digest, init

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Submission
    from tests.unit.runs.conftest import World


pytestmark = pytest.mark.usefixtures("home")


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


def test_an_array_tells_its_code_too(tmp_path: Path, world: World) -> None:
    """`show` of the whole array has the line that `show` of one task has."""
    fresh = init(tmp_path / "fresh")
    fresh.write("train.py", "x")
    (state,) = states(world.store, [prepare(world, fresh, array="0-3")])
    assert dict(array_lines(state))["code"] == "no commit yet + changes (snapshot)"


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
    # another second than the index has: a refresh would write it
    os.utime(repository.top / "tools/eval.py", (1_000_000_000, 1_000_000_000))
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
    assert str(error).endswith("'many/2' (1002 bytes) and 2 more")


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


KILLED = """
import os, signal, sys
from pathlib import Path
from hpml_orchestrator.runs import snapshot
from hpml_orchestrator.runs.submit import prepare, render_job
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
        [sys.executable, "-c", KILLED, world.store.root, path], check=False, timeout=120
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
