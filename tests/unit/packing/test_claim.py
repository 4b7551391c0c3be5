"""One hpml at a time works on a pack, on whichever host; who falls silent has lost it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.packing import PackRequest, claim, pack
from hpml_orchestrator.packing.layout import lay_out
from hpml_orchestrator.packing.place import Place
from hpml_orchestrator.packing.shards import ShardWriter
from hpml_orchestrator.packing.workers import Tell
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.plan import scan_tree
from tests.unit.packing.conftest import contents, finished, grow, left, untar

# FAKE: the host's name. All else of the other hpml is real: a process of its own, that packs and is
# held with its worker behind the first archive until a file appears.
OTHER_HOST = """\
import os, socket, sys, time
socket.gethostname = lambda: "other-node"
from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.packing import PackRequest, pack, shards
_, tree, dest, go_on = sys.argv
def wait():
    while not os.path.exists(go_on):
        time.sleep(0.02)
real, begun = shards.ShardWriter._write, []
def write(*arguments):
    if begun:
        wait()
    begun.append(1)
    return real(*arguments)
shards.ShardWriter._write = write
def hold(*figures):
    if any(name.startswith("data-") for name in os.listdir(dest)):
        print("packing", flush=True)
        wait()
try:
    pack(PackRequest(tree, dest, 1 << 18, workers=1), hold)
except StagingError as error:
    print(error)
    sys.exit(8)
"""


@pytest.fixture
def other_host(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An hpml of another host in the middle of packing `tree` into `pack`."""
    tree = grow(tmp_path / "tree", 1500)
    pack_, go = str(tmp_path / "pack"), str(tmp_path / "go")
    words = [sys.executable, "-c", OTHER_HOST, str(tree), pack_, go]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "packing\n"
        yield process
        process.kill()


def packed(tmp_path: Path, *, resume: bool = True, **more: Any) -> None:
    pack(
        PackRequest(str(tmp_path / "tree"), str(tmp_path / "pack"), 1 << 18, resume=resume), **more
    )


def silent(pack_: Path, seconds: float) -> None:
    """Put the owner's last word back."""
    then = time.time() - seconds
    os.utime(pack_ / ".packing.json", (then, then))


@pytest.mark.parametrize("resume", [True, False])
def test_what_another_host_packs_is_left_to_it(
    tmp_path: Path, other_host: subprocess.Popen[str], resume: bool
) -> None:
    """It is refused with process, host and what to do; the other one completes its pack."""
    silent(tmp_path / "pack", 200)
    before = left(tmp_path / "pack")
    with pytest.raises(StagingError) as caught:
        packed(tmp_path, resume=resume)
    assert f"process {other_host.pid} on other-node packs into" in str(caught.value)
    assert re.search(r"\b2\d\d s", str(caught.value))
    assert "5 minutes" in caught.value.hint
    assert left(tmp_path / "pack") == before
    (tmp_path / "go").touch()
    assert other_host.wait(120) == 0
    assert finished(tmp_path / "pack")


def test_a_silent_host_has_lost_its_pack(tmp_path: Path, other_host: subprocess.Popen[str]) -> None:
    """Five minutes without a word: --resume takes over, and the other one ends when it wakes."""
    silent(tmp_path / "pack", 301)
    with pytest.raises(InputError, match="was not finished"):
        packed(tmp_path, resume=False)
    packed(tmp_path)
    (tmp_path / "go").touch()
    assert other_host.stdout is not None
    assert "has taken over" in other_host.stdout.read()
    assert other_host.wait(120) == 8
    assert finished(tmp_path / "pack")
    untar(tmp_path / "pack", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "tree")


def test_a_file_that_another_took_away_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    """Whoever takes over removes what was being written: that is told, and not a missing file."""
    tree = grow(tmp_path / "tree", 10)
    dest = tmp_path / "pack"
    dest.mkdir()
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise StagingError("another hpml has taken over")
        for name in dest.iterdir():
            name.unlink()

    plan = scan_tree(str(tree), Retry(time.sleep, lambda: False), verb="pack")
    writer = ShardWriter(lay_out(plan, 1 << 18), str(dest), check)
    with pytest.raises(StagingError, match="has taken over"):
        writer(0, Tell(lambda *_: None))
    assert len(looks) == 2


def test_who_packs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's time moves while the pack is made; here at every call, else twice a minute."""
    grow(tmp_path / "tree", 1500)
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(claim, "_FIRST_BEAT_SECONDS", 0.0)
    state = tmp_path / "pack" / ".packing.json"
    seen: list[float] = []

    def look(*_: int) -> None:
        seen.append(time.time() - state.stat().st_mtime)
        os.utime(state, (1, 1))

    packed(tmp_path, on_pack=look)
    assert len(seen) >= 2
    assert max(seen) < 600
    assert claim.SILENT_SECONDS / 30 >= 10, "a few words may get lost"


def test_who_gives_up_says_so(tmp_path: Path) -> None:
    """After an error or Ctrl-C another host may go on at once."""
    tree = grow(tmp_path / "tree", 300)

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path, on_pack=interrupted)
    state = tmp_path / "pack" / ".packing.json"
    note = json.loads(state.read_text())
    note["owner"]["hostname"] = "other-node"  # FAKE: as if that had been there
    told = state.stat()
    state.write_text(json.dumps(note))
    os.utime(state, ns=(told.st_atime_ns, told.st_mtime_ns))
    packed(tmp_path)
    untar(tmp_path / "pack", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_begin_at_once_one_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Both find an empty directory, and then a pack whose owner is gone: one is refused."""

    def no_link(*_: object) -> None:  # FAKE: a file system without hard links
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "tree").mkdir()
    dest = str(tmp_path / "pack")
    first, second = (Place(dest, str(tmp_path / "tree"), resume=True) for _ in range(2))
    first.begin()
    with pytest.raises(StagingError, match=f"process {os.getpid()} on .* has begun to pack"):
        second.begin()
    first.tidy()  # and ends, but for its note
    state = tmp_path / "pack" / ".packing.json"
    note = json.loads(state.read_text())
    note["owner"]["start_ticks"] += 1
    state.write_text(json.dumps(note))
    first, second = (Place(dest, str(tmp_path / "tree"), resume=True) for _ in range(2))
    first.begin()
    with pytest.raises(StagingError, match="has begun to pack"):
        second.begin()
    first.check()
    assert left(tmp_path / "pack") == {".packing.json"}


def test_a_kill_in_its_first_moment_leaves_an_empty_directory(tmp_path: Path) -> None:
    """A note that was being written is nobody's work."""
    grow(tmp_path / "tree", 5)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "..packing.json.12-ab.writing").write_text("{")
    packed(tmp_path, resume=False)
    assert finished(tmp_path / "pack")
