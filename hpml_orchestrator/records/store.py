"""The store of records: the directories of submissions and runs, and how to find one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, nearest
from hpml_orchestrator.records.files import fsync_dir, write_json, write_text
from hpml_orchestrator.records.ids import ID_PATTERN, dated, named_by, stamp_of
from hpml_orchestrator.records.run import Run, task_output
from hpml_orchestrator.records.submission import RUN_TABLE, SCRIPT, Submission
from hpml_orchestrator.records.texts import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_NEAR_RUNS = 1000
_TEMPORARY = re.compile(r"\..+\.tmp")
_LEFT_OVER_SECONDS = 86_400


def default_root(environment: Mapping[str, str]) -> Path:
    """Return the default directory of records: $HPML_HOME, else hpml in $XDG_STATE_HOME.

    Args:
        environment: variables such as `os.environ`.
    """
    chosen = environment.get("HPML_HOME")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    state = environment.get("XDG_STATE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".local", "state"
    )
    return Path(os.path.abspath(state)) / "hpml"


def open_store(records: str | Path | None, *, must_exist: bool = False) -> Store:
    """Return the store in a directory, by default the one of the environment.

    Raises:
        NotFoundError: the directory must exist but does not.
    """
    chosen = {"HPML_HOME": str(records)} if records else {}
    store = Store(default_root({**os.environ, **chosen}))
    if must_exist and chosen and not os.path.lexists(store.root):
        raise NotFoundError(
            f"no such directory of records: {store.root}",
            hint="--records, in Python `records`, or $HPML_HOME names it; "
            "the first `hpml run` there creates it",
        )
    return store


def ids_in(directory: Path) -> list[str]:
    """Return the ids among the names in a directory, newest first; empty if it is missing.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(
            f"cannot read {directory}: {error.strerror or error}",
            hint="set HPML_HOME to the directory of your records",
        ) from error
    known = [name for name in names if ID_PATTERN.match(name)]
    return sorted(known, key=lambda name: (stamp_of(name), name), reverse=True)


