"""A run in figures: phases, staging, throughput and accuracy, from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.runs.damaged import naming_damage
from hpml_orchestrator.runs.reporting.binding import BindingReport, read_binding
from hpml_orchestrator.runs.reporting.monitor import (
    Monitored,
    aggregate_nodes,
    monitor_lines,
    monitored_nodes,
    numbers,
)
from hpml_orchestrator.runs.reporting.staging import StagedEntry, collected_lines, staged_entries
from hpml_orchestrator.runs.reporting.timeline import Phase, Timeline, phases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import BindingRecord, CollectedEntry
    from hpml_orchestrator.runs.state import State


@dataclass(frozen=True)
class Summary:
    """The last attempt of a run in figures."""

    attempt: int | None = None  # its number, counted from 0; None before the first
    phases: list[Phase] = field(default_factory=list)  # without gaps
    staged_bytes: int = 0  # on all nodes together
    staged_files: int = 0
    staging_seconds: float = 0.0  # of the slowest node
    stages: list[StagedEntry] = field(default_factory=list)
    collected: list[CollectedEntry] = field(default_factory=list)  # entries of `collect`, by node
    collected_lines: list[str] = field(default_factory=list)  # the same as text
    nodes: int = 0  # that became ready
    ranks: int = 0  # that recorded their binding
    world_size: int = 0  # by those records; 0 without any
    result: dict[str, object] = field(default_factory=dict)  # what the training reported at its end
    last_step: dict[str, object] = field(default_factory=dict)  # rank 0's last counters
    # By rank: `rank`, `seconds` between the first and the last counters since the warm-up, and by
    # how much each counter (`samples`, `steps`, `wait_seconds`) grew; what was not counted is out.
    training: list[dict[str, float]] = field(default_factory=list)
    # Share of the step time spent waiting for data since the warm-up, as the mean of the ranks.
    data_wait_ratio: float | None = None
    # Of all ranks: by the result, else by the counters since the warm-up ended.
    samples_per_second: float | None = None
    binding: str = ""  # whether the ranks are bound as planned, in one line
    binding_failed: bool = False  # whether the job failed because they are not
    monitor: Monitored | None = None  # of all nodes together; None without a monitor
    monitored: list[Monitored] = field(default_factory=list)  # of each node
    monitor_lines: list[str] = field(default_factory=list)  # both as text
    # Those that did not end the job, by name: how often, and when last, seconds since the epoch.
    signals: dict[str, tuple[int, float]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # addresses that the training reported
    command: list[str] = field(default_factory=list)  # as rank 0 received it; empty if not recorded
    bindings: list[BindingRecord] = field(default_factory=list)  # of the ranks, as recorded
    bound: BindingReport = field(
        default_factory=BindingReport
    )  # the same with what the nodes verified
    timeline: Timeline | None = None  # its events; None before the first

    def to_json(self) -> dict[str, object]:
        """Return the summary for programs, without the binding of each rank and the events."""
        value = asdict(replace(self, bindings=[], bound=BindingReport(), timeline=None))
        del value["bindings"], value["bound"], value["timeline"]
        return value


def summarise(state: State) -> Summary:
    """Return the summary of a run's last attempt; empty if nothing was recorded.

    Raises:
        RecordError: its records may not be read, or are damaged.
    """
    attempt = state.run.newest()
    if attempt is None:
        return Summary()
    with naming_damage(state):
        return _summary(state, attempt)


def _summary(state: State, attempt: Attempt) -> Summary:
    timeline = Timeline(attempt.milestones())
    ready = sorted(timeline.ready, key=lambda event: event.time)
    staged = [numbers(event.data) for event in ready]
    result = dict(timeline.result.data) if timeline.result else {}
    result.pop("final", None)
    last_step = dict(timeline.steps[0][-1].data) if 0 in timeline.steps else {}
    training = timeline.grown()
    rate = _rate(timeline, training)
    # The program's own figure wins. If it is null, the program measured no rate, and counters over
    # the same time would only pretend to know one.
    if "samples_per_second" in result:
        rate = numbers(result).get("samples_per_second") or None
    bindings = attempt.bindings()
    ranks = [numbers(record) for record in bindings]
    bound = binding_of(state, bindings)
    script_ended = None if attempt.ended is None else float(attempt.ended["time"])
    # The scheduler's end may be rounded to seconds, and the script's own end comes before the
    # scheduler's clean-up. The later of the two is the end of the job.
    ends = [end for end in (state.ended, script_ended) if end is not None]
    monitored = monitored_nodes(attempt)
    collected = attempt.markers("collected")
    told = {row["node"] for node in collected for row in node["entries"]}
    # A node that was to collect results and recorded nothing has lost them. Only silence after the
    # end proves it: before, the node may still be copying.
    owing = [event.node for event in ready if event.data.get("collect")]
    silent = [node for node in owing if state.over and node not in told]
    sources = [one.source for one in state.submission.requested_job().collect] if owing else ()
    return Summary(
        attempt=attempt.number,
        phases=phases(
            timeline,
            queued=timeline.first.get("queued"),
            bound=[rank["time"] for rank in ranks if rank.get("time")],
            left=script_ended,
            ended=max(ends, default=None),
        ),
        staged_bytes=int(sum(node.get("bytes", 0.0) for node in staged)),
        staged_files=int(sum(node.get("files", 0.0) for node in staged)),
        staging_seconds=max((node.get("seconds", 0.0) for node in staged), default=0.0),
        stages=staged_entries(ready),
        collected=[row for node in collected for row in node["entries"]],
        collected_lines=collected_lines(collected, sources, silent),
        nodes=len(ready),
        ranks=len(bindings),
        world_size=int(max((rank.get("world_size", 0.0) for rank in ranks), default=0.0)),
        result=result,
        last_step=last_step,
        training=training,
        data_wait_ratio=_data_wait(training),
        samples_per_second=rate,
        binding=bound.line,
        binding_failed=bound.fatal,
        monitor=aggregate_nodes(monitored),
        monitored=monitored,
        monitor_lines=monitor_lines(
            monitored, ready=[event.node for event in ready], ended=script_ended
        ),
        signals=timeline.signals,
        links=timeline.links,
        command=[*map(str, bindings[0].get("command", ()))] if bindings else [],
        bindings=bindings,
        bound=bound,
        timeline=timeline,
    )


def binding_of(state: State, records: Sequence[BindingRecord] | None = None) -> BindingReport:
    """Return the binding of the last attempt's ranks.

    Args:
        state: of the run.
        records: of the ranks' binding, if they were read already.

    Raises:
        RecordError: its records may not be read.
    """
    attempt = state.run.newest()
    if attempt is None:
        return BindingReport()
    try:
        asked = state.submission.requested_job().binding
    except HpmlError:
        asked = None
    return read_binding(attempt, asked, records)


def _data_wait(training: Sequence[Mapping[str, float]]) -> float | None:
    shares = [
        min(1.0, rank["data_wait_seconds"] / rank["step_seconds"])
        for rank in training
        if rank.get("step_seconds") and "data_wait_seconds" in rank
    ]
    return fmean(shares) if shares else None


def _rate(timeline: Timeline, training: Sequence[Mapping[str, float]]) -> float | None:
    """Return samples/s of all ranks between their first counters and their last."""
    began = min((counters[0].time for counters in timeline.steps.values()), default=0.0)
    took = max((counters[-1].time for counters in timeline.steps.values()), default=0.0) - began
    samples = sum(rank.get("samples", 0.0) for rank in training)
    return samples / took if samples and took > 0 else None
