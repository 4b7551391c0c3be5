"""The page of a diagnosis: complete, well-formed, self-contained, and readable without colours."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from hpml_orchestrator.diagnosis import shares
from hpml_orchestrator.diagnosis.model import Diagnosis, Finding, Peaks, RankFacts
from hpml_orchestrator.diagnosis.report import Report
from tests.unit.diagnosis import page_examples as examples
from tests.unit.diagnosis.page_examples import HOSTILE

VOID = {"meta", "link", "br", "rect", "line", "circle", "polygon"}
PAGES: dict[str, Callable[[], str]] = {
    "three findings": lambda: Report(examples.gpu_run()).html(),
    "1,024 ranks": lambda: Report(examples.crowd()).html(),
    "record only": lambda: Report(examples.unknowing()).html(),
    "healthy": lambda: Report(examples.diagnosed()).html(),
    "no phases": lambda: Report(examples.diagnosed(phases={})).html(),
    "nothing": lambda: Report(Diagnosis(examples.unknowing().facts)).html(),
}


class Tree(HTMLParser):
    """Checks that every element is closed in the right place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is open, and every id and label."""
        if tag not in VOID or tag == "rect":
            self.open.append(tag)
        known = dict(attrs)
        self.ids += [str(known["id"])] if "id" in known else []
        if tag == "svg" and "aria-hidden" not in known:
            assert known.get("role") == "img"
            self.labels.append(str(known["aria-label"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that closes itself."""

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        assert self.open.pop() == tag, (tag, self.getpos())


