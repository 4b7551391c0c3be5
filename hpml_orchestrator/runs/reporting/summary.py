"""A run in figures: phases, staging, throughput and accuracy, from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.placement.verify import NodeProof, RankProof, proof_json, proof_of_json
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.job import Binding
from hpml_orchestrator.records.schema import beside
from hpml_orchestrator.records.texts import first_few, human_bytes
from hpml_orchestrator.runs.reporting.monitor import (
    Monitored,
    aggregate_nodes,
    monitor_lines,
    monitored_nodes,
    numbers,
)
from hpml_orchestrator.runs.reporting.timeline import Phase, Timeline, phases
from hpml_orchestrator.runs.state import naming_damage
from hpml_orchestrator.topology.model import parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.feed import Event
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import BindingRecord, CollectedEntry, Marker, StageRecord
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.topology.model import Topology

# Where the ranks of an attempt ran, and whether as planned, from its own records.

_SUFFIX = ".proof.json"
_SHOWN_NODES = 3


@dataclass(frozen=True)
class RankLocation:
    """Where one rank ran."""

    rank: int
    local_rank: int
    node: str  # Slurm's name of it
    gpu: str | None = None  # PCI address (or name); None without one, or if unknown
    cpus: str = ""  # CPUs that it may run on, in the kernel's list format; empty where not known
    cores: int | None = None  # number of physical cores of those
    numa: tuple[int, ...] = ()  # NUMA domains that those are in
    distance: int | None = None  # largest NUMA distance from its GPU to one of its CPUs
    nic: str = ""  # its network card; empty without one
    threads: int | None = None  # OMP_NUM_THREADS; None where not set
    right: bool | None = None  # whether it is bound as planned; None if not verified
    wrong: tuple[str, ...] = ()  # what is wrong, one sentence each


@dataclass(frozen=True)
class Unreadable:
    """A node whose proof cannot be read, and why."""

    node: str
    why: str


@dataclass(frozen=True)
class BindingReport:
    """The binding of an attempt, as far as it was recorded."""

    line: str = ""  # a summary in one line; empty if nothing was recorded
    places: tuple[RankLocation, ...] = ()  # by rank
    proofs: tuple[NodeProof, ...] = ()  # of the nodes, by name
    unreadable: tuple[Unreadable, ...] = ()
    fatal: bool = False  # whether the job failed because of ranks in `places` that are wrong

    def to_json(self) -> dict[str, object]:
        """Return ranks, proofs and unreadable proofs for programs."""
        return {
            "ranks": [asdict(place) for place in self.places],
            "proofs": [proof_json(proof) for proof in self.proofs],
            "unreadable_proofs": [asdict(node) for node in self.unreadable],
        }


def read_binding(
    attempt: Attempt, asked: Binding | None = None, records: Sequence[BindingRecord] | None = None
) -> BindingReport:
    """Return the binding of an attempt; damaged records are reported, never raised.

    Args:
        attempt: which one.
        asked: what the job asked for, if that is known.
        records: of its ranks' binding, if they were read already.
    """
    proofs, unreadable = _read_proofs(attempt.directory / "binding")
    records = attempt.bindings() if records is None else records
    places = {
        (proof.node, rank.local_rank): _verified(proof, rank)
        for proof in proofs
        for rank in proof.ranks
    }
    verified = len(places)
    for record in records:
        place = _recorded(record)
        # setdefault: the agent's verification of a rank counts more than what the rank wrote about
        # itself.
        places.setdefault((place.node, place.local_rank), place)
    sizes = [record["world_size"] for record in records if record.get("world_size")]
    # A node that died left no proof and no record. Its ranks are missing from any single source,
    # but not from the world size that the other ranks know.
    total = max([len(places), sum(proof.expected for proof in proofs), *sizes])
    ended = attempt.ended
    failed = ended is not None and ended.get("reason") == "binding"
    # Before the ranks start there is nothing to record, so silence means nothing.
    planned = next((attempt.directory / "plan").glob("*.txt"), None) is not None
    had_ranks = ended is not None and (planned or failed or ended.get("exit_code") == 0)
    line = ""
    if proofs or unreadable or records or (asked is not None and had_ranks):
        line, bad = _line(proofs, unreadable, asked, total, verified, over=ended is not None)
        if bad and failed:
            line += "; the job failed for it (verify: strict)"
    wrong = not all(proof.right for proof in proofs)
    ordered = sorted(places.values(), key=lambda place: (place.rank, place.node, place.local_rank))
    return BindingReport(
        line, tuple(ordered), tuple(proofs), tuple(unreadable), fatal=wrong and failed
    )


def node_topology(attempt: Attempt, node: str) -> Topology | None:
    """Return the topology that a node's agent recorded; None if missing or damaged."""
    from hpml_orchestrator.topology.model import topology_of_json  # noqa: PLC0415 - one command needs it

    try:
        return topology_of_json(read_json(attempt.directory / "nodes" / f"{node}.topology.json"))
    except (HpmlError, ValueError):  # a node's name may hold what no path can
        return None


