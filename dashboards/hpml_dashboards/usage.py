"""The dashboard of weeks: GPU-hours, waste and energy of users, accounts and ended jobs."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import Panel, build_dashboard, figure, lines, listing

_CHOSEN = '{cluster="$cluster"}'
_HOUR = 3600  # of seconds; a watt-hour has as many joules


def _kept(figure: str) -> str:
    """Return each job's sum over the time range, in seconds or joules; see the rules hpml-usage."""
    return f"sum_over_time(hpml:job_{figure}:increase1h{_CHOSEN}[$__range])"


_GPUS, _BUSY = _kept("gpu_seconds"), _kept("gpu_busy_seconds")
_JOULES, _HELD = _kept("gpu_energy_joules"), _kept("holdback_seconds")
_KNOWN = f"({_GPUS} and on (cluster, jobid) {_BUSY})"
"""GPU-seconds of the jobs whose activity is known: MIG instances have none."""


def _hours(series: str, by: str = "") -> str:
    return f"sum by ({by}) ({series}) / {_HOUR}"


def _unused(by: str = "") -> str:
    return f"(sum by ({by}) ({_KNOWN}) - sum by ({by}) ({_BUSY})) / {_HOUR}"


def _columns(by: str) -> dict[str, str]:
    """Return the columns of a table with one row per combination of labels, the worst 25."""
    worst = f"and on ({by}) topk(25, {_unused(by)})"
    return {
        "GPU-hours": f"{_hours(_GPUS, by)} {worst}",
        "GPU active": f"sum by ({by}) ({_BUSY}) / sum by ({by}) ({_KNOWN}) {worst}",
        "Energy": f"sum by ({by}) ({_JOULES}) / {_HOUR} {worst}",
        "Unused": f"topk(25, {_unused(by)})",
    }


def _per_day(name: str) -> str:
    series = f"hpml:job_{name}:increase1h{_CHOSEN}"
    return f"sum(sum_over_time({series}[1d])) / {_HOUR}"


_NONE = "None yet: figures are stored once per hour"

_ABOUT = """
GPU-hours: GPUs of all jobs times hours, in the time range. Jobs appear an hour after their start.
GPU active: Share of these hours with a kernel. Good: above 60 %. If lower, see the jobs below.
Unused: GPU-hours without a kernel. Good: as few as possible: they cost as much as used ones.
Jobs: Jobs that had GPUs in the time range.
Energy: What the GPUs drew, without the rest of the nodes.
Users: Users by unused GPU-hours. Open one to see running jobs.
Accounts: Accounts by unused GPU-hours, for those who answer for a project.
Jobs with most unused GPU-hours: Ended jobs too. Open one to see why, while Prometheus has its data.
What held jobs back: Findings of hpml report by the hours that they lasted, over all jobs.
GPU-hours per day: Of the 24 hours before each point. Used and unused together are what jobs had.
Energy per day: The same for the energy of the GPUs.
"""

_CONTENT: list[Panel | str] = [
    figure("GPU-hours", "amount", _hours(_GPUS), width=4),
    figure("GPU active", "use", f"sum({_BUSY}) / sum({_KNOWN})", width=5),
    figure("Unused", "amount", _unused(), width=5),
    figure("Jobs", "count", f"count(count by (cluster, jobid) ({_GPUS}))", width=5),
    figure("Energy", "energy", f"sum({_JOULES}) / {_HOUR}", width=5),
    listing("Users", "user", _columns("user"), height=8, sort="Unused", none=_NONE),
    listing("Accounts", "account", _columns("account"), height=8, sort="Unused", none=_NONE),
    listing(
        "Jobs with most unused GPU-hours",
        "jobid user name",
        _columns("jobid, user, name"),
        none=_NONE,
        width=16,
        height=9,
        sort="Unused",
    ),
    listing(
        "What held jobs back",
        "finding",
        {
            "Jobs": f"count by (finding) (count by (cluster, jobid, finding) ({_HELD}))",
            "Hours": _hours(_HELD, "finding"),
        },
        width=8,
        height=9,
        sort="Hours",
        none="Nothing found",
        source=_GPUS,
        remedy="figures are stored once per hour",
    ),
    "Over time",
    lines(
        "GPU-hours per day",
        "count",
        {
            "busy": _per_day("gpu_busy_seconds"),
            "unused": f"{_per_day('gpu_seconds')} - {_per_day('gpu_busy_seconds')}",
        },
        width=16,
        stacked=True,
    ),
    lines("Energy per day", "energy", {"GPUs": _per_day("gpu_energy_joules")}, width=8),
]


def usage() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-usage",
        "Weeks of GPU-hours: who had them, what was not used, and the energy it took.",
        _ABOUT,
        [],
        _CONTENT,
        since="now-28d",
    )
