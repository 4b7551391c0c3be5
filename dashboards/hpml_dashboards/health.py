"""The dashboard of the exporters themselves: whether what the others show can be believed."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    FAULTS,
    Column,
    build_dashboard,
    figure,
    lines,
    link,
    listing,
)

__all__ = ["health"]

_NODES = 'hpml_node_info{cluster="$cluster"}'
_AGE = ((None, "green"), (120, "orange"), (600, "red"))


def _of_cluster(series: str) -> str:
    """Return series of this cluster's exporters, with their node."""
    return f"({series}) * on (instance, job) group_left (node) {_NODES}"


def _rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


_CONTENT = [
    figure(
        "Exporters",
        "Exporters of nodes and jobs that answer.",
        "short",
        f"count({_NODES})",
    ),
    figure(
        "Targets down",
        "Targets that Prometheus cannot scrape, of those with hpml in the name of their scrape "
        "job. Good: 0. See the table below.",
        "short",
        'count(up{job=~".*hpml.*"} == 0) or vector(0)',
        steps=FAULTS,
    ),
    figure(
        "Collectors failing",
        "Readings that fail, are stuck or too old: their panels show gaps. Good: 0.",
        "short",
        f"count({_of_cluster('hpml_exporter_up == 0')}) or vector(0)",
        steps=FAULTS,
    ),
    figure(
        "Oldest reading",
        "Age of the oldest good reading of a collector that has something to read. Good: below a "
        "minute.",
        "s",
        "max(time() - "
         "(hpml_exporter_last_success_timestamp_seconds and hpml_exporter_collector_present == 1))",
        steps=_AGE,
    ),
    figure(
        "Slurm figures",
        "Age of what Slurm's exporter shows. Good: below two minutes. Older: the controller does "
        "not answer.",
        "s",
        "time() - max(hpml_slurm_last_refresh_timestamp_seconds)",
        steps=_AGE,
        none="no exporter",
    ),
    figure(
        "CPU",
        "Mean CPU time that an exporter takes, as a share of one core. Good: about 1 %.",
        "percentunit",
        f"avg({_of_cluster(_rate('process_cpu_seconds_total'))})",
        steps=((None, "green"), (0.03, "orange"), (0.1, "red")),
    ),
    figure(
        "Memory",
        "Most memory that an exporter takes. Good: below 60 MiB.",
        "bytes",
        f"max({_of_cluster('process_resident_memory_bytes')})",
        steps=((None, "green"), (100 << 20, "orange"), (300 << 20, "red")),
    ),
    figure(
        "Series",
        "Series that all exporters show. Their number decides what Prometheus costs.",
        "short",
        f"sum({_of_cluster('sum by (instance, job) (hpml_exporter_series)')})",
    ),
    listing(
        "Failing collectors",
        "Where and since when. The reason stands in the exporter's log: journalctl -u "
        "hpml-exporter-node.",
        [
            f"topk(50, {_of_cluster('hpml_exporter_up == 0')})",
            f"{_of_cluster('time() - hpml_exporter_last_success_timestamp_seconds')} "
            "and on (instance, collector) (hpml_exporter_up == 0)",
            f"{_of_cluster('hpml_exporter_errors_total')} "
            "and on (instance, collector) (hpml_exporter_up == 0)",
        ],
        [
            Column("node", "Node", link=link("hpml-node", node="${__value.raw}")),
            Column("instance", "Instance"),
            Column("collector", "Collector"),
            Column("B", "Last good reading before", "s"),
            Column("C", "Errors"),
        ],
        width=12,
        height=8,
        none="All collectors work",
    ),
    listing(
        "Targets that do not answer",
        "Scrape targets of Prometheus that are down. Start the exporter there, or remove the "
        "target.",
        ["up == 0"],
        [Column("job", "Scrape job"), Column("instance", "Instance")],
        width=12,
        height=8,
        none="All targets answer",
    ),
    lines(
        "Time of a reading",
        "The slowest node of each collector. Good: far below its interval, 1 s for GPUs. A rising "
        "line is a driver or a file system that hangs.",
        "s",
        {
            "{{collector}}": f"max by (collector) ({_of_cluster('hpml_exporter_collect_duration_seconds')})"
        },
        height=8,
    ),
    lines(
        "Failed and stuck readings",
        "In each second, by collector. Good: 0.",
        "short",
        {
            "{{collector}} failed": "sum by (collector) ("
            + _of_cluster(_rate("hpml_exporter_errors_total"))
            + ") > 0",
            "{{collector}} stuck": "sum by (collector) ("
            + _of_cluster(_rate("hpml_exporter_stuck_readings_total"))
            + ") > 0",
        },
        height=8,
        none="None",
    ),
    lines(
        "CPU of the exporters",
        "The five that take most, as a share of one core. Good: about 1 %.",
        "percentunit",
        {"{{node}}": f"topk(5, {_of_cluster(_rate('process_cpu_seconds_total'))})"},
        height=8,
    ),
    "Scrapes and web server",
    lines(
        "Scrape time",
        "The slowest scrape and the median. Good: below 0.1 s.",
        "s",
        {
            "slowest": f"max({_of_cluster('scrape_duration_seconds')})",
            "median": f"quantile(0.5, {_of_cluster('scrape_duration_seconds')})",
        },
    ),
    lines(
        "Series",
        "Series by collector. A step is a new kind of job or a fault.",
        "short",
        {"{{collector}}": f"sum by (collector) ({_of_cluster('hpml_exporter_series')})"},
        stacked=True,
    ),
    lines(
        "Answers other than 200",
        "In each second, by code. 401 is a wrong password, 503 a stuck collector. Good: none.",
        "short",
        {
            "{{code}}": "sum by (code) ("
            + _of_cluster('rate(hpml_exporter_http_responses_total{code!="200"}[$__rate_interval])')
            + ") > 0"
        },
        none="None",
    ),
    lines(
        "Connections",
        "Open ones, and those that the server closed by itself in each second, by reason. Closed "
        "ones point at a scanner or a broken client.",
        "short",
        {
            "open": f"sum({_of_cluster('hpml_exporter_open_connections')})",
            "{{reason}}": "sum by (reason) ("
            + _of_cluster(_rate("hpml_exporter_connections_dropped_total"))
            + ") > 0",
        },
    ),
    lines(
        "Slurm's exporter",
        "How long a refresh takes, and refreshes that failed in each minute. Good: seconds, and 0.",
        "s",
        {
            "refresh": "max(hpml_slurm_refresh_duration_seconds)",
            "failed": "60 * sum(" + _rate("hpml_slurm_refresh_failures_total") + ")",
        },
        none="No such exporter",
    ),
    listing(
        "Versions",
        "Exporters by version. Good: one. Update the others.",
        [f"count by (version, python) ({_of_cluster('hpml_exporter_build_info')})"],
        [Column("version", "Version"), Column("python", "Python"), Column("A", "Exporters")],
        width=8,
    ),
    listing(
        "Refused",
        "Web-config files that could not be used, and feeds of trainings that were not taken, "
        "since the start. Good: 0.",
        [
            f"topk(20, {_of_cluster('hpml_exporter_web_config_failures_total')} > 0)",
            f"topk(20, sum by (node, reason) ({_of_cluster('hpml_train_feed_refused_total')}) > 0)",
        ],
        [
            Column("node", "Node"),
            Column("A", "Web-config files"),
            Column("reason", "Feed refused for"),
            Column("B", "Feeds"),
        ],
        width=16,
        none="Nothing was refused",
    ),
]


def health() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-health",
        "Exporters",
        "Whether the exporters work, and what they cost.",
        [],
        _CONTENT,
        since="now-3h",
    )
