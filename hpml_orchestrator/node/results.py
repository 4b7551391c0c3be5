"""Copy a job's results back from this node: `collect` of the job file."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, StagingError, counted
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.collect import Collected, collect
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.store import base_above, remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.node.options import AgentOptions
    from hpml_orchestrator.staging.stage import CopyStager

_NOT_BEGUN = Collected(problem="the node was stopped before this was copied")


def make_job_directories(options: AgentOptions, stager: CopyStager) -> None:
    """Make the job's empty directories on this node, such as `{local.dir}`.

    Raises:
        StagingError: a directory cannot be made.
    """
    for name in options.job_directories:
        path = f"{stager.directory(options.bases[name])}/{name}.dir"
        try:
            if os.path.lexists(path):  # left by an attempt that was killed here
                remove_tree(path)
            os.mkdir(path, 0o700)
        except OSError as error:
            raise StagingError(
                f"cannot make {{{name}.dir}}, {shown(path)}: {why(error)}"
            ) from error


@dataclass
class NodeResults:
    """The results of one node."""

    entries: Sequence[tuple[str, str]]  # source and target of each, the most important first
    attempt: Path  # the attempt's directory, `…/RUN/attempts/N`
    node: str  # Slurm's name of this node
    _rows: list[dict[str, object]] = field(init=False)
    _directories: list[str] = field(init=False)  # for the results of this node and attempt

    def __post_init__(self) -> None:
        self._rows = [
            {"source": source, "node": self.node, "beside": [], **dataclasses.asdict(_NOT_BEGUN)}
            for source, _ in self.entries
        ]
        again = "" if self.attempt.name == "0" else f".attempt{self.attempt.name}"
        run = self.attempt.parent.parent.name
        self._directories = [f"{target}/{run}/{self.node}{again}" for _, target in self.entries]

    def make_directories(self) -> None:
        """Create the directories for the results, so that errors show before the training.

        Raises:
            InputError: one cannot be made or written.
        """
        for index, directory in enumerate(self._directories):
            try:
                if base_above(os.path.realpath(directory)):
                    raise PermissionError(0, "files there are removed with the job")
                os.makedirs(directory, exist_ok=True)
                if not os.access(directory, os.W_OK | os.X_OK):
                    raise PermissionError(0, "not writable by you")
            except OSError as error:
                raise InputError(
                    f"results cannot be put there: {why(error)}",
                    field=f"collect.{index}.target",
                    value=directory,
                ) from error

    def collect(self, should_stop: Callable[[], bool], staged: Mapping[str, str]) -> None:
        """Copy each result back and record the outcome; an error does not stop the others.

        Args:
            should_stop: returns whether no time is left.
            staged: paths of the data on this node, by the names of their entries.
        """
        retry = Retry(time.sleep, should_stop)
        # Written before the first copy: if the agent is killed, the record shows what was not
        # begun.
        self._write()
        for row, (given, _), directory in zip(self._rows, self.entries, self._directories):
            source = given
            for name, path in staged.items():
                source = source.replace(f"{{stage.{name}}}", path)
            row["source"] = source
            try:
                os.makedirs(directory, exist_ok=True)
                found = collect(source, directory, retry)
            except OSError as error:
                found = Collected(problem=f"{shown(directory)}: {why(error)}")
            row.update(dataclasses.asdict(found))
            # A misspelt source is the usual reason, and the node's directory is about to be
            # removed: record the names that are there.
            if not found.path:
                row["beside"] = _names(os.path.dirname(source))
            self._write()
            self._report(source, found)
        for directory in self._directories:
            self._remove_empty(directory)

    def _write(self) -> None:
        write_json(self.attempt / "nodes" / f"{self.node}.collected.json", {"entries": self._rows})

    def _report(self, source: str, found: Collected) -> None:
        line, name = "", shown(os.path.basename(source))
        if found.path:
            size = f"{counted(found.files, 'file')}, {human_bytes(found.bytes)}"
            line = f"collected {name}: {size} in {shown(found.path)}"
        if found.problem:
            line = f"{line or f'NOT collected {name}'}: {found.problem}"
        if line:
            sys.stderr.write(f"hpml: {self.node}: {line}\n")

    def _remove_empty(self, directory: str) -> None:
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(directory)
            os.rmdir(os.path.dirname(directory))


def _names(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [shown(name) for name in heapq.nsmallest(5, os.listdir(directory))]
    return []
