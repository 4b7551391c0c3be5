"""The pieces that all dashboards are made of: panels, queries, variables, links, colours.

A panel is drawn on a grid of 24 columns; panels follow each other from left to right and wrap.
All lengths are in units of that grid, of which a screen of 1400x900 shows about 21 in height.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = [
    "FAULTS",
    "HIGH_IS_BAD",
    "HIGH_IS_GOOD",
    "LOW_IS_GOOD",
    "PLAIN",
    "Column",
    "Panel",
    "Steps",
    "bars",
    "build_dashboard",
    "each",
    "figure",
    "lines",
    "link",
    "listing",
    "select",
    "variable",
]

Panel = Builder[dashboard_models.Panel]
Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from each value on, the lowest is None, a figure has this colour."""

PLAIN: Steps = ((None, "text"),)
HIGH_IS_GOOD: Steps = ((None, "red"), (0.3, "orange"), (0.6, "green"))
LOW_IS_GOOD: Steps = ((None, "green"), (0.2, "orange"), (0.6, "red"))
HIGH_IS_BAD: Steps = ((None, "green"), (0.8, "orange"), (0.95, "red"))
FAULTS: Steps = ((None, "green"), (1, "red"))

_COLOURS = {
    "blue": "read received allocated running",
    "orange": "written sent pending longest",
    "green": "busy fastest shortest used processes",
    "red": "unused slowest limit down failed OOM",
    "yellow": "idle cache",
    "purple": "shmem",
}
"""A series with such a name has the same colour in every panel."""
_COLOUR_OF = {name: colour for colour, names in _COLOURS.items() for name in names.split()}

_DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_MOST_LINES = 32

_P = TypeVar("_P", timeseries.Panel, stat.Panel, bargauge.Panel, table.Panel)


class Column(NamedTuple):
    """A column of a table: a label, or the letter of the query whose value it shows."""

    field: str
    title: str
    unit: str = ""
    steps: Steps = ()
    bar: bool = False
    """Draw the value, a share, as a bar."""
    link: str = ""
    width: int = 0


def select(metric: str, **labels: str) -> str:
    """Return a metric's series with these labels; a value that begins with ~ is an expression."""
    matchers = (
        f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"'
        for name, value in labels.items()
    )
    return f"{metric}{{{', '.join(matchers)}}}"


def each(series: str, node: str = "node") -> str:
    """Return series as they are up to a number that can be read, above it their spread.

    Args:
        series: PromQL.
        node: label that says lowest, median or highest instead of a name.
    """
    few = f"{series} and on () (count({series}) <= {_MOST_LINES})"
    spread = (
        f'label_replace({value}, "{node}", "{name}", "", "") and on () '
        f"(count({series}) > {_MOST_LINES})"
        for name, value in {
            "lowest": f"min({series})",
            "median": f"quantile(0.5, {series})",
            "highest": f"max({series})",
        }.items()
    )
    return " or ".join([few, *spread])


def link(uid: str, **variables: str) -> str:
    """Return the address of a dashboard with the time range, the cluster and these variables."""
    kept = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}"
    return f"/d/{uid}?{kept}" + "".join(f"&var-{name}={text}" for name, text in variables.items())


def figure(
    title: str,
    about: str,
    unit: str,
    queries: str | Mapping[str, str],
    *,
    steps: Steps = PLAIN,
    calc: str = "lastNotNull",
    width: int = 3,
    height: int = 4,
    none: str = "-",
    spark: bool = True,
) -> Panel:
    """Return a panel of large figures, one for each query, with its course behind it."""
    queries = {"": queries} if isinstance(queries, str) else queries
    panel = _common(stat.Panel(), title, about, unit, (width, height), steps, queries)
    return (
        panel.no_value(none)
        .graph_mode(models.BigValueGraphMode.AREA if spark else models.BigValueGraphMode.NONE)
        .color_mode(models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs([calc]))
        .orientation(models.VizOrientation.VERTICAL)
    )


