"""A document in its three forms: the same content, fitted to a terminal, safe in a page."""

from __future__ import annotations

import re

import pytest

from hpml_orchestrator.document.model import (
    Bar,
    Bars,
    Block,
    Callout,
    DataTable,
    Details,
    Document,
    Drawing,
    Items,
    Judgement,
    Judgements,
    NamedValues,
    Paragraph,
    Preformatted,
    Section,
    Tiles,
)
from hpml_orchestrator.document.templates import page
from hpml_orchestrator.document.text import markdown, terminal

HOSTILE = "<script>alert(1)</script>"
POINT = Judgement(
    "waits for data",
    "critical",
    "at most 2 h",
    [Items(["31 % of each step"]), NamedValues([("change", "stage `data`")])],
)
PHASES = Bars("The run", [Bar("phases", {"start": 5.0, "training": 45.0})])
TRAINING = Bars("Training", [Bar("parts", {"compute": 30.0, "start": 10.0})], part_of="training")


def document(*blocks: Block) -> Document:
    """A report about a run with these blocks."""
    return Document("r1", "What holds r1 back?", "it waits", "r1  COMPLETED", blocks)


def test_a_terminal_shows_what_has_a_name() -> None:
    """Sections become fields; tiles, bars and folded details are left out."""
    text = terminal(
        document(
            NamedValues([("time", "start 10%")]),
            Tiles([("rate", "3/s", "mean")]),
            Judgements([POINT]),
            Section(
                "As it should be", [Items(["a", "b"], "good"), Paragraph("Why", True)], "healthy"
            ),
            Section("Where the time goes", [PHASES]),
            Details("more", [Paragraph("hidden")]),
        )
    )
    assert text.splitlines() == [
        "run       r1  COMPLETED",
        "verdict   it waits",
        "time      start 10%",
        "",
        f"1  waits for data (critical){'at most 2 h':>72}",
        "   31 % of each step",
        "   change    stage `data`",
        "",
        "healthy   a; b",
    ]


@pytest.mark.parametrize("lines", [12, 20, 40])
def test_points_and_listings_shrink_until_the_text_fits(lines: int) -> None:
    """The first point and three listed lines are always there; other points are named."""
    nine = [Judgement(f"point {n}", "warning", "", [Items(["why"] * 3)]) for n in range(9)]
    listed = Section("Functions", [Preformatted([f"function {n}" for n in range(50)])], "functions")
    text = terminal(document(Judgements(nine, 4), listed, Paragraph("the end")), lines=lines)
    assert len(text.splitlines()) <= lines
    assert text.count("(warning)") == {12: 1, 20: 2, 40: 4}[lines]
    assert f"also      point {text.count('(warning)')}; point" in text
    assert text.count("function") >= 1 if lines == 12 else text.count("function") >= 3
    assert lines == 12 or text.endswith("the end")


def test_long_values_are_wrapped_below_their_name() -> None:
    """Between words only; control characters of a terminal are removed."""
    lines = terminal(document(NamedValues([("why", "\x1b[31ma-b " * 40)])), width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2].startswith("why       [31ma-b ")
    assert all(line.startswith(" " * 10) for line in lines[3:])


def test_markdown_has_every_block_but_plots() -> None:
    """Bars become tables, fields and lists bullets."""
    text = markdown(
        document(
            Tiles([("rate", "3/s", "mean")]),
            Callout("Careful", "few runs", ["one", "two"]),
            Judgements([POINT]),
            Section("Time", [PHASES, Drawing("roof", "Roofline", "<svg/>")]),
            Details("All rows", [DataTable("Rows", [{"name": "a|b", "n": "3", "none": "-"}])]),
        )
    )
    assert text.startswith("# r1\n\nr1  COMPLETED\n\n**it waits**\n\n- rate: 3/s (mean)\n")
    assert "> **Careful.** few runs one; two" in text
    assert "## 1. waits for data (critical, at most 2 h)\n\n- 31 % of each step" in text
    assert "| phases | 5 s | 45 s |" in text
    assert "| name | n |\n| --- | ---: |\n| a\\|b | 3 |" in text
    assert "svg" not in text


def test_a_name_has_one_colour_in_all_bars() -> None:
    """Each bar has an axis; the part that another bar divides is drawn wider below it."""
    text = page(document(Section("Time", [PHASES, TRAINING], anchor="time")))
    drawn = re.findall(r'class="k(\d+)"><title>(.*?): (.*?)</title>', text)
    assert drawn == [
        ("1", "start", "5 s"),
        ("2", "training", "45 s"),
        ("3", "compute", "30 s"),
        ("1", "start", "10 s"),
    ]
    assert '<polygon class="k2" points="10.0,0 100.0,0 100,10 0,10"/>' in text
    assert ">40 s</text>" in text
    assert "<i>total</i> <b>50 s</b>" in text


def test_many_names_are_told_apart_by_hatching() -> None:
    """The style sheet has eleven colours."""
    text = page(document(Bars("Many", [Bar("one", {f"part {n}": 1.0 for n in range(14)})])))
    assert re.findall(r'<pattern id="(k\d+)"', text) == ["k12", "k13", "k14"]
    assert "fill: url(#k12)" in text


def test_a_page_marks_code_and_addresses_and_nothing_else() -> None:
    """What users and programs write stays text."""
    shown = page(
        document(
            Paragraph(f"run `hpml {HOSTILE}`, see https://example.org/a?b=1&c"),
            DataTable(HOSTILE, [{HOSTILE: HOSTILE}]),
            Judgements(
                [
                    Judgement(
                        HOSTILE, HOSTILE, HOSTILE, [NamedValues([(HOSTILE, [HOSTILE, HOSTILE])])]
                    )
                ]
            ),
        )
    )
    assert "<code>hpml &lt;script&gt;alert(1)&lt;/script&gt;</code>" in shown
    assert '<a href="https://example.org/a?b=1&amp;c">' in shown
    assert "<script" not in shown
