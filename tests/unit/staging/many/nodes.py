"""Processes that stand for the nodes of a job: each stages for itself, as its agent would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpml_orchestrator

CHECKOUT = Path(hpml_orchestrator.__file__).parents[1]
# Sources whose files come slowly: what happens meanwhile can be seen.
SLOW_SOURCE = """
import time, hpml_orchestrator.staging.source as S
real = S._TreeReader.read
def read(self, number):
    for data in real(self, number):
        time.sleep(0.05)
        yield data
S._TreeReader.read = read
"""
NODE = """
import json, os, signal, sys
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.staging import Bases, CopyStager, StageRequest
from hpml_orchestrator.staging.space import Room, room_at
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.distribution import supply_for
from hpml_orchestrator.staging.distribution import Rates
from hpml_orchestrator.staging.link import Place
told = json.loads(sys.argv[1])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if told["umask"] is not None:
    os.umask(told["umask"])
def room(path):
    found = room_at(path)
    return Room(told["room"], "a test", None, 4096, False) if told["room"] is not None else found
exec(told["before"])
stager = CopyStager("7.0", bases=Bases(shm=told["base"]), should_stop=lambda: bool(stop), room=room)
request = StageRequest("data", told["source"], kind=told["kind"], target="shm")
status = 0
try:
    place = Place(
        f"{told['attempt']}/chain/data", lambda: bool(stop), told["index"], told["nodes"],
        f"n{told['index']}", interfaces=told["interfaces"], timeout=told["timeout"],
        join_seconds=told["join_seconds"],
        come_seconds=told.get("come_seconds", told["join_seconds"]),
    )
    supply = supply_for(
        request, told["method"], place, most_bytes=1 << 40,
        options=CopyOptions(**told["options"]), rates=Rates(**told["rates"]),
        tell=lambda line: print(json.dumps({"tell": line}), flush=True),
    )
    result = stager.stage(request, supply)
    print(json.dumps({
        "path": result.path, "bytes": result.bytes, "files": result.files,
        "digest": result.digest, "method": result.method, "reused": result.reused,
        "seconds": result.seconds,
    }), flush=True)
except HpmlError as error:
    said = {"error": str(error), "hint": error.hint, "code": error.exit_code}
    print(json.dumps(said), flush=True)
    status = error.exit_code
if told["stay"]:
    sys.stdin.read()
if told["clean"]:
    stager.cleanup()
sys.exit(status)
"""
AT_HOME = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"


@dataclass
class Nodes:
    """A job of several nodes on this machine, each with a base of its own.

    Attributes:
        root: an empty directory.
        source: what is staged.
        count: how many nodes there are.
        options: of all nodes, see `start`.
    """

    root: Path
    source: Path
    count: int
    options: dict[str, Any] = field(default_factory=dict)
    started: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    attempt: str = "attempt"
    python: tuple[str, ...] = (sys.executable,)

    def base(self, index: int) -> Path:
        """The directory that a node stages to."""
        return self.root / f"base{index}"

    def data(self, index: int) -> Path:
        """Where a node's data lie: what the job's name leads to."""
        return (self.base(index) / f"hpml-{os.getuid()}" / "7.0" / "data").resolve()

    def start(self, *indices: int, prefix: tuple[str, ...] = (), **options: Any) -> None:
        """Start nodes; all of them when none is named."""
        attempt = self.root / self.attempt
        attempt.mkdir(exist_ok=True)
        for index in indices or range(self.count):
            self.base(index).mkdir(exist_ok=True)
            told = {
                "index": index,
                "nodes": self.count,
                "source": str(self.source),
                "base": str(self.base(index)),
                "attempt": str(attempt),
                "method": "chain",
                "kind": "auto",
                "timeout": 60.0,
                "join_seconds": 60.0,
                "options": {"processes": 2},
                "rates": {},
                "interfaces": ["lo"],
                "room": None,
                "umask": None,
                "before": "",
                "stay": False,
                "clean": False,
                **self.options,
                **options,
            }
            self.started[index] = subprocess.Popen(
                [*prefix, *self.python, "-c", AT_HOME + NODE, json.dumps(told)],
                env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ends(self, *indices: int, seconds: float = 120) -> list[dict[str, Any]]:
        """What nodes say at their end, in order; `status` is how they ended."""
        found = []
        for index in indices or sorted(self.started):
            process = self.started[index]
            output, _ = process.communicate(timeout=seconds)
            said: dict[str, Any] = {"status": process.returncode, "output": output}
            for line in output.splitlines():
                if line.startswith("{"):
                    said.update(json.loads(line))
            found.append(said)
        return found

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a node's main process a signal."""
        self.started[index].send_signal(number)

    def leftovers(self) -> list[str]:
        """All that nodes left which is no published data: parts of copies, notices, processes."""
        found = [
            str(path.relative_to(self.root))
            for index in range(self.count)
            for path in self.base(index).rglob("*")
            if ".partial-" in path.name
        ]
        found += [str(path) for path in (self.root / self.attempt).rglob("*.start")]
        return found + children_of(self.root)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started.values():
            process.kill()
            process.communicate()


def children_of(root: Path) -> list[str]:
    """Living processes that were started for a job in that directory, forked ones too."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(root) + b"/base" in words and int(pid) != os.getpid():
            found.append(f"process {pid}")
    return found


def begun(nodes: Nodes, index: int) -> Callable[[], bool]:
    """Return what says whether files have come to a node."""
    base = nodes.base(index)

    def some() -> bool:
        try:
            found = list(base.glob("hpml-*/.cache/*/.data.partial-*/*"))
            return any(path.is_file() and path.stat().st_size for path in found)
        except FileNotFoundError:  # published, or given up, in the midst of the look
            return False

    return some


def same(first: Path, second: Path) -> bool:
    """Whether two trees have the same names, types and contents (GNU diff)."""
    words: list[str | Path] = ["diff", "-r", "--no-dereference", first, second]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0
