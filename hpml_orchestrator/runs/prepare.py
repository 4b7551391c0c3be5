"""Complete and render a job, and record its submission before anything is submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.jobfile.load import field_value
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.job import AGENT_FILE, Job, with_unknown
from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.records.provenance import collect
from hpml_orchestrator.records.targets import default_directory, remove_stale
from hpml_orchestrator.records.units import MIB, size_text
from hpml_orchestrator.runs.backend import check_backend, refuse_other_clusters
from hpml_orchestrator.runs.load import ResolvedJob
from hpml_orchestrator.runs.snapshot import Snapshot, find, keep_script
from hpml_orchestrator.scheduler.command import job_environment
from hpml_orchestrator.scheduler.local.processes import memory_mb
from hpml_orchestrator.script import archive
from hpml_orchestrator.script.render import (
    CODE_DIRECTORY,
    Capabilities,
    SnapshotPaths,
    leaves_out,
    render,
    render_agent,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.records.schema import RunRecord, WaitedRun
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.site.model import Site

# Load a job: find its site profile, merge the fields, read them, resolve the paths.


@dataclass(frozen=True)
class Rendered:
    """A job and its script, ready to be submitted or printed."""

    resolved: ResolvedJob
    script: str
    agent: str  # the content of `agent.json`
    snapshot: Snapshot | None = None  # the repository to copy at submission
    # Why each `target: auto` became what it is, by the name of its entry.
    targets: Mapping[str, str] = field(default_factory=dict)


def render_job(
    resolved: ResolvedJob,
    capabilities: Capabilities | None = None,
) -> Rendered:
    """Complete a job with what must be measured and render its script.

    Args:
        resolved: the job.
        capabilities: what this installation can do; looked for when left out.

    Raises:
        InputError: the job cannot be rendered, or its `environment.setup` or the user's own
            templates make a script that cannot run.
    """
    targets: dict[str, str] = {}
    site = resolved.site
    if resolved.job.stage:  # most jobs stage nothing, and need none of this
        profile = site.site if site else None
        room = room_of_site(resolved.job, profile)
        if resolved.backend == "local":  # the profile describes the cluster
            room = NodeRoom(memory_mb() or None)
        resolved, targets = resolve_stage_targets(resolved, room)
    job = resolved.job
    if job.environment.setup:
        from hpml_orchestrator.script.archive import check_setup  # noqa: PLC0415 - few have it

        check_setup(job.environment.setup, resolved.origins["environment.setup"])
    snapshot = find(job) if job.snapshot else None
    script = render(
        job,
        capabilities or Capabilities(),
        site,
        snapshot=SnapshotPaths(snapshot.workdir, snapshot.script) if snapshot else None,
        targets=targets,
    )
    if site is not None and site.site.templates:
        from hpml_orchestrator.script.archive import check_script  # noqa: PLC0415 - few have it

        check_script(script, site.site.templates)
    return Rendered(resolved, script, render_agent(job, site), snapshot, targets)


def prepare(
    store: Store,
    rendered: Rendered,
    *,
    cluster: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    after: Sequence[WaitedRun] = (),
    now: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
    sid: str = "",
    fill: Callable[[Path], None] = lambda _: None,
    record: Mapping[str, object] | None = None,
) -> Submission:
    """Write a submission and its runs completely; nothing is submitted yet.

    Args:
        store: where records live.
        rendered: the job and its script.
        cluster: the cluster that it is for, see `backend.cluster_name`.
        argv: the command line, for the record.
        environment: of the submitting process.
        after: the runs that it waits for, as `after.pending_dependencies` returns them.
        now: seconds since the epoch; the clock when left out.
        notice: takes a line to show when the snapshot is large.
        sid: the submission's id, if it was chosen before.
        fill: puts more files into the submission's directory.
        record: more for `submit.json`, such as the sweep that it belongs to.

    Raises:
        InputError: that scheduler cannot run such a job, or the snapshot cannot be taken.
        RecordError: the records cannot be written. Either way nothing is left behind.
    """
    job, backend, site = rendered.resolved.job, rendered.resolved.backend, rendered.resolved.site
    check_backend(job, backend)
    if backend == "slurm":
        refuse_other_clusters(cluster, environment)
    moment = time.time() if now is None else now
    # What hpml writes is not the user's code: without this list every run's records would make the
    # next run's working tree look dirty.
    own = [*store.places, store.root / "sweeps", *(Path(entry.target) for entry in job.collect)]
    if store.root not in (Path(job.workdir), *Path(job.workdir).parents):
        own.append(store.root)
    provenance, diff = collect(job.workdir, argv=argv, environment=environment, own=own)
    sid = sid or new_id(job.name, now=moment)
    resolved = job.to_json()
    if record and "continues" in record:  # a newer version may have written more
        earlier = store.resolve(str(record["continues"]), exact_name=True)
        resolved = with_unknown(resolved, earlier.record()["job"])
    plan: RunRecord = {"name": job.name, "created": moment}
    if job.array is None:
        plan |= {"job": resolved, "provenance": provenance}
    # what all tasks of an array share is kept once, in submit.json
    runs = dict.fromkeys(job.array.indices if job.array else [0], plan)

    def fill_directory(directory: Path) -> None:
        write_text(directory / AGENT_FILE, rendered.agent)
        fill(directory)
        # Called before the records are written that hold the provenance.
        if rendered.snapshot is not None:
            code = directory / CODE_DIRECTORY
            taken = rendered.snapshot.take(code, leave_out=store.places, notice=notice)
            git = provenance["git"]
            taken["dirty"] = git["dirty"] if git else taken["files"] > 0
            provenance["snapshot"] = taken
        elif job.script and (
            kept := keep_script(job.script, directory, beside=not provenance["git"])
        ):
            provenance["script"] = kept

    no_comment = leaves_out(site.site.directives if site else {}, "comment")
    submission = store.prepare(
        sid,
        script=rendered.script,
        shared=archive.node_files(),
        submit={
            "name": job.name,
            "created": moment,
            "backend": backend,
            "cluster": cluster,
            "host": socket.gethostname(),
            "submitter": asdict(this_owner(sid)),
            "comment": "" if no_comment else f"hpml:{sid}",
            "output": str(store.runs_dir / sid / "output.log"),
            # Names only: the values may be passwords or tokens.
            "environment_names": sorted(job_environment(environment, job.environment.inherit)),
            "job_file": str(rendered.resolved.source),
            "after": list(after),
            "site": [str(path) for path in site.sources] if site else [],
            "job": resolved,
            "provenance": provenance,
            **(record or {}),
        },
        runs=runs,
        array=job.array is not None,
        fill=fill_directory,
    )
    if diff:
        write_text(submission.directory / "dirty.diff", diff, mode=0o600)  # code, as in code/
    if job.monitor.enabled:
        remove_stale(Path(job.monitor.targets or default_directory(store.root)))
    return submission


def explained(resolved: ResolvedJob) -> list[tuple[str, object, str]]:
    """Return field, value and origin of every value of a job, in the order of the model."""
    whole = resolved.job.to_json()
    return [(name, field_value(whole, name), origin) for name, origin in resolved.origins.items()]


def write_rendered(rendered: Rendered, directory: str, *, force: bool = False) -> Path:
    """Write `job.sh`, its files and a snapshot into a directory; return the script's path.

    Raises:
        InputError: the directory cannot be made or written, holds a different script (perhaps
            edited by hand) and `force` is not given, or holds a snapshot already; the snapshot
            cannot be taken. A directory that was made is removed again.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field="--output", value=directory, hint=hint)

    target = Path(os.path.abspath(os.path.expanduser(directory)))
    snapshot = rendered.snapshot
    if snapshot is not None and snapshot.holds(target):
        raise refused(
            f"is inside the repository {snapshot.top!r} that the snapshot copies",
            "name a directory outside of it",
        )
    script, code = target / "job.sh", target / CODE_DIRECTORY
    files = {**archive.node_files(), AGENT_FILE: rendered.agent.encode()}
    edited = {"job.sh": rendered.script.encode(), **files}
    del edited["hpml-node.pyz"]
    with output_directory(target, value=directory):
        for name, content in edited.items():
            path = target / name
            if not force and path.exists() and path.read_bytes() != content:
                raise refused(
                    f"holds a file {name} that differs, perhaps edited by hand",
                    "name another directory, or replace it with --force",
                )
        if snapshot is not None:
            if os.path.lexists(code):
                raise refused(
                    f"already holds a directory {CODE_DIRECTORY}",
                    f"name another directory, or remove {code}",
                )
            # Copied aside and renamed, so that an interrupted copy never looks like a complete
            # snapshot.
            with tempfile.TemporaryDirectory(prefix=f".{CODE_DIRECTORY}.", dir=target) as temporary:
                snapshot.take(Path(temporary, CODE_DIRECTORY))
                os.rename(Path(temporary, CODE_DIRECTORY), code)
        for name, content in files.items():
            write_text(target / name, content)
        write_text(script, rendered.script, mode=0o755)
    return script


