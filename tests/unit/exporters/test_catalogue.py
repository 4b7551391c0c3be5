"""Every metric keeps Prometheus' rules for names, and is documented."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.app import ALL, page
from hpml_exporters.core.collector import Histogram, MetricSpec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition, parser

ROOT = Path(__file__).parents[3]
UNITS = "seconds bytes ratio joules watts celsius hertz".split()
RESERVED = {"le", "quantile", "job", "instance"}  # Prometheus' own labels


@pytest.mark.parametrize("spec", ALL, ids=[spec.name for spec in ALL])
def test_names_units_and_help(spec: MetricSpec) -> None:
    """What promtool does not look at: one unit, at the end of the name, and sentences."""
    assert spec.name.startswith("hpml_")
    assert spec.name.endswith("_total") == (spec.type == "counter")
    assert spec.name.endswith("_info") == (spec.type == "info")
    unit = spec.family_name.rpartition("_")[2]
    assert spec.unit == (unit if unit in UNITS else "")
    assert not RESERVED & set(spec.labels)
    assert len(set(spec.labels)) == len(spec.labels)
    assert spec.help[0].isupper()
    assert spec.help.endswith(".")
    assert spec.source


def test_no_name_is_there_twice() -> None:
    """Neither as a metric nor as a family."""
    assert len({spec.name for spec in ALL}) == len({spec.family_name for spec in ALL}) == len(ALL)


def test_the_page_is_up_to_date() -> None:
    """docs/metrics.md is what the catalogue makes of it."""
    assert (ROOT / "docs" / "metrics.md").read_text("utf-8") == page(), "run `make docs`"


class OneOfEach:
    """A series of every metric that there is."""

    def collect(self) -> list[Metric]:
        """Return them; labels have their names as values."""
        levels = Histogram((0.5, 1.0), (1, 1, 1), 4.5)
        return [
            spec.family([(spec.labels, levels if spec.type == "histogram" else 1)]) for spec in ALL
        ]


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry with a series of every metric."""
    made = CollectorRegistry()
    made.register(OneOfEach())
    return made


def test_promtool_likes_the_whole_catalogue(registry: CollectorRegistry) -> None:
    """Prometheus' linter has nothing to say of any name, type or help."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(registry),
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_openmetrics_has_the_whole_catalogue(registry: CollectorRegistry) -> None:
    """The strict parser finds every family with its type and unit."""
    written: Any = exposition.generate_latest
    parsed: Any = parser.text_string_to_metric_families
    families = parsed(written(registry).decode())
    found = {one.name: (one.type, one.unit, one.documentation) for one in families}
    assert found == {spec.family_name: (spec.type, spec.unit, spec.help) for spec in ALL}


@pytest.mark.parametrize("number", [1, 0.1, -2.5e-7, 85899345920.0, 1.7976931348623157e308, 2**53])
def test_our_text_is_that_of_the_client_library(number: float) -> None:
    """Byte for byte, in both formats, also where labels or a help need an escape."""
    nasty = MetricSpec("hpml_nasty", "gauge", 'A "quoted" \\ help.', ("b", "a"), source="x")
    labels = [("plain", "a\nb"), ('"', "\\"), ("\udcff", "\0"), ("é", "")]
    levels = Histogram((0.5, 1.0), (1, 2, 3), 4.5)
    families = [
        spec.family([(spec.labels, levels if spec.type == "histogram" else number)]) for spec in ALL
    ]
    families.append(nasty.family((both, number) for both in labels))

    class All:
        def collect(self) -> list[Metric]:
            return list(families)

    registry = CollectorRegistry()
    registry.register(All())
    strict: Any = exposition.generate_latest
    for openmetrics, expected in ((False, generate_latest(registry)), (True, strict(registry))):
        text = "".join(family.text(openmetrics=openmetrics) for family in families)
        assert text == expected.decode().removesuffix("# EOF\n")
