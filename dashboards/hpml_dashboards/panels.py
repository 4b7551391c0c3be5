"""Building blocks of all dashboards: panels, queries, variables, links, colours.

A panel is drawn on a grid of 24 columns; panels follow each other from left to right and wrap.
All lengths are in units of that grid, of which a screen of 1400x900 shows 21 in height.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from hpml_exporters.app import ALL

Panel = Builder[models.Panel]
_P = TypeVar("_P", timeseries.Panel, stat.Panel, bargauge.Panel, table.Panel)


class _Kind(NamedTuple):
    """A kind of figure: Grafana's unit, colour thresholds, highest value, decimals.

    A panel that shows a metric as it is exported takes the unit from the metric instead.
    """

    unit: str
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),)
    top: float | None = None
    decimals: int | None = None


_GREEN, _RED = (None, "green"), (None, "red")
_KINDS = {
    "count": _Kind("short"),
    "amount": _Kind("short", decimals=1),  # not always a whole number, such as busy GPUs
    "steps": _Kind("none", decimals=0),
    "faults": _Kind("short", (_GREEN, (1, "red"))),
    "share": _Kind("percentunit", top=1, decimals=0),
    "ratio": _Kind("percentunit"),
    "use": _Kind("percentunit", (_RED, (0.3, "orange"), (0.6, "green")), 1, 0),
    "scaling": _Kind("percentunit", (_RED, (0.5, "orange"), (0.8, "green")), 1, 0),
    "tensor": _Kind("percentunit", (_RED, (0.05, "orange"), (0.2, "green")), 1, 0),
    "wait": _Kind("percentunit", (_GREEN, (0.1, "orange"), (0.2, "red")), 1, 0),
    "full": _Kind("percentunit", (_GREEN, (0.8, "orange"), (0.95, "red")), 1, 0),
    "whole": _Kind("percentunit", (_RED, (1, "green")), 1, 0),
    "flag": _Kind("short", (_RED, (1, "green"))),
    "cost": _Kind("percentunit", (_GREEN, (0.03, "orange"), (0.1, "red")), decimals=1),
    "times": _Kind("x", ((None, "blue"),), decimals=2),
    "bytes": _Kind("bytes"),
    "process": _Kind("bytes", (_GREEN, (100 << 20, "orange"), (300 << 20, "red"))),
    "rate": _Kind("Bps"),
    "seconds": _Kind("s"),
    "age": _Kind("s", (_GREEN, (120, "orange"), (600, "red"))),
    "time": _Kind("dateTimeAsIso"),
    "watts": _Kind("watt"),
    "energy": _Kind("watth"),
    "hertz": _Kind("hertz"),
    "heat": _Kind("celsius", (_GREEN, (75, "orange"), (84, "red"))),
    "label": _Kind("string"),
}
_UNITS = {  # Grafana's, of a metric with this unit and of its rate
    "bytes": ("bytes", "Bps"),
    "seconds": ("s", "percentunit"),
    "joules": ("joule", "watt"),
    "ratio": ("percentunit", "percentunit"),
    "celsius": ("celsius", "celsius"),
    "watts": ("watt", "watt"),
    "hertz": ("hertz", "hertz"),
}
_SPECS = {spec.name: spec for spec in ALL}
_SHOWN = re.compile(
    r"(?:(?:max|min|avg|sum)(?: by \([\w, ]*\) )?\()*"
    r"(rate\()?(hpml_\w+)(?:\{[^{}]*\})?(?:\[[^]]*\])?\)*(?= \* on | and on |$)"
)
"""A query that shows one metric, aggregated or joined, with values of the metric's own unit."""
_COLUMNS = {
    "use": ["GPU active", "Efficiency"],
    "wait": ["Data wait"],
    "full": ["Of limit", "Shm full"],
    "share": ["Mean", "Time"],
    "whole": ["PCIe", "NVLink"],
    "flag": ["Up"],
    "faults": ["Misbound", "Foreign GPUs", "ECC errors", "Bad rows", "Down"],
    "bytes": ["Memory", "GPU memory", "Shm"],
    "amount": ["Wasted", "Unused", "GPU-hours", "Hours", "CPUs busy"],
    "energy": ["Energy"],
    "watts": ["GPU power", "Power", "Power limit"],
    "heat": ["Core", "HBM"],
    "hertz": ["Clock"],
    "rate": ["Rate"],
    "seconds": ["Wait", "Last good"],
    "time": ["Started", "Last", "Begins", "Ends"],
    "times": ["Speedup"],
    "steps": ["Steps"],
}
_KIND_OF = {title: kind for kind, titles in _COLUMNS.items() for title in titles}
"""Kinds of values by the titles of their columns; other columns are counts."""
_COLOURS = {
    "blue": "read received allocated running",
    "orange": "written sent pending longest",
    "green": "busy fastest shortest processes",
    "red": "unused wasted slowest limit down failed",
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
    "hpml-usage": "Usage",
    "hpml-health": "Exporters",
}
_TITLES = {"jobid": "Job", "array": "Array task", "index": "GPU", "xid": "XID", "mig": "MIG"}
_TITLES |= {"uuid": "GPU UUID", "alertname": "Alert", "license": "Licence"}
_LINKED = {"jobid": "job", "node": "node", "sweep": "sweep", "user": "user"}
"""Labels whose values are links to the dashboard of what they name."""
_WIDTHS = {"jobid": 124, "array": 112, "user": 88, "partition": 88, "point": 70}
_WIDTHS |= {"finding": 135, "rank": 55, "index": 60, "xid": 60, "port": 60, "run": 290}
_LEAST_WIDTHS = {"account": 90, "node": 90, "sweep": 90, "name": 100}
"""Of columns that share the room that is left; Grafana's own least is 150."""
_SHORT_UNITS = ("short", "none", "percentunit")
_MOST_LINES = 32
_UNKNOWN = models.SpecialValueMap(  # has no colour: it is neither good nor bad
    models.DashboardSpecialValueMapOptions(
        models.SpecialValueMatch.NULL_AND_NAN, models.ValueMappingResult(color="text")
    )
)
_DATASOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")


