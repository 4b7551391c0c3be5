"""What a report of a digits sweep has to agree with, on every scheduler."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.sweeprecords import recomputed

_ARGS = (
    "--data={stage.digits} --epochs=3 --batch-size=32 --warm-up-steps=1 --lr=0.05 --seed=1 "
    "--target-accuracy=0.1 --output={run.dir}"
)
BASE = {"args": _ARGS.split()}
"""What the tests change in the digits job: three epochs."""

_PAIRED = 6  # fewest repeats that are compared one by one
_RULE = {"argument": "--lr", "rule": "linear", "times_ranks": True}
SWEEPS: dict[str, dict[str, Any]] = {
    mode: {
        "base": "digits.yaml",
        "mode": mode,
        "scale": {"ranks": [1, 2, 4]},
        "learning_rate": _RULE,
    }
    for mode in ("strong", "weak")
}
"""Both sweeps of the digits job, whose base has two ranks of 32 images."""


def check_report(report: dict[str, Any], records: Path, mode: str, repeats: int) -> None:
    """The report's figures are those of the raw records; a speedup is withheld with a reason."""
    truth = recomputed(records, report["id"])
    assert sorted(truth) == [setting["scale"] for setting in report["settings"]] == [1, 2, 4]
    for setting in report["settings"]:
        ranks, raw = setting["scale"], truth[setting["scale"]]
        each = 64 // ranks if mode == "strong" else 32
        assert setting["runs"] == raw["runs"] == repeats
        assert raw["batch"] == {(each, ranks)}
        assert setting["ran"]["batch_global"] == [each * ranks]
        assert list(raw["learning_rate"]) == pytest.approx([0.1 * each * ranks / 64])
        for name in ("samples_per_second", "accuracy"):
            assert setting[name]["value"] == pytest.approx(raw[name]), name
        # the scheduler's times are whole seconds, and it clears up after the script
        assert setting["seconds"]["value"] == pytest.approx(raw["seconds"], abs=5)
        assert (setting["seconds"]["interval"] is None) == (repeats < 6)
        found = [_compared(report, number, mode) for number in (0, setting["number"])]
        ratio = median(found[1].values()) / median(found[0].values())
        if repeats >= _PAIRED:  # each repeat was a block
            ratio = exp(median(log(found[1][n] / found[0][n]) for n in range(repeats)))
        if mode == "strong":  # seconds, not rates
            ratio = 1 / ratio
        # after three epochs and two repeats, the accuracies may differ by chance
        doubt = setting["doubt"] or report["settings"][0]["doubt"]
        assert (setting["speedup"] is None) == bool(doubt)
        if not doubt:
            assert setting["speedup"]["value"] == pytest.approx(ratio)
    assert report["states"] == {"COMPLETED": 3 * repeats}
    assert len(report["attempts"]) == 3 * repeats
    assert report["answer"]


def _compared(report: dict[str, Any], setting: int, mode: str) -> dict[int, float]:
    """What speedups compare, by repeat: seconds of equal work, or samples per second."""
    rows = {one["repeat"]: one["row"] for one in report["attempts"] if one["setting"] == setting}
    if mode == "strong":
        return {n: row["total_seconds"] for n, row in rows.items()}
    return {n: row["steps"] * row["batch_global"] / row["total_seconds"] for n, row in rows.items()}