def _read_proofs(directory: Path) -> tuple[list[NodeProof], list[Unreadable]]:
    proofs: list[NodeProof] = []
    unreadable: list[Unreadable] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            proof = proof_of_json(read_json(path))
            for rank in proof.ranks:
                parse_list(rank.cpus)
        except (HpmlError, AttributeError, TypeError, ValueError) as error:
            why = str(error).replace(f"{path} ", "").replace(str(path), path.name)
            unreadable.append(Unreadable(path.name.removesuffix(_SUFFIX), why))
        else:
            proofs.append(proof)
    return proofs, unreadable


def _verified(proof: NodeProof, rank: RankProof) -> RankLocation:
    """Return the place of a rank that the node's agent verified; `none` judges no place."""
    names = {field.name for field in fields(RankLocation)} - {"node", "right"}
    common = {name: getattr(rank, name) for name in names}
    right = None if proof.policy == "none" else not rank.wrong
    return RankLocation(node=proof.node, right=right, **common)


def _recorded(record: BindingRecord) -> RankLocation:
    local_rank = record.get("local_rank")
    number = record["rank"] if local_rank is None else local_rank
    gpus = (record.get("visible") or "").split(",")
    return RankLocation(
        rank=record["rank"],
        local_rank=number,
        node=record.get("node") or "?",
        gpu=gpus[number % len(gpus)].strip() or None,
        cpus=record.get("cpus") or "",
        nic=record.get("nic") or "",
        threads=record.get("threads"),
    )


def _line(
    proofs: Sequence[NodeProof],
    unreadable: Sequence[Unreadable],
    asked: Binding | None,
    total: int,
    verified: int,
    *,
    over: bool,
) -> tuple[str, bool]:
    """Return in one line whether the ranks are bound as planned, and whether that is in doubt."""
    planned = proofs[0] if proofs else asked or Binding(policy="none")
    policy, verify = planned.policy, planned.verify
    of_all = f"of {counted(total, 'rank')}"
    wrong = sum(bool(rank.wrong) for proof in proofs for rank in proof.ranks)
    # From bad to good: one rank in the wrong place matters more than a proof that is missing, and
    # the line must never read as proven while a rank is in doubt.
    if wrong:
        return f"{policy}, {wrong} {of_all} WRONG", True
    if unreadable:
        names = first_few([node.node for node in unreadable], _SHOWN_NODES)
        return f"not proven: the proof of {names} cannot be read ({unreadable[0].why})", True
    if policy == "none":
        return "none: nothing was bound", False
    if not total:
        return f"not proven: {policy}, no rank left a record", True
    if verify == "off":
        return f"not proven: {policy}, verify is off", True
    if verified < total:
        count = f"{verified} {of_all}" if verified else "no rank"
        return f"not proven: {policy}, {count} verified{'' if over else ' so far'}", True
    own = sum(not rank.live for proof in proofs for rank in proof.ranks)
    by = f" ({own} checked at their start only)" if own else ""
    warnings = len({warning for proof in proofs for warning in proof.warnings})
    warned = f"; {counted(warnings, 'warning')}" if warnings else ""
    return f"{policy}, {total} {of_all} bound as planned{by}{warned}", False


# The entries of `stage` and `collect`: where the data is, and how fast it was copied.

_SHORT_SECONDS = 0.01


@dataclass(frozen=True)
class StagedEntry:
    """One entry of `stage`, on all nodes; figures of time are those of the slowest node."""

    name: str
    path: str = ""  # on the first node
    nodes: int = 0  # number of nodes that had it
    bytes: int = 0  # on all of them together
    files: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0  # 0 where no node copied anything
    methods: tuple[str, ...] = ()  # how it was copied, each once
    reused: int = 0  # number of nodes that had it already
    kept: int = 0  # number of nodes that keep it for later jobs
    evicted: tuple[str, ...] = ()  # sources that were removed to make room for it
    digests: tuple[str, ...] = ()  # of names, sizes and contents, each once