def lines(
    title: str,
    about: str,
    unit: str,
    queries: Mapping[str, str],
    *,
    width: int = 8,
    height: int = 7,
    steps: Steps = PLAIN,
    stacked: bool = False,
    top: float | None = None,
    none: str = "No data in this time range",
) -> Panel:
    """Return a panel of lines over time.

    Args:
        title: title.
        about: description.
        unit: Grafana's name of the unit.
        queries: PromQL by name of the line, with labels as in `{{node}}`.
        width: columns.
        height: rows.
        steps: thresholds, drawn as dashed lines.
        stacked: draw areas on top of each other.
        top: end of the axis.
        none: what stands there without data.
    """
    panel = _common(timeseries.Panel(), title, about, unit, (width, height), steps, queries)
    panel = (
        panel.min(0)
        .no_value(none)
        .line_width(1.5)
        .fill_opacity(70 if stacked else 8)
        .show_points(models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(models.LegendDisplayMode.LIST)
            .placement(models.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(models.TooltipDisplayMode.MULTI)
            .sort(models.SortOrder.DESCENDING)
        )
    )
    if top is not None:
        panel = panel.max(top)
    if stacked:
        panel = panel.stacking(
            common.StackingConfig().mode(models.StackingMode.NORMAL).group("A")
        ).line_width(0)
    if len(steps) > 1:
        style = common.GraphThresholdsStyleConfig()
        panel = panel.thresholds_style(style.mode(models.GraphThresholdsStyleMode.DASHED))
    return panel


def bars(
    title: str,
    about: str,
    unit: str,
    queries: Mapping[str, str],
    *,
    width: int = 8,
    height: int = 7,
    steps: Steps = HIGH_IS_GOOD,
    top: float | None = 1,
) -> Panel:
    """Return a panel of horizontal bars, one for each series, as they are now."""
    panel = _common(
        bargauge.Panel(), title, about, unit, (width, height), steps, queries, instant=True
    )
    panel = (
        panel.min(0)
        .no_value("-")
        .display_mode(models.BarGaugeDisplayMode.BASIC)
        .orientation(models.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return panel if top is None else panel.max(top)


def listing(
    title: str,
    about: str,
    queries: Sequence[str],
    columns: Sequence[Column],
    *,
    width: int = 24,
    height: int = 7,
    sort: str = "",
    none: str = "Nothing in this time range",
) -> Panel:
    """Return a table: series of all queries with equal labels are one row.

    Args:
        title: title.
        about: description.
        queries: PromQL; the values of the first are called A, of the second B, ...
        columns: what to show, from left to right.
        width: columns of the grid.
        height: rows of the grid.
        sort: title of the column with the largest values on top.
        none: what stands there without rows.
    """
    named = {str(number): query for number, query in enumerate(queries)}
    panel = _common(
        table.Panel(), title, about, "short", (width, height), PLAIN, named, instant=True, rows=True
    )
    names = [_field(column.field, alone=len(queries) == 1) for column in columns]
    for identity, options in {
        "merge": {},
        "filterFieldsByName": {"include": {"names": names}},
        "organize": {
            "excludeByName": {},
            "indexByName": {name: place for place, name in enumerate(names)},
            "renameByName": {
                name: column.title for name, column in zip(names, columns, strict=True)
            },
        },
    }.items():
        panel = panel.with_transformation(
            dashboard_models.DataTransformerConfig(id_val=identity, options=options)
        )
    for column in columns:
        panel = panel.override_by_name(column.title, list(_column_properties(column)))
    if sort:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(desc=True)])
    return panel.no_value(none).cell_height(models.TableCellHeight.SM)


def variable(name: str, label: str, values: str, *, newest: bool = False) -> Any:
    """Return a variable whose choices Prometheus gives, as `label_values(metric, label)`.

    Args:
        name: name in queries.
        label: what stands before the choice; empty: the variable is not shown.
        values: the query.
        newest: largest number first.
    """
    sort = dashboard_models.VariableSort
    built = (
        dashboard.QueryVariable(name)
        .label(label or name)
        .datasource(_DATASOURCE)
        .query({"query": values, "refId": name})
        .definition(values)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(sort.NUMERICAL_DESC if newest else sort.NATURAL_ASC)
    )
    return built if label else built.hide(dashboard_models.VariableHide.HIDE_VARIABLE)


def build_dashboard(
    uid: str,
    title: str,
    about: str,
    variables: Sequence[Any],
    content: Sequence[Panel | str],
    *,
    since: str = "now-1h",
) -> dashboard_models.Dashboard:
    """Return a dashboard.

    Args:
        uid: last part of its address.
        title: title.
        about: description.
        variables: those after `datasource` and `cluster`.
        content: panels in reading order; a text begins a row with that title.
        since: begin of the time range.
    """
    cluster = variable("cluster", "Cluster", "label_values(hpml_node_info, cluster)")
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["hpml"])
        .timezone("browser")
        .refresh("30s")
        .time(since, "now")
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data").type("prometheus"))
        .with_variable(cluster)
    )
    for further in variables:
        built = built.with_variable(further)
    for other, name in _DASHBOARDS.items():
        if other != uid:
            built = built.link(
                dashboard.DashboardLink(name)
                .url(f"/d/{other}")
                .keep_time(keep_time=True)
                .include_vars(include_vars=True)
            )
    for number, piece in enumerate(content, start=1):
        if isinstance(piece, str):
            built = built.with_row(dashboard.Row(piece).id(number))
        else:
            panel = piece.build()
            panel.id_val = number
            built = built.with_panel(piece)
    return built.build()


