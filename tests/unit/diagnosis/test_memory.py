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

GB, GIB, MIB = 1e9, 1024**3, 1024**2


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
    assert 1 - lean.layer_bytes() / whole.layer_bytes() == pytest.approx(saved, abs=0.01)


LLAMA_3B = "parameters=3.21B,layers=28,hidden=3072,sequence=4096,vocabulary=128256,batch=2"
LLAMA_8B = "parameters=8.03B,layers=32,hidden=4096,vocabulary=128256"
QWEN_32B = "parameters=32.8B,layers=64,hidden=5120,sequence=4096,vocabulary=151936"
BERT = "parameters=336M,layers=24,hidden=1024,sequence=512,heads=16"
CONTEXT = 1343 * MIB  # of CUDA, before the first tensor (Model training anatomy)

# github.com/pytorch/torchtune, README.md, "Optimization flags": peak of active memory, one A100
TORCHTUNE = "torchtune"
# github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 2: peak of each
# H100; the sequences are divided, so 32,768 tokens on each GPU
TITAN_LLAMA = "torchtitan, Llama 3.1 8B"
# github.com/pytorch/torchtitan, commit d66b72a6a (pull request 1690): peak of each H100
TITAN_QWEN = "torchtitan, Qwen3 32B"
# github.com/huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx (2022): what NVML says
# the V100 has occupied, so with the context and the allocator's free blocks
TRAINER = "Hugging Face"
ONE, CHECKPOINTING, FSDP = "one device", "activation checkpointing", "FSDP (ZeRO-3)"
TENSOR = "FSDP, tensor parallel inside the node"

PUBLISHED = [  # source, --model, GPUs, way, bytes
    # 28,000 MB for logits and loss of Gemma 2 2B, forward and backward, 8,192 tokens, one A100:
    # github.com/apple/ml-cross-entropy, README.md, "Benchmarking" (Wijmans et al. 2024, table 1)
    (
        "ml-cross-entropy",
        "parameters=2.6B,layers=26,hidden=2304,sequence=8192,vocabulary=256000,precision=bfloat16",
        1,
        "logits",
        28000 * MIB,
    ),
    (TORCHTUNE, f"{LLAMA_3B},precision=bfloat16", 1, ONE, 60.0 * GIB),
    (f"{TORCHTUNE}, compile", f"{LLAMA_3B},precision=bfloat16", 1, ONE, 51.0 * GIB),
    # Llama 2 7B, SGD, all in bfloat16: github.com/meta-pytorch/torchtune, pull request 389
    ("torchtune, SGD", "6.74B,optimizer=sgd,precision=bfloat16", 1, ONE, 27.83 * GB),
    (f"{TITAN_LLAMA}, FSDP 8", f"{LLAMA_8B},sequence=32768", 8, FSDP, 83.9 * GIB),
    (f"{TITAN_LLAMA}, CP 2", f"{LLAMA_8B},sequence=32768", 8, FSDP, 84.2 * GIB),
    (f"{TITAN_LLAMA}, CP 8", f"{LLAMA_8B},sequence=32768", 8, FSDP, 84.5 * GIB),
    (f"{TITAN_QWEN}, batch 1", f"{QWEN_32B},batch=1", 8, FSDP, 81.47 * GIB),
    (f"{TITAN_QWEN}, batch 2", f"{QWEN_32B},batch=2", 8, FSDP, 89.33 * GIB),
    (f"{TITAN_QWEN}, batch 2, compile", f"{QWEN_32B},batch=2", 8, FSDP, 81.85 * GIB),
    (f"{TITAN_QWEN}, batch 4", f"{QWEN_32B},batch=4", 16, FSDP, 78.48 * GIB),
    (f"{TRAINER}, batch 1", f"{BERT},precision=float32", 1, ONE, 8681 * MIB - CONTEXT),
    (
        f"{TRAINER}, checkpointing",
        f"{BERT},precision=float32",
        1,
        CHECKPOINTING,
        6775 * MIB - CONTEXT,
    ),
    (
        f"{TRAINER}, checkpointing, fp16",
        f"{BERT},precision=autocast",
        1,
        CHECKPOINTING,
        7275 * MIB - CONTEXT,
    ),
    (
        f"{TRAINER}, checkpointing, fp16, Adafactor",
        f"{BERT},precision=autocast,optimizer=adafactor",
        1,
        CHECKPOINTING,
        4847 * MIB - CONTEXT,
    ),
]
OUTSIDE = [  # the same, and why the estimate is not within 0.9 and 1.25 of it
    # github.com/mosaicml/llm-foundry, issue 117: the loss is flash-attn's, which computes the
    # gradient in the logits' memory; the run filled a card of 16 GB, with 3 retries to allocate
    (
        "MPT-125M",
        "parameters=125M,layers=12,hidden=768,sequence=2048,vocabulary=50368,batch=8",
        1,
        ONE,
        13.55 * GIB,
    ),
    # NVML also counts the allocator's free blocks; how many there were is not published
    (f"{TRAINER}, batch 4", f"{BERT},batch=4,precision=float32", 1, ONE, 14949 * MIB - CONTEXT),
    (
        f"{TRAINER}, batch 4, fp16",
        f"{BERT},batch=4,precision=autocast",
        1,
        ONE,
        13939 * MIB - CONTEXT,
    ),
    (
        f"{TRAINER}, batch 4, Adafactor",
        f"{BERT},batch=4,precision=float32,optimizer=adafactor",
        1,
        ONE,
        12295 * MIB - CONTEXT,
    ),
    # FSDP 4, tensor parallel 8: each GPU gathers the whole sequence around the layer it computes
    (f"{TITAN_QWEN}, tensor parallel", f"{QWEN_32B},batch=16", 32, TENSOR, 43.45 * GIB),
    # FSDP 4 with context parallel 2: 4,096 tokens on each GPU (pull request 1884). FSDP gathers the
    # embedding and the head with their gradients too, which is much of a small need
    (f"{TITAN_LLAMA}, short", f"{LLAMA_8B},sequence=4096", 4, FSDP, 44.84 * GIB),
]


