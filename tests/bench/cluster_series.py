"""The series of a simulated cluster, as its exporters would show them, in OpenMetrics.

Nodes have 8 GPUs each. A tenth of them is idle, an eighth runs one large job, and of the rest every
other node runs one job, the others four. Labels and types are those of hpml's catalogue of metrics.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hpml_exporters.app import ALL
from hpml_exporters.core.collector import MetricSpec

CLUSTER = "main"
GPUS = 8
INTERVAL = 30  # seconds between two samples of a series
_VALUES = {
    "allocated": ["1"],
    "collector": ["gpu", "jobs", "processes", "training", "shm", "infiniband"],
    "device": ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"],
    "direction": ["received", "transmitted"],
    "error": ["corrected", "uncorrected"],
    "kind": ["rss", "shmem", "cache"],
    "le": ["1", "10", "60", "300", "1800", "3600", "14400", "86400", "+Inf"],
    "method": ["nccl"],
    "mode": ["user", "system"],
    "name": ["NVIDIA H100 80GB HBM3"],
    "owner": ["1"],
    "partition": ["gpu", "debug", "long", "large"],
    "port": ["1"],
    "qos": ["normal", "high"],
    "rank": ["3"],
    "reason": ["hw_thermal", "power_brake", "hw_slowdown", "sw_thermal", "power", "sync_boost"],
    "resource": ["cpu", "memory", "io"],
    "scope": ["node"],
    "state": ["running", "pending", "completing", "allocated", "idle", "down", "drained", "failed"],
    "type": ["h100"],
    "which": ["fastest", "slowest", "shortest", "longest"],
    "xid": ["31"],
}
"""Values of labels that do not come from the node, the GPU or the job."""
_OF_JOBS = ("user", "account", "partition", "qos", "name", "array_job", "array_task")
_OF_RUNS = ("run", "sweep", "point")
_RARE = 50  # one in this number of nodes has had a GPU error or is down


@dataclass(frozen=True)
class _Place:
    """An object with its own series: labels, and its kind (cluster, node, GPU or job)."""

    kind: str
    labels: dict[str, str]
    number: int


class Cluster:
    """A cluster with this number of nodes.

    Args:
        nodes: how many.
        metrics: names of the series to make; those that no exporter of hpml has are left out.
    """

    def __init__(self, nodes: int, metrics: Collection[str]) -> None:
        specs = {spec.name: spec for spec in ALL}
        found = {
            name: specs.get(name) or specs.get(re.sub("_(bucket|sum|count)$", "", name))
            for name in sorted(metrics)
        }
        self._specs = {name: spec for name, spec in found.items() if spec is not None}
        self._places = list(_places(nodes))
        self.nodes = nodes
        self.largest_job = "1000"
        self.series = 0
        self.node_series = 0

    def openmetrics(self, begin: int, end: int) -> Iterator[str]:
        """Yield blocks of lines; counts the series meanwhile. Times are Unix seconds."""
        chance = random.Random(1)
        times = range(begin, end, INTERVAL)
        for name, spec in self._specs.items():
            for labels, scale in self._labelled(name, spec):
                self.series += 1
                self.node_series += 'job="node"' in labels
                yield "".join(
                    f"{name}{{{labels}}} {value} {second}\n"
                    for second, value in zip(
                        times, _values(name, scale, begin, chance), strict=False
                    )
                )
        yield "# EOF\n"

    def _labelled(self, name: str, spec: MetricSpec) -> Iterator[tuple[str, float]]:
        """Yield the labels of a metric's series, as text, and a factor for their values."""
        kind = _kind(spec)
        wanted = [*spec.labels, "le"] if name.endswith("_bucket") else list(spec.labels)
        for place in self._places:
            if place.kind != kind or ("xid" in wanted and place.number % (_RARE * GPUS)):
                continue
            if name == "hpml_slurm_node_reason_info" and place.number % _RARE:
                continue
            free = [label for label in wanted if label not in place.labels]
            for values in itertools.product(*(_VALUES.get(label, [""]) for label in free)):
                labels = place.labels | dict(zip(free, values, strict=True))
                text = ",".join(
                    f'{label}="{value}"'
                    for label, value in labels.items()
                    if value and (label in wanted or label in ("instance", "job"))
                )
                yield text, float(labels.get("le", "inf").replace("+Inf", "inf"))


