"""The stop path on one node: ask ranks to save and stop, and end them in time.

Reasons are the time limit (watched by the agent of the first node), a SIGTERM without cancellation,
and a hang. The first reason becomes a line in the attempt's file `stop`. All agents read it and
pass it on to their ranks until these end. A cancelled job is ended at once.

hpml-bind makes ranks ignore SIGTERM, so that Slurm's signal does not end them before they have
saved. So the stop path must end ranks that exceed their time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import stat as modes
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node import continuation
from hpml_orchestrator.node.channel import Slowest
from hpml_orchestrator.node.environment import node_index
from hpml_orchestrator.node.processes import (
    ProcessTable,
    StartedRank,
    catches,
    kill_families,
    status_of,
)
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.run import NO_STACKS, Attempt, Run, end_margin, lead_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hpml_orchestrator.node.channel import ChannelReader, Peer, Peers
    from hpml_orchestrator.records.job import Job

# Hangs: detect them, and save the stacks of ranks before ending these.
#
# A rank that uses `hpml_channel.py` writes its stacks on a signal from the agent. PyTorch writes
# the last collectives of NCCL to files when the agent writes to its named pipe (flight recorder).

_PAUSED_SECONDS = 10.0
_STACK_SECONDS = 2.0
_DUMP_LOOK_SECONDS = 0.05
_MAX_STACK_BYTES = 1 << 20
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class HangWatch:
    """Detects that the ranks of one node hang.

    They hang if a live rank has reported a step and no datagram of any rank arrived for `limit`
    seconds. Ranks in a debugger never count as hanging.

    Args:
        limit: seconds without a datagram; 0 to disable.
        peers: the processes that use the channel.
    """

    def __init__(self, limit: float, peers: Peers) -> None:
        self._limit = limit
        self._peers = peers
        self._heard = -1
        self._since = self._looked_at = 0.0

    def silence(self, now: float, ranks: Collection[int]) -> float:
        """Return the seconds for which the ranks have been hanging; 0 if they are not.

        Args:
            now: seconds on a monotonic clock.
            ranks: the first process of each live rank of this node.
        """
        heard, before = self._peers.heard, self._looked_at
        self._looked_at = now
        if heard != self._heard or not self._limit:
            self._heard, self._since = heard, now
            return 0.0
        # The agent's loop calls this every two seconds. A longer gap means that the agent was
        # suspended, and so were the ranks.
        if now - before > _PAUSED_SECONDS:
            self._since += now - before
        if now - self._since < self._limit or not ranks or not self._peers.stepping:
            return 0.0
        table, stepping = ProcessTable(), self._peers.stepping
        family = {stat.pid for pid in ranks for stat in table.family(pid)}
        if stepping.isdisjoint(family):
            self._since = now  # these have ended; others may be starting
            return 0.0
        # A rank in a debugger sends nothing on purpose.
        if any(status_of(pid).get("TracerPid", "0") != "0" for pid in family):
            self._since = now
            return 0.0
        return now - self._since


def directory_of(attempt: Path) -> Path:
    """Return the directory of an attempt's stacks and flight recorder files."""
    return attempt / "stacks"


def recorder_stem(attempt: Path) -> str:
    """Return the prefix of flight recorder files, to which the rank is appended."""
    return str(directory_of(attempt) / "nccl_rank_")


def collect_stacks(ranks: Sequence[StartedRank], peers: Mapping[int, Peer], target: Path) -> None:
    """Write the stacks of ranks to a file, and trigger NCCL's flight recorder.

    Args:
        ranks: live ranks.
        peers: the processes that use the channel, by pid.
        target: the file; its directory is created.

    Raises:
        OSError: the file cannot be written.
    """
    table = ProcessTable()
    pids = {rank.pid for rank in ranks}
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for rank in sorted(ranks, key=lambda rank: rank.rank):
            family = [stat.pid for stat in table.family(rank.pid, pids - {rank.pid})]
            for member in family:
                _trigger_flight_recorder(table.environment(member), rank.rank, member)
            known = [member for member in family if member in peers] or family[:1]
            for member in known:
                text = _stacks(member, peers.get(member))
                stream.write(f"rank {rank.rank}, process {member}\n{text.rstrip()}\n\n")


