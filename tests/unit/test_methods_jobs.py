"""convolutions.py, kmeans.py and infer.py: right results, on any number of ranks, with figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import read_profile
from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run_forked

pytestmark = TRAINS


def test_algorithms_of_a_layer_agree_and_a_plan_keeps_the_limit(tmp_path: Path) -> None:
    """With odd and even sizes; workspace as allocated is that of the formulas."""
    layer = ["--channels=3", "--filters=4", "--batch-size=4", "--repeats=6"]
    odd, even = tmp_path / "odd", tmp_path / "even"
    columns = 4 * 3 * 9 * 9 * 9  # bytes of im2col for one image
    some = [*layer, "--algorithms=im2col,winograd", f"--workspace-mb={1.5 * columns / 2**20}"]
    printed = run_forked(
        tmp_path,
        "convolutions",
        [
            (1, [*some, "--image=9", f"--output={odd}", f"--profile={tmp_path / 'profile'}"], ""),
            (2, [*layer, "--image=8", f"--output={even}"], ""),
            (1, [*layer, "--image=12", "--kernel=5", f"--output={tmp_path / 'five'}"], ""),
        ],
    )
    found = result_of(odd)
    assert found["plan"] == "4 x 1 im2col"
    assert found["undivided_ms"] is None
    assert 0 < found["plan_predicted_ms"] < math.inf
    assert f"plan within {1.5 * columns / 2**20:g} MiB: 4 x 1 im2col" in printed
    rows = [row for place in (odd, even) for row in result_of(place)["table"]]
    assert [row["batch"] for row in rows] == [
        *[1] * 2,
        *[2] * 2,
        *[4] * 2,
        *[1] * 4,
        *[2] * 4,
        *[4] * 4,
    ]
    for row in rows:
        assert row["error"] < 1e-5, row
        if row["algorithm"] == "im2col":
            assert row["workspace_bytes"] == row["computed_bytes"], row
        if row["algorithm"] in ("fft", "winograd"):
            assert 0.4 < row["workspace_bytes"] / row["computed_bytes"] < 2.5, row
    multiplications = {row["algorithm"]: row["multiplications"] for row in rows[-4:]}
    assert multiplications["direct"] == multiplications["im2col"] == 4 * 3 * 4 * 9 * 64
    assert multiplications["winograd"] * 9 == multiplications["direct"] * 4  # of 36 there remain 16
    assert result_of(even)["fastest"] in multiplications
    assert {row["algorithm"] for row in result_of(tmp_path / "five")["table"]} == {
        "direct",
        "im2col",
        "fft",
    }
    profile = read_profile(tmp_path / "profile")
    assert profile is not None
    assert profile.steps == 5


def test_a_wrong_algorithm_and_a_limit_below_all_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A difference to direct ends the run; the plan is the best of all that there are."""
    monkeypatch.syspath_prepend(JOBS)
    job = load(JOBS / "convolutions.py")
    ones = job.torch.ones(2)
    with pytest.raises(job.JobError, match="winograd differs from direct by 1.0e-03"):
        job.error_of(ones * 1.001, ones, "winograd")
    fastest = {1: (3.0, "a"), 2: (4.0, "b"), 4: (9.0, "a"), 7: (17.0, "c")}
    for batch in range(1, 9):
        seconds, plan = job.divide(batch, fastest)
        every = [
            sum(fastest[size][0] for size in sizes)
            for count in range(1, batch + 1)
            for sizes in itertools.combinations_with_replacement(fastest, count)
            if sum(sizes) == batch
        ]
        assert seconds == min(every)
        assert sum(size for size, _ in plan) == batch
    options = job.parse(["--workspace-mb=0.001", "--batch-size=1", "--repeats=1"])
    images, filters = job.torch.zeros(1, 3, 8, 8), job.torch.zeros(2, 3, 3, 3)
    rows = [{"batch": 1, "algorithm": "fft", "ms": 1.0, "workspace_bytes": 1 << 20}]
    with pytest.raises(job.JobError, match="--workspace-mb 0.001: no algorithm fits; .* is 1.00"):
        job.plan_of(rows, options, images, filters)


# Stops at an iteration, by what one rank is told.
STOP = """
calls, assign = [], job.assign
job.assign = lambda *some: (calls.append(None), assign(*some))[1]
job.Channel.stop_requested = lambda self: rank == 1 and len(calls) >= 3
"""


