"""The digest of one file, or of a part of it, made while its bytes go by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.staging.faults import DamagedSourceError
from hpml_orchestrator.staging.hashing import PIECE_BYTES, file_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.staging.hashing import Buffer, Hashing

__all__ = ["FileHash", "hashed"]


class FileHash:
    """Hashes bytes in order, a digest for every piece.

    Args:
        how: makes digests.
        piece_bytes: size of a piece; the last one may be smaller.
        slots: where the pieces' digests go, in order.
        wanted: digest that all bytes together shall have; b"" when that is not known.

    Attributes:
        pieces: digests of the pieces that are complete.
    """

    def __init__(self, how: Hashing, piece_bytes: int, slots: Sequence[int], wanted: bytes) -> None:
        self._how = how
        self._piece_bytes = piece_bytes
        self._slots = slots
        self._wanted = wanted
        self.pieces: list[bytes] = []
        self._now = how.new()
        self._in_piece = 0
        self._whole = how.new() if wanted and len(slots) > 1 else None

    def update(self, data: Buffer) -> None:
        """Take the next bytes."""
        if self._whole is not None:
            self._whole.update(data)
        room = self._piece_bytes - self._in_piece
        if len(data) <= room:
            self._now.update(data)
            self._in_piece += len(data)
            return
        view = memoryview(data)
        while view:
            if self._in_piece == self._piece_bytes:
                self._next()
            part = view[: self._piece_bytes - self._in_piece]
            self._now.update(part)
            self._in_piece += len(part)
            view = view[len(part) :]

    def _next(self) -> None:
        self.pieces.append(self._now.digest())
        self._now = self._how.new()
        self._in_piece = 0

    def end(self) -> None:
        """Finish, and compare with what is wanted.

        Raises:
            DamagedSourceError: it is something else.
        """
        self._next()
        whole = self._whole.digest() if self._whole is not None else self.pieces[0]
        if self._wanted and whole != self._wanted:
            raise DamagedSourceError

    def found(self) -> Iterator[tuple[int, bytes]]:
        """Yield (slot, digest) of the pieces."""
        return zip(self._slots, self.pieces)


def hashed(blocks: Iterable[Buffer], how: Hashing) -> bytes:
    """Return the digest of a file whose bytes come in order."""
    made = FileHash(how, PIECE_BYTES, (), b"")
    for data in blocks:
        made.update(data)
    made.end()
    return file_digest(made.pieces, how)
