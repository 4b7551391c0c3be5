"""`hpml pack` on the command line: what it prints, and that a signal leaves nothing."""

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
from tests.unit.staging.packs import contents, finished, grow, left, untar

# hpml whose second archives never end: a signal comes in the midst of packing on any machine.
SLOW_PACK = """
import itertools, time
from hpml_orchestrator.cli.__main__ import run
from hpml_orchestrator.staging import pack as shards
real, count = shards._header, itertools.count()
def slow(*words, **more):
    time.sleep(600 if next(count) > 50 else 0)
    return real(*words, **more)
shards._header = slow
run()
"""


def test_pack(hpml: Hpml, tmp_path: Path) -> None:
    """One line of figures, or JSON; and tar unpacks it."""
    tree, dest = grow(tmp_path / "tree", 120), tmp_path / "pack"
    with open(os.fsencode(tree) + b"/odd-\xff", "wb") as stream:
        stream.write(b"12345")
    shown = hpml("pack", str(tree), str(dest), "--shard-size", "64K", "--workers", "2")
    assert (shown.code, shown.err) == (0, ""), shown
    assert re.fullmatch(
        r"packed 121 files, \d+\.\d KiB \(\d+ bytes\) in \d+\.\d\d s, .*/s: \d+ archives in .*\n",
        shown.out,
    )
    assert finished(dest)
    untar(dest, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)
    again = hpml("pack", str(tree), str(dest))
    assert (again.code, again.out) == (2, "")
    assert "DEST: is not empty" in again.err
    told = hpml("pack", str(tree), str(tmp_path / "second"), "--json").json()
    assert (told["files"], told["shards"], told["note"]) == (121, 2, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(shell: Shell, tmp_path: Path, number: signal.Signals) -> None:
    """128 + its number, and not even the half-written directory stays."""
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
    eventually(lambda: list(tmp_path.glob(".pack.packing-*/data-*.tar")))
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, "")
    assert "nothing was packed" in err
    assert not [name for name in left(tmp_path) if "pack" in name]
