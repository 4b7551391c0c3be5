"""Will a job fit into memory? Advice for `hpml advise`, and warnings for `hpml check`.

`hpml check` never starts the user's program: it reads stored advice and the record of the last run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, warning
from hpml_orchestrator.diagnosis import memory
from hpml_orchestrator.diagnosis.memory import DeviceNeed, HostNeed, Linear, TrainingOption
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.runs.reporting.monitor import aggregate_nodes, monitored_nodes
from hpml_orchestrator.spec.values import MIB, parse_gpus, parse_size_mib

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.check.memory_run import Measured
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.spec.job import Job
    from hpml_orchestrator.spec.site import Site

_NEAR_LIMIT = 0.97
"""Share of the memory limit from which the next run may be killed (TraceML: critical from 97 %)."""
_LATER = 1.03
"""For what comes after the first steps: evaluation, the last and smaller batch, fragmentation.
Fitted: without it the advice was 3 % below the peak of nine full runs on a CPU on average. The
errors of sizes that it was not fitted to are in docs/advise.md."""
_LAST_RUNS = 20
_PROGRAM = ("name", "script", "module", "command", "args", "workdir")


@dataclass(frozen=True)
class Advice:
    """Whether a job fits, and the ways to make it fit.

    Attributes:
        how: `measured` or `formula`.
        batch: of one rank; None if it is not known.
        host: need of one node; None if only formulas were used.
        host_bytes: its need at `batch`; None if it is not known.
        host_limit: memory that the job has on a node; None if the job file does not ask for any.
        device: need of a rank on its device; None for a job without GPUs.
        device_bytes: memory of a rank's device, or its share of a shared one; None if unknown.
        device_why: the source of that number.
        options: the ways to train, from the simplest on; on the host without GPUs.
        way: the first of them that fits; None if none does, or nothing is known to compare with.
        room: what each way may use: that of the device without the reserve, or that of the host.
        largest_batch: of one rank, that fits; None if it is not known.
        replicas: trainings that fit on one device side by side; 1 for jobs of several ranks.
        counts_activations: whether all sizes include the activations; without them it may be found
            that a job does not fit, but not that it fits.
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
        """Whether a node's memory suffices; None if that is not known."""
        if self.host_bytes is None or self.host_limit is None:
            return None
        return self._if_known(self.host_bytes <= self.host_limit)

    @property
    def device_fits(self) -> bool | None:
        """Whether the job fits its devices as it is; None if that is not known, or it has none."""
        if self.device is None or self.room is None or not self.options:
            return None
        return self._if_known(self.way is self.options[0])

    def _if_known(self, fits: bool) -> bool | None:
        return None if fits and not self.counts_activations else fits

    @property
    def fits(self) -> bool | None:
        """Whether the job fits as it is; None if that is not known."""
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
    """Return what a job needs on each node and device, from short runs of one rank.

    A job with GPUs that was measured without one keeps model and activations on the device: its
    processes need what they had before the first step, the CUDA libraries, and pinned buffers.
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
    """Yield a note if the batch is larger than those that ran and their memory did not yet grow.

    At small batches the optimizer's step may need more memory than the activations; a line through
    them does not hold for batches at which the activations need more.
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
    """Return the advice for a job whose needs are known.

    Args:
        job: the complete job.
        how: `measured` or `formula`.
        batch: of one rank.
        host: need of a node.
        device: need of one rank.
        device_memory: bytes of one GPU, and the source of that number.
        host_limit: bytes of a node that the job can have, if it asks for no memory itself.
        notes: to go with it.
    """
    resources = job.resources
    limit = float(resources.memory * MIB) if resources.memory else host_limit
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
    # On the host a rank's share of the memory also holds the interpreter, data and workers.
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


def _key(job: Job) -> str:
    dumped = job.model_dump(mode="json", include={*_PROGRAM[1:], "environment"})
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()[:24]


def _path(store: Store, job: Job) -> Path:
    return store.root / "advice" / f"{_key(job)}.json"


def _modified(job: Job) -> float:
    try:
        return os.stat(job.script).st_mtime if job.script else 0.0
    except OSError:
        return 0.0


def save_advice(store: Store, job: Job, advice: Advice) -> None:
    """Store measured advice for later checks; if the records cannot be written, do nothing."""
    if advice.how != "measured" or advice.host is None:
        return
    record = {
        "schema_version": 1,
        "created": time.time(),
        "script_modified": _modified(job),
        "per_rank_bytes": advice.host.per_rank(advice.batch),
        "shared_bytes": advice.host.shared,
        "gpus": job.resources.gpus,
        "ranks": job.resources.ranks * job.resources.nodes,
        "device_fits": advice.device_fits,
        "device_need_bytes": advice.options[0].need if advice.device is not None else None,
        "device_room_bytes": advice.room,
    }
    with contextlib.suppress(OSError, HpmlError):
        path = _path(store, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)


