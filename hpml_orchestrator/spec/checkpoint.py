"""The job file's `checkpoint`: how a run saves its state, and when it continues."""

from __future__ import annotations

import os
import re
import signal
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, field_validator

from hpml_orchestrator.spec import text, values
from hpml_orchestrator.spec.text import BRACES, PLACEHOLDER, Model, intended_placeholder

Reason = Literal["time_limit", "preemption", "node_failure", "hang"]
REASONS: tuple[Reason, ...] = ("time_limit", "preemption", "node_failure", "hang")
"""Ends after which a run can continue by itself."""

SIGNALS = ("USR1", "USR2", "HUP", "INT", "TERM")
"""Signals that a program can take as a request to save and stop."""

_IN_DIRECTORY = frozenset({"run.id", "array.index"})
_THERE_ARE = "; there are {run.id}, {array.index}, and {run.dir} at the beginning"
_UNSTOPPABLE = frozenset({"KILL", "STOP"})


def _time_or(word: Literal["auto", "off"], value: object) -> object:
    if isinstance(value, str) and value.strip().lower() == word:
        return word
    if word == "off" and value is False:
        return word
    try:
        return values.format_time(values.parse_time(value))
    except ValueError as error:
        limits = str(error) if "more than zero" in str(error) else f"a time: {values.TIME_FORMS}"
        raise ValueError(f"must be `{word}`, or {limits.removeprefix('must be ')}") from None


def _reasons(value: object) -> object:
    if isinstance(value, list):
        return list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else value
    raise ValueError(f"must be a list of {', '.join(REASONS)}; with [] a run saves and ends there")


def _signal(value: object) -> object:
    if value is None:
        return None
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    name = str(value).strip().upper().removeprefix("SIG")
    allowed = f"must be one of {', '.join(SIGNALS)}"
    if number is not None or name.isdecimal():
        numbers = {int(getattr(signal, f"SIG{known}")): known for known in SIGNALS}
        meant = f": {name} is {numbers[int(name)]}" if int(name) in numbers else ""
        raise ValueError(f"{allowed}, by name{meant}")
    if name in _UNSTOPPABLE:
        raise ValueError(f"{allowed}: no program can handle {name}, so nothing would be saved")
    if name not in SIGNALS:
        hint = (
            " (how long before the limit is `checkpoint.lead`)" if re.search(r"[@:]", name) else ""
        )
        raise ValueError(allowed + hint)
    return name


def _placeholder_fault(path: str) -> str:
    """Return what is wrong with the placeholders of a directory; empty for nothing."""
    for match in BRACES.finditer(path):
        shown, name = match[0], match[1]
        if name == "job.id":
            return "{job.id} changes when the run continues: use {run.id}"
        if not PLACEHOLDER.fullmatch(shown):
            meant = intended_placeholder(name)
            if meant is not None:
                advice = f"; did you mean {{{meant}}}?" if meant else _THERE_ARE
                return f"{shown} names nothing{advice}"
        elif name not in _IN_DIRECTORY:
            return f"{shown} cannot be used here{_THERE_ARE}"
    return ""


Lead = Annotated[
    str,
    BeforeValidator(lambda value: _time_or("auto", value), json_schema_input_type=int | str),
]
Hang = Annotated[
    str,
    BeforeValidator(
        lambda value: _time_or("off", value), json_schema_input_type=int | str | Literal[False]
    ),
]
Signal = Annotated[
    Literal["USR1", "USR2", "HUP", "INT", "TERM"] | None,
    BeforeValidator(_signal, json_schema_input_type=str | None),
]


class Checkpoint(Model):
    """How a run saves its state before it is stopped, and when it continues from there."""

    enabled: StrictBool = False
    """Whether the run saves and continues; a mapping in a job file implies `true`."""
    directory: text.PathText = "checkpoints"
    """Directory of the checkpoints, `{checkpoint.dir}` in arguments. A relative path is in the
    run's directory, so that two runs never mix; an absolute one must be on shared storage and is
    used by every run that names it. `{run.id}` and `{array.index}` are replaced."""
    lead: Lead = "auto"
    """How long before the time limit the ranks are asked to save and stop: a time such as `10m`, a
    plain number is minutes. `auto`: the longest save and step so far and 15 s more; 5 minutes in
    the first attempt; at most a quarter of the limit."""
    requeue: Annotated[
        list[Reason], BeforeValidator(_reasons, json_schema_input_type=list[Reason])
    ] = Field(default=[*REASONS])
    """Ends after which the run continues by itself; with `[]` it saves and ends there."""
    attempts: Annotated[StrictInt, Field(ge=1, le=10_000)] = 20
    """Maximum attempts of the run, the first included. It also ends after three attempts in a row
    without progress."""
    hang: Hang = "00:30:00"
    """How long the ranks of a node may send nothing, once they have trained a step, before the
    attempt counts as hung and is ended: a time such as `45m`, a plain number is minutes; `off`
    for no limit."""
    avoid_failed_nodes: StrictBool = True
    """Whether the next attempt leaves out nodes that failed or hung."""
    signal: Signal = None
    """Signal that asks ranks to save and stop, such as `USR1`, for programs that do not use
    hpml_channel.py: `USR1`, `USR2`, `HUP`, `INT` or `TERM`, with or without SIG."""

    @field_validator("directory")
    @classmethod
    def _directory(cls, value: str) -> str:
        inside = value.removeprefix("{run.dir}")
        if inside != value:
            if inside[:1] not in {"", "/"}:
                raise ValueError("must continue with / after {run.dir}")
            inside = inside.lstrip("/")
        if fault := _placeholder_fault(inside):
            raise ValueError(fault)
        if re.search(r"[\x00-\x1f\x7f$*?]", inside):
            raise ValueError("must not hold $, *, ? or control characters: they stay as written")
        path = os.path.normpath(inside or ".")
        if path.startswith("~"):
            raise ValueError("names an unknown user: give an absolute path")
        if path == "." or path.split("/")[0] == "..":
            raise ValueError(
                "must be a directory inside of the run's, such as checkpoints, or an absolute path"
            )
        if path.strip("/") == "":
            raise ValueError("must be a directory, not the root of all")
        return path

    @property
    def is_shared(self) -> bool:
        """Whether other runs may use the same directory: its path is absolute."""
        return os.path.isabs(self.directory)

    @property
    def is_per_run(self) -> bool:
        """Whether each run, and each task of an array, has its own directory."""
        return not self.is_shared or any(f"{{{name}}}" in self.directory for name in _IN_DIRECTORY)

    @property
    def lead_seconds(self) -> int | None:
        """Seconds before the limit; None for `auto`."""
        return None if self.lead == "auto" else values.parse_time(self.lead)

    @property
    def hang_seconds(self) -> int:
        """Seconds without a sign of life; 0 for no limit."""
        return 0 if self.hang == "off" else values.parse_time(self.hang)
