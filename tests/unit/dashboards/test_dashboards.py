"""The built dashboards: current, valid, described, and without queries of unknown metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
from hpml_dashboards import JSON
from hpml_dashboards.build import build, write
from hpml_dashboards.panels import each, select
from hpml_exporters.app import ALL
from typer.testing import CliRunner

from hpml_orchestrator.cli.dashboards import group
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import read_json
from tests.dashboardcheck import check, queries

SCHEMAS = Path(__file__).parents[2] / "data/grafana"
UIDS = [
    "hpml-cluster",
    "hpml-health",
    "hpml-job",
    "hpml-node",
    "hpml-sweep",
    "hpml-usage",
    "hpml-user",
]
SCREEN = 21  # grid rows that 1400x900 shows


def dashboard(uid: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((JSON / f"{uid}.json").read_text("utf-8"))
    return loaded


def schema(name: str, definition: str = "") -> Any:
    """A validator of a schema, or of one of its definitions."""
    text = json.loads((SCHEMAS / f"{name}.jsonschema.json").read_text("utf-8"))
    for relaxed, key in (("MatcherConfig", "options"), ("DynamicConfigValue", "value")):
        if relaxed in text["definitions"]:  # they demand objects; texts and numbers are as right
            text["definitions"][relaxed]["properties"][key] = {}
    reference = f"#/definitions/{definition}" if definition else text["$ref"]
    return jsonschema.Draft7Validator({"$ref": reference, "definitions": text["definitions"]})


def problems(validator: Any, instance: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(instance)]


def test_the_built_dashboards_are_current_and_nothing_is_wrong_with_them() -> None:
    """Otherwise run `hpml dashboards build`."""
    assert sorted(build()) == UIDS
    assert check() == []


@pytest.mark.parametrize("uid", UIDS)
def test_a_dashboard_is_valid_for_grafana(uid: str) -> None:
    """By Grafana's schemas of dashboards, queries and each kind of panel."""
    built = dashboard(uid)
    assert built["schemaVersion"] == 42
    assert problems(schema("dashboard"), built) == []
    for panel in built["panels"]:
        if panel["type"] == "row":
            continue
        assert problems(schema(panel["type"], "Options"), panel["options"]) == []
        if panel["type"] in {"timeseries", "table"}:
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            assert problems(schema(panel["type"], "FieldConfig"), custom) == []
        for target in panel["targets"]:
            assert problems(schema("prometheus"), target) == []


@pytest.mark.parametrize("uid", UIDS)
def test_the_first_screen_is_full_and_cuts_no_panel(uid: str) -> None:
    """Panels up to the first row title fill 24 columns and end at the bottom of the screen."""
    panels = dashboard(uid)["panels"]
    rows = [panel["gridPos"]["y"] for panel in panels if panel["type"] == "row"]
    first = [panel["gridPos"] for panel in panels if panel["gridPos"]["y"] < min(rows, default=99)]
    assert max(place["y"] + place["h"] for place in first) <= SCREEN
    assert sum(place["w"] * place["h"] for place in first) == 24 * max(
        place["y"] + place["h"] for place in first
    )


@pytest.mark.parametrize("uid", UIDS)
def test_links_name_dashboards_and_variables_that_there_are(uid: str) -> None:
    """They keep the time range, the data source and the cluster."""
    links = re.findall(r'"url": "([^"]+)"', json.dumps(dashboard(uid)))
    assert len(links) >= len(UIDS) - 1
    for link in links:
        path, _, query = link.partition("?")
        target = dashboard(path.removeprefix("/d/"))
        names = {variable["name"] for variable in target["templating"]["list"]}
        if query:
            assert query.startswith(
                "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}&var-"
            )
            assert set(re.findall(r"var-(\w+)=", query)) <= names
    for bar in dashboard(uid)["links"]:
        assert bar["keepTime"]
        assert bar["includeVars"]


def test_a_job_carries_its_user_sweep_and_node_to_the_other_dashboards() -> None:
    """Hidden variables hold only this job; a link from a node passes on the job."""
    for uid, names in (("hpml-job", {"user", "sweep", "node"}), ("hpml-node", {"jobid"})):
        variables = dashboard(uid)["templating"]["list"]
        hidden = {one["name"]: one["query"] for one in variables if one.get("hide")}
        assert names <= set(hidden)
        chosen = uid.replace("hpml-", "").replace("job", "jobid")
        assert all(f'{chosen}="${chosen}"' in hidden[name] for name in names)


UNITS = {  # Grafana's of a figure, and of its rate
    "bytes": ("bytes", "Bps"),
    "seconds": ("s", "percentunit"),
    "ratio": ("percentunit", ""),
    "celsius": ("celsius", ""),
    "watts": ("watt", ""),
    "hertz": ("hertz", ""),
    "": ("short", "short"),
}


def shown_metric(node: Any) -> tuple[str, bool]:
    """The metric whose values a query shows, and whether it shows their rate; "" if it computes."""
    match node:
        case promql_parser.VectorSelector():
            return str(node.name), False
        case promql_parser.MatrixSelector():
            return str(node.vector_selector.name), False
        case promql_parser.Call() if node.func.name == "rate":
            return shown_metric(node.args[0])[0], True
        case promql_parser.AggregateExpr() if str(node.op) in {"max", "min", "avg", "sum"}:
            return shown_metric(node.expr)
        case promql_parser.ParenExpr():
            return shown_metric(node.expr)
        case promql_parser.BinaryExpr() if str(node.op) in {"and", "or"} or (
            str(node.op) == "*" and node.modifier
        ):
            return shown_metric(node.lhs)
    return "", False


