"""Directories that are closed, gone or full: named with what helps, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
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


@pytest.fixture
def full() -> Iterator[Path]:
    """A file system of one page, on which directories can be made and nothing be written."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", directory]
        if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("NOT TESTED: mounting needs root")
        try:
            Path(directory, "ballast").write_bytes(b"x" * 4096)
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("words", ["stage ls", "stage {root} --to {root}/t", "template list"])
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
    ended = within(closed, shell, "template", "list")
    assert (ended.code, "templates: must be text" in ended.err) == (2, True)


@pytest.mark.parametrize("words", ["check", "topo --plan"])
def test_a_job_file_in_a_closed_directory(shell: Shell, closed: Path, words: str) -> None:
    """The job file itself is what cannot be read."""
    ended = shell.bash('"$@"', *words.split(), str(closed / "q.yaml"))
    assert ended.code == 2
    assert f"hpml: error: cannot read {closed}/q.yaml: Permission denied" in ended.err


def test_a_closed_profile_is_an_error(shell: Shell, closed: Path, tmp_path: Path) -> None:
    """What it says might change the job: it is not passed over."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "hpml.toml").symlink_to(closed / "hpml.toml")
    ended = shell.bash('"$@"', "template", "list", cwd=place)
    assert ended.code == 2
    assert "Permission denied" in ended.err
    assert f"{place}/hpml.toml" in ended.err


def test_a_run_of_another_user(shell: Shell) -> None:
    """Its directory is closed: the run and its owner are named; its end is known all the same."""
    assert shell.hpml("run", "--local", "--no-check", shell.job("mine")).code == 0
    (run,) = (shell.records / "runs").glob("mine-*")
    run.chmod(0)
    message = f"hpml: error: run {run.name}: cannot be read: Permission denied\nhint: ask its owner"
    try:
        for words in ("show", "show --json", "topo --run", "logs", "logs -f", "logs -n 3"):
            ended = shell.bash('"$@"', *words.split(), run.name)
            assert (ended.code, ended.out) == (7, ""), words
            assert ended.err.startswith(message), words
        for words in ("list", f"wait {run.name}"):
            ended = shell.bash('"$@"', *words.split())
            assert (ended.code, "COMPLETED" in ended.out + ended.err) == (0, True), ended.err
    finally:
        run.chmod(0o700)


@pytest.mark.parametrize("closed_attempt", [0, 1])
def test_a_closed_attempt_hides_nothing_else(shell: Shell, closed_attempt: int) -> None:
    """Of two attempts one may not be read: its owner is named, and the rest is shown."""
    assert shell.hpml("run", "--local", "--no-check", shell.job("twice")).code == 0
    run = next((shell.records / "runs").glob("twice-*"))
    shutil.copytree(run / "attempts" / "0", run / "attempts" / "1")
    directory = run / "attempts" / str(closed_attempt)
    directory.chmod(0)
    try:
        shown = shell.bash('"$@"', "show", run.name)
        as_json = shell.bash('"$@"', "show", "--json", run.name)
    finally:
        directory.chmod(0o700)
        shutil.rmtree(run)
        shutil.rmtree(shell.records / "submissions" / run.name)
    error = f"hpml: error: run {run.name}, attempt {closed_attempt}: cannot be read: Permission"
    for ended in (shown, as_json):
        assert ended.code == 7
        assert ended.err.startswith(error)
        assert f"\nhint: ask its owner, {owner_name(shell.root)}, for" in ended.err
    assert f"{run.name}  COMPLETED" in shown.out
    assert f"{closed_attempt}: cannot be read\n" in shown.out
    history = as_json.json()["history"]
    assert [bool(one["error"]) for one in history] == [closed_attempt == 0, closed_attempt == 1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((f"{command} a.yaml", 3) for command in ("check", "run", "submit", "render")),
        *((words, 3) for words in ("import s.sh", "topo --plan a.yaml", "topo a.xml", "pack a b")),
        *((words, 3) for words in ("doctor", "init", "template list", "stage ls", "stage x")),
        *((words, 3) for words in ("export node --web-config x", "--records here list")),
        *((words, 0) for words in ("--version", "list", "status", "check --help", "schema")),
        *((words, 0) for words in ("topo", "export metrics", "man submit")),
    ],
)
def test_a_current_directory_that_is_gone(
    shell: Shell, tmp_path: Path, words: str, code: int
) -> None:
    """Every command that needs one says so; the others work wherever one stands."""
    line = 'mkdir g && cd g && rmdir ../g && "$@"'
    ended = shell.bash(line, *words.split(), cwd=tmp_path)
    assert ended.code == code, ended.err
    if code:
        assert ended.out == ""
        assert ended.err == (
            "hpml: error: the current directory no longer exists\nhint: `cd` to another one first\n"
        )


@pytest.mark.parametrize("place", ["{closed}/x", "{closed}"])
def test_a_script_rendered_into_a_closed_directory(shell: Shell, closed: Path, place: str) -> None:
    """The option is named, not hpml's records."""
    ended = shell.bash('"$@"', "render", shell.job(), "-o", place.format(closed=closed))
    assert ended.code == 2
    assert "hpml: error: --output: cannot be " in ended.err
    assert "Permission denied" in ended.err
    assert "HPML_HOME" not in ended.err


@pytest.mark.parametrize("words", ["render {job} -o {full}/a", "template eject srun -o {full}/a"])
def test_an_output_on_a_full_disk(shell: Shell, full: Path, words: str) -> None:
    """The option is named; directories that were made are gone again, others stay."""
    ended = shell.hpml(*words.format(job=shell.job(), full=full).split())
    assert ended.code == 2
    assert ended.err.startswith("hpml: error: --output: cannot be ")
    assert "No space left on device" in ended.err
    assert os.listdir(full) == ["ballast"]
    (full / "mine").mkdir()
    assert shell.hpml("render", shell.job(), "-o", str(full / "mine")).code == 2
    assert os.listdir(full / "mine") == []


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["new", "force"])
def test_an_imported_job_file_on_a_full_disk(
    shell: Shell, full: Path, force: tuple[str, ...]
) -> None:
    """Nothing is left of the file that was begun."""
    (shell.root / "s.sh").write_text("#!/bin/bash\n#SBATCH --ntasks=1\nsrun python train.py\n")
    told = shell.hpml("import", "s.sh", "-o", str(full / "o.yaml"), *force)
    assert told.code == 2
    assert "No space left on device" in told.err
    assert os.listdir(full) == ["ballast"]


@pytest.mark.parametrize("words", ["render {job}", "template eject srun"])
def test_an_output_without_a_word(shell: Shell, words: str) -> None:
    """An unset variable of the shell is not taken for no option."""
    told = shell.hpml(*words.format(job=shell.job()).split(), "-o", "")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("hpml: error: --output: must not be empty")


def test_a_check_of_what_lies_behind_a_closed_directory(shell: Shell, closed: Path) -> None:
    """Nothing is said not to be there that is, and no virtual environment is to be made."""
    job = shell.job(
        "behind",
        command=None,
        script=f"{closed}/train.py",
        workdir=f"{closed}/venv",
        environment={"venv": f"{closed}/venv"},
    )
    told = shell.bash('"$@"', "check", "--local", job)
    assert told.code == 2
    for field, path in (("script", "train.py"), ("workdir", "venv"), ("environment.venv", "venv")):
        said = f"error: {field}: {closed}/{path} cannot be checked: Permission denied\n"
        assert said in told.out
    assert f"hint: `ls -ld {closed}`; ask its owner" in told.out
    assert "does not exist" not in told.out
    assert "python3 -m venv" not in told.out
