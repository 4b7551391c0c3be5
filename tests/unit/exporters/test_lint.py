"""Rules for metrics: each can be broken, and the catalogue breaks none."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters import metrics
from hpml_exporters.lint import faults
from hpml_exporters.metric import Family, Histogram, MetricSpec, Sample
from hpml_exporters.metricsdoc import page
from hpml_exporters.render import openmetrics, text
from prometheus_client.openmetrics import parser

ROOT = Path(__file__).parents[3]
GOOD = MetricSpec(
    "hpml_disk_read_bytes_total",
    "counter",
    "Bytes that were read since the node's boot.",
    ("device",),
    "bytes",
    "/proc/diskstats",
)
TIMES = replace(GOOD, name="hpml_step_duration_seconds", type="histogram", unit="seconds")


def test_the_catalogue_is_clean() -> None:
    """Every metric keeps the rules."""
    assert faults(metrics.ALL) == []
    assert len(metrics.ALL) > 10


def test_every_subject_is_in_the_catalogue() -> None:
    """A module of descriptions that nobody lists would be neither checked nor documented."""
    there = {one.name for one in pkgutil.iter_modules(metrics.__path__)}
    assert set(metrics.SUBJECTS) == there
    assert len(metrics.SUBJECTS) == len(there)


def test_the_page_is_up_to_date() -> None:
    """docs/metrics.md is what the catalogue makes of it."""
    made = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert made == page(), "run: python -m hpml_exporters.metricsdoc > docs/metrics.md"
    for spec in metrics.ALL:
        assert f"| `{spec.name}` | {spec.type} |" in made


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"name": "disk_read_bytes_total"}, "is not hpml_ and words"),
        ({"name": "hpml_diskRead_bytes_total"}, "is not hpml_ and words"),
        ({"name": "hpml_disk__read_bytes_total"}, "is not hpml_ and words"),
        ({"name": "hpml_disk_read_bytes"}, "_total is the ending of a counter"),
        ({"type": "gauge"}, "_total is the ending of a counter"),
        ({"type": "info", "unit": ""}, "_info is the ending of a info"),
        ({"name": "hpml_disk_read_count", "type": "gauge", "unit": ""}, "ends in one of _bucket"),
        ({"name": "hpml_disk_read_kib_total", "unit": ""}, "kib is no base unit"),
        ({"name": "hpml_read_percent", "type": "gauge", "unit": ""}, "percent is no base unit"),
        ({"name": "hpml_clock_mhz_total", "unit": "mhz"}, "the unit mhz is none of"),
        ({"name": "hpml_disk_bytes_read_total"}, "its unit bytes is not the last word"),
        ({"unit": ""}, "its name says bytes, its unit does not"),
        ({"labels": ("le",)}, "label le is a histogram's own"),
        ({"labels": ("job",)}, "label job is Prometheus' own: say jobid"),
        ({"labels": ("instance",)}, "label instance is Prometheus' own"),
        ({"labels": ("__name",)}, "label __name is not words"),
        ({"labels": ("device", "device")}, "has a label twice"),
        ({"name": "hpml_x_info", "type": "info", "unit": "", "labels": ()}, "without labels"),
        ({"name": "hpml_x_bytes_info", "type": "info"}, "identity has no unit"),
        ({"help": "bytes read."}, "begin with a capital letter"),
        ({"help": "Bytes read"}, "end with a full stop"),
        ({"help": "Bytes. Read."}, "more than one sentence"),
        ({"help": "Bytes\nread."}, "more than one sentence"),
        ({"help": "B" * 220 + "."}, "longer than 200"),
        ({"source": ""}, "its source is not told"),
    ],
)
def test_every_rule_can_be_broken(changes: dict[str, object], fault: str) -> None:
    """What breaks a rule is told by that rule's words."""
    assert faults([GOOD]) == []
    told = faults([replace(GOOD, **changes)])  # type: ignore[arg-type]
    assert [one for one in told if fault in one], told


def test_names_are_nobody_elses() -> None:
    """Neither as a metric, nor as a family of OpenMetrics, nor as a series of a histogram."""
    assert faults([GOOD, TIMES]) == []
    assert faults([GOOD, GOOD]) == [f"{GOOD.name}: hpml_disk_read_bytes is also of {GOOD.name}"]
    gauge = replace(GOOD, name="hpml_disk_read_bytes", type="gauge")
    assert "is also of" in faults([GOOD, gauge])[0]
    summed = replace(GOOD, name="hpml_step_duration_seconds_sum", type="gauge", unit="")
    assert any("is also of hpml_step_duration_seconds" in one for one in faults([TIMES, summed]))


def one_of_each() -> list[Family]:
    """A series of every metric that there is."""
    levels = Histogram((0.5, 1.0), (1, 2), 3, 4.5)
    return [
        Family(
            spec,
            (Sample(tuple(spec.labels), levels if spec.type == "histogram" else 1),),
        )
        for spec in metrics.ALL
    ]


def test_promtool_likes_the_whole_catalogue() -> None:
    """Prometheus' linter has nothing to say of any name, type or help."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text(one_of_each()),
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_openmetrics_has_the_whole_catalogue() -> None:
    """The strict parser finds every family with its type and unit."""
    parsed: Any = parser.text_string_to_metric_families
    found = {one.name: one for one in parsed(openmetrics(one_of_each()).decode())}
    assert len(found) == len(metrics.ALL)
    for spec in metrics.ALL:
        one = found[spec.name.removesuffix("_total").removesuffix("_info")]
        assert (one.type, one.unit, one.documentation) == (spec.type, spec.unit, spec.help)
