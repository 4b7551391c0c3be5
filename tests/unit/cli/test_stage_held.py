"""`hpml stage ls`, `verify` and `clean`: what is here, whether it is whole, and how it goes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.cli.stage_node import Node, grow
from tests.unit.cli.test_words import HPML


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path / "tree", 30)


def script(node: Node, *words: str) -> str:
    """A script that stages and is over."""
    done = subprocess.run(
        ["bash", "-c", f"{HPML} {' '.join([*node.first, 'stage', *words])}; true"],
        env=node.shell.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_what_is_here(node: Node, tree: Path) -> None:
    """Of this shell, of one that is gone, and kept; with who uses it."""
    mine = node.stage(str(tree), "--to", "shm", "--print", "path").out.strip()
    gone = script(node, str(tree), "--to", "shm", "--name", "gone", "--print", "path")
    script(node, str(tree), "--to", "local", "--keep", "--name", "mine")
    told = node.stage("ls", "--json").json()
    by_name = {(one["name"], one["kept"]): one for one in told}
    assert by_name["tree", False]["path"] == mine
    assert by_name["tree", False]["in_use"] != ""
    assert by_name["gone", False]["path"] == gone
    assert by_name["gone", False]["in_use"] == ""
    (kept,) = [one for one in told if one["kept"]]
    assert (kept["files"], kept["bytes"], kept["state"]) == (30, 15_000, "ok")
    assert (kept["name"], kept["source"]) == ("mine", str(tree))
    assert time.time() - kept["last_used"] < 600
    table = node.stage("ls", str(node.ram)).out.splitlines()
    assert table[0] == "NAME\tSIZE\tFILES\tSTATE\tKEPT\tIN USE\tLAST USED\tSOURCE\tPATH"
    assert len(table) == 3
    assert any(line.endswith(f"\t{tree}\t{mine}") for line in table)


def test_nothing_is_here(node: Node) -> None:
    """Said on standard error; an empty list for programs."""
    for command in ("ls", "clean"):
        told = node.stage(command)
        assert (told.code, told.out, told.err) == (0, "", "nothing is staged\n")
    assert node.stage("ls", "--json").json() == []
    assert node.stage("clean", "--json").json() == {
        "dry_run": False,
        "bytes": 0,
        "removed": [],
        "leftovers": [],
        "kept": [],
    }


def test_damage_is_named(node: Node, tree: Path) -> None:
    """One bit, a missing file, one too many: status 8, by their names; --json has them too."""
    path = node.stage(str(tree), "--to", "shm", "--print", "path").out.strip()
    told = node.stage("verify", path)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith(f"{path} is whole: 30 files, 14.6 KiB (15000 bytes) read in ")
    files = sorted(Path(path).glob("*/*.bin"))
    data = bytearray(files[0].read_bytes())
    data[100] ^= 1
    files[0].chmod(0o600)
    files[0].write_bytes(data)
    files[1].unlink()
    (Path(path) / "odd-\udcff").write_text("x")
    told = node.stage("verify", path)
    assert (told.code, told.out) == (8, "")
    assert f"{path} differs in 3 paths from what was staged" in told.err
    for name in (f"0/{files[0].name}: ", f"0/{files[1].name}: ", "odd-\\xff: "):
        assert name in told.err
    told = node.stage("verify", path, "--json", "--processes", "1")
    assert told.code == 8
    (report,) = told.json()
    assert (report["count"], report["hashed"]) == (3, True)
    assert {one["path"] for one in report["problems"]} == {
        f"0/{files[0].name}",
        f"0/{files[1].name}",
        "odd-\udcff",
    }


def test_without_digests_names_and_sizes_are_compared(node: Node, tree: Path) -> None:
    """And the command says that this is all."""
    path = node.stage(str(tree), "--to", "shm", "--no-hash", "--print", "path").out.strip()
    told = node.stage("verify", path)
    assert told.out.startswith(
        f"{path}: names and sizes of 30 files are right; there are no digests"
    )
    next(Path(path).glob("*/*.bin")).unlink()
    assert node.stage("verify", path).code == 8


def test_what_was_not_staged_cannot_be_verified(node: Node, tree: Path) -> None:
    """A path that is not there, and one that hpml did not make."""
    for path in (tree, tree / "none"):
        told = node.stage("verify", str(path))
        assert (told.code, told.out) == (3, "")
        assert "hpml stage ls" in told.err


def test_only_what_nothing_uses_goes(node: Node, tree: Path) -> None:
    """Of a shell that is over: yes. Of this one: only with --mine. Kept: only with --all."""
    mine = node.stage(str(tree), "--to", "shm", "--print", "path").out.strip()
    gone = script(node, str(tree), "--to", "shm", "--name", "gone", "--print", "path")
    script(node, str(tree), "--to", "local", "--keep")
    told = node.stage("clean", "--dry-run")
    assert f"would remove {gone} of {tree}: 14.6 KiB" in told.out
    assert os.path.isdir(gone)
    told = node.stage("clean")
    assert f"removed {gone} of {tree}: 14.6 KiB" in told.out
    assert f"stays: {os.path.dirname(mine)}: in use" in told.out
    assert "kept for later jobs" in told.out
    assert not os.path.exists(gone)
    assert os.path.isdir(mine)
    told = node.stage("clean", "--older", "1h", "--json").json()
    assert told["removed"] == []
    assert len(told["kept"]) == 2
    told = node.stage("clean", "--older", "0s", str(node.disk), "--json").json()
    assert [one["source"] for one in told["removed"]] == [str(tree)]
    assert told["bytes"] == 15_000
    told = node.stage("clean", "--mine")
    assert f"removed {mine} of {tree}: 14.6 KiB" in told.out
    assert os.listdir(node.ram) == os.listdir(node.disk) == []


def test_kept_data_are_found_by_another_shell(node: Node, tree: Path) -> None:
    """By all that a look at the source tells; not while they are used are they removed."""
    first = script(node, str(tree), "--to", "shm", "--keep", "--json")
    assert '"kept": true' in first
    (one,) = node.stage(str(tree), "--to", "shm", "--json").json()
    assert (one["reused"], one["kept"]) == (True, True)
    told = node.stage("clean", "--all")
    assert "in use by" in told.out
    assert os.path.isdir(one["path"])
    told = node.stage("clean", "--mine", "--all")
    assert told.out.startswith("removed ")
    assert not os.path.exists(one["path"])


def test_keeping_comes_too_late(node: Node, tree: Path) -> None:
    """What this shell staged for itself is not kept by asking again; the command says so."""
    node.stage(str(tree), "--to", "shm")
    told = node.stage(str(tree), "--to", "shm", "--keep")
    assert told.code == 0
    assert "this shell had staged it without --keep" in told.err


def test_damaged_data_are_brought_anew_or_cleaned(node: Node, tree: Path) -> None:
    """What `verify` found stays found, also for kept data that only one bit tells from whole."""
    path = script(node, str(tree), "--to", "shm", "--keep", "--print", "path")
    (kept,) = [one["path"] for one in node.stage("ls", "--json").json()]
    file = next(Path(kept).glob("*/*.bin"))
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert path != kept
    told = node.stage("verify", kept)
    assert told.code == 8
    assert "stage it again" in told.err
    assert [one["state"] for one in node.stage("ls", "--json").json()] == ["damaged"]
    (again,) = node.stage(str(tree), "--to", "shm", "--keep", "--json").json()
    assert again["reused"] is False
    assert node.stage("verify", again["path"]).code == 0
    assert file.read_bytes() == data
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert node.stage("verify", kept).code == 8
    assert node.stage("clean").out.count("removed") == 0, "this shell uses it"
    assert node.stage("clean", "--mine").out.startswith("removed ")
    assert os.listdir(node.ram) == []


def test_directories_are_said_as_for_to(node: Node, tree: Path) -> None:
    """The words shm and local too; what is not there, or is the data itself, is refused."""
    path = node.stage(str(tree), "--to", "shm", "--print", "path").out.strip()
    assert [one["path"] for one in node.stage("ls", "shm", "--json").json()] == [path]
    assert node.stage("ls", "local", "--json").json() == []
    for wrong in (str(tree / "none"), ""):
        told = node.stage("clean", wrong)
        assert (told.code, told.out) == (3, "")
        assert "no such directory" in told.err
    told = node.stage("clean", "--mine", path)
    assert (told.code, told.out) == (2, "")
    assert str(node.ram) in told.err
    assert "--mine" in told.err
    assert os.path.isdir(path)


def test_the_last_command_of_a_shell_cleans_too(node: Node, tree: Path) -> None:
    """`bash -c` lets its last command take its place: what the shell staged is this process's."""
    hpml = f"{HPML} {' '.join(node.first)} stage"
    done = subprocess.run(
        ["bash", "-c", f"{hpml} {tree} --to shm --print path; {hpml} clean --mine"],
        env=node.shell.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    path, cleaned = done.stdout.splitlines()
    assert cleaned.startswith(f"removed {path} of {tree}")
    assert os.listdir(node.ram) == []


@pytest.mark.parametrize("words", ["tree --to shm", "/tmp --to shm", "ls", "verify x", "bench"])
def test_a_current_directory_that_is_gone_is_told(node: Node, words: str) -> None:
    """One line says so: no path below it leads anywhere."""
    gone = node.root / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["bash", "-c", f"rmdir {gone}; {HPML} {' '.join(node.first)} stage {words}"],
        env=node.shell.environment(),
        cwd=gone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "the current directory is not there any more" in done.stderr
