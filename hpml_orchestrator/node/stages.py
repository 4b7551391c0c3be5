"""Data on the node: stage it before the ranks start, and copy results back at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, StagingError, counted
from hpml_orchestrator.node.environment import job_key, node_index, node_names
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.texts import human_bytes, seconds_text
from hpml_orchestrator.staging.chain import ChainPosition
from hpml_orchestrator.staging.collect import Collected, collect
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.distribution import Rates, supply_for
from hpml_orchestrator.staging.request import Retry, StageResult, StagingStopped, shown, why
from hpml_orchestrator.staging.space import capacity_at
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import base_above, remove_tree
from hpml_orchestrator.staging.workers import array_delay, open_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.node.environment import AgentOptions
    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.records.schema import StageRecord
    from hpml_orchestrator.staging.stage import Supply

REPORT_SECONDS = 10.0
ARRIVAL_SECONDS = 300.0
"""Seconds that nodes wait for each other before the first entry, which all start at the same time.
Before later entries they wait without a limit: another node may still be copying an entry that this
node already has, and the job ends anyway if an agent ends."""
_NAP_SECONDS = 0.2


def _say(line: str) -> None:
    sys.stderr.write(f"hpml: {line}\n")


@dataclass
class ProgressReporter:
    """Reports the copy progress of one entry: as an event, and on the first node also as output."""

    name: str  # of the entry
    note: Callable[..., object]  # records an event with these figures
    say: Callable[[str], object] | None = None  # prints a line; None on all nodes but the first
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    _began: float = 0.0
    _next: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._next = self._began + REPORT_SECONDS

    def __call__(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        """Report the progress if the last report is old enough."""
        now = self.clock()
        if now < self._next:
            return
        self._next = now + REPORT_SECONDS
        rate = done / (now - self._began)
        left = (all_bytes - done) / rate if rate else None
        self.note(
            name=self.name,
            bytes_done=done,
            files_done=files,
            bytes_total=all_bytes,
            files_total=all_files,
            bytes_per_second=round(rate),
            seconds_left=None if left is None else round(left, 1),
        )
        if self.say is not None:
            share = f"{done / all_bytes:.0%}, " if all_bytes else ""
            rest = "" if left is None else f", {seconds_text(round(left))} left"
            self.say(
                f"staging {self.name}: {share}{human_bytes(done)} of {human_bytes(all_bytes)}, "
                f"{files} of {all_files} files, {human_bytes(round(rate))}/s{rest}"
            )


@dataclass
class NodeStaging:
    """The staging of one node."""

    options: AgentOptions  # the agent's options
    node: str  # Slurm's name of this node
    log: Path  # the node's events
    is_ending: Callable[[], bool]  # whether the agent must end
    # Environment of the agent, a step of the job
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    say: Callable[[str], object] = _say  # prints a line to the job's output
    stager: CopyStager = field(init=False)
    _progress: ProgressReporter | None = None

    def __post_init__(self) -> None:
        self.stager = CopyStager(
            job_key=job_key(self.environment),
            on_several_nodes=node_index(self.environment)[1] > 1,
            should_stop=self.is_ending,
            on_progress=self._on_progress,
        )

    def stage_all(self) -> list[StageRecord]:
        """Stage all entries in order; return the figures of each for the records.

        Raises:
            HpmlError: an entry could not be staged.
        """
        entries = self.options.job.stage
        waited = self._wait_for_others() if entries else 0.0
        figures = [self._stage(entry) for entry in entries]
        if waited:
            figures[0]["waited_seconds"] = round(waited, 3)
        return figures

    def _on_progress(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        if self._progress is not None:
            self._progress(done, files, all_bytes, all_files)

    def _stage(self, entry: Stage) -> StageRecord:
        request = self.options.at_its_directory(entry)
        note = functools.partial(feed.append, self.log, "staging", node=self.node)
        note(name=request.name, source=request.source, target=request.target)
        index, nodes = node_index(self.environment)
        self._progress = ProgressReporter(request.name, note, None if index else self.say)
        try:
            self.stager.options = self._options(entry, readers=nodes)
            supply = self._supply(entry, request, index, nodes) if nodes > 1 else None
            result = self.stager.stage(request, supply)
        finally:
            self._progress = None
        if result.warning and index == 0:
            self.say(f"warning: {result.warning}")
        return figures_of(result)

    def _options(self, entry: Stage, *, readers: int) -> CopyOptions:
        """Return options for copying an entry while `readers` nodes read the source."""
        limits = self.options.site
        rate = open_rate(limits.opens_per_second, limits.opens_per_second_per_job, readers)
        return CopyOptions(hash=entry.hash, opens_per_second=rate)

    def _supply(self, entry: Stage, request: Stage, index: int, nodes: int) -> Supply:
        """Return the supply of an entry that several nodes need: the source or a chain."""
        limits, first = self.options.site, self.options.job.stage[0]
        store = self.stager.store(request.target)  # raises at once if the target cannot be used
        try:
            return supply_for(
                request,
                entry.distribution,
                ChainPosition(
                    path=f"{self.options.attempt}/chain/{request.name}",
                    should_stop=self.is_ending,
                    index=index,
                    nodes=nodes,
                    node=self.node,
                    names=node_names(self.environment.get("SLURM_JOB_NODELIST", "")),
                    interfaces=limits.interfaces,
                    come_seconds=ARRIVAL_SECONDS if entry is first else math.inf,
                ),
                most_bytes=capacity_at(store.base),
                # In a chain only the first node reads, so it may use the whole job's rate of opens.
                options=self._options(entry, readers=1),
                options_of_all=self.stager.options,
                rates=Rates(
                    shared_rate=limits.shared_rate,
                    link_rate=limits.link_rate,
                    disk_rate=limits.disk_rate,
                    metadata_rate=limits.metadata_rate,
                ),
                report=self.say,
            )
        except OSError as error:
            raise StagingError(
                f"cannot stage {request.name} from {shown(request.source)}: {why(error)}"
            ) from error

    def _wait_for_others(self) -> float:
        """Delay this array task, so that not all tasks start at once; return the seconds."""
        index = self.environment.get("SLURM_ARRAY_TASK_ID", "")
        if not index.isdecimal():
            return 0.0
        salt = self.environment.get("SLURM_ARRAY_JOB_ID", "")
        array = self.options.job.array
        tasks = len(array.indices) if array else 0
        delay = array_delay(self.options.site.array_jitter, tasks, int(index), salt)
        began = time.monotonic()
        while (left := began + delay - time.monotonic()) > 0:
            if self.is_ending():
                raise StagingStopped
            time.sleep(min(left, _NAP_SECONDS))
        return delay


def figures_of(result: StageResult) -> StageRecord:
    """Return the figures of one entry on one node for the records, without empty ones."""
    figures: StageRecord = {
        "name": result.name,
        "path": result.path,
        "bytes": result.bytes,
        "files": result.files,
        "seconds": round(result.seconds, 6),
        "bytes_per_second": round(result.rate),
        "method": result.method,
        "reused": result.reused,
        "kept": result.kept,
    }
    if result.digest:
        figures["digest"] = result.digest
    if result.evicted:
        figures["evicted"] = list(result.evicted)
    return figures


# Results: copy them back from this node (`collect` in the job file).

_NOT_BEGUN = Collected(problem="the node was stopped before this was copied")


def make_job_directories(options: AgentOptions, stager: CopyStager) -> None:
    """Create the job's empty directories on this node, such as `{local.dir}`.

    Raises:
        StagingError: a directory cannot be created.
    """
    for name in options.job_directories:
        path = f"{stager.directory(options.bases[name])}/{name}.dir"
        try:
            if os.path.lexists(path):  # from an attempt that was killed on this node
                remove_tree(path)
            os.mkdir(path, 0o700)
        except OSError as error:
            raise StagingError(
                f"cannot make {{{name}.dir}}, {shown(path)}: {why(error)}"
            ) from error


@dataclass
class NodeResults:
    """The results of one node."""

    entries: Sequence[tuple[str, str]]  # source and target of each, most important first
    attempt: Path  # the attempt's directory, `…/RUN/attempts/N`
    node: str  # Slurm's name of this node
    _rows: list[dict[str, object]] = field(init=False)
    _directories: list[str] = field(init=False)  # targets of this node and attempt

    def __post_init__(self) -> None:
        self._rows = [
            {"source": source, "node": self.node, "beside": [], **dataclasses.asdict(_NOT_BEGUN)}
            for source, _ in self.entries
        ]
        again = "" if self.attempt.name == "0" else f".attempt{self.attempt.name}"
        run = self.attempt.parent.parent.name
        self._directories = [f"{target}/{run}/{self.node}{again}" for _, target in self.entries]

    def make_directories(self) -> None:
        """Create the directories for the results, so that errors appear before the training.

        Raises:
            InputError: a directory cannot be created or written.
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
            should_stop: returns whether time is up.
            staged: paths of the staged data on this node, by entry name.
        """
        retry = Retry(time.sleep, should_stop)
        # Write the record before the first copy: if the agent is killed, it shows what was not
        # copied.
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
            # Usually the source is misspelt, and the node's directory is about to be removed:
            # record the names in it.
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
