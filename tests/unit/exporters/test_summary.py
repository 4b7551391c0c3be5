"""What a job used is added up rightly, also over exporters that die."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.app import ALL
from hpml_exporters.core.collector import MetricSpec
from hpml_exporters.core.sampler import Samples
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.options import NodeOptions
from hpml_exporters.summary import GPU_METRICS, JOB_LEVELS, JOB_METRICS, TRAIN_METRICS, JobSummary
from prometheus_client.core import Metric

SPECS = {spec.name: spec for spec in ALL}
START = 1000.0  # of the monotonic clock
EPOCH = 1.7e9


def family(name: str, *samples: tuple[Any, ...]) -> Metric:
    """Series of a metric: labels, and at the end the value.

    The label `cluster` is empty, and labels that are not given are "1".
    """
    spec = SPECS[name]
    made = []
    for *labels, value in samples:
        given = iter(map(str, labels))
        row = ["" if label == "cluster" else next(given, "1") for label in spec.labels]
        assert not list(given), spec.labels
        made.append((row, value))
    return spec.family(made)


def seen(seconds: float, *families: Metric) -> Samples:
    """A snapshot this many seconds after the exporter started."""
    return Samples(families, EPOCH + seconds, START + seconds)


def options(path: Path | str = "", jobid: str = "17") -> NodeOptions:
    """Of an exporter of job 17."""
    return NodeOptions(job=JobFacts(jobid, run="r-1"), summary_file=str(path))


@pytest.fixture
def summary() -> JobSummary:
    """That of an exporter that has just begun."""
    return JobSummary(options(), START)


def gpus(info: Iterable[str], **values: float) -> list[Metric]:
    """GPUs of job 17, each with these values."""
    uuids = list(info)
    return [
        family("hpml_job_gpu_info", *(("17", uuid, 1.0) for uuid in uuids)),
        family("hpml_gpu_info", *((uuid, "0", "A100", "0000:01:00.0", "0", 1.0) for uuid in uuids)),
        *(family(f"hpml_gpu_{name}", *((u, v) for u in uuids)) for name, v in values.items()),
    ]


def test_every_name_is_a_metric_that_there_is() -> None:
    """A metric that is renamed would be missing in silence."""
    for names in (GPU_METRICS, JOB_LEVELS, JOB_METRICS, TRAIN_METRICS):
        assert set(names) <= set(SPECS)
    others = {"hpml_job_memory_bytes", "hpml_gpu_info", "hpml_job_gpu_info", "hpml_train_loss"}
    assert others <= set(SPECS)


def test_a_job_that_was_never_seen_has_no_figures(summary: JobSummary) -> None:
    """And no zeroes in their place."""
    summary.note(seen(5))
    told = shown(summary)
    assert (told["job"], told["training"], told["gpus"]) == ({}, {}, [])
    assert (told["jobid"], told["run"], told["seconds"], told["starts"]) == ("17", "r-1", 5, 1)


Looks = list[tuple[float, list[Metric]]]
CPU, IO = "hpml_job_cpu_seconds_total", "hpml_job_io_write_bytes_total"
JOBS: dict[str, tuple[Looks, dict[str, float]]] = {
    # seconds and what is seen then -> figures of the job
    # The first reading counts in full; modes are added up; other jobs are left out.
    "counters count from the job's beginning": (
        [
            (
                5.0 * factor,
                [
                    family(CPU, ("17", "user", 30 * factor), ("17", "system", 5 * factor)),
                    family(IO, ("17", 1000 * factor), ("18", 999.0)),
                    family("hpml_job_oom_events_total", ("17", 1.0)),
                ],
            )
            for factor in (1, 2)
        ],
        {"cpu_seconds": 70, "mean_cpus": 7, "io_write_bytes": 2000, "oom_events": 1},
    ),
    # Memory that the kernel could reclaim counts only in its own peak.
    "memory is the highest level without the page cache": (
        [
            (
                rss,
                [
                    family(
                        "hpml_job_memory_bytes",
                        *(("17", "rss", rss), ("17", "shmem", 7.0), ("17", "cache", 1e9)),
                    ),
                    family("hpml_job_memory_peak_bytes", ("17", 1e9 + 307)),
                    family("hpml_job_memory_limit_bytes", ("17", 4e9)),
                ],
            )
            for rss in (100.0, 300.0, 50.0)
        ],
        {
            "memory_peak_bytes": 307,
            "memory_with_cache_peak_bytes": 1e9 + 307,
            "memory_limit_bytes": 4e9,
        },
    ),
}


@pytest.mark.parametrize(("looks", "figures"), JOBS.values(), ids=JOBS)
def test_figures_of_a_job(summary: JobSummary, looks: Looks, figures: dict[str, float]) -> None:
    """The figures are complete and contain nothing else."""
    for seconds, families in looks:
        summary.note(seen(seconds, *families))
    assert shown(summary)["job"] == figures


THROTTLED, XIDS = "hpml_gpu_throttled_seconds_total", "hpml_gpu_xid_errors_total"
ENERGY = "energy_joules_total"
BUSY = "busy_seconds_total"
Readings = list[tuple[float, dict[str, float], list[Metric]]]
GPUS: dict[str, tuple[Readings, dict[str, Any]]] = {
    # seconds, values of the GPU and further families -> some of its figures
    "means are weighed by time": (
        [(10, {"sm_active_ratio": 0.2}, []), (40, {"sm_active_ratio": 0.6}, [])],
        {"sm_active_ratio": 0.5, "uuid": "a", "name": "A100", "seconds": 40},
    ),
    # The first look came 5 s after the start, when the driver had been read for 2 s.
    "utilisation is the busy share of the time that was watched": (
        [(5, {BUSY: 2.0}, []), (15, {BUSY: 8.0}, []), (45, {BUSY: 23.0}, [])],
        {"utilization_ratio": (23 - 2) / 40, "busy_seconds": 23},
    ),
    # A GPU that is always busy: two looks in one second, none in the next.
    "looks beside the readings lose no time": (
        [(n, {BUSY: busy}, []) for n, busy in ((1, 1), (2, 1), (3, 3), (4, 4), (5, 4), (6, 6))],
        {"utilization_ratio": 1},
    ),
    # A job of a second: the one reading at its end counts.
    "a single look": (
        [(0.5, {"sm_active_ratio": 0.7, BUSY: 0.25}, [])],
        {"sm_active_ratio": 0.7, "utilization_ratio": 0.5},
    ),
    # The driver counts since it was loaded; before the first reading, power is used.
    "energy is what was used meanwhile": (
        [
            (5, {ENERGY: 1e9, "power_watts": 300.0}, []),
            (15, {ENERGY: 1e9 + 4000, "power_watts": 500.0}, []),
        ],
        {"energy_joules": 5 * 300 + 4000, "power_watts": 433.3333},
    ),
    "a driver that was loaded again": (
        [(1, {ENERGY: 100.0}, []), (2, {ENERGY: 150.0}, []), (3, {ENERGY: 20.0}, [])],
        {"energy_joules": 50 + 20},
    ),
    # The driver counted throttling before the job; an XID is one since the exporter began.
    "throttling and errors by kind": (
        [
            (1, {"memory_used_bytes": 5.0}, [family(THROTTLED, ("a", "sw_power", 90.0))]),
            (
                2,
                {"memory_used_bytes": 4.0},
                [family(THROTTLED, ("a", "sw_power", 92.5)), family(XIDS, ("a", "79", 1.0))],
            ),
        ],
        {
            "throttled_seconds": {"sw_power": 2.5},
            "xid_errors": {"79": 1},
            "memory_peak_bytes": 5,
        },
    ),
    "numbers that are none": (
        [(1, {"power_watts": 100.0}, []), (2, {"power_watts": float("nan")}, [])],
        {"power_watts": 100},
    ),
}


def shown(summary: JobSummary) -> dict[str, Any]:
    """What a reader of the file gets."""
    figures: dict[str, Any] = json.loads(json.dumps(summary.to_json()))
    return figures


@pytest.mark.parametrize(("readings", "figures"), GPUS.values(), ids=GPUS)
def test_figures_of_a_gpu(summary: JobSummary, readings: Readings, figures: dict[str, Any]) -> None:
    """Means, peaks and what was counted while the job was watched."""
    for seconds, levels, more in readings:
        summary.note(seen(seconds, *gpus(["a"], **levels), *more))
    (gpu,) = shown(summary)["gpus"]
    assert {name: gpu[name] for name in figures} == figures


@pytest.mark.parametrize("own", [["a"], []])
def test_gpus_of_others_that_are_seen_before_the_jobs_are(tmp_path: Path, own: list[str]) -> None:
    """The node's GPUs are read before their jobs are known, also after a restart."""
    path = tmp_path / "s.json"
    both = gpus(["a", "b"], power_watts=100.0)[1:]
    whose = family("hpml_job_gpu_info", *(("17", uuid, 1.0) for uuid in own))
    summary = JobSummary(options(path), START)
    summary.note(seen(1, *both))
    assert {one["uuid"] for one in shown(summary)["gpus"]} == {"a", "b"}
    summary.note(seen(2, whose, *both))
    summary.write(str(path))
    again = JobSummary(options(path), START)
    again.note(seen(4, *both))
    for one in (shown(summary), shown(again)):
        assert [gpu["uuid"] for gpu in one["gpus"]] == own
        assert not [key for key in one["state"]["means"] if key.startswith("gpu/b")]


