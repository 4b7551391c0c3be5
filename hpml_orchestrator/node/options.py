"""The options of a node's agent, which the batch script passes as JSON."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.node.environment import CheckpointOptions, read_option
from hpml_orchestrator.staging.request import StageRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class BindOptions:
    """How to bind the ranks of a node."""

    ranks: int  # how many the node has
    policy: str = "gpu-local"  # the planner's policy
    verify: str = "warn"  # `strict`, `warn` or `off`
    ranks_per_gpu: int = 1  # how many ranks share a GPU
    loader_workers: int = 0  # processes per rank that load data
    one_thread: bool = False  # whether ranks get only the first hardware thread of each core
    keep_threads: bool = False  # whether the job file sets OMP_NUM_THREADS, which is kept then
    no_gpus: bool = False  # whether the job requested no GPUs, so that the node's do not count


@dataclass(frozen=True)
class StageOptions:
    """One entry of the job file's `stage`."""

    request: StageRequest  # what to copy, and to which base directory
    distribution: str = "auto"  # how several nodes get it
    hash: bool = True  # whether contents are hashed while they are copied


@dataclass(frozen=True)
class SiteLimits:
    """Limits of the site's file system and network from the site profile; 0 if unknown."""

    opens_per_second: int = 0  # most files that one node may open per second
    opens_per_second_per_job: int = 0  # most that all nodes of the job may, together
    metadata_rate: int = 0  # files per second that the file system opens for all nodes
    shared_rate: int = 0  # bytes/s that it reads for all nodes
    link_rate: int = 0  # bytes/s between two nodes
    disk_rate: int = 0  # bytes/s that a node's disk writes
    array_jitter: int = 0  # seconds over which the tasks of an array spread their start, at most
    array_tasks: int = 0  # how many tasks the array has
    interfaces: Sequence[str] = ()  # network interfaces between nodes, the best first


@dataclass(frozen=True)
class MonitorOptions:
    """How to monitor the job."""

    listen: str  # ADDRESS:PORT of the exporter
    interval: int = 1  # seconds between two readings of GPUs
    web_config: str = ""  # its file of TLS and users; empty for none
    targets: str = ""  # directory of Prometheus targets; empty for the one next to the records


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    attempt: Path  # the attempt's directory
    bind: BindOptions = BindOptions(1)  # how to bind the ranks
    stages: Sequence[StageOptions] = ()  # what to stage, in order
    site: SiteLimits = SiteLimits()  # limits of the site's file system
    monitor: MonitorOptions | None = None  # how to monitor the job; None for no monitoring
    # Where the job gets an empty directory, by name: `local` or `shm`
    job_directories: Mapping[str, str] = field(default_factory=dict)
    # Source and target of each result to copy back, the most important first
    collect: Sequence[tuple[str, str]] = ()
    # When to stop the ranks; None if they are not stopped before their end
    checkpoint: CheckpointOptions | None = None


def parse_options(argv: Sequence[str]) -> AgentOptions:
    """Return the options of `agent ATTEMPT [--bind JSON] [--site JSON] [--monitor JSON] …`.

    Each JSON object has the attributes of the class above as its keys; a `--stage` has those of
    StageRequest and StageOptions together, and its target is a directory, or `shm` or `local` for
    the directories of `--shm` and `--local`, which differ between nodes. `--job-directory NAME`
    makes a directory for the job in one of these, `--collect SOURCE TARGET` copies a result back.

    Raises:
        InputError: an object cannot be read.
    """
    parser = argparse.ArgumentParser(prog="hpml-node.pyz agent", allow_abbrev=False)
    parser.add_argument("attempt", type=Path, help="the attempt's directory")
    for name in ("--bind", "--site", "--monitor"):
        parser.add_argument(name, metavar="JSON")
    for name in ("--shm", "--local"):
        parser.add_argument(name, metavar="DIRECTORY")
    parser.add_argument("--stage", metavar="JSON", action="append", default=[])
    parser.add_argument("--job-directory", choices=("shm", "local"), action="append", default=[])
    parser.add_argument("--collect", metavar="PATH", nargs=2, action="append", default=[])
    given = parser.parse_args(argv)
    bases = {"shm": given.shm, "local": given.local}

    def stage(**fields: Any) -> StageOptions:
        own = {key: fields.pop(key) for key in ("distribution", "hash") if key in fields}
        fields["target"] = bases.get(fields["target"]) or fields["target"]
        return StageOptions(StageRequest(**fields), **own)

    return AgentOptions(
        given.attempt,
        read_option(BindOptions, "--bind", given.bind or '{"ranks": 1}'),
        [read_option(stage, "--stage", text) for text in given.stage],
        read_option(SiteLimits, "--site", given.site or "{}"),
        read_option(MonitorOptions, "--monitor", given.monitor) if given.monitor else None,
        {name: bases[name] or name for name in given.job_directory},
        [(source, target) for source, target in given.collect],
        CheckpointOptions.from_environment(),
    )
