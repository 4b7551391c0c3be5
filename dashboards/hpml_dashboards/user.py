"""The dashboard of a user: their jobs, and how well these use what they have."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    HIGH_IS_BAD,
    HIGH_IS_GOOD,
    LOW_IS_GOOD,
    PLAIN,
    Column,
    build_dashboard,
    each,
    figure,
    lines,
    link,
    listing,
    variable,
)

__all__ = ["user"]

_MINE = 'hpml:job_info{cluster="$cluster", user="$user"}'
_ACCOUNT = 'cluster=~"$cluster|", user="$user"'


def _mine(series: str, keep: str = "") -> str:
    """Return series of each of the user's jobs."""
    return f"({series}) * on (cluster, jobid) group_left ({keep}) {_MINE}"


_CONTENT = [
    figure(
        "Jobs running", "Jobs of the user that run now.", "short", f"count({_MINE}) or vector(0)"
    ),
    figure(
        "Jobs pending",
        "Jobs of the user that wait (from Slurm's exporter with --users).",
        "short",
        f'sum(hpml_slurm_user_jobs{{{_ACCOUNT}, state="pending"}})',
        none="not exported",
    ),
    figure(
        "GPUs",
        "GPUs that the user's jobs have.",
        "short",
        f"sum({_mine('hpml:job_gpus:count')}) or vector(0)",
    ),
    figure(
        "GPU active",
        "Share of time in which these GPUs ran a kernel. Good: above 60 %.",
        "percentunit",
        f"sum({_mine('hpml:job_gpus_busy:rate5m')}) / sum({_mine('hpml:job_gpus:count')})",
        steps=HIGH_IS_GOOD,
    ),
    figure(
        "GPUs wasted",
        "GPUs that the user's jobs have less those that are busy. Good: near 0: others wait for "
        "them, and fair share counts them.",
        "short",
        f"sum({_mine('hpml:job_gpus_wasted:sum')})",
    ),
    figure(
        "Largest data wait",
        "Of all jobs. Good: below 20 % of a step. If higher, stage the job's data.",
        "percentunit",
        f"max({_mine('hpml:job_data_wait:ratio')})",
        steps=LOW_IS_GOOD,
    ),
    figure(
        "Closest to memory limit",
        "Of all jobs. Above 95 % the kernel ends processes: ask for more memory.",
        "percentunit",
        f"max({_mine('hpml:job_memory_used:ratio')})",
        steps=HIGH_IS_BAD,
        none="no limit",
    ),
    figure(
        "Fair share",
        "Slurm's factor from 0 to 1 (exported with --users). Near 0: pending jobs of others go "
        "first, as much was used lately.",
        "percentunit",
        f"max(hpml_slurm_user_fairshare_ratio{{{_ACCOUNT}}})",
        steps=PLAIN,
        none="not exported",
    ),
    listing(
        "Jobs",
        "The user's jobs, the largest first. Open one that is not green.",
        [
            f"max by (jobid, name, partition, account) ({_MINE})",
            f"max by (jobid) ({_mine('hpml:job_gpus:count')})",
            f"max by (jobid) ({_mine('hpml:job_gpus_busy:rate5m / hpml:job_gpus:count')})",
            f"max by (jobid) ({_mine('hpml:job_data_wait:ratio')})",
            f"sum by (jobid) ({_mine('hpml:job_cpus_busy:rate5m')})",
            f"max by (jobid) ({_mine('hpml:job_memory_used:ratio')})",
            f"sum by (jobid) ({_mine('hpml:train_samples:rate5m')})",
            "max by (jobid, sweep) (hpml:run_info * on (cluster, jobid) group_left () "
            + _MINE
            + ")",
        ],
        [
            Column("jobid", "Job", link=link("hpml-job", jobid="${__value.raw}"), width=90),
            Column("name", "Name"),
            Column("partition", "Partition"),
            Column("account", "Account"),
            Column("sweep", "Sweep", link=link("hpml-sweep", sweep="${__value.raw}")),
            Column("B", "GPUs", width=70),
            Column("C", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("D", "Data wait", "percentunit", LOW_IS_GOOD, width=100),
            Column("E", "CPUs busy", width=100),
            Column("F", "Memory", "percentunit", HIGH_IS_BAD, width=90),
            Column("G", "Samples/s", "samples/s", width=130),
        ],
        height=9,
        sort="GPUs",
        none="No job of this user runs",
    ),
    lines(
        "GPU active",
        "Share of time in which the GPUs of each job ran a kernel. Good: above 60 %.",
        "percentunit",
        {
            "{{jobid}} {{name}}": each(
                _mine("hpml:job_gpus_busy:rate5m / hpml:job_gpus:count", "name"), "jobid"
            )
        },
        height=8,
        top=1,
    ),
    lines(
        "Data wait",
        "Share of a step that each job waits for data. Good: below 20 %.",
        "percentunit",
        {"{{jobid}} {{name}}": each(_mine("hpml:job_data_wait:ratio", "name"), "jobid")},
        height=8,
        none="No training reports it",
    ),
    lines(
        "GPUs",
        "GPUs that the user's jobs have, and how many of these are busy.",
        "short",
        {
            "allocated": f"sum({_mine('hpml:job_gpus:count')})",
            "busy": f"sum({_mine('hpml:job_gpus_busy:rate5m')})",
        },
        height=8,
    ),
]


def user() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-user",
        "User",
        "The jobs of one user: which run, which wait, and which could do better.",
        [variable("user", "User", 'label_values(hpml:job_info{cluster="$cluster"}, user)')],
        _CONTENT,
        since="now-3h",
    )