@contextlib.contextmanager
def output_directory(path: Path, *, value: str, field: str = "--output") -> Iterator[None]:
    """Make a directory for what is written within; if that fails, a new one is removed again.

    Args:
        path: the directory, absolute.
        value: as the user wrote it, for the error.
        field: the option or argument that names it.

    Raises:
        InputError: it cannot be made or written to.
    """
    # A directory that existed before is never removed: it may hold the user's files.
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, (OSError, RecordError)):
            raise
        cause = error.__cause__ if isinstance(error, RecordError) else error
        raise InputError(
            f"cannot be written: {getattr(cause, 'strerror', None) or cause or error}",
            field=field,
            value=value,
            hint="name a directory that you may write to and that has room",
        ) from error


# Complete `stage`: the target of each entry, and the size of data in RAM.
#
# `target: auto` becomes RAM if data and job fit well into memory, else the node's disk. The
# staging package is imported only when something is measured.

RAM_SHARE = 0.5
"""Share of the memory not requested by the job that staging may use: the rest is for the page
cache, for other jobs, and for unforeseen needs of the job."""

_PAGE_BYTES = 4096
_ANY_BYTES = 1 << 62
_COMPRESSED = (
    ".gz",
    ".tgz",
    ".xz",
    ".bz2",
    ".txz",
    ".tbz2",
    ".tbz",
    ".zst",
    ".zstd",
    ".tzst",
    ".lz4",
)


