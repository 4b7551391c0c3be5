"""`hpml check` and the check before a submission, by their commands, on a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import HPML, Desk, eventually

SHORT = {"time": "00:01:00"}


@pytest.fixture
def standing_still(slurm_cluster: SlurmCluster) -> Iterator[int]:
    """The controller, suspended; it always continues after the test."""
    pid = slurm_cluster.pids["slurmctld"]
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)
    slurm_cluster.run("scontrol", "ping")


def last_job_id(desk: Desk) -> int:
    """The largest id that the controller has given."""
    return max((int(job["job_id"]) for job in desk.cluster.jobs()), default=0)


def test_a_bad_job_leaves_no_trace(desk: Desk) -> None:
    """Refused with every mistake and status 2: no job, no id used, no record."""
    bad = {"partition": "mian", "gpus": "h100:3", **SHORT}
    file = desk.job("bad", command=["true"], resources=bad)
    before = last_job_id(desk)
    report = desk.json("check", file, code=2)
    fields = {finding["field"] for finding in report["findings"]}
    assert fields == {"resources.gpus", "resources.partition"}
    for command in ("submit", "run"):
        told = desk.hpml(command, file, code=2)
        assert told.stdout == ""
        assert "there is no partition mian" in told.stderr
        assert "did you mean main?" in told.stderr
        assert "no node has the type of GPU h100; nodes have up to a100:2" in told.stderr
        assert "`--no-check` submits it as it is" in told.stderr
    assert not (desk.records / "submissions").exists()
    good = desk.submit("good", command=["true"], resources=SHORT)
    assert int(good["job_id"]) == before + 1


def test_a_controller_that_stands_still_delays_little(desk: Desk, standing_still: int) -> None:
    """`check` gives up within seconds; `submit` warns, continues, and the job is submitted."""
    file = desk.job("late", command=["true"], resources=SHORT)
    began = time.monotonic()
    told = desk.hpml("check", file, code=5)
    assert time.monotonic() - began < 60
    assert "late: not checked against the cluster: scontrol gave no answer in " in told.stdout
    began = time.monotonic()
    with subprocess.Popen(
        [*HPML, "submit", str(file)],
        env=desk.environment,
        cwd=desk.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        warning = process.stderr.readline()
        assert time.monotonic() - began < 60
        os.kill(standing_still, signal.SIGCONT)
        assert warning.startswith("hpml: warning: not checked against the cluster: scontrol gave")
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.startswith("submitted late-")


def test_nodes_that_are_down_are_told_and_waited_for(desk: Desk) -> None:
    """A warning with the node's reason: the job is submitted, and waits."""
    node = desk.cluster.nodes[0]
    desk.slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=fan broke")
    try:
        told = desk.hpml("check", desk.job("two", command=["true"], resources={"nodes": 2}))
        assert "warning: resources.nodes" in told.stdout
        assert f"{node} is " in told.stdout
        assert "(fan broke)" in told.stdout
    finally:
        desk.slurm("scontrol", "update", f"nodename={node}", "state=resume")


def test_the_start_is_the_one_that_slurm_plans(desk: Desk) -> None:
    """Before and after a maintenance, on CPUs that a busy node still has, after another run."""
    file = desk.job("soon", command=["true"], resources={"time": "1:00:00", "cpus_per_rank": 2})
    busy = desk.submit("busy", command=["sleep", "600"], resources={"nodes": 2, "time": "20"})
    assert "soon: OK, main would accept this job (can start now)" in desk.hpml("check", file).stdout
    later = desk.job("later", command=["true"], after=[busy["id"]], resources=SHORT)
    assert f"(waits for {busy['id']})" in desk.hpml("check", later).stdout
    words = "StartTime=now+30minutes Duration=30 Nodes=ALL Flags=MAINT Users=root"
    desk.slurm("scontrol", "create", "reservation", "ReservationName=maint", *words.split())
    try:
        told = desk.hpml("check", file).stdout
        assert re.search(
            r"\(waits for the end of maint, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; "
            r"with at most 00:(?:29|30):00 it can start now\)",
            told,
        ), told
        waits = desk.submit("long", command=["true"], resources={"time": "1:00:00"})
        desk.slurm("scontrol", "hold", str(waits["job_id"]))
        listed = desk.hpml("list", "--name", "long").stdout
        assert "JobHeldAdmin: an administrator holds it" in listed
        desk.slurm("scontrol", "release", str(waits["job_id"]))
        eventually(lambda: "; expected start 20" in desk.hpml("list", "--name", "long").stdout)
    finally:
        desk.slurm("scontrol", "delete", "reservation", "maint")
        desk.hpml("cancel", "--all", "--yes")


def test_placeholders_of_an_array(desk: Desk) -> None:
    """Each task has the id that Slurm gave it, its own run, and the variables of setup."""
    words = ["{job.id}", "{run.id}", "{env.SLURM_ARRAY_JOB_ID}_{array.index}", "{env.MADE}"]
    made = desk.submit(
        "ids",
        command=["bash", "-c", 'printf "<%s>" "$SLURM_JOB_ID" "$@" >"$HPML_RUN_DIR/words"', "-"],
        args=words,
        array="3-4",
        environment={"setup": "MADE='a  $(id)'"},
        resources=SHORT,
    )
    desk.hpml("wait", str(made["id"]))
    for task in made["tasks"]:
        text = (desk.records / "runs" / task["run"] / "words").read_text()
        job_id = text[1:].partition(">")[0]
        expected = [job_id, job_id, task["run"], f"{made['job_id']}_{task['index']}", "a  $(id)"]
        assert text == "".join(f"<{word}>" for word in expected)
    assert len({task["run"] for task in made["tasks"]}) == 2
