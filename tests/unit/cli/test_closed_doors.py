"""Directories that are closed, gone or full: named with what helps, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpml_orchestrator.records.run import owner_name
from tests.unit.cli.support import Result, Shell


def within(closed: Path, shell: Shell, *words: str) -> Result:
    """Run hpml in a directory that is closed once it was entered."""
    closed.chmod(0o700)
    return shell.bash('chmod 0 . && "$@"', *words, cwd=closed)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory with files in it, which may neither be entered nor read."""
    directory = tmp_path / "closed"
    (directory / "venv" / "bin").mkdir(parents=True)
    (directory / "venv" / "bin" / "activate").touch()
    (directory / "train.py").touch()
    (directory / "q.yaml").write_text("name: q\nlauncher: srun\ncommand: ['true']\n")
    directory.chmod(0)
    yield directory
    directory.chmod(0o700)


@pytest.mark.parametrize("words", ["stage ls", "stage {root} --to {root}/t"])
def test_a_closed_current_directory_has_no_profile(
    shell: Shell, closed: Path, tmp_path: Path, words: str
) -> None:
    """What `su` leaves is passed over in the search for hpml.toml; one above it counts."""
    (tmp_path / "data").mkdir()
    (tmp_path / "t").mkdir()
    words = words.replace("{root} ", f"{tmp_path}/data ").format(root=tmp_path)
    ended = within(closed, shell, *words.split())
    assert (ended.code, "error" in ended.err) == (0, False), ended.err
    (tmp_path / "hpml.toml").write_text("templates = 3\n")
    assert within(closed, shell, "stage", "ls").refuses(2, "templates: must be text")


def test_a_closed_profile_is_an_error(shell: Shell, closed: Path, tmp_path: Path) -> None:
    """Its contents might change the job: it is not ignored."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "hpml.toml").symlink_to(closed / "hpml.toml")
    ended = shell.bash('"$@"', "stage", "ls", cwd=place)
    assert ended.refuses(2, "Permission denied", f"{place}/hpml.toml")


def test_a_run_of_another_user(shell: Shell) -> None:
    """Its directory is closed: the run and its owner are named; its end is known all the same."""
    assert shell.hpml("run", "--local", "--no-check", shell.job("mine")).code == 0
    (run,) = (shell.records / "runs").glob("mine-*")
    shutil.copytree(run / "attempts" / "0", run / "attempts" / "1")
    run.chmod(0)
    message = f"hpml: error: run {run.name}: cannot be read: Permission denied\nhint: ask its owner"
    try:
        for words in ("show", "show --json", "topo --run", "logs", "logs -f"):
            assert shell.bash('"$@"', *words.split(), run.name).refuses(7, message), words
        assert "COMPLETED" in shell.bash('"$@"', "list").out
        assert shell.bash('"$@"', "wait", run.name).code == 0
    finally:
        run.chmod(0o700)
    (run / "attempts" / "0").chmod(0)  # of two attempts one may not be read: the rest is shown
    try:
        ended = shell.bash('"$@"', "show", "--json", run.name)
    finally:
        (run / "attempts" / "0").chmod(0o700)
    assert (ended.code, owner_name(shell.root) in ended.err) == (7, True)
    assert ended.err.startswith(f"hpml: error: run {run.name}, attempt 0: cannot be read: Permiss")
    assert [bool(attempt["error"]) for attempt in ended.json()["history"]] == [True, False]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((words, 3) for words in ("check a.yaml", "topo --plan a.yaml", "topo a.xml", "pack a b")),
        *((words, 3) for words in ("init", "export node --web-config x", "--records here list")),
        *((words, 0) for words in ("list", "check --help", "schema", "topo", "export metrics")),
    ],
)
def test_a_current_directory_that_is_gone(
    shell: Shell, tmp_path: Path, words: str, code: int
) -> None:
    """Every command that needs one reports it; the others work in any directory."""
    line = 'mkdir g && cd g && rmdir ../g && "$@"'
    ended = shell.bash(line, *words.split(), cwd=tmp_path)
    assert ended.code == code, ended.err
    if code:
        assert ended.out == ""
        assert ended.err == (
            "hpml: error: the current directory no longer exists\nhint: `cd` to another one first\n"
        )


def test_a_script_rendered_into_a_closed_directory(shell: Shell, closed: Path) -> None:
    """The option is named, not hpml's records."""
    ended = shell.bash('"$@"', "render", shell.job(), "-o", str(closed))
    assert ended.refuses(2, "hpml: error: --output: cannot be ", "Permission denied")


@pytest.mark.parametrize(
    "words",
    ["render {job} -o {full}/a", "import s.sh -o {full}/o"],
)
def test_an_output_on_a_full_disk(shell: Shell, tmpfs: Callable[[str], Path], words: str) -> None:
    """Nothing is left of what was begun."""
    full = tmpfs("4k")
    (full / "ballast").write_bytes(b"x" * 4096)
    (shell.root / "s.sh").write_text("#!/bin/bash\n#SBATCH --ntasks=1\nsrun python train.py\n")
    ended = shell.hpml(*words.format(job=shell.job(), full=full).split())
    assert ended.refuses(2, "No space left on device")
    assert os.listdir(full) == ["ballast"]


def test_a_check_of_what_is_behind_a_closed_directory(shell: Shell, closed: Path) -> None:
    """It does not claim that something is missing."""
    job = shell.job("behind", command=None, script=f"{closed}/train.py", workdir=f"{closed}/venv")
    ended = shell.bash('"$@"', "check", "--local", job)
    assert ended.code == 2
    for field, name in (("script", "train.py"), ("workdir", "venv")):
        finding = f"error: {field}: {closed}/{name} cannot be checked: Permission denied\n"
        assert finding in ended.out
    assert f"hint: `ls -ld {closed}`; ask its owner" in ended.out
    assert "does not exist" not in ended.out
