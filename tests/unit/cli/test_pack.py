"""`hpml pack` on the command line: what it prints, refuses, and tells of damage."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.cli.meter import Meter
from tests.unit.cli.test_words import HPML, in_terminal
from tests.unit.packing.conftest import contents, finished, grow, left, untar

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = grow(tmp_path / "tree", 120)
    with open(os.fsencode(root) + b"/odd-\xff", "wb") as stream:
        stream.write(b"12345")
    return root


def test_pack_and_ask(hpml: Hpml, tree: Path, tmp_path: Path) -> None:
    """One line of figures, or JSON; then --list, --verify, and tar's own word."""
    dest = tmp_path / "pack"
    told = hpml("pack", str(tree), str(dest), "--shard-size", "64K", "--workers", "2")
    assert (told.code, told.err) == (0, ""), told
    assert re.fullmatch(
        r"packed 121 files, \d+\.\d KiB \(\d+ bytes\) in \d+\.\d\d s, .*/s: \d+ archives in .*\n",
        told.out,
    )
    assert finished(dest)
    untar(dest, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)
    again = hpml("pack", str(tree), str(dest), "--shard-size", "64K", "--resume", "--json").json()
    assert (again["files"], again["written_bytes"], again["bytes_per_second"]) == (121, 0, 0)
    assert again["kept_shards"] == again["shards"] > 3
    rows = hpml("pack", "--list", str(dest), "--json").json()
    assert len(rows) == 121
    assert rows[-1]["name"] == "6/00118.bin"
    (odd,) = [row for row in rows if row["bytes"] == 5]
    assert os.fsencode(odd["name"]) == b"odd-\xff"
    assert set(odd) == {"name", "kind", "shard", "offset", "bytes", "xxh3_128"}
    table = hpml("pack", "--list", str(dest)).out.splitlines()
    assert table[0] == "NAME\tKIND\tSHARD\tOFFSET\tBYTES\tXXH3-128"
    assert [line for line in table if line.startswith("odd-\\xff\tfile\t")]
    told = hpml("pack", "--verify", str(dest))
    assert (told.code, told.err) == (0, "")
    assert "is whole: 121 files" in told.out
    assert hpml("pack", "--verify", str(dest), "--json").json()["damaged"] == []


def test_one_is_told_as_one(hpml: Hpml, tmp_path: Path) -> None:
    """Of one empty directory comes the archive of directories alone."""
    (tmp_path / "tree").mkdir()
    told = hpml("pack", str(tmp_path / "tree"), str(tmp_path / "pack"))
    assert re.match(r"packed 0 files, 0 bytes in .*: 1 archive in ", told.out), told
    told = hpml("pack", "--verify", str(tmp_path / "pack"))
    assert "is whole: 0 files in 1 archive, " in told.out


def test_damage_has_a_status(hpml: Hpml, tree: Path, tmp_path: Path) -> None:
    """8, and the files by name; 3 where there is no pack."""
    dest = tmp_path / "pack"
    hpml("pack", str(tree), str(dest))
    rows = hpml("pack", "--list", str(dest), "--json").json()
    row = next(one for one in rows if one["name"] == "2/00002.bin")
    with open(dest / row["shard"], "r+b") as stream:
        stream.seek(row["offset"])
        stream.write(b"\xff\xff")
    told = hpml("pack", "--verify", str(dest))
    assert (told.code, told.out) == (8, "")
    assert f"{row['shard']}: {row['name']}: is not what was packed" in told.err
    told = hpml("pack", "--verify", str(dest), "--json")
    assert told.code == 8
    assert told.json()["damaged"][0]["name"] == row["name"]
    told = hpml("pack", "--verify", str(tree))
    assert (told.code, told.out) == (3, "")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "SOURCE: must be given"),
        (["{tree}"], 2, "DEST: must be given"),
        (["{tree}", ""], 2, "DEST: must name a directory"),
        (["nowhere", "x"], 3, "no such directory: nowhere"),
        (["{tree}/odd", "x"], 3, "no such directory"),
        (["{tree}/0/00000.bin", "x"], 2, "SOURCE: must be a directory"),
        (["{tree}", "{tree}/x"], 2, "DEST: must not be inside SOURCE"),
        (["{tree}", "x", "--shard-size", "1Q"], 2, "--shard-size: must be a size"),
        (["{tree}", "x", "--shard-size", "1K"], 2, "--shard-size: must be at least 64K"),
        (["{tree}", "x", "--workers", "-1"], 2, "--workers"),
        (["{tree}", "--list", "x"], 2, "SOURCE: cannot be given together with --list"),
        (["--resume", "--verify", "x"], 2, "--resume: cannot be given together with --verify"),
        (["--list", "x", "--verify", "x"], 2, "--list: cannot be given together with --verify"),
        (["--list", "x", "--workers", "2"], 2, "--workers: cannot be given together with --list"),
        (["--list", ""], 2, "--list: must name a directory"),
    ],
)
def test_what_is_wrong_is_told(
    hpml: Hpml, tree: Path, words: list[str], code: int, message: str
) -> None:
    """Arguments that make no sense are an error of one line; nothing is made."""
    told = hpml("pack", *(word.format(tree=tree) for word in words))
    assert (told.code, told.out) == (code, ""), told
    assert message in told.err
    assert not Path("x").exists()


def test_ctrl_c_stops_and_says_how_to_go_on(shell: Shell, tmp_path: Path) -> None:
    """130, no half-written file is left, and the same command with --resume completes it."""
    tree = grow(tmp_path / "tree", 3000, 60_000)
    words = ("pack", str(tree), str(tmp_path / "pack"), "--shard-size", "4M", "--workers", "2")
    process = shell.start(*words, start_new_session=True)
    deadline = time.monotonic() + 120
    while not any(name.endswith(".tar") for name in left(tmp_path / "pack")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("this machine packs faster than the test can press Ctrl-C")
    assert (process.returncode, out) == (130, "")
    assert "--resume goes on" in err
    assert "Traceback" not in err
    assert not [name for name in left(tmp_path / "pack") if name.endswith(".writing")]
    assert "pack.index" not in left(tmp_path / "pack")
    told = shell.hpml(*words, "--resume")
    assert told.code == 0, told
    assert "of them kept" in told.out
    assert finished(tmp_path / "pack")


def test_a_terminal_gets_a_bar(shell: Shell, tmp_path: Path, tree: Path) -> None:
    """On a terminal the figures move, and the last line stays."""
    words: list[str | Path] = [HPML, "pack", str(tree), str(tmp_path / "pack")]
    told = in_terminal(words, {**shell.environment(), "TERM": "xterm"})
    assert "of 121 files" in told
    assert "packed 121 files" in told.splitlines()[-1]


def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Files, bytes, seconds, rate and what is left; no more often."""
    now = 0.0
    with Meter("packed", terminal=False, clock=lambda: now) as meter:
        for second in range(1, 31):
            now = float(second)
            meter(second << 20, second, 40 << 20, 40)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == (
        "hpml: packed 10 of 40 files, 10.0 MiB of 40.0 MiB in 10 s, 1.0 MiB/s, 30 s left"
    )


def test_a_quiet_run_is_quiet(shell: Shell, tmp_path: Path, tree: Path) -> None:
    """Where standard error is no terminal, a run of a moment prints its one line alone."""
    done = subprocess.run(
        [HPML, "pack", tree, tmp_path / "pack"],
        env=shell.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)
