"""The Slurm exporter's metrics of a real cluster, against squeue, sinfo, scontrol and sacct."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest
from hpml_exporters.core.collector import StaleError
from hpml_exporters.slurm.collector import SlurmCollector
from hpml_exporters.slurm.options import SlurmOptions

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import HPML, Desk, eventually

BATCH = ("sbatch", "--parsable", "--output=/dev/null")


def series(collector: SlurmCollector, now: float = 0.0) -> dict[str, Counter[tuple[str, ...]]]:
    """One refresh: values by name and by the values of the labels, in order of their names."""
    found: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    try:
        families = collector.sample(now)
    except StaleError as error:
        families = error.families
    for family in families:
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found[sample.name][labels] += int(sample.value)
    return found


@pytest.fixture
def collector(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCollector:
    """The collector of the session's cluster, which asks as root."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.slurm_conf))
    return SlurmOptions(source="commands").collector()


def test_jobs_and_nodes_of_a_cluster(
    slurm_cluster: SlurmCluster, collector: SlurmCollector, tmp_path: Path
) -> None:
    """Running, held, dependent, delayed, an array, a drained node: as squeue and sinfo count."""

    def submit(*options: str, wrap: str = "true") -> str:
        return slurm_cluster.run(*BATCH, *options, f"--wrap={wrap}", cwd=tmp_path).stdout.strip()

    running = submit("--gres=gpu:1", wrap="sleep 600")
    failed = submit(wrap="exit 3")
    jobs = [running, submit("--hold"), submit(f"--dependency=afterok:{running}")]
    jobs += [submit("--begin=now+1hour"), submit("--hold", "--array=0-9:3%2")]
    try:
        state = ("squeue", "--noheader", "--states=all", "--format=%T", "--jobs")
        eventually(lambda: "RUNNING" in slurm_cluster.run(*state, running).stdout)
        eventually(lambda: "FAILED" in slurm_cluster.run(*state, failed).stdout)
        slurm_cluster.run("scontrol", "update", "node=node2", "state=drain", "reason=a b")

        def agree() -> bool:
            shown = series(collector)
            rows = slurm_cluster.run("squeue", "--array", "--noheader", "--format=%P %q %T").stdout
            states = Counter(tuple(row.lower().split()) for row in rows.splitlines())
            command = ("squeue", "--array", "--noheader", "--states=PENDING", "--format=%P %r")
            reasons = Counter(
                tuple(row.split()) for row in slurm_cluster.run(*command).stdout.splitlines()
            )
            same = shown["hpml_slurm_jobs"] == states
            return same and shown["hpml_slurm_jobs_pending"] == reasons

        eventually(agree, 40)
        shown = series(collector)
        nodes = json.loads(slurm_cluster.run("sinfo", "--json").stdout)["nodes"]
        assert shown["hpml_slurm_cpus"]["allocated",] == sum(node["alloc_cpus"] for node in nodes)
        assert shown["hpml_slurm_gpus"].total() == shown["hpml_slurm_node_gpus"].total() == 4
        assert shown["hpml_slurm_gpus"]["allocated", "a100"] == 1
        assert "a b" in {labels[1] for labels in shown["hpml_slurm_node_reason_info"]}
    finally:
        slurm_cluster.run("scontrol", "update", "node=node2", "state=resume", check=False)
        slurm_cluster.run("scancel", *jobs)


def test_how_jobs_end(desk: Desk, collector: SlurmCollector) -> None:
    """Ends and waits of jobs that end in every way, as sacct lists them."""

    def submit(*options: str, wrap: str = "sleep 600") -> str:
        return desk.call(*BATCH, *options, f"--wrap={wrap}").stdout.strip()

    def has_run(job: str) -> bool:
        command = ("squeue", "--noheader", "--format=%T %M", "--jobs", job)
        return bool(re.match(r"RUNNING +0:\d*[1-9]", desk.slurm(*command)))

    # Jobs of other tests that are being cancelled must not end after the first look.
    ending = ("squeue", "--noheader", "--states=RUNNING,COMPLETING")
    eventually(lambda: not desk.cluster.run(*ending).stdout)
    series(collector)
    jobs = {
        "failed": submit(wrap="exit 3"),
        "array": submit("--array=0-2", wrap="true"),
        "late": submit("--nodelist=node1"),
        "lost": submit("--no-requeue", "--nodelist=node2"),
        "stubborn": submit("--nodelist=node1", wrap="trap '' TERM; while :; do sleep 0.1; done"),
        "withdrawn": submit("--nodes=2", "--exclusive"),
    }
    for job in (jobs["late"], jobs["lost"], jobs["stubborn"]):
        # At least a second: for a job that never ran, Slurm reports its end as its start.
        eventually(partial(has_run, job))
    desk.slurm("scancel", jobs["withdrawn"], jobs["stubborn"])
    eventually(lambda: series(collector)["hpml_slurm_jobs"]["main", "normal", "completing"])
    end_now = ("scontrol", "update", f"job={jobs['late']}", "EndTime=now")
    # Refused once by a controller that was busy.
    eventually(lambda: desk.cluster.run(*end_now, check=False).returncode == 0)
    desk.slurm("scontrol", "update", "node=node2", "state=down", "reason=test")
    # Refused if the node has returned by itself (ReturnToService).
    desk.cluster.run("scontrol", "update", "node=node2", "state=resume", check=False)

    def agree() -> bool:
        columns = "--format=JobID,State,Partition,Eligible,Start"
        listed = desk.cluster.run(
            *("sacct", "-X", "--noheader", "--parsable2", columns, "--jobs"),
            ",".join(jobs.values()),
            env={"SLURM_TIME_FORMAT": "%s"},
        ).stdout
        rows = [line.split("|") for line in listed.splitlines()]
        ends = Counter((partition, state.split()[0].lower()) for _, state, partition, *_ in rows)
        shown = series(collector)
        if shown["hpml_slurm_jobs_ended_total"] != ends:
            return False
        started = [tuple(map(int, row[3:])) for row in rows if row[0] != jobs["withdrawn"]]
        waits = [start - eligible for eligible, start in started]
        assert shown["hpml_slurm_job_wait_seconds_sum"]["main",] == sum(waits)
        assert shown["hpml_slurm_job_wait_seconds_count"]["main",] == len(waits)
        return True

    eventually(agree, 60)


