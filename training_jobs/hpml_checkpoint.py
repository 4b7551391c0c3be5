"""Save and resume a training, and stop all of its ranks at the same step; copy this one file.

    checkpoints = Checkpoints("checkpoints", job={"lr": 0.1})
    found = checkpoints.load()  # the newest complete one, or None
    checkpoints.save({"model": model.state_dict(), "epoch": epoch}, step=step)

Needs PyTorch only. All ranks make the same calls, after `init_process_group`; an error of one rank
is raised on all. A checkpoint is a directory `step-00041200` with `state.pt`, the shards of a
sharded model, and `checkpoint.json` with size and SHA-256 of each file. It gets its name when all
of it is on the disk, so a crash or a full disk leaves the earlier ones. The states of PyTorch's and
Python's random generators of each rank are part of it.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

FORMAT = "hpml-checkpoint 1"
STATE, SHARDS, MANIFEST = "state.pt", "shards", "checkpoint.json"
Files = dict[str, Any]  # size and SHA-256 by name


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the message names it and the reason."""


class Ranks:
    """Exchanges small values between the ranks over the CPU, without waiting for a GPU."""

    def __init__(self) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        own = ready and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo") if own else None

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def start_highest(self, flag: torch.Tensor) -> Any:
        """Begin to replace a number by the highest of all ranks; `wait()` of the answer ends it."""
        if self.world_size == 1:
            return None
        return dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group, async_op=True)


