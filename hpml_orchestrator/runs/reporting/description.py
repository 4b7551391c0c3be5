"""What a run was: its command, its code, its results, and the hours that it occupied."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError, RecordError, counted
from hpml_orchestrator.records.run import SOFTWARE
from hpml_orchestrator.records.texts import first_few, printable
from hpml_orchestrator.records.torch_build import torch_text, torch_warnings
from hpml_orchestrator.runs.reporting.summary import Summary, summarise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hpml_orchestrator.records.job import Job, Resources
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import ProvenanceRecord, SoftwareRecord, SubmitRecord
    from hpml_orchestrator.runs.state import State

RESULT_FILE = "result.json"
"""What a training may write to its run directory."""

_TEXT_CHARS = 200
_LIST_ITEMS = 8
_HOUR_SECONDS = 3600.0
_CLOCKS_SECONDS = 60.0  # by which the clocks of a node and of the controller may differ


@dataclass(frozen=True)
class Hours:
    """The hours that all attempts of a run occupied."""

    gpu: float
    core: float  # a core is a CPU as the scheduler counts it
    basis: str  # `allocated` if each attempt recorded its allocation, else `requested`
    attempts: int  # number of starts
    wall: float = 0.0  # on the clock; of an array the sum of its tasks'


class Code(TypedDict):
    """The version of a run's code."""

    commit: str
    branch: str
    dirty: bool | None  # None: not known
    snapshot: bool


@dataclass(frozen=True)
class Description:
    """What a run was, as far as it was recorded."""

    launcher: str = ""  # what starts the ranks
    # Program and arguments as rank 0 received them; before it starts those of the job file, with
    # their placeholders.
    command: list[str] = field(default_factory=list)
    received: bool = False  # whether rank 0 recorded the command
    sweep: str = ""  # id of its sweep; empty without one
    point: int | None = None  # number of its point; None without a sweep, and for several points
    values: dict[str, object] = field(default_factory=dict)  # of the point, by name
    code: Code | None = None  # None without a git repository
    # Figures that the training reported, those of `result()` before those of the file.
    result: dict[str, object] = field(default_factory=dict)
    result_attempt: int | None = None  # number of the attempt that reported them
    result_file: dict[str, object] | None = None  # content of `result.json`
    result_file_attempt: int | None = None  # number of the attempt that wrote it
    result_error: str = ""  # why that file cannot be read
    hours: Hours | None = None  # None before it has started, and if its records cannot be read

    def to_json(self) -> dict[str, object]:
        """Return it for programs."""
        return asdict(self)


def describe(state: State, summary: Summary, *, now: float | None = None) -> Description:
    """Return the description of a run; what was not recorded is left out.

    Args:
        state: of the run.
        summary: of its last attempt.
        now: seconds since the epoch; the clock when left out.
    """
    try:
        record = state.submission.record()
        job = state.submission.requested_job()
        point, values = _point(record, state)
        known = Description(
            launcher=job.launcher,
            command=_command_of_job(job),
            sweep=str(record.get("sweep", "")),
            point=point,
            values=values,
            code=_code(record["provenance"]),
            hours=hours_of(state, job.resources, now=now),
        )
    except (HpmlError, AttributeError, LookupError, TypeError, ValueError):
        return Description(result=summary.result)
    if state.tasks:
        return known
    if summary.command:
        known = replace(known, command=summary.command, received=True)
    return _with_result(known, state, summary)


def last_result(state: State, summary: Summary | None = None) -> dict[str, object]:
    """Return the figures that a run's last attempt reported; empty if there are none.

    A `result.json` of an earlier attempt, which stays when the run is requeued, does not count.
    `describe` returns it with the number of that attempt.

    Args:
        state: of the run.
        summary: of its last attempt, if it was read already.

    Raises:
        RecordError: its records may not be read, or are damaged.
    """
    told = _with_result(Description(), state, summary or summarise(state))
    attempts = state.run.attempts()
    last = attempts[-1].number if attempts else None
    return told.result if told.result_attempt == last else {}


def _with_result(known: Description, state: State, summary: Summary) -> Description:
    found, error, path = None, "", state.run.directory / RESULT_FILE
    try:
        found = read_result(path)
    except RecordError as problem:
        error = str(problem)
    # The file stays when the run continues: then it has the figures of an attempt that stopped.
    writer = None if found is None else _writer(path, state)
    number = summary.attempt if summary.result else writer
    return replace(
        known,
        result={**(found or {} if writer == number else {}), **summary.result},
        result_attempt=number,
        result_file=found,
        result_file_attempt=writer,
        result_error=error,
    )


def _command_of_job(job: Job) -> list[str]:
    if job.command:
        return [*job.command, *job.args]
    named = ["-m", job.module] if job.module else [str(job.script)]
    return [job.environment.python, *named, *job.args]


