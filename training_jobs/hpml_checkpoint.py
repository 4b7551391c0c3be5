"""Save and resume a training, and stop all of its ranks at the same step; copy this one file.

Needs only PyTorch. All ranks make the same calls, after `init_process_group`; an error on one is
raised on all. A checkpoint is a directory `step-00041200`, which gets its name once it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

if TYPE_CHECKING:
    from hpml_channel import Channel

T = TypeVar("T")
Files = dict[str, tuple[int, str]]  # size and digest by name
FORMAT, STATE, SHARDS, MANIFEST = "hpml-checkpoint 1", "state.pt", "shards", "checkpoint.json"
EVERY_SECONDS, MOST_CALLS = 0.25, 10


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the message names it and the reason."""


class Ranks:
    """Exchanges small values between the ranks over the CPU, without waiting for a GPU."""

    def __init__(self) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        other = ready and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo") if other else None

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def highest(self, *values: float) -> list[float]:
        """Return each number's maximum over the ranks."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return [float(number) for number in numbers]


class StopAgreement:
    """Exchanges the ranks' requests four times a second; all ranks must call it equally often."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks, self._wish = ranks or Ranks(), 0
        self._calls, self._every, self._began = 0, 1, time.perf_counter()

    def exchange(self, wish: int) -> int:
        """Take this rank's request (1: stop); return the highest of all ranks, 0 until known."""
        # A request between two exchanges must not get lost.
        self._wish, self._calls = max(self._wish, wish), self._calls + 1
        return self._agree(2 * self._every) if self._calls >= self._every else 0

    def finish(self) -> int:
        """Exchange now, and return the highest request of all ranks."""
        return self._agree(1)

    def _agree(self, most: int) -> int:
        took = (time.perf_counter() - self._began) / max(1, self._calls)
        wish, seconds = self._ranks.highest(self._wish, took)
        # All ranks use the slowest one's time per call, so they wait for the same number of calls.
        # The number is limited, or steps that become slow would delay a stop.
        self._every = max(1, min(most, MOST_CALLS, round(EVERY_SECONDS / max(seconds, 1e-6))))
        self._wish, self._calls, self._began = 0, 0, time.perf_counter()
        return int(wish)


@dataclass
class Checkpoint:
    """A checkpoint that was read, and the saved state."""

    path: Path
    step: int
    state: Any = None
    random: Any = None  # random states of all ranks


