"""The pieces that all dashboards are made of: panels, queries, variables, links, colours.

A panel is drawn on a grid of 24 columns; panels follow each other from left to right and wrap.
All lengths are in units of that grid, of which a screen of 1400x900 shows 21 in height.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = [
    "AGE",
    "BYTES",
    "COUNT",
    "FAULTS",
    "FULL",
    "HEAT",
    "RATE",
    "SECONDS",
    "SHARE",
    "TIME",
    "USE",
    "WAIT",
    "WATTS",
    "WHOLE",
    "Kind",
    "Panel",
    "bars",
    "build_dashboard",
    "each",
    "figure",
    "lines",
    "listing",
    "select",
    "variable",
]

Panel = Builder[models.Panel]
_P = TypeVar("_P", timeseries.Panel, stat.Panel, bargauge.Panel, table.Panel)


class Kind(NamedTuple):
    """A kind of figure: Grafana's unit, and colours from each value on, the lowest without one."""

    unit: str
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),)


COUNT = Kind("short")
FAULTS = Kind("short", ((None, "green"), (1, "red")))
SHARE = Kind("percentunit")
USE = Kind("percentunit", ((None, "red"), (0.3, "orange"), (0.6, "green")))
WAIT = Kind("percentunit", ((None, "green"), (0.2, "orange"), (0.6, "red")))
FULL = Kind("percentunit", ((None, "green"), (0.8, "orange"), (0.95, "red")))
WHOLE = Kind("percentunit", ((None, "red"), (1, "green")))
BYTES = Kind("bytes")
RATE = Kind("Bps")
SECONDS = Kind("s")
AGE = Kind("s", ((None, "green"), (120, "orange"), (600, "red")))
TIME = Kind("dateTimeAsIso")
WATTS = Kind("watt")
HEAT = Kind("celsius", ((None, "green"), (75, "orange"), (84, "red")))

_COLOURS = {
    "blue": "read received allocated running",
    "orange": "written sent pending longest",
    "green": "busy fastest shortest processes",
    "red": "unused slowest limit down failed",
    "yellow": "idle cache",
    "purple": "shmem",
}
_COLOUR_OF = {name: colour for colour, names in _COLOURS.items() for name in names.split()}
"""A line with such a name has the same colour in every panel."""
_BAD = ("unused", "lost")  # figures that should be 0
_DASHBOARDS = {
    "hpml-cluster": "Cluster",
    "hpml-node": "Node",
    "hpml-job": "Job",
    "hpml-sweep": "Sweep",
    "hpml-user": "User",
    "hpml-health": "Exporters",
}
_TITLES = {"jobid": "Job", "index": "GPU", "xid": "XID", "mig": "MIG", "qos": "QOS"}
_LINKED = {"jobid": "job", "node": "node", "sweep": "sweep", "user": "user"}
"""Labels whose values are links to the dashboard of what they name."""
_WIDTHS = {"jobid": 90, "index": 60, "xid": 70, "port": 60, "rank": 80, "state": 120}
_WIDTH, _BAR_WIDTH, _TIME_WIDTH = 100, 170, 165  # pixels
_MOST_LINES = 32
_DATASOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")


def select(metric: str, **labels: str) -> str:
    """Return a metric's series with these labels; a value that begins with ~ is an expression."""
    matchers = (
        f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"'
        for name, value in labels.items()
    )
    return f"{metric}{{{', '.join(matchers)}}}"


def each(series: str, label: str = "node") -> str:
    """Return series as they are if they can be told apart, else their spread, named in a label."""
    few = f"{series} and on () (count({series}) <= {_MOST_LINES})"
    spread = (
        f'label_replace({value}, "{label}", "{name}", "", "") '
        f"and on () (count({series}) > {_MOST_LINES})"
        for name, value in {
            "lowest": f"min({series})",
            "median": f"quantile(0.5, {series})",
            "highest": f"max({series})",
        }.items()
    )
    return " or ".join([few, *spread])