def _code(provenance: ProvenanceRecord) -> Code | None:
    snapshot = provenance.get("snapshot")
    known = snapshot or provenance["git"]
    if not known:
        return None
    return Code(
        commit=known.get("commit", ""),
        branch=known.get("branch", ""),
        dirty=known.get("dirty"),
        snapshot=bool(snapshot),
    )


def _point(record: SubmitRecord, state: State) -> tuple[int | None, dict[str, object]]:
    points, values = record.get("points") or [], record.get("values") or []
    place = state.submission.index
    if place is None or place >= len(points):
        return None, {}
    return int(points[place]), dict(values[place]) if place < len(values) else {}


def read_result(path: Path) -> dict[str, object] | None:
    """Return what a training wrote to `result.json`; None if it wrote none.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        # JSON has no NaN and no infinity: such a value becomes a text
        result = json.loads(data, parse_constant=str, parse_float=_finite)
    except ValueError as error:
        raise RecordError(f"{path} cannot be read: not JSON: {error}") from error
    if not isinstance(result, dict):
        raise RecordError(f"{path} cannot be read: not a JSON object")
    result.pop("schema_version", None)
    return result


def _writer(path: Path, state: State) -> int | None:
    """Return the number of the attempt that wrote a file: the last one that had begun by then.

    Both times come from the file server, so that the nodes' clocks do not matter.
    """
    attempts = state.run.attempts()
    begun = attempts[:1]
    with contextlib.suppress(OSError):
        written = os.stat(path).st_mtime
        for attempt in attempts[1:]:
            begun += [attempt] * (os.stat(attempt.directory / "head.json").st_mtime <= written)
    return begun[-1].number if begun else None


def _finite(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def hours_of(state: State, resources: Resources, *, now: float | None = None) -> Hours | None:
    """Return the hours that all attempts of a run occupied; for an array, of all tasks.

    Args:
        state: of the run.
        resources: what it asked for.
        now: seconds since the epoch; the clock when left out.

    Raises:
        RecordError: the run's directory may not be read.
    """
    now = time.time() if now is None else now
    if state.tasks:
        tasks = [hours for task in state.tasks if (hours := hours_of(task, resources, now=now))]
        return _sum(tasks) if tasks else None
    asked = resources.nodes * resources.gpu_count, resources.nodes * resources.cores
    attempts = state.run.attempts()
    if not attempts:
        if state.started is None:
            return None
        return _hours(_lasted(state.started, state.ended or now), asked, "requested")
    return _sum([_hours_of_attempt(one, state, asked, now) for one in attempts])


def _hours_of_attempt(attempt: Attempt, state: State, asked: tuple[int, int], now: float) -> Hours:
    begun, (start, end) = attempt.started, times_of(attempt, state, now=now)
    allocated = dict(begun.data) if begun else {}
    cpus, gpus = allocated.get("cpus"), allocated.get("gpus")
    # A job that asked for no GPUs may record no number of them: it had none, which is certain.
    if gpus is None and not asked[0]:
        gpus = 0
    if isinstance(cpus, int) and isinstance(gpus, int):
        return _hours(_lasted(start, end), (gpus, cpus), "allocated")
    return _hours(_lasted(start, end), asked, "requested")


def times_of(attempt: Attempt, state: State, *, now: float) -> tuple[float | None, float | None]:
    """Return when an attempt of a run began and until when, at most `now`, it occupied its nodes.

    All are seconds since the epoch.
    """
    began = attempt.started.time if attempt.started else None
    end = (attempt.ended or {}).get("time") or attempt.last_written
    # The scheduler's times include what comes before and after the script. A start long after the
    # script's is that of the next attempt, which has not begun to write.
    is_last = attempt.number >= state.attempts - 1
    if not is_last or not state.started or 0 < (began or 0) < state.started - _CLOCKS_SECONDS:
        return began, end
    runs = state.unfinished and not state.elsewhere
    return state.started, state.ended or (now if runs else end)


def _lasted(start: float | None, end: float | None) -> float:
    return max(0.0, float(end) - start) if start and end else 0.0


def _hours(seconds: float, counts: tuple[int, int], basis: str) -> Hours:
    (gpus, cores), wall = counts, seconds / _HOUR_SECONDS
    return Hours(gpus * wall, cores * wall, basis, 1, wall)


def _sum(parts: list[Hours]) -> Hours:
    return Hours(
        math.fsum(part.gpu for part in parts),
        math.fsum(part.core for part in parts),
        max(part.basis for part in parts),  # `requested` is the later word
        sum(part.attempts for part in parts),
        math.fsum(part.wall for part in parts),
    )


def figures(result: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and value of each figure of a result; nested names are joined with dots.

    >>> list(figures({"loss": 0.123456789, "best": {"epoch": 3, "of": [1, 2]}}))
    [('loss', '0.123457'), ('best.epoch', '3'), ('best.of', '[1, 2]')]
    """
    for key, value in result.items():
        name = f"{prefix}{printable(str(key))[:_TEXT_CHARS]}"
        if isinstance(value, dict) and value:
            yield from figures(value, f"{name}.")
        else:
            yield name, _figure(value)