def check_memory(job: Job, store: Store) -> list[CheckFinding]:
    """Return a warning if a run of the same program with the same arguments needs more memory."""
    with contextlib.suppress(HpmlError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return [*_stored(job, store)] or [*_last_run(job, store)]
    return []


def _stored(job: Job, store: Store) -> Iterator[CheckFinding]:
    """Yield a warning if the job in its present form does not fit, by stored advice."""
    path = _path(store, job)
    record = read_json(path) if path.is_file() else None
    # An edited program may need more or less: its old measurement proves nothing.
    if record is None or record["script_modified"] != _modified(job):
        return
    resources = job.resources
    day = time.strftime("%Y-%m-%d", time.localtime(record["created"]))
    same_gpus = record["gpus"] == resources.gpus
    per_rank = (
        record["per_rank_bytes"] if bool(resources.gpu_count) == (record["gpus"] != "0") else 0
    )
    need = resources.ranks * per_rank + record["shared_bytes"] * bool(per_rank)
    if resources.memory and need > resources.memory * MIB:
        message = f"one node needs {human_bytes(need)}, as `hpml advise` measured on {day}"
        mebibytes = -(-int(need * 1.1) // MIB)
        hint = f"resources.memory: {mebibytes}M, or see `hpml advise`"
        shown = human_bytes(resources.memory * MIB)
        yield warning("memory.advice", "resources.memory", shown, message, mebibytes, hint)
    same = same_gpus and record["ranks"] == resources.ranks * resources.nodes
    if same and record["device_fits"] is False:
        need, room = record["device_need_bytes"], record["device_room_bytes"]
        message = f"each GPU needs {human_bytes(need)} and has room for {human_bytes(room)}, as "
        message += f"`hpml advise` found on {day}"
        hint = "`hpml advise` lists the ways to make it fit"
        yield warning("memory.device", "resources.gpus", resources.gpus, message, None, hint)


def _last_run(job: Job, store: Store) -> Iterator[CheckFinding]:
    """Yield a warning if the newest run of the same program was out of memory, or nearly."""
    if not job.resources.memory:
        return
    dumped = job.model_dump(mode="json")
    names = (one for one in store.submissions() if one.sid.startswith(f"{job.name}-"))
    for submission, _ in zip(names, range(_LAST_RUNS), strict=False):
        record = submission.record()["job"]
        runs = submission.runs()
        attempt = store.run(runs[0][1]).newest() if len(runs) == 1 else None
        ended = attempt.ended if attempt is not None else None
        if (
            attempt is None
            or ended is None
            or any({**record}[one] != dumped[one] for one in _PROGRAM)
        ):
            continue
        before = record["resources"]
        ranks = before["ranks_per_node"], before["gpus"], before["ranks_per_gpu"], before["nodes"]
        now = job.resources
        if (now.ranks_per_node, now.gpus, now.ranks_per_gpu, now.nodes) != ranks:
            return
        asked = parse_size_mib(before["memory"] or 0)
        # More memory than before may be enough, so the old end is no reason to warn.
        if not asked or now.memory is None or now.memory > asked:
            return
        used = aggregate_nodes(monitored_nodes(attempt))
        peak = used.figures.get("memory_peak_bytes", 0.0) if used else 0.0
        limit = used.figures.get("memory_limit_bytes", 0.0) if used else 0.0
        if ended.get("state") == "OUT_OF_MEMORY":
            message = f"its last run, {submission.sid}, ran out of memory with no less than this"
        elif limit and peak >= _NEAR_LIMIT * limit:
            message = (
                f"its last run, {submission.sid}, used {100 * peak / limit:.0f} % of its memory"
            )
        else:
            return
        hint = "ask for more, or see `hpml advise`"
        shown = human_bytes(now.memory * MIB)
        yield warning("memory.last_run", "resources.memory", shown, message, None, hint)
        return


def gpu_memory(job: Job, site: Site | None = None) -> tuple[float, str] | None:
    """Return a GPU's memory and why, by the job's GPU type and constraint, or the site's nodes."""
    resources = job.resources
    words = [resources.constraint or "", *(kind for kind, _ in parse_gpus(resources.gpus).kinds)]
    for kind in site.node_types_of(resources.partition) if site is not None else ():
        words += [name for name, _ in parse_gpus(kind.gpus).kinds]
    return next(filter(None, map(memory.device_bytes_of, words)), None)
