"""A diagnosis as text for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.apply import next_step
from hpml_orchestrator.diagnosis.averaging import averaging
from hpml_orchestrator.diagnosis.shares import hours, hours_unit
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import printable, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Facts, Finding
    from hpml_orchestrator.diagnosis.profile import TraceProfile

SHOWN = 3
"""Findings that are printed in full."""

_WIDTH = 100
_LINES = 40
_CHANGES = 2
_INDENT = 10
_WHOLE = 1000  # from here on figures have no decimals
_MARGIN = 3  # of a finding, for its number
_PROFILE_LINES = 10  # without functions, and the lines between the parts of a report
_FUNCTIONS = 3  # are shown if there is no room for more


def text(diagnosis: Diagnosis) -> str:
    """Return a report of at most 40 lines of 100 columns."""
    verdict = diagnosis.headline
    lines = [*field_lines("run", status_line(diagnosis)), *field_lines("verdict", verdict)]
    if diagnosis.failure:
        lines += field_lines("failed", diagnosis.failure)
    lines += field_lines("time", diagnosis.time) if diagnosis.time else []
    averaged = averaging(diagnosis.facts)
    lines += field_lines("averaging", averaged.text()) if averaged else []
    formulas = formulas_text(diagnosis.facts)
    lines += field_lines("formulas", formulas) if formulas else []
    blocks = [_block(number, one, diagnosis) for number, one in enumerate(diagnosis.findings, 1)]
    tail, shown = _tail(diagnosis), 0
    if profile := diagnosis.facts.profile:
        used = len(lines) + sum(len(block) + 1 for block in blocks[:SHOWN]) + len(tail)
        lines += _profile(profile, _LINES - _PROFILE_LINES - used)
    lines.append("")
    for block in blocks[:SHOWN]:
        if shown and len(lines) + len(block) + len(tail) + 4 > _LINES:
            break
        lines += [*block, ""]
        shown += 1
    if more := diagnosis.findings[shown:]:
        lines += field_lines("also", "; ".join(one.verdict for one in more))
    lines += tail
    if step := next_step(diagnosis):
        lines += field_lines("next", step)
    return "\n".join(printable(line) for line in lines[:_LINES])


def status_line(diagnosis: Diagnosis) -> str:
    """Return the run, its state and what it took, in one line."""
    facts = diagnosis.facts
    took = ""
    if facts.elapsed_seconds:
        took = f"{' in' if facts.over else ' for'} {seconds_text(facts.elapsed_seconds)}"
    number = f"attempt {facts.attempts} of {facts.attempts}: " if facts.attempts > 1 else ""
    parts = [f"{facts.run}  {number}{facts.state}{took}{'' if facts.over else ' so far'}"]
    units, unit = (facts.gpu_count, "GPU") if facts.gpu_count else (facts.core_count, "core")
    if units:
        parts.append(counted(units, unit))
    if spent := hours(facts):
        parts.append(f"{spent:.2g} {hours_unit(facts)}")
    return ", ".join(parts)


def field_lines(name: str, value: str, *, margin: int = 0) -> list[str]:
    """Return a named field, indented by `margin` and wrapped at the width of the report."""
    first, *rest = _wrapped(value, margin + _INDENT) or [""]
    lines = [f"{name:<{_INDENT}}{first}", *(" " * _INDENT + line for line in rest)]
    return [" " * margin + line for line in lines]


def _wrapped(value: str, used: int) -> list[str]:
    """Wrap text between words: a hyphen may be part of a run's id or of an option."""
    return textwrap.wrap(value, _WIDTH - used, break_on_hyphens=False)


