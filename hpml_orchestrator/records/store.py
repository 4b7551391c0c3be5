"""The directories that submissions and runs live in, and the way to find one again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, nearest
from hpml_orchestrator.records.files import (
    fsync_dir,
    read_json,
    read_text,
    write_json,
    write_text,
)
from hpml_orchestrator.records.ids import ID_PATTERN, stamp_of
from hpml_orchestrator.records.owner import owner_is_alive
from hpml_orchestrator.records.run import Attempt, Run, task_output
from hpml_orchestrator.records.starts import begin, newest_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Attempt", "Run", "Store", "Submission", "default_root"]

RUN_TABLE = "runs.tsv"
SCRIPT = "job.sh"
NODE_ARCHIVE = "hpml-node.pyz"
_NEAR_RUNS = 1000
_TEMPORARY = re.compile(r"\..+\.tmp")
_LEFT_OVER_SECONDS = 86_400


def default_root(environment: Mapping[str, str]) -> Path:
    """Return where records live: `$HPML_HOME`, else `$XDG_STATE_HOME/hpml`, else below the home.

    Args:
        environment: the variables to look in, such as `os.environ`.
    """
    chosen = environment.get("HPML_HOME")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    state = environment.get("XDG_STATE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".local", "state"
    )
    return Path(os.path.abspath(state)) / "hpml"


@dataclass(frozen=True)
class Submission:
    """One call of sbatch, from before it is made.

    Attributes:
        directory: where it is written down.
        index: the one task of its array that is meant; None for all of it.
    """

    directory: Path
    index: int | None = None

    @property
    def sid(self) -> str:
        """The submission's id."""
        return self.directory.name

    @property
    def label(self) -> str:
        """What names it on the command line: its id, with `.<index>` where one task is meant."""
        return self.sid if self.index is None else f"{self.sid}.{self.index}"

    @property
    def script(self) -> Path:
        """The batch script, to the byte what the scheduler got."""
        return self.directory / SCRIPT

    def record(self) -> dict[str, Any]:
        """What was to be submitted: `submit.json`."""
        record: dict[str, Any] = read_json(self.directory / "submit.json")
        return record

    def job(self) -> dict[str, Any] | None:
        """The scheduler's answer, `job.json`; None while it is not known."""
        try:
            record: dict[str, Any] = read_json(self.directory / "job.json")
        except NotFoundError:
            return None
        return record

    def has_job(self, job_id: str) -> bool:
        """Whether that is the job's id; False too where its record cannot be read."""
        try:
            return str((self.job() or {}).get("job_id")) == job_id
        except RecordError:
            return False

    def refused(self) -> dict[str, Any] | None:
        """Why no job came of it, `refused.json`; None when one did or may have."""
        try:
            record: dict[str, Any] = read_json(self.directory / "refused.json")
        except NotFoundError:
            return None
        return record

    def runs(self) -> list[tuple[int, str]]:
        """The table of array index and run id, by index; one line of it where one task is meant."""
        table = []
        for line in read_text(self.directory / RUN_TABLE).splitlines():
            index, _, rid = line.partition("\t")
            if self.index in (None, int(index)):
                table.append((int(index), rid))
        return table

    def is_array(self) -> bool:
        """Whether it is a job array, or a task of one; False too where its table is unreadable."""
        try:
            return any(rid != self.sid for _, rid in self.runs())
        except (NotFoundError, RecordError, ValueError):
            return False

    def record_job(self, job_id: str, *, how: str, now: float) -> None:
        """Write down the job's id and how it became known."""
        write_json(self.directory / "job.json", {"job_id": job_id, "how": how, "recorded": now})

    def record_refusal(self, reason: str, *, now: float) -> None:
        """Write down that the scheduler refused."""
        write_json(self.directory / "refused.json", {"reason": reason, "recorded": now})

    def starts(self) -> int:
        """How often a process was about to call sbatch."""
        newest = newest_start(self.directory)
        return newest.number if newest else 0

    def mark_started(self, *, now: float, number: int | None = None) -> bool:
        """Say durably that this process is about to call sbatch: from here a job may exist.

        Args:
            now: seconds since the epoch.
            number: of this start: one more than there were before the job was looked for.

        Returns:
            False where another process has made that start: sbatch must not be called.
        """
        return begin(self.directory, number or self.starts() + 1, now=now)

    def submitter_is_gone(self) -> bool:
        """Whether the process that was last about to call sbatch is known to be dead.

        A process of another machine cannot be judged and counts as alive.
        """
        newest = newest_start(self.directory)
        return bool(newest and newest.owner and not owner_is_alive(newest.owner))

    def started_at(self) -> float | None:
        """When sbatch was last about to be called, seconds since the epoch; None: never."""
        newest = newest_start(self.directory)
        return newest.time if newest else None