def panel_units(panel: dict[str, Any], place: int) -> str:
    """The unit of the values of a panel's query, or of its column in a table."""
    config = panel["fieldConfig"]
    if panel["type"] != "table":
        return str(config["defaults"]["unit"])
    of_columns = {
        override["matcher"]["options"]: {one["id"]: one["value"] for one in override["properties"]}
        for override in config["overrides"]
    }
    field = f"Value #{'ABCDEFGHIJKL'[place]}" if len(panel["targets"]) > 1 else "Value"
    names = next(
        one["options"]["renameByName"]
        for one in panel["transformations"]
        if one["id"] == "organize"
    )
    return str(of_columns.get(names.get(field, ""), {}).get("unit", ""))  # "" is not shown


def test_a_panel_has_the_unit_of_the_figure_that_it_shows() -> None:
    """Of every GPU figure, and of the other metrics."""
    specs = {spec.name: spec for spec in ALL}
    seen: set[str] = set()
    for uid in UIDS:
        for panel in dashboard(uid)["panels"]:
            for place, target in enumerate(panel.get("targets", ())):
                query = re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])
                name, is_rate = shown_metric(promql_parser.parse(query))
                unit = panel_units(panel, place)
                if name in specs and unit:
                    seen.add(name)
                    is_speed = name.endswith("_bytes_per_second")
                    expected = "Bps" if is_speed else UNITS[specs[name].unit][is_rate]
                    assert unit.replace("none", "short") == expected, (uid, panel["title"], name)
    assert len([name for name in seen if name.startswith("hpml_gpu_")]) >= 10


def first_panel(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda built: next(one for one in built["panels"] if one["type"] == kind)


def without_description(built: dict[str, Any]) -> None:
    first_panel("stat")(built)["description"] = ""


def without_unit(built: dict[str, Any]) -> None:
    del first_panel("timeseries")(built)["fieldConfig"]["defaults"]["unit"]


def overlapping(built: dict[str, Any]) -> None:
    first_panel("timeseries")(built)["gridPos"]["y"] -= 1


def asking(expression: str) -> Callable[[dict[str, Any]], None]:
    def change(built: dict[str, Any]) -> None:
        first_panel("stat")(built)["targets"][0]["expr"] = expression

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(without_description, "has no description", id="description"),
        pytest.param(without_unit, "has no unit", id="unit"),
        pytest.param(overlapping, "overlaps 'GPU active'", id="overlap"),
        pytest.param(asking("sum(up"), "sum(up", id="syntax"),
        pytest.param(asking("rate(up)"), "rate(up)", id="type"),
        pytest.param(asking("hpml_gpu_speed"), "nothing exports hpml_gpu_speed", id="metric"),
        pytest.param(asking("hpml:gpu:speed"), "nothing exports hpml:gpu:speed", id="rule"),
    ],
)
def test_check_says_what_is_wrong_with_a_dashboard(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    write(tmp_path, overwrite=True)
    file = tmp_path / "hpml-user.json"
    built = json.loads(file.read_text("utf-8"))
    change(built)
    file.write_text(json.dumps(built), "utf-8")
    findings = check(tmp_path)
    assert [finding.message for finding in findings if "differs from its code" in finding.message]
    (finding,) = (one for one in findings if message in one.message)
    assert finding.dashboard == "hpml-user"
    assert finding.panel


def test_check_says_what_is_missing_and_which_metrics_nobody_looks_at(tmp_path: Path) -> None:
    """Without the dashboard of a node, nothing shows its disks."""
    write(tmp_path, overwrite=True)
    (tmp_path / "hpml-node.json").unlink()
    messages = [finding.message for finding in check(tmp_path)]
    assert "is missing; run hpml dashboards build" in messages
    assert any(
        "no dashboard or alert uses hpml_disk_read_bytes_total" in message for message in messages
    )
    with pytest.raises(InputError, match="has no rule files"):
        check(tmp_path, tmp_path)


def test_a_crowd_is_summed_up_and_a_few_are_shown() -> None:
    """In one query, so that a panel is never empty."""
    assert select("up", job="x", node="~a|b") == 'up{job="x", node=~"a|b"}'
    query = each("x", "jobid")
    assert query.startswith("x and on () (count(x) <= 32)")
    for name in ("lowest", "median", "highest"):
        assert f'"jobid", "{name}", "", ""' in query


def test_every_query_of_a_job_is_of_that_job() -> None:
    """A query without a choice of the cluster's would load all of its series."""
    variables = ("$jobid", "$node", "$instance", "$cluster", "$sweep", "$user")
    for uid in set(UIDS) - {"hpml-health"}:
        for query in queries(uid, read_json(JSON / f"{uid}.json")):
            if query.panel != "$cluster":
                assert any(variable in query.expression for variable in variables), query


def test_the_command_writes_and_keeps_what_was_changed(tmp_path: Path) -> None:
    """Dashboards in a directory that somebody changed are named, and nothing is written."""
    result = CliRunner().invoke(group, ["build", "--output", str(tmp_path)])
    built = [str(tmp_path / f"{uid}.json") for uid in UIDS]
    assert (result.exit_code, result.output.split()) == (0, built)
    assert check(tmp_path) == []
    (tmp_path / "hpml-job.json").write_text('{"panels": [], "templating": {"list": []}}')
    (tmp_path / "hpml-node.json").unlink()
    with pytest.raises(InputError, match="hpml-job.json"):
        write(tmp_path, overwrite=False)
    assert not (tmp_path / "hpml-node.json").exists(), "nothing is written"
