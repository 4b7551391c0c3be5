"""Will a job fit into memory? Advice for `hpml advise`, and warnings for `hpml check`.

`hpml check` never starts the user's program: it reads the record of its last run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check.request import CheckFinding, memory_field, warning
from hpml_orchestrator.diagnosis import memory
from hpml_orchestrator.diagnosis.memory import DeviceNeed, HostNeed, Linear, TrainingOption
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.records.units import MIB, parse_gpus
from hpml_orchestrator.runs.reporting.monitor import aggregate_nodes, monitored_nodes

if TYPE_CHECKING:
    from hpml_orchestrator.check.memory_run import Measured
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.site.model import Site


_NEAR_LIMIT = 0.97
"""Share of the memory limit above which the next run may be killed (TraceML: critical at 97 %)."""
_LATER = 1.03
"""Allowance for what follows the first steps: evaluation, the smaller last batch, fragmentation.
Fitted: without it the advice was 3 % below the peak of nine full runs on a CPU on average.
docs/advise.md lists the errors for sizes that were not used in the fit."""
_LAST_RUNS = 20
_PROGRAM = ("name", "script", "module", "command", "args", "workdir")
_SIZE = ("ranks_per_node", "gpus", "ranks_per_gpu", "nodes")


@dataclass(frozen=True)
class Advice:
    """Whether a job fits, and the ways to make it fit.

    Attributes:
        how: `measured` or `formula`.
        batch: batch size of one rank; None if unknown.
        host: need of one node; None if only formulas were used.
        host_bytes: its need at `batch`; None if unknown.
        host_limit: the job's memory on a node; None if the job file requests none.
        device: need of a rank on its device; None for a job without GPUs.
        device_bytes: memory of a rank's device, or its share of a shared one; None if unknown.
        device_why: the source of that number.
        options: the ways to train, simplest first; on the host without GPUs.
        way: the first of them that fits; None if none does, or there is nothing to compare with.
        room: what each way may use: the device's memory without the reserve, or the host's.
        largest_batch: largest batch size of one rank that fits; None if unknown.
        replicas: trainings that fit on one device side by side; 1 for jobs with several ranks.
        counts_activations: whether all sizes include the activations; without them the advice may
            be that a job does not fit, but never that it fits.
    """

    how: str
    batch: int | None
    host: HostNeed | None = None
    host_bytes: float | None = None
    host_limit: float | None = None
    device: DeviceNeed | None = None
    device_bytes: float | None = None
    device_why: str = ""
    options: Sequence[TrainingOption] = ()
    way: TrainingOption | None = None
    room: float | None = None
    largest_batch: int | None = None
    replicas: int = 1
    notes: Sequence[str] = field(default=())
    counts_activations: bool = True

    @property
    def host_fits(self) -> bool | None:
        """Whether a node's memory suffices; None if unknown."""
        if self.host_bytes is None or self.host_limit is None:
            return None
        return self._if_known(self.host_bytes <= self.host_limit)

    @property
    def device_fits(self) -> bool | None:
        """Whether the job fits its devices as it is; None if unknown, or if it has no devices."""
        if self.device is None or self.room is None or not self.options:
            return None
        return self._if_known(self.way is self.options[0])

    def _if_known(self, fits: bool) -> bool | None:
        return None if fits and not self.counts_activations else fits

    @property
    def fits(self) -> bool | None:
        """Whether the job fits as it is; None if unknown."""
        known = [one for one in (self.host_fits, self.device_fits) if one is not None]
        return all(known) if known else None

    def to_json(self) -> dict[str, object]:
        """Return the advice for programs; sizes are bytes."""
        return {
            **asdict(self),
            "fits": self.fits,
            "host_fits": self.host_fits,
            "device_fits": self.device_fits,
        }