@dataclass(frozen=True)
class NodeRoom:
    """The least memory and disk of the nodes that a job may run on; None if unknown."""

    memory_mib: int | None = None  # that jobs can have
    disk_mib: int | None = None  # size of the local disk


def room_of_site(job: Job, site: Site | None) -> NodeRoom:
    """Return the nodes' memory and disks by the site profile, for a job's partition."""
    if site is None:
        return NodeRoom()
    partition = job.resources.partition
    kinds = site.node_types_of(partition)
    profiles = [site.partitions.get(name) for name in site.partitions_of(partition)]
    limits = [profile.max_memory_per_node for profile in profiles if profile]
    memory = [kind.memory or 0 for kind in kinds]
    disks = [kind.local_disk or 0 for kind in kinds]
    return NodeRoom(
        memory_mib=min([*memory, *filter(None, limits)]) if kinds and all(memory) else None,
        disk_mib=min(disks) if kinds and all(disks) else None,
    )


def resolve_stage_targets(
    resolved: ResolvedJob, room: NodeRoom = NodeRoom()
) -> tuple[ResolvedJob, dict[str, str]]:
    """Return the job with a target for every `auto`, and the size of all data in RAM.

    The second value is the reason for each choice, by the name of the entry.

    Files in /dev/shm count as the job's memory, so `--mem` has to include them: where memory is
    asked for, the size is measured if the job file does not give it.

    Raises:
        InputError: the source does not exist, or is a compressed archive whose size must be given.
    """
    job = resolved.job
    own = job.resources.node_memory
    origins = dict(resolved.origins)
    stages: list[Stage] = []
    reasons: dict[str, str] = {}
    in_ram = 0
    for index, given in enumerate(job.stage):
        stage = given
        needed = own and stage.target in ("shm", "auto") and stage.size is None
        if needed and (stage.target == "shm" or not is_compressed(stage)):
            stage = dataclasses.replace(stage, size=_size(stage, index))
            origins[f"stage.{index}.size"] = "measured"
        size = stage.size or 0
        if stage.target == "auto":
            target, why = _target(size, own, in_ram, room)
            stage = dataclasses.replace(stage, target=target)
            origins[f"stage.{index}.target"] = f"auto: {why}"
            reasons[stage.name] = why
        if stage.target == "shm":
            in_ram += size
        stages.append(stage)
    job = dataclasses.replace(job, stage=tuple(stages))
    return dataclasses.replace(resolved, job=job, origins=origins), reasons


