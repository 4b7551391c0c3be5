"""What the ranks of one job have said, added up.

Each agent's ranks only count up, so what a message adds is the difference to the one before; an
agent that is heard for the first time, or begins again, adds all it says. So the job's counters
never fall: not when a rank starts again (its agent adds up its processes), and not when the agent
does (a job that Slurm requeued).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpml_exporters.training.message import BUCKETS, COUNTERS, Message, Rank

__all__ = ["Figures", "JobTotals"]

SILENT_SECONDS = 60.0
_RANK_SILENT_SECONDS = 60.0
_STALE_SECONDS = 600.0  # a loss or an accuracy that is older is no news
_WINDOW_SECONDS = 60.0
_MAX_AGENTS = 64  # nodes that one machine plays, and the job's earlier attempts
_MAX_RANKS = 4096
_MAX_METHODS = 4
_STEPS, _WAIT_SECONDS, _STEP_SECONDS, _COMM_SECONDS = 1, 2, 3, 4


@dataclass
class _Said:
    """One rank of one agent: its last word, and its steps over the last minute."""

    last: Rank
    heard: float  # when it spoke, not when its agent did
    steps: deque[tuple[float, tuple[float, ...]]] = field(default_factory=deque)

    def note(self, now: float) -> None:
        """Keep where its steps are now, and forget what is older than needed."""
        self.steps.append((now, self.last.totals))
        while len(self.steps) > 1 and self.steps[1][0] <= now - _WINDOW_SECONDS:
            self.steps.popleft()

    def per_step(self, counter: int) -> float | None:
        """Return by how much a counter grew per step of the last minute; None without a step."""
        before, now = self.steps[0][1], self.last.totals
        done = now[_STEPS] - before[_STEPS]
        return (now[counter] - before[counter]) / done if done > 0 else None


@dataclass
class _Agent:
    heard: float
    binding: tuple[int, int] | None = None
    ranks: dict[int, _Said] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """What is shown of a job.

    Attributes:
        totals: samples, steps, seconds of waiting for data, of steps.
        comm: seconds of communication by method.
        buckets: steps by duration, not cumulative; None where no rank tells.
        bucket_seconds: duration of those steps.
        step_seconds: mean duration of a step of the fastest and of the slowest rank.
        data_wait: mean wait for data in a step, of the rank that waits shortest and of the one
            that waits longest; None where none has ever told a wait.
        longest_wait: which rank that is.
        ranks: that have spoken in the last minute.
        loss: mean over the ranks that tell it; so are the next two.
        accuracy: 0 to 1.
        mfu: 0 to 1.
        binding: ranks that run where they should, and ranks that do not.
    """

    totals: tuple[float, ...]
    comm: tuple[tuple[str, float], ...]
    buckets: tuple[int, ...] | None
    bucket_seconds: float
    step_seconds: tuple[float, float] | None
    data_wait: tuple[float, float] | None
    longest_wait: int | None
    ranks: int
    loss: float | None
    accuracy: float | None
    mfu: float | None
    binding: tuple[int, int] | None


class JobTotals:
    """One job on this node."""

    def __init__(self) -> None:
        self._agents: dict[int, _Agent] = {}
        self._totals = [0.0] * COUNTERS
        self._comm: dict[str, float] = {}
        self._buckets: list[int] | None = None
        self._bucket_seconds = 0.0

    def add(self, message: Message, agent: int, now: float) -> None:
        """Take in what an agent says.

        Args:
            message: what it says.
            agent: its process id.
            now: seconds on a monotonic clock.
        """
        known = self._agents.get(agent)
        if known is None:
            if len(self._agents) >= _MAX_AGENTS:
                del self._agents[min(self._agents, key=lambda one: self._agents[one].heard)]
            known = self._agents[agent] = _Agent(now)
        known.heard = now
        known.binding = message.binding
        for rank in message.ranks:
            self._add_rank(known, rank, now)

    def _add_rank(self, agent: _Agent, rank: Rank, now: float) -> None:
        said = agent.ranks.get(rank.rank)
        if said is None and len(agent.ranks) >= _MAX_RANKS:
            return
        before = (0.0,) * COUNTERS
        counted: tuple[int, ...] | None = None
        if said is not None and all(
            new >= old for new, old in zip(rank.totals, said.last.totals, strict=True)
        ):
            before, counted = said.last.totals, said.last.buckets
        else:
            said = agent.ranks[rank.rank] = _Said(rank, now)
        said.last, said.heard = rank, now - rank.age
        said.note(now)
        more = [new - old for new, old in zip(rank.totals, before, strict=True)]
        for number, amount in enumerate(more):
            self._totals[number] += amount
        if rank.method:
            known = rank.method in self._comm or len(self._comm) < _MAX_METHODS
            method = rank.method if known else "other"
            self._comm[method] = self._comm.get(method, 0.0) + more[_COMM_SECONDS]
        if rank.buckets is not None:
            self._buckets = self._buckets or [0] * BUCKETS
            for number, count in enumerate(rank.buckets):
                self._buckets[number] += max(0, count - (counted[number] if counted else 0))
            self._bucket_seconds += more[_STEP_SECONDS]

    def figures(self, now: float) -> Figures | None:
        """Return what is known now; None when its agents have been silent for a minute."""
        agents = [one for one in self._agents.values() if now - one.heard <= SILENT_SECONDS]
        if not agents:
            return None
        said = [one for agent in agents for one in agent.ranks.values()]
        fresh = [one for one in said if now - one.heard <= _RANK_SILENT_SECONDS]
        means = [mean for one in fresh if (mean := one.per_step(_STEP_SECONDS)) is not None]
        waits = self._waits(fresh)
        news = [one.last for one in said if now - one.heard <= _STALE_SECONDS]
        judged = [one.binding for one in agents if one.binding is not None]
        return Figures(
            tuple(self._totals[:_COMM_SECONDS]),
            tuple(sorted(self._comm.items())),
            None if self._buckets is None else tuple(self._buckets),
            self._bucket_seconds,
            (min(means), max(means)) if means else None,
            (min(waits)[0], max(waits)[0]) if waits else None,
            -max(waits)[1] if waits else None,
            len(fresh),
            _mean(one.loss for one in news),
            _mean(one.accuracy for one in news),
            _mean(one.mfu for one in news),
            (sum(one[0] for one in judged), sum(one[1] for one in judged)) if judged else None,
        )

    def _waits(self, ranks: list[_Said]) -> list[tuple[float, int]]:
        """Return the mean wait for data in a step of each rank, and its number, negative.

        So of those that wait alike, the lowest rank counts as the longest.
        """
        if not self._totals[_WAIT_SECONDS]:  # the training does not measure it
            return []
        each = [(one.per_step(_WAIT_SECONDS), -one.last.rank) for one in ranks]
        return [(wait, rank) for wait, rank in each if wait is not None]


def _mean(values: Iterator[float | None]) -> float | None:
    told = [one for one in values if one is not None]
    return sum(told) / len(told) if told else None