def test_a_user_of_a_cluster_lists_its_targets(desk: Desk) -> None:
    """`hpml targets` prints all nodes with their properties in Slurm."""
    groups = json.loads(desk.hpml("targets", "--port", "9999").stdout)
    assert [group["labels"]["node"] for group in groups] == list(desk.cluster.nodes)
    assert all(group["targets"][0].endswith(":9999") for group in groups)


def test_licences_and_reservations(
    slurm_cluster: SlurmCluster, desk: Desk, collector: SlurmCollector
) -> None:
    """Licences in total and in use, and a reservation's start and end, as scontrol shows them."""
    with slurm_cluster.configured("Licenses=matlab:7"):
        words = ("reservation=maint", "starttime=now+1hour", "duration=30", "nodes=node1")
        slurm_cluster.run("scontrol", "create", *words, "users=root")
        job = desk.call(*BATCH, "--licenses=matlab:3", "--wrap=sleep 600").stdout.strip()
        try:
            state = ("squeue", "--noheader", "--format=%T", "--jobs", job)
            eventually(lambda: "RUNNING" in slurm_cluster.run(*state).stdout)
            shown = series(collector)
            times = {"SLURM_TIME_FORMAT": "%s"}
            listed = slurm_cluster.run("scontrol", "show", "reservations", env=times).stdout
        finally:
            slurm_cluster.run("scancel", job)
            slurm_cluster.run("scontrol", "delete", "reservation=maint")
    assert shown["hpml_slurm_licenses"] == {("matlab",): 7}
    assert shown["hpml_slurm_licenses_used"] == {("matlab",): 3}
    assert shown["hpml_slurm_reservation_nodes"] == {("maint", "inactive"): 1}
    for name, field in (("start", "StartTime"), ("end", "EndTime")):
        (seconds,) = re.findall(rf"{field}=(\d+)", listed)
        metric = f"hpml_slurm_reservation_{name}_timestamp_seconds"
        assert shown[metric] == {("maint",): int(seconds)}


def test_a_controller_that_stops(slurm_cluster: SlurmCluster, collector: SlurmCollector) -> None:
    """The last values stay, with their time, until the controller continues."""
    eventually(lambda: ("completing",) not in series(collector)["hpml_slurm_nodes"])
    before = series(collector)
    os.kill(slurm_cluster.pids["slurmctld"], signal.SIGSTOP)
    try:
        with pytest.raises(StaleError, match="squeue"):
            collector.sample(100.0)
        stopped = series(collector, 100.0)  # too early to ask again
    finally:
        os.kill(slurm_cluster.pids["slurmctld"], signal.SIGCONT)
    assert stopped == before
    after = series(collector, 1000.0)
    stamp = "hpml_slurm_last_refresh_timestamp_seconds"
    assert after[stamp][()] > before[stamp][()]
    assert after["hpml_slurm_nodes"] == before["hpml_slurm_nodes"]


def test_an_exporter_of_an_ordinary_user(
    slurm_cluster: SlurmCluster, desk: Desk, collector: SlurmCollector, tmp_path: Path
) -> None:
    """With PrivateData=jobs it shows that user's jobs alone, and all nodes."""
    theirs = slurm_cluster.run(*BATCH, "--hold", "--wrap=true", cwd=tmp_path).stdout.strip()
    own = desk.call(*BATCH, "--hold", "--array=0-2", "--wrap=true").stdout.strip()
    file = desk.directory / "address"
    words = ("--source", "commands", "--listen", "127.0.0.1:0", "--address-file", str(file))
    try:
        with (
            slurm_cluster.configured("PrivateData=jobs"),
            subprocess.Popen([*HPML, "export", "slurm", *words], env=desk.environment) as exporter,
        ):
            try:
                address = eventually(lambda: file.exists() and file.read_text().strip())

                def shown() -> str:
                    with urlopen(f"http://{address}/metrics") as answer:
                        text = answer.read().decode()
                    return text if "hpml_slurm_nodes{" in text else ""

                text = eventually(shown)
            finally:
                exporter.terminate()
            everyone = series(collector)["hpml_slurm_jobs_pending"]
    finally:
        slurm_cluster.run("scancel", theirs, own)
    assert everyone["main", "JobHeldUser"] == 4
    assert 'hpml_slurm_jobs_pending{partition="main",reason="JobHeldUser"} 3.0' in text
    assert re.search(r'hpml_slurm_nodes\{state="idle"\} 2\.0', text)