def figure(
    title: str,
    kind: Kind,
    queries: str | Mapping[str, str],
    about: str,
    *,
    calc: str = "lastNotNull",
    width: int = 3,
    none: str = "-",
) -> Panel:
    """Return a panel of large figures, one for each query, reduced over time by `calc`."""
    queries = {"": queries} if isinstance(queries, str) else queries
    panel = _panel(stat.Panel(), title, kind, queries, about, (width, 3))
    for name in queries:
        if name in _BAD:
            panel = panel.override_by_name(name, _properties(thresholds=_steps(FAULTS)))
    mode = shapes.BigValueGraphMode
    return (
        panel.no_value(none)
        .graph_mode(mode.NONE if len(queries) > 1 else mode.AREA)
        .color_mode(shapes.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs([calc]))
    )


def lines(
    title: str,
    kind: Kind,
    queries: Mapping[str, str],
    about: str,
    *,
    width: int = 8,
    height: int = 7,
    stacked: bool = False,
    top: float | None = None,
    none: str = "No data in this time range",
) -> Panel:
    """Return a panel of lines over time.

    Args:
        title: title.
        kind: what is shown; its thresholds are dashed lines.
        queries: PromQL by name of the line, with labels as in `{{node}}`.
        about: description.
        width: columns.
        height: rows.
        stacked: draw areas on top of each other.
        top: end of the axis.
        none: what stands there without data.
    """
    panel = _panel(timeseries.Panel(), title, kind, queries, about, (width, height))
    for name in queries:
        if name in _COLOUR_OF:
            colour = {"mode": "fixed", "fixedColor": _COLOUR_OF[name]}
            panel = panel.override_by_name(name, _properties(color=colour))
    many = any(name.startswith("{{node}}") for name in queries)
    placement = shapes.LegendPlacement
    legend = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.LIST).calcs([])
    legend.placement(placement.RIGHT if many else placement.BOTTOM).show_legend(show_legend=True)
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI)
    panel = (
        panel.min(0)
        .no_value(none)
        .line_width(0 if stacked else 1.5)
        .fill_opacity(70 if stacked else 6)
        .show_points(shapes.VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(tooltip.sort(shapes.SortOrder.DESCENDING))
    )
    if top is not None:
        panel = panel.max(top)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if len(kind.steps) > 1:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    return panel


def bars(
    title: str,
    kind: Kind,
    queries: Mapping[str, str],
    about: str,
    *,
    width: int = 8,
    height: int = 7,
    top: float | None = None,
) -> Panel:
    """Return a panel of horizontal bars, one for each series, as they are now."""
    panel = _panel(bargauge.Panel(), title, kind, queries, about, (width, height), now=True)
    panel = (
        panel.min(0)
        .no_value("-")
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return panel if top is None else panel.max(top)


def listing(
    title: str,
    labels: str,
    values: Mapping[str, tuple[Kind, str]],
    about: str,
    *,
    width: int = 12,
    height: int = 7,
    sort: str = "",
    none: str = "None",
) -> Panel:
    """Return a table as of now: series of all queries with equal labels are one row.

    Args:
        title: title.
        labels: names of the labels to show, first.
        values: kind and PromQL of the other columns, by title; without title: not shown.
        about: description.
        width: columns of the grid.
        height: rows of the grid.
        sort: title of the column with the largest values on top.
        none: what stands there without rows.
    """
    queries = {name or "-": query for name, (_, query) in values.items()}
    strings = Kind("string")
    panel = _panel(
        table.Panel(), title, strings, queries, about, (width, height), now=True, rows=True
    )
    shown: dict[str, tuple[str, dict[str, Any]]] = {}  # title and properties by name of the field
    for label in labels.split():
        shown[label] = (_TITLES.get(label, label.capitalize()), _label_properties(label))
    for letter, (name, (kind, _)) in zip(string.ascii_uppercase, values.items(), strict=False):
        field = f"Value #{letter}" if len(values) > 1 else "Value"  # as Grafana calls them
        if name:
            shown[field] = (name, _value_properties(kind))
    organized = {
        "excludeByName": {},
        "indexByName": {field: place for place, field in enumerate(shown)},
        "renameByName": {field: name for field, (name, _) in shown.items()},
    }
    for identity, options in {
        "merge": {},
        "filterFieldsByName": {"include": {"names": list(shown)}},
        "organize": organized,
    }.items():
        panel = panel.with_transformation(
            models.DataTransformerConfig(id_val=identity, options=options)
        )
    for name, properties in shown.values():
        panel = panel.override_by_name(name, _properties(noValue="-", **properties))
    if sort:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(desc=True)])
    return panel.no_value(none).cell_height(shapes.TableCellHeight.SM)


