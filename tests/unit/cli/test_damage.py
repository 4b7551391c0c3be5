"""Damaged records: `hpml report` and `hpml show` name the file, and print nothing wrong."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpml_orchestrator.records.files import write_json
from tests.unit.cli.support import Hpml, Result, Shell
from tests.unit.cli.test_report import CHANNEL, TRAINING

pytestmark = pytest.mark.xdist_group("local runs")

OF_RUN = (
    "submit.json runs.tsv job.json final.json sbatch.started ended.json head.json started/job_id "
    "events/NODE.jsonl events/batch.jsonl binding/NODE.jsonl binding/NODE.proof.json plan/NODE.txt "
    "nodes/NODE.monitor.json nodes/NODE.collected.json nodes/NODE.topology.json next.json run.json"
).split()
OF_ARRAY = "submit.json runs.tsv job.json final.json".split()
MONITORED = {"seconds": 60.0, "updated": 1.5e9, "job": {"mean_cpus": 1.0, "cpus": 2.0}, "gpus": []}
COLLECTED = {
    "entries": [
        {"source": "/tmp/a", "node": "NODE", "path": "/b", "files": 1, "bytes": 2, "problem": ""}
    ]
}
NEXT = {"how": "requeue", "job_id": "7", "time": 1.0, "exclude": []}
OTHER = ("[]", "{}", "null", "3", '"x"', '{"schema_version": 99}', '[{"a": 1}]')


@pytest.fixture(scope="module")
def run(shell: Shell) -> str:
    """The id of a run of two ranks that is over, with every record that an attempt can have."""
    (shell.root / "train.py").write_text(TRAINING)
    command = ["python3", str(shell.root / "train.py"), str(CHANNEL)]
    job = shell.job("waits", command=command, resources={"ranks_per_node": 2})
    made = shell.hpml("run", "--local", "--json", job).json()
    attempt = Path(made["directory"]) / "attempts" / "0"
    (path,) = (attempt / "nodes").glob("*.topology.json")
    node = path.name.removesuffix(".topology.json")
    write_json(attempt / "nodes" / f"{node}.monitor.json", MONITORED)
    write_json(attempt / "nodes" / f"{node}.collected.json", COLLECTED)
    write_json(attempt / "next.json", NEXT)
    return str(made["id"])


@pytest.fixture(scope="module")
def array(shell: Shell) -> str:
    """The id of a job array of two tasks that are over."""
    return str(shell.hpml("run", "--local", "--json", shell.job("tasks", array="0-1")).json()["id"])


def path_of(records: Path, sid: str, name: str) -> Path:
    """The file of a run's record with that name."""
    submission, run = records / "submissions" / sid, records / "runs" / sid
    for directory in (submission, run, run / "attempts" / "0"):
        found = [*directory.glob(name.replace("NODE", "[!b]*"))]
        if name == "binding/NODE.jsonl":
            found = [path for path in found if not path.name.startswith("batch")]
        if found:
            return found[0]
    raise AssertionError(f"the run has no {name}")


def mutations(whole: bytes, seed: str) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield ways to damage a file, with names; each file gets others, by a fixed seed."""
    chance = random.Random(seed)
    lines = whole.splitlines(keepends=True)

    def put(content: bytes) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(content)

    # a cut between two lines cannot be seen
    inside = [place for place in range(1, len(whole)) if whole[place - 1 : place] != b"\n"]
    for place in chance.sample(inside, min(2, len(inside))):
        yield f"cut off after {place} bytes", put(whole[:place])
    place = chance.randrange(len(lines)) if lines else 0
    for junk in (b"\0" * 9 + b"\n", bytes(chance.randrange(1, 256) for _ in range(40)) + b"\n"):
        mixed = b"".join([*lines[:place], junk, *lines[place:]])
        yield f"junk {junk[:9]!r} as line {place}", put(mixed)
    for other in chance.sample(OTHER, 2):
        yield f"{other[:30]} instead", put(other.encode() + b"\n")
    yield "empty", put(b"")

    def become_directory(path: Path) -> None:
        path.unlink()
        path.mkdir()

    yield "a directory", become_directory


def is_right(result: Result, whole: Result, name: str) -> bool:
    """Whether a command printed what it prints of whole records, or named the damage."""
    printed = f"{result.out}\n{result.err}"
    assert "Traceback" not in printed
    assert not re.search(r"\b\w*(Error|Exception)\(", printed), printed
    if result.code == whole.code == 0 and result.out == whole.out:
        return True
    assert result.code in (0, 7), printed
    words = "damaged|cannot|is not JSON|is not a record|holds no|schema_version"
    return name in result.err and bool(re.search(words, result.err))


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("run", name) for name in OF_RUN), *(("array", name) for name in OF_ARRAY)],
)
def test_damage_is_named(
    hpml: Hpml, shell: Shell, run: str, array: str, kind: str, name: str
) -> None:
    """However a file is damaged: no traceback, and no figures of the rest as if they were whole."""
    sid = run if kind == "run" else array
    words = [("report", run), ("show", run)] if kind == "run" else []
    words = words or [("report", f"{array}.1"), ("show", array), ("show", f"{array}.0")]
    whole = {word: hpml(*word) for word in words}
    path = path_of(shell.records, sid, name)
    content = path.read_bytes()
    # `hpml show` names the node of a proof
    named = f"proof of node {path.name.partition('.')[0]}"
    for what, damage in mutations(content, f"{kind} {name}"):
        kept = shutil.copy2(path, path.with_name("kept"))
        damage(path)
        try:
            results = {word: hpml(*word) for word in words}
        finally:
            if path.is_dir():
                path.rmdir()
            shutil.move(kept, path)
        for word, result in results.items():
            is_proof = name.endswith("proof.json") and word[0] == "show"
            assert is_right(result, whole[word], named if is_proof else path.name), (what, result)
    assert {word: hpml(*word) for word in words} == whole


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("runs.tsv", ["report"]),  # `hpml show` does not need it
        ("events/NODE.jsonl", ["report", "show"]),
        ("ended.json", ["report", "show"]),
    ],
)
def test_a_file_that_may_not_be_read_is_named(
    shell: Shell, run: str, name: str, commands: list[str]
) -> None:
    """By somebody whom permissions bind; both commands end with the status of damaged records."""
    path = path_of(shell.records, run, name)
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        for command in commands:
            result = shell.bash('"$@"', command, run)
            assert result.code == 7, result
            assert path.name in result.err
            assert "Permission denied" in result.err
    finally:
        path.chmod(mode)
