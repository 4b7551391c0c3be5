"""Several processes, kills and stops: one copy, published whole or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.staging.request import StageRequest
from hpml_orchestrator.staging.stage import CopyStager
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

STAGE = """
import os, signal, sys, time
from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
base, source, pause = sys.argv[1], sys.argv[2], sys.argv[3]
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
real = os.readv
def slow(*arguments):
    print("copying", flush=True)
    if pause == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    elif not pause.startswith("/"):
        time.sleep(float(pause))
    else:
        while not (os.path.exists(pause) or stop):
            time.sleep(0.01)
    return real(*arguments)
def wait(seconds):
    print("waiting", flush=True)
    time.sleep(seconds)
os.readv = slow
options = CopyOptions(threads=1)
stager = CopyStager(
    "7.0", bases=Bases(shm=base), should_stop=lambda: bool(stop), options=options,
    sleep=wait,
)
try:
    result = stager.stage(StageRequest("data", source, target="shm"))
    print("reused" if result.reused else "copied", result.bytes, result.files, flush=True)
except StagingError as error:
    print("error:", error, flush=True)
if len(sys.argv) > 4:
    time.sleep(600)
stager.cleanup()
"""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Give a tree of 20 files."""
    root = tmp_path / "many"
    root.mkdir()
    for number in range(20):
        (root / str(number)).write_bytes(b"x" * 1000)
    return root


def line(process: subprocess.Popen[str], *skip: str) -> str:
    """Return the next line of a child that is not one to skip."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.strip() not in skip:
            return text.strip()
    return ""


def test_sigterm_stops_promptly_and_cleans_up(
    base: Path, many: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """The agent's stop leads to "stopped" within a file or a chunk; nothing is left."""
    process = child(STAGE, base, many, "stop")
    assert process.stdout is not None
    said = [text.strip() for text in process.stdout]
    assert said.pop() == "error: stopped"
    assert 1 <= len(said) <= 10, "of twenty files"
    assert process.wait(timeout=PATIENCE_SECONDS) == 0
    assert os.listdir(base) == []


def test_waiters_take_over_from_a_stopped_stager(
    base: Path, many: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """Who ends one of two equal commands does not end the other."""
    first = child(STAGE, base, many, base / "never")
    assert line(first) == "copying"
    second = child(STAGE, base, many, 0)
    assert line(second) == "waiting"
    first.send_signal(signal.SIGTERM)
    assert line(first, "copying") == "error: stopped"
    assert line(second, "copying", "waiting") == "copied 20000 20"


@pytest.mark.parametrize("damage", ["missing", "short", "extra", "manifest"])
def test_published_data_is_verified_before_reuse(
    stager: CopyStager, source: Path, damage: str
) -> None:
    """Data that lost or gained files or bytes, or has no manifest, is staged anew."""
    request = StageRequest("data", str(source), target="shm")
    path = Path(stager.stage(request).path).resolve()
    assert stager.stage(request).reused
    if damage == "missing":
        (path / "a" / "two.txt").unlink()
    elif damage == "short":
        os.truncate(path / "one.bin", 3)
    elif damage == "extra":
        (path / "cache").touch()
    else:
        (path.parent / ".data.manifest").write_text("{")
    assert not stager.stage(request).reused
    assert sorted(os.listdir(path)) == ["a", "empty", "one.bin"]
    assert stager.stage(request).reused


def test_a_name_means_one_thing_in_a_job(stager: CopyStager, source: Path) -> None:
    """The same name for another source is refused, and the first data stays."""
    path = stager.stage(StageRequest("data", str(source), target="shm")).path
    with pytest.raises(InputError, match="by that name"):
        stager.stage(StageRequest("data", str(source / "a"), target="shm"))
    assert os.path.exists(f"{path}/one.bin")


def test_a_failing_rename_publishes_nothing(
    stager: CopyStager, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault at the last step leaves neither data nor partial."""
    area = stager.area("shm")

    def rename(*_arguments: object) -> None:
        raise OSError(5, "injected")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StagingError, match="injected"):
        stager.stage(StageRequest("data", str(source), target="shm"))
    monkeypatch.undo()
    names = os.listdir(area.path)
    assert not [name for name in names if name == "data" or "partial" in name]
