"""How much memory a training needs, on a device and on a node, and the ways to make it fit.

Bytes throughout. Formulas name their source; a figure that was measured replaces a formula.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpml_orchestrator.errors import InputError, did_you_mean

GIB = 1024**3
RESERVE = 0.1
"""Share of a device that the CUDA context, NCCL and fragmentation take."""
CUDA_HOST_BYTES = 2 * GIB
"""Host memory of one process that uses CUDA, for the libraries and the context: an estimate."""

PRECISIONS: Mapping[str, tuple[int, int, int, int]] = {
    # bytes per parameter: weights, gradients, each copy of the optimizer, master weights
    "float32": (4, 4, 4, 0),
    # torch.autocast keeps weights in float32 and casts each to 16 bit once per step
    "autocast": (6, 4, 4, 0),
    "mixed": (2, 2, 4, 4),
    "bfloat16": (2, 2, 2, 0),
}
"""Source: Rajbhandari et al. 2020, "ZeRO", section 3.1 (mixed: 16 bytes with Adam); Hugging Face,
"Model training anatomy" (autocast: 18 bytes with AdamW)."""
_ELEMENTS: Mapping[str, tuple[int, int]] = {
    # bytes of an activation, and of the residual stream and attention scores
    "float32": (4, 4),
    # torch.autocast adds 16-bit outputs to a float32 embedding: the sum stays in float32, and
    # softmax is on its list of operations in float32
    "autocast": (2, 4),
    "mixed": (2, 2),
    "bfloat16": (2, 2),
}
_ASPECT = 128
"""Hidden size over layers of GPT-3 from 6.7B on (Brown et al. 2020, table 2.1)."""
OPTIMIZERS: Mapping[str, float] = {
    # copies of the parameters that the optimizer keeps
    "sgd": 0,
    "momentum": 1,
    "lion": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
    "adafactor": 0,  # rows and columns only: less than a thousandth of a copy
}
_DEVICES = {
    # The smallest memory in which the type is sold, in GiB, by the beginning of the GPU's name.
    "p100": 12,
    "v100": 16,
    "t4": 16,
    "a10g": 24,
    "a10": 24,
    "a30": 24,
    "a40": 48,
    "a100": 40,
    "a6000": 48,
    "l4": 24,
    "l40s": 48,
    "l40": 48,
    "h100": 80,
    "h200": 141,
    "gh200": 96,
    "b200": 180,
    "gb200": 186,
    "mi210": 64,
    "mi250": 64,
    "mi250x": 64,
    "mi300a": 128,
    "mi300x": 192,
}
_MIG = re.compile(r"\d+g\.(\d+)gb")
_SIZED = re.compile(r"(?:^|[^0-9])(\d{2,3})g(?:i?b)?(?:$|[^a-z0-9])")


# --- formulas


def model_states(
    parameters: float, optimizer: str = "adamw", precision: str = "mixed"
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer states, master weights included.

    Source: as `PRECISIONS`; Kingma & Ba 2015 for the two moments of Adam.
    """
    weight, gradient, copy, master = PRECISIONS[precision]
    states = OPTIMIZERS[optimizer] * copy + master
    return weight * parameters, gradient * parameters, states * parameters