def needs_of(measured: Measured, job: Job) -> tuple[HostNeed, DeviceNeed]:
    """Return what a job needs on each node and device, based on short runs of one rank.

    If a job with GPUs was measured without one, its model and activations are counted for the
    device. Its processes need what they had before the first step, the CUDA libraries, and pinned
    buffers.
    """
    figures, last = measured.figures, measured.last
    states = {name: float(last.get(name, 0)) for name in ("weights", "gradients", "optimizer")}
    whole = sum(states.values())
    activations = memory.line_through(
        {b: float(f.get("activations", 0)) for b, f in figures.items()}
    )
    on_gpu = "cuda_bytes" in last
    peaks = {
        b: float(f["cuda_bytes"]) - float(f.get("activations", 0)) - whole
        if on_gpu
        else float(f["peak_bytes"])
        - float(f.get("before_bytes", 0))
        - float(f.get("activations", 0))
        - states["gradients"]
        - states["optimizer"]
        for b, f in figures.items()
    }
    other = memory.line_through({b: max(0.0, peak) for b, peak in peaks.items()})
    device = DeviceNeed(
        **states,
        activations=activations,
        other=other,
        layers=int(last.get("layers", 1)),
        buckets=0.0 if last.get("ddp") else states["gradients"],
    )
    shared = max(float(f.get("file_bytes", 0)) for f in figures.values())
    process = memory.line_through(
        {b: _LATER * f["peak_bytes"] - float(f.get("file_bytes", 0)) for b, f in figures.items()}
    )
    workers = memory.line_through(measured.workers)
    pinned, cuda = Linear(0.0), 0.0
    if job.resources.gpu_count and not on_gpu:
        before = float(last.get("before_bytes", 0)) - float(last.get("file_bytes", 0))
        process, cuda = Linear(max(0.0, before - states["weights"])), float(memory.CUDA_HOST_BYTES)
        pinned = memory.line_through(
            {
                b: float(f.get("batch_bytes", 0)) * float(f.get("ahead", 1)) * bool(f.get("pins"))
                for b, f in figures.items()
            }
        )
    host = HostNeed(job.resources.ranks, process, workers, shared, pinned, cuda)
    return host, device


def extension_notes(
    measured: Measured, host: HostNeed, device: DeviceNeed, batch: int | None
) -> Iterator[str]:
    """Yield a note if the batch exceeds those measured, and their memory did not yet grow.

    At small batch sizes the optimizer's step may need more memory than the activations; a line
    through them does not hold for batch sizes at which the activations need more.
    """
    largest, each = max(measured.figures), device.activations.per_sample or 0.0
    if batch is not None and batch > largest and (host.process.per_sample or 0.0) < each:
        least = human_bytes((batch - largest) * each)
        yield (
            f"up to batch {largest} memory grew less than the activations: a rank may need "
            f"{least} more than listed at batch {batch}, or a multiple of that"
        )