@dataclass
class Checkpoints:
    """The newest checkpoints of a training, in a directory that all nodes share."""

    directory: str | Path
    keep: int = 3
    job: Mapping[str, object] | None = None  # checkpoints with other settings are refused
    channel: Channel | None = None  # receives the events `checkpoint` and `resumed`
    ranks: Ranks = field(default_factory=Ranks)  # replace those of torch.distributed

    def __post_init__(self) -> None:
        self._home = Path(self.directory)

    def save(self, state: object, *, step: int, sharded: dict[str, object] | None = None) -> None:
        """Write a checkpoint; after a CheckpointError the earlier ones still exist.

        `state` contains rank 0's tensors, numbers and text, in dicts and lists. `step` counts the
        optimizer's steps over all restarts. Each rank writes its shards of `sharded`, a state dict.
        """
        began, path = time.perf_counter(), self._home / f"step-{step:08d}"
        aside, files = self._home / f".{path.name}.unfinished", {}
        # Leftovers of a killed save would fill the disk.
        self._clean_up()
        content = {"state": state, "random": self.ranks.gather(_random_states())}
        if sharded is not None:
            for written in self._on_ranks(path, partial(self._write_shards, aside, sharded)):
                files.update(written)
        size = self._on_ranks(path, partial(self._publish, path, aside, content, files))[0]
        took = time.perf_counter() - began
        if self.channel is not None:
            self.channel.count(save_seconds=took)
            if self.ranks.rank == 0:
                self.channel.event("checkpoint", step=step, seconds=took, size_bytes=size)

    def load(self, sharded: dict[str, object] | None = None) -> Checkpoint | None:
        """Return the result of `latest`, and restore this rank's random states."""
        if (found := self.latest(sharded)) is None:
            return None
        # Random states belong to ranks: they are useless for another number of ranks.
        if len(found.random) == self.ranks.world_size:
            _restore(*found.random[self.ranks.rank])
        if self.channel is not None:
            self.channel.event("resumed", step=found.step, checkpoint=str(found.path))
        return found

    def latest(self, sharded: dict[str, object] | None = None) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        It fills the tensors of `sharded`. Damaged checkpoints are skipped with a line on stderr. If
        all are damaged, or it has another format or job, that is an error.
        """
        listed = self._on_ranks(self._home, self._list)[0]
        for step, path in listed:
            damage = next(filter(None, self._on_ranks(path, partial(self._damage, path))), "")
            if not damage:
                found = Checkpoint(path, step)
                self._on_ranks(path, partial(self._read, found, sharded))
                return found
            if self.ranks.rank == 0:
                print(f"checkpoint {path} is skipped: {damage}", file=sys.stderr, flush=True)
        if listed:
            raise CheckpointError(f"no checkpoint in {self._home} is complete")
        return None

    def _on_ranks(self, path: Path, action: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results; an error is raised on all."""
        answer, problem = [], ""
        try:
            answer = [action()]
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait
            where = f" (rank {self.ranks.rank} on {os.uname().nodename})" if self.ranks.rank else ""
            problem = f"checkpoint {path}: {_reason(error)}{where}"
        gathered = self.ranks.gather((answer, problem))
        if problems := [problem for _, problem in gathered if problem]:
            self._clean_up()
            raise CheckpointError(problems[0])
        return [one for answer, _ in gathered for one in answer]

    def _clean_up(self) -> None:
        if self.ranks.rank == 0:
            for left in self._home.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _write_shards(self, aside: Path, sharded: dict[str, object]) -> Files:
        writer = filesystem.FileSystemWriter(aside / SHARDS)
        state_dict_saver.save(sharded, storage_writer=writer, process_group=self.ranks.group)
        written = [*(aside / SHARDS).glob(f"__{self.ranks.rank}_*"), aside / SHARDS / ".metadata"]
        return {f"{SHARDS}/{file.name}": _facts(file) for file in written}

    def _publish(self, path: Path, aside: Path, content: object, files: Files) -> int:
        if self.ranks.rank:
            return 0
        aside.mkdir(parents=True, exist_ok=True)
        torch.save(content, aside / STATE)
        # If it cannot be loaded, fail now, not when resuming.
        torch.load(aside / STATE, map_location="cpu", weights_only=True, mmap=True)
        files[STATE] = _facts(aside / STATE)
        manifest = {"format": FORMAT, "job": self.job, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        # Sync files before the rename, and the rename before anything old is removed: whenever the
        # node dies, step-* directories are complete, and at least one exists.
        for name in (*files, MANIFEST, *{os.path.dirname(name) for name in files}):
            _sync(aside / name)
        if path.exists():  # damaged: otherwise the training would have started there
            path.rename(f"{aside}.old")
        aside.rename(path)
        _sync(self._home)
        listed, number = self._list(), int(path.name[5:])  # later steps are also damaged
        for old in {*listed} - {*[one for one in listed if one[0] <= number][: self.keep]}:
            # Deleting takes time: if interrupted, it must not leave half a checkpoint under its
            # name.
            old[1].rename(self._home / f".{old[1].name}.old")
        self._clean_up()
        return sum(size for size, _ in files.values())

    def _list(self) -> list[tuple[int, Path]]:
        self._home.mkdir(parents=True, exist_ok=True)
        names = os.listdir(self._home)  # on every rank: makes NFS ask the server again
        found = [re.fullmatch(r"step-(\d+)", name) for name in names]
        return sorted(((int(m[1]), self._home / m[0]) for m in found if m), reverse=True)

    def _damage(self, path: Path) -> str:
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            form, old, files = manifest["format"], manifest["job"] or {}, manifest["files"]
        except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
            return f"{MANIFEST} is missing or damaged"
        if form != FORMAT:
            raise CheckpointError(f"its format is {form!r}, not {FORMAT!r}")
        new = json.loads(json.dumps(old if self.job is None else self.job))
        if keys := [key for key in {**old, **new} if old.get(key) != new.get(key)]:
            changes = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys)
            raise CheckpointError(f"it belongs to other settings: {changes}")
        for name in sorted(files)[self.ranks.rank :: self.ranks.world_size]:
            if not (path / name).exists() or [*_facts(path / name)] != files[name]:
                return f"{name} is missing or damaged"
        return ""

    def _read(self, found: Checkpoint, sharded: dict[str, object] | None) -> None:
        content = torch.load(found.path / STATE, map_location="cpu", weights_only=True)
        found.state, found.random = content["state"], content["random"]
        if sharded is not None:
            files, group = filesystem.FileSystemReader(found.path / SHARDS), self.ranks.group
            state_dict_loader.load(sharded, storage_reader=files, process_group=group)


def _reason(error: Exception) -> str:
    if unsupported := re.search(r"Unsupported.*GLOBAL (\S+)", text := str(error)):
        return f"can have tensors, numbers and text, in dicts and lists, but not {unsupported[1]}"
    if "inline_container" in text:
        return "PyTorch cannot write it: is the disk or your quota full?"
    return getattr(error, "strerror", None) or text.partition("\n")[0] or repr(error)


def _facts(file: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return file.stat().st_size, digest.hexdigest()


def _sync(path: Path) -> None:
    os.fsync(descriptor := os.open(path, os.O_RDONLY))
    os.close(descriptor)


def _random_states() -> list[object]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), random.getstate(), *gpu]


def _restore(cpu: torch.Tensor, python: tuple[object, ...], *gpu: torch.Tensor) -> None:
    torch.set_rng_state(cpu)
    random.setstate(python)
    if gpu and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpu[0])
