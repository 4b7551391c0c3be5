"""Checks built dashboards: against their code, against what is exported, and each panel."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

import promql_parser
from hpml_dashboards import JSON
from hpml_dashboards.build import build
from hpml_exporters.app import ALL
from ruamel.yaml import YAML

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import read_json

RULES = assets.path("deploy/prometheus/rules")
"""Recording rules that the dashboards use."""

UNUSED: Mapping[str, str] = {
    "in the record of a run, for accounting": "hpml_gpu_energy_joules_total "
    "hpml_job_memory_peak_bytes hpml_job_io_syscall_read_bytes_total",
    "read by hpml top": "hpml_gpu_utilization_ratio",
    "for dashboards of DCGM, see rules/optional": "hpml_gpu_memory_utilization_ratio "
    "hpml_gpu_encoder_utilization_ratio hpml_gpu_decoder_utilization_ratio",
    "judged in hpml_node_clock_synchronized": "hpml_node_clock_error_seconds",
    "why jobs wait in one partition": "hpml_slurm_jobs_pending",
    "why a job has no figures of its reads and writes": "hpml_job_unreadable_processes",
}
"""Exported metrics that no dashboard shows and no alert watches, by the reason."""

_FOREIGN = {"up", "scrape_duration_seconds", "ALERTS"}
_FOREIGN |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}
_HISTOGRAM = ("_bucket", "_sum", "_count")
_WITHOUT_UNIT = ("text", "row")


class _Place(TypedDict):
    x: int
    y: int
    w: int
    h: int


class _Panel(TypedDict, total=False):
    type: str
    title: str
    description: str
    gridPos: _Place
    fieldConfig: Mapping[str, Mapping[str, object]]
    targets: list[dict[str, str]]
    panels: list[_Panel]  # of a row that is folded


class Dashboard(TypedDict):
    """The part of a dashboard's JSON that is checked."""

    templating: dict[str, list[dict[str, str]]]
    panels: list[_Panel]


class DashboardFinding(NamedTuple):
    """Something wrong with a dashboard."""

    dashboard: str
    panel: str
    message: str


class Query(NamedTuple):
    """A query of a panel or a variable."""

    dashboard: str
    panel: str
    expression: str


def check(directory: Path = JSON, rules: Path = RULES) -> list[DashboardFinding]:
    """Return what is wrong with the dashboards in a directory, nothing if all is well.

    Args:
        directory: has `<uid>.json` of every dashboard.
        rules: directory of Prometheus' rule files.

    Raises:
        InputError: no dashboards or no rule files were found.
    """
    findings: list[DashboardFinding] = []
    found: dict[str, Dashboard] = {
        path.stem: read_json(path) for path in sorted(directory.glob("hpml-*.json"))
    }
    if not found:
        raise InputError("has no dashboards of hpml", field="DIR", value=str(directory))
    built = build()
    for uid in sorted(built.keys() | found.keys()):
        if uid not in found:
            findings.append(DashboardFinding(uid, "", "is missing; run hpml dashboards build"))
        elif found[uid] != json.loads(built.get(uid, "{}")):
            findings.append(
                DashboardFinding(uid, "", "differs from its code; run hpml dashboards build")
            )
    for uid, dashboard in found.items():
        findings += [DashboardFinding(uid, *finding) for finding in _panel_findings(dashboard)]
    asked = [query for uid, dashboard in found.items() for query in queries(uid, dashboard)]
    return findings + list(_query_findings(asked, *_rules(rules)))


def queries(uid: str, dashboard: Dashboard) -> Iterator[Query]:
    """Yield the queries of a dashboard's variables and panels, with Grafana's ranges filled in."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), *\w+\)", variable["query"])
            yield Query(uid, f"${variable['name']}", asked[1] if asked else "")
    for panel in _panels(dashboard):
        for target in panel.get("targets", ()):
            expression = re.sub(r"\$__(rate_interval|range|interval)", "5m", target["expr"])
            yield Query(uid, panel["title"], expression)


def _panels(dashboard: Dashboard) -> Iterator[_Panel]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def _panel_findings(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    panels = list(_panels(dashboard))
    for panel in panels:
        if panel["type"] != "row" and not panel.get("description"):
            yield panel["title"], "has no description"
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        if panel["type"] not in _WITHOUT_UNIT and not unit:
            yield panel["title"], "has no unit"
    for one, other in itertools.combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        if across and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
            yield one["title"], f"overlaps {other['title']!r}"


def _query_findings(
    asked: list[Query], recorded: Mapping[str, set[str]], alerted: set[str]
) -> Iterator[DashboardFinding]:
    exported = {spec.name for spec in ALL}
    histograms = {
        f"{spec.name}{end}": spec.name
        for spec in ALL
        if spec.type == "histogram"
        for end in _HISTOGRAM
    }
    used: set[str] = set()
    for query in asked:
        try:
            metrics = _metrics(query.expression)
        except ValueError as error:
            yield DashboardFinding(query.dashboard, query.panel, f"{error}: {query.expression}")
            continue
        for metric in metrics:
            name = histograms.get(metric, metric)
            if name not in exported | recorded.keys() | _FOREIGN:
                yield DashboardFinding(query.dashboard, query.panel, f"nothing exports {metric}")
            used.add(name)
    used |= {histograms.get(metric, metric) for metric in alerted}
    # A metric also counts as used if only a recording rule reads it, however many rules lie between
    # it and a panel.
    pending = [name for name in used if name in recorded]
    while pending:
        for metric in recorded[pending.pop()]:
            name = histograms.get(metric, metric)
            if name not in used:
                used.add(name)
                pending += [name] if name in recorded else []
    listed = {name for names in UNUSED.values() for name in names.split()}
    for name in sorted(exported - used - listed):
        yield DashboardFinding(
            "", "", f"no dashboard or alert uses {name}, and UNUSED does not say why"
        )
    for name in sorted(listed & used | listed - exported):
        yield DashboardFinding("", "", f"UNUSED names {name}, which is used or not exported")


def _rules(rules: Path) -> tuple[dict[str, set[str]], set[str]]:
    files = sorted(rules.glob("*.yml"))
    if not files:
        raise InputError("has no rule files", field="rules", value=str(rules))
    groups = [group for file in files for group in YAML(typ="safe").load(file)["groups"]]
    recorded, alerted = {}, set()
    for rule in (rule for group in groups for rule in group["rules"]):
        if "record" in rule:
            recorded[rule["record"]] = _metrics(rule["expr"])
        else:
            alerted |= _metrics(rule["expr"])
    return recorded, alerted


def _metrics(expression: str) -> set[str]:
    names: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(str(node.name))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names