def test_kmeans_is_the_same_on_any_number_of_ranks_and_as_scikit_learns(tmp_path: Path) -> None:
    """Also with a cluster that is empty at first; stopped and resumed; not without all-reduce."""
    import numpy as np  # noqa: PLC0415 - may be missing
    from sklearn.cluster import KMeans  # noqa: PLC0415 - takes a second

    random = np.random.default_rng(1)
    points = random.normal(size=(701, 3)).astype("float32")
    first = np.concatenate([points[:6], [[90, 90, 90]]]).astype("float32")
    np.save(tmp_path / "points.npy", points)
    np.save(tmp_path / "first.npy", first)
    given = ["--clusters=7", f"--data={tmp_path}/points.npy", f"--init={tmp_path}/first.npy"]
    made = ["--clusters=5", "--points=9001", "--dimensions=4", "--spread=0.02", "--block=1000"]
    runs: list[tuple[int, list[str], str]] = []
    for ranks in (1, 2, 4):
        runs += [
            (ranks, [*given, f"--output={tmp_path}/given{ranks}"], ""),
            (ranks, [*made, f"--output={tmp_path}/made{ranks}"], ""),
        ]
    runs += [(n, [*made, "--init=random", f"--output={tmp_path}/random{n}"], "") for n in (1, 2)]
    part = [*given, f"--checkpoint={tmp_path}/saved", f"--output={tmp_path}/part"]
    runs += [(2, part, STOP), (4, part, ""), (1, part, "")]
    deaf = "job.total = lambda tensor: tensor"
    # As many iterations on both ranks, which would otherwise wait for each other for ever.
    same = ["--iterations=3", "--tolerance=0"]
    runs += [(2, [*given, *same, f"--output={tmp_path}/deaf"], deaf)]
    printed = run_forked(tmp_path, "kmeans", runs)

    expected = KMeans(7, init=first, n_init=1, tol=1e-4, algorithm="lloyd").fit(points)
    one = result_of(tmp_path / "given1")
    assert one["iterations"] == expected.n_iter_
    assert one["inertia"] == pytest.approx(expected.inertia_, rel=1e-5)
    assert ordered(tmp_path / "given1") == pytest.approx(
        np.sort(expected.cluster_centers_, 0), abs=1e-4
    )
    assert one["relocated_clusters"] == 1
    assert one["smallest_cluster"] > 0
    several = [("given", 2), ("given", 4), ("made", 2), ("made", 4), ("random", 2)]
    for name, ranks in several:
        found, alone = result_of(tmp_path / f"{name}{ranks}"), result_of(tmp_path / f"{name}1")
        assert found["purity"] == alone["purity"]  # None: of given points no cluster is known
        for figure in ("inertia", "iterations", "largest_cluster"):
            assert found[figure] == pytest.approx(alone[figure], rel=1e-6), (name, ranks, figure)
        centres = ordered(tmp_path / f"{name}1")
        assert ordered(tmp_path / f"{name}{ranks}") == pytest.approx(centres, abs=1e-5)
    assert result_of(tmp_path / "made1")["purity"] > 0.99
    assert result_of(tmp_path / "made1")["converged"]
    assert printed.count("stopped: {") == 1
    assert "resumed from" in printed
    assert ordered(tmp_path / "part") == pytest.approx(ordered(tmp_path / "given1"), abs=1e-5)
    assert result_of(tmp_path / "part")["iterations"] == one["iterations"]
    assert ordered(tmp_path / "deaf") != pytest.approx(ordered(tmp_path / "given1"), abs=0.01)


def ordered(directory: Path) -> Any:
    """Return the centres of a run in an order that does not depend on their numbers."""
    import numpy as np  # noqa: PLC0415 - may be missing

    return np.sort(np.load(directory / "centres.npy"), 0)


# A model that takes five milliseconds.
SLOW = """
def scores_of(model, images, options):
    job.time.sleep(0.005)
    return job.torch.zeros(len(images), 10)

job.scores_of = scores_of
"""