def _figure(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = [_figure(one) for one in value[:_LIST_ITEMS]]
        more = [f"… {len(value)} in all"] if len(value) > _LIST_ITEMS else []
        return f"[{', '.join([*shown, *more])}]"
    if isinstance(value, dict):
        inner = [f"{name}: {text}" for name, text in figures(value)]
        value = f"{{{', '.join(inner)}}}"
    text = printable(str(value))
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}…"


def command_text(words: list[str]) -> str:
    r"""Return a command as one line that bash reads as the same words.

    >>> command_text(["echo", "a b", "c\nd"])
    "echo 'a b' $'c\\nd'"
    """
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    known = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
    parts = [known.get(char) or (char if char.isprintable() else _code_of(char)) for char in word]
    return f"$'{''.join(parts)}'"


def _code_of(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))


# The software of a run, as its last attempt recorded it.

_NAMED = ("torch", "tensorflow", "jax", "lightning", "transformers", "horovod", "xgboost")
"""Packages whose version a reader looks for first."""
_SHOWN_MODULES = 6
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*==v?[0-9][A-Za-z0-9.!_-]*(\+[\w.]+)?", re.ASCII
)
"""Anything else in a requirements file could be an option of pip."""


def read_software(state: State) -> SoftwareRecord | None:
    """Return the record of the last attempt's software with its `file`; None without one."""
    try:
        attempt = None if state.tasks else state.run.newest()
        record = attempt.software if attempt else None
    except HpmlError:  # another user's
        return None
    return {**record, "file": str(attempt.directory / SOFTWARE)} if attempt and record else None


def requirements(state: State) -> str:
    """Return the text of a requirements file with the packages of a run's last attempt.

    Raises:
        InputError: it is a job array, whose tasks each have their own.
        NotFoundError: nothing is recorded.
    """
    label = state.submission.label
    if state.tasks:
        message = "each task of a job array has its own packages"
        hint = f"name one: hpml show {state.tasks[0].submission.label} --requirements"
        raise InputError(message, field="--requirements", hint=hint)
    software = read_software(state) or {}
    if not isinstance(software.get("packages"), dict):
        hint = "they are recorded some seconds after the ranks start, and not in a container"
        raise NotFoundError(f"run {label} has no record of its Python packages", hint=hint)
    return requirements_text(software, label)


def requirements_text(software: SoftwareRecord, label: str) -> str:
    """Return the text of a requirements file; `label` names the run in its comments."""
    python = f"{software.get('python_version') or '(unknown version)'}, {software.get('python')}"
    modules = ", ".join(map(str, software.get("modules") or [])) or "none"
    lines = [
        f"# Packages of run {label}: `pip install -r` in a new environment installs them again.",
        f"# Python {python}; loaded modules: {modules}",
        "# Python packages only: not what conda, a module or the system installs besides. Of a",
        "# package from a directory or repository the version is here, and not the place.",
    ]
    for name, version in (software.get("packages") or {}).items():
        line = f"{name}=={version}"
        match = _REQUIREMENT.fullmatch(line)
        if match and match[1]:
            lines.append(f"# {match[1]} is in another package index: give pip its --index-url")
        if name != "pip":
            lines.append(line if match else f"# left out, no plain version: {line}")
    return "\n".join(map(_printable, lines))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def script_change(state: State, software: SoftwareRecord) -> str:
    """Return a sentence if the script that ran is not the submitted one; else an empty text."""
    try:
        script = state.submission.record()["provenance"]["script"]
        if software["files"][script["path"]] == script["sha256"]:
            return ""
        copy = state.submission.directory / script["copy"]
    except (HpmlError, LookupError, TypeError):  # no copy, or a damaged record
        return ""
    return f"{script['path']} changed between submission and start; as submitted: {copy}"


def software_line(software: SoftwareRecord) -> str:
    """Return Python, packages, modules and driver in one line."""
    parts = [str(software.get("python") or "Python unknown")]
    packages = software.get("packages")
    if isinstance(packages, dict):
        named = [f"{name} {packages[name]}" for name in _NAMED if name in packages]
        count = counted(len(packages), "package")
        parts.append(f"{count} ({', '.join(named)})" if named else count)
    if modules := software.get("modules"):
        parts.append(f"modules {first_few([*map(str, modules)], _SHOWN_MODULES)}")
    if driver := software.get("nvidia_driver"):
        cuda = f" (CUDA {software['cuda']})" if software.get("cuda") else ""
        parts.append(f"driver {driver}{cuda}")
    return ", ".join(parts)


def torch_lines(software: SoftwareRecord) -> list[str]:
    """Return PyTorch's build in one line, and what of it does not fit the node."""
    try:
        text, warnings = torch_text(software), torch_warnings(software)
    except (LookupError, TypeError, ValueError, AttributeError):  # damaged
        return []
    return [*filter(None, [text]), *(f"warning: {one}" for one in warnings)]