@dataclass(frozen=True)
class Transformer:
    """Shape of a transformer; `heads` 0: attention scores are not kept (flash attention)."""

    layers: int
    hidden: int
    sequence: int
    heads: int = 0
    vocabulary: int = 0

    @property
    def parameters(self) -> float:
        """Parameters of a GPT: 12 L h^2 (1 + 13/(12 h)) + V h + s h.

        Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU
        clusters using Megatron-LM", equation 2.
        """
        h, layers = self.hidden, self.layers
        return 12 * layers * h * h * (1 + 13 / (12 * h)) + (self.vocabulary + self.sequence) * h

    def layer_bytes(self, precision: str = "mixed") -> float:
        """Return the bytes that one layer keeps of one sequence for the backward pass.

        In 16 bit s h (34 + 5 a s / h): 32 bytes of elements and two dropout masks, and the
        attention scores, of which 4 bytes are elements and 1 a mask.

        Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
        models", equation 2.
        """
        element, wide = _ELEMENTS[precision]
        scores = (element + wide + 1) * self.heads * self.sequence / self.hidden
        return self.sequence * self.hidden * (14 * element + 2 * wide + 2 + scores)

    def input_bytes(self, precision: str = "mixed") -> float:
        """Return the bytes of a layer's input for one sequence: what checkpointing keeps."""
        return self.sequence * self.hidden * _ELEMENTS[precision][1]

    def logits_bytes(self, precision: str = "mixed") -> float:
        """Return the bytes that the loss needs for the logits of one sequence.

        The head's logits, their log-softmax in float32, and two gradients in float32: of the
        log-softmax, and of the logits before they are cast back.

        Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models":
        28,000 MB for 8,192 tokens and 256,000 words, 14 bytes each.
        """
        return self.sequence * self.vocabulary * (_ELEMENTS[precision][0] + 3 * 4)


def usual_layers(parameters: float) -> int:
    """Return how many layers a transformer of that size usually has: 12 L h^2 with h = 128 L.

    >>> usual_layers(7.5e9), usual_layers(175e9)
    (34, 96)
    """
    return max(1, round(math.pow(parameters / (12 * _ASPECT**2), 1 / 3)))


# --- measured figures


@dataclass(frozen=True)
class Linear:
    """Bytes that grow with the batch of a rank; `per_sample` is None if that is not known."""

    base: float  # all of it if `per_sample` is None
    per_sample: float | None = None

    def at(self, batch: float | None) -> float:
        """Return the bytes at a batch size."""
        if self.per_sample is None or batch is None:
            return self.base
        return max(0.0, self.base + self.per_sample * batch)


def line_through(points: Mapping[int, float]) -> Linear:
    """Return the line through figures at one or two batch sizes; it never falls."""
    if len(points) == 1:
        return Linear(next(iter(points.values())))
    (low, first), *_, (high, last) = sorted(points.items())
    # Allocators round and caches differ between runs, so a measured need may fall slightly with
    # the batch. A falling line would predict less memory for a larger batch.
    slope = max(0.0, (last - first) / (high - low))
    return Linear(last - slope * high, slope)


@dataclass(frozen=True)
class HostNeed:
    """Host memory of one node, without page cache."""

    ranks: int  # per node
    process: Linear  # a rank's main process
    workers: Linear  # its loader workers and other children, what they do not share with it
    shared: float = 0.0  # libraries, mapped once
    pinned: Linear = Linear(0.0)
    cuda: float = 0.0  # of each rank
    staged: float = 0.0  # in RAM; hpml adds it to `resources.memory`

    def per_rank(self, batch: float | None) -> float:
        """Return what one rank adds to a node."""
        parts = (self.process, self.workers, self.pinned)
        return sum(part.at(batch) for part in parts) + self.cuda

    def at(self, batch: float | None) -> float:
        """Return the need of a node, without staged data."""
        return self.ranks * self.per_rank(batch) + self.shared


@dataclass(frozen=True)
class DeviceNeed:
    """Memory of one rank that has the whole model on its device."""

    weights: float
    gradients: float
    optimizer: float
    activations: Linear
    other: Linear = Linear(0.0)  # gradients of activations, buckets of DDP, workspaces
    layers: int = 1
    buckets: float = 0.0  # of DDP, if `other` does not have them
    input_share: float | None = None  # of a layer's activations; None: not known

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept_share(self) -> float:
        """Share of the activations that checkpointing keeps at once.

        The inputs of all layers and one layer's activations; if the inputs are not known, those of
        Chen et al. 2016: sqrt(n) checkpoints, and one segment of sqrt(n) layers.
        """
        layers = max(1, self.layers)
        if self.input_share is None:
            return min(1.0, 2 / math.sqrt(layers))
        return min(1.0, self.input_share + 1 / layers)


