"""Formulas of memory against published figures, and the ways to make a training fit."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.diagnosis.memory import (
    RESERVE,
    DeviceNeed,
    Linear,
    Transformer,
    device_bytes_of,
    first_fit,
    largest_batch,
    line_through,
    model_states,
    read_model,
    ways,
)
from hpml_orchestrator.errors import InputError

GB, GIB = 1e9, 1024**3


@pytest.mark.parametrize(
    ("parameters", "optimizer", "precision", "published"),
    [
        # Rajbhandari et al. 2020, "ZeRO", section 3.1: GPT-2 needs at least 24 GB
        (1.5e9, "adam", "mixed", 24 * GB),
        # the same, figure 1 and table 1 without partitioning
        (7.5e9, "adam", "mixed", 120 * GB),
        (128e9, "adam", "mixed", 2048 * GB),
        # Lv et al. 2023, "LOMO", table 1: LLaMA-7B, weights, gradients and states
        (6.74e9, "adamw", "mixed", (12.55 + 12.55 + 75.31) * GIB),
        # Dettmers et al. 2023, "QLoRA": 16-bit finetuning of LLaMA 65B, more than 780 GB; their 12
        # bytes are 16-bit weights and gradients with two moments in float32, without master weights
        (65e9, "adamw", "mixed", 780 * GB + 65e9 * 4),
        # Hugging Face, "Model training anatomy": 18 bytes with AdamW under autocast, and 16 without
        (1e9, "adamw", "autocast", 18 * GB),
        (1e9, "adamw", "float32", 16 * GB),
        # weights of Llama 2 70B in 16 bit are 140 GB, and gradients as much
        (70e9, "sgd", "bfloat16", 280 * GB),
    ],
)
def test_states_of_published_models(
    parameters: float, optimizer: str, precision: str, published: float
) -> None:
    """Weights, gradients and optimizer states are as published."""
    assert sum(model_states(parameters, optimizer, precision)) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("billions", "gpus", "stages"),
    [  # Rajbhandari et al. 2020, "ZeRO", table 1: GB on each device by stage
        (7.5, 4, (52.5, 41.3, 30)),
        (7.5, 64, (31.4, 16.6, 1.88)),
        (7.5, 1024, (30.1, 15.1, 0.12)),
        (128, 16, (608, 368, 128)),
        (128, 64, (536, 284, 32)),
        (1000, 1024, (4011, 2013, 15.6)),
    ],
)
def test_stages_of_zero(billions: float, gpus: int, stages: tuple[float, ...]) -> None:
    """The three stages need as much as in the paper's table."""
    need = DeviceNeed(*model_states(billions * 1e9, "adam", "mixed"), Linear(0.0), layers=10**9)
    found = {way.name: way.need / GB for way in ways(need, 1, gpus=gpus, gpus_per_node=8)}
    shown = [found[name] for name in ("ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)")]
    assert shown == pytest.approx(stages, rel=0.03)


# Korthikanti et al. 2022, table 3
GPT3 = Transformer(layers=96, hidden=12288, sequence=2048, heads=96, vocabulary=51200)
MT_NLG = Transformer(layers=105, hidden=20480, sequence=2048, heads=128, vocabulary=51200)
TRILLION = Transformer(layers=128, hidden=25600, sequence=2048, heads=160, vocabulary=51200)


