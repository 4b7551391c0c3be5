"""The node agent: one per node, for the duration of the job.

It plans the binding of the ranks, stages the data, marks the node as ready, listens to the ranks,
verifies their binding, runs the job's exporter, and removes the staged data at the end.
The file `over` marks the end of the job; SIGUSR1 only makes the agent check for it at once. A
signal that a user sends to the ranks reaches every step of the job, so no signal ends an agent
while ranks live. If the job saves checkpoints, SIGTERM and the time limit begin the stop path
(`node/stopping.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import BindingError, HpmlError, NotFoundError, RecordError
from hpml_orchestrator.log import log_to_stderr
from hpml_orchestrator.node import planning, software, stopping
from hpml_orchestrator.node.channel import ChannelReader, Feed, attempt_channel, exporter_sockets
from hpml_orchestrator.node.continuation import kill_wait
from hpml_orchestrator.node.environment import AgentOptions, node_index, node_name, parse_options
from hpml_orchestrator.node.monitor import NodeMonitor
from hpml_orchestrator.node.processes import RankRecords, StartedRank, is_alive, kill_families
from hpml_orchestrator.node.stages import NodeResults, NodeStaging, make_job_directories
from hpml_orchestrator.node.startup import resolve
from hpml_orchestrator.node.stopping import StopPath
from hpml_orchestrator.node.watch import Watch
from hpml_orchestrator.placement.verify import PlanFigures, plan_figures
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.staging.chain import interface_address

if TYPE_CHECKING:
    from pathlib import Path

# Peaks measured by `hpml bench`, for the ranks of a job (HPML_PEAK_TFLOPS).

_DTYPES = {"peak": "float32", "peak_bf16": "bfloat16"}


def rank_peaks(
    results: Path, node: str, cpu_model: str, *, cpus: float, gpus: int = 0, ranks_per_gpu: int = 1
) -> dict[str, str]:
    """Return the peak TFLOP/s of a rank as keys of the plan's header; empty without results.

    Args:
        results: directory of results of `hpml bench`, in the user's records.
        node: this node; if it has no results, those of a node with the same processor count.
        cpu_model: of the node, from the kernel.
        cpus: of one rank.
        gpus: used by the node's ranks.
        ranks_per_gpu: number of ranks that share a GPU.
    """
    cpu_model = cpu_model or os.uname().machine  # as in the results if the kernel has no name
    # Names of results begin with their time. One result per type of other nodes is enough.
    own = sorted(results.glob(f"*/{node}/*.json"), key=lambda path: path.name)[-1:]
    others = [max(one.glob("*/*.json"), default=None) for one in results.glob("*")]
    for path in filter(None, [*own, *others]):
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError, AttributeError):
            made = json.loads(path.read_text("utf-8"))
            if made["cpu_model"] == cpu_model and bool(made["gpus"]) == bool(gpus):
                share = 1 / ranks_per_gpu if gpus else cpus / made["cpus"]
                found = {}
                for key, dtype in _DTYPES.items():
                    part = ("gpu" if gpus else "cpu", ".matmul." + dtype)
                    rates = [
                        rate["value"]
                        for name, rate in made["figures"].items()
                        if name.startswith(part[0]) and name.endswith(part[1])
                    ]
                    if rates:
                        found[key] = f"{median(rates) * share / 1e12:.6g}"
                return found
    return {}


_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 2.0
_CLEAN_SECONDS = 3.0
"""Seconds before Slurm's SIGKILL at which remaining ranks are killed, to remove their data."""
_RANK_LOOK_SECONDS = 0.2
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run the agent of this node until the job is over; see `Agent.run`."""
    log_to_stderr("hpml_orchestrator.node", prefix="hpml: ")  # next to the output of the program
    agent = Agent(parse_options(argv))
    for number in _ENDING:
        signal.signal(number, agent.on_signal)
    # Block instead of handling: forked copies of the agent inherit the mask and survive too.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
    threading.Thread(target=agent.listen, name="hpml-signals", daemon=True).start()
    status = agent.run()
    for number in _ENDING:  # Python restores the default handlers before it exits
        signal.signal(number, signal.SIG_IGN)
    return status


@dataclass
class Agent:
    """One node's agent."""

    options: AgentOptions  # from the batch script
    node: str = field(default_factory=node_name)  # Slurm's name of this node
    _asked_at: float = math.inf  # monotonic seconds of the first signal that ends the job
    _terminated_at: float = math.inf  # of a SIGTERM not yet handled by the stop path
    _over: bool = False
    _is_ready: bool = False
    _look_at: float = 0.0
    _note_at: float = math.inf
    _received: list[str] = field(default_factory=list)
    _staged: dict[str, str] = field(default_factory=dict)  # paths by entry name
    _ranks: list[StartedRank] = field(default_factory=list)
    _watch: Watch | None = None
    _stop: StopPath | None = None
    _channel: ChannelReader | None = None
    _software: subprocess.Popen[bytes] | None = None  # records the ranks' software
    _request_at: float = 0.0  # monotonic seconds of the next check for a stop request
    _node_plan: planning.NodePlan | None = None
    _feed: Feed = field(default_factory=lambda: Feed(exporter_sockets(os.environ)))
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    def __post_init__(self) -> None:
        self._attempt = self.options.attempt  # on the shared file system
        self._log = self._attempt / "events" / f"{self.node}.jsonl"
        self._records = RankRecords(self._attempt / "binding" / f"{self.node}.jsonl")
        self._staging = NodeStaging(self.options, self.node, self._log, self._should_stop)
        self._bind = planning.BindOptions.of(self.options.job)
        self._results = NodeResults(self.options.collect, self._attempt, self.node)

    def listen(self) -> None:
        """Receive signals that users send to ranks; runs in a thread that never ends."""
        while True:
            self.on_signal(signal.sigwait(_FOR_RANKS), None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal and wake the main loop, which acts on it.

        A pipe wakes the loop: a `threading.Event` could deadlock if the interrupted code holds its
        lock.
        """
        self._received.append(signal.Signals(number).name)
        now = time.monotonic()
        if number in _ENDING:
            self._asked_at = min(self._asked_at, now)
        if number == signal.SIGTERM:
            self._terminated_at = now
        self._look_at = 0.0
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    @property
    def _asked_to_end(self) -> bool:
        return self._asked_at < math.inf

    def _is_over(self) -> bool:
        """Whether the script has ended; checks the file system every few seconds."""
        now = time.monotonic()
        if not self._over and now >= self._look_at:
            self._look_at = now + _POLL_SECONDS
            self._over = os.path.exists(self._attempt / "over")
        return self._over

    def _should_stop(self) -> bool:
        return self._asked_to_end or self._is_over()

    def _started_ranks(self) -> list[StartedRank]:
        self._ranks += self._records.new()
        return self._ranks

    def _report(self, message: str) -> None:
        _LOG.warning("%s: %s", self.node, message)

    def run(self) -> int:
        """Plan, stage, mark the node as ready, listen, verify, wait for the end, clean up.

        Returns:
            0 if the node was ready, 1 if it could not be made ready.
        """
        name = attempt_channel(os.environ, str(self._attempt))
        monitor = self._monitor()
        try:
            with ChannelReader(name, self._log, self.node, feed=self._feed) as channel:
                self._channel, self._stop = channel, self._stop_path(channel)
                ready = self._make_ready(name, monitor)
                if ready:
                    self._wait()
            self._watch_ranks(closing=True)
            self._feed.flush()
            if ready and self.options.collect:
                self._collect()
        finally:
            # Always clean up: data in /dev/shm would outlive the job.
            stopping.remove_pipes(self._attempt, (rank.rank for rank in self._ranks))
            if monitor is not None:
                monitor.end()  # the exporter ends while the data are removed
            self._clean()
            if monitor is not None:
                monitor.stop()
            self._feed.close()
            if self._software is not None:
                software.end(self._software)
        return 0 if ready else 1

    def _stop_path(self, channel: ChannelReader) -> StopPath | None:
        """Return the stop path of the ranks; None if the job saves no checkpoints."""
        if not self.options.job.checkpoint.enabled:
            return None
        return StopPath(
            self.options.job,
            self._attempt,
            self.node,
            channel,
            environment=os.environ,
            grace=self._rank_grace,
        )

    def _monitor(self) -> NodeMonitor | None:
        if not self.options.job.monitor.enabled:
            return None
        try:
            monitor = NodeMonitor(self.options.job.monitor, self._attempt, self.node)
        except OSError as error:
            self._report(f"the job is not monitored: {error}")
            return None
        self._feed.add_socket(monitor.feed)
        return monitor

    def _make_ready(self, channel: str, monitor: NodeMonitor | None = None) -> bool:
        """Plan, stage all entries and write the node's marker; return False on failure."""
        # A killed agent has made the node ready before: ranks may be using the data.
        self._is_ready = again = (self._attempt / "nodes" / f"{self.node}.ready.json").exists()
        if self._is_over() and not again:
            return True  # the script ended before this agent could handle its signal
        try:
            placed = self._plan(channel)
            if monitor is not None:
                self._start(monitor)
            if again:
                self._take_over()
                return True
            self._results.make_directories()
            began = time.monotonic()
            make_job_directories(self.options, self._staging.stager)
            stages = self._staging.stage_all()
            self._staged = {stage["name"]: stage["path"] for stage in stages}
        except (HpmlError, OSError) as error:
            if again:
                self._report(f"the agent cannot replace the killed one: {error}")
            # If the job is being ended, staging fails because it is interrupted. The node is not at
            # fault, and a failed marker would prevent the run from continuing.
            if again or self._should_stop():
                return True
            self._mark(
                "failed",
                message=str(error) or type(error).__name__,
                hint=getattr(error, "hint", ""),
                exit_code=getattr(error, "exit_code", 0),
            )
            return False
        figures: dict[str, Any] = {
            "bytes": sum(stage["bytes"] for stage in stages),
            "files": sum(stage["files"] for stage in stages),
            "seconds": round(time.monotonic() - began, 6),
            "reused": sum(stage["reused"] for stage in stages),
            "stages": stages,
            **({"collect": len(self.options.collect)} if self.options.collect else {}),
        }
        feed.append(self._log, "ready", node=self.node, **figures)
        # Write the marker last: the script starts the ranks when all nodes have one.
        self._is_ready = True
        self._mark("ready", resolves=resolve(self._head_names()), **figures, placed=placed)
        return True

    def _take_over(self) -> None:
        """Continue the work of a killed agent: keep its ranks and their data."""
        stager = self._staging.stager
        for name in self.options.job_directories:
            stager.directory(self.options.bases[name])
        ready = read_json(self._attempt / "nodes" / f"{self.node}.ready.json")
        for stage in ready.get("stages", []):
            stager.hold(stage["path"])
            self._staged[stage["name"]] = stage["path"]
        name = f"SIGKILL of the agent of {self.node}"
        feed.append(self._log, "signal", node=self.node, name=name, count=1)

    def _start(self, monitor: NodeMonitor) -> None:
        try:
            monitor.start(self._node_plan, no_gpus=self._bind.no_gpus)
        except Exception as error:  # noqa: BLE001 - no error of monitoring may end the job
            self._report(f"the job is not monitored: {type(error).__name__}: {error}")

    def _plan(self, channel: str) -> PlanFigures:
        """Plan the node's ranks and write the plan; bind nothing if no plan is possible.

        Returns:
            The figures of the plan, which the script prints when all nodes are ready.
        """
        options, allowed = self._bind, os.sched_getaffinity(0)
        try:
            node_plan = planning.plan_node(options, os.environ, node=self.node, allowed=allowed)
        except (HpmlError, OSError, ValueError) as error:
            why = f"the ranks cannot be placed: {error}"
            if options.verify == "strict":
                raise BindingError(why, hint=getattr(error, "hint", "")) from error
            why = f"{why}; nothing is bound"
            node_plan = planning.unbound(
                options, os.environ, node=self.node, allowed=allowed, why=why
            )
        self._node_plan = node_plan
        planning.publish(
            self._attempt,
            options,
            node_plan,
            channel=channel,
            more={**self._for_ranks(node_plan), **self._peaks(node_plan)},
        )
        if options.verify != "off":
            self._watch = Watch(self._attempt, node_plan)
        return plan_figures(node_plan.plan, sets_threads=not options.keep_threads)

    def _for_ranks(self, node_plan: planning.NodePlan) -> dict[str, str]:
        checkpoint = self.options.job.checkpoint
        usable = [name for name in self.options.site.interfaces if interface_address(name)]
        gloo = {"gloo": usable[0]} if usable else {}
        if not checkpoint.enabled:
            return gloo
        has_gpus = any(rank.gpu is not None for rank in node_plan.plan.ranks)
        if not checkpoint.hang or not has_gpus:
            return {**gloo, "sigterm": "ignore"}
        stopping.directory_of(self._attempt).mkdir(exist_ok=True)
        return {**gloo, "sigterm": "ignore", "recorder": stopping.recorder_stem(self._attempt)}

    def _peaks(self, node_plan: planning.NodePlan) -> dict[str, str]:
        ranks = node_plan.plan.ranks
        return rank_peaks(
            self._attempt.parents[3] / "bench",
            self.node,
            node_plan.cpu_model,
            cpus=len(node_plan.context.allowed) / len(ranks),
            gpus=sum(rank.gpu is not None for rank in ranks),
            ranks_per_gpu=self._bind.ranks_per_gpu,
        )

    def _head_names(self) -> list[str]:
        try:
            return [str(name) for name in read_json(self._attempt / "head.json")["names"]]
        except (NotFoundError, RecordError, KeyError):
            return []

    def _mark(self, kind: str, **data: object) -> None:
        marker = {"node": self.node, "host": socket.gethostname(), "pid": os.getpid()}
        path = self._attempt / "nodes" / f"{self.node}.{kind}.json"
        write_json(path, {**marker, "time": round(time.time(), 6), **data})

    def _wait(self) -> None:
        kill_at = math.inf
        while True:
            now = time.monotonic()
            ranks: list[StartedRank] = []
            if self._stop is not None or self._should_stop():  # else the list is not needed
                ranks = [*filter(is_alive, self._started_ranks())]
            if self._is_over():
                if not ranks:
                    return
                # The script has ended, but ranks are still using the data. Give them the time that
                # Slurm leaves, then send SIGKILL while this agent can still clean up.
                if kill_at == math.inf:
                    kill_at = now + max(1.0, self._rank_grace())
                if now >= kill_at:
                    kill_families(ranks)  # before Slurm's SIGKILL, which also ends this agent
            # Starting ranks have no record yet, so a ready node without ranks waits for `over`,
            # which the script writes at its end.
            elif self._asked_to_end and not ranks and (self._ranks or not self._is_ready):
                self._stop_ranks(now, ranks)  # records why, so that the run can continue
                return
            pause = min(self._note_signals(now), self._watch_ranks(), self._feed.act(now))
            pause = min(pause, self._stop_ranks(now, ranks))
            self._record_software()
            if self._over or self._asked_to_end:
                pause = min(pause, _RANK_LOOK_SECONDS)
            # A signal ends this wait, so it takes effect at once although the file system is
            # checked only every few seconds.
            select.select([self._wake[0]], [], [], max(0.0, pause))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], 4096)

    def _record_software(self) -> None:
        """Start recording the ranks' software when the first rank runs on the first node."""
        if self._software is not None:
            self._software.poll()  # leaves no zombie
            return
        if node_index(os.environ)[0] == 0:
            for rank in self._started_ranks()[:1]:
                self._software = software.start(self._attempt, rank.pid, rank.program)

    def _stop_ranks(self, now: float, ranks: list[StartedRank]) -> float:
        """Stop the ranks if that is due; return the seconds until the next call."""
        if self._stop is None:
            return self._pass_on_request(now)
        if self._terminated_at < math.inf:
            # The handler only stores the time; the loop queries Slurm and writes files.
            self._stop.on_sigterm(self._terminated_at)
            self._terminated_at = math.inf
        try:
            pause = self._stop.act(now, ranks)
        except Exception as error:  # noqa: BLE001 - no error of the stop path may end the job
            what = f"{type(error).__name__}: {error}"
            self._report(f"its ranks cannot be stopped before their end: {what}")
            self._stop = None
            return math.inf
        if self._stop.state == "RUNNING" and self._is_ready:
            self._asked_at = math.inf  # the signal was meant for the ranks
        return pause

    def _pass_on_request(self, now: float) -> float:
        """Pass a stop request on to the ranks; return the seconds until the next check.

        For jobs without `checkpoint`: a search stops the trials that it prunes.
        """
        if self._channel is None:
            return math.inf
        if now >= self._request_at:
            self._request_at = now + _POLL_SECONDS
            # Only every two seconds, because all nodes read the same file on a shared file system.
            request = Attempt(self._attempt).stop_request()
            if request is not None:
                self._channel.ask_to_stop(str(request["reason"]))
        return self._request_at - now

    def _note_signals(self, now: float) -> float:
        """Record signals that did not end the job; return the seconds until the next check.

        Wait a moment first: the script also sends a signal when it writes `over`, and a shared file
        system may show that file late.
        """
        if self._over:
            return math.inf
        if self._received:
            self._note_at = min(self._note_at, now + _POLL_SECONDS)
            if now >= self._note_at:
                received, self._received = self._received, []
                for name, count in Counter(received).items():
                    with contextlib.suppress(HpmlError, OSError):  # a full disk ends no job
                        feed.append(self._log, "signal", node=self.node, name=name, count=count)
                self._note_at = math.inf
        return min(self._look_at, self._note_at) - now

    def _watch_ranks(self, *, closing: bool = False) -> float:
        """Verify where the ranks run if that is due; return the seconds until the next call.

        An error ends only the verification and does not affect ranks and data.
        """
        pause = _POLL_SECONDS
        if self._watch is not None:
            try:
                if closing:
                    self._watch.close(self._started_ranks())
                else:
                    due = self._watch.act(time.monotonic(), self._started_ranks())
                    pause = min(pause, due)
                if self._watch.binding is not None:
                    self._feed.set_binding(*self._watch.binding)
            except Exception as error:  # noqa: BLE001 - no error of the proof may end the job
                what = f"{type(error).__name__}: {error}"
                self._report(f"binding verification stopped: {what}")
                self._watch = None
        return pause

    def _rank_grace(self) -> float:
        """Return the seconds from a job's SIGTERM until its ranks must have ended."""
        return self._grace / (
            2 if self.options.collect else 1
        )  # the other half is for collecting results

    @functools.cached_property
    def _grace(self) -> float:
        """Ask Slurm for the seconds from a job's SIGTERM until cleaning must begin."""
        return kill_wait(os.environ) - _CLEAN_SECONDS

    def _collect(self) -> None:
        """Copy the results back; after a signal, while time is left."""

        def should_stop() -> bool:
            return self._asked_to_end and time.monotonic() >= self._asked_at + self._grace

        try:
            self._results.collect(should_stop, self._staged)
        except (HpmlError, OSError) as error:
            self._report(f"results may be missing: {error}")

    def _clean(self) -> None:
        try:
            self._staging.stager.cleanup()
        except (HpmlError, OSError) as error:
            self._report(f"staged data could not be removed: {error}")
