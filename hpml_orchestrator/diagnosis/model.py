"""Facts about a run, and the findings that follow from them. Unknown values are None, never 0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.profile import TraceProfile
    from hpml_orchestrator.records.job import Job

Level = Literal["critical", "warning", "note", "unknown"]


@dataclass(frozen=True)
class RankFacts:
    """Counters of one rank, since its first step after the warm-up; seconds are sums."""

    rank: int
    node: str = ""
    seconds: float | None = None  # from its first counters to its last, whatever it did
    samples: float | None = None
    steps: float | None = None
    step_seconds: float | None = None  # whole steps, without saving and evaluation
    data_wait_seconds: float | None = None
    transfer_seconds: float | None = None  # host to device
    wait_seconds: float | None = None  # for slower ranks, before collectives
    comm_seconds: float | None = None  # in collectives, without that waiting
    cpu_wait_seconds: float | None = None  # ready to run, but its CPUs were taken
    cpu_seconds: float | None = None  # CPU time of its process and of its loaders
    helper_cpu_seconds: float | None = None  # the same without the thread that trains
    loader_cpu_seconds: float | None = None  # of its loaders alone
    python_cpu_seconds: float | None = None  # of the other threads that Python started
    save_seconds: float | None = None
    saves: int | None = None  # checkpoints that it reported
    evaluation_seconds: float | None = None
    other_seconds: float | None = None  # in `timed` blocks with names of the script's own
    measured_steps: float | None = None  # in which ranks compared their waiting; None: in all
    slowest_steps: float | None = None  # those of them in which it waited least
    cpus: Sequence[int] | None = None  # that it may use
    bound_as_planned: bool | None = None
    gpu: str = ""  # UUID, or PCI address if that is not known
    binding_faults: Sequence[str] = ()  # sentences


@dataclass(frozen=True)
class GpuFacts:
    """One GPU; ratios are means over the monitored time, from 0 to 1."""

    uuid: str
    name: str = ""
    seconds: float | None = None  # monitored
    has_process: bool | None = None  # whether the job used it at all
    utilization_ratio: float | None = None  # share of the time in which a kernel was resident
    sm_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    memory_peak_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)  # by reason
    xid_errors: Mapping[str, float] = field(default_factory=dict)  # how many, by XID


@dataclass(frozen=True)
class NodeFacts:
    """What the job used on one node."""

    node: str
    seconds: float | None = None  # monitored
    cpus: float | None = None  # that the job may use
    mean_cpus: float | None = None  # busy
    memory_peak_bytes: float | None = None  # without the page cache
    memory_limit_bytes: float | None = None
    oom_events: float | None = None
    read_bytes: float | None = None  # from storage, below the page cache
    written_bytes: float | None = None
    syscall_read_bytes: float | None = None
    gpus_allocated: float | None = None
    gpus: Sequence[GpuFacts] = ()
    gpus_used: float | None = None  # with a process of the job


@dataclass(frozen=True)
class StageFacts:
    """One entry of `stage` on the slowest node."""

    name: str
    source: str
    target: str
    seconds: float | None = None
    bytes: float | None = None
    files: float | None = None
    reused: bool = False  # whether it was there already


@dataclass(frozen=True)
class DataArgument:
    """The argument of the program that names the data it reads."""

    field: str  # its place in the job, such as `args.2`
    word: str  # the argument with the path of a staged copy in it: `--data={stage.data}`
    entry: Mapping[str, object]  # the entry of `stage` for the data, without a target
    size_bytes: float | None = None  # of the data; None: not known


@dataclass(frozen=True)
class AllReduce:
    """Latency and bandwidth of a ring: T = 2(P-1) alpha + 2(P-1)/P n beta on P ranks, n bytes each.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations
    in MPICH"; Hockney 1994 for alpha and beta.
    """

    alpha: float  # seconds per message
    beta: float  # seconds per byte
    residual: float  # typical relative distance of a measurement from the model; 0.03 is 3 %
    ranks: int = 0  # that measured it

    @property
    def bandwidth(self) -> float:
        """The bus bandwidth of very large messages, in bytes/s."""
        return 1 / self.beta if self.beta else math.inf


@dataclass(frozen=True)
class Peaks:
    """Peak rates of the node type, in FLOP/s and bytes/s, and where they come from."""

    flops: Mapping[str, float] = field(default_factory=dict)  # by dtype: `bfloat16`, `float32`
    memory_bandwidth: float | None = None  # of the GPU, or of the host without GPUs
    host_to_device: float | None = None
    local_disk_read: float | None = None
    shared_read: float | None = None  # the shared file system, one node
    link_bandwidth: float | None = None  # all-reduce between nodes, bus bandwidth
    # Inside one node (`node`) and between several (`nodes`): one of each number of ranks
    allreduce: Mapping[str, Sequence[AllReduce]] = field(default_factory=dict)
    origin: str = ""  # "measured on 2026-11-20 on node1" or "specification of H100 SXM"


@dataclass(frozen=True)
class Facts:
    """Everything known about one attempt of a run."""

    run: str  # its label
    state: str  # of the scheduler, such as COMPLETED
    over: bool
    job: Job  # as submitted
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by name, in order
    elapsed_seconds: float | None = None
    limit_seconds: float | None = None
    node_count: int = 0
    gpu_count: int = 0  # allocated
    core_count: int = 0  # allocated
    world_size: int = 0
    channel: bool = False  # whether the training reported anything
    monitored: bool = False
    ranks: Sequence[RankFacts] = ()
    nodes: Sequence[NodeFacts] = ()
    stages: Sequence[StageFacts] = ()
    data_files: float | None = None  # files and bytes of the data, if they were listed
    data_bytes: float | None = None
    achieved_flops: float | None = None  # FLOP/s of all ranks, if the training reports them
    gradient_bytes: float | None = None  # that a rank has averaged in each step
    gradient_buckets: int | None = None  # in as many parts
    accuracy: Mapping[str, float] = field(default_factory=dict)  # final figures, by name
    # NAME of the result and NAME_formula: what was measured and what a formula says
    formulas: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    peaks: Peaks | None = None
    values: Mapping[str, object] = field(default_factory=dict)  # of a sweep's point, by name
    code: str = ""  # commit, and whether files were changed
    reason: str = ""  # why it failed, or waits
    silence: str = ""  # for how long it has reported no step, if that is too long
    on_slurm: bool = False
    attempts: int = 1  # of the run; the facts are of the last
    node_cpus: int | None = None  # of the smallest node: CPUs that a job can have
    node_memory_bytes: float | None = None  # the same of memory
    memory_bytes: float | None = None  # that the job asked for per node, without staged data
    data: DataArgument | None = None  # if an argument names data that can be staged
    profile: TraceProfile | None = None  # of traces that the training left in the run's directory

    @property
    def failed(self) -> bool:
        """Whether the run ended before its program was done."""
        return self.over and self.state not in ("COMPLETED", "TIMEOUT", "UNKNOWN")


@dataclass(frozen=True)
class Change:
    """One change to the job file, or advice if hpml cannot make it."""

    text: str  # imperative, such as "stage the data to /dev/shm"
    # Dotted, of the job file, such as `stage`; empty: it is outside of the job file
    field: str = ""
    value: object = (
        None  # the new value of that field as YAML would have it; None removes the field
    )
    touches_accuracy: bool = False  # whether the trained model can become another one
    # Further fields that must change with it, such as the argument that has the path of data
    # which `stage` moves; dotted, with their values
    also: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A reason why the run is slow or wasteful, or a question that the data do not answer."""

    kind: str  # stable name for programs, such as `waits-for-data`; see `thresholds.py`
    level: Level  # `unknown` if data are missing; `note` if nothing is wrong but could be better
    verdict: str  # one sentence without a final full stop
    evidence: Sequence[str] = ()  # the figures, one per line, with the threshold and its source
    changes: Sequence[Change] = ()  # what to do, the best first
    # The largest share of the run's time that the first change can save, from 0 to 1; None: it is
    # not known
    gain: float | None = None
    # GPU-hours of this run (core-hours without GPUs) that `gain` is, or that the fault costs; for
    # over-asked resources the hours that they would have been free
    gain_hours: float | None = None
    needs: str = ""  # for `unknown`: what would provide the data, such as `monitor: true`
    gain_if: str = ""  # what this upper bound rests on, such as "if no step waited for data"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one run: the ones worth most first, then the unknown."""

    facts: Facts
    findings: Sequence[Finding] = ()  # of level critical and warning, see `diagnose`
    unknown: Sequence[Finding] = ()
    healthy: Sequence[str] = ()  # what is as it should be, each with its figure
    notes: Sequence[Finding] = ()  # of level note: what could be used better
    time: str = ""  # where the run's time went, in one line
    judged: Sequence[str] = ()  # kinds that were judged, with or without a finding

    @property
    def failure(self) -> str:
        """Why the run failed, if the headline has a finding instead; empty otherwise."""
        return self.facts.reason if self.facts.failed and self.findings else ""

    @property
    def headline(self) -> str:
        """One line: the first finding, that nothing holds the run back, or what is known of it."""
        if self.facts.silence:
            return self.facts.silence
        if self.findings:
            return self.findings[0].verdict
        if self.facts.failed:
            why = self.facts.reason or f"`hpml logs {self.facts.run}` prints its output"
            return f"it ended {self.facts.state}: {why}"
        if self.is_clear:
            return "nothing found that holds it back"
        for one in self.unknown:
            if one.kind == "unexplained-rest":
                return f"unknown: {one.verdict}"
        seen = [one.verdict for one in self.notes if one.kind == "seen-by-monitor"]
        monitor = f"; as far as the monitor shows, {seen[0].partition(': ')[0]}" if seen else ""
        return f"not enough data to say what holds it back{monitor}"

    @property
    def is_clear(self) -> bool:
        """Whether enough is known to say that nothing holds the run back."""
        unknown = {one.kind for one in self.unknown}
        is_known = unknown.isdisjoint({"waits-for-data", "unexplained-rest"})
        return not self.findings and bool(self.healthy) and is_known
