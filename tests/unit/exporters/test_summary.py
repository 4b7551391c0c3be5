"""What a job used is added up rightly, also over exporters that die."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.catalogue import ALL
from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.core.sampler import Snapshot
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.options import NodeOptions
from hpml_exporters.summary import GPU_METRICS, JOB_LEVELS, JOB_METRICS, TRAIN_METRICS, Summary
from prometheus_client.core import Metric

SPECS = {spec.name: spec for spec in ALL}
START = 1000.0  # of the monotonic clock
EPOCH = 1.7e9


def family(name: str, *samples: tuple[Any, ...]) -> Metric:
    """Series of a metric: labels, and at the end the value.

    The label `cluster` is empty, and what is not given says yes.
    """
    spec = SPECS[name]
    made = []
    for *labels, value in samples:
        given = iter(map(str, labels))
        row = ["" if label == "cluster" else next(given, "1") for label in spec.labels]
        assert not list(given), spec.labels
        made.append((row, value))
    return spec.family(made)


def seen(seconds: float, *families: Metric) -> Snapshot:
    """A snapshot so many seconds after the exporter began."""
    return Snapshot(families, EPOCH + seconds, START + seconds)


def options(path: Path | str = "", jobid: str = "17") -> NodeOptions:
    """Of an exporter of job 17."""
    return NodeOptions(job=JobFacts(jobid, run="r-1"), summary_file=str(path))


@pytest.fixture
def summary() -> Summary:
    """That of an exporter that has just begun."""
    return Summary(options(), START)


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


def test_a_job_that_was_never_seen_has_no_figures(summary: Summary) -> None:
    """And no zeroes in their place."""
    summary.note(seen(5))
    told = summary.to_json()
    assert (told["job"], told["training"], told["gpus"]) == ({}, {}, [])
    assert (told["jobid"], told["run"], told["seconds"], told["starts"]) == ("17", "r-1", 5, 1)


def test_cpu_time_io_and_training_count_from_the_jobs_beginning(summary: Summary) -> None:
    """The first reading counts in full; modes are added up; other jobs are left out."""
    for seconds, factor in ((5, 1.0), (10, 2.0)):
        summary.note(
            seen(
                seconds,
                family(
                    "hpml_job_cpu_seconds_total",
                    ("17", "user", 30 * factor),
                    ("17", "system", 5 * factor),
                    ("18", "user", 999.0),
                ),
                family("hpml_job_io_write_bytes_total", ("17", 1000 * factor)),
                family("hpml_job_oom_events_total", ("17", 1.0)),
                family("hpml_train_samples_total", ("17", 640 * factor)),
            )
        )
    told = summary.to_json()
    assert told["job"]["cpu_seconds"] == 70
    assert told["job"]["mean_cpus"] == 7
    assert told["job"]["io_write_bytes"] == 2000
    assert told["job"]["oom_events"] == 1
    assert told["training"]["samples"] == 1280
    assert "io_read_bytes" not in told["job"]


def test_memory_is_the_highest_level_without_the_page_cache(summary: Summary) -> None:
    """What the kernel would give back counts in its own peak alone."""
    for rss in (100.0, 300.0, 50.0):
        kinds = (("17", "rss", rss), ("17", "shmem", 7.0), ("17", "cache", 1e9))
        peak = family("hpml_job_memory_peak_bytes", ("17", 1e9 + 307))
        limit = family("hpml_job_memory_limit_bytes", ("17", 4e9))
        summary.note(seen(rss, family("hpml_job_memory_bytes", *kinds), peak, limit))
    job = summary.to_json()["job"]
    assert job["memory_peak_bytes"] == 307
    assert job["memory_with_cache_peak_bytes"] == 1e9 + 307
    assert job["memory_limit_bytes"] == 4e9


def test_means_of_gpus_are_weighed_by_time(summary: Summary) -> None:
    """10 s at 20 % and 30 s at 60 % are 50 %."""
    summary.note(seen(10, *gpus(["a"], sm_active_ratio=0.2)))
    summary.note(seen(40, *gpus(["a"], sm_active_ratio=0.6)))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["sm_active_ratio"] == pytest.approx(0.5)
    assert (gpu["uuid"], gpu["name"], gpu["seconds"]) == ("a", "A100", 40)


def test_utilisation_is_the_busy_share_of_the_time_that_was_watched(summary: Summary) -> None:
    """The first look came 5 s after the start, when the driver had been read for 2 s."""
    for seconds, busy in ((5, 2.0), (15, 8.0), (45, 23.0)):
        summary.note(seen(seconds, *gpus(["a"], busy_seconds_total=busy)))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["utilization_ratio"] == pytest.approx((23 - 2) / 40)
    assert gpu["busy_seconds"] == 23


def test_energy_is_what_was_used_meanwhile(summary: Summary) -> None:
    """The driver counts since it was loaded; before the first reading the power tells."""
    summary.note(seen(5, *gpus(["a"], energy_joules_total=1e9, power_watts=300.0)))
    summary.note(seen(15, *gpus(["a"], energy_joules_total=1e9 + 4000, power_watts=500.0)))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["energy_joules"] == 5 * 300 + 4000
    assert gpu["power_watts"] == pytest.approx((5 * 300 + 10 * 500) / 15)


def test_a_counter_that_begins_anew_goes_on(summary: Summary) -> None:
    """A driver that was loaded again counts from 0: what it counted since is added."""
    for seconds, value in ((1, 100.0), (2, 150.0), (3, 20.0)):
        summary.note(seen(seconds, *gpus(["a"], energy_joules_total=value)))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["energy_joules"] == 50 + 20


def test_throttling_and_errors_by_kind(summary: Summary) -> None:
    """The driver counted throttling before the job; an XID is one since the exporter began."""
    throttled = "hpml_gpu_throttled_seconds_total"
    xids = "hpml_gpu_xid_errors_total"
    base = gpus(["a"], memory_used_bytes=5.0)
    summary.note(seen(1, *base, family(throttled, ("a", "sw_power", 90.0))))
    summary.note(
        seen(2, *base, family(throttled, ("a", "sw_power", 92.5)), family(xids, ("a", "79", 1.0)))
    )
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["throttled_seconds"] == {"sw_power": 2.5}
    assert gpu["xid_errors"] == {"79": 1}
    assert gpu["memory_peak_bytes"] == 5


def test_gpus_of_others_are_left_out(summary: Summary) -> None:
    """On a shared node without a device cgroup all GPUs are seen, and only some are the job's."""
    families = gpus(["a", "b"], utilization_ratio=1.0)[1:]
    owners = family("hpml_job_gpu_info", ("17", "a", 1.0), ("18", "b", 1.0))
    summary.note(seen(1, owners, *families))
    assert [gpu["uuid"] for gpu in summary.to_json()["gpus"]] == ["a"]


