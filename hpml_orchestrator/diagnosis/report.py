"""The report of a run: its diagnosis as a document, and so as text, Markdown, page and JSON.

The sentences of the report are in `templates/report/run.j2`; each finding brings its own.
"""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from statistics import fmean

from hpml_orchestrator.diagnosis import shares
from hpml_orchestrator.diagnosis.apply import next_step
from hpml_orchestrator.diagnosis.averaging import FACTOR, averaging
from hpml_orchestrator.diagnosis.model import Diagnosis, Facts, Finding, NodeFacts, RankFacts
from hpml_orchestrator.diagnosis.models import Roofline, imbalance, roofline
from hpml_orchestrator.diagnosis.profile import TraceProfile
from hpml_orchestrator.diagnosis.shares import hours, hours_unit
from hpml_orchestrator.document.model import (
    Bar,
    Bars,
    Block,
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
from hpml_orchestrator.document.templates import drawing, number, page, percent, sentences
from hpml_orchestrator.document.text import duration_cell, markdown, terminal
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import duration_text, human_bytes, rate_text, seconds_text

_SHOWN = 3  # findings that a terminal prints in full
_MOST_RANKS = 16
_MOST_NODES = 16
_ENDS = 5  # slowest and fastest ranks that are shown of many
_SMALL_SHARE = 0.01
_WIDTH, _HEIGHT = 440, 300  # of the roofline
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 14, 44


class Page(ABC):
    """A report with a page, which a notebook displays."""

    @abstractmethod
    def html(self) -> str:
        """Return the page: one HTML file without scripts that fetches nothing."""

    def _repr_html_(self) -> str:
        source = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:40em;border:0"></iframe>'


class Report(Page):
    """Why a run is slow, and what to change; `str` gives the text of `hpml report`.

    Attributes:
        headline: what holds the run back most, in one line.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self.headline: str = diagnosis.headline

    @property
    def findings(self) -> list[dict[str, object]]:
        """One dictionary per finding, as in `hpml report --json`."""
        return [asdict(finding) for finding in self._diagnosis.findings]

    def __str__(self) -> str:
        return terminal(_document(self._diagnosis))

    def markdown(self) -> str:
        """Return the text of `hpml report --markdown`."""
        return markdown(_document(self._diagnosis))

    def html(self) -> str:
        """Return the page that `hpml report --html` writes."""
        return page(_document(self._diagnosis))

    def to_dict(self) -> dict[str, object]:
        """Return the whole report, with the facts that it is based on.

        The job is left out: the record of the run has it.
        """
        value = asdict(replace(self._diagnosis, findings=[*self._diagnosis.findings]))
        del value["facts"]["job"]
        averaged = averaging(self._diagnosis.facts)
        return {
            "headline": self.headline,
            **value,
            "averaging": asdict(averaged) if averaged else None,
        }


def status_line(facts: Facts) -> str:
    """Return the run, its state and what it took, in one line."""
    return _say("status", facts, hours(facts), hours_unit(facts))


def _say(sentence: str, *figures: object) -> str:
    return sentences("run.j2")(sentence, *figures)


def _document(diagnosis: Diagnosis) -> Document:
    facts = diagnosis.facts
    known = {"failed": diagnosis.failure, "time": diagnosis.time}
    blocks: list[Block] = [
        NamedValues([pair for pair in known.items() if pair[1]]),
        Tiles(_tiles(facts)),
        *_findings(diagnosis),
        *_time(facts),
        *(_profile(facts.profile) if facts.profile else ()),
    ]
    if found := averaging(facts):
        texts = (
            Paragraph(_say("averaged", found, FACTOR)),
            Paragraph(_say("averaging"), is_note=True),
        )
        blocks.append(Section("Averaging of gradients", texts, "averaging"))
    if facts.formulas:
        text = _say("formulas", facts.formulas)
        blocks.append(Section("Measured, and by formula", [Paragraph(text)], "formulas"))
    blocks += [*_ranks(facts), *_roofline(roofline(facts)), *_nodes(facts)]
    return Document(
        facts.run,
        f"What holds {facts.run} back?",
        diagnosis.headline,
        status_line(facts),
        blocks,
    )


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return label, figure and note of what a reader wants to see first."""
    tiles = []
    if facts.elapsed_seconds is not None:
        limit = _say("limit", facts.limit_seconds)
        tiles.append(("run time", seconds_text(facts.elapsed_seconds), limit))
    if rate := shares.samples_per_second(facts.ranks):
        tiles.append(("throughput", f"{number(rate)}/s", "samples, all ranks, within steps"))
    if (share := shares.step_shares(facts.ranks).get(shares.COMPUTE)) is not None:
        tiles.append(("compute", percent(share), "of the steps"))
    if roof := roofline(facts):
        tiles.append(
            ("of the peak", percent(roof.flops / roof.peak), rate_text(roof.flops, "FLOP/s"))
        )
    return tiles + [(name, number(value), "final") for name, value in facts.accuracy.items()][:2]


# --- findings


def _findings(diagnosis: Diagnosis) -> Iterator[Block]:
    facts, step = diagnosis.facts, next_step(diagnosis)
    if diagnosis.findings:
        yield Judgements([_judgement(one, facts) for one in diagnosis.findings], _SHOWN)
    else:
        text = _say("nothing", facts.failed, diagnosis.is_clear)
        yield Paragraph(text, is_note=True)
    if step:
        yield NamedValues([("next", step)])
    if step and diagnosis.findings:
        yield Paragraph(_say("next", "--try" in step), is_note=True)
    if diagnosis.notes:
        reasons = [
            Paragraph(_say("note", one, _changes(one)), is_note=True)
            for one in diagnosis.notes
            if one.evidence or one.changes
        ]
        verdicts = Items([one.verdict for one in diagnosis.notes])
        yield Section("Notes", [verdicts, *reasons], "note", "notes")
    if diagnosis.healthy:
        yield Section("As it should be", [Items(diagnosis.healthy, "good")], "healthy", "healthy")
    if diagnosis.unknown:
        missing = Items([_say("unknown", one) for one in diagnosis.unknown], "unknown")
        yield Section("Unknown", [missing], "unknown", "unknown")


def _judgement(finding: Finding, facts: Facts) -> Judgement:
    pairs = [("change", text) for text in _changes(finding)]
    if finding.gain is not None:
        pairs.append(("gain", _say("gain", finding)))
    cost = ""
    if finding.gain_hours:
        cost = _say("cost", finding, hours_unit(facts), facts.attempts)
    blocks = Items(finding.evidence), NamedValues(pairs)
    return Judgement(finding.verdict, finding.level, cost, blocks)


def _changes(finding: Finding) -> list[str]:
    return [_say("change", one) for one in finding.changes]


# --- time


def _time(facts: Facts) -> Iterator[Section]:
    """Yield the bars of the phases without the queue, and of the training."""
    phases = {name: value for name, value in facts.phases.items() if value > 0 and name != "queue"}
    training = shares.mean_parts(facts.ranks)
    trained, stepped = phases.get("training", 0.0), sum(training.values())
    if training and trained - stepped > _SMALL_SHARE * trained:  # else it is rounding
        training["outside of steps"] = trained - stepped
    training = {name: value for name, value in training.items() if value > 0}
    blocks: list[Block] = []
    if phases:
        note = _say("queue", facts.phases.get("queue"))
        blocks.append(Bars("The run", [Bar("Phases", phases)], note))
    if training:
        part_of = "training" if "training" in phases else ""
        bar = Bar("Training", training)
        blocks.append(Bars("Training", [bar], "mean of the ranks", part_of))
    missing = [
        name
        for field, name in shares.PARTS.items()
        if (field != "transfer_seconds" or facts.gpu_count)
        and (field not in shares.SAMPLED or facts.world_size > 1)
        and all(getattr(rank, field) is None for rank in facts.ranks)
    ]
    if training and missing:
        blocks.append(Paragraph(_say("missing", missing), is_note=True))
    if blocks:
        yield Section("Where the time goes", blocks, anchor="time")


def _profile(profile: TraceProfile) -> Iterator[Section]:
    texts = Paragraph(profile.text()), Paragraph(_say("profile"), is_note=True)
    yield Section("Profile", texts, "profile", "profile")
    if profile.path:
        yield Section("Critical path", [Paragraph(profile.path.text())], "path")
    if python := profile.python:
        functions = Preformatted(python.lines(len(python.functions)))
        yield Section("Python", [Paragraph(python.text()), functions], "the rest")


# --- ranks


def _ranks(facts: Facts) -> Iterator[Section]:
    """Yield a bar for each rank; of many, those that work longest and shortest."""
    known = [rank for rank in facts.ranks if shares.rank_parts(rank)]
    if not known:
        return
    per_step = all(rank.steps for rank in known)
    rows = sorted(
        ((rank, *_spent(rank, per_step=per_step)) for rank in known),
        key=lambda row: -row[2] if len(known) > _MOST_RANKS else 0.0,
    )
    hidden = len(rows) - 2 * _ENDS if len(rows) > _MOST_RANKS else 0
    shown = rows[:_ENDS] + rows[-_ENDS:] if hidden else rows
    worked = [worked for *_, worked in rows]
    share = imbalance(worked) if max(worked) else 0.0
    waits = all(shares.own_seconds(rank) is not None for rank in known)
    unit = "step" if per_step else "run"
    bars = Bars(
        "Mean time of one step" if per_step else "Time of all steps",
        [Bar(f"rank {rank.rank}", inside, rank.node) for rank, inside, _ in shown],
        gap=(_ENDS, f"{hidden} ranks in between") if hidden else None,
    )
    table = DataTable(
        f"Ranks: per {unit}",
        [
            {
                "rank": rank.rank,
                "node": rank.node,
                **{name: duration_cell(inside.get(name)) for name in bars.names},
                "whole": duration_text(sum(inside.values())),
                "samples": number(rank.samples),
                "bound as planned": {True: "yes", False: "no", None: ""}[rank.bound_as_planned],
            }
            for rank, inside, _ in shown
        ],
    )
    text = Paragraph(_say("imbalance", share, waits), is_note=True)
    details = Details(f"Figures of {'these' if hidden else 'all'} ranks", [table])
    yield Section("Ranks", [bars, text, details], anchor="ranks")


def _spent(rank: RankFacts, *, per_step: bool) -> tuple[dict[str, float], float]:
    """Return the seconds of a rank's steps by part, and without its waiting for others."""
    count = (rank.steps or 1) if per_step else 1
    inside = {
        name: value / count
        for name, value in shares.rank_parts(rank).items()
        if name not in shares.BETWEEN_STEPS
    }
    own = shares.own_seconds(rank)
    return inside, sum(inside.values()) if own is None else own / count


# --- roofline


def _roofline(roof: Roofline | None) -> Iterator[Section]:
    if roof is None:
        return
    texts = [_say("rate", roof), _say("bound", roof)]
    blocks: list[Block] = [Paragraph(text) for text in texts]
    if roof.bandwidth and roof.ridge:
        figures = _plot(roof, roof.bandwidth, roof.ridge)
        svg = drawing("roofline.svg.j2", plot=figures, roof=roof, label=" ".join(texts))
        blocks.append(Drawing("roofline", _say("peaks", roof), svg))
    else:
        blocks.append(Paragraph(_say("peaks", roof), is_note=True))
    yield Section("Compute against the hardware", blocks, anchor="roofline")


def _plot(roof: Roofline, bandwidth: float, ridge: float) -> dict[str, object]:
    """Return the places of the lines of a roofline plot with logarithmic axes."""
    # Code with fewer FLOP per byte could not have reached these FLOP/s.
    here = roof.intensity or roof.flops / bandwidth
    x = _decades(min(here, ridge), max(here, ridge))
    lowest = min(roof.flops, x[0] * bandwidth)
    y = _decades(max(lowest, roof.peak * 1e-6), roof.peak)

    def at(intensity: float, flops: float) -> tuple[float, float]:
        across = (math.log10(intensity) - math.log10(x[0])) / math.log10(x[-1] / x[0])
        up = (math.log10(flops) - math.log10(y[0])) / math.log10(y[-1] / y[0])
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + across * width, 1), round(_TOP + (1 - up) * height, 1)

    start = max(x[0], y[0] / bandwidth)
    return {
        "size": (_WIDTH, _HEIGHT),
        "right": _WIDTH - _RIGHT,
        "slope": (at(start, start * bandwidth), at(ridge, roof.peak)),
        "roofs": [
            (dtype, at(peak / bandwidth, peak), at(x[-1], peak), peak)
            for dtype, peak in roof.peaks.items()
            if x[0] < peak / bandwidth < x[-1]
        ],
        "point": at(here, roof.flops),
        "limit": at(here, roof.limit) if roof.intensity else None,
        "reach": at(x[-1], roof.flops),
        "x": [(number(tick), at(tick, y[0])) for tick in x],
        "y": [(rate_text(tick, ""), at(x[0], tick)) for tick in y],
    }


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low / 2)), math.ceil(math.log10(high * 2))
    return [10.0**power for power in range(first, last + 1)]


