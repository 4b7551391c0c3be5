"""One hpml at a time packs into a directory; of another host's it is never guessed that it died."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.packing import PackRequest, pack
from hpml_orchestrator.packing.dest import Destination
from hpml_orchestrator.records.owner import boot_id
from tests.unit.packing.conftest import contents, finished, grow, left, untar

# FAKE: the name of the host and the id of its boot. All else of the other hpml is real: a process
# of its own that packs, and waits for a line behind its first archive.
PACKS = """\
import os, socket, sys
_, tree, dest, host = sys.argv
from hpml_orchestrator.packing import PackRequest, dest as dest_module, pack
from hpml_orchestrator.records import owner
if host:
    socket.gethostname = lambda: host
    owner.boot_id = lambda root="/proc": "another"
def hold(*figures):
    if any(name.startswith("data-") for name in os.listdir(dest)):
        print("packing", flush=True)
        sys.stdin.readline()
pack(PackRequest(tree, dest, 1 << 18, workers=1), hold)
"""


@pytest.fixture(params=["", "other-node"])
def other(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """An hpml of this host, or of another one, in the middle of packing `tree` into `pack`."""
    tree = grow(tmp_path / "tree", 1500)
    words = [sys.executable, "-c", PACKS, str(tree), str(tmp_path / "pack"), request.param]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "packing\n"
        yield process
        process.kill()


def host_of(process: subprocess.Popen[str]) -> str:
    assert isinstance(process.args, list)
    return str(process.args[-1])


def packed(tmp_path: Path, *, resume: bool = True) -> None:
    pack(PackRequest(str(tmp_path / "tree"), str(tmp_path / "pack"), 1 << 18, resume=resume))


def is_right(tmp_path: Path) -> bool:
    untar(tmp_path / "pack", tmp_path / "out")
    return finished(tmp_path / "pack") and contents(tmp_path / "out") == contents(tmp_path / "tree")


@pytest.mark.parametrize("locks", [True, False])
def test_what_another_packs_is_left_to_it(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """It is refused with process, host, since when and what to do; the other one completes it."""

    def no_locks(*_: object) -> None:  # FAKE: a file system without locks
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    before = set((tmp_path / "pack").glob("*.tar"))
    host = host_of(other)
    for resume in (True, False):
        with pytest.raises(StagingError) as caught:
            packed(tmp_path, resume=resume)
        who = f"process {other.pid} on {host or socket.gethostname()} (since 2"
        assert who in str(caught.value)
        assert ("delete" in caught.value.hint) == bool(host)
    assert before <= set((tmp_path / "pack").glob("*.tar"))
    other.communicate("go on\n", timeout=120)
    assert other.returncode == 0
    assert is_right(tmp_path)


def test_after_a_kill(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """On this host --resume goes on; on another one the user has to say that it is gone."""
    other.send_signal(signal.SIGKILL)
    other.wait()
    host = host_of(other)
    if host:
        with pytest.raises(StagingError, match=f"process {other.pid} on {host}") as caught:
            packed(tmp_path)
        state = tmp_path / "pack" / ".packing.json"
        assert f"use --resume on {host}, or delete {state} and use --resume" in caught.value.hint
        state.unlink()
    with pytest.raises(InputError, match="not empty" if host else "was not finished"):
        packed(tmp_path, resume=False)
    packed(tmp_path)
    assert is_right(tmp_path)


def test_what_ran_before_this_host_was_started_anew_is_gone(tmp_path: Path) -> None:
    """Another boot of the same host."""
    grow(tmp_path / "tree", 5)
    Destination(str(tmp_path / "pack"), str(tmp_path / "tree"), resume=False)._close()
    state = tmp_path / "pack" / ".packing.json"
    state.write_text(state.read_text().replace(boot_id(), "earlier"))
    packed(tmp_path)
    assert finished(tmp_path / "pack")


def test_who_gives_up_says_so(tmp_path: Path) -> None:
    """After an error or Ctrl-C another host may go on at once."""
    tree = grow(tmp_path / "tree", 1500)

    def interrupted(*_: int) -> None:
        if list((tmp_path / "pack").glob("*.tar")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(PackRequest(str(tree), str(tmp_path / "pack"), 1 << 18, workers=1), interrupted)
    state = tmp_path / "pack" / ".packing.json"
    note = json.loads(state.read_text())
    note["owner"].update(hostname="other-node", boot_id="")  # FAKE: as if that had been there
    written = state.stat()
    state.write_text(json.dumps(note))
    os.utime(state, ns=(written.st_atime_ns, written.st_mtime_ns))
    packed(tmp_path)
    assert is_right(tmp_path)


def test_of_two_that_begin_at_once_one_packs(tmp_path: Path) -> None:
    """The other one is refused, until the first has ended."""
    (tmp_path / "tree").mkdir()
    dest, tree = str(tmp_path / "pack"), str(tmp_path / "tree")
    first = Destination(dest, tree, resume=True)
    with pytest.raises(StagingError, match=f"process {os.getpid()} on "):
        Destination(dest, tree, resume=True)
    first.leave()
    assert not os.path.exists(dest)
    Destination(dest, tree, resume=False).leave()


def test_archives_of_somebody_else_are_no_pack(tmp_path: Path) -> None:
    """--resume takes archives without a state file only with the notes that a pack leaves."""
    grow(tmp_path / "tree", 5)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "data-00000.tar").write_bytes(b"mine")
    with pytest.raises(InputError, match="is not empty"):
        packed(tmp_path)
    assert left(tmp_path / "pack") == {"data-00000.tar"}


def test_a_kill_in_its_first_moment_leaves_an_empty_directory(tmp_path: Path) -> None:
    """A state file without text is nobody's work."""
    grow(tmp_path / "tree", 5)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / ".packing.json").touch()
    packed(tmp_path, resume=False)
    assert finished(tmp_path / "pack")
