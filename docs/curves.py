"""Draw the curves of docs/lm.md and docs/communication.md from result.json files.

python docs/curves.py lm.png RUN_DIR ...

Each RUN_DIR has the result.json that lm.py or communication.py wrote with --output. Of lm.py the
loss by step is drawn, of communication.py the median time to the target by bandwidth.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

MARKS = "osD^v*"


def draw(picture: Path, directories: Sequence[Path]) -> None:
    """Write a picture of the runs in these directories; the suffix sets the format."""
    results = [json.loads((one / "result.json").read_text("utf-8")) for one in directories]
    figure = Figure(figsize=(6.4, 3.6), dpi=125, layout="constrained")
    axis = figure.subplots()
    axis.grid(color="#dddddd")
    if "evaluations" in results[0]:
        _losses(axis, results)
    else:
        _times(axis, results)
    axis.legend()
    figure.savefig(picture)


def _losses(axis: Axes, results: Sequence[dict[str, Any]]) -> None:
    for result, mark in zip(results, MARKS, strict=False):
        steps = sorted(map(int, result["evaluations"]))
        bits = [result["evaluations"][str(step)][1] for step in steps]
        label = f"{result['parallel']}, {result['world_size']} ranks"
        axis.plot(steps, bits, f"{mark}-", fillstyle="none", label=label)
    if target := results[0]["target_loss"]:
        axis.axhline(target, color="#777777", linestyle="--", label=f"target {target:g}")
    axis.set_xlabel("step")
    axis.set_ylabel("validation loss, bits per byte")


def _times(axis: Axes, results: Sequence[dict[str, Any]]) -> None:
    times: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        if one["seconds_to_accuracy"] is not None:
            name = f"{one['method']}, {one['world_size']} ranks"
            times[name][one["bandwidth_mbit"]].append(one["seconds_to_accuracy"])
    for (name, points), mark in zip(sorted(times.items()), MARKS, strict=False):
        bandwidths = sorted(points)
        axis.plot(bandwidths, [median(points[one]) for one in bandwidths], f"{mark}-", label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sorted({one["bandwidth_mbit"] for one in results}), minor=False)
    axis.xaxis.set_minor_locator(NullLocator())
    for formatted in (axis.xaxis.set_major_formatter, axis.yaxis.set_major_formatter):
        formatted("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("bandwidth of each rank's link, Mbit/s")
    axis.set_ylabel(f"seconds to an accuracy of {results[0]['target_accuracy']:g}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]])