def test_without_anybodys_word_all_visible_gpus_count(summary: Summary) -> None:
    """As inside of a device cgroup, which shows the job's alone."""
    summary.note(seen(1, *gpus(["a", "b"], utilization_ratio=0.25)[1:]))
    assert [gpu["utilization_ratio"] for gpu in summary.to_json()["gpus"]] == [0.25, 0.25]


@pytest.mark.parametrize("own", [["a"], []])
def test_gpus_of_others_that_are_seen_before_the_jobs_are(tmp_path: Path, own: list[str]) -> None:
    """The node's GPUs are read before anybody says whose they are, also after a restart."""
    path = tmp_path / "s.json"
    both = gpus(["a", "b"], power_watts=100.0)[1:]
    whose = family("hpml_job_gpu_info", *(("17", uuid, 1.0) for uuid in own))
    summary = Summary(options(path), START)
    summary.note(seen(1, *both))
    assert {one["uuid"] for one in summary.to_json()["gpus"]} == {"a", "b"}
    summary.note(seen(2, whose, *both))
    summary.write(str(path))
    again = Summary(options(path), START)
    again.note(seen(4, *both))
    for one in (summary.to_json(), again.to_json()):
        assert [gpu["uuid"] for gpu in one["gpus"]] == own
        assert not [key for key in one["state"]["means"] if key.startswith("gpu/b")]


