"""Times to a target by the rule of MLPerf training, and runs as lines of its log format, MLLOG.

Sources: MLCommons, "MLPerf Training Rules", section "Benchmark Results"
(github.com/mlcommons/training_policies); the keys and their order: mlperf_logging of MLCommons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.sweeps.facts import MEASURED, TIMED_OUT, MlperfResult, Setting, SweepFacts
from hpml_orchestrator.sweeps.rows import TEST_ACCURACIES, PointRow, is_time_to_target
from hpml_orchestrator.sweeps.selection import times_to, until_end

if TYPE_CHECKING:
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.store import Store

_LEAST_RUNS = 3  # two are dropped
_VISION, _OTHERS = 5, 10  # runs that the rules ask for
_FIGURES = ("validation_accuracy", "accuracy", *TEST_ACCURACIES, "validation_loss", "loss")


def results(report: SweepFacts) -> tuple[MlperfResult, ...]:
    """Return the time to the target of each setting by MLPerf's rule.

    Raises:
        InputError: no run has a time to a target.
    """
    found = [_result(one, _times(one, report)) for one in report.settings]
    if not any(one.runs for one in found):
        raise InputError(
            "needs runs with a time to a target, and this sweep has none",
            field="--mlperf",
            hint="give the program a target, such as --target-accuracy=0.9 in the job's args, or "
            "target_accuracy in the sweep file",
        )
    return tuple(found)


def _times(setting: Setting, report: SweepFacts) -> list[tuple[float, bool]]:
    """Return the seconds of each run of a setting, and whether it reached the target."""
    rows = [one.row for one in report.attempts if one.setting == setting.number]
    if setting.target:
        return times_to(rows, setting.target.accuracy)
    tried = [row for row in rows if row.state == MEASURED or row.state in TIMED_OUT]
    names = (name for row in tried for name in row.result if is_time_to_target(name))
    name = next(names, "")
    known = [(row, numbers(row.result).get(name)) for row in tried if name]
    return [(time or until_end(row), time is not None) for row, time in known]


def _result(setting: Setting, timed: Sequence[tuple[float, bool]]) -> MlperfResult:
    times = sorted(time for time, reached in timed if reached)
    runs, missed = len(timed), len(timed) - len(times)
    remark = f"fewer runs than MLPerf asks for: {_VISION} or {_OTHERS}"
    if runs >= _VISION:
        remark = f"enough runs for vision ({_VISION}), not for other benchmarks ({_OTHERS})"
    if runs >= _OTHERS:
        remark = ""
    # One run that missed the target may be the slowest, which is dropped.
    kept = times[1:] if missed else times[1:-1]
    if runs < _LEAST_RUNS or missed > 1:
        few = f"of {counted(runs, 'run')} none would be left"
        remark = f"{missed} of {runs} runs missed the target" if missed > 1 else few
        kept = []
    return MlperfResult(
        setting=setting.number,
        runs=runs,
        reached=len(times),
        dropped=(times[0], None if missed else times[-1]) if kept else (None, None),
        seconds=fmean(kept) if kept else None,
        remark=remark,
    )


def write_logs(store: Store, report: SweepFacts, aim: float | None, directory: Path) -> int:
    """Write `SETTING/result_N.txt` for each complete run of one attempt; return how many.

    Args:
        store: where the runs are.
        report: of the sweep.
        aim: the target accuracy of the sweep file; None for the program's own target.
        directory: for the settings' directories.
    """
    written: dict[int, int] = {}
    for one in report.attempts:
        attempts = run_of(store.resolve(one.row.run)).attempts() if one.row.run else []
        # Of a run that was requeued, the time of the whole training is not known.
        complete = one.row.state == MEASURED and len(attempts) == 1
        lines = [*log_lines(one.row, one.seed, attempts[0], aim)] if complete else []
        if lines:
            number = written.setdefault(one.setting, 0)
            written[one.setting] += 1
            name = re.sub(r"[^\w.=-]+", "_", report.settings[one.setting].label)
            path = directory / name / f"result_{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join([*lines, ""]))
    return sum(written.values())


def log_lines(
    row: PointRow, seed: int | None, attempt: Attempt, aim: float | None
) -> Iterator[str]:
    """Yield the MLLOG lines of a run's attempt; none if it reported no begin of its training.

    A block is the training between two evaluations. The run stops with the evaluation that reached
    the target, or with the last one, as `aborted`.
    """
    events, told = [*attempt.milestones()], numbers(row.result)
    starts = [event.time for event in events if event.event in ("warm-up", "training")]
    if not starts or attempt.started is None:
        return
    began, start = attempt.started.time, min(starts)
    settings = {
        "seed": told.get("seed", seed),
        "global_batch_size": row.batch_global,
        "opt_base_learning_rate": row.learning_rate,
        "train_samples": told.get("train_images"),
        "eval_samples": told.get("validation_images", told.get("test_images")),
    }
    for key, value in settings.items():
        if value is not None:
            whole = int(value) if float(value).is_integer() else value
            yield _line(began, "POINT_IN_TIME", key, whole)
    yield _line(began, "INTERVAL_START", "init_start")
    yield _line(start, "INTERVAL_END", "init_stop")
    yield _line(start, "INTERVAL_START", "run_start")
    stop, status, epochs = start, "aborted", 0
    for event in events:
        name = next((name for name in _FIGURES if name in event.data), "")
        if event.event != "evaluation" or event.data.get("final") or event.rank or not name:
            continue
        epoch = event.data.get("epoch")
        last = {"epoch_num": epoch} if epoch else {}
        block = {"first_epoch_num": epochs + 1, "epoch_count": epoch - epochs} if epoch else {}
        value = numbers(event.data).get(name)
        yield _line(stop, "INTERVAL_START", "block_start", metadata=block)
        yield _line(event.time, "INTERVAL_END", "block_stop", metadata=block)
        yield _line(event.time, "POINT_IN_TIME", "eval_accuracy", value, last)
        stop, epochs = event.time, epoch or epochs
        if _reached(name, value, told, aim):
            status = "success"
            break
    yield _line(stop, "INTERVAL_END", "run_stop", metadata={"status": status})


def _reached(name: str, value: float | None, told: Mapping[str, float], aim: float | None) -> bool:
    if value is None:
        return False
    if name.endswith("loss"):
        return value <= told.get("target_loss", float("-inf"))
    return value >= (aim or told.get("target_accuracy", float("inf")))


def _line(
    time: float,
    kind: str,
    key: str,
    value: object = None,
    metadata: Mapping[str, object] | None = None,
) -> str:
    body = {"namespace": "", "time_ms": round(1000 * time), "event_type": kind, "key": key}
    return f":::MLLOG {json.dumps({**body, 'value': value, 'metadata': dict(metadata or {})})}"
