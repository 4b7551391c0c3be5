"""`hpml pack` on the command line: what it prints, and how it tells of damage."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.unit.cli.support import Hpml, Shell
from tests.unit.packing.conftest import contents, finished, grow, left, untar

# hpml whose second archives never end: Ctrl-C comes in the midst of packing on any machine.
SLOW_PACK = """
import itertools, time
from hpml_orchestrator.cli.__main__ import run
from hpml_orchestrator.packing import shards
real, count = shards.file_header, itertools.count()
def slow(entry):
    time.sleep(600 if next(count) > 50 else 0)
    return real(entry)
shards.file_header = slow
run()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = grow(tmp_path / "tree", 120)
    with open(os.fsencode(root) + b"/odd-\xff", "wb") as stream:
        stream.write(b"12345")
    return root


def test_pack_and_list(hpml: Hpml, tree: Path, tmp_path: Path) -> None:
    """One line of figures, or JSON; then --list, --verify, and tar itself."""
    dest = tmp_path / "pack"
    shown = hpml("pack", str(tree), str(dest), "--shard-size", "64K", "--workers", "2")
    assert (shown.code, shown.err) == (0, ""), shown
    assert re.fullmatch(
        r"packed 121 files, \d+\.\d KiB \(\d+ bytes\) in \d+\.\d\d s, .*/s: \d+ archives in .*\n",
        shown.out,
    )
    assert finished(dest)
    untar(dest, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)
    again = hpml("pack", str(tree), str(dest), "--shard-size", "64K", "--resume", "--json").json()
    assert (again["files"], again["written_bytes"], again["bytes_per_second"]) == (121, 0, 0)
    assert again["kept_shards"] == again["shards"] > 3
    rows = hpml("pack", "--list", str(dest), "--json").json()
    assert (len(rows), rows[-1]["name"]) == (121, "6/00118.bin")
    (odd,) = [row for row in rows if row["bytes"] == 5]
    assert os.fsencode(odd["name"]) == b"odd-\xff"
    assert set(odd) == {"name", "kind", "shard", "offset", "bytes", "xxh3_128"}
    table = hpml("pack", "--list", str(dest)).out.splitlines()
    assert table[0] == "NAME\tKIND\tSHARD\tOFFSET\tBYTES\tXXH3-128"
    assert [line for line in table if line.startswith("odd-\\xff\tfile\t")]


def test_verify(hpml: Hpml, tree: Path, tmp_path: Path) -> None:
    """0 for an intact pack; 8 for a damaged one, with the files by name."""
    dest = tmp_path / "pack"
    hpml("pack", str(tree), str(dest))
    shown = hpml("pack", "--verify", str(dest))
    assert (shown.code, shown.err, "is intact: 121 files" in shown.out) == (0, "", True)
    assert hpml("pack", "--verify", str(dest), "--json").json()["damaged"] == []
    rows = hpml("pack", "--list", str(dest), "--json").json()
    row = next(one for one in rows if one["name"] == "2/00002.bin")
    with open(dest / row["shard"], "r+b") as stream:
        stream.seek(row["offset"])
        stream.write(b"\xff\xff")
    shown = hpml("pack", "--verify", str(dest))
    assert (shown.code, shown.out) == (8, "")
    assert f"{row['shard']}: {row['name']}: is not what was packed" in shown.err
    shown = hpml("pack", "--verify", str(dest), "--json")
    assert (shown.code, shown.json()["damaged"][0]["name"]) == (8, row["name"])


def test_ctrl_c_and_resume(shell: Shell, tmp_path: Path) -> None:
    """130, no half-written file is left, and the same command with --resume completes it."""
    tree = grow(tmp_path / "tree", 200)
    words = ("pack", str(tree), str(tmp_path / "pack"), "--shard-size", "64K", "--workers", "2")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_PACK, *words],
        env=shell.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    eventually(lambda: [name for name in left(tmp_path / "pack") if name.endswith(".tar")])
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "run again with --resume to continue" in err
    assert not [name for name in left(tmp_path / "pack") if name.endswith(".writing")]
    assert shell.hpml(*words, "--resume").code == 0
    assert finished(tmp_path / "pack")
