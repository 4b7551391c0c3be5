"""Write synthetic point clouds of trees of six species, as a laser scanner sees them from one side.

    python make_trees.py trees.npz
    python make_trees.py trees.npz --trees 6000 --noise 0.1
    python make_trees.py trees.npz --las scans    # your own: scans/SPECIES/*.las or *.laz

The data is not measured: each tree is a trunk and branches with random sizes, and a species is
defined by the shape of its crown, the height of its trunk and the angle of its branches. Sizes
overlap. A beam ends at the first thing that it hits, so everything behind is missing; distances
have an error, and some points are stray. The file has `points` (trees, 1024, 3; metres, z up),
`labels` and `species`. It appears complete or not at all. Equal options write equal trees.

With --las each file of a directory SPECIES is the scan of one tree with any number of points, from
which POINTS are drawn. Needs laspy: pip install "laspy[lazrs]".
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]

SPECIES: tuple[str, ...] = ("spruce", "oak", "acacia", "poplar", "willow", "birch")
POINTS = 1024  # per tree in the file
CANDIDATES = 4096  # per tree before beams are stopped
CHUNK = 96  # trees at a time that fit into a cache; a multiple of the number of species
CELL, BEAMS = 0.025, 128  # radians between two beams; beams in both directions
STRAY = 0.02  # fraction of points with a wrong distance

# Minimum and maximum for each species, in the order of SPECIES; values are uniform in between.
# Lengths are relative to the tree's height, including the `width` of the crown.
SHAPES = {
    "width": ([0.35, 0.45, 0.45, 0.30, 0.45, 0.40], [0.65, 0.78, 0.85, 0.55, 0.80, 0.75]),
    "base": ([0.05, 0.20, 0.60, 0.03, 0.50, 0.35], [0.30, 0.42, 0.78, 0.20, 0.70, 0.55]),
    "rise": ([-0.5, 0.20, 0.30, 1.00, 0.20, 0.60], [0.00, 0.80, 0.90, 2.50, 0.60, 1.20]),
    "hang": ([0.00, 0.00, 0.00, 0.00, 0.25, 0.00], [0.05, 0.06, 0.04, 0.02, 0.55, 0.10]),
    "lean": ([0.00, 0.00, 0.00, 0.00, 0.00, 0.30], [0.05, 0.06, 0.06, 0.05, 0.06, 0.50]),
    "wood": ([0.04, 0.05, 0.06, 0.03, 0.05, 0.06], [0.10, 0.14, 0.16, 0.10, 0.12, 0.16]),
    "leaf": ([0.01, 0.02, 0.01, 0.01, 0.01, 0.02], [0.03, 0.05, 0.03, 0.03, 0.03, 0.05]),
    "branches": ([40, 20, 14, 40, 24, 16], [90, 50, 36, 90, 50, 40]),
}


def make_trees(
    count: int, seed: int = 1, noise: float = 0.05, *, turn: bool = True
) -> tuple[NDArray[np.float32], Integers]:
    """Return points (count, POINTS, 3) in metres and labels; tree i depends on seed and i only.

    Without `turn` the scanner is in the direction of x.
    """
    points, labels = np.empty((count, POINTS, 3), np.float32), np.arange(count) % len(SPECIES)
    for first in range(0, count, CHUNK):
        # One generator per chunk: the first trees are the same, however many follow.
        random = np.random.default_rng((seed, first))
        species = np.arange(first, first + CHUNK) % len(SPECIES)
        trees = _scan(_grow(species, random), noise, random)
        trees = _turn(trees, random) if turn else trees
        points[first : first + CHUNK] = trees[: count - first]
    return points, labels


def _profile(species: Integers, height: Floats) -> Floats:
    """Return the radius of a crown, from 0 to 1, at a height from 0 (its base) to 1 (its top)."""
    middle = 2 * height - 1
    cone, ball = 1 - height, np.sqrt(np.maximum(0, 1 - middle**2))
    half, column = np.sqrt(np.maximum(0, 1 - height**2)), np.sqrt(np.maximum(0, 1 - middle**6))
    return np.choose(species, (cone, ball, half, column, half, ball))


def _grow(species: Integers, random: np.random.Generator) -> Floats:
    """Return points all over trees (trees, CANDIDATES, 3), one tree per entry of `species`."""
    trees, size, circle = len(species), (len(species), CANDIDATES), 2 * np.pi
    shape = {name: random.uniform(*np.array(ends)[:, species]) for name, ends in SHAPES.items()}
    shape = {name: values[:, None] for name, values in shape.items()}
    # Branches: each starts at the stem and ends at the outline of the crown.
    tips = random.random((trees, 100))
    radius = shape["width"] / 2 * _profile(species[:, None], tips)
    radius *= random.uniform(0.75, 1.1, tips.shape)
    turns = random.uniform(0, circle, tips.shape)
    lengths = shape["hang"] * random.uniform(0.3, 1, tips.shape)
    number = (random.random(size) * shape["branches"].round()).astype(int)
    is_willow, is_birch = (species[:, None] == SPECIES.index(one) for one in ("willow", "birch"))

    def of_branch(values: Floats) -> Floats:
        return np.take_along_axis(values, number, 1)

    along = random.random(size) ** 0.6  # from the stem to the tip; most leaves are outside
    reach, turn = of_branch(radius), of_branch(turns)
    z = shape["base"] + (1 - shape["base"]) * of_branch(tips) - shape["rise"] * reach * (1 - along)
    z -= of_branch(lengths) * np.clip(2 * along - 1, 0, 1)  # the outer half hangs straight down
    outward = reach * np.minimum(1, along * np.where(is_willow, 1.6, 1))
    leaves = np.stack((outward * np.cos(turn), outward * np.sin(turn), z), 2)
    leaves += random.standard_normal(leaves.shape) * shape["leaf"][:, :, None]
    # Wood: the stem, which becomes thinner towards the top.
    is_wood = random.random(size) < shape["wood"]
    height = random.random(size) * (0.4 + 0.6 * shape["base"])
    turn, thick = random.uniform(0, circle, size), 0.02 * (1 - height)
    wood = np.stack((thick * np.cos(turn), thick * np.sin(turn), height), 2)
    points = np.where(is_wood[:, :, None], wood, leaves)
    # Stems lean from a fork upwards. All species have one stem, except birches with two or three.
    stems = np.where(is_birch, random.integers(2, 4, (trees, 1)), 1)
    stem = np.where(is_wood, (random.random(size) * stems).astype(int), number % stems)
    turn = circle * (stem / stems + random.random((trees, 1)))
    above = np.maximum(0, points[:, :, 2] - random.uniform(0.1, 0.25, (trees, 1)))
    points[:, :, :2] *= np.where(stems > 1, 0.6, 1)[:, :, None]
    points[:, :, 0] += shape["lean"] * above * np.cos(turn)
    points[:, :, 1] += shape["lean"] * above * np.sin(turn)
    points[:, :, 2] = np.maximum(points[:, :, 2], 0)
    return points * random.uniform(6, 25, (trees, 1, 1))


def _scan(points: Floats, noise: float, random: np.random.Generator) -> Floats:
    """Return the points that a scanner on a tripod sees (trees, POINTS, 3), with its errors."""
    trees, height = len(points), points[:, :, 2].max(1)
    place = height * random.uniform(1, 1.6, trees), np.zeros(trees), np.full(trees, 1.5)
    away = points - np.stack(place, 1)[:, None]
    distance = np.linalg.norm(away, axis=2)
    # Number the beams by their horizontal and vertical angles, and then across all trees.
    angles = np.arctan2(away[:, :, 1], -away[:, :, 0]), np.arcsin(away[:, :, 2] / distance)
    across, up = (np.floor(angle / CELL).astype(int) % BEAMS for angle in angles)
    beam = (np.arange(trees)[:, None] * BEAMS + across) * BEAMS + up
    nearest = np.full(trees * BEAMS * BEAMS, np.inf)
    # Not `nearest[beam] = …`: with several points in one beam, that would store the last, not the
    # nearest.
    np.minimum.at(nearest, beam.ravel(), distance.ravel())
    # A beam is wider than a leaf: it also hits points slightly behind the first one.
    is_seen = distance < nearest[beam] + 0.04 * height[:, None]
    order = np.argsort(random.random(is_seen.shape) + 2 * ~is_seen, axis=1)  # visible ones first
    order = np.take_along_axis(order, np.arange(POINTS) % is_seen.sum(1)[:, None], 1)
    error = noise * random.standard_normal(order.shape)
    stray = random.uniform(-0.2, 0.2, order.shape) * height[:, None]
    error += np.where(random.random(order.shape) < STRAY, stray, 0)
    error /= np.take_along_axis(distance, order, 1)
    seen = np.take_along_axis(points, order[:, :, None], 1)
    return seen + np.take_along_axis(away, order[:, :, None], 1) * error[:, :, None]


def _turn(trees: Floats, random: np.random.Generator) -> Floats:
    x, y, z = trees.transpose(2, 0, 1)
    angle = random.uniform(0, 2 * np.pi, (len(trees), 1))
    turned = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
    return np.stack((*turned, z), 2)


def read_scans(directory: Path, seed: int) -> tuple[Floats, Integers, tuple[str, ...]]:
    """Return points (trees, POINTS, 3), labels and species of DIRECTORY/SPECIES/*.las and *.laz.

    The points of a tree are drawn at random; those of a scan with fewer than POINTS repeat.

    Raises:
        ValueError: there is no scan, or one cannot be read.
    """
    try:
        import laspy  # noqa: PLC0415 - optional
    except ImportError:
        raise ValueError("--las needs laspy: pip install 'laspy[lazrs]'") from None
    files = sorted(one for one in directory.glob("*/*") if one.suffix.lower() in (".las", ".laz"))
    if not files:
        raise ValueError(f"--las {directory}: there is no {directory}/SPECIES/*.las or *.laz")
    species = tuple(sorted({one.parent.name for one in files}))
    points = np.empty((len(files), POINTS, 3), np.float32)
    for number, file in enumerate(files):
        try:
            scan = np.asarray(laspy.read(file).xyz)
        except Exception as error:  # noqa: BLE001 - laspy raises what its parsers meet
            raise ValueError(f"{file}: {error or type(error).__name__}") from None
        if not len(scan):
            raise ValueError(f"{file}: has no points")
        random = np.random.default_rng((seed, number))
        order = random.permutation(len(scan))
        # In float64: map coordinates have seven digits, and float32 would lose the shape.
        drawn = scan[np.resize(order, POINTS)]
        points[number] = drawn - [*scan[:, :2].mean(0), scan[:, 2].min()]
    return points, np.array([species.index(one.parent.name) for one in files]), species


def write_trees(
    file: Path, points: Floats, labels: Integers, species: tuple[str, ...] = SPECIES
) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            np.savez(stream, points=points, labels=labels, species=np.array(species))
        Path(temporary).chmod(0o644)
        Path(temporary).rename(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--las", type=Path, metavar="DIR", help="read scans: DIR/SPECIES/*.las")
    parser.add_argument("--trees", type=int, default=2400, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--noise", type=float, default=0.05, metavar="METRES", help="of distances")
    options = parser.parse_args(arguments)
    if options.trees < 1 or options.seed < 0 or not 0 <= options.noise < np.inf:
        parser.error("--trees must be 1 or more, --seed and --noise 0 or more")
    try:
        if options.las is not None:
            trees = read_scans(options.las, options.seed)
        else:
            trees = *make_trees(options.trees, options.seed, options.noise), SPECIES
        write_trees(options.file, *trees)
    except (OSError, ValueError) as error:
        reason = f"{options.file}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"make_trees.py: error: {reason}", file=sys.stderr)
        return 2
    kind = "synthetic trees" if options.las is None else "scanned trees"
    print(f"wrote {len(trees[0])} {kind} of {len(trees[2])} species to {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