def _target(size: int, own: int, in_ram: int, room: NodeRoom) -> tuple[str, str]:
    """Return the target of an entry of `stage`, and the reason, without characters to quote.

    Sizes are in MiB per node: of its data once staged (0: not known), of what the job asks for
    itself (0: nothing), and of what other entries bring to RAM.
    """
    # Without --mem the cluster gives a default that staged files would eat into: they count as the
    # job's memory, and the kernel would kill the ranks.
    if not own:
        return "local", "the job asks for no memory, to which the data in RAM would be added"
    if not size:
        return "local", "its size is not known, and RAM has to be requested"
    if room.memory_mib is None:
        return "local", "node memory is unknown, define it in the site profile"
    left = max(0, room.memory_mib - own)
    beside = f"{size_text(left)} of node memory left by the {size_text(own)} of the job"
    if room.disk_mib is not None and size > room.disk_mib and in_ram + size <= left:
        disk = size_text(room.disk_mib)
        return "shm", f"{size_text(size)} fit into the {beside}, not on a disk of {disk}"
    data = size_text(size) + (f" with {size_text(in_ram)} of other data" if in_ram else "")
    if in_ram + size <= RAM_SHARE * left:
        return "shm", f"{data} are at most half of the {beside}"
    return "local", f"{data} are more than half of the {beside}"


def is_compressed(stage: Stage) -> bool:
    """Whether the size of an archive's content is unknown before unpacking."""
    from hpml_orchestrator.staging.request import SUFFIXES  # noqa: PLC0415 - few jobs stage data

    name = stage.source.lower()
    kind: str = stage.kind
    if kind == "auto" and not os.path.isdir(stage.source):
        kind = next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")
    return kind == "tar" and name.endswith(_COMPRESSED)


def _size(stage: Stage, index: int) -> int:
    """Return the measured size of an entry in MiB, with errors that name its field."""
    try:
        size = None if is_compressed(stage) else _bytes_in_ram(stage)
    except (HpmlError, OSError) as error:
        if isinstance(error, OSError):
            message = f"cannot be read: {error.strerror or error}"
            hint = "or give `size`, and the source is not looked at before the job runs"
        else:  # a damaged archive, or one that holds what staging refuses
            message, hint = error.message, error.hint
        field = f"stage.{index}.source"
        raise InputError(message, field=field, value=stage.source, hint=hint) from error
    if size is None:
        raise InputError(
            "must be given for a compressed archive that is unpacked into RAM",
            field=f"stage.{index}.size",
            hint=f"`size: 40G`, or whatever {stage.source} holds",
        )
    return max(1, -(-size // MIB))


def _bytes_in_ram(stage: Stage) -> int | None:
    from hpml_orchestrator.staging.request import Retry  # noqa: PLC0415 - only for `target: auto`
    from hpml_orchestrator.staging.space import INODE_BYTES  # noqa: PLC0415 - few stage
    from hpml_orchestrator.staging.stage import open_source  # noqa: PLC0415 - as above

    with contextlib.closing(open_source(stage, Retry(), _ANY_BYTES)) as source:
        return None if source.ordered else source.plan().need(_PAGE_BYTES, INODE_BYTES).bytes
