"""Metrics that a training tells of itself, summed over the ranks that a job has on this node."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec

__all__ = ["OF_COUNTERS", "OF_GAUGES", "SPECS"]

_JOB = ("cluster", "jobid")
_CHANNEL = "training channel (training_jobs/hpml_channel.py), through the job's node agent"
_VERIFIED = "the node agent's look at the ranks' live processes"

SAMPLES = MetricSpec(
    "hpml_train_samples_total",
    "counter",
    "Samples that the ranks on this node have trained on since the job began.",
    _JOB,
    source=_CHANNEL,
)
STEPS = MetricSpec(
    "hpml_train_steps_total",
    "counter",
    "Steps that the ranks on this node have taken, each rank's counted.",
    _JOB,
    source=_CHANNEL,
)
DATA_WAIT_SECONDS = MetricSpec(
    "hpml_train_data_wait_seconds_total",
    "counter",
    "Time that the ranks on this node have waited for their next batch, summed over ranks.",
    _JOB,
    "seconds",
    _CHANNEL,
)
COMM_SECONDS = MetricSpec(
    "hpml_train_comm_seconds_total",
    "counter",
    "Time spent in communication, summed over ranks, as measured by the named method.",
    (*_JOB, "method"),
    "seconds",
    f"{_CHANNEL}; only when the training names its method",
)
STEP_DURATION = MetricSpec(
    "hpml_train_step_duration_seconds",
    "histogram",
    "Duration of a step with its wait for data, over all ranks on this node.",
    _JOB,
    "seconds",
    _CHANNEL,
)
RANK_STEP_SECONDS = MetricSpec(
    "hpml_train_rank_step_duration_seconds",
    "gauge",
    "Mean duration of a step over the last minute, of the fastest and the slowest rank here; "
    "alike where ranks wait for each other in every step.",
    (*_JOB, "which"),
    "seconds",
    _CHANNEL,
)
RANK_DATA_WAIT_SECONDS = MetricSpec(
    "hpml_train_rank_data_wait_seconds",
    "gauge",
    "Mean wait for data in a step over the last minute, of the rank here that waits shortest and "
    "of the one that waits longest.",
    (*_JOB, "which"),
    "seconds",
    f"{_CHANNEL}; only when the training measures it",
)
LONGEST_DATA_WAIT = MetricSpec(
    "hpml_train_longest_data_wait_info",
    "info",
    "The global rank here that waited longest for data in a step of the last minute.",
    (*_JOB, "rank"),
    source=f"{_CHANNEL}; only when the training measures it",
)
RANKS = MetricSpec(
    "hpml_train_ranks",
    "gauge",
    "Ranks on this node that have reported in the last minute.",
    _JOB,
    source=_CHANNEL,
)
LOSS = MetricSpec(
    "hpml_train_loss",
    "gauge",
    "Training loss that was reported last, the mean over the ranks on this node.",
    _JOB,
    source=_CHANNEL,
)
ACCURACY = MetricSpec(
    "hpml_train_accuracy_ratio",
    "gauge",
    "Accuracy of the last evaluation, the mean over the ranks on this node.",
    _JOB,
    "ratio",
    _CHANNEL,
)
MFU = MetricSpec(
    "hpml_train_mfu_ratio",
    "gauge",
    "Model FLOP/s over the peak of the devices, the mean over the ranks on this node.",
    _JOB,
    "ratio",
    f"{_CHANNEL}; only when the training reports it",
)
BINDING_OK = MetricSpec(
    "hpml_rank_binding_ok",
    "gauge",
    "Whether every rank on this node runs on the CPUs, memory and devices planned for it.",
    _JOB,
    source=_VERIFIED,
)
BINDING_WRONG = MetricSpec(
    "hpml_rank_binding_wrong_ranks",
    "gauge",
    "Ranks on this node that do not run where they should.",
    _JOB,
    source=_VERIFIED,
)
FEED_REFUSED = MetricSpec(
    "hpml_train_feed_refused_total",
    "counter",
    "Connections and messages of training feeds that were not taken, by reason.",
    ("reason",),
    source="the exporter itself",
)

OF_COUNTERS = {"samples": SAMPLES, "steps": STEPS, "data_wait_seconds": DATA_WAIT_SECONDS}
"""By the names in `records.feed.COUNTERS`."""

OF_GAUGES = {"loss": LOSS, "accuracy": ACCURACY, "mfu": MFU}
"""By the names in `records.feed.GAUGES`."""

SPECS = (
    *OF_COUNTERS.values(),
    *(COMM_SECONDS, STEP_DURATION, RANK_STEP_SECONDS, RANK_DATA_WAIT_SECONDS, LONGEST_DATA_WAIT),
    RANKS,
    *OF_GAUGES.values(),
    *(BINDING_OK, BINDING_WRONG, FEED_REFUSED),
)
"""All of them."""
