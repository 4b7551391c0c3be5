"""Jobs in a Prometheus with hpml's recording rules: their users and their figures.

This takes two instant queries, however many jobs there are.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from string import Template
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request

from hpml_orchestrator.jobfile.text import opener_for, split_login
from hpml_orchestrator.records.texts import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TIMEOUT_SECONDS = 3.0
"""Longest wait for an answer about jobs of now, or about one job."""

_WEEKS_SECONDS = 60.0  # the same about all jobs of weeks

_MOST_BYTES = 32 << 20

_JOB = "by (cluster, jobid)"
_RATE = "[5m]"
_STEP_SECONDS = 15
_MOST_STEPS = 500  # of a subquery


def _on_nodes(metric: str) -> str:
    node = "on (instance, job, cluster, jobid) group_left () hpml:job_exporter{$jobs}"
    return f"sum {_JOB} ({metric}{{$jobs}} * {node})"


def _of_gpus(aggregation: str, figure: str) -> str:
    job = "on (uuid) group_left (cluster, jobid) hpml:gpu_job{$jobs}"
    return f"{aggregation} {_JOB} ({figure} * {job})"


_WAITS = "hpml_train_rank_data_wait_seconds{$jobs, which="
_STEPS = "hpml_train_rank_step_duration_seconds{$jobs, which="
_SLOWEST = f'max {_JOB} ({_STEPS}"slowest"}})'
_LIMIT = (
    "(hpml_job_memory_limit_bytes{$jobs}"
    " * on (instance, job, cluster, jobid) group_left (node) hpml:job_exporter{$jobs})"
)
_THROTTLED = (
    "sum by (uuid) (max by (uuid, reason) (rate(hpml_gpu_throttled_seconds_total"
    f'{{$gpus, reason=~"hw_.*|sw_thermal|power_brake"}}{_RATE})))'
)

_FIGURES = {
    "started": f"max {_JOB} (hpml_job_start_timestamp_seconds{{$jobs}})",
    "ends": f"max {_JOB} (hpml_job_end_timestamp_seconds{{$jobs}})",
    "gpus": "hpml:job_gpus:count{$jobs}",
    "gpus_allocated": _on_nodes("hpml_job_gpus_allocated"),
    "gpus_used": _on_nodes("hpml_job_gpus_used"),
    "gpus_busy": "hpml:job_gpus_busy:rate5m{$jobs}",
    "gpus_busy_now": _of_gpus("sum", "max by (uuid) (hpml_gpu_utilization_ratio{$gpus})"),
    "gpu_memory_used_bytes": _of_gpus("sum", "max by (uuid) (hpml_gpu_memory_used_bytes{$gpus})"),
    "gpu_memory_total_bytes": _of_gpus("sum", "max by (uuid) (hpml_gpu_memory_total_bytes{$gpus})"),
    "gpu_throttled_ratio": _of_gpus("max", _THROTTLED),
    "cpus": _on_nodes("hpml_job_cpus"),
    "cpus_busy": f"sum {_JOB} (hpml:job_cpus_busy:rate5m{{$jobs}})",
    "memory_bytes": f"max {_JOB} (hpml:job_memory_bytes:sum{{$jobs}})",
    "memory_ratio": f"max {_JOB} (hpml:job_memory_bytes:sum{{$jobs}}"
    f" / on (cluster, node, jobid) {_LIMIT})",
    "read_bytes_per_second": f"sum {_JOB} (hpml:job_io_read_bytes:rate5m{{$jobs}})",
    "write_bytes_per_second": f"sum {_JOB} (hpml:job_io_write_bytes:rate5m{{$jobs}})",
    "samples_per_second": f"sum {_JOB} (hpml:train_samples:rate5m{{$jobs}})",
    "data_wait_ratio": f"sum {_JOB} (rate(hpml_train_data_wait_seconds_total{{$jobs}}{_RATE}))"
    f" / sum {_JOB} (rate(hpml_train_step_duration_seconds_sum{{$jobs}}{_RATE}))",
    "wait_spread_ratio": f'(max {_JOB} ({_WAITS}"longest"}})'
    f' - min {_JOB} ({_WAITS}"shortest"}})) / {_SLOWEST}',
    "longest_waiting_rank": f"topk {_JOB} (1, hpml_train_longest_data_wait_info{{$jobs}}"
    f' * on (instance, job, cluster, jobid) group_left () {_WAITS}"longest"}})',
    "step_spread_ratio": f'1 - min {_JOB} ({_STEPS}"fastest"}}) / {_SLOWEST}',
}
"""Queries by the name of the figure, which docs/top.md explains; rates are over 5 min."""

_WHO = """\
max by (cluster, jobid, user, name) (hpml:job_info{$whose})
or (max by (cluster, jobid, run) (hpml_run_info) or max by (cluster, jobid, uuid) (hpml:gpu_job))
  and on (cluster, jobid) hpml:job_info{$whose}"""


_OVER_NODES = {
    "mean_cpus": "avg_over_time(hpml:job_cpus_busy:rate5m{$job}$over)",
    "memory_peak_bytes": "max_over_time(hpml:job_memory_bytes:sum{$job}$over)",
    "io_read_bytes": "avg_over_time(hpml:job_io_read_bytes:rate5m{$job}$over) * $seconds",
    "io_write_bytes": "avg_over_time(hpml:job_io_write_bytes:rate5m{$job}$over) * $seconds",
    **{
        name: f"max_over_time((hpml_job_{name}{{$job}} * on (instance, job, cluster, jobid)"
        " group_left (node) hpml:job_exporter{$job})$steps)"
        for name in ("cpus", "memory_limit_bytes", "gpus_allocated", "gpus_used")
    },
}
_OWN = (
    " * on (uuid) group_left (node, name) max by (uuid, node, name) (hpml:gpu_info{$job}))$steps)"
)
_OVER_GPUS = {
    "utilization_ratio": "avg_over_time(hpml:gpu_busy:rate2m{$job}$over)",
    "sm_active_ratio": "avg_over_time(hpml:gpu_sm_active:ratio{$job}$over)",
    "tensor_active_ratio": "avg_over_time(hpml:gpu_tensor_active:ratio{$job}$over)",
    "power_watts": "avg_over_time(hpml:gpu_power_watts:max{$job}$over)",
    "power_limit_watts": f"max_over_time((max by (uuid) (hpml_gpu_power_limit_watts){_OWN}",
    "memory_peak_bytes": f"max_over_time((max by (uuid) (hpml_gpu_memory_used_bytes){_OWN}",
    "memory_total_bytes": f"max_over_time((max by (uuid) (hpml_gpu_memory_total_bytes){_OWN}",
    "throttled_seconds": "avg_over_time((max by (uuid, reason)"
    f" (rate(hpml_gpu_throttled_seconds_total[2m])){_OWN} * $seconds",
    "xid_errors": "avg_over_time((max by (uuid, xid)"
    f" (rate(hpml_gpu_xid_errors_total[2m])){_OWN} * $seconds",
}
"""The same of one job over its whole time, by the names that records have; `reason` and `xid`
distinguish the series of the last two."""


class PrometheusError(Exception):
    """A Prometheus gave no usable answer; the message is one line."""


@dataclass
class MeasuredJob:
    """A running job in Prometheus."""

    cluster: str
    job_id: str
    user: str = ""
    name: str = ""
    run: str = ""  # id of its run; empty if not started by hpml
    gpus: set[str] = field(default_factory=set)  # UUIDs
    figures: dict[str, float] = field(default_factory=dict)


class Prometheus:
    """A Prometheus, or what answers its queries.

    Args:
        url: its address; user and password in it are sent as basic authentication.
        authorization: the header that it wants, from `jobfile.address.read_credentials`.

    Attributes:
        url: the address without user and password, to be shown.

    Raises:
        InputError: not an http or https address.
    """

    def __init__(self, url: str, authorization: str = "") -> None:
        self.url, login = split_login(url, field="--prometheus")
        self._authorization = authorization or login
        self._opener = opener_for(self.url)

    def jobs(self, user: str) -> list[MeasuredJob]:
        """Return the running jobs of a user; of all users when empty.

        Raises:
            PrometheusError: it gives no usable answer.
        """
        whose = f"user={json.dumps(user)}" if user else ""
        jobs: dict[tuple[str, str], MeasuredJob] = {}
        for labels, _ in self._query(Template(_WHO).substitute(whose=whose)):
            key = labels.get("cluster", ""), labels["jobid"]
            job = jobs.setdefault(key, MeasuredJob(*key))
            job.user = labels.get("user", job.user)
            job.name = printable(labels.get("name", job.name))
            job.run = labels.get("run", job.run)
            job.gpus |= {labels["uuid"]} if "uuid" in labels else set()
        if not jobs:
            return []
        # All jobs in one query, chosen by label: one per job would be a few hundred on a busy
        # cluster, at every refresh of `hpml top`.
        clusters, ids = zip(*jobs, strict=True)
        uuids = {uuid for job in jobs.values() for uuid in job.gpus}
        selectors = {
            "jobs": f"cluster=~{any_of(clusters)}, jobid=~{any_of(ids)}",
            "gpus": f"uuid=~{any_of(uuids)}",
        }
        queries = [
            f'label_replace({query}, "figure", "{name}", "", "")'
            for name, query in _FIGURES.items()
        ]
        for labels, value in self._query(Template("\nor ".join(queries)).substitute(selectors)):
            measured = jobs.get((labels.get("cluster", ""), labels["jobid"]))
            if measured is not None:
                rank = labels.get("rank", "")  # of which the label and not the value counts
                measured.figures[labels["figure"]] = float(rank) if rank.isdecimal() else value
        return list(jobs.values())

    def job_over(
        self, cluster: str, job_id: str, *, seconds: float, ended: float
    ) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of the figures of one job over its time.

        The label `figure` has the name as in a record; `node`, of GPUs also `uuid`, whose it is.

        Raises:
            PrometheusError: it gives no usable answer.
        """
        whole = max(1, round(seconds))
        selector = f"jobid={json.dumps(job_id)}"
        selector += f", cluster={json.dumps(cluster)}" if cluster else ""
        words = {
            "job": selector,
            "seconds": str(whole),
            "over": f"[{whole}s]",
            "steps": f"[{whole}s:{max(_STEP_SECONDS, whole // _MOST_STEPS)}s]",
        }
        # a GPU and its node have figures of the same name: `of` keeps the two apart
        queries = [
            f'label_replace(label_replace({query}, "figure", "{name}", "", ""), '
            f'"of", "{of}", "", "")'
            for of, figures in (("node", _OVER_NODES), ("gpu", _OVER_GPUS))
            for name, query in figures.items()
        ]
        return self._query(Template("\nor ".join(queries)).substitute(words), at=ended)

    def figures(
        self, queries: Mapping[str, str], *, at: float
    ) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each sample of several queries, at a time.

        The label `figure` has the name of the query. They may read weeks of data.

        Raises:
            PrometheusError: it gives no usable answer.
        """
        named = [
            f'label_replace({query}, "figure", "{name}", "", "")' for name, query in queries.items()
        ]
        return self._query("\nor ".join(named), at=at, seconds=_WEEKS_SECONDS)

    def _query(
        self, promql: str, at: float | None = None, *, seconds: float = TIMEOUT_SECONDS
    ) -> list[tuple[dict[str, str], float]]:
        words = {"query": promql, "timeout": f"{seconds:g}s"}
        data = urlencode(words if at is None else {**words, "time": f"{at:.3f}"}).encode()
        request = Request(f"{self.url}/api/v1/query", data)  # noqa: S310 - http or https
        if self._authorization:  # which a redirection must not take to another host
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                result = json.loads(answer.read(_MOST_BYTES))["data"]["result"]
            samples = [(series["metric"], float(series["value"][1])) for series in result]
        except HTTPError as error:
            raise PrometheusError(f"{self.url}: {_refusal(error)}") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", None) or reason
            raise PrometheusError(f"{self.url}: no answer: {text}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise PrometheusError(f"{self.url}: not a Prometheus: the answer is no JSON") from error
        # PromQL divides by zero without an error, and JSON has neither NaN nor infinity.
        return [sample for sample in samples if math.isfinite(sample[1])]


def _refusal(error: HTTPError) -> str:
    """Return an error message for an HTTP status other than 200."""
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return (
            f"HTTP {error.code}: name a file with user:password or a token: --prometheus-auth FILE"
        )
    try:
        return printable(str(json.loads(error.read(_MOST_BYTES))["error"]))
    except (OSError, ValueError, LookupError, TypeError):
        return f"not a Prometheus: HTTP {error.code}"


def any_of(values: Iterable[str]) -> str:
    """Return a regular expression that matches any of some values, in quotes as PromQL has it."""
    return json.dumps("|".join(sorted({re.escape(value) for value in values})))
