"""The dashboard of the exporters themselves: whether what the others show can be believed."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    AGE,
    COUNT,
    FAULTS,
    SECONDS,
    SHARE,
    Kind,
    build_dashboard,
    figure,
    lines,
    listing,
)

__all__ = ["health"]

_NODES = 'hpml_node_info{cluster="$cluster"}'
_CPU = Kind("percentunit", ((None, "green"), (0.03, "orange"), (0.1, "red")))
_MEMORY = Kind("bytes", ((None, "green"), (100 << 20, "orange"), (300 << 20, "red")))


def _of(series: str) -> str:
    """Return series of this cluster's exporters, with their node."""
    return f"({series}) * on (instance, job) group_left (node) {_NODES}"


def _rate(metric: str) -> str:
    return _of(f"rate({metric}[$__rate_interval])")


_FAILING = f"{_of('hpml_exporter_up == 0')}"
_WHERE_FAILING = "and on (instance, job, collector) (hpml_exporter_up == 0)"
_LAST = "hpml_exporter_last_success_timestamp_seconds"

_CONTENT = [
    figure(
        "Exporters",
        COUNT,
        f"count({_NODES})",
        "Exporters of nodes and jobs that answer. Good: one for each node, and for each job with "
        "an exporter of its own.",
    ),
    figure(
        "Targets down",
        FAULTS,
        "count(up == 0) or vector(0)",
        "Targets that Prometheus cannot scrape. Good: 0. They stand below.",
    ),
    figure(
        "Failing",
        FAULTS,
        f"count({_FAILING}) or vector(0)",
        "Collectors whose readings fail, hang or are too old: their panels have gaps. Good: 0. "
        "They stand below.",
    ),
    figure(
        "Oldest reading",
        AGE,
        f"max({_of(f'time() - {_LAST} and hpml_exporter_collector_present == 1')})",
        "Age of the oldest last good reading of a collector. Good: below two minutes. Otherwise a "
        "driver or file system hangs.",
    ),
    figure(
        "Slurm figures",
        AGE,
        "time() - max(hpml_slurm_last_refresh_timestamp_seconds)",
        "Age of what Slurm's exporter shows. Good: below two minutes. Otherwise the controller "
        "does not answer.",
        none="no exporter",
    ),
    figure(
        "CPU",
        _CPU,
        f"avg({_rate('process_cpu_seconds_total')})",
        "Mean CPU time of an exporter as a share of a core. Good: about 1 %. If more, raise the "
        "intervals.",
    ),
    figure(
        "Memory",
        _MEMORY,
        f"max({_of('process_resident_memory_bytes')})",
        "Most memory of an exporter. Good: about 40 MiB. If it grows, report it.",
    ),
    figure(
        "Series",
        COUNT,
        f"sum({_of('sum by (instance, job) (hpml_exporter_series)')})",
        "Series of all exporters. They decide what Prometheus costs: drop some if it is too much.",
    ),
    listing(
        "Failing collectors",
        "node instance collector",
        {
            "": (COUNT, f"topk(50, {_FAILING})"),
            "Last good": (SECONDS, f"{_of(f'time() - {_LAST}')} {_WHERE_FAILING}"),
            "Errors": (COUNT, f"{_of('hpml_exporter_errors_total')} {_WHERE_FAILING}"),
        },
        "Where, and seconds since the last good reading. The reason stands in the exporter's log: "
        "journalctl -u hpml-exporter-node.",
        height=8,
        none="All collectors work",
    ),
    listing(
        "Targets that do not answer",
        "job instance",
        {"": (COUNT, "up == 0")},
        "Scrape targets that are down. Start the exporter there, or remove the target.",
        height=8,
        none="All targets answer",
    ),
    lines(
        "Time of a reading",
        SECONDS,
        {"{{collector}}": f"max by (collector) ({_of('hpml_exporter_collect_duration_seconds')})"},
        "The slowest node of each collector. Good: far below its interval, 1 s for GPUs. A rising "
        "line is a driver or file system that hangs.",
        height=9,
    ),
    lines(
        "Failed and stuck readings",
        COUNT,
        {
            "{{collector}} failed": f"sum by (collector) ({_rate('hpml_exporter_errors_total')})",
            "{{collector}} stuck": "sum by (collector) "
            f"({_rate('hpml_exporter_stuck_readings_total')})",
        },
        "Readings in each second. Good: 0. Otherwise see the log of the exporter.",
        height=9,
    ),
    lines(
        "CPU of the exporters",
        SHARE,
        {"{{node}}": f"topk(5, {_rate('process_cpu_seconds_total')})"},
        "The five that take most, as a share of a core. Good: about 1 %. If more, raise the "
        "intervals.",
        height=9,
    ),
    "Scrapes and web server",
    lines(
        "Scrape time",
        SECONDS,
        {
            "slowest": f"max({_of('scrape_duration_seconds')})",
            "median": f"quantile(0.5, {_of('scrape_duration_seconds')})",
        },
        "Good: below 0.1 s. Slow on one node: it is overloaded.",
    ),
    lines(
        "Series",
        COUNT,
        {"{{collector}}": f"sum by (collector) ({_of('hpml_exporter_series')})"},
        "Series by collector. A step is a new kind of job, or a fault.",
        stacked=True,
    ),
    lines(
        "Web server",
        COUNT,
        {
            "answered {{code}}": f"sum by (code) ({_rate('hpml_exporter_http_responses_total')})",
            "closed: {{reason}}": "sum by (reason) "
            f"({_rate('hpml_exporter_connections_dropped_total')})",
            "open": f"sum({_of('hpml_exporter_open_connections')})",
        },
        "Answers and closed connections in each second, and open ones. Good: only 200. 401 is a "
        "wrong password, 503 a stuck collector; closed ones are scanners or broken clients.",
    ),
    lines(
        "Slurm's exporter",
        SECONDS,
        {
            "refresh": "max(hpml_slurm_refresh_duration_seconds)",
            "failed per minute": "60 * "
            "sum(rate(hpml_slurm_refresh_failures_total[$__rate_interval]))",
        },
        "How long a refresh takes, and failed ones. Good: seconds, and 0. Otherwise the controller "
        "is busy: use a longer --interval.",
        none="No such exporter",
    ),
    listing(
        "Versions",
        "version python",
        {"Exporters": (COUNT, f"count by (version, python) ({_of('hpml_exporter_build_info')})")},
        "Exporters by version. Good: one. Otherwise update the older ones.",
        width=8,
    ),
    listing(
        "Refused",
        "node reason",
        {
            "Web-config": (COUNT, f"{_of('hpml_exporter_web_config_failures_total')} > 0"),
            "Feeds": (COUNT, f"sum by (node, reason) ({_of('hpml_train_feed_refused_total')}) > 0"),
        },
        "Web-config files that could not be used, and feeds of trainings that were not taken, since "
        "the start. Good: none. The log has the reasons.",
        width=8,
        none="Nothing was refused",
    ),
]


def health() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-health",
        "Whether the exporters work, and what they cost.",
        [],
        _CONTENT,
        since="now-3h",
    )