def staged_entries(ready: Sequence[Event]) -> list[StagedEntry]:
    """Return the staged entries in the job file's order, from the events of ready nodes."""
    reports: dict[str, list[StageRecord]] = {}
    for event in ready:
        for report in event.data.get("stages", ()):
            reports.setdefault(report["name"], []).append(report)
    return [_combined(name, of_nodes) for name, of_nodes in reports.items()]


def _combined(name: str, nodes: Sequence[StageRecord]) -> StagedEntry:
    rates = filter(None, (node["bytes_per_second"] for node in nodes))
    evicted = (source for node in nodes for source in node.get("evicted", ()))
    return StagedEntry(
        name=name,
        path=nodes[0]["path"],
        nodes=len(nodes),
        bytes=sum(node["bytes"] for node in nodes),
        files=sum(node["files"] for node in nodes),
        seconds=max(node["seconds"] for node in nodes),
        bytes_per_second=float(min(rates, default=0)),
        methods=tuple(dict.fromkeys(filter(None, (node["method"] for node in nodes)))),
        reused=sum(node["reused"] for node in nodes),
        kept=sum(node["kept"] for node in nodes),
        evicted=tuple(dict.fromkeys(evicted)),
        digests=tuple(dict.fromkeys(node["digest"] for node in nodes if "digest" in node)),
    )


def staged_lines(entries: Sequence[StagedEntry]) -> list[str]:
    """Return a line per entry, and one more if the nodes have different data."""
    lines = []
    for entry in entries:
        files = f"{counted(entry.files, 'file')}, {human_bytes(entry.bytes)}"
        nodes = f" on {entry.nodes} nodes" if entry.nodes > 1 else ""
        text = f"{files} in {entry.path}{nodes}, {_how(entry)}"
        if entry.kept:
            some = "" if entry.kept == entry.nodes else f" on {entry.kept} of {entry.nodes} nodes"
            text += f"; kept{some} for later jobs"
        if entry.evicted:
            text += f"; removed to make room: {', '.join(entry.evicted)}"
        lines.append(f"{entry.name}: {text}")
        # Nodes with and without xxhash use different functions, whose digests cannot be compared.
        functions = [digest.partition(":")[0] for digest in entry.digests]
        if len(set(functions)) < len(functions):
            lines.append(f"{entry.name}: the nodes do NOT have the same data, by their digests")
    return lines


def collected_lines(
    nodes: Sequence[Marker], sources: Sequence[str], silent: Sequence[str]
) -> list[str]:
    """Return lines about the entries of `collect`.

    Args:
        nodes: what each node recorded about them.
        sources: as in the job file.
        silent: nodes that recorded nothing although the job is over.
    """
    lines = []
    for index, source in enumerate(sources):
        rows = [node["entries"][index] for node in nodes]
        whole = [row for row in rows if not row["problem"]]
        there = [row for row in whole if row["path"]]
        if there:
            files = counted(sum(row["files"] for row in there), "file")
            size = human_bytes(sum(row["bytes"] for row in there))
            first = there[0]["path"]
            where = first if len(there) == 1 else f"{_above(first)}/NODE of {len(there)} nodes"
            lines.append(f"{source}: {files}, {size} in {where}")
        elif whole:
            lines.append(f"{source}: nothing there{beside(whole)}")
        for row in rows:
            if row["problem"]:
                some = f"only {counted(row['files'], 'file')} in {row['path']}"
                what = some if row["path"] else "NOT collected"
                lines.append(f"{source} of {row['node']}: {what}: {row['problem']}")
    if silent:
        lines.append(f"NOT collected from {', '.join(silent)}: the node ended before it could")
    return lines


def _above(path: str) -> str:
    return path.rpartition("/")[0].rpartition("/")[0]


def _how(entry: StagedEntry) -> str:
    if entry.reused == entry.nodes:
        return f"there already ({_seconds(entry.seconds)})"
    by = f"by {' and '.join(entry.methods)} " if entry.methods else ""
    rate = f", {human_bytes(entry.bytes_per_second)}/s" if entry.bytes_per_second else ""
    each = " per node" if entry.nodes > 1 and rate else ""
    reused = f", reused on {entry.reused} of {entry.nodes} nodes" if entry.reused else ""
    return f"{by}in {_seconds(entry.seconds)}{rate}{each}{reused}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= _SHORT_SECONDS else f"{seconds * 1e3:.2g} ms"


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
