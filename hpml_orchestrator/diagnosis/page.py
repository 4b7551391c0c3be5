"""A diagnosis as a page: one HTML file without scripts that fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from hpml_orchestrator import __version__
from hpml_orchestrator.diagnosis import parts
from hpml_orchestrator.diagnosis.apply import next_step
from hpml_orchestrator.diagnosis.averaging import averaging
from hpml_orchestrator.diagnosis.model import Diagnosis, Facts, Finding, NodeFacts
from hpml_orchestrator.diagnosis.models import Roofline, imbalance, roofline
from hpml_orchestrator.diagnosis.wording import (
    change_text,
    cost_text,
    formulas_text,
    gain_text,
    status_line,
)
from hpml_orchestrator.document.templates import environment, number, percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import duration_text, human_bytes, rate_text, seconds_text

_COLOURS = {  # by phase and part, as numbered in style.css
    "start-up": 6, "staging": 5, "launch": 8, "rendezvous": 7, "preparation": 1,
    "warm-up": 4, "running": 3, "training": 3, "end": 9,
    parts.COMPUTE: 3, "waiting for data": 2, "host to device": 5, "waiting for slower ranks": 7,
    "communication": 4, "saving": 6, "evaluation": 8, "outside of steps": 9,
}  # fmt: skip
_MOST_RANKS = 16
_ENDS = 5  # slowest and fastest ranks that are shown of many
_SMALL_SHARE = 0.01
_WIDTH, _HEIGHT = 440, 300  # of the roofline
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 14, 44


@dataclass(frozen=True)
class _Piece:
    """A piece of a bar: place and width in percent."""

    name: str
    colour: int
    start: float
    width: float
    text: str  # seconds
    share: str


def page(diagnosis: Diagnosis) -> str:
    """Return a self-contained page for light and dark screens, phones and paper."""
    facts = diagnosis.facts
    template = environment("html").get_template("run.html.j2")
    return template.render(
        diagnosis=diagnosis,
        facts=facts,
        title=f"{facts.run}: {diagnosis.headline}",
        next_step=next_step(diagnosis),
        footer=f"hpml {__version__}",
        answer=[
            _sentence(diagnosis.headline),
            f"{status_line(diagnosis)}.",
            *([f"Why it failed: {why}."] if (why := diagnosis.failure) else []),
        ],
        cards=_cards(diagnosis),
        findings=[_finding(one, facts) for one in diagnosis.findings],
        notes=[_finding(one, facts) for one in diagnosis.notes],
        unknown=[(_sentence(one.verdict), one.needs) for one in diagnosis.unknown],
        healthy=[_sentence(one) for one in diagnosis.healthy],
        time=_time(facts),
        averaging=found.text() if (found := averaging(facts)) else "",
        formulas=formulas_text(facts),
        ranks=_ranks(facts),
        roof=_roof(roofline(facts)),
        nodes=[_node(node, facts) for node in facts.nodes],
        colours=_COLOURS,
    )


def _without_queue(facts: Facts) -> dict[str, float]:
    return {name: value for name, value in facts.phases.items() if name != "queue"}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cards(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """Return label, figure and note of what a reader wants to see first."""
    facts = diagnosis.facts
    cards = []
    if facts.elapsed_seconds is not None:
        limit = f"of {seconds_text(facts.limit_seconds)} asked for" if facts.limit_seconds else ""
        cards.append(("run time", seconds_text(facts.elapsed_seconds), limit))
    if rate := parts.samples_per_second(facts.ranks):
        cards.append(("throughput", f"{number(rate)}/s", "samples, all ranks, within steps"))
    if training := parts.mean_parts(facts.ranks):
        share = training[parts.COMPUTE] / sum(training.values())
        cards.append(("compute", percent(share), "of the time in training"))
    if roof := roofline(facts):
        cards.append(
            ("of the peak", percent(roof.flops / roof.peak), rate_text(roof.flops, "FLOP/s"))
        )
    cards += [(name, number(value), "final") for name, value in facts.accuracy.items()][:2]
    return cards


def _finding(finding: Finding, facts: Facts) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "level": finding.level,
        "verdict": _sentence(finding.verdict),
        "evidence": finding.evidence,
        "changes": [_sentence(change_text(one)) for one in finding.changes],
        "gain": finding.gain,
        "gain_text": gain_text(finding),
        "hours": cost_text(finding, facts),
    }


# --- time


def _pieces(seconds: Mapping[str, float], total: float = 0.0) -> list[_Piece]:
    """Return the pieces of one bar; `total` is the length of 100 %."""
    total = max(total, sum(seconds.values()))
    pieces, here = [], 0.0
    for name, value in seconds.items():
        if value > 0 and total > 0:
            share = 100 * value / total
            pieces.append(
                _Piece(
                    name,
                    _COLOURS.get(name, 10),
                    round(here, 3),
                    round(share, 3),
                    duration_text(value),
                    percent(value / total),
                )
            )
            here += share
    return pieces


def _time(facts: Facts) -> dict[str, object]:
    """Return the bars of the phases and of the training, and where the second is in the first."""
    phases = _without_queue(facts)
    training = parts.mean_parts(facts.ranks)
    trained, stepped = phases.get("training", 0.0), sum(training.values())
    if training and trained - stepped > _SMALL_SHARE * trained:  # else it is rounding
        training["outside of steps"] = trained - stepped
    first = _pieces(phases)
    zoom = next(((one.start, one.start + one.width) for one in first if one.name == "training"), ())
    may_lack = dict(parts.PARTS)
    if not facts.gpu_count:
        del may_lack["transfer_seconds"]
    if facts.world_size == 1:
        del may_lack["wait_seconds"], may_lack["comm_seconds"]
    missing = [
        name
        for field, name in may_lack.items()
        if training and all(getattr(rank, field) is None for rank in facts.ranks)
    ]
    return {
        "queue": duration_text(facts.phases["queue"]) if facts.phases.get("queue") else "",
        "phases": first,
        "zoom": zoom if training else (),
        "training": _pieces(training),
        "missing": missing,
    }


# --- ranks


def _ranks(facts: Facts) -> dict[str, object] | None:
    """Return a bar for each rank; of many, those that work longest and shortest."""
    known = [(rank, parts.rank_parts(rank)) for rank in facts.ranks]
    known = [(rank, spent) for rank, spent in known if spent]
    if not known:
        return None
    per_step = all(rank.steps for rank, _ in known)
    rows = []
    for rank, spent in known:
        count = (rank.steps or 1) if per_step else 1
        inside = {
            name: value / count for name, value in spent.items() if name not in parts.BETWEEN_STEPS
        }
        own = parts.own_seconds(rank)
        worked = sum(inside.values()) if own is None else own / count
        rows.append((rank, inside, worked))
    longest = max(sum(inside.values()) for _, inside, _ in rows)
    longest_work = max(worked for *_, worked in rows)
    shown, hidden = rows, 0
    if len(rows) > _MOST_RANKS:
        rows.sort(key=lambda row: -row[2])
        shown, hidden = rows[:_ENDS] + rows[-_ENDS:], len(rows) - 2 * _ENDS
    return {
        "bars": [
            {
                "label": f"rank {rank.rank}",
                "node": rank.node,
                "pieces": _pieces(inside, longest),
                "total": duration_text(sum(inside.values())),
                "worked": duration_text(worked),
            }
            for rank, inside, worked in shown
        ],
        "hidden": hidden,
        "after": _ENDS if hidden else 0,
        "unit": "step" if per_step else "run",
        "legend": list(dict.fromkeys(name for _, inside, _ in rows for name in inside)),
        "imbalance": percent(imbalance([worked for *_, worked in rows]) if longest_work else 0.0),
        "waits": all(parts.own_seconds(rank) is not None for rank, _, _ in rows),
        "table": [
            {
                "rank": rank.rank,
                "node": rank.node,
                **{name: duration_text(value) for name, value in inside.items()},
                "whole": duration_text(sum(inside.values())),
                "samples": number(rank.samples),
                "bound as planned": {True: "yes", False: "no", None: ""}[rank.bound_as_planned],
            }
            for rank, inside, _ in shown
        ],
    }


# --- roofline


def _roof(roof: Roofline | None) -> dict[str, object] | None:
    """Return the lines of a roofline plot with logarithmic axes, and the sentences under it."""
    if roof is None:
        return None
    of_peak = percent(roof.flops / roof.peak)
    rate = rate_text(roof.flops, "FLOP/s")
    text = [f"{rate} per {roof.device}, {of_peak} of the peak ({roof.source})"]
    drawing: dict[str, object] = {"text": text, "origin": roof.origin, "plot": None}
    if roof.bandwidth is None or roof.ridge is None:
        text.append("No roofline: the bandwidth of the memory is unknown")
        return drawing
    # Code with fewer FLOP per byte could not have reached these FLOP/s.
    least = roof.flops / roof.bandwidth
    if roof.intensity is None:
        text.append(
            "The bytes that the memory moved are unknown, so the run is a line: it has at least"
            f" {number(least)} FLOP/byte, where the line meets the slope"
        )
    else:
        by = "memory bandwidth" if roof.intensity < roof.ridge else "compute units"
        text.append(
            f"At {number(roof.intensity)} FLOP/byte the {by} would allow"
            f" {rate_text(roof.limit, 'FLOP/s')}: the run reaches"
            f" {percent(roof.flops / roof.limit)} of it"
        )
    here = roof.intensity or least
    x = _decades(min(here, roof.ridge), max(here, roof.ridge))
    lowest = min(roof.flops, x[0] * roof.bandwidth)
    y = _decades(max(lowest, roof.peak * 1e-6), roof.peak)

    def at(intensity: float, flops: float) -> tuple[float, float]:
        across = (math.log10(intensity) - math.log10(x[0])) / math.log10(x[-1] / x[0])
        up = (math.log10(flops) - math.log10(y[0])) / math.log10(y[-1] / y[0])
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + across * width, 1), round(_TOP + (1 - up) * height, 1)

    start = max(x[0], y[0] / roof.bandwidth)
    drawing["plot"] = {
        "size": (_WIDTH, _HEIGHT),
        "right": _WIDTH - _RIGHT,
        "slope": (at(start, start * roof.bandwidth), at(roof.ridge, roof.peak)),
        "bandwidth": f"{human_bytes(roof.bandwidth)}/s",
        "roofs": [
            (dtype, at(peak / roof.bandwidth, peak), at(x[-1], peak), rate_text(peak, "FLOP/s"))
            for dtype, peak in roof.peaks.items()
            if x[0] < peak / roof.bandwidth < x[-1]
        ],
        "point": at(here, roof.flops),
        "limit": at(here, roof.limit) if roof.intensity else None,
        "reach": at(x[-1], roof.flops),
        "device": roof.device,
        "x": [(number(tick), at(tick, y[0])) for tick in x],
        "y": [(rate_text(tick, ""), at(x[0], tick)) for tick in y],
        "label": "; ".join(text),
    }
    return drawing


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low / 2)), math.ceil(math.log10(high * 2))
    return [10.0**power for power in range(first, last + 1)]


# --- nodes


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