def _ratio(model: str, gpus: int, way: str, published: float) -> float:
    need, batch = read_model(model)
    found = {one.name: one.need for one in ways(need, batch, gpus=gpus, gpus_per_node=8)}
    return {**found, "logits": need.other.at(batch)}[way] / published


@pytest.mark.parametrize(
    ("model", "gpus", "way", "published"),
    [pytest.param(*row, id=source) for source, *row in PUBLISHED],
)
def test_published_peaks(model: str, gpus: int, way: str, published: float) -> None:
    """An estimate is at most 10 % below and 25 % above the peak that was measured."""
    assert 0.9 <= _ratio(model, gpus, way, published) <= 1.25


@pytest.mark.parametrize(
    ("model", "gpus", "way", "published"),
    [pytest.param(*row, id=source) for source, *row in OUTSIDE],
)
def test_published_peaks_with_a_known_reason(
    model: str, gpus: int, way: str, published: float
) -> None:
    """These are not met, and by how much; one that is met belongs into the other table."""
    ratio = _ratio(model, gpus, way, published)
    assert 0.8 <= ratio < 0.9 or 1.25 < ratio <= 1.3


def test_a_batch_that_ran_and_one_that_did_not() -> None:
    """GPT-2 124M on GPUs of 45 GB was out of memory at 64 sequences each and ran at 32.

    Source: github.com/KellerJordan/modded-nanogpt, issue 12.
    """
    shape = "parameters=124M,layers=12,hidden=768,sequence=1024,vocabulary=50304"
    need, _ = read_model(f"{shape},precision=autocast")
    most = largest_batch((1 - RESERVE) * 45 * GB, need.activations, need.other, fixed=need.states)
    assert most is not None
    assert 32 <= most < 64


def test_fsdp_of_a_model_without_layers() -> None:
    """The ZeRO paper's 7.5B on 64 GPUs need 1.9 GB each; one layer is whole besides."""
    need, batch = read_model("7.5B")
    found = {way.name: way.need for way in ways(need, batch, gpus=64, gpus_per_node=8)}
    assert 1.88 * GB < found[FSDP] < 1.25 * 1.88 * GB


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
