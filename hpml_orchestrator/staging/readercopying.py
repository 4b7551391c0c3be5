"""Copy the files of a batch that a source's reader gives: of archives, packs and other nodes."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.copying import WRITE, Copying
from hpml_orchestrator.staging.faults import DamagedSourceError, SourceChangedError
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.batches import Batch
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.copying import Task
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.filehash import FileHash
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Entry
    from hpml_orchestrator.staging.source import Reader

__all__ = ["ReaderCopying"]

_ZEROS = bytes(BLOCK_BYTES)


class ReaderCopying(Copying):
    """Copies what a source's reader gives."""

    def __init__(
        self,
        task: Task,
        board: Board,
        retry: Retry,
        problem: Callable[[str, str, BaseException], None],
        reader: Reader,
    ) -> None:
        super().__init__(task, board, retry, problem)
        self._reader = reader

    def close(self) -> None:
        """Close what is open."""
        self._reader.close()
        super().close()

    def _file(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        if self._task.take is not None:
            self._task.take()
        if self._board.faulty:
            return
        size = entry.size
        pieces = self._reader.read(number, 0, size)
        if size <= BLOCK_BYTES:
            data = next(pieces, b"")
            if len(data) == size:
                self._one_block(number, entry, data, pieces, tally)
                return
            pieces = itertools.chain((data,), pieces)
        digest = self._summer(number, batch)
        with self._made(entry) as target:
            sparse = entry.stored < size
            self._write(pieces, (0, size), target, digest, tally, sparse=sparse)
            self._settle(digest)
        tally.files += 1

    def _one_block(
        self,
        number: int,
        entry: Entry,
        data: Buffer,
        rest: Iterator[Buffer],
        tally: Tally,
    ) -> None:
        """Write a file that came whole, with as few steps as small files deserve."""
        task, size = self._task, entry.size
        if task.how is not None:
            made = task.how.new()
            made.update(data)
            value = made.digest()
            expected = task.plan.expected
            if expected and task.how.name == "xxh3_128" and value != (expected[number] or value):
                raise DamagedSourceError
            self._board.put(number, value)
        self._put(entry, data, rest)
        tally.bytes += size
        tally.files += 1

    def _piece(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        if self._board.faulty:
            return
        digest = self._summer(number, batch)
        target = os.open(entry.path, WRITE, dir_fd=self._to)
        try:
            pieces = self._reader.read(number, batch.start, batch.end)
            sparse = entry.stored < entry.size
            self._write(pieces, (batch.start, batch.end), target, digest, tally, sparse=sparse)
        finally:
            os.close(target)
        self._settle(digest)
        if batch.end == entry.size:
            tally.files += 1

    def _write(
        self,
        pieces: Iterator[Buffer],
        part: tuple[int, int],
        target: int,
        digest: FileHash | None,
        tally: Tally,
        *,
        sparse: bool,
    ) -> None:
        at = part[0]  # of a sparse file zeros are left out: its holes stay, as was counted
        for data in pieces:
            if digest is not None:
                digest.update(data)
            count = len(data)
            wrote = count if sparse and data == _ZEROS[:count] else os.pwrite(target, data, at)
            while wrote < count:
                wrote += os.pwrite(target, memoryview(data)[wrote:], at + wrote)
            at += count
            tally.bytes += count
            if count >= BLOCK_BYTES:
                tally.tell()
                self._retry.check_stop()
        if at != part[1]:
            raise SourceChangedError
