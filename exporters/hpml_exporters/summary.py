"""A job's use of one node, summed up from the snapshots of its exporter.

The file is complete at any moment. It has the counters of each start of the exporter; readers add
them up, so neither a killed exporter nor a short job leaves a gap.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client.core import Metric

from hpml_exporters.core.collector import shown_name
from hpml_exporters.core.sampler import Samples
from hpml_exporters.options import NodeOptions
from hpml_exporters.training.collector import OF_COUNTERS, OF_PARTS
from hpml_orchestrator.records.files import write_json

_T = TypeVar("_T")

_JOB = "cpu_seconds io_read_bytes io_write_bytes io_syscall_read_bytes io_syscall_write_bytes"
JOB_METRICS = {f"hpml_job_{name}_total": name for name in [*_JOB.split(), "oom_events"]}
"""Counters that began with the job, and their names here; modes are added up."""

JOB_LEVELS = {
    "hpml_job_memory_limit_bytes": "memory_limit_bytes",
    "hpml_job_memory_peak_bytes": "memory_with_cache_peak_bytes",
    "hpml_job_cpus": "cpus",
    "hpml_job_gpus_allocated": "gpus_allocated",
    "hpml_job_gpus_used": "gpus_used",
}
"""Levels of which the highest is kept."""

_TRAIN = (*OF_COUNTERS, *OF_PARTS, "comm_seconds")
TRAIN_METRICS = {f"hpml_train_{name}_total": name for name in _TRAIN}
"""Counters that the ranks report."""

_COUNTED = ("busy_seconds", "energy_joules", "throttled_seconds", "xid_errors")
_MEANS = (
    "utilization_ratio sm_active_ratio tensor_active_ratio dram_active_ratio power_watts "
    "power_limit_watts"
)
_SINCE_EXPORTER = ("busy_seconds", "xid_errors")  # the others count since the driver was loaded
_PEAKS = ("memory_peak_bytes", "temperature_peak_celsius", "memory_total_bytes")
GPU_METRICS = {
    **{f"hpml_gpu_{name}_total": name for name in _COUNTED},
    **{f"hpml_gpu_{name}": name for name in _MEANS.split()},
    "hpml_gpu_memory_used_bytes": _PEAKS[0],
    "hpml_gpu_temperature_celsius": _PEAKS[1],
    "hpml_gpu_memory_total_bytes": _PEAKS[2],
}
"""Metrics of GPUs: counters, then those of which the mean over time is kept, then peaks."""

_MEMORY = ("rss", "shmem")  # the kernel can reclaim page cache
_BUSY_SHARE = "busy_seconds_share"
_INSTANT_SECONDS = 1e-6  # weight of a single look
_STEADY_SECONDS = 10.0
_MAX_BYTES = 4 << 20
_STARTS = 100

Counts = dict[str, list[float]]
"""By key: what a counter had before its first reading, that reading, the last one, and its growth
between them."""


class JobSummary:
    """Figures of the job that the options name, on this node.

    Args:
        options: of the exporter; it continues the file of the job's earlier exporter.
        now: start of the exporter, by time.monotonic().
    """

    def __init__(self, options: NodeOptions, now: float | None = None) -> None:
        facts = options.job
        self._jobid = "" if facts is None else facts.key
        self._run = "" if facts is None else facts.run
        self._last = time.monotonic() if now is None else now
        self._counts: Counts = {}  # of this start
        self._earlier: list[Counts] = []  # of each earlier one
        self._means: dict[str, list[float]] = {}  # key -> mean, seconds that it is the mean of
        self._peaks: dict[str, float] = {}
        self._gpus: dict[str, str] = {}  # names by UUID
        self._sure = False  # whether these are the job's GPUs
        self._seconds = 0.0
        self._began = self._updated = 0.0
        self._starts = 1
        self._busy_at: dict[str, float] = {}  # when its last reading was seen, by time.monotonic()
        self._resume(options.summary_file)

    def note(self, snapshot: Samples) -> None:
        """Add the changes since the previous snapshot; a repeated snapshot changes nothing."""
        step = max(0.0, snapshot.monotonic - self._last)
        self._last = max(self._last, snapshot.monotonic)
        self._seconds += step
        self._began = self._began or snapshot.time - step
        self._updated = snapshot.time
        families = {shown_name(family): family for family in snapshot.families}
        self._note_job(families)
        self._note_gpus(families, step)

    def write(self, path: str) -> None:
        """Write the figures, complete or not at all.

        Raises:
            RecordError: they cannot be written.
        """
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return the figures, without those that were never reported."""
        return {
            "jobid": self._jobid,
            "run": self._run,
            "began": round(self._began, 3),
            "updated": round(self._updated, 3),
            "seconds": round(self._seconds, 3),
            "starts": self._starts,
            "job": self._job_figures(),
            "training": self._totals("train"),
            "gpus": [self._gpu_figures(uuid) for uuid in self._gpus],
            "state": {
                "counts": [*self._earlier, self._counts],
                "means": self._means,
                "peaks": self._peaks,
            },
            "gpu_names": self._gpus,
            "gpus_sure": self._sure,
        }

    def _note_job(self, families: Mapping[str, Metric]) -> None:
        for group, names in (("job", JOB_METRICS), ("train", TRAIN_METRICS)):
            for metric, name in names.items():
                values = self._of_job(families.get(metric))
                if values:
                    total = sum(values.values())
                    self._count(f"{group}/{name}", total, before=total)
        kinds = self._of_job(families.get("hpml_job_memory_bytes"), "kind")
        if kinds:
            self._peak("job/memory_peak_bytes", sum(kinds.get(kind, 0.0) for kind in _MEMORY))
        for metric, name in JOB_LEVELS.items():
            values = self._of_job(families.get(metric))
            if values:
                self._peak(f"job/{name}", max(values.values()))
        loss = self._of_job(families.get("hpml_train_loss"))
        if loss:
            self._means["train/loss"] = [next(iter(loss.values())), 0.0]

    def _note_gpus(self, families: Mapping[str, Metric], step: float) -> None:
        own = self._own_gpus(families)
        for uuid in sorted(own):
            self._gpus.setdefault(uuid, "")
        for uuid, name in _by_uuid(families.get("hpml_gpu_info"), "name"):
            if uuid in own:
                self._gpus[uuid] = name
        for uuid in own:
            self._mean(f"gpu/{uuid}/present", 1.0, step)
        power = dict(_values(families.get("hpml_gpu_power_watts")))
        for metric, name in GPU_METRICS.items():
            for (uuid, *rest), value in _values(families.get(metric)):
                if uuid in own:
                    key = "/".join(["gpu", uuid, name, *rest])
                    # The driver counts energy since it was loaded: for the time before the first
                    # reading the power is an estimate.
                    before = power.get((uuid,), 0.0) * step if name == "energy_joules" else 0.0
                    self._note_gpu(key, name, value, step, before)

    def _note_gpu(self, key: str, name: str, value: float, step: float, before: float) -> None:
        if name in _COUNTED:
            grown = self._count(key, value, before=before)
            passed = self._last - self._busy_at.get(key, self._last)
            if name == "busy_seconds":
                # The start of the collector's count is unknown before the first snapshot.
                if passed > 0:
                    # May exceed 1: GPUs are sampled and aggregated at different intervals.
                    self._mean(f"{key}_share", grown / passed, passed)
                self._busy_at[key] = self._last
        elif name in _PEAKS:
            self._peak(key, value)
        else:
            self._mean(key, value, step)

    def _own_gpus(self, families: Mapping[str, Metric]) -> set[str]:
        """Return the GPUs of the job, or all visible ones if the job's were never known."""
        family = families.get("hpml_job_gpu_info")
        own = {uuid for uuid, jobid in _by_uuid(family, "jobid") if jobid == self._jobid}
        if family is not None:
            if not self._sure:
                # GPUs are known a moment before jobs. Drop those that turn out to be other jobs'.
                self._sure = True
                for uuid in self._gpus.keys() - own:
                    self._forget_gpu(uuid)
            return own
        seen = {uuid for uuid, _ in _by_uuid(families.get("hpml_gpu_info"), "name")}
        return seen & self._gpus.keys() if self._sure else seen

    def _forget_gpu(self, uuid: str) -> None:
        del self._gpus[uuid]
        everything: list[dict[str, Any]]
        everything = [self._counts, *self._earlier, self._means, self._peaks]
        for kept in everything:
            for key in [key for key in kept if key.startswith(f"gpu/{uuid}/")]:
                del kept[key]

    def _of_job(self, family: Metric | None, label: str = "") -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in family.samples if family else ():
            if sample.labels.get("jobid") == self._jobid and math.isfinite(sample.value):
                key = sample.labels[label] if label else "/".join(sample.labels.values())
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def _count(self, key: str, value: float, *, before: float) -> float:
        """Record a counter, and return its growth since the last snapshot.

        `before` is what it counted for this job when any exporter first read it.
        """
        known = self._counts.get(key)
        if known is None:
            self._counts[key] = [before, value, value, 0.0]
            return value
        grown = value - known[2]
        if grown < 0:  # a driver that was loaded again
            grown = value
        known[2] = value
        known[3] += grown
        return grown

    def _sums(self, group: str) -> dict[str, float]:
        """Return the totals of all starts."""
        totals: dict[str, float] = {}
        last: dict[str, float] = {}
        for start in (*self._earlier, self._counts):
            for key, (before, first, latest, grown) in _below(group, start).items():
                if any(name in f"{group}{key}".split("/") for name in _SINCE_EXPORTER):
                    before_it = first  # it began at 0 with this start
                elif key in last:
                    # Counters of driver and kernel continued, and their growth counts for the job.
                    before_it = max(0.0, first - last[key])
                else:
                    before_it = before
                totals[key] = totals.get(key, 0.0) + before_it + grown
                last[key] = latest
        return totals

    def _mean(self, key: str, value: float, seconds: float) -> None:
        weight = max(seconds, _INSTANT_SECONDS)
        mean, before = self._means.get(key, (0.0, 0.0))
        self._means[key] = [(mean * before + value * weight) / (before + weight), before + weight]

    def _peak(self, key: str, value: float) -> None:
        self._peaks[key] = max(value, self._peaks.get(key, value))

    def _totals(self, group: str) -> dict[str, float]:
        means = _below(f"{group}/", self._means)
        totals = {name: round(total, 6) for name, total in self._sums(f"{group}/").items()}
        return totals | {name: mean for name, (mean, _) in means.items()}

    def _job_figures(self) -> dict[str, float]:
        figures = self._totals("job")
        # CPU time counts since the job began, and its exporter began a moment later.
        seconds = self._updated - self._began
        if "cpu_seconds" in figures and seconds > 0:
            figures["mean_cpus"] = round(figures["cpu_seconds"] / seconds, 3)
        return figures | _below("job/", self._peaks)

    def _gpu_figures(self, uuid: str) -> dict[str, object]:
        begin = f"gpu/{uuid}/"
        means = _below(begin, self._means)
        _, seconds = means.pop("present", (1.0, 0.0))
        figures = {"seconds": round(seconds, 3)}
        parts: dict[str, dict[str, float]] = {}
        figures |= {key: round(mean, 4) for key, (mean, _) in means.items() if key != _BUSY_SHARE}
        figures |= _below(begin, self._peaks)
        for key, total in self._sums(begin).items():
            counter, _, which = key.partition("/")
            if which:
                parts.setdefault(counter, {})[which] = round(total, 3)
            else:
                figures[counter] = round(total, 3)
        if "busy_seconds" in figures and seconds > _INSTANT_SECONDS:
            share, weight = means.get(_BUSY_SHARE, (figures["busy_seconds"] / seconds, 0.0))
            # Over a few seconds the sampled level is more exact: one reading is much of them.
            if weight >= _STEADY_SECONDS or "utilization_ratio" not in figures:
                figures["utilization_ratio"] = round(min(1.0, share), 4)
        return {"uuid": uuid, "name": self._gpus[uuid], **figures, **parts}

    def _resume(self, path: str) -> None:
        try:
            if not path or os.stat(path).st_size > _MAX_BYTES:
                return
            with open(path, "rb") as stream:
                told = json.load(stream)
            if (told["jobid"], told["run"]) != (self._jobid, self._run):
                return
            state = told["state"]
            counts = [
                {str(key): _numbers(four, 4) for key, four in start.items()}
                for start in state["counts"][-_STARTS:]
            ]
            means = {str(key): _numbers(pair, 2) for key, pair in state["means"].items()}
            peaks = {str(key): _numbers([value], 1)[0] for key, value in state["peaks"].items()}
            names = {str(uuid): str(name) for uuid, name in told["gpu_names"].items()}
            began, seconds = _numbers([told["began"], told["seconds"]], 2)
            starts, sure = int(told["starts"]), told.get("gpus_sure") is True
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return
        self._earlier, self._means, self._peaks = counts, means, peaks
        self._gpus, self._sure = names, sure
        self._began, self._seconds, self._starts = began, seconds, starts + 1


def _numbers(values: list[float], length: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != length or not all(map(math.isfinite, numbers)):
        raise ValueError("no numbers")
    return numbers


def _below(begin: str, kept: Mapping[str, _T]) -> dict[str, _T]:
    return {key[len(begin) :]: value for key, value in kept.items() if key.startswith(begin)}


def _values(family: Metric | None) -> Iterable[tuple[tuple[str, ...], float]]:
    """Yield labels, the GPU's uuid first, and value of each series that has a number."""
    for sample in family.samples if family else ():
        if "uuid" in sample.labels and math.isfinite(sample.value):
            rest = (value for name, value in sample.labels.items() if name != "uuid")
            yield (sample.labels["uuid"], *rest), sample.value


def _by_uuid(family: Metric | None, label: str) -> Iterable[tuple[str, str]]:
    for sample in family.samples if family else ():
        yield sample.labels["uuid"], sample.labels[label]
