"""The dashboard of the exporters themselves: whether the other dashboards can be trusted."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import Panel, build_dashboard, figure, lines, listing

_NODES = 'hpml_node_info{cluster="$cluster"}'


def _of(series: str) -> str:
    # Series of exporters have no label `node`. The join adds it, and leaves out other clusters.
    return f"({series}) * on (instance, job) group_left (node) {_NODES}"


def _rate(metric: str) -> str:
    return _of(f"rate({metric}[$__rate_interval])")


_FAILING = f"{_of('hpml_exporter_up == 0')}"
_WHERE_FAILING = "and on (instance, job, collector) (hpml_exporter_up == 0)"
_LAST = "hpml_exporter_last_success_timestamp_seconds"

_ABOUT = """
Exporters: Those that answer. Good: one for each node, and for each job that has its own.
Targets down: Targets that Prometheus cannot scrape. Good: 0. They stand below.
Failing: Collectors that fail, hang or lag: panels have gaps. Good: 0. They stand below.
Last reading: Age at the collector that lags most. Good: below 2 minutes. Else a driver hangs.
Slurm figures: Their age. Good: below two minutes. Otherwise the controller does not answer.
CPU: Mean share of a core that an exporter takes. Good: about 1 %. If more, raise the intervals.
Memory: Most memory of an exporter. Good: about 40 MiB. If it grows, report it.
Series: Series of all exporters. They decide what Prometheus costs: drop some if it is too much.
Failing collectors: Where, and seconds since the last good reading. The reason is in the
    exporter's log: journalctl -u hpml-exporter-node.
Targets that do not answer: Start the exporter there, or remove the target.
Time of a reading: The slowest node of each collector. Good: far below its interval, 1 s for GPUs.
    A rising line is a driver or file system that hangs.
Failed and stuck readings: In each second, and messages of trainings that were refused. Good: 0.
    Otherwise see the exporter's log.
Scrape time: Good: below 0.1 s. Slow on one node: it is overloaded.
Web server: Answers and closed connections in each second, and open ones. Good: only 200. 401 is a
    wrong password, 503 a stuck collector; closed ones are scanners or broken clients.
Versions: Exporters by version. Good: one. Otherwise update the older ones.
GPU drivers: Exporters by the version of NVIDIA's driver. Good: one. Jobs over nodes with different
    drivers may fail: update the older ones.
"""

_CONTENT: list[Panel | str] = [
    figure("Exporters", "count", f"count({_NODES})"),
    figure("Targets down", "faults", "sum(up == bool 0)"),
    figure("Failing", "faults", f"sum({_of('hpml_exporter_up == bool 0')})"),
    figure(
        "Last reading",
        "age",
        # A collector with nothing to read is not late.
        f"max({_of(f'time() - {_LAST} and hpml_exporter_collector_present == 1')})",
    ),
    figure(
        "Slurm figures",
        "age",
        "max(time() - hpml_slurm_last_refresh_timestamp_seconds)",
        none="no exporter",
    ),
    figure("CPU", "cost", f"avg({_rate('process_cpu_seconds_total')})"),
    figure("Memory", "process", f"max({_of('process_resident_memory_bytes')})"),
    figure("Series", "count", f"sum({_of('sum by (instance, job) (hpml_exporter_series)')})"),
    listing(
        "Failing collectors",
        "node instance collector",
        {
            "-": f"topk(50, {_FAILING})",
            "Last good": f"{_of(f'time() - {_LAST}')} {_WHERE_FAILING}",
            "Errors": f"{_of('hpml_exporter_errors_total')} {_WHERE_FAILING}",
        },
        height=8,
        none="None fails",
    ),
    listing(
        "Targets that do not answer", "job instance", {"-": "up == 0"}, height=8, none="All answer"
    ),
    lines(
        "Time of a reading",
        "seconds",
        {"{{collector}}": f"max by (collector) ({_of('hpml_exporter_collect_duration_seconds')})"},
        width=12,
        height=9,
    ),
    lines(
        "Failed and stuck readings",
        "count",
        {
            "{{collector}}": "sum by (collector) "
            f"({_rate('hpml_exporter_errors_total')} + "
            f"{_rate('hpml_exporter_stuck_readings_total')})",
            "training: {{reason}}": f"sum by (reason) ({_rate('hpml_train_feed_refused_total')})",
        },
        width=12,
        height=9,
    ),
    "Scrapes and web server",
    lines(
        "Scrape time",
        "seconds",
        {
            "slowest": f"max({_of('scrape_duration_seconds')})",
            "median": f"quantile(0.5, {_of('scrape_duration_seconds')})",
        },
        width=6,
    ),
    lines(
        "Web server",
        "count",
        {
            "answered {{code}}": f"sum by (code) ({_rate('hpml_exporter_http_responses_total')})",
            "closed: {{reason}}": "sum by (reason) "
            f"({_rate('hpml_exporter_connections_dropped_total')})",
            "open": f"sum({_of('hpml_exporter_open_connections')})",
        },
        width=6,
    ),
    listing(
        "Versions",
        "version python",
        {"Exporters": f"count by (version, python) ({_of('hpml_exporter_build_info')})"},
        width=7,
    ),
    listing(
        "GPU drivers",
        "version",
        {"Exporters": f"count by (version) ({_of('hpml_gpu_driver_info')})"},
        width=5,
    ),
]


def health() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-health", "Whether the exporters work, and what they cost.", _ABOUT, [], _CONTENT
    )
