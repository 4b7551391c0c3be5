"""The dashboard of a sweep: its runs side by side."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    HIGH_IS_GOOD,
    LOW_IS_GOOD,
    Column,
    bars,
    build_dashboard,
    each,
    figure,
    lines,
    link,
    listing,
    variable,
)

__all__ = ["sweep"]

_RUNS = '{cluster="$cluster", sweep="$sweep"}'
_RANGE = "[$__range]"
_BY_POINT = "max by (jobid, point)"

_SPEED = f"max by (cluster, jobid, point) (avg_over_time(hpml:run_samples:rate5m{_RUNS}{_RANGE}))"
_RANKS = f"max by (cluster, jobid, point) (max_over_time(hpml:run_ranks:max{_RUNS}{_RANGE}))"
_SMALLEST = f"max({_SPEED} and on (cluster, jobid) ({_RANKS} == on () group_left () min({_RANKS})))"
_SPEEDUP = f"{_SPEED} / on () group_left () {_SMALLEST}"
_EFFICIENCY = f"{_SPEEDUP} / ({_RANKS} / on () group_left () min({_RANKS}))"


def _of_runs(rule: str) -> str:
    """Return a recorded figure of each job of the sweep, with its point."""
    return f"{rule} * on (cluster, jobid) group_left (point) hpml:run_info{_RUNS}"


_CONTENT = [
    figure(
        "Runs now",
        "Runs of the sweep that are running.",
        "short",
        f"count(hpml:run_info{_RUNS}) or vector(0)",
    ),
    figure(
        "Runs seen",
        "Runs of the sweep that ran in the time range. Widen it to compare all of them.",
        "short",
        f"count(max by (jobid) (last_over_time(hpml:run_info{_RUNS}{_RANGE})))",
        spark=False,
    ),
    figure(
        "Fastest run",
        "Mean samples per second of the fastest run, while it ran in the time range.",
        "samples/s",
        f"max({_SPEED})",
        width=4,
        spark=False,
    ),
    figure(
        "Largest speedup",
        "Speed of the fastest run against the run with the fewest ranks.",
        "x",
        f"max({_SPEEDUP})",
        width=4,
        spark=False,
    ),
    figure(
        "Lowest efficiency",
        "Speedup against the number of ranks, of the run that scales worst. Good: above 80 %. If "
        "lower, look at its data wait and its network.",
        "percentunit",
        f"min({_EFFICIENCY})",
        width=4,
        steps=((None, "red"), (0.5, "orange"), (0.8, "green")),
        spark=False,
    ),
    figure(
        "GPU active",
        "Mean over the GPUs of the runs that are running.",
        "percentunit",
        f"avg({_of_runs('hpml:job_gpus_busy:rate5m / hpml:job_gpus:count')})",
        width=3,
        steps=HIGH_IS_GOOD,
    ),
    figure(
        "Data wait",
        "Largest share of a step that a running run waits for data. Good: below 20 %.",
        "percentunit",
        f"max({_of_runs('hpml:job_data_wait:ratio')})",
        width=3,
        steps=LOW_IS_GOOD,
    ),
    listing(
        "Runs side by side",
        "Means over the time range. Speedup and efficiency are against the run with the fewest "
        "ranks. Good: efficiency above 80 %. Open a run where it drops.",
        [
            _SPEED,
            _RANKS,
            _SPEEDUP,
            _EFFICIENCY,
            f"{_BY_POINT} ({_of_runs(f'avg_over_time(hpml:job_data_wait:ratio{_RANGE})')})",
            f"{_BY_POINT} ("
            + _of_runs(f"avg_over_time(hpml:job_gpus_busy:rate5m{_RANGE}) / hpml:job_gpus:count")
            + ")",
        ],
        [
            Column("point", "Point"),
            Column("jobid", "Job", link=link("hpml-job", jobid="${__value.raw}"), width=90),
            Column("B", "Ranks", width=80),
            Column("A", "Samples/s", "samples/s", width=130),
            Column("C", "Speedup", "x", width=100),
            Column("D", "Efficiency", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("E", "Data wait", "percentunit", width=100),
            Column("F", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
        ],
        width=24,
        height=8,
        sort="Samples/s",
        none="No run of this sweep in this time range",
    ),
    lines(
        "Samples per second",
        "Speed of each run. Runs of a scaling sweep should lie apart as their numbers of ranks do.",
        "samples/s",
        {"{{point}}": each(f"hpml:run_samples:rate5m{_RUNS}", "point")},
        width=12,
        height=9,
    ),
    bars(
        "Speedup",
        "Speed of each run against the run with the fewest ranks. Good: as many times as it has "
        "more ranks.",
        "x",
        {"{{point}}": f"topk(25, {_SPEEDUP})"},
        width=12,
        height=9,
        top=None,
        steps=((None, "blue"),),
    ),
    "What differs",
    lines(
        "GPU active",
        "Share of time in which the GPUs of each run ran a kernel.",
        "percentunit",
        {"{{point}}": each(_of_runs("hpml:job_gpus_busy:rate5m / hpml:job_gpus:count"), "point")},
        top=1,
    ),
    lines(
        "Data wait",
        "Share of a step that each run waits for data. Rising with the number of ranks: the storage "
        "is shared by too many, stage the data.",
        "percentunit",
        {"{{point}}": each(_of_runs("hpml:job_data_wait:ratio"), "point")},
    ),
    lines(
        "Loss",
        "Training loss of each run, mean over its ranks.",
        "short",
        {
            "{{point}}": each(
                _of_runs('avg by (cluster, jobid) (hpml_train_loss{cluster="$cluster"})'), "point"
            )
        },
        none="The training does not report it",
    ),
]


def sweep() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-sweep",
        "Sweep",
        "The runs of a sweep side by side: speed, speedup, and what holds the slow ones up.",
        [variable("sweep", "Sweep", 'label_values(hpml:run_info{cluster="$cluster"}, sweep)')],
        _CONTENT,
        since="now-6h",
    )
