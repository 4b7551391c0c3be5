"""The dashboard of a user: their jobs, and how well these use what they have."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    COUNT,
    FULL,
    SHARE,
    USE,
    WAIT,
    build_dashboard,
    each,
    figure,
    lines,
    listing,
    select,
    variable,
)

__all__ = ["user"]

_MINE = 'hpml:job_info{cluster="$cluster", user="$user"}'
_NAMED = "{{jobid}} {{name}}"


def _mine(series: str) -> str:
    """Return series of each of the user's jobs, with its name."""
    return f"({series}) * on (cluster, jobid) group_left (name) {_MINE}"


def _slurm(metric: str, **labels: str) -> str:
    return select(metric, cluster="~$cluster|", user="$user", **labels)


_GPUS = _mine("hpml:job_gpus:count")
_BUSY = _mine("hpml:job_gpus_busy:rate5m")
_SHARE = _mine("hpml:job_gpus_busy:rate5m / hpml:job_gpus:count")
_WAITS = _mine("hpml:job_data_wait:ratio")
_MEMORY = _mine("hpml:job_memory_used:ratio")
_SWEEPS = f"hpml:run_info * on (cluster, jobid) group_left () {_MINE}"

_CONTENT = [
    figure(
        "Jobs running",
        COUNT,
        f"count({_MINE}) or vector(0)",
        "Jobs of the user that run on nodes with an exporter. Fewer than squeue shows: see Exporters.",
    ),
    figure(
        "Jobs pending",
        COUNT,
        f"sum({_slurm('hpml_slurm_user_jobs', state='pending')})",
        "Jobs of the user that wait. hpml export slurm shows them with --users.",
        none="not exported",
    ),
    figure(
        "GPUs",
        COUNT,
        f"sum({_GPUS}) or vector(0)",
        "GPUs that the user's jobs have. Those of idle notebooks count too: end them.",
    ),
    figure(
        "GPU active",
        USE,
        f"sum({_BUSY}) / sum({_GPUS})",
        "Share of time with a kernel on these GPUs. Good: above 60 %. If lower, open the red jobs.",
    ),
    figure(
        "GPUs wasted",
        COUNT,
        f"sum({_mine('hpml:job_gpus_wasted:sum')})",
        "GPUs of the user's jobs less busy ones. Good: near 0: fair share counts them too.",
    ),
    figure(
        "Data wait",
        WAIT,
        f"max({_WAITS})",
        "Of the job that waits most, as a share of a step. Good: below 20 %. Else stage its data.",
        none="not reported",
    ),
    figure(
        "Memory",
        FULL,
        f"max({_MEMORY})",
        "Of the job nearest to its limit. Above 95 % the kernel soon ends processes: ask for more.",
        none="no limit",
    ),
    figure(
        "Fair share",
        SHARE,
        f"max({_slurm('hpml_slurm_user_fairshare_ratio')})",
        "Slurm's factor (shown with --users). Near 0, much was used lately: others' jobs go first.",
        none="not exported",
    ),
    listing(
        "Jobs",
        "jobid name partition sweep",
        {
            "": (COUNT, f"max by (jobid, name, partition) ({_MINE})"),
            "-": (COUNT, f"max by (jobid, sweep) ({_SWEEPS})"),
            "GPU active": (USE, f"max by (jobid) ({_SHARE})"),
            "Data wait": (WAIT, f"max by (jobid) ({_WAITS})"),
            "CPUs busy": (COUNT, f"sum by (jobid) ({_mine('hpml:job_cpus_busy:rate5m')})"),
            "Memory": (FULL, f"max by (jobid) ({_MEMORY})"),
            "Samples/s": (COUNT, f"sum by (jobid) ({_mine('hpml:train_samples:rate5m')})"),
            "GPUs": (COUNT, f"max by (jobid) ({_GPUS})"),
        },
        "The user's jobs, the largest first. Open one that is not green to see what it waits for.",
        width=24,
        height=9,
        sort="GPUs",
        none="No job of this user runs",
    ),
    lines(
        "GPU active",
        SHARE,
        {_NAMED: each(_SHARE, "jobid")},
        "Share of time with a kernel on the GPUs of each job. Good: above 60 %.",
        height=9,
        top=1,
    ),
    lines(
        "Data wait",
        SHARE,
        {_NAMED: each(_WAITS, "jobid")},
        "Share of a step that each job waits for data. Good: below 20 %. Otherwise stage it.",
        height=9,
        none="No training reports it",
    ),
    lines(
        "GPUs",
        COUNT,
        {"allocated": f"sum({_GPUS})", "busy": f"sum({_BUSY})"},
        "GPUs that the user's jobs have, and how many of these are busy. Good: close together.",
        height=9,
    ),
]


def user() -> Dashboard:
    """Return the dashboard."""
    users = 'label_values(hpml:job_info{cluster="$cluster"}, user)'
    return build_dashboard(
        "hpml-user",
        "The jobs of one user: which run, which wait, and which could do better.",
        [variable("user", "User", users)],
        _CONTENT,
        since="now-3h",
    )