def advise(
    job: Job,
    *,
    how: str,
    batch: int | None,
    host: HostNeed | None,
    device: DeviceNeed,
    device_memory: tuple[float, str] | None = None,
    host_limit: float | None = None,
    notes: Sequence[str] = (),
) -> Advice:
    """Return the advice for a job with known needs.

    Args:
        job: the complete job.
        how: `measured` or `formula`.
        batch: batch size of one rank.
        host: need of a node.
        device: need of one rank.
        device_memory: bytes of one GPU, and the source of that number.
        host_limit: memory of a node that the job can use if it requests none itself, bytes.
        notes: to include in the advice.
    """
    resources = job.resources
    limit = float(resources.node_memory * MIB) or host_limit
    needed = None if host is None else host.at(batch)
    ranks = resources.ranks * resources.nodes
    options = memory.ways(device, batch, gpus=ranks, gpus_per_node=resources.ranks)
    counted = how != "formula" or device.activations.per_sample is not None
    if resources.gpu_count:
        size, why = device_memory or (None, "")
        size = None if size is None else size / resources.ranks_per_gpu
        room = None if size is None else (1 - memory.RESERVE) * size
        growing = (device.activations, device.other)
        fixed = device.states + (device.buckets if ranks > 1 else 0.0)
        most = None if room is None else memory.largest_batch(room, *growing, fixed=fixed)
        way = memory.first_fit(options, room)
        alone = ranks == 1 and way is not None and counted
        replicas = int(room // options[0].need) if room and alone else 1
        return Advice(
            how, batch, host, needed, limit, device, size, why, options, way, room, most,
            max(1, replicas), notes, counted,
        )  # fmt: skip
    if host is None:
        share = None if limit is None else limit / resources.ranks
        way = memory.first_fit(options, share)
        needed = options[0].need * resources.ranks
        return Advice(
            how, batch, None, needed, limit, options=options, way=way, room=share, notes=notes,
            counts_activations=counted,
        )  # fmt: skip
    # On the host, a rank's share of the memory also holds the interpreter, data and workers.
    parts = device.states + device.activations.at(batch) + device.other.at(batch)
    beside = max(0.0, host.per_rank(batch) - parts)
    options = [TrainingOption(way.name, way.need + beside, way.what) for way in options]
    share = None if limit is None else (limit - host.shared) / resources.ranks
    way = memory.first_fit(options, share)
    most = None if share is None else memory.largest_batch(share, host.process, host.workers)
    return Advice(
        how, batch, host, needed, limit, None, None, "", options, way, share, most, notes=notes
    )


# --- for hpml check


def check_memory(job: Job, store: Store) -> list[CheckFinding]:
    """Return a warning if the last run of the same program and arguments needed more memory."""
    with contextlib.suppress(HpmlError, OSError, ValueError, KeyError, TypeError, AttributeError):
        message = _last_run(job, store) if job.resources.node_memory else ""
        if message:
            hint = "ask for more, or see `hpml advise`"
            shown = human_bytes(job.resources.node_memory * MIB)
            field = f"resources.{memory_field(job)}"
            return [warning("memory.last_run", field, shown, message, None, hint)]
    return []


def _last_run(job: Job, store: Store) -> str:
    """Return what is wrong with `resources.memory`, based on the program's newest run."""
    now = job.memory_mib * MIB
    names = (one for one in store.submissions() if one.sid.startswith(f"{job.name}-"))
    for submission, _ in zip(names, range(_LAST_RUNS), strict=False):
        before = submission.requested_job()
        runs = submission.runs()
        attempt = store.run(runs[0][1]).newest() if len(runs) == 1 else None
        if (
            attempt is None
            or attempt.ended is None
            or any(getattr(before, one) != getattr(job, one) for one in _PROGRAM)
        ):
            continue
        asked = before.resources
        if any(getattr(asked, one) != getattr(job.resources, one) for one in _SIZE):
            return ""
        used = aggregate_nodes(monitored_nodes(attempt))
        peak = used.figures.get("memory_peak_bytes", 0.0) if used else 0.0
        # More memory than before may be enough, so the old failure is no reason to warn.
        enough = job.resources.node_memory > asked.node_memory
        if attempt.ended.get("state") == "OUT_OF_MEMORY" and not enough:
            return f"its last run, {submission.sid}, ran out of memory with no less than this"
        if peak >= _NEAR_LIMIT * now:
            share = f"{human_bytes(peak)}, {100 * peak / now:.0f} % of this"
            return f"its last run, {submission.sid}, used {share}"
        return ""
    return ""


def gpu_memory(job: Job, site: Site | None = None) -> tuple[float, str] | None:
    """Return a GPU's memory and its source: the job's GPU type or constraint, or the site."""
    resources = job.resources
    words = [resources.constraint or "", *(kind for kind, _ in resources.gpus.kinds)]
    for kind in site.node_types_of(resources.partition) if site is not None else ():
        words += [name for name, _ in parse_gpus(kind.gpus).kinds]
    return next(filter(None, map(memory.device_bytes_of, words)), None)