def select(metric: str, **labels: str) -> str:
    """Return a metric's series with these labels; ~ or !~ before a value make it an expression."""
    matchers = []
    for name, value in labels.items():
        sign = next((sign for sign in ("!~", "~") if value.startswith(sign)), "")
        operator = {"": "=", "~": "=~", "!~": "!~"}[sign]
        matchers.append(f'{name}{operator}"{value.removeprefix(sign)}"')
    return f"{metric}{{{', '.join(matchers)}}}"


def each(series: str, label: str = "node") -> str:
    """Return all series if there are few, else lowest, median and highest, named by a label."""
    # Prometheus decides at each query, so the same dashboard serves a job with one GPU and one
    # with a thousand.
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


def or_zero(value: str, subject: str) -> str:
    """Return a value, or 0 if only its subject has series."""
    # Not `or vector(0)`: an unmonitored job or cluster must show -, not a healthy 0.
    return f"({value} or 0 * max({subject}))"


def unmeasured(remedy: str) -> str:
    """Return the text of a panel whose source has no series."""
    return f"Not measured: {remedy}"


def or_text(value: str, source: str, label: str, text: str) -> str:
    """Return a value; without one, but with series of its source, a 0 with a text as label."""
    none = f'label_replace(0 * max({source}), "{label}", "{text}", "", "")'
    return f"({value}) or on () {none}"


def figure(
    title: str,
    kind: str,
    queries: str | Mapping[str, str],
    *,
    calc: str = "",
    width: int = 3,
    none: str = "-",
) -> Panel:
    """Return a panel of large figures, one per query: the latest, or `calc` of the time range."""
    queries = {"": queries} if isinstance(queries, str) else queries
    panel = _panel(stat.Panel(), title, kind, queries, (width, 4), now=not calc)
    for name in queries:
        if name in _BAD:
            panel = panel.override_by_name(name, _properties(thresholds=_steps(_KINDS["faults"])))
    return (
        panel.no_value(none)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .color_mode(shapes.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs([calc or "lastNotNull"]))
    )