def shown(text: str) -> str:
    """The text of a page, with blanks between its parts."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", text)).split())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_stands_alone(name: str) -> None:
    """Nothing is loaded, no script runs, ids are unique, and each picture has a text."""
    text = PAGES[name]()
    tree = Tree(text)
    assert len(tree.ids) == len(set(tree.ids))
    assert all(tree.labels)
    assert not re.findall(r'<script|https?:|(?:src|href)="(?!#|data:)|url\((?!#)|@import', text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "NaN" not in text


def test_a_page_has_all_that_a_finding_says() -> None:
    """Level, verdict, evidence, changes with their fields, gain and cost, and what is unknown."""
    diagnosis = examples.gpu_run()
    text = shown(Report(diagnosis).html())
    for finding in diagnosis.findings:
        assert finding.verdict[1:] in text
        assert finding.level in text
        for line in finding.evidence:
            assert line in text
        for change in finding.changes:
            assert change.text[1:] in text
            assert change.field in text
    assert "at most 0.25 GPU-hours" in text
    assert "at most 29% of the run's time, if no step waited for data" in text
    assert "can change the accuracy" in text
    assert "hpml report digits-3f2a --apply tuned.yaml" in text
    assert "NVLink errors are unknown (needs driver 550)" in text
    assert all(line[1:] in text for line in diagnosis.healthy)


def test_every_counter_of_a_rank_has_a_place() -> None:
    """A new counter of seconds would be missing in the bars."""
    seconds = {field.name for field in fields(RankFacts) if field.name.endswith("_seconds")}
    # while a rank has no CPU, it is in one of the other parts
    assert seconds - {
        "step_seconds",
        "cpu_wait_seconds",
        "cpu_seconds",
        "helper_cpu_seconds",
        "loader_cpu_seconds",
        "python_cpu_seconds",
        "other_seconds",  # the script may count them in its steps, too
    } == set(shares.PARTS)


def pieces(text: str, label: str) -> dict[str, float]:
    """Width of each piece of a bar in percent, by its name and seconds."""
    bar = re.search(rf'<svg class="bar"[^>]*aria-label="{label}.*?</svg>', text, re.DOTALL)
    assert bar
    found = re.findall(r'width="([\d.]+)%"[^>]*><title>(.*?)</title>', bar[0])
    return {name: float(width) for width, name in found}


def test_bars_have_the_length_of_their_seconds() -> None:
    """Phases without the queue; the training with its parts and what is not in them."""
    text = Report(examples.gpu_run()).html()
    phases = pieces(text, "Phases")
    assert sum(phases.values()) == pytest.approx(100, abs=0.1)
    assert phases["training: 10:25"] == pytest.approx(100 * 625 / 751, abs=0.01)
    training = pieces(text, "Training")
    assert sum(training.values()) == pytest.approx(100, abs=0.1)
    assert training["waiting for data: 2:52"] == pytest.approx(100 * 172.5 / 625, abs=0.01)
    assert training["outside of steps: 8 s"] == pytest.approx(100 * 8 / 625, abs=0.01)
    slow, other = pieces(text, "rank 3"), pieces(text, "rank 0")
    assert sum(slow.values()) == pytest.approx(100, abs=0.1)
    compute = [
        next(width for name, width in bar.items() if "compute" in name) for bar in (slow, other)
    ]
    assert compute[0] > 1.2 * compute[1]
    assert "saving" not in " ".join(slow)


def test_unmeasured_parts_are_named_instead_of_drawn_as_nothing() -> None:
    """They are part of the bar of compute, with a note."""
    text = Report(examples.diagnosed(ranks=examples.ranks(4, waits=False))).html()
    assert "part of “compute” if it happens: waiting for slower ranks." in shown(text)
    assert "a slow rank is the one that waits least" not in text


def test_of_many_ranks_the_extremes_are_shown() -> None:
    """The slow rank is first among 1,024, of which most have no bar."""
    text = Report(examples.crowd()).html()
    bars = re.findall(r'aria-label="(rank \d+):', text)
    assert len(bars) == 10
    assert bars[0] == "rank 577"
    assert "1014 ranks in between" in text
    assert "All 256 nodes" in text
    assert len(text) < 250_000


CPU = Peaks({"float32": 46e9}, 4e9)  # as `hpml bench` measures it


@pytest.mark.parametrize(
    ("known", "sentence", "drawn"),
    [
        ({}, "At 115 FLOP/byte the memory bandwidth would allow 346 TFLOP/s", True),
        ({"peaks": Peaks({"bfloat16": 989e12}, origin="sheet")}, "No roofline: the bandw", False),
        ({"gpu_count": 0, "nodes": (), "achieved_flops": 2.4e9, "peaks": CPU},
         "so the run is a line: it has at least 0.6 FLOP/byte", True),
        ({"achieved_flops": 4 * 700e12, "peaks": Peaks({"bfloat16": 794e12}, 8e11)},
         "the compute units would allow 794 TFLOP/s", True),
        ({"achieved_flops": None, "nodes": ()}, None, False),
    ],
    ids=["memory", "no bandwidth", "CPU", "compute", "unknown"],
)  # fmt: skip
def test_the_roofline_is_drawn_if_its_figures_are_known(
    known: dict[str, Any], sentence: str | None, drawn: bool
) -> None:
    """With the limit that holds, and the origin of the peaks."""
    text = Report(examples.diagnosed(**known)).html()
    assert ("Compute against the hardware" in text) == (sentence is not None)
    assert (sentence or "") in shown(text)
    assert ('class="roofline"' in text) == drawn


def test_hostile_names_stay_text() -> None:
    """Names of runs, nodes, GPUs, files and metrics come from users and programs."""
    facts = examples.facts(
        run=HOSTILE,
        state=HOSTILE,
        job={"name": HOSTILE, HOSTILE: HOSTILE},
        phases={HOSTILE: 3.0, "training": 5.0},
        accuracy={HOSTILE: 0.5},
        ranks=[replace(rank, node=HOSTILE) for rank in examples.ranks(4)],
        nodes=[
            replace(
                node,
                node=HOSTILE,
                gpus=[
                    replace(gpu, name=HOSTILE, throttled_seconds={HOSTILE: 1.0})
                    for gpu in node.gpus
                ],
            )
            for node in examples.facts().nodes
        ],
        peaks=replace(examples.facts().peaks or Peaks(), flops={HOSTILE: 8e14}, origin=HOSTILE),
    )
    finding = replace(
        examples.DATA,
        verdict=HOSTILE,
        evidence=[f"`{HOSTILE}`"],
        changes=[
            replace(
                examples.DATA.changes[0],
                text=f"`{HOSTILE}`",
                value=[{"name": HOSTILE, "source": HOSTILE}],
            )
        ],
    )
    diagnosis = Diagnosis(
        facts, [finding], [Finding(HOSTILE, "unknown", HOSTILE, needs=HOSTILE)], [HOSTILE],
        [replace(finding, kind="memory-headroom", level="note")],
    )  # fmt: skip
    text = Report(diagnosis).html()
    Tree(text)
    assert not re.findall(r"<script|alert\(1\)<", text)
    assert len(re.findall("&lt;script&gt;", text)) > 5