def test_inference_counts_the_queue_and_keeps_the_accuracy(few: Path, tmp_path: Path) -> None:
    """Of a model that was trained; in all types, in an open and a closed loop, on two replicas."""
    trained = tmp_path / "trained"
    train = [f"--data={few}", "--epochs=2", "--workers=0", f"--checkpoint={trained}"]
    run_forked(tmp_path, "ddp_images", [(1, [*train, f"--output={tmp_path / 'train'}"], "")])
    model = [f"--data={few}", f"--checkpoint-from={trained}", "--warm-up-requests=20"]
    small = ["--model=cnn", "--width=2", "--size=8", "--warm-up-requests=0"]
    wanted = {
        "two": (2, [*model, "--rate=2000", "--requests=220", "--batch-size=8"], ""),
        "closed": (1, [*model, "--rate=0", "--requests=160", "--batch-size=16"], ""),
        "int8": (1, [*model, "--rate=0", "--requests=60", "--dtype=int8"], ""),
        "bf16": (1, [*model, "--rate=0", "--requests=60", "--dtype=bf16"], ""),
        "slow": (1, [*small, "--rate=2000", "--requests=100", "--batch-size=1"], SLOW),
        "window": (
            1,
            [*small, "--rate=100", "--requests=40", "--batch-size=4", "--window-ms=100"],
            "",
        ),
    }
    runs = [
        (n, [*some, f"--output={tmp_path / k}"], change) for k, (n, some, change) in wanted.items()
    ]
    printed = run_forked(tmp_path, "infer", runs)
    found = {name: result_of(tmp_path / name) for name in wanted}
    accuracy = result_of(tmp_path / "train")["test_accuracy"]
    for name, result in found.items():
        assert 0 < result["latency_p50_ms"] <= result["latency_p95_ms"], name
        assert result["latency_p95_ms"] <= result["latency_p99_ms"] <= result["latency_max_ms"]
        assert result["throughput"] > 0, name
        assert not result["stopped"]
    for name in ("two", "closed"):
        assert found[name]["test_accuracy"] == found[name]["float32_accuracy"] == accuracy
        assert found[name]["agreement"] == 1
    assert found["two"]["measured_requests"] == 200
    assert 1 <= found["two"]["mean_batch"] <= 8
    assert found["closed"]["mean_batch"] == 16
    for name, bits in (("int8", 8), ("bf16", 16)):
        assert found[name]["agreement"] > 0.9, name
        assert found[name]["float32_accuracy"] == accuracy, name
        assert found[name]["model_bytes"] < found["two"]["model_bytes"] * (bits / 32 + 0.3), name
    # A batch of one lasts 5 ms at least, and 100 arrive in 50 ms: the last one waits for all.
    assert found["slow"]["latency_p99_ms"] > 300
    assert found["slow"]["overloaded"]
    assert "overloaded: " in printed
    assert found["slow"]["test_accuracy"] is None
    assert found["window"]["mean_batch"] > 3.5  # 100 ms are enough for four arrivals


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("convolutions", ["--algorithms=magic"], "--algorithms magic: must be all or some of"),
        ("convolutions", ["--kernel=5", "--algorithms=winograd"], "--kernel 5: "),
        ("convolutions", ["--workspace-mb=-1"], "--workspace-mb -1.0 must be at least 0"),
        ("kmeans", ["--clusters=0"], "--clusters 0 must be at least 1"),
        ("infer", ["--checkpoint-from=x"], "--checkpoint-from x: needs --data"),
        ("infer", ["--requests=10"], "--requests 10 must be more than --warm-up-requests 100"),
    ],
)
def test_wrong_options_are_named(
    script: str,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, and status 2."""
    monkeypatch.syspath_prepend(JOBS)
    job = load(JOBS / f"{script}.py")
    with pytest.raises(SystemExit, match="2"):
        job.parse(arguments)
    assert words in capsys.readouterr().err


def test_wrong_data_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is no matrix, has no number or too few rows; a model that int8 cannot have."""
    import numpy as np  # noqa: PLC0415 - may be missing

    monkeypatch.syspath_prepend(JOBS)
    job, data = load(JOBS / "kmeans.py"), load(JOBS / "kmeans_data.py")
    file = tmp_path / "x.npy"
    ranks, cpu = job.Ranks(), job.torch.device("cpu")

    def refusal(**more: object) -> str:
        options = job.parse([])
        vars(options).update(more)
        with pytest.raises(job.JobError) as caught:
            data.given_centres(options, data.make_points(options, ranks, cpu))
        return str(caught.value)

    assert refusal(data=file) == f"--data {file}: No such file or directory"
    file.write_text("text")
    assert refusal(data=file) == f"--data {file}: is not a file of numpy.save"
    np.save(file, np.zeros(3))
    assert refusal(data=file) == f"--data {file}: must be rows of numbers, and is float64 (3,)"
    np.save(file, np.full((200, 2), np.nan))
    assert refusal(data=file) == f"--data {file}: has numbers that are not finite"
    np.save(file, np.zeros((99, 2)))
    assert refusal(data=file).startswith("99 points are too few for 100 clusters")
    needed = "is (99, 2), and not 100 clusters of 16 dimensions"
    assert refusal(points=200, init=str(file)) == f"--init {file}: {needed}"
