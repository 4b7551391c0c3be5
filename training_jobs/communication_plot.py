"""Draw how many steps each method of communication.py needs, and how many it takes per second.

    python communication_plot.py methods.png RESULTS ...
    hpml sweep report last --json > report.json
    python communication_plot.py methods.png report.json

RESULTS are directories with result.json files, at any depth, or such a report. Further right, a
method uses the hardware better; further up, each step is worth more; along a dashed line the
product is the same: the seconds to the target. Only equal numbers of ranks and bandwidths can be
compared, so each has its own plot. Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

Place = tuple[int, float]  # ranks, and Mbit/s of each rank's link; 0 if unlimited
Point = tuple[float, float]  # steps to the target, and seconds


def read(files: list[Path]) -> dict[Place, dict[str, Point]]:
    """Return the median steps and seconds to the target, by method."""
    runs: dict[Place, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        found = sorted(file.rglob("result.json")) if file.is_dir() else [file]
        for ranks, mbit, method, steps, seconds in (one for path in found for one in _runs(path)):
            if steps and seconds:
                runs[ranks, mbit or 0.0][method].append((steps, seconds))
    return {
        place: {
            method: (median(steps for steps, _ in ran), median(seconds for _, seconds in ran))
            for method, ran in methods.items()
        }
        for place, methods in sorted(runs.items())
    }


def _runs(path: Path) -> Iterator[tuple[int, float | None, str, float, float]]:
    content = json.loads(path.read_text())
    if "steps_to_accuracy" in content:
        one = content
        to_target = one["steps_to_accuracy"], one["seconds_to_accuracy"]
        yield (one["world_size"], one["bandwidth_mbit"], one["method"], *to_target)
        return
    for one in (content.get("communication") or {"costs": ()})["costs"]:
        yield one["ranks"], one["mbit"], one["method"], one["steps"], one["seconds"]["value"]


def draw(places: dict[Place, dict[str, Point]], picture: Path) -> None:
    """Write a picture; its suffix determines the format."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 - as above

    figure = Figure(figsize=(8 * len(places), 5.4), dpi=100, layout="constrained")
    every = [point for methods in places.values() for point in methods.values()]
    rates, all_steps = [steps / seconds for steps, seconds in every], [steps for steps, _ in every]
    left, right = 0.7 * min(rates), 1.6 * max(rates)
    top, bottom = 0.6 * min(all_steps), 1.6 * max(all_steps)
    times = sorted(seconds for _, seconds in every)
    for axes, ((ranks, mbit), methods) in zip(  # noqa: B905 - Python 3.9
        figure.subplots(1, len(places), squeeze=False).flat, places.items()
    ):
        for seconds in {float(f"{one:.1g}") for one in (times[0], median(times), times[-1])}:
            ends = [left, right]
            line = {"color": "#bbbbbb", "linestyle": "--", "linewidth": 1, "zorder": 0}
            axes.plot(ends, [seconds * rate for rate in ends], **line)
            rate = max(1.03 * left, 1.06 * top / seconds)
            axes.text(
                rate, seconds * rate, f" {seconds:g} s", color="#777777", fontsize=8, va="top"
            )
        by_rate = sorted(methods.items(), key=lambda one: one[1][0] / one[1][1])
        for number, (method, (steps, seconds)) in enumerate(by_rate):
            axes.plot(steps / seconds, steps, "o", markersize=5)
            # Methods that need the same number of steps are in one row: alternate names up and
            # down.
            turn = 40 if number % 2 else -40
            align = {"va": "center", "ha": "left", "rotation_mode": "anchor", "rotation": turn}
            axes.text(steps / seconds, steps, f"  {method}", fontsize=8, **align)
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        shown = f", {mbit:g} Mbit/s" if mbit else ""
        axes.set_title(f"{ranks} ranks{shown}")
        axes.set_xlabel("hardware: steps per second")
        axes.set_ylabel("statistics: steps to the target, few at the top")
    figure.savefig(picture)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, metavar="FILE", help="a .png, .svg or .pdf file")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="see above")
    options = parser.parse_args(arguments)
    try:
        places = read(options.results)
        if not places:
            raise ValueError(f"{options.results[0]}: no run that reached its target")
        draw(places, options.picture)
    except ImportError as error:
        print(f"communication_plot.py: error: pip install {error.name}", file=sys.stderr)
        return 2
    except (OSError, ValueError, LookupError) as error:
        print(f"communication_plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
