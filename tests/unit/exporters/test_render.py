"""What is rendered is read back by Prometheus' own parsers as what it was."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading

import pytest
from hpml_exporters.metric import Family, Histogram, MetricSpec, Sample
from hpml_exporters.render import Renderer, openmetrics, text
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

COUNTER = MetricSpec("hpml_x_bytes_total", "counter", "Bytes of x.", ("a", "b"), "bytes", "x")
GAUGE = MetricSpec("hpml_x_watts", "gauge", "Power of x.", ("a",), "watts", "x")
INFO = MetricSpec("hpml_x_info", "info", "Which x.", ("a", "b"), "", "x")
STEPS = MetricSpec("hpml_x_step_seconds", "histogram", "Steps of x.", ("a",), "seconds", "x")
FAMILIES = [
    Family(COUNTER, (Sample(("1", "2"), 7), Sample(("1", ""), 2**60 + 1))),
    Family(GAUGE, (Sample(("one",), -0.25),)),
    Family(INFO, (Sample(("one", "two"), 1),)),
    Family(STEPS, (Sample(("one",), Histogram((0.5, 2.0), (3, 4), 5, 9.5)),)),
]
LABELS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats())


def test_the_text_format() -> None:
    """Every type as the documentation of the format has it; info is a gauge there."""
    assert text(FAMILIES).decode() == (
        "# HELP hpml_x_bytes_total Bytes of x.\n"
        "# TYPE hpml_x_bytes_total counter\n"
        'hpml_x_bytes_total{a="1",b="2"} 7\n'
        'hpml_x_bytes_total{a="1"} 1152921504606846977\n'
        "# HELP hpml_x_watts Power of x.\n"
        "# TYPE hpml_x_watts gauge\n"
        'hpml_x_watts{a="one"} -0.25\n'
        "# HELP hpml_x_info Which x.\n"
        "# TYPE hpml_x_info gauge\n"
        'hpml_x_info{a="one",b="two"} 1\n'
        "# HELP hpml_x_step_seconds Steps of x.\n"
        "# TYPE hpml_x_step_seconds histogram\n"
        'hpml_x_step_seconds_bucket{a="one",le="0.5"} 3\n'
        'hpml_x_step_seconds_bucket{a="one",le="2.0"} 4\n'
        'hpml_x_step_seconds_bucket{a="one",le="+Inf"} 5\n'
        'hpml_x_step_seconds_sum{a="one"} 9.5\n'
        'hpml_x_step_seconds_count{a="one"} 5\n'
    )


def test_openmetrics() -> None:
    """Families have no suffix, a unit has its line, and the end is marked."""
    assert openmetrics(FAMILIES).decode() == (
        "# TYPE hpml_x_bytes counter\n"
        "# UNIT hpml_x_bytes bytes\n"
        "# HELP hpml_x_bytes Bytes of x.\n"
        'hpml_x_bytes_total{a="1",b="2"} 7\n'
        'hpml_x_bytes_total{a="1"} 1152921504606846977\n'
        "# TYPE hpml_x_watts gauge\n"
        "# UNIT hpml_x_watts watts\n"
        "# HELP hpml_x_watts Power of x.\n"
        'hpml_x_watts{a="one"} -0.25\n'
        "# TYPE hpml_x info\n"
        "# HELP hpml_x Which x.\n"
        'hpml_x_info{a="one",b="two"} 1\n'
        "# TYPE hpml_x_step_seconds histogram\n"
        "# UNIT hpml_x_step_seconds seconds\n"
        "# HELP hpml_x_step_seconds Steps of x.\n"
        'hpml_x_step_seconds_bucket{a="one",le="0.5"} 3\n'
        'hpml_x_step_seconds_bucket{a="one",le="2.0"} 4\n'
        'hpml_x_step_seconds_bucket{a="one",le="+Inf"} 5\n'
        'hpml_x_step_seconds_sum{a="one"} 9.5\n'
        'hpml_x_step_seconds_count{a="one"} 5\n'
        "# EOF\n"
    )
    assert openmetrics([]) == b"# EOF\n"
    assert text([]) == b""


@pytest.mark.parametrize(
    ("render", "parse"), [(text, parse_text), (openmetrics, parse_openmetrics)]
)
@given(labels=st.tuples(LABELS, LABELS), value=NUMBERS, told=LABELS)
def test_whatever_stands_in_a_label_comes_back(
    render: object, parse: object, labels: tuple[str, str], value: float, told: str
) -> None:
    """Quotes, backslashes, line breaks and all other characters, and every number."""
    spec = MetricSpec("hpml_x", "gauge", told, ("a", "b"), "", "x")
    body = render([Family(spec, (Sample(labels, value),))])  # type: ignore[operator]
    (family,) = parse(body.decode("utf-8"))  # type: ignore[operator]
    (sample,) = family.samples
    assert sample.labels == {name: one for name, one in zip("ab", labels, strict=True) if one}
    assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))
    if told == told.strip():  # what surrounds it is no part of it to the parser of text
        assert family.documentation == told


def test_what_cannot_be_written_does_not_break_the_rest() -> None:
    """A name that is no UTF-8, and NUL, at which parsers stop, are replaced."""
    samples = (Sample(("a\udcffb",), 1), Sample(("c\0d",), 2))
    families = [Family(GAUGE, samples), Family(COUNTER, (Sample(("x", "y"), 3),))]
    lines = text(families).decode("utf-8").splitlines()
    found = {line.split('"')[1]: line.rsplit(" ", 1)[1] for line in lines if "{" in line}
    assert found == {"a?b": "1", "c\ufffdd": "2", "x": "3"}


def test_a_counter_that_is_no_number_is_not_there() -> None:
    """NaN and less than nothing are no counts; as gauges both are shown."""
    bad = (math.nan, -1, -0.5)
    counter = Family(COUNTER, tuple(Sample((str(n), ""), v) for n, v in enumerate(bad)))
    assert text([counter]) == b""
    gauge = Family(GAUGE, tuple(Sample((str(n),), v) for n, v in enumerate((*bad, -math.inf))))
    lines = text([gauge]).decode().splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["NaN", "-1", "-0.5", "-Inf"]


def test_one_metric_of_several_collectors_is_one_family() -> None:
    """Its lines stand together under one head, and a series that two of them show stands once."""
    first = Family(GAUGE, (Sample(("one",), 1), Sample(("two",), 2)))
    other = Family(COUNTER, (Sample(("", ""), 0),))
    second = Family(GAUGE, (Sample(("three",), 3), Sample(("one",), 9)))
    lines = [
        line
        for line in text([first, other, second]).decode().splitlines()
        if not line.startswith("#")
    ]
    assert lines == [
        'hpml_x_watts{a="one"} 1',
        'hpml_x_watts{a="two"} 2',
        'hpml_x_watts{a="three"} 3',
        "hpml_x_bytes_total 0",
    ]
    assert openmetrics([first, other, second]).count(b"# TYPE") == 2


def test_truth_is_one_and_untruth_is_zero() -> None:
    """A bool is shown as a number."""
    family = Family(GAUGE, (Sample(("a",), True), Sample(("b",), False)))
    assert text([family]).decode().splitlines()[2:] == [
        'hpml_x_watts{a="a"} 1',
        'hpml_x_watts{a="b"} 0',
    ]


def test_what_is_remembered_is_what_is_shown() -> None:
    """Series that come and go, as jobs do, leave nothing behind."""
    renderer = Renderer()
    for turn in range(50):
        renderer.text([Family(GAUGE, tuple(Sample((f"{turn}-{n}",), n) for n in range(20)))])
        assert renderer.remembered == 20
    renderer.text([])
    assert renderer.remembered == 0


def test_several_may_render_at_once() -> None:
    """Scrapes of different snapshots share what is remembered, and get their own numbers."""
    renderer, wrong = Renderer(), []

    def scrape(number: int) -> None:
        family = Family(GAUGE, tuple(Sample((f"{n}",), number) for n in range(50)))
        for _ in range(40):
            values = {line.split()[1] for line in renderer.text([family]).splitlines()[2:]}
            if values != {str(number).encode()}:
                wrong.append(values)

    threads = [threading.Thread(target=scrape, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_promtool_finds_nothing_to_say() -> None:
    """Prometheus' own linter reads the text format and is content."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    good = [FAMILIES[0], FAMILIES[1], FAMILIES[3]]
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text(good), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
