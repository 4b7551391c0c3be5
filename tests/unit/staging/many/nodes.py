"""Processes that act as the nodes of a job; each stages as its agent would."""

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
# A source whose files arrive slowly, so that a test can act in the middle of a copy.
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
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.space import Room, room_at
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.distribution import supply_for
from hpml_orchestrator.staging.distribution import Rates
from hpml_orchestrator.staging.chain import ChainPosition
node = json.loads(sys.argv[1])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if node["umask"] is not None:
    os.umask(node["umask"])
def room(path):
    found = room_at(path)
    return Room(node["room"], "a test", None, 4096, False) if node["room"] is not None else found
exec(node["before"])
stager = CopyStager("7.0", bases=Bases(shm=node["base"]), should_stop=lambda: bool(stop), room=room)
request = Stage(
    "data", node["source"], kind=node["kind"], target="shm", keep=node["keep"]
)
status = 0
try:
    place = ChainPosition(
        f"{node['attempt']}/chain/data", lambda: bool(stop), node["index"], node["nodes"],
        node["node"] or f"n{node['index']}", interfaces=node["interfaces"], timeout=node["timeout"],
        join_seconds=node["join_seconds"],
        come_seconds=node.get("come_seconds", node["join_seconds"]),
    )
    supply = supply_for(
        request, node["method"], place, most_bytes=1 << 40,
        options=CopyOptions(**node["options"]), rates=Rates(**node["rates"]),
        report=lambda line: print(json.dumps({"reported": line}), flush=True),
    )
    result = stager.stage(request, supply)
    print(json.dumps({
        "path": result.path, "bytes": result.bytes, "files": result.files,
        "digest": result.digest, "method": result.method, "reused": result.reused,
        "seconds": result.seconds,
    }), flush=True)
except HpmlError as error:
    record = {"error": str(error), "hint": error.hint, "code": error.exit_code}
    print(json.dumps(record), flush=True)
    status = error.exit_code
if node["stay"]:
    sys.stdin.read()
if node["clean"]:
    stager.cleanup()
sys.exit(status)
"""
AT_HOME = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"


@dataclass
class Nodes:
    """A job of several nodes on this machine; each has its own base directory.

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
        """Return the directory that a node stages to."""
        return self.root / f"base{index}"

    def data(self, index: int) -> Path:
        """Return the directory of a node's data, kept or not."""
        found = self.base(index).glob("hpml-*/*/data")
        return next(found, self.base(index) / "nothing")

    def start(self, *indices: int, prefix: tuple[str, ...] = (), **options: Any) -> None:
        """Start the named nodes, or all."""
        attempt = self.root / self.attempt
        attempt.mkdir(exist_ok=True)
        for index in indices or range(self.count):
            self.base(index).mkdir(exist_ok=True)
            arguments = {
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
                "node": "",
                "room": None,
                "umask": None,
                "before": "",
                "stay": False,
                "keep": False,
                "clean": False,
                **self.options,
                **options,
            }
            self.started[index] = subprocess.Popen(
                [*prefix, *self.python, "-c", AT_HOME + NODE, json.dumps(arguments)],
                env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ends(self, *indices: int, seconds: float = 120) -> list[dict[str, Any]]:
        """Wait for nodes to end; return what they printed, with their exit `status`."""
        found = []
        for index in indices or sorted(self.started):
            process = self.started[index]
            output, _ = process.communicate(timeout=seconds)
            end: dict[str, Any] = {"status": process.returncode, "output": output}
            for line in output.splitlines():
                if line.startswith("{"):
                    end.update(json.loads(line))
            found.append(end)
        return found

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a node's main process a signal."""
        self.started[index].send_signal(number)

    def leftovers(self) -> list[str]:
        """Return what nodes left behind: incomplete copies, start records and processes."""
        found = [
            str(path.relative_to(self.root))
            for index in range(self.count)
            for path in self.base(index).rglob("*")
            if ".partial-" in path.name
        ]
        found += [str(path) for path in (self.root / self.attempt).rglob("*.start")]
        return found + children_of(self.root)

    def close(self) -> None:
        """Kill the nodes that still run."""
        for process in self.started.values():
            process.kill()
            process.communicate()


def children_of(root: Path) -> list[str]:
    """Return the running processes of a job in a directory, forked workers included."""
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
    """Return a condition: files have arrived at a node."""
    base = nodes.base(index)

    def some() -> bool:
        try:
            found = list(base.glob("hpml-*/*/.data.partial-*/*"))
            return any(path.is_file() and path.stat().st_size for path in found)
        except FileNotFoundError:  # published or removed during this look
            return False

    return some