def lines(
    title: str,
    kind: str,
    queries: Mapping[str, str],
    *,
    width: int = 8,
    height: int = 7,
    stacked: bool = False,
    none: str = "No data",
    source: str = "",
    remedy: str = "",
) -> Panel:
    """Return a panel of lines over time, with thresholds as dashed lines.

    The queries are named as their lines, with labels as in `{{node}}`. `none` is the text of a
    panel without lines. If there is a source with series, `none` is the name of a line at 0
    instead; if the source has no series, the panel says "Not measured" and the remedy.
    """
    if source:
        (line, value), *others = queries.items()
        queries = {line: or_text(value, source, line.strip("{}"), none), **dict(others)}
        none = unmeasured(remedy)
    panel = _panel(timeseries.Panel(), title, kind, queries, (width, height), axis=True)
    for name in queries:
        if name in _COLOUR_OF:
            colour = {"mode": "fixed", "fixedColor": _COLOUR_OF[name]}
            panel = panel.override_by_name(name, _properties(color=colour))
    many = any("{{" in name for name in queries)
    by_node = any(name.startswith("{{node}}") for name in queries)
    placement = shapes.LegendPlacement
    legend = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.LIST).calcs([])
    legend.placement(placement.RIGHT if by_node else placement.BOTTOM).show_legend(show_legend=True)
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI)
    panel = (
        panel.min(0)
        .no_value(none)
        .line_width(0 if stacked else 1.5)
        .fill_opacity(70 if stacked else 0 if many else 10)
        .show_points(shapes.VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(tooltip.sort(shapes.SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if len(_KINDS[kind].steps) > 1:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    return panel


def bars(
    title: str,
    kind: str,
    queries: Mapping[str, str],
    *,
    width: int = 8,
    height: int = 7,
    none: str = "-",
) -> Panel:
    """Return a panel of horizontal bars, one per series, with the latest values."""
    panel = _panel(bargauge.Panel(), title, kind, queries, (width, height), now=True)
    if len(queries) == 1:  # one bar has no name of its own
        name = re.sub(r"\{\{(\w+)\}\}", r"${__field.labels.\1}", next(iter(queries)))
        panel = panel.display_name(name)
    return (
        panel.min(0)
        .no_value(none)
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        .text(common.VizTextDisplayOptions().title_size(14).value_size(18))
        .max_viz_height(48)
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def listing(
    title: str,
    labels: str,
    values: Mapping[str, str],
    *,
    width: int = 12,
    height: int = 7,
    sort: str = "",
    none: str = "None known",
    source: str = "",
    remedy: str = "",
) -> Panel:
    """Return a table of the latest values; series of all queries with equal labels form one row.

    Args:
        title: title.
        labels: names of the labels to show, first.
        values: PromQL of the other columns by title, which also sets the kind; titles that begin
            with - are not shown.
        width: columns of the grid.
        height: rows of the grid.
        sort: title of the column with the largest values on top.
        none: text of the panel without rows.
        source: PromQL of series that exist if the rows are measured; then `none` is a row.
        remedy: how to get the source.
    """
    if source:
        (first, value), *others = values.items()
        label = next(name for name in labels.split() if name not in _LINKED)
        values = {first: or_text(value, source, label, none), **dict(others)}
        none = unmeasured(remedy)
    panel = _panel(table.Panel(), title, "label", values, (width, height), now=True, rows=True)
    # Title and properties by name of the field.
    shown: dict[str, tuple[str, dict[str, object]]] = {}
    names = labels.split()
    for label in names:  # the last one takes the remaining width
        properties = _label_properties(label, is_last=label == names[-1])
        shown[label] = (_TITLES.get(label, label.capitalize()), properties)
    for letter, (name, query) in zip(string.ascii_uppercase, values.items(), strict=False):
        field = f"Value #{letter}" if len(values) > 1 else "Value"  # as Grafana calls them
        if not name.startswith("-"):
            shown[field] = (name, _value_properties(name, query, is_sorted=name == sort))
    organized = {
        "excludeByName": {},
        "indexByName": {field: place for place, field in enumerate(shown)},
        "renameByName": {field: name for field, (name, _) in shown.items()},
    }
    for identity, options in {
        # Grafana merges values into one row only if all of their labels are equal, so queries of a
        # table aggregate by the same labels. Then only the shown fields are kept, and named.
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


def variable(name: str, label: str, values: str, *, newest: bool = False) -> builders.QueryVariable:
    """Return a variable whose choices come from Prometheus: `label_values(metric, label)`.

    Args:
        name: name in queries.
        label: text in front of the choice; empty to hide the variable.
        values: the query.
        newest: largest number first.
    """
    sort = models.VariableSort
    built = (
        builders.QueryVariable(name)
        .label(label or name)
        .datasource(_DATASOURCE)
        .query(values)
        .definition(values)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(sort.NUMERICAL_DESC if newest else sort.NATURAL_ASC)
    )
    return built if label else built.hide(models.VariableHide.HIDE_VARIABLE)


def build_dashboard(
    uid: str,
    about: str,
    descriptions: str,
    variables: Sequence[builders.QueryVariable],
    content: Sequence[Panel | str],
    *,
    since: str = "now-1h",
) -> models.Dashboard:
    """Return a dashboard.

    Args:
        uid: last part of its address.
        about: description of the dashboard.
        descriptions: of all panels, as lines `title: text`; further lines of a text are indented.
        variables: those after `datasource` and `cluster`.
        content: panels in reading order; a string begins a row with that title.
        since: start of the time range.
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
    texts = re.findall(r"^(\S.*?): (.*(?:\n .*)*)", descriptions, re.MULTILINE)
    described = {title: " ".join(text.split()) for title, text in texts}
    for number, piece in enumerate(content, start=1):
        if isinstance(piece, str):
            built = built.with_row(builders.Row(piece).id(number))
        else:
            panel = piece.build()
            panel.id_val = number
            # Fails for a panel without a description: each has to say what is good.
            panel.description = described[panel.title or ""]
            built = built.with_panel(piece)
    return built.build()


def _panel(
    panel: _P,
    title: str,
    kind: str,
    queries: Mapping[str, str],
    size: tuple[int, int],
    *,
    now: bool = False,
    rows: bool = False,
    axis: bool = False,
) -> _P:
    _, steps, top, decimals = _KINDS[kind]
    unit = _unit(kind, *(() if rows else queries.values()))  # a column has its own
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    panel = (
        panel.title(title)
        .datasource(_DATASOURCE)
        .span(size[0])
        .height(size[1])
        .unit(unit)
        .mappings([_UNKNOWN])
        .thresholds(thresholds.steps([models.Threshold(value, colour) for value, colour in steps]))
    )
    if top is not None:
        panel = panel.max(top)
    if decimals is not None and not (axis and unit == "percentunit"):  # an axis has few ticks then
        panel = panel.decimals(decimals)
    for letter, (legend, expression) in zip(string.ascii_uppercase, queries.items(), strict=False):
        query = prometheus.Dataquery().ref_id(letter).expr(expression)
        # A current value needs one point, not a whole time range.
        query = query.instant() if now else query.range()
        query = query.format(PromQueryFormat.TABLE) if rows else query.legend_format(legend)
        panel = panel.with_target(query)
    return panel


def _unit(kind: str, *queries: str) -> str:
    """Return the unit of the metric that the queries show, or else of this kind of figure."""
    shown = [found.groups() for found in map(_SHOWN.match, queries) if found]
    units = {
        _UNITS[_SPECS[name].unit][bool(rate)] if _SPECS[name].unit else "" for rate, name in shown
    }
    (unit,) = units or {""}  # fails for a panel of several units
    return unit or _KINDS[kind].unit


def _label_properties(label: str, *, is_last: bool) -> dict[str, object]:
    properties: dict[str, object] = {}
    if label in _LINKED:
        kept = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}"
        url = f"/d/hpml-{_LINKED[label]}?{kept}&var-{label}=${{__value.raw}}"
        properties["links"] = [{"title": f"Open this {_LINKED[label]}", "url": url}]
    if label in _WIDTHS and not is_last:
        properties["custom.width"] = _WIDTHS[label]
    elif label in _LEAST_WIDTHS:
        properties["custom.minWidth"] = _LEAST_WIDTHS[label]
    return properties


def _value_properties(title: str, query: str, *, is_sorted: bool) -> dict[str, object]:
    kind = _KIND_OF.get(title, "count")
    _, steps, _, decimals = _KINDS[kind]
    unit = _unit(kind, query)
    bar = kind in ("use", "scaling")
    least = 165 if kind == "time" else 140 if bar else 64 if unit in _SHORT_UNITS else 88
    width = max(least, 20 + 8 * len(title) + (16 if is_sorted else 0))
    properties: dict[str, object] = {"unit": unit, "custom.width": width}
    if decimals is not None:
        properties["decimals"] = decimals
    if len(steps) > 1:
        properties["thresholds"] = _steps(_KINDS[kind])
        properties["custom.cellOptions"] = {"type": "color-text"}
    if bar:
        properties["custom.cellOptions"] = {"type": "gauge", "mode": "basic"}
        properties |= {"min": 0, "max": 1}
    return properties


def _steps(kind: _Kind) -> dict[str, object]:
    steps = [{"value": value, "color": colour} for value, colour in kind.steps]
    return {"mode": "absolute", "steps": steps}


def _properties(**properties: object) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val=name, value=it) for name, it in properties.items()]
