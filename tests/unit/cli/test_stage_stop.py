"""`hpml stage` that is stopped, and what a terminal shows of one that is not."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.cli.stage_node import Node, grow
from tests.unit.cli.test_words import HPML, in_terminal


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path / "tree", 50)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a limit of 1000 opens per second, more than is copied before a signal comes."""
    root = tmp_path_factory.mktemp("sources") / "big"
    block = os.urandom(20_000)
    for number in range(3000):
        place = root / str(number % 20)
        place.mkdir(parents=True, exist_ok=True)
        (place / str(number)).write_bytes(block)
    return root


SLOWLY = ("--opens-per-second", "50")


def partial(node: Node) -> bool:
    return any(node.ram.glob("hpml-*/*/.big.partial-*/*/*"))


@pytest.mark.parametrize(
    ("sent", "group"),
    [
        (signal.SIGINT, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGHUP, False),
    ],
)
def test_a_signal_stops_in_good_order(
    node: Node, tree: Path, big: Path, sent: signal.Signals, group: bool
) -> None:
    """128 + its number, told; nothing half-published, and the next run works."""
    words = (str(tree), str(big), "--to", "shm", *SLOWLY)
    process = node.start(*words, start_new_session=True)
    deadline = time.monotonic() + 120
    while not partial(node):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (os.killpg if group else os.kill)(process.pid, sent)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + sent, (out, err)
    assert out.startswith("staged tree: 50 files")
    name = "Ctrl-C" if sent == signal.SIGINT else sent.name
    assert err.splitlines()[-1] == f"hpml: {name}: nothing was published of big; tree stays"
    assert "Traceback" not in err
    assert list(node.ram.glob("hpml-*/*/.*.partial-*")) == []
    assert list(node.ram.glob("hpml-*/*/big")) == []
    told = node.stage(str(big), "--to", "shm", "--print", "files")
    assert (told.code, told.out, told.err) == (0, "3000\n", "")


def test_ctrl_c_on_a_terminal(node: Node, big: Path) -> None:
    """The key itself: the terminal sends the signal to all of the group, workers too."""
    leader, follower = pty.openpty()
    words = [*node.first, "stage", str(big), "--to", "shm", *SLOWLY]
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", HPML, *words],
        env={**node.shell.environment(), "TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        told = b""
        pressed = False
        with contextlib.suppress(OSError):  # nobody writes there any more
            while data := os.read(leader, 65_536):
                told += data
                if not pressed and b"of 3000 files" in told:
                    os.write(leader, b"\x03")
                    pressed = True
        os.close(leader)
    assert pressed, told
    assert process.returncode == 130, told
    assert b"hpml: Ctrl-C: nothing was published of big" in told
    assert b"Traceback" not in told
    assert node.left() == []


def test_a_terminal_gets_a_bar(node: Node, big: Path) -> None:
    """Files, bytes, rate and the time that is left; the result is the last that stays."""
    words = [*node.first, "stage", str(big), "--to", "shm", *SLOWLY]
    told = in_terminal([HPML, *words], {**node.shell.environment(), "TERM": "xterm"})
    assert "of 3000 files" in told
    assert "staged big: 3000 files" in told
