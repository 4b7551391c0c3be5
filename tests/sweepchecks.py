"""What a report of a digits sweep has to agree with, on every scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sweeprecords import recomputed

__all__ = ["BASE", "SWEEPS", "check_report"]

BASE = {
    "args": [
        "--data={stage.digits}",
        "--epochs=3",
        "--batch-size=32",
        "--warm-up-steps=1",
        "--lr=0.05",
        "--seed=1",
        "--target-accuracy=0.1",
        "--output={run.dir}",
    ]
}
"""What the tests change in the digits job: three epochs."""

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
    """The report's figures are those of the raw records; speedups are ratios of their medians."""
    truth = recomputed(records, report["id"])
    assert set(truth) == {1, 2, 4}
    base = truth[1]
    for setting in report["settings"]:
        scale = truth[setting["scale"]]
        assert setting["runs"] == scale["runs"] == repeats
        for name in ("samples_per_second", "accuracy"):
            assert setting[name]["value"] == pytest.approx(scale[name]), name
        # the scheduler's times are whole seconds, and it clears up after the script
        assert setting["seconds"]["value"] == pytest.approx(scale["seconds"], abs=5)
        assert (setting["seconds"]["interval"] is None) == (repeats < 6)
        ranks = setting["scale"]
        each = 64 // ranks if mode == "strong" else 32
        assert scale["batch"] == {(each, ranks)}
        assert setting["batch_global"] == [each * ranks]
        (rate,) = scale["learning_rate"]
        assert rate == pytest.approx(0.1 * each * ranks / 64)
        values = [s["seconds"]["value"] for s in report["settings"] if s["scale"] in {1, ranks}]
        ratio = values[0] / values[-1]
        assert setting["speedup"]["value"] == pytest.approx(ratio, rel=0.35), (base, scale)
    assert sum(report["states"].values()) == 3 * repeats == len(report["attempts"])
    assert report["answer"]
