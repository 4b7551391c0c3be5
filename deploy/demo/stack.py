"""A cluster that is monitored, all on this machine: Slurm's nodes or this one, GPUs, Prometheus.

What is real: Slurm (deploy/devcluster) or hpml's local backend, hpml's exporters, Prometheus, the
jobs and their processes. The GPUs are simulated (deploy/gpusim): each is ten times as busy as the
rank that has it keeps a core busy, so that a laptop has room for a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deploy.gpusim.gpusim import Process, Simulator, State, h100

ROOT = Path(__file__).parents[2]
GPUS = 4  # of each node
_CPUS = 8
HPML = [str(Path(sys.executable).parent / "hpml")]
_DEVCLUSTER = [str(ROOT / "deploy/devcluster/devcluster")]
_PATIENCE_SECONDS = 120.0
_TICK_SECONDS = 1.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def prometheus_program() -> str:
    """Where Prometheus is; empty if it is not installed."""
    return shutil.which("prometheus", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin") or ""


def missing() -> dict[str, str]:
    """What this machine lacks for all of the stack, and how to get it."""
    lacks = {}
    if not prometheus_program():
        lacks["prometheus"] = "apt-get install prometheus, or a release from prometheus.io"
    if not shutil.which("gcc"):
        lacks["gcc"] = "apt-get install gcc (the simulated GPUs are a library in C)"
    if os.geteuid() != 0:
        lacks["root"] = "the development cluster needs it; without, jobs run on the local backend"
    elif not shutil.which("slurmctld"):
        lacks["slurmctld"] = "deploy/devcluster/devcluster install (Debian's Slurm)"
    return lacks


@dataclass
class Node:
    """A node with simulated GPUs.

    Attributes:
        name: its host name.
        enter: what to write before a command to run it there.
        state: file of the simulated GPUs.
    """

    name: str
    enter: list[str]
    state: Path
    gpus: State = field(default_factory=lambda: State(gpus=()))


@dataclass
class _Seen:
    """A rank's process at the last look."""

    ticks: float
    time: float
    busy: float = 0.0


