"""What the ranks of one job have said, added up.

The figures of each agent's ranks only grow, so what a message adds is the difference to the one
before; an agent that is heard for the first time adds all it says. So the job's counters never
fall: not when a rank starts again (its agent adds up its processes), and not when the agent does
(a job that Slurm requeued).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpml_orchestrator.records.feed import BUCKETS, COUNTERS, FeedMessage, RankFigures

__all__ = ["JobTotals", "Rank"]

SILENT_SECONDS = 60.0
_STALE_SECONDS = 600.0  # a loss or an accuracy that is older is no news
_WINDOW_SECONDS = 60.0
_MAX_AGENTS = 64  # nodes that one machine plays, and the job's earlier attempts
_MAX_RANKS = 4096
_MAX_METHODS = 4


@dataclass
class Rank:
    """One rank of one agent: its last word, and its steps over the last minute.

    Attributes:
        number: global rank.
        heard: when it last spoke, not when its agent did.
        totals: its counters by name.
        buckets: its steps by duration.
        gauges: its latest values by name.
        recent: its counters over the last minute, each with the time.
    """

    number: int
    heard: float
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    buckets: Sequence[int] = (0,) * BUCKETS
    gauges: dict[str, float] = field(default_factory=dict)
    recent: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    def per_step(self, counter: str) -> float | None:
        """Return by how much a counter grew per step of the last minute; None without a step."""
        before = self.recent[0][1]
        steps = self.totals["steps"] - before["steps"]
        return (self.totals[counter] - before[counter]) / steps if steps > 0 else None


@dataclass
class _Agent:
    heard: float = 0.0
    binding: tuple[int, int] | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)


class JobTotals:
    """One job on this node.

    Attributes:
        totals: its counters by name.
        comm: seconds of communication by method.
        buckets: steps by duration, not cumulative; None where no rank tells.
        bucket_seconds: duration of those steps.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self.comm: dict[str, float] = {}
        self.buckets: list[int] | None = None
        self.bucket_seconds = 0.0
        self._agents: dict[int, _Agent] = {}

    def add(self, message: FeedMessage, agent: int, now: float) -> None:
        """Take in what an agent says.

        Args:
            message: what it says.
            agent: its process id.
            now: monotonic seconds.
        """
        if agent not in self._agents and len(self._agents) >= _MAX_AGENTS:
            del self._agents[min(self._agents, key=lambda one: self._agents[one].heard)]
        known = self._agents.setdefault(agent, _Agent())
        known.heard, known.binding = now, message.binding
        for figures in message.ranks:
            if figures.rank in known.ranks or len(known.ranks) < _MAX_RANKS:
                rank = known.ranks.setdefault(figures.rank, Rank(figures.rank, now))
                self._add_rank(rank, figures, now)

    def ranks(self, now: float, within: float = SILENT_SECONDS) -> list[Rank]:
        """Return the ranks that have spoken within some seconds."""
        ranks = [rank for agent in self._speaking(now) for rank in agent.ranks.values()]
        return [rank for rank in ranks if now - rank.heard <= within]

    def is_silent(self, now: float) -> bool:
        """Return whether no agent has spoken in the last minute."""
        return not self._speaking(now)

    def binding(self, now: float) -> tuple[int, int] | None:
        """Return how many ranks are bound as planned, and how many others; None: not judged."""
        judged = [agent.binding for agent in self._speaking(now) if agent.binding is not None]
        return (sum(one[0] for one in judged), sum(one[1] for one in judged)) if judged else None

    def mean(self, gauge: str, now: float) -> float | None:
        """Return the mean of a gauge over the ranks that tell it."""
        ranks = self.ranks(now, _STALE_SECONDS)
        values = [rank.gauges[gauge] for rank in ranks if gauge in rank.gauges]
        return sum(values) / len(values) if values else None

    def _speaking(self, now: float) -> list[_Agent]:
        return [one for one in self._agents.values() if now - one.heard <= SILENT_SECONDS]

    def _add_rank(self, rank: Rank, figures: RankFigures, now: float) -> None:
        grown = {}
        for name, value in zip(COUNTERS, figures.totals, strict=True):
            grown[name] = max(0.0, value - rank.totals[name])
            self.totals[name] += grown[name]
        rank.totals = {name: rank.totals[name] + grown[name] for name in COUNTERS}
        rank.gauges, rank.heard = figures.gauges, now - figures.age
        rank.recent.append((now, rank.totals))
        while len(rank.recent) > 1 and rank.recent[1][0] <= now - _WINDOW_SECONDS:
            rank.recent.popleft()
        if figures.method:
            has_room = figures.method in self.comm or len(self.comm) < _MAX_METHODS
            method = figures.method if has_room else "other"
            self.comm[method] = self.comm.get(method, 0.0) + grown["comm_seconds"]
        if figures.buckets is not None:
            self.buckets = self.buckets or [0] * BUCKETS
            for place, count in enumerate(figures.buckets):
                self.buckets[place] += max(0, count - rank.buckets[place])
            rank.buckets = tuple(map(max, rank.buckets, figures.buckets))
            self.bucket_seconds += grown["step_seconds"]
