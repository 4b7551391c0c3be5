"""The dashboard of a sweep: its runs side by side."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    Panel,
    bars,
    build_dashboard,
    each,
    figure,
    lines,
    listing,
    or_zero,
    variable,
)

_RUNS = '{cluster="$cluster", sweep="$sweep", sweep!=""}'  # Job's link may have none

# Averages over each run's time, so runs at different times are comparable.
_SPEED = f"max by (jobid, point) (avg_over_time(hpml:run_samples:rate5m{_RUNS}[$__range]))"
_SEEN = f"max by (jobid, point, run) (last_over_time(hpml:run_info{_RUNS}[$__range]))"
_JOBS = 'max by (jobid, array) (last_over_time(hpml:job_info{cluster="$cluster"}[$__range]))'
_RANKS = f"max by (jobid, point) (max_over_time(hpml:run_ranks:max{_RUNS}[$__range]))"
_FEWEST = f"on () group_left () min({_RANKS})"
_BASE = f"on () group_left () (max({_SPEED} and on (jobid) ({_RANKS} == {_FEWEST})) > 0)"
# A sweep with one number of ranks has no speedup.
_SPEEDUP = f"({_SPEED} / {_BASE} and on () (max({_RANKS}) > min({_RANKS})))"
_EFFICIENCY = f"{_SPEEDUP} / ({_RANKS} / {_FEWEST})"


def _of_runs(series: str) -> str:
    return f"{series} * on (cluster, jobid) group_left (point) hpml:run_info{_RUNS}"


_NAMED = "{{jobid}} (point {{point}})"
_BUSY = _of_runs("hpml:job_gpu_busy:avg")
_WAITS = _of_runs("hpml:job_data_wait:ratio")
_LOSS = _of_runs('avg by (cluster, jobid) (hpml_train_loss{cluster="$cluster"})')

_ABOUT = """
Runs: Runs that are running, and those that ran in the time range. Widen it to compare all.
Most samples/s: Mean speed of the fastest run, while it ran in the time range.
Largest speedup: Speed of the fastest run against the run with the fewest ranks, where numbers of
    ranks differ. Good: as many times as it has more ranks.
Lowest efficiency: Speedup against the number of ranks, of the run that scales worst. Good: above
    80 %. If lower, look at its data wait and network.
GPU active: Mean over the running runs. Good: above 60 %. If lower, see which run differs.
Largest data wait: Share of a step that a running run waits. Good: below 10 %. Else stage the data.
Runs side by side: Means of the time range, GPU active and data wait as they are now. Speedup is
    against the run with the fewest ranks. Good: efficiency above 80 %. If lower, open that run.
Samples per second: Speed of each run. Runs should lie apart as their numbers of ranks do.
Speedup: Speed against the run with the fewest ranks. Good: as many times as there are more ranks.
Data wait: Share of a step. Rising with the number of ranks: too many share the storage, stage.
Loss: Training loss, mean over ranks. Worse with more ranks: learning rate and warm-up.
"""

_CONTENT: list[Panel | str] = [
    figure(
        "Runs",
        "count",
        {
            "running": or_zero(f"count(count by (run) (hpml:run_info{_RUNS}))", _SEEN),
            # a run that continues under another job id is one run
            "seen": f"count(count by (run) ({_SEEN}))",
        },
    ),
    figure("Most samples/s", "count", f"max({_SPEED})", width=4, none="not reported"),
    figure("Largest speedup", "times", f"max({_SPEEDUP})", width=4, none="same ranks"),
    figure("Lowest efficiency", "scaling", f"min({_EFFICIENCY})", width=4, none="same ranks"),
    figure("GPU active", "use", f"avg({_BUSY})", width=4),
    figure("Largest data wait", "wait", f"max({_WAITS})", width=5, none="not reported"),
    listing(
        "Runs side by side",
        "point jobid array run",
        {
            "-": _SEEN,
            "-array": f"{_JOBS} and on (jobid) {_SEEN}",
            "Ranks": _RANKS,
            "Speedup": _SPEEDUP,
            "Efficiency": _EFFICIENCY,
            "GPU active": f"max by (jobid, point) ({_BUSY})",
            "Data wait": f"max by (jobid, point) ({_WAITS})",
            "Samples/s": _SPEED,
        },
        width=24,
        sort="Samples/s",
        none="No run of this sweep in this time range",
    ),
    lines(
        "Samples per second",
        "count",
        {_NAMED: each(f"hpml:run_samples:rate5m{_RUNS}", "point")},
        width=12,
        height=10,
    ),
    bars(
        "Speedup",
        "times",
        {_NAMED: f"topk(25, {_SPEEDUP})"},
        width=12,
        height=10,
        none="same ranks",
    ),
    "What differs",
    lines("GPU active", "share", {_NAMED: each(_BUSY, "point")}),
    lines("Data wait", "share", {_NAMED: each(_WAITS, "point")}),
    lines("Loss", "count", {_NAMED: each(_LOSS, "point")}),
]


def sweep() -> Dashboard:
    """Return the dashboard."""
    sweeps = 'label_values(hpml:run_info{cluster="$cluster"}, sweep)'
    return build_dashboard(
        "hpml-sweep",
        "The runs of a sweep side by side: speed, speedup, and what holds the slow ones up.",
        _ABOUT,
        [variable("sweep", "Sweep", sweeps)],
        _CONTENT,
        since="now-6h",
    )