@dataclass(frozen=True)
class TrainingOption:
    """One way to train, and what it needs on each device."""

    name: str
    need: float
    what: str  # what to do, as a sentence without its full stop


def ways(
    need: DeviceNeed, batch: float | None, *, gpus: int, gpus_per_node: int
) -> list[TrainingOption]:
    """Return the ways to train, from the simplest to the one that changes the program most.

    All ways after checkpointing use it too. The pipeline gets as many micro-batches as it has
    stages.

    Source: Rajbhandari et al. 2020, "ZeRO", for the stages; Chen et al. 2016, "Training deep nets
    with sublinear memory cost", for checkpointing; Zhao et al. 2023, "PyTorch FSDP".
    """
    states, other = need.states, need.other.at(batch)
    whole = need.activations.at(batch)
    kept = whole * need.kept_share
    gathered = need.weights / max(1, need.layers)  # FSDP has one layer's weights whole at a time
    inside, nodes = min(gpus, gpus_per_node), -(-gpus // max(1, gpus_per_node))
    found = [TrainingOption("one device", states + whole + other, "nothing has to change")]
    if gpus > 1:
        found = [
            TrainingOption(
                "DDP", states + need.buckets + whole + other, "one whole model on each device"
            )
        ]
    buckets = need.buckets if gpus > 1 else 0.0
    if batch is not None and batch > 1 and need.activations.per_sample is not None:
        tiny = states + buckets + need.activations.at(1) + need.other.at(1)
        what = "divide each batch into micro-batches, step the optimizer after the last"
        found.append(TrainingOption("gradient accumulation (micro-batch 1)", tiny, what))
    found.append(
        TrainingOption(
            "activation checkpointing",
            states + buckets + kept + other,
            "torch.utils.checkpoint around each layer; costs about a third more compute",
        )
    )
    if gpus > 1:
        shard = (need.gradients + need.optimizer) / gpus
        found += [
            TrainingOption(
                "ZeRO-1",
                need.weights + need.gradients + need.optimizer / gpus + kept + other,
                "shard the optimizer states (ZeroRedundancyOptimizer, DeepSpeed stage 1)",
            ),
            TrainingOption(
                "ZeRO-2", need.weights + shard + kept + other, "shard the gradients too"
            ),
            TrainingOption(
                "FSDP (ZeRO-3)",
                states / gpus + gathered + kept + other,
                "shard the weights too: torch.distributed.fsdp.fully_shard",
            ),
        ]
    if inside > 1:
        found.append(
            TrainingOption(
                "FSDP, tensor parallel inside the node",
                states / gpus + (gathered + kept + other) / inside,
                f"divide each layer over the {inside} GPUs of a node",
            )
        )
    if nodes > 1:
        found.append(
            TrainingOption(
                "tensor parallel inside the node, pipeline between nodes",
                (states + kept + other) / gpus,
                f"give each of the {nodes} nodes a part of the layers",
            )
        )
    return found


def first_fit(options: Sequence[TrainingOption], room: float | None) -> TrainingOption | None:
    """Return the simplest way that needs no more than the room; None if none does, or unknown."""
    return None if room is None else next((way for way in options if way.need <= room), None)


def largest_batch(room: float, *parts: Linear, fixed: float = 0.0) -> int | None:
    """Return the largest batch of a rank whose parts fit; None if they do not grow with it."""
    slope = sum(part.per_sample or 0.0 for part in parts)
    rest = room - fixed - sum(part.base for part in parts)
    return None if slope <= 0 else max(0, math.floor(rest / slope))


# --- what users write


def device_bytes_of(gpu: str) -> tuple[float, str] | None:
    """Return a device's memory by the GPU's type, and why; None if the type is not known.

    >>> device_bytes_of("1g.10gb"), device_bytes_of("fastest")
    ((10737418240, '1g.10gb has 10 GiB'), None)
    """
    name = gpu.lower()
    mig, sized = _MIG.search(name), _SIZED.search(name)
    if mig or sized:
        size = int((mig or sized)[1])  # type: ignore[index]
        return size * GIB, f"{gpu} has {size} GiB"
    words = re.findall(r"[a-z]+\d+[a-z]*", name)
    for word in words:
        if size := _DEVICES.get(word, 0):
            return size * GIB, f"{gpu} has {size} GiB or more"
    return None


_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHAPE = ("layers", "hidden", "sequence", "heads", "vocabulary", "batch")
_WORDS = ("parameters", *_SHAPE, "optimizer", "precision")
_NEEDED = ("layers", "hidden", "sequence")
_OTHER_NETWORKS = (
    "formulas are for transformers; a convolutional or other network needs a measured run: "
    "hpml advise without --model"
)


def _model_words(text: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the numbers of `--model`, and its optimizer and precision."""
    numbers: dict[str, float] = {}
    chosen = {"optimizer": "adamw", "precision": "mixed"}
    allowed = {"optimizer": OPTIMIZERS, "precision": PRECISIONS}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals:
            name, value = "parameters", name
        if name not in _WORDS:
            hint = did_you_mean(name, _WORDS) or f"there are {', '.join(_WORDS)}"
            raise InputError("is not a property of a model", field="--model", value=name, hint=hint)
        if name in allowed:
            if value not in allowed[name]:
                right = f"must be one of {', '.join(allowed[name])}"
                raise InputError(right, field=f"--model {name}", value=value)
            chosen[name] = value
            continue
        match = _COUNT.fullmatch(value)
        number = float(match[1]) * _POWERS[match[2].lower()] if match else 0.0
        if not math.isfinite(number) or number < 1 or (name in _SHAPE and number % 1):
            right = "must be a number such as 7B, 350M or 4096, and at least 1"
            hint = _OTHER_NETWORKS if name == "parameters" else ""
            raise InputError(right, field=f"--model {name}", value=value, hint=hint)
        numbers[name] = number
    return numbers, chosen


def read_model(text: str) -> tuple[DeviceNeed, int | None]:
    """Return what a model needs by formulas, and the batch of a rank; activations need its shape.

    Args:
        text: such as `7B`, or `parameters=7B,layers=32,hidden=4096,sequence=2048,batch=4`.

    Raises:
        InputError: a word or value is not valid.
    """
    numbers, chosen = _model_words(text)
    shape = [name for name in _NEEDED if name in numbers]
    missing = [name for name in _NEEDED if name not in numbers]
    if shape and missing:
        hint = "layers, hidden and sequence give the activations; add heads and vocabulary"
        raise InputError(f"lacks {' and '.join(missing)}", field="--model", value=text, hint=hint)
    transformer = None
    if shape:
        parts = {name: int(numbers.get(name, 0)) for name in _SHAPE if name != "batch"}
        transformer = Transformer(**parts)
    parameters = numbers.get("parameters") or (transformer.parameters if transformer else 0)
    if not parameters:
        hint = "--model 7B, or --model parameters=7B,layers=32,hidden=4096,sequence=2048,batch=4"
        raise InputError("lacks parameters", field="--model", value=text, hint=hint)
    weights, gradients, states = model_states(parameters, chosen["optimizer"], chosen["precision"])
    layers, activations, logits, share = usual_layers(parameters), Linear(0.0), Linear(0.0), None
    if transformer is not None:
        layers, layer = transformer.layers, transformer.layer_bytes(chosen["precision"])
        activations = Linear(0.0, layers * layer)
        logits = Linear(0.0, transformer.logits_bytes(chosen["precision"]))
        share = transformer.input_bytes(chosen["precision"]) / layer
    need = DeviceNeed(
        weights,
        gradients,
        states,
        activations,
        logits,
        layers,
        # By default DDP copies all gradients into its buckets (without `gradient_as_bucket_view`).
        buckets=gradients,
        input_share=share,
    )
    return need, int(numbers.get("batch", 1)) if transformer else None
