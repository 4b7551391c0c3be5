"""The job's own exporter: started by the node agent, kept alive, and ended with it.

It is a process of the interpreter that runs this agent, with nothing of the job's Python in it, at
low priority and off the ranks' CPUs where there are others. Whatever becomes of it, the job goes
on: what goes wrong is one line in the job's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.monitorjob import (
    allocated_gpus,
    free_cpus,
    job_facts,
    labels_of,
    run_of,
    target_address,
)
from hpml_orchestrator.node.names import job_key
from hpml_orchestrator.records import targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.node.arguments import MonitorWish
    from hpml_orchestrator.node.planning import Prepared

__all__ = ["Monitor", "Timing"]

_BAD_OPTIONS = 2
_NOT_INSTALLED = 69
_NICE = 10
_LOG_BYTES = 4096
_START = f"""\
import runpy, sys
try:
    import hpml_exporters
except ImportError:
    sys.exit({_NOT_INSTALLED})
runpy.run_module("hpml_exporters", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Timing:
    """How patient the supervisor is, in seconds; and how often it starts an exporter again.

    Attributes:
        first_pause: before the second start; it doubles with each that follows.
        longest_pause: between two starts.
        steady: an exporter that lived so long is started again after the first pause.
        restarts: how often one is started again.
        until_address: after which one that does not listen yet is given up.
        terminate: between SIGTERM and SIGKILL at the end.
        kill: for its end after SIGKILL; one that a driver holds is left to the kernel.
        look: between two looks at it.
    """

    first_pause: float = 1.0
    longest_pause: float = 60.0
    steady: float = 600.0
    restarts: int = 20
    until_address: float = 60.0
    terminate: float = 1.5
    kill: float = 0.3
    look: float = 1.0


@dataclass
class Monitor:
    """The exporter of one node's part of a job, and the thread that looks after it.

    Attributes:
        wish: what the batch script asks for.
        attempt: the attempt's directory.
        node: Slurm's name of the node.
        environment: the agent's own variables.
        timing: how patient the supervisor is.
        command: what runs the exporter; its options follow as one word of JSON.
    """

    wish: MonitorWish
    attempt: Path
    node: str
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    timing: Timing = Timing()
    command: Sequence[str] = (sys.executable, "-I", "-c", _START)
    _thread: Optional[threading.Thread] = None  # noqa: UP045 - runs on Python 3.9
    _process: Optional[subprocess.Popen[bytes]] = None  # noqa: UP045
    _ending: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _feed: Optional[tuple[socket.socket, socket.socket]] = None  # noqa: UP045
    _facts: dict[str, Any] = field(default_factory=dict)
    _cpus: frozenset[int] = frozenset()
    _address: str = ""
    _shown: str = ""
    _renew_at: float = 0.0

    def __post_init__(self) -> None:
        """Make what the ranks' counters will go through, before anything is started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self._feed = (ours, theirs)

    @property
    def feed(self) -> socket.socket:
        """The datagram socket whose other end every exporter of this job reads; never blocks."""
        assert self._feed is not None  # noqa: S101 - until `stop`
        return self._feed[0]

    @property
    def target(self) -> Path:
        """The file by which Prometheus finds this exporter."""
        name = targets.target_name(run_of(self.attempt), job_key(self.environment), self.node)
        return self._directory / name

    @property
    def _directory(self) -> Path:
        if self.wish.targets:
            return Path(self.wish.targets)
        return targets.default_directory(self.attempt.parents[3])

    def _own(self, kind: str) -> Path:
        return self.attempt / "nodes" / f"{self.node}.monitor.{kind}"

    def start(self, made: Optional[Prepared], *, no_gpus: bool = False) -> None:  # noqa: UP045
        """Start the exporter and whoever looks after it; returns at once.

        Args:
            made: the node's plan, which knows the job's GPUs and the CPUs that no rank has.
            no_gpus: whether the job asked for no GPUs.
        """
        gpus = allocated_gpus(made, self.environment, none=no_gpus)
        self._facts = job_facts(self.environment, self.attempt, gpus)
        self._cpus = free_cpus(made, os.sched_getaffinity(0))
        thread = threading.Thread(target=self._supervise, name="hpml-monitor", daemon=True)
        thread.start()
        self._thread = thread

    def end(self) -> None:
        """Tell the exporter to write its summary and end; returns at once, harmless twice."""
        self._ending.set()
        # The supervisor holds it while it starts an exporter, which a file system that hangs makes
        # last for ever; it looks for the end itself afterwards.
        if self._lock.acquire(timeout=self.timing.kill):
            try:
                _signal(self._process, signal.SIGTERM)
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Wait until the exporter is gone and its target removed, for a bounded time."""
        self.end()
        if self._thread is not None:
            self._thread.join(self.timing.terminate + self.timing.kill + 0.2)
        for one in self._feed or ():
            one.close()
        self._feed = None

    def _step_back(self) -> None:
        """Give this thread, and with it what it starts, low priority and the CPUs beside the ranks.

        Set from outside, both would reach only those threads that an exporter has made by then.
        """
        with contextlib.suppress(OSError):
            os.nice(_NICE)  # on Linux, of this thread alone
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)

    def _supervise(self) -> None:
        try:
            self._step_back()
            if self.environment.get("SLURM_NODEID", "0") == "0":  # one node's look is enough
                targets.sweep(self._directory)
            self._keep_alive()
        except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
            self._tell(f"is not looked after any more: {type(error).__name__}: {error}")
        finally:
            targets.withdraw(self.target)  # first: nobody waits for the rest beyond its time
            self._reap()

    def _keep_alive(self) -> None:
        """Start the exporter, again and again where it dies, until the end."""
        pause, listen = self.timing.first_pause, self.wish.listen
        for left in range(self.timing.restarts, -1, -1):
            began = time.monotonic()
            status = self._live(listen)
            if self._ending.is_set() or status == 0:
                return
            refused = status == _BAD_OPTIONS and listen == self.wish.listen
            if refused or status in (_NOT_INSTALLED, None):
                self._tell(self._why_never(status))
                return
            lived = time.monotonic() - began
            if lived >= self.timing.steady:
                pause = self.timing.first_pause
            again = f"started again in {pause:g} s" if left else "not started again"
            self._tell(f"ended ({self._how(status)}); {again}")
            if not left:
                return
            # Whoever asks it knows the port; one that cannot have it any more takes another.
            listen = self._address if self._address and lived > pause else self.wish.listen
            if self._ending.wait(pause):
                return
            pause = min(2 * pause, self.timing.longest_pause)

    def _live(self, listen: str) -> int | None:
        """Run one exporter to its end; returns its status, None where it could not be started."""
        with contextlib.suppress(OSError):
            self._own("address").unlink()
        self._address = ""
        with self._lock:
            if self._ending.is_set():
                return 0
            try:
                self._process = process = self._launch(listen)
            except OSError:
                return None
        patience = time.monotonic() + self.timing.until_address
        while process.poll() is None and not self._ending.is_set():
            if not self._address:
                self._find_address(listen)
            now = time.monotonic()
            if not self._address and now >= patience:
                self._tell(f"does not answer after {self.timing.until_address:g} s")
                _signal(process, signal.SIGKILL)
                self._gone(self.timing.kill)
                return process.returncode or -signal.SIGKILL
            if self._address and now >= self._renew_at:
                self._renew_at = now + targets.RENEW_SECONDS
                self._show()
            self._ending.wait(self.timing.look if self._address else self.timing.look / 10)
        return process.returncode

    def _launch(self, listen: str) -> subprocess.Popen[bytes]:
        assert self._feed is not None  # noqa: S101 - the supervisor ends before `stop` closes it
        theirs = self._feed[1].fileno()
        options = json.dumps(self._options(listen, theirs))
        with open(self._own("log"), "ab") as log:
            return subprocess.Popen(
                [*self.command, options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                cwd="/",
                env={**self.environment},
            )

    def _options(self, listen: str, feed: int) -> dict[str, Any]:
        """Return the exporter's options, as `hpml_exporters.options` reads them."""
        interval = float(self.wish.interval)
        return {
            "listen": listen,
            "any_port": True,  # other jobs of this node may want the same one
            "web_config": self.wish.web_config,
            "without": ["gpu"] if self._facts["gpus"] == [] else [],
            "gpu_interval": interval,
            "job_interval": 5 * interval,
            "process_interval": 5 * interval,  # one job has few
            "node_interval": 10 * interval,
            "job": self._facts,
            "address_file": str(self._own("address")),
            "summary_file": str(self._own("json")),
            "feed_fd": feed,
            "parent_pid": os.getpid(),
        }

    def _find_address(self, listen: str) -> None:
        """Look whether the exporter listens, and say where if that is not where it was to."""
        try:
            with open(self._own("address"), encoding="utf-8") as stream:
                text = stream.readline()
        except OSError:
            return
        if text.endswith("\n") or ":" in text:
            self._address = text.strip()
            self._renew_at = 0.0
            wanted, port = (int(one.rpartition(":")[2]) for one in (listen, self._address))
            if wanted not in (0, port):
                self._tell(f"listens at {self._address}: port {wanted} is another's on this node")

    def _show(self) -> None:
        """Let Prometheus find the exporter, or go on to do so."""
        path = self.target
        found = target_address(self._address, self.environment, self.node)
        if not found:
            self._renew_at = float("inf")
            return
        labels = labels_of(self._facts, self.node, self.wish.web_config)
        if self._shown == found and targets.renew(path):
            return
        try:
            targets.publish(path, found, labels)
            self._shown = found
        except (HpmlError, OSError) as error:
            self._tell(f"cannot be found by Prometheus: {error}")
            self._renew_at = float("inf")

    def _reap(self) -> None:
        """See the exporter go: it gets SIGTERM, if it had none yet, and SIGKILL after a while."""
        _signal(self._process, signal.SIGTERM)
        if self._gone(self.timing.terminate):
            return
        _signal(self._process, signal.SIGKILL)
        self._gone(self.timing.kill)

    def _gone(self, seconds: float) -> bool:
        """Wait until the exporter is gone, so long at most."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _why_never(self, status: int | None) -> str:
        if status == _NOT_INSTALLED:
            return f"is not there: {self.command[0]} has no hpml_exporters"
        if status is None:
            return f"cannot be started by {self.command[0]}"
        return f"was refused: {self._last_words() or 'see ' + str(self._own('log'))}"

    def _how(self, status: int | None) -> str:
        code = status or 0
        words = f"by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        said = self._last_words()
        return f"{words}: {said}" if said and code > 0 else words

    def _last_words(self) -> str:
        """Return the last line that exporters of this node wrote, hints left out."""
        try:
            with open(self._own("log"), "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_BYTES))
                lines = stream.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        told = (line.strip().removeprefix("hpml: ") for line in reversed(lines))
        return next((line for line in told if line and not line.startswith("hint: ")), "")

    def _tell(self, words: str) -> None:
        sys.stderr.write(f"hpml: {self.node}: the job's monitor {words}\n")


def _signal(process: Optional[subprocess.Popen[bytes]], number: int) -> None:  # noqa: UP045
    if process is not None and process.poll() is None:
        with contextlib.suppress(OSError):
            process.send_signal(number)
