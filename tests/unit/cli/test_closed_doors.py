"""Directories that are closed, gone or full: told by what the user can mend, and nothing stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.run import owner_name
from tests.unit.cli.conftest import HPML, Result, as_anybody

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Shell

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n"


def anybody(shell: Shell, line: str, *words: str, cwd: Path | None = None) -> Result:
    """Run a line of bash as somebody whom permissions bind; "$@" in it is hpml with these words."""
    done = subprocess.run(
        [*as_anybody(), "bash", "-c", line, "bash", HPML, *words],
        env=shell.environment(),
        cwd=cwd or shell.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def within(closed: Path, shell: Shell, *words: str) -> Result:
    """Run hpml in a directory that is closed once it was entered."""
    closed.chmod(0o700)
    return anybody(shell, 'chmod 0 . && "$@"', *words, cwd=closed)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file in it, which may neither be entered nor read."""
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
            pytest.skip("needs root and the right to mount a tmpfs")
        try:
            Path(directory, "ballast").write_bytes(b"x" * 4096)
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize(
    "words",
    [
        ("stage", "ls"),
        ("stage", "clean"),
        ("stage", "{data}", "--to", "{target}"),
        ("template", "list"),
    ],
    ids=" ".join,
)
def test_a_current_directory_that_is_closed_has_no_profile(
    shell: Shell, closed: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """What `su` leaves is passed over in the search for hpml.toml; one above it would count."""
    for name in ("data", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "x").write_text("x")
    told = within(
        closed,
        shell,
        *(word.format(data=tmp_path / "data", target=tmp_path / "target") for word in words),
    )
    assert (told.code, "error" in told.err) == (0, False), told.err


def test_a_profile_above_a_closed_directory_counts(
    shell: Shell, closed: Path, tmp_path: Path
) -> None:
    """Passing over is not giving up."""
    (tmp_path / "hpml.toml").write_text("templates = 3\n")
    told = within(closed, shell, "template", "list")
    assert told.code == 2
    assert "templates: must be text" in told.err


@pytest.mark.parametrize(("words", "code"), [(("doctor",), 1), (("init",), 2)])
def test_commands_of_the_place_in_a_closed_directory(
    shell: Shell, closed: Path, words: tuple[str, ...], code: int
) -> None:
    """`doctor` says what it can, and `init` that it cannot write there."""
    told = within(closed, shell, *words)
    assert "internal error" not in told.err
    assert told.code in {0, code}
    if words == ("init",):
        assert told.err.startswith("hpml: error: --output: cannot be written: Permission denied")


@pytest.mark.parametrize("words", [("check",), ("topo", "--plan")], ids=" ".join)
def test_a_job_file_in_a_closed_directory(
    shell: Shell, closed: Path, words: tuple[str, ...]
) -> None:
    """The job file itself is what cannot be read."""
    told = anybody(shell, '"$@"', *words, str(closed / "q.yaml"))
    assert told.code == 2
    assert f"hpml: error: cannot read {closed}/q.yaml: Permission denied" in told.err


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_profile_that_is_there_and_closed_is_an_error(
    shell: Shell, closed: Path, tmp_path: Path, kind: str
) -> None:
    """What it says might change the job: it is not passed over."""
    place = tmp_path / "project"
    place.mkdir()
    if kind == "file":
        (place / "hpml.toml").touch(0)
    else:
        (place / "hpml.toml").symlink_to(closed / "hpml.toml")
    told = anybody(shell, '"$@"', "template", "list", cwd=place)
    assert told.code == 2
    assert "Permission denied" in told.err
    assert f"{place}/hpml.toml" in told.err


def test_a_systems_profile_that_cannot_be_looked_for_is_an_error(closed: Path) -> None:
    """The site's rules are not lost without a word; the user's own closed home is passed over."""
    code = (
        "import sys\n"
        "from hpml_orchestrator.errors import InputError\n"
        "from hpml_orchestrator.spec import find_profiles\n"
        "own = {'XDG_CONFIG_HOME': sys.argv[1]}\n"
        "print(find_profiles(None, own, system='/nowhere/site.toml'))\n"
        "try:\n    find_profiles(None, {}, system=sys.argv[1] + '/site.toml')\n"
        "except InputError as error:\n    print(error, '|', error.hint)\n"
    )
    done = subprocess.run(
        [*as_anybody(), sys.executable, "-c", code, closed],
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert first == "[]"
    assert second.startswith("site profile: cannot be looked for: Permission denied (got ")
    assert "`--site none`" in second


def test_a_run_of_somebody_else_is_told_as_such(shell: Shell) -> None:
    """Its directory is closed: the run is named, and whom to ask; its end is known all the same."""
    done = shell.hpml("run", "--local", "--no-check", shell.job("mine"))
    assert done.code == 0, done.err
    (run,) = (shell.records / "runs").glob("mine-*")
    run.chmod(0)
    said = f"hpml: error: run {run.name}: cannot be read: Permission denied\nhint: ask its owner"
    try:
        for words in ("show", "show --json", "topo --run", "logs", "logs -f", "logs -n 3"):
            told = anybody(shell, '"$@"', *words.split(), run.name)
            assert (told.code, told.out) == (7, ""), words
            assert told.err.startswith(said), words
        for word in ("list", "wait"):
            told = anybody(shell, '"$@"', word, *[run.name] * (word == "wait"))
            assert told.code == 0, told.err
            assert "COMPLETED" in told.out + told.err
    finally:
        run.chmod(0o700)


@pytest.mark.parametrize("closed_attempt", [0, 1])
def test_an_attempt_that_is_closed_hides_nothing_else(shell: Shell, closed_attempt: int) -> None:
    """Of two attempts one may not be read: told at the end, whose it is, and the rest is shown."""
    done = shell.hpml("run", "--local", "--no-check", shell.job("twice"))
    assert done.code == 0, done.err
    run = next((shell.records / "runs").glob("twice-*"))
    shutil.copytree(run / "attempts" / "0", run / "attempts" / "1")
    directory = run / "attempts" / str(closed_attempt)
    directory.chmod(0)
    error = f"hpml: error: run {run.name}, attempt {closed_attempt}: cannot be read: Permission"
    try:
        shown = anybody(shell, '"$@"', "show", run.name)
        as_json = anybody(shell, '"$@"', "show", "--json", run.name)
        listed = anybody(shell, '"$@"', "list")
        topo = anybody(shell, '"$@"', "topo", "--run", run.name)
    finally:
        directory.chmod(0o700)
        shutil.rmtree(run)
        shutil.rmtree(shell.records / "submissions" / run.name)
    for told in (shown, as_json):
        assert told.code == 7
        assert told.err.startswith(error)
        assert f"\nhint: ask its owner, {owner_name(shell.root)}, for" in told.err
    assert f"{run.name}  COMPLETED" in shown.out
    assert f"{closed_attempt}: cannot be read\n" in shown.out
    assert f"{1 - closed_attempt}: completed after " in shown.out
    history = as_json.json()["history"]
    assert [bool(one["error"]) for one in history] == [closed_attempt == 0, closed_attempt == 1]
    assert (listed.code, "COMPLETED" in listed.out) == (0, True)
    assert topo.code == (7 if closed_attempt == 1 else 0), topo.err


def test_the_end_of_a_closed_run_that_failed(shell: Shell) -> None:
    """Where its output would be looked for, nobody may look; the end is told without."""
    job = shell.job("bad", command=["false"])
    assert shell.hpml("run", "--local", "--no-check", job).code == 6
    (run,) = (shell.records / "runs").glob("bad-*")
    run.chmod(0)
    try:
        told = anybody(shell, '"$@"', "wait", run.name)
    finally:
        run.chmod(0o700)
    assert told.code == 6
    assert "ended FAILED, exit code 1" in told.err


@pytest.mark.parametrize(
    "words",
    [
        "check a.yaml",
        "run a.yaml",
        "submit a.yaml",
        "render a.yaml",
        "import s.sh",
        "topo --plan a.yaml",
        "topo a.xml",
        "pack a b",
        "doctor",
        "init",
        "template list",
        "export node --web-config x",
        "stage ls",
        "--records here list",
    ],
)
def test_a_current_directory_that_is_gone(shell: Shell, tmp_path: Path, words: str) -> None:
    """Every command that needs one says so."""
    told = anybody(shell, 'mkdir g && cd g && rmdir ../g && "$@"', *words.split(), cwd=tmp_path)
    assert (told.code, told.out) == (3, "")
    assert told.err == (
        "hpml: error: the current directory is not there any more\n"
        "hint: `cd` to another one first\n"
    )


@pytest.mark.parametrize(
    "words", ["--version", "list", "status", "check --help", "schema", "topo", "export metrics"]
)
def test_what_needs_no_current_directory(shell: Shell, tmp_path: Path, words: str) -> None:
    """Records, the manual and the version are told wherever one stands."""
    told = anybody(shell, 'mkdir g && cd g && rmdir ../g && "$@"', *words.split(), cwd=tmp_path)
    assert told.code == 0, told.err


@pytest.mark.parametrize("place", ["{closed}/x", "{closed}"])
def test_a_script_rendered_into_a_closed_directory(shell: Shell, closed: Path, place: str) -> None:
    """The option is named, not hpml's records."""
    told = anybody(shell, '"$@"', "render", shell.job(), "-o", place.format(closed=closed))
    assert told.code == 2
    assert "hpml: error: --output: cannot be " in told.err
    assert "Permission denied" in told.err
    assert "HPML_HOME" not in told.err


@pytest.mark.parametrize(
    "words", ["render {job} -o {full}/a/b", "template eject srun --output {full}/a/b"]
)
def test_an_output_on_a_full_disk(shell: Shell, full: Path, words: str) -> None:
    """The option is named; the directories that were made are gone again."""
    told = shell.hpml(*words.format(job=shell.job(), full=full).split())
    assert told.code == 2
    assert told.err.startswith("hpml: error: --output: cannot be ")
    assert "No space left on device" in told.err
    assert "Errno" not in told.err
    assert os.listdir(full) == ["ballast"]


def test_an_output_that_was_there_stays(shell: Shell, full: Path) -> None:
    """Only what the command made itself is taken away."""
    (full / "mine").mkdir()
    assert shell.hpml("render", shell.job(), "-o", str(full / "mine")).code == 2
    assert os.listdir(full / "mine") == []


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["new", "force"])
def test_an_imported_job_file_on_a_full_disk(
    shell: Shell, full: Path, force: tuple[str, ...]
) -> None:
    """Nothing is left of the file that was begun."""
    (shell.root / "s.sh").write_text(SCRIPT)
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
    told = anybody(shell, '"$@"', "check", "--local", job)
    assert told.code == 2
    for field, path in (("script", "train.py"), ("workdir", "venv"), ("environment.venv", "venv")):
        said = f"error: {field}: {closed}/{path} cannot be checked: Permission denied\n"
        assert said in told.out
    assert f"hint: `ls -ld {closed}`; ask its owner" in told.out
    assert "does not exist" not in told.out
    assert "python3 -m venv" not in told.out