def told_twice(path: Path, first: float, second: float, name: str) -> dict[str, Any]:
    """The figures of a job whose exporter was killed between two readings of a counter."""
    for value in (first, second):
        summary = JobSummary(options(path), START)
        summary.note(seen(10, *gpus(["a"]), family(name, *_labelled(SPECS[name], value))))
        summary.write(str(path))
    told: dict[str, Any] = json.loads(path.read_text())
    assert (told["starts"], told["seconds"]) == (2, 20)
    return told


def _labelled(spec: MetricSpec, value: float) -> list[tuple[Any, ...]]:
    names = {"jobid": "17", "uuid": "a"}
    labels = [names.get(label, "x") for label in spec.labels if label != "cluster"]
    return [(*labels, value)]


@pytest.mark.parametrize(
    ("name", "first", "second", "total"),
    [
        (CPU, 100.0, 120.0, 120.0),  # of the control group, which lives on
        ("hpml_job_io_read_bytes_total", 500.0, 60.0, 500.0),  # of processes: some ended meanwhile
        ("hpml_train_samples_total", 64.0, 128.0, 128.0),
        ("hpml_gpu_busy_seconds_total", 8.0, 4.0, 12.0),  # each exporter integrates from 0
        ("hpml_gpu_busy_seconds_total", 3.0, 4.0, 7.0),  # which one that lives longer does, too
        ("hpml_gpu_energy_joules_total", 1000.0, 1400.0, 400.0),  # the driver's lives on
    ],
)
def test_a_killed_exporter_loses_nothing(
    tmp_path: Path, name: str, first: float, second: float, total: float
) -> None:
    """The next continues from the file; nothing is counted twice."""
    told = told_twice(tmp_path / "s.json", first, second, name)
    figures = {**told["job"], **told["training"], **told["gpus"][0]}
    assert figures[{**JOB_METRICS, **TRAIN_METRICS, **GPU_METRICS}[name]] == total


def test_a_collector_that_comes_late_after_a_restart(tmp_path: Path) -> None:
    """Its first reading is late, but still the first of a new exporter: no new bytes."""
    path = tmp_path / "s.json"
    first = JobSummary(options(path), START)
    first.note(seen(1, family("hpml_job_io_read_bytes_total", ("17", 500.0))))
    first.write(str(path))
    second = JobSummary(options(path), START)
    second.note(seen(1, family("hpml_job_cpu_seconds_total", ("17", "user", 1.0))))
    for value in (60.0, 70.0):
        second.note(seen(2, family("hpml_job_io_read_bytes_total", ("17", value))))
    assert shown(second)["job"]["io_read_bytes"] == 510.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"jobid": "17", "run": "r-1", "state": {"counts": {"job/cpu_seconds": ["x", 1]}}}',
        '{"jobid": "18", "run": "r-1"}',
    ],
)
def test_what_is_no_summary_of_this_job_is_not_gone_on_with(tmp_path: Path, text: str) -> None:
    """A damaged file, or that of another job: a new one begins."""
    path = tmp_path / "s.json"
    path.write_text(text)
    told = JobSummary(options(path), START).to_json()
    assert (told["starts"], told["job"]) == (1, {})
