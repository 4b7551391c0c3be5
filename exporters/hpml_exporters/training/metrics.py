"""Metrics that a training reports, summed over the ranks of a job on this node."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec, metric

_CHANNEL = "training channel (training_jobs/hpml_channel.py), through the job's node agent"
_MEASURED = f"{_CHANNEL}; only when the training measures it"
_VERIFIED = "the node agent's look at the ranks' live processes"


def _of_job(name: str, help_: str, labels: str = "", *, source: str) -> MetricSpec:
    return metric(name, help_, f"cluster jobid {labels}", source=source)


SAMPLES = _of_job(
    "hpml_train_samples_total",
    "Samples that the ranks on this node have trained on since the job began.",
    source=_CHANNEL,
)
STEPS = _of_job(
    "hpml_train_steps_total",
    "Steps that the ranks on this node have taken, each rank's counted.",
    source=_CHANNEL,
)
DATA_WAIT_SECONDS = _of_job(
    "hpml_train_data_wait_seconds_total",
    "Time that the ranks on this node have waited for their next batch, summed over ranks.",
    source=_CHANNEL,
)
COMM_SECONDS = _of_job(
    "hpml_train_comm_seconds_total",
    "Time spent in communication, summed over ranks, as measured by the named method.",
    "method",
    source=f"{_CHANNEL}; only when the training names its method",
)
TRANSFER_SECONDS = _of_job(
    "hpml_train_transfer_seconds_total",
    "Time that the ranks on this node have copied batches to their devices, summed over ranks.",
    source=_MEASURED,
)
WAIT_SECONDS = _of_job(
    "hpml_train_wait_seconds_total",
    "Time that the ranks on this node have waited for slower ranks before they averaged gradients, "
    "summed over ranks.",
    source=_MEASURED,
)
SAVE_SECONDS = _of_job(
    "hpml_train_save_seconds_total",
    "Time that the ranks on this node have spent on checkpoints, summed over ranks.",
    source=_MEASURED,
)
EVALUATION_SECONDS = _of_job(
    "hpml_train_evaluation_seconds_total",
    "Time that the ranks on this node have spent on evaluations, summed over ranks.",
    source=_MEASURED,
)
STEP_DURATION = MetricSpec(
    "hpml_train_step_duration_seconds",
    "histogram",
    "Duration of a step with its wait for data, over all ranks on this node.",
    ("cluster", "jobid"),
    "seconds",
    _CHANNEL,
)
RANK_STEP_SECONDS = _of_job(
    "hpml_train_rank_step_duration_seconds",
    "Mean duration of a step over the last minute, of the fastest and the slowest rank here; "
    "alike where ranks wait for each other in every step.",
    "which",
    source=_CHANNEL,
)
RANK_DATA_WAIT_SECONDS = _of_job(
    "hpml_train_rank_data_wait_seconds",
    "Mean wait for data in a step over the last minute, of the rank here that waits shortest and "
    "of the one that waits longest.",
    "which",
    source=_MEASURED,
)
LONGEST_DATA_WAIT = _of_job(
    "hpml_train_longest_data_wait_info",
    "The global rank here that waited longest for data in a step of the last minute.",
    "rank",
    source=_MEASURED,
)
RANK_WAIT_SECONDS = _of_job(
    "hpml_train_rank_wait_seconds",
    "Mean wait for slower ranks in a step over the last minute, of the rank here that waits "
    "shortest and of the one that waits longest.",
    "which",
    source=_MEASURED,
)
SHORTEST_WAIT = _of_job(
    "hpml_train_shortest_wait_info",
    "The global rank here that waited shortest for others in a step of the last minute: if others "
    "wait long, they wait for this one.",
    "rank",
    source=_MEASURED,
)
RANKS = _of_job(
    "hpml_train_ranks", "Ranks on this node that have reported in the last minute.", source=_CHANNEL
)
LOSS = _of_job(
    "hpml_train_loss",
    "Training loss that was reported last, the mean over the ranks on this node.",
    source=_CHANNEL,
)
ACCURACY = _of_job(
    "hpml_train_accuracy_ratio",
    "Accuracy of the last evaluation, the mean over the ranks on this node.",
    source=_CHANNEL,
)
MFU = _of_job(
    "hpml_train_mfu_ratio",
    "Model FLOP/s over the peak of the devices, the mean over the ranks on this node.",
    source=f"{_CHANNEL}; only when the training reports it",
)
BINDING_OK = _of_job(
    "hpml_rank_binding_ok",
    "Whether every rank on this node runs on the CPUs, memory and devices planned for it.",
    source=_VERIFIED,
)
BINDING_WRONG = _of_job(
    "hpml_rank_binding_wrong_ranks",
    "Ranks on this node that do not run on the planned CPUs, memory or devices.",
    source=_VERIFIED,
)
FEED_REFUSED = metric(
    "hpml_train_feed_refused_total",
    "Connections and messages of training feeds that were not taken, by reason.",
    "reason",
    source="the exporter itself",
)

OF_COUNTERS = {"samples": SAMPLES, "steps": STEPS, "data_wait_seconds": DATA_WAIT_SECONDS}
"""By the names in `records.feed.COUNTERS`."""

OF_PARTS = {
    "transfer_seconds": TRANSFER_SECONDS,
    "wait_seconds": WAIT_SECONDS,
    "save_seconds": SAVE_SECONDS,
    "evaluation_seconds": EVALUATION_SECONDS,
}
"""The same, of what few trainings measure."""

OF_GAUGES = {"loss": LOSS, "accuracy": ACCURACY, "mfu": MFU}
"""By the names in `records.feed.GAUGES`."""

SPECS = (
    *OF_COUNTERS.values(),
    *(COMM_SECONDS, *OF_PARTS.values(), STEP_DURATION, RANK_STEP_SECONDS),
    *(RANK_DATA_WAIT_SECONDS, LONGEST_DATA_WAIT, RANK_WAIT_SECONDS, SHORTEST_WAIT, RANKS),
    *OF_GAUGES.values(),
    *(BINDING_OK, BINDING_WRONG, FEED_REFUSED),
)
"""All of them."""
