"""The controller's own metrics (OpenMetrics over HTTP, from 25.11 on), by prometheus-client.

`slurm_node_memory_bytes` and its like hold MiB whatever they are called (observed with 26.05.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.slurm_sdiag import Diagnostics

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Metrics", "diagnostics_of", "parse_metrics"]


class Metrics:
    """Values by name and labels."""

    def __init__(self, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._values = dict(values)

    def __len__(self) -> int:
        return len(self._values)

    def value(self, name: str, **labels: str) -> float | None:
        """The value under exactly these labels; None where there is none."""
        return self._values.get((name, frozenset(labels.items())))

    def count(self, name: str, **labels: str) -> int | None:
        """The same as a whole number."""
        found = self.value(name, **labels)
        return None if found is None or found != found else int(found)  # noqa: PLR0124 - NaN

    def by(self, name: str, label: str) -> dict[str, float]:
        """All values of a name that has this label, by the label's value."""
        return dict(self._of(name, label))

    def _of(self, name: str, label: str) -> Iterator[tuple[str, float]]:
        for (found, labels), value in self._values.items():
            if found == name:
                for key, one in labels:
                    if key == label:
                        yield one, value


def parse_metrics(text: str) -> Metrics:
    """Return the values of an answer, or of several after each other.

    Raises:
        InputError: prometheus-client is not installed.
        SchedulerUnavailable: it is no such text.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            "reading metrics needs prometheus-client",
            hint="pip install 'hpml-orchestrator[export]'",
        ) from error
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, frozenset(sample.labels.items())] = float(sample.value)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise SchedulerUnavailable(f"these are no metrics: {error}") from error
    return Metrics(values)


def diagnostics_of(metrics: Metrics) -> Diagnostics:
    """Return what `sdiag` would say, as far as the metrics of the scheduler tell it."""
    return Diagnostics(
        at=metrics.value("slurm_sched_stats_timestamp"),
        since=metrics.value("slurm_last_proc_req_start"),
        server_threads=metrics.count("slurm_server_thread_cnt"),
        agent_queue=metrics.count("slurm_agent_queue_size"),
        dbd_agent_queue=metrics.count("slurm_slurmdbd_queue_size"),
        jobs_submitted=metrics.count("slurm_sdiag_jobs_submitted"),
        jobs_started=metrics.count("slurm_sdiag_jobs_started"),
        jobs_completed=metrics.count("slurm_sdiag_jobs_completed"),
        jobs_canceled=metrics.count("slurm_sdiag_jobs_canceled"),
        jobs_failed=metrics.count("slurm_sdiag_jobs_failed"),
        jobs_pending=metrics.count("slurm_sdiag_jobs_pending"),
        jobs_running=metrics.count("slurm_sdiag_jobs_running"),
        main_last_us=metrics.count("slurm_schedule_cycle_last"),
        main_max_us=metrics.count("slurm_schedule_cycle_max"),
        main_mean_us=metrics.count("slurm_sched_mean_cycle"),
        main_cycles=metrics.count("slurm_schedule_cycle_cnt"),
        main_queue=metrics.count("slurm_schedule_queue_len"),
        backfill_last_us=metrics.count("slurm_bf_cycle_last"),
        backfill_max_us=metrics.count("slurm_bf_cycle_max"),
        backfill_mean_us=metrics.count("slurm_bf_mean_cycle"),
        backfill_cycles=metrics.count("slurm_bf_cycle_cnt"),
        backfill_queue=metrics.count("slurm_bf_queue_len"),
        backfill_at=metrics.value("slurm_bf_when_last_cycle") or None,
        backfilled_jobs=metrics.count("slurm_backfilled_jobs"),
    )