# --- nodes


def _nodes(facts: Facts) -> Iterator[Section]:
    if facts.nodes:
        title = counted(len(facts.nodes), "node")
        table = DataTable(title, [_node(node, facts) for node in facts.nodes])
        is_long = len(facts.nodes) > _MOST_NODES
        yield Section("Nodes", [Details(f"All {title}", [table]) if is_long else table])


def _node(node: NodeFacts, facts: Facts) -> dict[str, str]:
    """Return a row of the table of nodes; columns that nothing is known for are left out."""
    gpus = node.gpus

    def mean(name: str) -> str:
        values = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
        return percent(fmean(values)) if values else "-"

    def most(name: str) -> float | None:
        return max(
            (value for gpu in gpus if (value := getattr(gpu, name)) is not None), default=None
        )

    ranks = [rank.rank for rank in facts.ranks if rank.node == node.node]
    throttled = {reason for gpu in gpus for reason, s in gpu.throttled_seconds.items() if s > 0}
    errors = {f"XID {xid}" for gpu in gpus for xid, count in gpu.xid_errors.items() if count}
    errors |= {f"{node.oom_events:.0f} out of memory"} if node.oom_events else set()
    return {
        "node": node.node,
        "ranks": counted(len(ranks), "rank") if ranks else "-",
        "CPUs busy": _of(node.mean_cpus, node.cpus, number),
        "memory peak": _of(node.memory_peak_bytes, node.memory_limit_bytes, human_bytes),
        "read from storage": _bytes(node.read_bytes),
        "written": _bytes(node.written_bytes),
        "GPUs": " + ".join(sorted({gpu.name for gpu in gpus if gpu.name})) or "-",
        "GPUs used": _of(node.gpus_used, node.gpus_allocated, number),
        "GPU busy": mean("utilization_ratio"),
        "SMs active": mean("sm_active_ratio"),
        "tensor cores": mean("tensor_active_ratio"),
        "GPU memory peak": _of(most("memory_peak_bytes"), most("memory_total_bytes"), human_bytes),
        "remarks": ", ".join([*sorted(errors), *(f"throttled: {one}" for one in sorted(throttled))])
        or "-",
    }


def _of(value: float | None, whole: float | None, text: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return text(value) if whole is None else f"{text(value)} of {text(whole)}"


def _bytes(count: float | None) -> str:
    return "-" if count is None else human_bytes(count)