def _stacks(pid: int, peer: Peer | None) -> str:
    if peer is None or not peer.stacks_signal:
        return "no stacks: the program does not use hpml_channel"
    if not catches(pid, peer.stacks_signal):
        return "no stacks: its signal handler was replaced"  # the signal would kill the process
    path = f"/proc/{pid}/fd/{peer.stacks_fd}"
    try:
        before = os.stat(path).st_size
        os.kill(pid, peer.stacks_signal)
        size, deadline = before, time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_DUMP_LOOK_SECONDS)
            last, size = size, os.stat(path).st_size
            # Stacks of several threads need several writes, so wait until the file stops growing.
            if before < size == last:
                break
        with open(path, "rb") as stream:
            stream.seek(before)
            text = stream.read(_MAX_STACK_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"no stacks: {error.strerror}"
    return text or NO_STACKS


def _trigger_flight_recorder(environment: Mapping[str, str], rank: int, pid: int) -> None:
    """Make PyTorch write the last collectives of a rank, if it reads the named pipe."""
    stem = environment.get(_PIPE)
    if not stem:
        return
    root = f"/proc/{pid}/root" if stem.startswith("/") else f"/proc/{pid}/cwd/"
    with contextlib.suppress(OSError):
        # Without a reader this fails at once; a regular file with this name is not changed.
        descriptor = os.open(f"{root}{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            if modes.S_ISFIFO(os.stat(descriptor).st_mode):
                os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)


def remove_pipes(attempt: Path, ranks: Iterable[int]) -> None:
    """Remove the pipes of the flight recorder, on which copying the records would block."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.unlink(f"{recorder_stem(attempt)}{rank}.pipe")


if TYPE_CHECKING:
    Ranks = Sequence[StartedRank]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_PUSH_SECONDS = 1.0
_HANG_SECONDS = 10.0  # from the stop request to the end of hanging ranks
_SPREAD_SECONDS = 0.002  # delay between nodes that query the controller


class StopPath:
    """Stops the ranks of one node; the agent's loop calls `act`.

    Args:
        job: the job, which has `checkpoint`.
        attempt: the attempt's directory.
        node: Slurm's name of this node.
        channel: the reader of the training channel.
        environment: the agent's variables.
        grace: returns the seconds from Slurm's SIGTERM until ranks must have ended.
        ask: returns the state of the job with these variables.
        kill: sends a signal to ranks, given their records.
        clock: seconds since the epoch.

    Attributes:
        reason: why the ranks of this node must stop; empty if they need not.
        state: of the job at the last SIGTERM; empty before, or if Slurm did not answer.
    """

    def __init__(
        self,
        job: Job,
        attempt: Path,
        node: str,
        channel: ChannelReader,
        *,
        environment: Mapping[str, str],
        grace: Callable[[], float],
        ask: Callable[[Mapping[str, str]], continuation.AllocationState] = continuation.ask,
        kill: Callable[[Ranks, int], None] = kill_families,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reason = self.state = ""
        self._options = job.checkpoint
        self._records = Attempt(attempt)
        self._node = node
        self._channel = channel
        self._environment = environment
        self._ask, self._kill, self._clock, self._grace = ask, kill, clock, grace
        self._index, _ = node_index(environment)
        self._hang = HangWatch(job.checkpoint.hang, channel.peers)
        self._end_is_known = False
        self._stacks: threading.Thread | None = None
        self._stopped: set[int] = set()  # ranks that got the configured signal, or SIGTERM
        # Monotonic times of the last SIGTERM and of the next actions.
        self._term_at = self._kill_at = self._ask_at = math.inf
        self._look_at = self._push_at = -math.inf
        self._end = _number(environment.get("SLURM_JOB_END_TIME"))
        self._limit: float = job.resources.time
        watches = self._index == 0 and job.checkpoint.lead is None
        self._earlier = _slowest_of(self._records) if watches else Slowest()

    def on_sigterm(self, now: float) -> None:
        """Record a SIGTERM. All nodes get it at the same time, so each delays its query of Slurm.

        Args:
            now: seconds on a monotonic clock.
        """
        self._term_at, self._ask_at = now, now + self._index * _SPREAD_SECONDS

    def act(self, now: float, ranks: Ranks) -> float:
        """Do what is due; return the seconds until the next call is needed.

        Args:
            now: seconds on a monotonic clock.
            ranks: hpml-bind's records of the live ranks of this node.
        """
        if now >= self._ask_at:
            self._judge_sigterm(now)
        if not self.reason:
            self._watch_limit(now)
        if not self.reason and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._read_request(now)
        if self._stacks is None:
            self._watch_hang(now, ranks)
        if self.reason and now >= self._push_at:
            self._push_at = now + _PUSH_SECONDS
            self._channel.ask_to_stop(self.reason)
            self._signal(ranks)
        if now >= self._kill_at:
            self._end_ranks(now, ranks)
        due = self._push_at if self.reason else self._look_at
        return max(0.0, min(due, self._ask_at, self._kill_at) - now)

    def _judge_sigterm(self, now: float) -> None:
        self.state = self._ask(self._environment).state
        deadline = self._term_at + self._grace()
        # If the controller does not answer, query it again while there is time.
        unanswered = not self.state and now + _LOOK_SECONDS < deadline
        self._ask_at = now + _LOOK_SECONDS if unanswered else math.inf
        # A cancelled job does not continue, so its ranks need not save. After any other SIGTERM
        # they may save until just before Slurm's SIGKILL.
        if self.state == "CANCELLED":
            self._kill_at = now
        elif self.state not in ("", "RUNNING"):
            self._kill_at = min(self._kill_at, deadline)
        if not self.reason and self.state != "CANCELLED":
            self._request("time_limit" if self.state == "TIMEOUT" else "preemption", now)

    def _watch_limit(self, now: float) -> None:
        """Request a stop before the time limit; only the first node's agent does this."""
        if self._index:
            return
        if not self._end_is_known:
            self._end_is_known = True
            self._ask_for_end()
        if self._end is None or self._stop_time(self._end) > self._clock():
            return
        self._ask_for_end()  # the limit may change (`scontrol update`)
        if self._end is not None and self._stop_time(self._end) <= self._clock():
            self._request("time_limit", now)

    def _ask_for_end(self) -> None:
        """Query the end of the job in Slurm: its limit may differ from the script's."""
        state = self._ask(self._environment)
        if state.state == "RUNNING" and "HPML_LOCAL_STEPS" not in self._environment:
            if state.end is not None and self._end is not None:
                self._limit += state.end - self._end
            self._end = state.end

    def _stop_time(self, end: float) -> float:
        """Return the time of the stop request in seconds since the epoch."""
        return end - self._lead()

    def _lead(self) -> float:
        """Return the seconds that ranks have for saving."""
        slowest = self._earlier.over(self._channel.peers.slowest)
        return lead_seconds(self._options.lead, self._limit, **slowest._asdict())

    def _read_request(self, now: float) -> None:
        request = self._records.stop_request()
        if request is not None:
            self._begin(str(request["reason"]), request.get("time"), now)

    def _request(self, reason: str, now: float) -> None:
        asked = self._clock()
        try:
            self._records.request_stop(reason, by=self._node, now=asked)
        except (HpmlError, OSError) as error:  # the ranks of this node can still save
            _LOG.error("%s: the stop request cannot be written: %s", self._node, error)
        # Several nodes may request a stop at the same time. All report the reason in the first line
        # of the file.
        self._read_request(now)
        if not self.reason:
            self._begin(reason, asked, now)

    def _begin(self, reason: str, asked: object, now: float) -> None:
        """Begin to stop the ranks of this node; `asked` is the time of the request."""
        self.reason = reason
        with contextlib.suppress(HpmlError, OSError):  # a full disk ends no job
            log = self._records.directory / "events" / f"{self._node}.jsonl"
            feed.append(log, "stop", node=self._node, reason=reason)
        if reason == "time_limit" and self._term_at == math.inf:
            if self._index:  # the first node has just requested it
                self._ask_for_end()
            if self._end is not None and isinstance(asked, (int, float)):
                # Compute the margin from the lead at the time of the request, so that all nodes end
                # their ranks at the same time and the script can still requeue the job.
                left = self._end - self._clock() - end_margin(self._end - asked)
                self._kill_at = min(self._kill_at, now + max(0.0, left))
        if reason == "requested":  # ranks that do not use the channel would never stop
            self._kill_at = min(self._kill_at, now + self._lead())

    def _watch_hang(self, now: float, ranks: Ranks) -> None:
        """Request a stop if the ranks hang, and save their stacks."""
        if self.reason != "hang":
            seconds = self._hang.silence(now, [rank.pid for rank in ranks])
            if not seconds:
                return
            with contextlib.suppress(HpmlError, OSError):
                log = self._records.directory / "events" / f"{self._node}.jsonl"
                names = sorted(rank.rank for rank in ranks)
                feed.append(log, "hang", node=self._node, seconds=round(seconds), ranks=names)
            if not self.reason:
                self._request("hang", now)
        self._kill_at = min(self._kill_at, now + _HANG_SECONDS)
        # In a thread: each process may take seconds, and this must not delay ending the ranks.
        self._stacks = threading.Thread(target=self._keep_stacks, args=(ranks,), daemon=True)
        self._stacks.start()

    def _keep_stacks(self, ranks: Ranks) -> None:
        target = directory_of(self._records.directory) / f"{self._node}.txt"
        try:
            collect_stacks(ranks, self._channel.peers.by_pid(), target)
        except OSError as error:
            _LOG.error("%s: the stacks of its ranks are lost: %s", self._node, error)

    def _signal(self, ranks: Ranks) -> None:
        """Send the configured signal once to each rank, to its first process that handles it."""
        number = getattr(signal, f"SIG{self._options.signal}", 0) if self._options.signal else 0
        waiting = [rank for rank in ranks if rank.pid not in self._stopped]
        if not number or not waiting:
            return
        table = ProcessTable()
        for rank in waiting:
            for stat in table.family(rank.pid, {one.pid for one in ranks}):
                # A shell or wrapper around the program has the default action: it would end, and
                # the program with it.
                if catches(stat.pid, number):
                    with contextlib.suppress(OSError):
                        os.kill(stat.pid, number)
                    self._stopped.add(rank.pid)
                    break

    def _end_ranks(self, now: float, ranks: Ranks) -> None:
        """End the ranks whose time is up.

        If the job is cancelled, send SIGTERM to ranks that handle it, and give them as much time as
        Slurm would: the launcher may have blocked Slurm's SIGTERM and then does not pass it on.
        """
        # Repeat every second: ranks may start late or start processes while being killed.
        self._kill_at = now + _PUSH_SECONDS
        to_kill = list(ranks)
        if self.state == "CANCELLED" and now < self._term_at + self._grace():
            handling = [one for one in ranks if catches(one.pid, signal.SIGTERM)]
            asked = [one for one in handling if one.pid not in self._stopped]
            if asked:
                self._kill(asked, signal.SIGTERM)
            self._stopped.update(one.pid for one in asked)
            to_kill = [one for one in ranks if one not in handling]
        if to_kill:
            self._kill(to_kill, signal.SIGKILL)


def _slowest_of(attempt: Attempt) -> Slowest:
    slowest = Slowest()
    with contextlib.suppress(HpmlError, OSError):
        for earlier in Run(attempt.directory.parents[1]).attempts():
            ended = earlier.ended or {}
            figures = [ended.get(name) for name in ("slowest_save", "slowest_step")]
            known = [one if isinstance(one, (int, float)) else None for one in figures]
            slowest = slowest.over(Slowest(*known))
    return slowest


def terminated(attempt: str) -> int:
    """Request a stop if only the batch script got SIGTERM while the job continues to run.

    `scancel --batch --signal=TERM` and `sbatch --signal=B:TERM@120` send such signals.
    """
    if continuation.ask(os.environ).state == "RUNNING":
        Attempt(Path(attempt)).request_stop("preemption", by="batch", now=time.time())
    return 0


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