def _tail(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if diagnosis.notes:
        lines += field_lines("note", "; ".join(one.verdict for one in diagnosis.notes))
    if diagnosis.healthy:
        lines += field_lines("healthy", "; ".join(diagnosis.healthy))
    if diagnosis.unknown:
        missing = [f"{one.verdict} (needs {one.needs})" for one in diagnosis.unknown]
        lines += field_lines("unknown", "; ".join(missing))
    return lines


def _profile(profile: TraceProfile, room: int) -> list[str]:
    """Return the profile, with as many functions as there is room for."""
    lines = field_lines("profile", profile.text())
    if profile.path:
        lines += field_lines("path", profile.path.text())
    if profile.python:
        lines += field_lines("the rest", profile.python.text())
        functions = profile.python.lines(max(_FUNCTIONS, room))
        lines += [" " * _INDENT + line[: _WIDTH - _INDENT] for line in functions]
    return lines


def _cost_of_all(finding: Finding, diagnosis: Diagnosis) -> str:
    cost = cost_text(finding, diagnosis.facts)
    what = "attempt" if diagnosis.facts.attempts > 1 else "run"
    return f"{cost} of this {what}" if cost else ""


def _block(number: int, finding: Finding, diagnosis: Diagnosis) -> list[str]:
    cost = _cost_of_all(finding, diagnosis)
    first, *rest = _wrapped(f"{finding.verdict} ({finding.level})", _MARGIN)
    lines = [f"{number}  {first}", *(f"   {part}" for part in rest)]
    if cost and len(lines[-1]) + len(cost) + 2 <= _WIDTH:
        lines[-1] += f"{cost:>{_WIDTH - len(lines[-1])}}"
    elif cost:
        lines.append(f"   {cost}")
    for line in finding.evidence:
        lines += [f"   {part}" for part in _wrapped(line, _MARGIN)]
    for change in finding.changes[:_CHANGES]:
        lines += field_lines("change", change_text(change), margin=_MARGIN)
    if finding.gain is not None:
        lines.append(f"   {'gain':<{_INDENT}}{gain_text(finding)}")
    return lines


def change_text(change: Change) -> str:
    """Return a change with its field and value, as a job file has them."""
    accuracy = "; can change the accuracy" if change.touches_accuracy else ""
    shown = f"`{change.field}: {_yaml(change.value)}`"
    where = f": {shown}" if change.field and "`" not in change.text else ""
    return f"{change.text}{where}{accuracy}"


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_yaml(one) for one in value)}]"
    return str(value)


def gain_text(finding: Finding) -> str:
    """Return the upper bound of a gain with its condition; empty if none is known."""
    if finding.gain is None:
        return ""
    return f"at most {finding.gain:.0%} of the run's time, {finding.gain_if}"


def cost_text(finding: Finding, facts: Facts) -> str:
    """Return what a finding costs in hours; empty if unknown."""
    if not finding.gain_hours:
        return ""
    most = "about" if finding.gain is None else "at most"
    return f"{most} {finding.gain_hours:.2g} {hours_unit(facts)}"


def formulas_text(facts: Facts) -> str:
    """Return figures that the training compares with formulas, as lm.py does; empty if none."""
    figures = {
        name: [f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.3g}" for value in pair]
        for name, pair in facts.formulas.items()
    }
    return "; ".join(
        f"{name} {measured} ({formula} by formula)" for name, (measured, formula) in figures.items()
    )


def markdown(diagnosis: Diagnosis) -> str:
    """Return the report as Markdown, complete."""
    return "\n".join(printable(line) for line in _markdown(diagnosis)) + "\n"


def _markdown(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"# {diagnosis.facts.run}"
    yield ""
    yield status_line(diagnosis)
    yield ""
    yield f"**{diagnosis.headline}**"
    if diagnosis.failure:
        yield from ("", f"Failed: {diagnosis.failure}")
    if diagnosis.time:
        yield from ("", f"Time: {diagnosis.time}")
    yield from _markdown_of_profile(diagnosis.facts.profile)
    if averaged := averaging(diagnosis.facts):
        yield from ("", f"Averaging: {averaged.text()}")
    if formulas := formulas_text(diagnosis.facts):
        yield from ("", f"Formulas: {formulas}")
    for number, one in enumerate(diagnosis.findings, 1):
        cost = _cost_of_all(one, diagnosis)
        yield ""
        yield f"## {number}. {one.verdict} ({one.level})"
        yield ""
        yield from (f"- {line}" for line in one.evidence)
        yield from (f"- change: {change_text(change)}" for change in one.changes)
        if one.gain is not None:
            yield f"- gain: {gain_text(one)}{f', {cost}' if cost else ''}"
    for title, lines in (
        ("Notes", [one.verdict for one in diagnosis.notes]),
        ("As it should be", diagnosis.healthy),
        ("Unknown", [f"{one.verdict}: needs {one.needs}" for one in diagnosis.unknown]),
    ):
        if lines:
            yield from ("", f"## {title}", "", *(f"- {line}" for line in lines))


def _markdown_of_profile(profile: TraceProfile | None) -> Iterator[str]:
    if profile is None:
        return
    yield from ("", f"Profile: {profile.text()}")
    if profile.path:
        yield from ("", f"Critical path: {profile.path.text()}")
    if python := profile.python:
        yield from ("", f"The rest: {python.text()}", "")
        yield from (f"    {line}" for line in python.lines(len(python.functions)))


def to_json(diagnosis: Diagnosis) -> dict[str, object]:
    """Return the diagnosis for programs; without the job file, which the record has."""
    value = asdict(replace(diagnosis, findings=[*diagnosis.findings]))
    del value["facts"]["job"]
    averaged = averaging(diagnosis.facts)
    return {
        "headline": diagnosis.headline,
        **value,
        "averaging": asdict(averaged) if averaged else None,
    }
