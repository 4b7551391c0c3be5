"""The contents of the record files: types of the JSON objects in `submit.json` and others.

Each file has one reader, in `submission.py` or `run.py`. It checks the fields that every user of
the record needs. Older versions of hpml did not write the fields of the classes with `total=False`.
docs/records.md describes the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.job import Json


# Of a submission.


class GitRecord(TypedDict, total=False):
    """The git repository of the job's code."""

    commit: str
    branch: str
    top: str
    dirty: bool | None  # None: git did not report it
    untracked: list[str]
    diff: str  # name of the file with the changes, or why there is none


class SnapshotRecord(TypedDict, total=False):
    """The copy of the repository that the run uses."""

    top: str
    dirty: bool | None
    commit: str
    branch: str
    files: int
    bytes: int
    untracked: int


class _Provenance(TypedDict):
    hpml: str
    python: str
    executable: str
    platform: str
    host: str
    user: str
    command_line: list[str]
    directory: str
    git: GitRecord | None


class ScriptRecord(TypedDict):
    """The job's script as it was submitted."""

    path: str
    sha256: str
    copy: str  # relative to the submission


class ProvenanceRecord(_Provenance, total=False):
    """Code, versions, host and command line of a submission."""

    script: ScriptRecord
    snapshot: SnapshotRecord


class WaitedRun(TypedDict):
    """A run that a submission waits for."""

    run: str
    end: str  # `ok`, `any` or `notok`
    job_id: str


class _Submit(TypedDict):
    name: str
    created: float  # seconds since the epoch
    backend: str
    cluster: str
    host: str
    comment: str
    output: str
    job_file: str
    job: Json
    provenance: ProvenanceRecord


class SubmitRecord(_Submit, total=False):
    """A request: `submit.json`."""

    schema_version: int
    sid: str
    submitter: Mapping[str, object]
    environment_names: list[str]
    after: list[WaitedRun]
    site: list[str]  # files of the site profile
    job_name: str  # submitit's, which may be any text
    started_by: str  # the command that submitted it for its own use
    continues: str  # the submission that it repeats
    sweep: str
    points: list[int]  # numbers of the sweep's points, by array index
    values: list[dict[str, object]]  # of the points


class ScheduledJob(TypedDict, total=False):
    """The scheduler's answer: `job.json`."""

    job_id: str
    how: str
    earlier: list[str]  # ids of the jobs before it
    recorded: float


class RefusalRecord(TypedDict, total=False):
    """Why the scheduler refused: `refused.json`."""

    reason: str
    recorded: float


# Of a run and its attempts.


class RunRecord(TypedDict, total=False):
    """The plan of a run: `run.json`."""

    rid: str
    sid: str
    index: int
    name: str
    created: float
    job: Json
    provenance: ProvenanceRecord


class EndRecord(TypedDict, total=False):
    """How an attempt ended: `ended.json`."""

    exit_code: int
    time: float
    state: str
    reason: str
    goes_on: bool
    why: str
    stays: str
    ignored: str
    step: int | None
    progress: bool
    slowest_save: float | None
    slowest_step: float | None


class NextRecord(TypedDict, total=False):
    """The job that follows: `next.json`."""

    how: str
    job_id: str
    time: float
    exclude: list[str]


class StopRecord(TypedDict, total=False):
    """A request to stop: a line of `stop`."""

    reason: str
    time: float
    by: str


class CollectedEntry(TypedDict):
    """The result of an entry of `collect` on a node."""

    source: str
    node: str
    path: str
    files: int
    bytes: int
    problem: str
    beside: list[str]


def beside(rows: Iterable[CollectedEntry]) -> str:
    """Return a note of other names next to missing results; empty if there are none."""
    names = sorted({name for row in rows for name in row["beside"]})
    return f"; next to it: {', '.join(names)}" if names else ""


class Marker(TypedDict, total=False):
    """A node's own report: `nodes/NODE.KIND.json`."""

    node: str
    host: str
    pid: int
    time: float
    exit_code: int
    message: str
    hint: str
    seconds: float  # that staging took
    bytes: int
    files: int
    placed: Any  # figures of the plan, see `placement.report.PlanFigures`
    resolves: Sequence[str]
    entries: list[CollectedEntry]


class _Stage(TypedDict):
    name: str
    path: str
    bytes: int
    files: int
    seconds: float
    bytes_per_second: float
    method: str
    reused: bool
    kept: bool


class StageRecord(_Stage, total=False):
    """An entry of `stage` on one node, in its event `ready`."""

    digest: str
    evicted: list[str]  # sources that were removed to make room
    waited_seconds: float  # of the first entry: for other tasks of the array


class BindingRecord(TypedDict, total=False):
    """Where a rank ran: a line of `binding/NODE.jsonl`."""

    rank: int
    local_rank: int | None
    world_size: int
    node: str
    host: str
    pid: int
    start_ticks: int | None
    time: float
    inherited: str
    cpus: str
    child_cpus: str | None
    memory: str
    visible: str | None
    threads: int | None
    nic: str | None
    bound: bool
    error: str
    note: str
    program: str
    command: list[str]


class RankProofFields(TypedDict, total=False):
    """Whether the agent saw a rank run as planned."""

    rank: int
    wrong: list[str]


class ProofRecord(TypedDict, total=False):
    """An agent's proof of its ranks' binding: `binding/NODE.proof.json`."""

    node: str
    ranks: list[RankProofFields]


class TorchRecord(TypedDict, total=False):
    """A build of PyTorch; what is unknown is None."""

    version: str | None
    cuda: str | None  # that it was built for
    rocm: str | None
    cudnn: str | None
    nccl: str | None
    mkl: bool | None
    onednn: bool | None


class VectorRecord(TypedDict):
    """Vector instructions of a CPU, by PyTorch's names: DEFAULT, AVX2, AVX512."""

    cpu: str
    limits: dict[str, str]  # variables that allow less, with their values


class SoftwareRecord(TypedDict, total=False):
    """The software of an attempt's ranks: `software.json`."""

    file: str  # path of the file, set by its reader
    node: str
    python: str | None
    python_version: str | None
    packages: dict[str, str] | None
    modules: list[str]
    files: dict[str, str]  # SHA-256 of those that the command names, by path
    nvidia_driver: str
    cuda: str  # the newest that the driver supports
    torch: TorchRecord | None
    vectors: VectorRecord | None
    has_gpus: bool  # the rank
