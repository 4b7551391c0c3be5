"""The directory of a pack: who may write there, and what an earlier run has left."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.packing.claim import STATE_FILE, Claim, is_temporary
from hpml_orchestrator.packing.files import TEMPORARY
from hpml_orchestrator.packing.index import INDEX_FILE, read_index
from hpml_orchestrator.packing.layout import TREE_FILE
from hpml_orchestrator.packing.shards import DONE
from hpml_orchestrator.staging.faults import shown, why

if TYPE_CHECKING:
    from hpml_orchestrator.packing.claim import Note
    from hpml_orchestrator.packing.index import Index
    from hpml_orchestrator.packing.layout import Layout

__all__ = ["Place"]

_ARCHIVE = re.compile(r"data-\d{5,}\.tar")


class Place:
    """DEST of a pack.

    Args:
        path: the directory; made when it is not there.
        source: what is packed, without symbolic links.
        resume: whether to go on with what is there.

    Raises:
        InputError: it is inside the source, or holds something else.
        StagingError: it cannot be made, or another hpml is at work there.
    """

    def __init__(self, path: str, source: str, *, resume: bool) -> None:
        self.path = os.path.realpath(path)
        self._shown = path
        self._source = source
        self._made = False
        self._before: Note | None = None
        self._claim = Claim(self.path, path)
        self.finished: Index | None = None
        if f"{self.path}/".startswith(source.rstrip("/") + "/"):
            raise InputError("must not be inside SOURCE", field="DEST", value=path)
        try:
            names = {name for name in os.listdir(self.path) if not is_temporary(name)}
        except FileNotFoundError:
            names = set()
            self._make()
        except NotADirectoryError:
            raise InputError("is no directory", field="DEST", value=path) from None
        except OSError as error:
            raise self._cannot("read", error) from error
        if names:
            try:
                self._look(names, resume=resume)
            except OSError as error:
                raise self._cannot("write in", error) from error

    def _make(self) -> None:
        try:
            os.makedirs(self.path)
        except OSError as error:
            raise self._cannot("make", error) from error
        self._made = True

    def _look(self, names: set[str], *, resume: bool) -> None:
        self._before = self._claim.read() if STATE_FILE in names else None
        if INDEX_FILE in names and resume:
            self.finished = read_index(self.path)
        elif INDEX_FILE in names:
            raise InputError(
                "is a finished pack", field="DEST", value=self._shown, hint="take another DEST"
            )
        elif self._before is None:
            raise InputError(
                "is not empty, and no pack that was begun",
                field="DEST",
                value=self._shown,
                hint="take an empty directory, or one that is not there yet",
            )
        if self._before is not None:
            self._check_note(self._before, resume=resume)

    def _check_note(self, note: Note, *, resume: bool) -> None:
        if os.fsencode(self._source).hex() != note.source:
            other = os.fsdecode(bytes.fromhex(note.source))
            raise InputError(
                f"is a pack that was begun of another tree, {shown(other)}",
                field="DEST",
                value=self._shown,
                hint="take another DEST",
            )
        self._claim.refuse_if_alive(note)
        if not resume:
            raise InputError(
                "is a pack of this tree that was not finished",
                field="DEST",
                value=self._shown,
                hint="go on with --resume",
            )

    def begin(self) -> None:
        """Write down whose pack this is, and remove what a killed run had not finished writing.

        Raises:
            StagingError: the directory cannot be written, or another hpml has come first.
        """
        try:
            self._claim.take(self._source, self._before)
            self._remove(lambda name: name.startswith(".") and name.endswith(TEMPORARY))
        except OSError as error:
            raise self._cannot("write in", error) from error

    def beat(self) -> None:
        """Say that this process is at work; to be called all the time, and cheap.

        Raises:
            StagingError: another hpml has taken over.
        """
        self._claim.beat()

    def check(self) -> None:
        """Look whether the pack is still this process's.

        Raises:
            StagingError: another hpml has taken over.
            OSError: that cannot be told.
        """
        self._claim.check()

    def sweep(self, layout: Layout) -> None:
        """Remove archives of an earlier plan, which the pack is not to have.

        Raises:
            OSError: they cannot be removed.
        """
        planned = {shard.file for shard in layout.shards}

        def unplanned(name: str) -> bool:
            archive = name.removeprefix(".").removesuffix(DONE)
            known = _ARCHIVE.fullmatch(archive) or archive == TREE_FILE
            return bool(known) and archive not in planned

        self._remove(unplanned)

    def end(self) -> None:
        """Remove the notes of a pack that has its index.

        Raises:
            OSError: they cannot be removed.
        """
        self._remove(lambda name: name.startswith(".") and name.endswith((DONE, TEMPORARY)))
        self._claim.remove()

    def tidy(self) -> None:
        """Remove what was being written; a worker that was ended may have left it."""
        if self._claim.release():
            with contextlib.suppress(OSError):
                self._remove(lambda name: name.startswith(".") and name.endswith(TEMPORARY))

    def give_up(self) -> None:
        """Remove the directory where this run made it and left nothing in it."""
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    def _remove(self, wanted: Any) -> None:
        for name in os.listdir(self.path):
            if wanted(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))

    def _cannot(self, verb: str, error: OSError) -> StagingError:
        return StagingError(f"cannot {verb} {shown(self._shown)}: {why(error)}")