@pytest.mark.parametrize(("model", "billions"), [(GPT3, 175), (MT_NLG, 530), (TRILLION, 1008)])
def test_parameters_of_published_models(model: Transformer, billions: float) -> None:
    """The number of parameters follows from the shape."""
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("model", "saved"), [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_attention_scores_are_most_of_the_activations(model: Transformer, saved: float) -> None:
    """Without kept scores there is 70 and 65 % less, as Korthikanti et al. 2022, section 5."""
    lean = Transformer(model.layers, model.hidden, model.sequence)
    whole = Transformer(model.layers, model.hidden, model.sequence, model.heads)
    assert 1 - lean.activation_bytes(1) / whole.activation_bytes(1) == pytest.approx(
        saved, abs=0.01
    )


@pytest.mark.parametrize(
    ("parameters", "activations", "gpus", "advice"),
    [
        (1.5e9, 30 * GB, 1, "one device"),
        (1.5e9, 100 * GB, 1, "gradient accumulation (micro-batch 1)"),
        (7e9, 20 * GB, 1, None),
        (7e9, 20 * GB, 8, "ZeRO-1"),
        (13e9, 20 * GB, 16, "ZeRO-2"),
        (40e9, 40 * GB, 32, "FSDP (ZeRO-3)"),
        (30e9, 250 * GB, 32, "FSDP, tensor parallel inside the node"),
        (30e9, 3000 * GB, 64, "tensor parallel inside the node, pipeline between nodes"),
    ],
)
def test_the_simplest_way_that_fits(
    parameters: float, activations: float, gpus: int, advice: str | None
) -> None:
    """The first way that fits 80 GB with the reserve is advised."""
    states = (2 * parameters, 4 * parameters, 12 * parameters)  # gradients in float32
    per_sample = activations / 8 if advice and "accumulation" in advice else None
    kept = Linear(0.0, per_sample) if per_sample else Linear(activations)
    need = DeviceNeed(*states, kept, layers=36)
    options = ways(need, 8, gpus=gpus, gpus_per_node=8)
    way = first_fit(options, (1 - RESERVE) * 80 * GB)
    assert (way.name if way else None) == advice
    assert options[0].need == pytest.approx(18 * parameters + activations)
    fitting = [option.name for option in options if option.need <= 72 * GB]
    assert fitting[:1] == ([advice] if advice else [])


def test_a_line_and_the_largest_batch() -> None:
    """Two measured batches give a base and a slope, and so the largest batch that fits."""
    line = line_through({8: 180.0, 16: 260.0})
    assert (line.base, line.per_sample, line.at(32)) == (100.0, 10.0, 420.0)
    assert largest_batch(500, line, fixed=100) == 30
    assert largest_batch(50, line) == 0
    assert line_through({0: 7.0}).at(32) == 7.0
    assert line_through({8: 9.0, 16: 7.0}).at(32) == 7.0  # noise does not make memory fall
    assert largest_batch(500, line_through({0: 7.0})) is None


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("a100", 40),
        ("a100_80gb", 80),
        ("nvidia_a100-sxm4-80gb", 80),
        ("h100", 80),
        ("1g.10gb", 10),
        ("A100-SXM4-40GB", 40),
        ("gpu", None),
        ("", None),
        ("h1000", None),
    ],
)
def test_memory_of_a_gpu_by_its_name(name: str, gibibytes: int | None) -> None:
    """A MIG profile and a size in the name count more than the type; others are not guessed."""
    found = device_bytes_of(name)
    assert (found[0] / GIB if found else None) == gibibytes


@pytest.mark.parametrize(
    ("text", "states", "batch"),
    [
        ("7B", 16 * 7e9, None),
        ("parameters=350M,optimizer=sgd,precision=float32", 8 * 350e6, None),
        ("parameters=1B,layers=24,hidden=2048,sequence=1024,batch=4", 16e9, 4),
    ],
)
def test_a_model_that_a_user_describes(text: str, states: float, batch: int | None) -> None:
    """Numbers have the units of parameters; the shape adds activations."""
    need, found = read_model(text)
    assert found == batch
    assert need.states == pytest.approx(states)
    assert bool(need.activations.at(batch)) == (batch is not None)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("seven", "--model parameters", "must be a number such as 7B"),
        ("0", "--model parameters", "must be a number such as 7B"),
        ("nan", "--model parameters", "must be a number such as 7B"),
        ("parametres=7B", "--model", "did you mean parameters"),
        ("7B,optimizer=adm", "--model optimizer", "must be one of sgd"),
        ("7B,layers=32", "--model", "lacks hidden and sequence"),
        ("7B,layers=1.5,hidden=8,sequence=8", "--model layers", "must be a number"),
        ("optimizer=sgd", "--model", "lacks parameters"),
    ],
)
def test_a_model_that_is_not_valid(text: str, field: str, said: str) -> None:
    """The error names the word that is wrong and what would be right."""
    with pytest.raises(InputError) as caught:
        read_model(text)
    fault: Any = caught.value
    assert fault.field == field
    assert said in f"{fault} {fault.hint}"
