"""lm.py with tensor parallelism and pipelines: the same losses, what they cost; and its parts."""

from __future__ import annotations

import array
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.memory import read_model, ways
from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run_forked, write_text

TRAIN = JOBS / "lm.py"
SMALL = "--layers=2 --heads=4 --width=32 --sequence=64 --lr=0.003"
SMALL += " --lr-warmup-steps=2 --steps=6 --eval-every=3"
HIDDEN, TIED = 4 * 8 * 64 * 32, 4 * 256 * 32  # bytes of the residual stream, and of the embedding
SCALARS = 64  # bytes of the gradient's norm and the like
# Rank 1 is asked to stop at its third look, which is after two steps.
STOP = """
if rank == 1:
    looks = iter(range(1000))
    job.Channel.stop_requested = lambda self: next(looks) >= 2
"""

pytestmark = TRAINS


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """lm.py as a module."""
    sys.path.insert(0, str(JOBS))
    yield load(TRAIN)
    sys.path.remove(str(JOBS))


def train(home: Path, *wanted: tuple[str, int, str, str, str]) -> dict[str, Any]:
    """Return the results of 6 steps with 8 sequences each, by name.

    Args:
        home: a directory.
        wanted: name, number of ranks, options, name of a checkpoint or "", code that changes it.
    """
    text = write_text(home)
    text.write_bytes(text.read_bytes()[:9000])  # evaluations take longer than the steps
    runs = []
    for name, ranks, more, saved, change in wanted:
        arguments = [*SMALL.split(), f"--data={text}", f"--output={home / name}", *more.split()]
        arguments += [f"--batch-size={4 if 'dp=2' in more else 8}"]
        arguments += [f"--checkpoint={home / saved}"] if saved else []
        runs.append((ranks, arguments, change))
    printed = run_forked(home, "lm", runs)
    assert printed.count("stopped: ") == sum(bool(change) for *_, change in wanted)
    assert printed.count("sample: ") == sum("--sample" in more for _, _, more, *_ in wanted)
    return {name: result_of(home / name) for name, *_ in wanted}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name; `mixed` is stopped with dp=2,pp=2 and continued as `tp`."""
    return train(
        tmp_path_factory.mktemp("layouts"),
        ("one", 1, "", "", ""),
        ("pp", 2, "--parallel=pp=2 --sample=3", "", ""),
        ("pp stopped", 2, "--parallel=pp=2", "saved", STOP),
        ("pp resumed", 2, "--parallel=pp=2", "saved", ""),
        ("mixed", 4, "--parallel=dp=2,pp=2", "mixed-saved", STOP),
        ("tp", 2, "--parallel=tp=2 --sample=3", "mixed-saved", ""),
    )


@pytest.mark.slow
def test_four_ranks_learn_what_one_rank_learns(results: dict[str, Any], tmp_path: Path) -> None:
    """In mixed layouts; each continues the checkpoint of the one before, the last one has all."""
    found = train(
        tmp_path,
        ("tp and pp", 4, "--parallel=tp=2,pp=2", "saved", STOP),
        ("dp and tp", 4, "--parallel=dp=2,tp=2", "saved", ""),
        ("fsdp and tp", 4, "--parallel=fsdp,dp=2,tp=2", "", ""),
        ("ddp", 2, "--parallel=dp=2", "", ""),
    )
    for name in ("dp and tp", "fsdp and tp", "ddp"):
        assert losses(found[name]) == pytest.approx(losses(results["one"]), abs=1e-4), name
    assert found["tp and pp"]["sent_bytes_tp"] == pytest.approx(4 * HIDDEN, abs=SCALARS)
    for result in found.values():
        for name in (one for one in result if one.startswith("sent") and "formula" not in one):
            assert result[name] == pytest.approx(result[f"{name}_formula"], abs=SCALARS), name


def losses(result: dict[str, Any]) -> list[float]:
    """Return the loss of the validation text by step, and that of the test text."""
    return [*(loss for _, loss in result["evaluations"].values()), result["test_loss"]]


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_layouts_learn_what_one_rank_learns(results: dict[str, Any], name: str) -> None:
    """To float tolerance; a checkpoint of one layout is continued with another."""
    alone = losses(results["one"])
    assert len(alone) == 4
    assert alone[2] < alone[0] - 0.3
    assert losses(results[name]) == pytest.approx(alone, abs=1e-4)


def test_a_stopped_pipeline_continues_exactly(results: dict[str, Any]) -> None:
    """To the bit."""
    assert losses(results["pp resumed"]) == losses(results["pp"])


def test_bytes_are_counted(results: dict[str, Any]) -> None:
    """Four sums in each layer of a stage, one send to the next stage, the tied matrix."""
    stage, mixed, tensor = results["pp"], results["mixed"], results["tp"]
    assert stage["sent_bytes_pp"] == pytest.approx(HIDDEN + TIED, abs=SCALARS)
    assert mixed["sent_bytes_pp"] == pytest.approx(HIDDEN / 2 + TIED, abs=SCALARS)
    assert tensor["sent_bytes_tp"] == pytest.approx(2 * 4 * HIDDEN, abs=SCALARS)
    assert 2 * mixed["parameters"] < mixed["sent_bytes_dp"] < 4 * mixed["parameters"]
    for result in (stage, mixed, tensor):
        for name in (one for one in result if one.startswith("sent") and "formula" not in one):
            assert result[name] == pytest.approx(result[f"{name}_formula"], abs=SCALARS), name


def test_memory_and_bubble_are_measured(results: dict[str, Any]) -> None:
    """Stages hold less than one rank; (P-1)/(M+P-1) is 1/5 with 2 stages, 4 micro-batches."""
    alone, stage = results["one"], results["pp"]
    assert stage["memory_bytes"] < 0.6 * alone["memory_bytes"]
    assert 0.5 < alone["memory_bytes"] / alone["memory_bytes_formula"] < 1.5
    assert stage["bubble_formula"] == 0.2
    assert 0 < stage["bubble"] < 1
    assert "bubble" not in alone


@pytest.mark.parametrize(
    ("how", "ranks", "needed"), [("tp=2", 1, "dp x 2 x 1"), ("dp=2,pp=2", 6, "2 x 1 x 2")]
)
def test_a_wrong_number_of_ranks_is_named(script: Any, how: str, ranks: int, needed: str) -> None:
    """With what would be right."""
    options = script.parse([f"--parallel={how}"])
    wrong = rf"--parallel {how}: {needed} ranks \(dp x tp x pp\) are needed, not {ranks}"
    with pytest.raises(script.JobError, match=wrong):
        script.Layout(options, SimpleNamespace(world_size=ranks), script.torch.device("cpu"))


def test_memory_by_formula_is_that_of_advise(script: Any) -> None:
    """lm_costs.py travels without hpml, so it has the formulas once more."""
    shape = "layers=8,hidden=512,sequence=256,vocabulary=1000"
    need, _ = read_model(f"{shape},parameters=30M,optimizer=adamw,precision=float32,batch=8")
    found = {one.name: one.need for one in ways(need, 8, gpus=4, gpus_per_node=2)}
    words = "--layers=8 --width=512 --sequence=256 --vocabulary=1000 --batch-size=8".split()
    costs, sizes = sys.modules["lm_costs"], sys.modules["lm_parallel"].Sizes

    def expected(size: Any, *more: str) -> float:
        options = script.parse([*words, "--amp=off", *more])
        return float(costs.expected_memory(options, size, 30_000_000))

    buckets = need.buckets  # lm.py has its gradients in DDP's buckets
    assert expected(sizes(dp=4)) == pytest.approx(found["DDP"] - buckets)
    assert expected(sizes(dp=4), "--recompute") == pytest.approx(
        found["activation checkpointing"] - buckets
    )
    assert expected(sizes(dp=4, fsdp=True), "--recompute") == pytest.approx(found["FSDP (ZeRO-3)"])
    pipeline = expected(sizes(pp=2, dp=1, tp=2), "--recompute", "--micro-batches=2")
    assert pipeline == pytest.approx(
        found["tensor parallel inside the node, pipeline between nodes"]
    )


def bin_file(file: Path, tokens: list[int]) -> None:
    file.write_bytes(array.array("H", tokens).tobytes())


def test_tokens_of_nanogpt_are_read(script: Any, tmp_path: Path) -> None:
    """train.bin, val.bin and meta.pkl; a token beyond the vocabulary is named with its place."""
    tokens = [one % 50_000 for one in range(0, 600_000, 7)]
    bin_file(tmp_path / "train.bin", tokens)
    bin_file(tmp_path / "val.bin", [5, 49_999] * 300)
    data, ranks = sys.modules["lm_data"], sys.modules["hpml_checkpoint"].Ranks()
    options = script.parse([f"--data={tmp_path}"])
    with pytest.raises(script.JobError, match="needs --vocabulary N"):
        data.share_text(options, ranks)
    letters = {one: chr(one) for one in range(128)}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50_000, "itos": letters}))
    text = data.share_text(options, ranks)
    assert (text.unit, text.vocabulary) == ("token", 50_000)
    assert data.windows_of(text.parts[0], script.torch.tensor([0, 8000]), 3).tolist() == [
        tokens[:4],
        tokens[8000:8004],
    ]
    assert [len(one) for one in text.parts[1:]] == [300, 300]
    assert text.decode([104, 105, 27]) == "hi�"
    options = script.parse([f"--data={tmp_path}", "--vocabulary=49999", "--sequence=64"])
    with pytest.raises(script.JobError, match=r"token 49999 at place 42857 .* to train"):
        data.share_text(options, ranks)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": bin_file}))
    with pytest.raises(script.JobError, match=r"meta.pkl: .*bin_file"):
        data.share_text(script.parse([f"--data={tmp_path}"]), ranks)


def test_the_peak_comes_from_the_bench(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After --peak-tflops, before the specification; what is not a number is ignored."""
    cpu, peak = script.torch.device("cpu"), script.peak_flops
    monkeypatch.setenv("HPML_PEAK_TFLOPS", "0.067")
    flops, text = peak(cpu, script.parse([]))
    assert flops == pytest.approx(0.067e12)
    assert "measured by hpml bench" in text
    assert "--peak-tflops" in peak(cpu, script.parse(["--peak-tflops=2"]))[1]
    monkeypatch.setenv("HPML_PEAK_TFLOPS", "fast")
    assert peak(cpu, script.parse([]))[0] is None


def test_only_matrices_decay(script: Any) -> None:
    """Norms, biases and embeddings do not; branches begin small; the head is the embedding."""
    options = script.parse(["--layers=8", "--vocabulary=256"])
    network = script.GPT(options)
    names = {id(one): name for name, one in network.named_parameters()}
    groups = script.parameter_groups(network, 0.1)
    (decaying,) = (group["params"] for group in groups if group["weight_decay"])
    kinds = {names[id(one)].partition(".")[2].partition(".")[2] for one in decaying}
    assert kinds == {f"{name}.weight" for name in ("qkv", "out", "up", "down")}
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert float(network.blocks["0"].down.weight.detach().std()) == pytest.approx(
        0.02 / 4, rel=0.05
    )
    assert "head.weight" not in names.values()