def variable(name: str, label: str, values: str, *, newest: bool = False) -> Any:
    """Return a variable whose choices Prometheus gives, as `label_values(metric, label)`.

    Args:
        name: name in queries.
        label: what stands before the choice; empty: the variable is not shown.
        values: the query.
        newest: largest number first.
    """
    sort = models.VariableSort
    built = (
        builders.QueryVariable(name)
        .label(label or name)
        .datasource(_DATASOURCE)
        .query({"query": values, "refId": name})
        .definition(values)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(sort.NUMERICAL_DESC if newest else sort.NATURAL_ASC)
    )
    return built if label else built.hide(models.VariableHide.HIDE_VARIABLE)


def build_dashboard(
    uid: str,
    about: str,
    variables: Sequence[Any],
    content: Sequence[Panel | str],
    *,
    since: str = "now-1h",
) -> models.Dashboard:
    """Return a dashboard.

    Args:
        uid: last part of its address.
        about: description.
        variables: those after `datasource` and `cluster`.
        content: panels in reading order; a text begins a row with that title.
        since: begin of the time range.
    """
    built = (
        builders.Dashboard(_DASHBOARDS[uid])
        .uid(uid)
        .description(about)
        .tags(["hpml"])
        .timezone("browser")
        .refresh("30s")
        .time(since, "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data").type("prometheus"))
        .with_variable(variable("cluster", "Cluster", "label_values(hpml_node_info, cluster)"))
    )
    for further in variables:
        built = built.with_variable(further)
    for other, title in _DASHBOARDS.items():
        if other != uid:
            link = builders.DashboardLink(title).url(f"/d/{other}").keep_time(keep_time=True)
            built = built.link(link.include_vars(include_vars=True))
    for number, piece in enumerate(content, start=1):
        if isinstance(piece, str):
            built = built.with_row(builders.Row(piece).id(number))
        else:
            piece.build().id_val = number
            built = built.with_panel(piece)
    return built.build()


def _panel(
    panel: _P,
    title: str,
    kind: Kind,
    queries: Mapping[str, str],
    about: str,
    size: tuple[int, int],
    *,
    now: bool = False,
    rows: bool = False,
) -> _P:
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    panel = (
        panel.title(title)
        .description(about)
        .datasource(_DATASOURCE)
        .span(size[0])
        .height(size[1])
        .unit(kind.unit)
        .thresholds(
            thresholds.steps([models.Threshold(value, colour) for value, colour in kind.steps])
        )
    )
    for letter, (legend, expression) in zip(string.ascii_uppercase, queries.items(), strict=False):
        query = prometheus.Dataquery().ref_id(letter).expr(expression)
        query = query.instant() if now else query.range()
        query = query.format(PromQueryFormat.TABLE) if rows else query.legend_format(legend)
        panel = panel.with_target(query)
    return panel


def _label_properties(label: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    if label in _LINKED:
        kept = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}"
        url = f"/d/hpml-{_LINKED[label]}?{kept}&var-{label}=${{__value.raw}}"
        properties["links"] = [{"title": f"Open this {_LINKED[label]}", "url": url}]
    if label in _WIDTHS:
        properties["custom.width"] = _WIDTHS[label]
    return properties


def _value_properties(kind: Kind) -> dict[str, Any]:
    properties: dict[str, Any] = {"unit": kind.unit, "custom.width": _WIDTH}
    if kind is TIME:
        properties["custom.width"] = _TIME_WIDTH
    if len(kind.steps) > 1:
        properties["thresholds"] = _steps(kind)
        properties["custom.cellOptions"] = {"type": "color-text"}
    if kind is USE:
        properties["custom.cellOptions"] = {"type": "gauge", "mode": "basic"}
        properties |= {"min": 0, "max": 1, "custom.width": _BAR_WIDTH}
    return properties


def _steps(kind: Kind) -> dict[str, Any]:
    steps = [{"value": value, "color": colour} for value, colour in kind.steps]
    return {"mode": "absolute", "steps": steps}


def _properties(**properties: Any) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val=name, value=it) for name, it in properties.items()]
