"""Text or tokens for lm.py: bytes of files, or nanoGPT's .bin files of uint16."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from hpml_checkpoint import Ranks
from hpml_job import JobError, raise_together

MOST_TOKENS = 1 << 16  # per evaluation, because a stop waits for its end
BYTES = 256  # number of byte values
CHUNK = 1 << 24  # tokens checked at a time


@dataclass
class Text:
    """Tokens for training, validation and test; uint8 or, from .bin files, the bits of uint16."""

    parts: tuple[Tensor, Tensor, Tensor]
    names: tuple[str, str, str]  # file names for messages
    unit: str  # byte or token
    vocabulary: int
    letters: dict[int, str] | None = None  # from meta.pkl

    def decode(self, tokens: list[int]) -> str:
        """Return tokens as text, or as numbers if their meaning is unknown."""
        if self.unit == "byte":
            text = bytes(token for token in tokens if token < BYTES).decode("utf-8", "replace")
        elif self.letters is None:
            text = " ".join(map(str, tokens))
        else:
            text = "".join(self.letters.get(token, "\ufffd") for token in tokens)
        # A terminal would interpret control characters.
        return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)


def windows_of(part: Tensor, numbers: Tensor, sequence: int, stride: int = 1) -> Tensor:
    """Return windows of sequence + 1 tokens, (windows, tokens), int64.

    Args:
        part: a part of a Text.
        numbers: indices of the windows.
        sequence: number of predicted tokens.
        stride: distance between the starts of two windows.
    """
    windows = part.unfold(0, sequence + 1, stride)  # a view, no copy
    return windows[numbers].long() & 0xFFFF  # int16 holds the bits of uint16


def share_text(options: Namespace, ranks: Ranks) -> Text:
    """Return the text of --data, on all ranks; each checks its share for unknown tokens.

    Raises:
        JobError: a rank has a problem with it.
    """
    found, problem = [], ""
    try:
        found = [read_text(options)]
        problem = find_unknown(found[0], ranks)
    except OSError as error:
        problem = f"--data {options.data}: {error.strerror}"
    except (JobError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    raise_together(ranks, problem)
    return found[0]


def read_text(options: Namespace) -> Text:
    """Return the text of --data; a single file is mapped into memory, not read.

    In a folder with nanoGPT's train.bin and val.bin, the first half of val.bin is for validation
    and the second half for testing. Otherwise the last tenth is for testing, and the tenth before
    it for validation. Both have at most MOST_TOKENS.

    Raises:
        JobError: the text is too short, or the number of tokens is unknown.
        OSError: it cannot be read.
    """
    data: Path = options.data
    pair = [data / "train.bin", data / "val.bin"]
    if all(file.is_file() for file in pair):
        text, held = (_map(file) for file in pair)
        part = min(len(held) // 2, MOST_TOKENS)
        parts = text, held[:part], held[len(held) - part :]
        names = (str(pair[0]), str(pair[1]), str(pair[1]))
    else:
        text = _map(data) if data.suffix == ".bin" and data.is_file() else _read_bytes(data)
        part = min(len(text) // 10, MOST_TOKENS)
        parts = text[: len(text) - 2 * part], text[len(text) - 2 * part :][:part], text[-part:]
        names = (str(data),) * 3
    unit = "byte" if parts[0].dtype == torch.uint8 else "token"
    if part <= options.sequence or len(parts[0]) <= options.sequence:
        least = f"a tenth (of val.bin: half) has to be longer than --sequence {options.sequence}"
        raise JobError(f"--data {data}: {len(text)} {unit}s are too few, {least}")
    meta = (
        _read_meta((data if data.is_dir() else data.parent) / "meta.pkl") if unit != "byte" else {}
    )
    vocabulary = options.vocabulary or (BYTES if unit == "byte" else meta.get("vocab_size", 0))
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise JobError(f"--data {data}: needs --vocabulary N, such as 50257 for GPT-2's tokens")
    letters = meta.get("itos")
    return Text(parts, names, unit, vocabulary, letters if isinstance(letters, dict) else None)


def find_unknown(text: Text, ranks: Ranks) -> str:
    """Return a message about the first token outside the vocabulary, or an empty string.

    Each rank checks its share of the text.
    """
    if text.unit == "byte" and text.vocabulary >= BYTES:
        return ""
    for part, file, kind in zip(text.parts, text.names, ("train", "validate", "test")):  # noqa: B905
        for start in range(ranks.rank * CHUNK, len(part), ranks.world_size * CHUNK):
            tokens = part[start : start + CHUNK].int() & 0xFFFF
            found = (tokens >= text.vocabulary).nonzero()
            if len(found):
                place, token = start + int(found[0]), int(tokens[found[0]])
                where = f"token {token} at place {place} of what is there to {kind}"
                return f"--vocabulary {text.vocabulary}: {file} has {where}"
    return ""


def _read_bytes(data: Path) -> Tensor:
    # Sorted by name. Skip links, which would repeat a text.
    files = sorted(one for one in data.rglob("*") if one.is_file() and not one.is_symlink())
    sizes = [(str(one), False, one.stat().st_size) for one in files or [data]]
    parts = [torch.from_file(*one, dtype=torch.uint8) for one in sizes if one[2]]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def _map(file: Path) -> Tensor:
    size = file.stat().st_size
    if size % 2 or not size:
        raise JobError(f"--data {file}: {size} bytes are not tokens of uint16")
    return torch.from_file(str(file), shared=False, size=size // 2, dtype=torch.int16)


class _Plain(pickle.Unpickler):
    """Unpickles only numbers, text and dicts: other pickles could run any program."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"has {module}.{name}")


def _read_meta(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        with file.open("rb") as stream:
            meta = _Plain(stream).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError) as error:
        raise JobError(f"{file}: is not nanoGPT's meta.pkl: {error}") from error
    return meta if isinstance(meta, dict) else {}
