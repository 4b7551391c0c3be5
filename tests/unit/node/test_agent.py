"""The agent of a node stages, says when it is ready, and removes what it staged at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of three files."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"file {number}").write_text("x" * 1000)
    return source


class Running:
    """An agent that runs."""

    def __init__(self, node: Node, *words: str, **more: str) -> None:
        status, out, err = node.claim("1")
        assert status == 0, err
        self.attempt = Path(out.strip())
        self.marker = self.attempt / "nodes" / "n1.ready.json"
        self.process = node.start("agent", str(self.attempt), *words, **more)

    def end(self) -> tuple[int, str]:
        """Wait for the agent's end; returns its status and what it said."""
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err

    def events(self) -> list[dict[str, Any]]:
        """What the node's file of events holds."""
        lines = (self.attempt / "events" / "n1.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def start(node: Node) -> Iterator[Callable[..., Running]]:
    """Start agents, and end what is left of them."""
    started: list[Running] = []

    def make(*words: str, **more: str) -> Running:
        started.append(Running(node, *words, **more))
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_stages_and_cleans_up_when_told_to_end(
    start: Callable[..., Running], source: Path, tmp_path: Path, until: Until, number: int
) -> None:
    """Data lies there once the node is ready, and nothing does after any of the signals."""
    target = tmp_path / "target"
    target.mkdir()
    running = start("--stage", "data", "auto", str(source), str(target))
    until(running.marker.exists)
    staged = target / f"hpml-{os.getuid()}" / "test-1" / "data"
    assert sorted(path.name for path in staged.iterdir()) == ["file 0", "file 1", "file 2"]
    marker = json.loads(running.marker.read_text())
    assert (marker["node"], marker["files"], marker["bytes"]) == ("n1", 3, 3000)
    assert marker["pid"] == running.process.pid
    assert [one["event"] for one in running.events()] == ["staging", "ready"]
    assert running.events()[0]["data"]["source"] == str(source)
    running.process.send_signal(number)
    assert running.end() == (0, "")
    assert list(target.iterdir()) == []


def test_without_data_a_node_is_ready_at_once(start: Callable[..., Running], until: Until) -> None:
    """The marker says which names of the head node are known here."""
    running = start()
    until(running.marker.exists)
    marker = json.loads(running.marker.read_text())
    assert (marker["files"], marker["bytes"]) == (0, 0)
    assert isinstance(marker["resolves"], dict)
    running.process.send_signal(signal.SIGUSR1)
    assert running.end() == (0, "")


def test_the_end_of_the_script_counts_as_a_signal(
    start: Callable[..., Running], source: Path, tmp_path: Path, until: Until
) -> None:
    """A signal may be lost on its way; the marker `over` is seen all the same."""
    target = tmp_path / "target"
    target.mkdir()
    running = start("--stage", "data", "tree", str(source), str(target))
    until(running.marker.exists)
    (running.attempt / "over").touch()
    assert running.end() == (0, "")
    assert list(target.iterdir()) == []


def test_many_signals_at_once_end_it_once(start: Callable[..., Running], until: Until) -> None:
    """Signals that interrupt one another do not hang it."""
    running = start()
    until(running.marker.exists)
    for _ in range(200):
        if running.process.poll() is not None:
            break
        running.process.send_signal(signal.SIGUSR1)
    assert running.end() == (0, "")


def failed(running: Running) -> dict[str, Any]:
    marker: dict[str, Any] = json.loads(
        (running.attempt / "nodes" / "n1.failed.json").read_text("utf-8")
    )
    return marker


def test_data_that_is_not_there_fails_the_node(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """The failed marker says what is missing; nothing stays."""
    target = tmp_path / "target"
    target.mkdir()
    running = start("--stage", "data", "auto", str(tmp_path / "none"), str(target))
    assert running.end() == (1, "")  # wait-ready tells it, once for all nodes
    assert "No such file or directory" in failed(running)["message"]
    assert not running.marker.exists()
    assert list(target.iterdir()) == []


def test_data_that_does_not_fit_fails_the_node(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Capacity is looked at before a byte is copied, and the hint reaches the marker."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        source = tmp_path / "large"
        source.mkdir()
        (source / "blob").write_bytes(b"x" * 1_000_000)
        running = start("--stage", "data", "auto", str(source), str(mount))
        status, _ = running.end()
        assert status == 1
        assert "needs" in failed(running)["message"]
        assert "available" in failed(running)["message"]
        assert failed(running)["hint"]
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_told_to_end_while_it_stages(
    start: Callable[..., Running], tmp_path: Path, until: Until
) -> None:
    """SIGTERM in the middle of a copy ends it: no marker, no data."""
    source = tmp_path / "large"
    source.mkdir()
    for number in range(4000):
        (source / str(number)).touch()
    target = tmp_path / "target"
    target.mkdir()
    running = start("--stage", "data", "tree", str(source), str(target))
    until(lambda: list(target.glob("*/*/.data.partial-*")))
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    assert not running.marker.exists()
    assert not (running.attempt / "nodes" / "n1.failed.json").exists()
    assert list(target.iterdir()) == []