class Stack:
    """Starts it all below a directory, and ends it.

    Args:
        directory: for records, logs and data; on the cluster it is shared by all nodes.
        nodes: of the development cluster; 0 for this machine alone and the local backend.
        hpml: the command that submits jobs, which makes them a user's.
        python: what jobs run.
        share: what nodes see of /tmp besides the directory.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        hpml: Sequence[str] = HPML,
        python: str = sys.executable,
        share: Path = ROOT,
    ) -> None:
        self.directory = directory
        self.prometheus = ""
        self.nodes: list[Node] = []
        self.environment = dict(os.environ)
        self._wanted, self._hpml, self._python = nodes, list(hpml), python
        self._share = share
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, _Seen] = {}
        self._runs: list[str] = []
        self._stop = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="gpus")
        self._box = directory / "box"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if (self.directory / "records" / "sweeps").exists():
            with contextlib.suppress(RuntimeError):  # they may have ended
                self.hpml("sweep", "cancel", "last")
        if self._runs and not self._wanted:  # the cluster ends its jobs itself
            self.hpml("cancel", *self._runs)
            with contextlib.suppress(RuntimeError):  # its output shows how they ended
                self.hpml("wait", *self._runs)
        self._stop.set()
        if self._follower.is_alive():
            self._follower.join()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._box.exists():
            self._run([*_DEVCLUSTER, "down", "--box", str(self._box), "--purge"])

    def hpml(self, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run hpml as the user, with its records in the directory."""
        records = ["--records", str(self.directory / "records")]
        command = [*self._hpml, *records, *map(str, words)]
        return self._run(command, environment=self.environment | environment)

    def write(self, name: str, job: dict[str, Any]) -> Path:
        """Write a job file; returns its path."""
        path = self.directory / "jobs" / f"{name}.yaml"
        text = json.dumps({"name": name, "environment": {"python": self._python}, **job})
        path.write_text(text, encoding="utf-8")  # JSON is YAML
        return path

    def submit(self, name: str, job: dict[str, Any], *options: str) -> str:
        """Write a job file and submit it; returns the job id."""
        path = self.write(name, job)
        where = [] if self._wanted else ["--local"]
        done = self.hpml("submit", path, "--json", *where, *options)
        self._runs.append(json.loads(done.stdout)["id"])
        return str(json.loads(done.stdout)["job_id"])

    def _start(self) -> None:
        (self.directory / "jobs").mkdir(parents=True, exist_ok=True)
        simulator = Simulator()
        simulator.build()
        if self._wanted:
            self._boot()
        else:
            self.nodes = [Node(os.uname().nodename, [], self.directory / "gpus.txt")]
            # The local backend takes these for the machine's GPUs.
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(GPUS)))
        for node in self.nodes:
            node.gpus = State(gpus=tuple(h100(n, node=node.name) for n in range(GPUS)))
            simulator.write(node.gpus, node.state)
        exporters = {node.name: self._exporter(node, simulator) for node in self.nodes}
        targets: list[dict[str, Any]] = [
            {"job_name": "hpml-node", "static_configs": [{"targets": list(exporters.values())}]}
        ]
        if self._wanted:
            slurm = self._listen([*HPML, "export", "slurm", "--users"], "slurm", self.environment)
            targets.append({"job_name": "hpml-slurm", "static_configs": [{"targets": [slurm]}]})
        self._follower.start()
        self.prometheus = self._prometheus(targets)

    def _boot(self) -> None:
        size = ["--nodes", str(self._wanted), "--cpus", str(_CPUS), "--gpus", str(GPUS)]
        box = ["--box", str(self._box)]
        shared = dict.fromkeys(map(str, (self.directory, ROOT, self._share)))
        self._run([*_DEVCLUSTER, "up", *size, *box, "--share", *shared])
        line = self._run([*_DEVCLUSTER, "env", *box]).stdout
        name, _, value = shlex.split(line)[-1].partition("=")
        self.environment[name] = value
        for number in range(1, self._wanted + 1):
            node = f"node{number}"
            enter = [*_DEVCLUSTER, "exec", *box, node, "--"]
            # Each node has a separate /run/hpml, where its exporter listens to the jobs' agents.
            # This machine's control groups are not the node's: here Slurm uses none.
            mount = "mount -t tmpfs -o size=1M,mode=755 none"
            words = f"mkdir -p /run/hpml && {mount} /run/hpml && {mount} /sys/fs/cgroup"
            self._run([*enter, "sh", "-c", words])
            self.nodes.append(Node(node, enter, self.directory / f"gpus-{node}.txt"))

    def _exporter(self, node: Node, simulator: Simulator) -> str:
        variables = simulator.environment(node.state)
        if node.enter:
            variables |= {
                "SLURMD_NODENAME": node.name,
                "SLURM_CONF": self.environment["SLURM_CONF"],
            }
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        command = [*node.enter, *words, *HPML, "export", "node"]
        return self._listen(command, node.name, self.environment)

    def _listen(self, command: list[str], name: str, environment: dict[str, str]) -> str:
        """Start an exporter on a free port; returns its address."""
        address = self.directory / f"{name}.address"
        self._start_process(
            [*command, "--listen", "127.0.0.1:0", "--address-file", str(address)], name, environment
        )
        return self._wait(lambda: address.read_text().strip() if address.exists() else "", name)

    def _prometheus(self, targets: list[dict[str, Any]]) -> str:
        rules = self.directory / "rules"
        rules.mkdir()
        for path in (ROOT / "deploy/prometheus/rules").glob("*.yml"):
            # Rates over half a minute instead of minutes, so that they mean something after one.
            text = re.sub(r"\[[25]m]", "[30s]", path.read_text("utf-8"))
            (rules / path.name).write_text(text, encoding="utf-8")
        config = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": [str(rules / "*.yml")],
            "scrape_configs": targets,
        }
        path = self.directory / "prometheus.yml"
        path.write_text(json.dumps(config), encoding="utf-8")
        data = f"--storage.tsdb.path={self.directory / 'prometheus'}"
        command = [prometheus_program(), f"--config.file={path}", data]
        log = self._start_process(
            [*command, "--web.listen-address=127.0.0.1:0"], "prometheus", self.environment
        )

        def ready() -> str:
            text = log.read_text("utf-8")
            if "Server is ready" not in text:
                return ""
            return "http://" + text.partition('"Listening on" address=')[2].split()[0]

        return self._wait(ready, "prometheus")

    def _start_process(self, command: list[str], name: str, environment: dict[str, str]) -> Path:
        path = self.directory / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us alone, and ends it in order
            )
        self._processes.append(process)
        return path

    def _wait(self, good: Callable[[], str], name: str) -> str:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not (value := good()):
            if time.monotonic() > until or self._processes[-1].poll() is not None:
                log = (self.directory / f"{name}.log").read_text("utf-8")
                raise RuntimeError(f"{name} does not start:\n{log[-2000:]}")
            time.sleep(0.1)
        return value

    def _run(
        self, command: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done

    def _follow(self) -> None:
        """Make each GPU as busy as the processes that have it, once a second."""
        simulator = Simulator()
        while not self._stop.wait(_TICK_SECONDS):
            ranks = list(_ranks())
            for node in self.nodes:
                on_node = [
                    (pid, gpu) for pid, name, gpu in ranks if name in {"", node.name} and gpu < GPUS
                ]
                state = node.gpus
                for gpu in range(GPUS):
                    pids = [pid for pid, number in on_node if number == gpu]
                    state = state.changed(gpu, **self._settings(pids))
                node.gpus = simulator.write(state, node.state)

    def _settings(self, pids: list[int]) -> dict[str, Any]:
        """Metrics of an H100 whose processes keep a core a tenth as busy."""
        share = min(1.0, 10 * sum(map(self._busy, pids)))
        return {
            "util": round(100 * share),
            "mem_util": round(60 * share),
            "gpm_graphics": round(100 * share),
            "gpm_sm": round(80 * share),
            "gpm_occupancy": round(45 * share),
            "gpm_tensor": round(50 * share),
            "gpm_dram": round(40 * share),
            "power": round(75 + 550 * share),
            "temp": round(34 + 40 * share),
            "clock_sm": 1980 if pids else 345,
            "pcie_rx": round(2e9 * share),
            "pcie_tx": round(1e9 * share),
            "nvlink_tx": round(1e10 * share),
            "nvlink_rx": round(1e10 * share),
            "processes": tuple(
                Process(pid, memory=20 * _resident(pid), sm=round(100 * share)) for pid in pids
            ),
        }

    def _busy(self, pid: int) -> float:
        """The share of a core that a process has kept busy for the last seconds."""
        now, ticks = time.monotonic(), _ticks(pid)
        seen = self._seen.setdefault(pid, _Seen(ticks, now))
        if now > seen.time:
            rate = (ticks - seen.ticks) / _CLOCK_TICKS / (now - seen.time)
            seen.busy = 0.5 * seen.busy + 0.5 * max(0.0, rate)
            seen.ticks, seen.time = ticks, now
        return seen.busy


def _ranks() -> Iterator[tuple[int, str, int]]:
    """Yield pid, node and GPU of each rank that trains; the node is empty on the local backend.

    What is not Python, such as the `sleep` of a job that was forgotten, opens no GPU.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            if not (entry / "comm").read_text().startswith("python"):
                continue
            pairs = (entry / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            variables = dict(pair.partition("=")[::2] for pair in pairs)
            gpus = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if "SLURM_JOB_ID" in variables and "LOCAL_RANK" in variables and gpus != [""]:
                own = int(variables["LOCAL_RANK"]) if len(gpus) > 1 else 0
                yield int(entry.name), variables.get("SLURMD_NODENAME", ""), int(gpus[own])


def _ticks(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(int(words[11]) + int(words[12]))
    return 0.0


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0