_DASHBOARDS = {
    "hpml-cluster": "Cluster",
    "hpml-node": "Node",
    "hpml-job": "Job",
    "hpml-sweep": "Sweep",
    "hpml-user": "User",
    "hpml-health": "Exporters",
}


def _common(
    panel: _P,
    title: str,
    about: str,
    unit: str,
    size: tuple[int, int],
    steps: Steps,
    queries: Mapping[str, str],
    *,
    instant: bool = False,
    rows: bool = False,
) -> _P:
    panel = (
        panel.title(title)
        .description(about)
        .datasource(_DATASOURCE)
        .span(size[0])
        .height(size[1])
        .unit(unit)
        .thresholds(_thresholds(steps))
    )
    for letter, (legend, expression) in zip(string.ascii_uppercase, queries.items(), strict=False):
        query = prometheus.Dataquery().ref_id(letter).expr(expression)
        query = query.instant() if instant else query.range()
        query = query.format(PromQueryFormat.TABLE) if rows else query.legend_format(legend)
        panel = panel.with_target(query)
    if not rows:
        for legend in queries:
            if legend in _COLOUR_OF:
                panel = panel.override_by_name(legend, [_fixed_colour(_COLOUR_OF[legend])])
    return panel


def _field(name: str, *, alone: bool) -> str:
    if name not in string.ascii_uppercase:
        return name
    return "Value" if alone else f"Value #{name}"  # as Grafana calls values of queries


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(dashboard_models.ThresholdsMode.ABSOLUTE)
        .steps([dashboard_models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _fixed_colour(colour: str) -> dashboard_models.DynamicConfigValue:
    return dashboard_models.DynamicConfigValue(
        id_val="color", value={"mode": "fixed", "fixedColor": colour}
    )


def _column_properties(column: Column) -> list[dashboard_models.DynamicConfigValue]:
    thresholds = {
        "mode": "absolute",
        "steps": [{"value": value, "color": colour} for value, colour in column.steps],
    }
    properties: dict[str, Any] = {}
    if column.unit:
        properties["unit"] = column.unit
    if column.steps:
        properties["thresholds"] = thresholds
        properties["custom.cellOptions"] = {"type": "color-text"}
    if column.bar:
        properties |= {"min": 0, "max": 1}
        properties["custom.cellOptions"] = {"type": "gauge", "mode": "basic"}
    if column.link:
        properties["links"] = [{"title": f"Open {column.title}", "url": column.link}]
    if column.width:
        properties["custom.width"] = column.width
    return [
        dashboard_models.DynamicConfigValue(id_val=name, value=value)
        for name, value in properties.items()
    ]