class StopAgreement:
    """The highest wish of all ranks after a step, which each of them learns one step later.

    The exchange travels while the next step computes. Ranks have to call `exchange` equally often:
    with different numbers of batches, as many times as the rank that has the most.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks, self._flag, self._work = ranks or Ranks(), torch.tensor([0]), None

    def exchange(self, wish: int) -> int:
        """Send this rank's wish (1: stop); return the highest wish of the exchange before."""
        before = self.finish()
        self._flag = torch.tensor([int(wish)])
        self._work = self._ranks.start_highest(self._flag)
        return before

    def finish(self) -> int:
        """Wait for the last exchange, and return its highest wish."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._flag[0])


class Checkpoint(NamedTuple):
    """A checkpoint that was read."""

    path: Path
    step: int
    state: Any
    random: list[list[Any]]  # states of the random generators, by rank


@dataclass
class Checkpoints:
    """The newest checkpoints of a training, in a directory that all nodes share."""

    directory: str | Path
    keep: int = 3
    job: dict[str, Any] = field(default_factory=dict)  # one with other settings is refused
    channel: Any = None  # of hpml_channel.py; gets the events `checkpoint` and `resumed`
    ranks: Ranks = field(default_factory=Ranks)  # others than those of torch.distributed

    def __post_init__(self) -> None:
        self._home = Path(self.directory)
        self._report = getattr(self.channel, "event", lambda *_, **__: None)

    def save(self, state: Any, *, step: int, sharded: dict[str, Any] | None = None) -> None:
        """Write a checkpoint; after a CheckpointError the earlier ones are still there.

        Args:
            state: rank 0's tensors, numbers and text, in dicts and lists.
            step: optimizer steps since the training began, over all restarts.
            sharded: a state dict of which each rank writes its shards.
        """
        began, path = time.perf_counter(), self._home / f"step-{step:08d}"
        aside, files = self._home / f".{path.name}.unfinished", {}
        content = {"state": state, "random": self._on_ranks(path, partial(self._begin, aside))}
        if sharded is not None:
            for written in self._on_ranks(path, partial(self._write_shards, aside, sharded)):
                files.update(written)
        size = self._on_ranks(path, partial(self._publish, path, aside, content, files))[0]
        took = time.perf_counter() - began
        if self.ranks.rank == 0:
            self._report("checkpoint", step=step, seconds=took, size_bytes=size)

    def load(self, sharded: dict[str, Any] | None = None) -> Checkpoint | None:
        """Return the newest complete checkpoint, and restore the random states of this rank."""
        found = self.latest(sharded)
        if found is not None:
            if len(found.random) == self.ranks.world_size:
                for (_, restore), state in zip(_generators(), found.random[self.ranks.rank]):  # noqa: B905
                    restore(state)
            self._report("resumed", step=found.step, checkpoint=str(found.path))
        return found

    def latest(self, sharded: dict[str, Any] | None = None) -> Checkpoint | None:
        """Return the newest complete checkpoint; None if there is none, not even a damaged one.

        Damaged ones are skipped, with a line on stderr. The tensors of `sharded`, a state dict, are
        filled. Raises CheckpointError for one of another format or job, or if all are damaged.
        """
        listed = self._on_ranks(self._home, self._list)[0]
        for step, path in listed:
            damage = next(filter(None, self._on_ranks(path, partial(self._damage, path))), "")
            if not damage:
                content: dict[str, Any] = {}
                self._on_ranks(path, partial(self._read, path, content, sharded))
                return Checkpoint(path, step, **content)
            if self.ranks.rank == 0:
                print(f"checkpoint {path} is skipped: {damage}", file=sys.stderr, flush=True)
        if listed:
            raise CheckpointError(f"no checkpoint in {self._home} is complete")
        return None

    def _on_ranks(self, path: Path, action: Callable[[], Any]) -> list[Any]:
        """Call a function on every rank, and return its answers; an error is raised on all."""
        answer, problem = None, ""
        try:
            answer = action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait
            problem = f"checkpoint {path}: {_reason(error)}"
            if self.ranks.rank:
                problem += f" (rank {self.ranks.rank} on {os.uname().nodename})"
        problems, answers = zip(*self.ranks.gather((problem, answer)))  # noqa: B905 - Python 3.9
        if any(problems):
            self._clean_up()
            raise CheckpointError(next(filter(None, problems)))
        return list(answers)

    def _clean_up(self) -> None:
        if self.ranks.rank == 0:
            for left in self._home.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _begin(self, aside: Path) -> list[Any]:
        self._clean_up()
        if self.ranks.rank == 0:
            aside.mkdir(parents=True)
        return [read() for read, _ in _generators()]

    def _write_shards(self, aside: Path, sharded: dict[str, Any]) -> Files:
        writer = filesystem.FileSystemWriter(aside / SHARDS)
        state_dict_saver.save(sharded, storage_writer=writer, process_group=self.ranks.group)
        written = [*(aside / SHARDS).glob(f"__{self.ranks.rank}_*"), aside / SHARDS / ".metadata"]
        return {f"{SHARDS}/{file.name}": _facts(file) for file in written}

    def _publish(self, path: Path, aside: Path, content: Any, files: Files) -> int:
        if self.ranks.rank:
            return 0
        torch.save(content, aside / STATE)
        torch.load(aside / STATE, map_location="cpu", weights_only=True, mmap=True)  # can it be?
        files[STATE] = _facts(aside / STATE)
        manifest = {"format": FORMAT, "job": self.job, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for name in (*files, MANIFEST, *{os.path.dirname(name) for name in files}):
            _sync(aside / name)
        if path.exists():  # damaged: else the training would have begun there
            path.rename(f"{aside}.old")
        aside.rename(path)
        _sync(self._home)
        listed, number = self._list(), int(path.name[5:])  # those of later steps are damaged, too
        for old in {*listed} - {*[one for one in listed if one[0] <= number][: self.keep]}:
            old[1].rename(self._home / f".{old[1].name}.old")
        self._clean_up()
        return sum(size for size, _ in files.values())

    def _list(self) -> list[tuple[int, Path]]:
        self._home.mkdir(parents=True, exist_ok=True)
        names = os.listdir(self._home)  # on every rank: NFS then asks the server again
        found = [re.fullmatch(r"step-(\d+)", name) for name in names]
        return sorted(((int(m[1]), self._home / m[0]) for m in found if m), reverse=True)

    def _damage(self, path: Path) -> str:
        """Return what is wrong with the part of a checkpoint that this rank looks at."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            form, job, files = (manifest[key] for key in ("format", "job", "files"))
        except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
            return f"{MANIFEST} is missing or damaged"
        if form != FORMAT:
            raise CheckpointError(f"its format is {form!r}, not {FORMAT!r}")
        mine = json.loads(json.dumps(self.job))
        keys = [key for key in {**job, **mine} if job.get(key) != mine.get(key)]
        if keys:
            changes = [f"{key} {job.get(key)} -> {mine.get(key)}" for key in keys]
            raise CheckpointError(f"it belongs to other settings: {', '.join(changes)}")
        for name in sorted(files)[self.ranks.rank :: self.ranks.world_size]:
            if not (path / name).exists() or _facts(path / name) != files[name]:
                return f"{name} is missing or damaged"
        return ""

    def _read(self, path: Path, content: dict[str, Any], sharded: dict[str, Any] | None) -> None:
        content.update(torch.load(path / STATE, map_location="cpu", weights_only=True))
        if sharded is not None:
            files, group = filesystem.FileSystemReader(path / SHARDS), self.ranks.group
            state_dict_loader.load(sharded, storage_reader=files, process_group=group)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    unsupported = re.search(r"Unsupported.*GLOBAL (\S+)", str(error))
    if unsupported:
        return f"can have tensors, numbers and text, in dicts and lists, but not {unsupported[1]}"
    if "inline_container" in str(error):
        return "PyTorch cannot write it: is the disk or your quota full?"
    return getattr(error, "strerror", None) or repr(error).partition("\\n")[0]


def _facts(file: Path) -> list[Any]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
        return [stream.tell(), digest.hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _generators() -> list[Any]:
    """Return how the state of each random generator is read and restored."""
    cpu = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    cuda = [(torch.cuda.get_rng_state, torch.cuda.set_rng_state)]
    return cpu + cuda * torch.cuda.is_available()
