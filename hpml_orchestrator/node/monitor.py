"""The job's exporter: the node agent starts it, restarts it after a crash, and ends it.

It runs with the agent's interpreter, isolated from the job's Python environment, at low priority
and, if possible, on CPUs without ranks. Its errors never end the job; each is printed as a line in
the job's output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.log import message_of
from hpml_orchestrator.node.environment import integer, job_key
from hpml_orchestrator.node.startup import resolve
from hpml_orchestrator.placement.model import visible_devices
from hpml_orchestrator.records import targets

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpml_orchestrator.node.planning import NodePlan
    from hpml_orchestrator.records.job import Monitor

_LOG = logging.getLogger(__name__)
_NICE = 10
_OF_THE_NODE = ("disks", "infiniband", "nfs", "lustre", "health")
"""Collectors of resources shared by all jobs of a node, which two jobs would count twice."""
_TLS = re.compile(r"^[^#]*\btls_server_config\b", re.MULTILINE)


@dataclass(frozen=True)
class Timing:
    """Times (in seconds) and limits of the supervision of the exporter."""

    first_pause: float = 1.0  # before the first restart; doubles with each restart
    longest_pause: float = 60.0  # maximum between two starts
    restarts: int = 20  # maximum number of restarts
    until_address: float = 60.0  # until an exporter that does not listen is killed
    terminate: float = 1.5  # between SIGTERM and SIGKILL at the end
    look: float = 1.0  # between two checks


@dataclass
class NodeMonitor:
    """The exporter of a job on one node, and the thread that supervises it."""

    options: Monitor  # the job's `monitor`
    attempt: Path  # the attempt's directory
    node: str  # Slurm's name of the node
    # The agent's environment variables
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    timing: Timing = Timing()  # how it is supervised
    # Command of the exporter; its options are appended as one argument in JSON
    command: Sequence[str] = (sys.executable, "-I", "-m", "hpml_exporters")

    def __post_init__(self) -> None:
        """Create the socket for the ranks' counters before starting the exporter."""
        # The socket outlives the exporter: a restarted one inherits the same end.
        self.feed, self._exporter_feed = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.feed.setblocking(False)
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._facts: dict[str, object] = {}
        self._cpus: frozenset[int] = frozenset()
        self._address = self._published = ""
        self._renew_at = 0.0
        directory = self.options.targets or targets.default_directory(self.attempt.parents[3])
        name = targets.target_name(self._run, job_key(self.environment), self.node)
        self.target = Path(directory) / name  # target file for Prometheus

    @property
    def _run(self) -> str:
        return self.attempt.parents[1].name

    @property
    def is_alive(self) -> bool:
        """Whether the exporter is still supervised."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, node_plan: NodePlan | None, *, no_gpus: bool = False) -> None:
        """Start the exporter and its supervision, and return at once."""
        gpus = [] if no_gpus else allocated_gpus(node_plan, self.environment)
        self._facts = job_facts(self.environment, self._run, gpus)
        self._cpus = free_cpus(node_plan, os.sched_getaffinity(0))
        thread = threading.Thread(target=self._supervise, name="hpml-monitor", daemon=True)
        thread.start()
        self._thread = thread

    def end(self) -> None:
        """Ask the exporter to write its summary and end; return at once. May be called twice."""
        self._ending.set()

    def stop(self) -> None:
        """Wait for a limited time until the exporter has ended and its target file is removed."""
        self.end()
        if self._thread is not None:
            self._thread.join(self.timing.terminate + 0.5)
        self.feed.close()
        self._exporter_feed.close()

    def _supervise(self) -> None:
        try:
            with contextlib.suppress(OSError):
                # Both apply to this thread and its child processes.
                os.nice(_NICE)
                if self._cpus:
                    os.sched_setaffinity(0, self._cpus)
            if self.environment.get("SLURM_NODEID", "0") == "0":  # one node is enough
                targets.remove_stale(self.target.parent)
            self._keep_alive()
        except Exception as error:  # noqa: BLE001 - no error of monitoring may end the job
            self._report(f"failed: {type(error).__name__}: {error}")
        finally:
            # Do this before the exporter ends: the agent waits only briefly for this thread.
            targets.withdraw(self.target)
            self._terminate()

    def _keep_alive(self) -> None:
        """Start the exporter, and restart it after crashes until the end.

        Do not restart an exporter that ended before listening: it would end again.
        """
        pause, listen = self.timing.first_pause, self.options.listen
        for left in range(self.timing.restarts, -1, -1):
            status = self._run_once(listen)
            if self._ending.is_set() or status == 0:
                return
            if status < 0:
                how = f"by {signal.Signals(-status).name}"
            else:
                how = f"status {status}: {self._last_line()}"
            restarts = left > 0 and self._address != ""
            again = f"started again in {pause:g} s" if restarts else "not started again"
            self._report(f"ended ({how}); {again}")
            listen = self._address  # so that Prometheus finds it on the same port
            if not restarts or self._ending.wait(pause):
                return
            pause = min(2 * pause, self.timing.longest_pause)

    def _run_once(self, listen: str) -> int:
        """Run one exporter to its end; return its exit status."""
        # Otherwise the address of the previous exporter would count as that of the new one.
        self._file("address").unlink(missing_ok=True)
        self._address = ""
        self._process = process = self._launch(listen)
        deadline = time.monotonic() + self.timing.until_address
        while process.poll() is None and not self._ending.is_set():
            if not self._address:
                self._find_address(listen)
            if self._address and time.monotonic() >= self._renew_at:
                self._renew_at = time.monotonic() + targets.RENEW_SECONDS
                self._publish()
            if not self._address and time.monotonic() >= deadline:
                process.kill()
                process.wait()
            self._ending.wait(self.timing.look if self._address else self.timing.look / 10)
        return process.poll() or 0

    def _launch(self, listen: str) -> subprocess.Popen[bytes]:
        options = json.dumps(self._exporter_options(listen))
        with open(self._file("log"), "ab") as log:
            return subprocess.Popen(
                [*self.command, options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._exporter_feed.fileno(),),
                cwd="/",
                env={**self.environment},
            )

    def _exporter_options(self, listen: str) -> dict[str, object]:
        """Return the exporter's options, as `hpml_exporters.options` reads them."""
        interval = float(self.options.interval)
        return {
            "listen": listen,
            "any_port": True,  # other jobs on this node may use the same port
            "web_config": self.options.web_config or "",
            "without": [*_OF_THE_NODE, *(["gpu"] if self._facts["gpus"] == [] else [])],
            "gpu_interval": interval,
            "job_interval": 5 * interval,
            "process_interval": 5 * interval,  # short, because a job has few processes
            "node_interval": 10 * interval,
            "cluster": self.environment.get("SLURM_CLUSTER_NAME", ""),
            "node": self.node,
            "job": self._facts,
            "address_file": str(self._file("address")),
            "summary_file": str(self._file("json")),
            "feed_fd": self._exporter_feed.fileno(),
            "parent_pid": os.getpid(),
        }

    def _file(self, kind: str) -> Path:
        return self.attempt / "nodes" / f"{self.node}.monitor.{kind}"

    def _find_address(self, listen: str) -> None:
        """Read the exporter's address when it listens; report a port that was not requested."""
        try:
            self._address = self._file("address").read_text("utf-8").strip()
        except OSError:
            return
        self._renew_at = 0.0
        wanted, port = (address.rpartition(":")[2] for address in (listen, self._address))
        if wanted not in ("0", port):
            self._report(f"listens at {self._address}: port {wanted} is in use on this node")

    def _publish(self) -> None:
        address = target_address(self._address, self.environment, self.node)
        if not address or (address == self._published and targets.renew(self.target)):
            return
        labels = {name: str(self._facts[name]) for name in ("jobid", "run", "user")}
        scheme = "https" if _has_tls(self.options.web_config or "") else ""
        try:
            targets.publish(
                self.target, address, {**labels, "node": self.node, "__scheme__": scheme}
            )
            self._published = address
        except (HpmlError, OSError) as error:
            self._report(f"cannot be found by Prometheus: {error}")
            self._renew_at = float("inf")

    def _terminate(self) -> None:
        process = self._process
        if process is not None:
            for end, seconds in ((process.terminate, self.timing.terminate), (process.kill, 0.3)):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    return

    def _last_line(self) -> str:
        text = self._file("log").read_text("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return message_of(lines[-1]) if lines else f"see {self._file('log')}"

    def _report(self, message: str) -> None:
        _LOG.warning("%s: the job's monitor %s", self.node, message)


def job_facts(
    environment: Mapping[str, str], run: str, gpus: Sequence[str] | None
) -> dict[str, object]:
    """Return facts about the job, with which the exporter labels its metrics.

    A sweep sets `HPML_SWEEP` and `HPML_POINT` for its jobs.
    """
    return {
        "jobid": environment.get("SLURM_JOB_ID", ""),
        "uid": integer(environment, "SLURM_JOB_UID", os.getuid()),
        "user": environment.get("SLURM_JOB_USER") or environment.get("USER", ""),
        "account": environment.get("SLURM_JOB_ACCOUNT", ""),
        "partition": environment.get("SLURM_JOB_PARTITION", ""),
        "qos": environment.get("SLURM_JOB_QOS", ""),
        "name": environment.get("SLURM_JOB_NAME", ""),
        "array_job": environment.get("SLURM_ARRAY_JOB_ID", ""),
        "array_task": environment.get("SLURM_ARRAY_TASK_ID", ""),
        "start": integer(environment, "SLURM_JOB_START_TIME", 0),
        "end": integer(environment, "SLURM_JOB_END_TIME", 0),
        "gpus": gpus,
        "run": run,
        "sweep": environment.get("HPML_SWEEP", ""),
        "point": environment.get("HPML_POINT", ""),
    }


def allocated_gpus(node_plan: NodePlan | None, environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the job's GPUs on this node; None if they are unknown.

    Names are UUIDs or PCI addresses from the node's topology, else the UUIDs that the local backend
    uses instead of Slurm's numbers. The GPU variables of the batch script describe the first node,
    so ignore them if the job has several nodes.
    """
    if node_plan is not None and node_plan.topology is not None and node_plan.topology.gpus:
        gpus = visible_devices(
            node_plan.topology, node_plan.context.visible, node_plan.context.hidden
        )
        names = [gpu.uuid or gpu.address or gpu.name for gpu in gpus if gpu is not None]
        if names:
            return names
    text = environment.get("SLURM_STEP_GPUS", "")
    if not text and environment.get("SLURM_NNODES") == "1":
        text = environment.get("SLURM_JOB_GPUS", "")
    names = [name.strip() for name in text.split(",")]
    # Slurm's numbers are indices in gres.conf, which do not identify devices.
    return names if all(name.startswith(("GPU-", "MIG-")) for name in names) else None


def free_cpus(node_plan: NodePlan | None, allowed: Collection[int]) -> frozenset[int]:
    """Return the job's CPUs without a rank, preferably whole free cores; empty if none is free."""
    if node_plan is None:
        return frozenset()
    ranks = {cpu for rank in node_plan.plan.ranks for cpu in rank.cpus}
    free = frozenset(allowed) - ranks
    cores = node_plan.topology.cores if node_plan.topology is not None else ()
    apart = {cpu for core in cores if not ranks & set(core.cpus) for cpu in core.cpus}
    return frozenset(free & apart) or free


def target_address(address: str, environment: Mapping[str, str], node: str, host: str = "") -> str:
    """Return the address of an exporter for Prometheus; empty if only this host can reach it.

    For an exporter on all addresses, use the node's name, or the host's name if that does not
    resolve. Accept a loopback address only if the job was submitted from this host, because
    Prometheus may then run here, too.

    Args:
        address: HOST:PORT on which the exporter listens.
        environment: the agent's variables.
        node: name of the node in Slurm.
        host: name of this host; default: from the operating system.
    """
    host = host or socket.gethostname()
    name, _, port = address.rpartition(":")
    name = name.strip("[]")
    if name in {"", "0.0.0.0", "::"}:  # noqa: S104 - names them, binds nothing
        return f"{node if resolve([node]) else host}:{port}"
    if targets.is_loopback(name):
        submit_host = environment.get("SLURM_SUBMIT_HOST", "")
        return address if submit_host.partition(".")[0] == host.partition(".")[0] else ""
    return address


def _has_tls(web_config: str) -> bool:
    try:
        return _TLS.search(Path(web_config).read_text("utf-8", "replace")) is not None
    except OSError:
        return False