def test_looks_that_fall_beside_the_readings_lose_no_time(summary: Summary) -> None:
    """A GPU that is always busy: two looks in one second, none in the next."""
    for seconds, busy in ((1, 1.0), (2, 1.0), (3, 3.0), (4, 4.0), (5, 4.0), (6, 6.0)):
        summary.note(seen(seconds, *gpus(["a"], busy_seconds_total=busy)))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["utilization_ratio"] == 1


def test_a_single_look_is_a_summary(summary: Summary, tmp_path: Path) -> None:
    """A job of a second: the one reading at its end counts."""
    summary.note(seen(0.5, *gpus(["a"], sm_active_ratio=0.7, busy_seconds_total=0.25)))
    path = tmp_path / "n1.monitor.json"
    summary.write(str(path))
    (gpu,) = json.loads(path.read_text())["gpus"]
    assert (gpu["sm_active_ratio"], gpu["utilization_ratio"]) == (0.7, 0.5)


def told_twice(path: Path, first: float, second: float, name: str) -> dict[str, Any]:
    """The figures of a job whose exporter was killed between two readings of a counter."""
    for value in (first, second):
        summary = Summary(options(path), START)
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
        ("hpml_job_cpu_seconds_total", 100.0, 120.0, 120.0),  # of the control group, which lives on
        ("hpml_job_io_read_bytes_total", 500.0, 60.0, 500.0),  # of processes: some ended meanwhile
        ("hpml_train_samples_total", 64.0, 128.0, 128.0),
    ],
)
def test_a_killed_exporter_loses_nothing_of_the_job(
    tmp_path: Path, name: str, first: float, second: float, total: float
) -> None:
    """The next goes on from the file; nothing is counted twice."""
    told = told_twice(tmp_path / "s.json", first, second, name)
    assert {**told["job"], **told["training"]}[{**JOB_METRICS, **TRAIN_METRICS}[name]] == total


@pytest.mark.parametrize(
    ("name", "first", "second", "total"),
    [
        ("hpml_gpu_busy_seconds_total", 8.0, 4.0, 12.0),  # each exporter integrates from 0
        ("hpml_gpu_busy_seconds_total", 3.0, 4.0, 7.0),  # which one that lives longer does, too
        ("hpml_gpu_energy_joules_total", 1000.0, 1400.0, 400.0),  # the driver's lives on
    ],
)
def test_a_killed_exporter_loses_nothing_of_the_gpus(
    tmp_path: Path, name: str, first: float, second: float, total: float
) -> None:
    """Busy time of both is added; energy grew while nobody looked."""
    told = told_twice(tmp_path / "s.json", first, second, name)
    assert told["gpus"][0][GPU_METRICS[name]] == total


def test_a_collector_that_comes_late_after_a_restart(tmp_path: Path) -> None:
    """What it tells later than the others is still a new exporter's first word: no new bytes."""
    path = tmp_path / "s.json"
    first = Summary(options(path), START)
    first.note(seen(1, family("hpml_job_io_read_bytes_total", ("17", 500.0))))
    first.write(str(path))
    second = Summary(options(path), START)
    second.note(seen(1, family("hpml_job_cpu_seconds_total", ("17", "user", 1.0))))
    for value in (60.0, 70.0):
        second.note(seen(2, family("hpml_job_io_read_bytes_total", ("17", value))))
    assert second.to_json()["job"]["io_read_bytes"] == 510.0


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
    told = Summary(options(path), START).to_json()
    assert (told["starts"], told["job"]) == (1, {})


def test_numbers_that_are_none_are_passed_over(summary: Summary) -> None:
    """NaN of a driver spoils no sum."""
    summary.note(seen(1, *gpus(["a"], power_watts=100.0)))
    summary.note(seen(2, *gpus(["a"], power_watts=float("nan"))))
    (gpu,) = summary.to_json()["gpus"]
    assert gpu["power_watts"] == 100
