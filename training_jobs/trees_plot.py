"""Plot the results of trees.py: a tree of each species, accuracy by epoch, and confusion matrix.

    python trees.py --output results
    python trees_plot.py results trees.png

Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TypedDict

from make_trees import SPECIES, make_trees


class Result(TypedDict):
    """The part of trees.py's result.json that is drawn."""

    evaluations: dict[str, tuple[float, float, float]]  # by epoch: seconds, accuracy, loss
    species: list[str]
    confusion: list[list[int]] | None  # from the test; None if the training was stopped


def draw(result: Result, file: Path) -> None:
    """Draw the plots of a result.json."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second

    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.2)).flat
    above.suptitle("Synthetic trees, as a scanner on the right sees them")
    points, _ = make_trees(len(SPECIES), seed=5, turn=False)
    for axes, cloud, name in zip(above.subplots(1, len(SPECIES)), points, SPECIES):  # noqa: B905 - Python 3.9
        axes.scatter(cloud[:, 0], cloud[:, 2], s=1.5, c=cloud[:, 1], cmap="viridis")
        axes.set_aspect("equal")
        axes.set_xlabel(f"{name}, m")
    curve, table = below.subplots(1, 2)
    epochs = [int(epoch) for epoch in result["evaluations"]]
    accuracies = [accuracy for _, accuracy, _ in result["evaluations"].values()]
    curve.plot(epochs, accuracies, marker="o")
    curve.set(title="Validation accuracy", xlabel="epoch", ylim=(0, 1.02))
    curve.grid(alpha=0.3)
    species, confusion = result["species"], result["confusion"]
    if confusion is None:
        raise ValueError("the training stopped before its test")
    table.imshow(confusion, cmap="Blues")
    table.set(title=f"{sum(map(sum, confusion))} test trees", xlabel="predicted", ylabel="true")
    table.set_xticks(range(len(species)), species, rotation=45)
    table.set_yticks(range(len(species)), species)
    most = max(map(max, confusion))
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            color = "white" if count > most / 2 else "black"
            table.text(column, row, count, ha="center", va="center", color=color)
    figure.savefig(file, dpi=80)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="DIR", help="--output of trees.py")
    parser.add_argument("picture", type=Path, metavar="FILE", help="a .png, .svg or .pdf file")
    options = parser.parse_args(arguments)
    try:
        draw(json.loads((options.results / "result.json").read_text()), options.picture)
    except ImportError as error:
        print(f"trees_plot.py: error: pip install {error.name}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"trees_plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