class Store:
    """All records below one root.

    `<root>/submissions/<sid>/`, `<root>/runs/<rid>/`, `<root>/archives/`, `<root>/local/<host>/`.
    Safe on a shared file system without locks: names are unique, and files are written by rename.

    Attributes:
        root: directory of all records.
        cluster: returns this machine's cluster, empty if unknown; called if runs share a job id.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster: Callable[[], str] = str

    @property
    def submissions_dir(self) -> Path:
        """The directory of submissions."""
        return self.root / "submissions"

    @property
    def runs_dir(self) -> Path:
        """The directory of runs."""
        return self.root / "runs"

    @property
    def archives_dir(self) -> Path:
        """The directory of shared files: one per content, with hard links from submissions."""
        return self.root / "archives"

    @property
    def places(self) -> tuple[Path, ...]:
        """All directories with records; the root may contain other files."""
        return (self.submissions_dir, self.runs_dir, self.archives_dir, self.root / "local")

    def local_home(self, host: str) -> Path:
        """The directory of a machine's local backend."""
        return self.root / "local" / host

    def prepare(
        self,
        sid: str,
        *,
        script: str,
        shared: Mapping[str, bytes],
        submit: Mapping[str, object],
        runs: Mapping[int, Mapping[str, object]],
        fill: Callable[[Path], None] = lambda _: None,
        array: bool = False,
    ) -> Submission:
        """Write the complete records of a submission and its runs before submitting it.

        Array tasks create their directories themselves when they start.

        Args:
            sid: the new id, also used by a single run; runs of an array add `.<index>`.
            script: text of the batch script.
            shared: names and contents of files that most submissions share.
            submit: content of `submit.json`.
            runs: content of `run.json` by array index; array tasks have no such file.
            fill: adds files to the submission's directory before the records are written.
            array: whether it is a job array; always true for several runs.

        Raises:
            RecordError: the root is not writable; no files remain.
        """
        target = self.submissions_dir / sid
        temporary = self.submissions_dir / f".{sid}.{os.getpid()}.tmp"
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
                # Slurm does not create directories for output.
                task_output(temporary, 0).parent.mkdir()
            else:
                directory = self.runs_dir / sid
                directory.mkdir()
                made.append(directory)
                (run,) = runs.values()
                write_json(directory / "run.json", {"rid": sid, "sid": sid, "index": 0, **run})
            write_text(temporary / SCRIPT, script, mode=0o755)
            for name, content in shared.items():
                self._place_shared(content, temporary / name)
            write_json(temporary / "submit.json", {"sid": sid, **submit})
            table = "".join(f"{index}\t{names[index]}\n" for index in sorted(names))
            write_text(temporary / RUN_TABLE, table)
            # Rename it last: a list of submissions shows only complete ones, and the directory of
            # the run exists before anything refers to it.
            os.rename(temporary, target)
            made[0] = target
            fsync_dir(self.submissions_dir)
            fsync_dir(self.runs_dir)
        except BaseException as error:
            for directory in reversed(made):
                shutil.rmtree(directory, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise RecordError(
                f"cannot write records under {self.root}: {error.strerror or error}",
                hint="set HPML_HOME to a directory that the nodes see too",
            ) from error
        return Submission(target)

    def _place_shared(self, content: bytes, path: Path) -> None:
        """Write a shared file to a directory, as a hard link to the store's copy if possible.

        Ignore a copy that is truncated (disk full) or owned by another user.
        """
        kept = self.archives_dir / f"{hashlib.sha256(content).hexdigest()[:32]}{path.suffix}"
        with contextlib.suppress(OSError):
            # Compare after linking: the file cannot be replaced in between.
            os.link(kept, path)
            if path.stat().st_uid == os.geteuid() and path.read_bytes() == content:
                return
            path.unlink()
        write_text(path, content, mode=0o444)
        # Without hard links or write permission, every submission has its own copy.
        with contextlib.suppress(OSError):
            self.archives_dir.mkdir(exist_ok=True)
            # link() does not replace a damaged file, but rename does.
            temporary = self.archives_dir / path.parent.name
            os.link(path, temporary)
            os.replace(temporary, kept)

    def _remove_left_overs(self) -> None:
        """Remove incomplete directories of killed commands; they may contain copies of code."""
        with os.scandir(self.submissions_dir) as entries:
            begun = [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for entry in begun:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _LEFT_OVER_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def submissions(self) -> Iterator[Submission]:
        """All submissions, newest first."""
        for name in ids_in(self.submissions_dir):
            yield Submission(self.submissions_dir / name)

    def run(self, rid: str) -> Run:
        """The run with an id; it must exist."""
        directory = self.runs_dir / rid
        if not directory.is_dir():
            raise NotFoundError(f"no run {rid!r} under {self.runs_dir}")
        return Run(directory)

    def resolve(self, word: str, *, exact_name: bool = False, newest: bool = False) -> Submission:
        """Find a submission by id, job id, a unique beginning or end of the id, or `last`.

        `last` is the user's last submission that was not refused, except those of `hpml bench` and
        trials. A number is always a job id; if several clusters have it, this cluster's. With
        `.<index>` at the end, or in Slurm's form `123_4`, it means one task of an array.

        Args:
            word: what the user typed.
            exact_name: for commands that cannot be undone; see `ids.named_by`.
            newest: for commands that only read: whether the name of a job means its newest run.

        Raises:
            NotFoundError: nothing matches, or the array has no such task.
            InputError: several submissions match, or it is not an array.
        """
        if not word:
            raise InputError("must name a run", field="RUN", value=word, hint="see `hpml list`")
        submissions = list(self.submissions())
        if word == "last" and not any(map(_is_last, submissions)):
            message, hint = f"no runs under {self.root} yet", "start one with `hpml run`"
            if submissions:
                message += " but those that were refused, or that hpml started itself"
                hint += "; `hpml list` shows all"
            raise NotFoundError(message, hint=hint)
        match = self._named(submissions, word, exact_name=exact_name, newest=newest)
        task = re.fullmatch(r"(.+)\.(\d+)|(\d+)_(\d+)", word, re.ASCII)
        if match is None and task is not None:
            whole = task[1] or task[3]
            match = self._named(submissions, whole, exact_name=exact_name, newest=newest)
            if match is not None:
                return _task(match, int(task[2] or task[4]), word)
        if match is None:
            hint = ""
            if exact_name and (near := named_by(word, [one.sid for one in submissions])):
                hint = f"did you mean {near[0]}? Give that id, or the whole name of the job"
            error = NotFoundError(
                f"no run {word!r} under {self.root}",
                hint=hint
                or _suggestion(word, submissions)
                or "`hpml list` shows all runs: give an id, its beginning, a job id or `last`",
            )
            error.job_id = word if word.isdecimal() else ""
            raise error
        return match

    def _named(
        self, submissions: list[Submission], word: str, *, exact_name: bool, newest: bool
    ) -> Submission | None:
        """Return the submission that a word matches; None without a match."""
        if word == "last":
            return next(filter(_is_last, submissions), None)
        if word.isdecimal():
            matches = [submission for submission in submissions if submission.has_job(word)]
            if len(matches) > 1 and (here := self.cluster()):
                own = [one for one in matches if one.record().get("cluster") == here]
                matches = own or matches
        else:
            by_id = {submission.sid: submission for submission in submissions}
            matches = [by_id[sid] for sid in named_by(word, by_id, exact_name=exact_name)]
            if newest and matches and named_by(word, [matches[0].sid], exact_name=True):
                matches = matches[:1]
        if len(matches) > 1:
            raise InputError(
                f"names {len(matches)} runs: "
                f"{first_few([dated(match.sid) for match in matches], 5)}",
                field="RUN",
                value=word,
                hint="give the id of the run" if word.isdecimal() else "give more of the id",
            )
        return matches[0] if matches else None


def _task(submission: Submission, index: int, word: str) -> Submission:
    if not submission.is_array():
        raise InputError(
            "names a task, but the run is not a job array",
            field="RUN",
            value=word,
            hint=f"use {submission.sid}",
        )
    indices = [number for number, _ in submission.runs()]
    if index not in indices:
        raise NotFoundError(
            f"{submission.sid} has no task {index}",
            hint=f"its tasks: {first_few([str(number) for number in indices], 10)}",
        )
    return submission.at(index)


def _is_last(submission: Submission) -> bool:
    """Return whether `last` may mean this submission."""
    with contextlib.suppress(RecordError):  # so that its damage is reported
        return not submission.started_by and submission.refused() is None
    return True


def _suggestion(word: str, submissions: list[Submission]) -> str:
    """Suggest the most similar run id, or the newest run of the most similar job name."""
    if word.isdecimal():
        return ""  # similar job ids mean nothing
    known = {"last": "last"}
    for submission in submissions[:_NEAR_RUNS]:
        known.setdefault(submission.sid, submission.sid)
        known.setdefault(submission.sid.rsplit("-", 3)[0], submission.sid)
    match = nearest(word, known)
    return f"did you mean {known[match]}? `hpml list` shows all runs" if match else ""
