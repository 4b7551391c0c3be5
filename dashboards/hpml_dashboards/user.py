"""The dashboard of a user: their jobs, and how well these use their resources."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    Panel,
    build_dashboard,
    each,
    figure,
    lines,
    listing,
    or_zero,
    select,
    variable,
)

_MINE = 'hpml:job_info{cluster="$cluster", user="$user"}'
_SEEN = f"last_over_time({_MINE}[$__range])"
_OTHERS = '{cluster=~"$cluster|"}'
# Whether the Slurm exporter shows users (--users). A user without jobs has no series, so query
# those of all users, and fair shares in case the queue is empty.
_SHOWN = (
    f"last_over_time(hpml_slurm_user_jobs{_OTHERS}[$__range]) "
    f"or hpml_slurm_user_fairshare_ratio{_OTHERS}"
)
_NAMED = "{{jobid}} {{name}}"


def _mine(series: str) -> str:
    return f"({series}) * on (cluster, jobid) group_left (name) {_MINE}"


def _slurm(metric: str, **labels: str) -> str:
    return select(f"hpml_slurm_{metric}", cluster="~$cluster|", user="$user", **labels)


_GPUS = _mine("hpml:job_gpus:count")
_BUSY = _mine("hpml:job_gpus_busy:rate5m")
_SHARE = _mine("hpml:job_gpu_busy:avg")
_WAITS = _mine("hpml:job_data_wait:ratio")
_MEMORY = _mine("hpml:job_memory_used:ratio")
_SWEEPS = f"hpml:run_info * on (cluster, jobid) group_left () {_MINE}"

_ABOUT = """
Jobs running: On nodes with an exporter. Fewer than squeue shows: see Exporters.
Jobs pending: Jobs of the user that wait. Needs hpml export slurm --users.
GPUs: GPUs that the user's jobs have. Those of idle notebooks count too: end them.
GPU active: Share of time with a kernel. Good: above 60 %. If lower, open the red jobs.
GPUs wasted: GPUs of the user's jobs less busy ones. Good: near 0: fair share counts them too.
Data wait: Of the job that waits most. Good: below 10 % of a step. Else stage its data.
Memory: Of the job nearest to its limit. Above 95 % the kernel soon ends processes: ask for more.
Fair share: Slurm's factor. Near 0, others' jobs go first. Needs hpml export slurm --users.
Jobs: The user's jobs, the largest first. Open one that is not green to see what it waits for.
"""

_CONTENT: list[Panel | str] = [
    figure("Jobs running", "count", or_zero(f"count({_MINE})", _SEEN)),
    figure(
        "Jobs pending",
        "count",
        or_zero(f"sum({_slurm('user_jobs', state='pending')})", _SHOWN),
        none="not measured",
    ),
    figure("GPUs", "count", or_zero(f"sum({_GPUS})", _SEEN)),
    figure("GPU active", "use", f"sum({_BUSY}) / sum({_GPUS})"),
    figure("GPUs wasted", "amount", f"sum({_mine('hpml:job_gpus_wasted:sum')})"),
    figure("Data wait", "wait", f"max({_WAITS})", none="not reported"),
    figure("Memory", "full", f"max({_MEMORY})"),
    figure(
        "Fair share",
        "share",
        f"max({_slurm('user_fairshare_ratio')})",
        none="not measured",
    ),
    listing(
        "Jobs",
        "jobid array name partition sweep",
        {
            "-": f"max by (jobid, array, name, partition) ({_MINE})",
            "-run": f"max by (jobid, sweep) ({_SWEEPS})",
            "GPU active": f"max by (jobid) ({_SHARE})",
            "Data wait": f"max by (jobid) ({_WAITS})",
            "CPUs busy": f"sum by (jobid) ({_mine('hpml:job_cpus_busy:rate5m')})",
            "Of limit": f"max by (jobid) ({_MEMORY})",
            "Samples/s": f"sum by (jobid) ({_mine('hpml:job_samples:rate5m')})",
            "GPUs": f"max by (jobid) ({_GPUS})",
        },
        width=24,
        height=8,
        sort="GPUs",
        none="No job of this user runs",
    ),
    lines("GPU active", "share", {_NAMED: each(_SHARE, "jobid")}, height=8),
    lines("Data wait", "share", {_NAMED: each(_WAITS, "jobid")}, height=8),
    lines("GPUs", "count", {"allocated": f"sum({_GPUS})", "busy": f"sum({_BUSY})"}, height=8),
]


def user() -> Dashboard:
    """Return the dashboard."""
    users = 'label_values(hpml:job_info{cluster="$cluster"}, user)'
    return build_dashboard(
        "hpml-user",
        "The jobs of one user: which run, which wait, and which could do better.",
        _ABOUT,
        [variable("user", "User", users)],
        _CONTENT,
        since="now-3h",
    )
