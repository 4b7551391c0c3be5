"""Stage a job's data to this node, with progress and the figures for its records."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.node.environment import job_key, node_index, node_names
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.texts import human_bytes, seconds_text
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.distribution import Rates, supply_for
from hpml_orchestrator.staging.faults import StagingStopped, shown, why
from hpml_orchestrator.staging.link import ChainPosition
from hpml_orchestrator.staging.rate_limit import array_delay, open_rate
from hpml_orchestrator.staging.request import StageResult
from hpml_orchestrator.staging.space import capacity_at
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpml_orchestrator.node.options import AgentOptions
    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.records.schema import StageRecord
    from hpml_orchestrator.staging.stage import Supply

REPORT_SECONDS = 10.0
ARRIVAL_SECONDS = 300.0
"""How long nodes wait for one another before the first entry, which all begin at once. Before later
entries they wait without a limit: another node may still copy an entry that this one has already,
and the job ends anyway if an agent ends."""
_NAP_SECONDS = 0.2


def _say(line: str) -> None:
    sys.stderr.write(f"hpml: {line}\n")


@dataclass
class ProgressReporter:
    """Copy progress of one entry: an event, and on the first node also a line of the output."""

    name: str  # the entry's
    note: Callable[..., object]  # records the figures of an event
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
    is_ending: Callable[[], bool]  # returns whether the agent must end
    # Of the agent, a step of the job
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
        """Stage all entries in order; return the figures of each, for the records.

        Raises:
            HpmlError: one could not be staged.
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
        """Return how to copy an entry while `readers` nodes read the source at once."""
        limits = self.options.site
        rate = open_rate(limits.opens_per_second, limits.opens_per_second_per_job, readers)
        return CopyOptions(hash=entry.hash, opens_per_second=rate)

    def _supply(self, entry: Stage, request: Stage, index: int, nodes: int) -> Supply:
        """Return how this node gets an entry that several nodes need."""
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
                # In a chain only the first node reads, so it gets the whole job's share of opens.
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
        """Delay this task of an array, so that not all tasks start at once; return the seconds."""
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
    """Return the figures of one entry on one node for the records; empty ones are left out."""
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
