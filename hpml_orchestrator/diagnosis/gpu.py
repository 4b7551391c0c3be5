"""Findings about how GPUs are used, and about faulty ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    busy_cpus,
    cpus_per_rank,
    exclude,
    find,
    hours,
    is_idle,
    more_cpus,
    nodes_text,
    shares,
)
from hpml_orchestrator.records.texts import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.diagnosis.model import Facts, Finding, GpuFacts

_HARDWARE_XIDS = frozenset(
    ["48", "62", "64", "74", "79", "92", "94", "95", "119", "120", "121", "136", "140", "143"]
)
_HALF = 0.5
_EXPLAINED = 0.10
_LITTLE = 0.6
_PARTS = ("data_wait_seconds", "transfer_seconds", "wait_seconds", "comm_seconds")


def used_gpus(facts: Facts) -> list[GpuFacts]:
    """Return the GPUs that the job worked on."""
    return [gpu for node in facts.nodes for gpu in node.gpus if not is_idle(gpu)]


def _mean(gpus: list[GpuFacts], name: str) -> float | None:
    values = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
    return sum(values) / len(values) if values else None


def _share(facts: Facts, *names: str) -> float:
    means = (shares(facts, name) for name in names)
    return sum(sum(values.values()) / len(values) for values in means if values)


def tensor_cores_idle(facts: Facts) -> Finding | str | None:
    """Return whether the GPUs compute without their tensor cores."""
    gpus = [gpu for gpu in used_gpus(facts) if gpu.tensor_active_ratio is not None]
    tensor, active = _mean(gpus, "tensor_active_ratio"), _mean(gpus, "sm_active_ratio")
    if tensor is None or active is None:
        return None
    if active <= _HALF:
        return None  # something else keeps the SMs idle
    variables = facts.job.environment.variables
    name = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    changes = [
        Change("compute in bf16: `torch.autocast('cuda', torch.bfloat16)`", touches_accuracy=True)
    ]
    for index, word in enumerate(facts.job.args):
        if word in ("--amp=off", "--amp=none", "--amp=no"):
            change = Change("compute in bf16", f"args.{index}", "--amp=bf16", touches_accuracy=True)
            changes.insert(0, change)
    if name not in variables:
        text = "let float32 matrix products use TF32"
        field = f"environment.variables.{name}"
        changes.append(Change(text, field, "1", touches_accuracy=True))
    changes.append(Change("use channels_last for convolutions, and sizes that are multiples of 8"))
    evidence = [
        f"tensor cores {tensor:.1%} active",
        f"SMs {active:.0%} active: the GPU computes, but without them",
    ]
    found = find(
        facts,
        "tensor-cores-idle",
        tensor,
        f"tensor cores idle: {tensor:.1%} active, while {active:.0%} of the SMs work",
        evidence,
        changes,
        saves=active * 0.5,
        of_steps=bool(facts.ranks),
    )
    return found or f"tensor cores are active {tensor:.0%} of the time"


def launch_bound(facts: Facts) -> Finding | str | None:
    """Return whether kernels are too small for the GPU while nothing else delays the steps."""
    gpus = [gpu for gpu in used_gpus(facts) if gpu.sm_active_ratio is not None]
    active, busy = _mean(gpus, "sm_active_ratio"), _mean(gpus, "utilization_ratio")
    if active is None or not shares(facts, "data_wait_seconds"):
        return None  # without the channel it is unknown what the GPU waits for
    # While a rank communicates its SMs are idle for another reason. Their activity refers to the
    # time that remains, otherwise communication would be reported twice.
    computing = 1 - _share(facts, "wait_seconds", "comm_seconds")
    if (
        _share(facts, "data_wait_seconds", "transfer_seconds") >= _EXPLAINED
        or computing < _EXPLAINED
    ):
        return None  # that is why the GPU is idle
    active = min(1.0, active / computing)
    host = sum(node.mean_cpus or 0.0 for node in facts.nodes) / max(1, facts.world_size)
    evidence = [f"{active:.0%} of the SMs work while the ranks do not communicate"]
    if busy is not None:
        evidence.append(f"a kernel runs {busy:.0%} of the time: most are too small for the GPU")
    if host:
        evidence.append(f"{host:.1f} CPUs per rank are busy")
    power = [
        gpu.power_watts / gpu.power_limit_watts
        for gpu in gpus
        if gpu.power_watts and gpu.power_limit_watts
    ]
    if power:
        evidence.append(f"{sum(power) / len(power):.0%} of the power limit")
    changes = [
        Change('compile the model (`torch.compile`, `mode="reduce-overhead"` for CUDA graphs)'),
        Change("raise the batch size", touches_accuracy=True),
        Change("use fused optimizers (`fused=True`)"),
    ]
    found = find(
        facts,
        "launch-bound",
        active,
        f"small kernels: {active:.0%} of the SMs work, though nothing else delays the steps",
        evidence,
        changes,
        saves=1 - active,
        of_steps=True,
    )
    return found or f"{active:.0%} of the SMs work"


def cpu_bound(facts: Facts) -> Finding | None:
    """Return whether the CPUs of a job with GPUs are all busy while its GPUs are not."""
    busy = _mean(used_gpus(facts), "utilization_ratio")
    known = busy_cpus(facts)
    if known is None or busy is None or busy >= _HALF or _share(facts, *_PARTS) >= _EXPLAINED:
        return None
    share, cpus = known[0] / known[1], known[1]
    changes = [Change("move preprocessing to the GPU, or prepare the data once")]
    if more := more_cpus(facts, 2 * cpus_per_rank(facts)):
        text = f"ask for {more} CPUs per rank"
        changes.insert(0, Change(text, "resources.cpus_per_rank", more))
    elif not facts.node_cpus:
        text = "ask for more CPUs per rank, if a node has them: its size is not recorded"
        changes.append(Change(text))
    return find(
        facts,
        "cpu-bound",
        share,
        f"CPU-bound: {share:.0%} of the CPUs are busy, the GPUs {busy:.0%}",
        [f"{share:.0%} of {cpus:.0f} CPUs busy", f"the GPUs are busy {busy:.0%} of the time"],
        changes,
        saves=1 - busy,
    )


def memory_headroom(facts: Facts) -> Finding | None:
    """Return the note that a larger batch fits, if the GPU has free memory and free SMs."""
    known = [
        (gpu, gpu.memory_peak_bytes / gpu.memory_total_bytes)
        for gpu in used_gpus(facts)
        if gpu.memory_peak_bytes and gpu.memory_total_bytes
    ]
    if not known or (_mean([gpu for gpu, _ in known], "sm_active_ratio") or 1.0) > _LITTLE:
        return None
    gpu, share = max(known, key=lambda item: item[1])
    peak, total = human_bytes(gpu.memory_peak_bytes or 0), human_bytes(gpu.memory_total_bytes or 0)
    text = f"a larger batch fits: {peak} of {total} GPU memory used at most"
    change = Change("raise the batch size", touches_accuracy=True)
    return find(facts, "memory-headroom", share, text, [f"{share:.0%} of the memory"], [change])


def faulty_gpu(facts: Facts) -> Finding | None:
    """Return GPUs whose XID errors mean a fault of the hardware, not of the program."""
    faulty = list(_faulty(facts))
    if not faulty:
        return None
    nodes = [node for node, _, _ in faulty]
    lost = hours(facts) if facts.over and facts.state != "COMPLETED" else None
    evidence = [f"{gpu} on {node}: XID {xid}" for node, gpu, xid in faulty[:4]]
    return find(
        facts,
        "faulty-gpu",
        len(faulty),
        f"faulty GPU on {nodes_text(nodes)}: XID {faulty[0][2]}",
        evidence,
        exclude(facts.job, nodes),
        free_hours=lost,
    )


def _faulty(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for node in facts.nodes:
        for gpu in node.gpus:
            for xid, count in gpu.xid_errors.items():
                if count > 0 and xid in _HARDWARE_XIDS:
                    yield node.node, gpu.uuid, xid