def _kind(spec: MetricSpec) -> str:
    """Return what each series of a metric is about."""
    labels = set(spec.labels)
    if spec.name == "hpml_slurm_node_reason_info":
        return "slurm node"
    if spec.name.startswith("hpml_slurm"):
        return "cluster"
    if "uuid" in labels:
        return "job's GPU" if "jobid" in labels else "GPU"
    return "job" if "jobid" in labels else "node"


def _places(nodes: int) -> Iterator[_Place]:
    slurm = {"instance": "slurm:9446", "job": "slurm"}
    yield _Place("cluster", slurm, 0)
    for number in range(nodes):
        node = {"instance": f"gpu{number:05d}:9445", "job": "node"}
        yield _Place("node", node | {"cluster": CLUSTER, "node": f"gpu{number:05d}"}, number)
        reason = {"node": f"gpu{number:05d}", "state": "drained", "reason": "bad GPU"}
        yield _Place("slurm node", slurm | reason, number)
        jobs = _jobs(number, nodes)
        for job in jobs:
            yield _Place("job", node | job, number)
        for index in range(GPUS):
            gpu = {"uuid": f"GPU-{number:05d}-{index}", "index": str(index)}
            yield _Place("GPU", node | gpu, number * GPUS + index)
            if jobs:
                job = jobs[index * len(jobs) // GPUS]
                yield _Place("job's GPU", node | gpu | job, number * GPUS + index)


def _jobs(number: int, nodes: int) -> list[dict[str, str]]:
    """Return the labels of the jobs on a node."""
    if number % 10 == 9:
        return []
    if number < max(1, nodes // 8):
        ids = [1000]
    elif number % 2:
        ids = [10_000 + number]
    else:
        ids = [100_000 + 4 * number + part for part in range(4)]
    return [
        dict.fromkeys((*_OF_JOBS, *_OF_RUNS), "")
        | {
            "cluster": CLUSTER,
            "jobid": str(each),
            "user": f"user{each % 97}",
            "account": f"lab{each % 13}",
            "partition": _VALUES["partition"][each % 4],
            "qos": "normal",
            "name": f"train{each % 7}",
            "run": f"2026-01-01-{each}",
            "sweep": f"sweep{each % 29}",
            "point": f"lr={each % 5}",
        }
        for each in ids
    ]


def _values(name: str, scale: float, begin: int, chance: random.Random) -> Iterator[str]:
    """Yield values of the metric's kind: steps that vary for counters, noise for gauges."""
    level = chance.random()
    if name.endswith("_info"):
        yield from itertools.repeat("1")
    elif "timestamp" in name or name.endswith(("_limit_bytes", "_total_bytes", "_size_bytes")):
        fixed = begin - int(9e4 * level) if "timestamp" in name else 512 << 30
        yield from itertools.repeat(str(fixed))
    elif name.endswith(("_total", "_sum", "_count", "_bucket")):
        total = level * 1e4
        rate = level * min(1.0, scale / 3600) * (2e9 if "bytes" in name else 1)
        whole = "bytes" in name or not re.search("seconds", name) or name.endswith("_bucket")
        while True:
            total += INTERVAL * rate * chance.uniform(0.8, 1.2)
            yield str(int(total)) if whole else f"{total:.6f}"
    else:
        while True:
            value = level * chance.uniform(0.8, 1.2)
            if "bytes" in name:
                yield str(int(value * 2e10) & ~0xFFF)
            elif re.search("ratio|seconds|loss", name):
                yield f"{min(value, 1.0):.4f}"
            else:
                yield str(int(value * 600) if "watts" in name else int(1 + 8 * value))
