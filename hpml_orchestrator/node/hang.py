"""Detects that the ranks of a node hang, and saves their stacks before they are ended.

A rank that uses `hpml_channel.py` writes its stacks when the agent signals it. PyTorch writes the
last collectives of NCCL to files when the agent writes to its named pipe (the flight recorder).
"""

from __future__ import annotations

import contextlib
import os
import stat as modes
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.node.processes import ProcessTable, StartedRank, catches, status_of
from hpml_orchestrator.records.run import NO_STACKS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.node.peers import Peer, Peers

_PAUSED_SECONDS = 10.0
_STACK_SECONDS = 2.0
_LOOK_SECONDS = 0.05
_MAX_STACK_BYTES = 1 << 20
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class HangWatch:
    """Decides whether the ranks of one node hang.

    They do if at least one live rank has reported a step and no datagram of any rank arrived for
    `limit` seconds. Ranks that run in a debugger never count as hanging.

    Args:
        limit: seconds without a sign of life; 0 for never.
        peers: the processes that use the channel.
    """

    def __init__(self, limit: float, peers: Peers) -> None:
        self._limit = limit
        self._peers = peers
        self._heard = -1
        self._since = self._looked_at = 0.0

    def silence(self, now: float, ranks: Collection[int]) -> float:
        """Return how long the ranks have been hanging, in seconds; 0 if they are not.

        Args:
            now: seconds on a monotonic clock.
            ranks: the first process of each live rank of this node.
        """
        heard, before = self._peers.heard, self._looked_at
        self._looked_at = now
        if heard != self._heard or not self._limit:
            self._heard, self._since = heard, now
            return 0.0
        # The agent's loop calls this every two seconds. A longer gap means that the agent itself
        # did not run, and neither did the ranks.
        if now - before > _PAUSED_SECONDS:
            self._since += now - before
        if now - self._since < self._limit or not ranks or not self._peers.stepping:
            return 0.0
        table, stepping = ProcessTable(), self._peers.stepping
        family = {stat.pid for pid in ranks for stat in table.family(pid)}
        if stepping.isdisjoint(family):
            self._since = now  # those have ended; others may be starting
            return 0.0
        # A rank in a debugger is silent on purpose.
        if any(status_of(pid).get("TracerPid", "0") != "0" for pid in family):
            self._since = now
            return 0.0
        return now - self._since


def directory_of(attempt: Path) -> Path:
    """Return where the stacks and the flight recorder's files of an attempt are."""
    return attempt / "stacks"


def recorder_stem(attempt: Path) -> str:
    """Return the prefix of the flight recorder's files; the rank follows."""
    return str(directory_of(attempt) / "nccl_rank_")


def collect_stacks(ranks: Sequence[StartedRank], peers: Mapping[int, Peer], target: Path) -> None:
    """Write the stacks of ranks to a file, and trigger NCCL's flight recorder.

    Args:
        ranks: that live.
        peers: the processes that use the channel, by pid.
        target: the file; its directory is made.

    Raises:
        OSError: it cannot be written.
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
            time.sleep(_LOOK_SECONDS)
            last, size = size, os.stat(path).st_size
            # The stacks of all threads take several writes, so wait until the file stops growing.
            if before < size == last:
                break
        with open(path, "rb") as stream:
            stream.seek(before)
            text = stream.read(_MAX_STACK_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"no stacks: {error.strerror}"
    return text or NO_STACKS


def _trigger_flight_recorder(environment: Mapping[str, str], rank: int, pid: int) -> None:
    """Make PyTorch write the last collectives of a rank, if it reads a pipe of that name."""
    stem = environment.get(_PIPE)
    if not stem:
        return
    root = f"/proc/{pid}/root" if stem.startswith("/") else f"/proc/{pid}/cwd/"
    with contextlib.suppress(OSError):
        # Without a reader this fails at once; a plain file of that name stays as it is.
        descriptor = os.open(f"{root}{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            if modes.S_ISFIFO(os.stat(descriptor).st_mode):
                os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)


def remove_pipes(attempt: Path, ranks: Iterable[int]) -> None:
    """Remove the flight recorder's pipes: copying the records would block on them."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.unlink(f"{recorder_stem(attempt)}{rank}.pipe")