class Store:
    """All records below one root.

    `<root>/submissions/<sid>/`, `<root>/runs/<rid>/`, `<root>/archives/`, `<root>/local/<host>/`.
    Safe on a shared file system: names are made unique, files are published by rename, nothing is
    locked.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def submissions_dir(self) -> Path:
        """Where submissions live."""
        return self.root / "submissions"

    @property
    def runs_dir(self) -> Path:
        """Where runs live."""
        return self.root / "runs"

    @property
    def archives_dir(self) -> Path:
        """Where node archives live, one file per content, which submissions have hard links to."""
        return self.root / "archives"

    @property
    def places(self) -> tuple[Path, ...]:
        """All directories that records are written to; there may be others beside them."""
        return (self.submissions_dir, self.runs_dir, self.archives_dir, self.root / "local")

    def local_home(self, host: str) -> Path:
        """Where the local backend of one machine keeps its processes' records."""
        return self.root / "local" / host

    def prepare(
        self,
        sid: str,
        *,
        script: str,
        archive: bytes,
        submit: Mapping[str, Any],
        runs: Mapping[int, Mapping[str, Any]],
        fill: Callable[[Path], None] = lambda _: None,
        array: bool = False,
    ) -> Submission:
        """Write a submission and its runs completely, before anything is submitted.

        A task of an array makes its directory itself when it starts: before, it needs nothing.

        Args:
            sid: the new id; a single run takes it too, those of an array get `.<index>`.
            script: text of the batch script.
            archive: bytes of `hpml-node.pyz`.
            submit: content of `submit.json`.
            runs: array index -> content of `run.json`, which a task of an array does without.
            fill: puts more into the submission's directory, before the records are written.
            array: whether it is a job array; more than one run always are.

        Raises:
            RecordError: the root cannot be written; nothing is left behind.
        """
        target = self.submissions_dir / sid
        temporary = self.submissions_dir / f".{sid}.tmp"
        numbered = array or len(runs) > 1
        names = {index: f"{sid}.{index}" if numbered else sid for index in runs}
        made: list[Path] = []
        try:
            self.submissions_dir.mkdir(parents=True, exist_ok=True)
            self.runs_dir.mkdir(parents=True, exist_ok=True)
            self._remove_left_overs()
            temporary.mkdir()
            made.append(temporary)
            fill(temporary)
            if numbered:
                task_output(temporary, 0).parent.mkdir()  # Slurm makes no directories for output
            else:
                directory = self.runs_dir / sid
                directory.mkdir()
                made.append(directory)
                (run,) = runs.values()
                write_json(directory / "run.json", {"rid": sid, "sid": sid, "index": 0, **run})
            write_text(temporary / SCRIPT, script, mode=0o755)
            self._place_archive(archive, temporary / NODE_ARCHIVE)
            write_json(temporary / "submit.json", {"sid": sid, **submit})
            table = "".join(f"{index}\t{names[index]}\n" for index in sorted(names))
            write_text(temporary / RUN_TABLE, table)
            os.rename(temporary, target)
            made[0] = target
            fsync_dir(self.submissions_dir)
            fsync_dir(self.runs_dir)
        except OSError as error:
            _remove(made)
            raise RecordError(
                f"cannot write records under {self.root}: {error.strerror or error}",
                hint="set HPML_HOME (or --records DIR) to a directory that the nodes see too",
            ) from error
        except BaseException:
            _remove(made)
            raise
        return Submission(target)

    def _place_archive(self, archive: bytes, path: Path) -> None:
        """Write the node archive there: as a hard link to the store's copy, where there is one.

        The copy is linked first and read then, so that it cannot change in between. One that a full
        disk cut short or that somebody else owns is not used.
        """
        kept = self.archives_dir / f"{hashlib.sha256(archive).hexdigest()[:32]}.pyz"
        with contextlib.suppress(OSError):
            os.link(kept, path)
            if path.stat().st_uid == os.geteuid() and path.read_bytes() == archive:
                return
            path.unlink()
        write_text(path, archive, mode=0o444)
        # Without hard links, or the right to write there, every submission has a copy of its own.
        with contextlib.suppress(OSError):
            self.archives_dir.mkdir(exist_ok=True)
            temporary = self.archives_dir / path.parent.name
            os.link(path, temporary)
            os.replace(temporary, kept)

    def _remove_left_overs(self) -> None:
        """Remove what an hpml that was killed had begun to write: it may hold a copy of code."""
        with os.scandir(self.submissions_dir) as entries:
            begun = [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for entry in begun:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _LEFT_OVER_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def submissions(self) -> Iterator[Submission]:
        """Every submission, newest first."""
        try:
            names = os.listdir(self.submissions_dir)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RecordError(
                f"cannot read {self.submissions_dir}: {error.strerror or error}",
                hint="set HPML_HOME (or --records DIR) to the directory of your records",
            ) from error
        known = [name for name in names if ID_PATTERN.match(name)]
        for name in sorted(known, key=lambda name: (stamp_of(name), name), reverse=True):
            yield Submission(self.submissions_dir / name)

    def run(self, rid: str) -> Run:
        """The run of that id, which must exist."""
        directory = self.runs_dir / rid
        if not directory.is_dir():
            raise NotFoundError(f"no run {rid!r} under {self.runs_dir}")
        return Run(directory)

    def resolve(self, word: str) -> Submission:
        """Find a submission by its id, its job id, a unique beginning or end of its id, or `last`.

        Any of these with `.<index>` behind it means one task of a job array; so does Slurm's form
        of a task's id, `123_4`.

        Raises:
            NotFoundError: nothing fits, or the array has no such task.
            InputError: more than one fits, or it is no array.
        """
        if not word:
            raise InputError("must name a run", field="RUN", value=word, hint="see `hpml list`")
        everything = list(self.submissions())
        if word == "last" and not everything:
            raise NotFoundError(f"no runs under {self.root} yet", hint="start one with `hpml run`")
        found = _named(everything, word)
        task = re.fullmatch(r"(.+)\.(\d+)|(\d+)_(\d+)", word, re.ASCII)
        if found is None and task is not None:
            found = _named(everything, task[1] or task[3])
            if found is not None:
                return _task(found, int(task[2] or task[4]), word)
        if found is None:
            raise NotFoundError(
                f"no run {word!r} under {self.root}",
                hint=_meant(word, everything)
                or "`hpml list` shows them; an id, its beginning, a job id or `last` will do",
            )
        return found


def _named(everything: list[Submission], word: str) -> Submission | None:
    """Return the submission that a word names, None where there is none.

    Raises:
        InputError: more than one fits.
    """
    if word == "last":
        return everything[0] if everything else None
    fits = [one for one in everything if one.sid == word]
    if not fits and word.isdecimal():  # before parts of ids: many of those end in a digit
        fits = [one for one in everything if one.has_job(word)]
    fits = fits or [one for one in everything if one.sid.startswith(word) or one.sid.endswith(word)]
    if len(fits) > 1:
        shown = ", ".join(one.sid for one in fits[:5])
        raise InputError(
            f"names {len(fits)} runs: {shown}{', …' if len(fits) > 5 else ''}",  # noqa: PLR2004
            field="RUN",
            value=word,
            hint="give more of the id",
        )
    return fits[0] if fits else None


def _task(submission: Submission, index: int, word: str) -> Submission:
    table = submission.runs()
    if not submission.is_array():
        raise InputError(
            "names a task, but the run is no job array",
            field="RUN",
            value=word,
            hint=f"say {submission.sid}",
        )
    if index not in dict(table):
        known = ", ".join(str(number) for number, _ in table[:10])
        raise NotFoundError(
            f"{submission.sid} has no task {index}",
            hint=f"its tasks: {known}{', …' if len(table) > 10 else ''}",  # noqa: PLR2004
        )
    return replace(submission, index=index)


def _meant(word: str, everything: list[Submission]) -> str:
    """Return the question after the run, or the newest run of a name, that a word is near to."""
    if word.isdecimal():
        return ""  # one job id is as near as another
    known = {"last": "last"}
    for one in everything[:_NEAR_RUNS]:
        known.setdefault(one.sid, one.sid)
        known.setdefault(one.sid.rsplit("-", 3)[0], one.sid)
    found = nearest(word, known)
    return f"did you mean {known[found]}? `hpml list` shows all runs" if found else ""


def _remove(paths: list[Path]) -> None:
    for path in reversed(paths):
        shutil.rmtree(path, ignore_errors=True)
