"""`hpml report RUN --try` on a real Slurm: both jobs run in turn, and the answer compares them."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.cluster.hpml_on_slurm import PYTHON, ROOT, Desk


@pytest.mark.slow
def test_a_change_is_tried(desk: Desk) -> None:
    """The data of a slow server are staged, for an ordinary user, by runs of some seconds."""
    for path in ("tests/trialtraining.py", "training_jobs/hpml_channel.py"):
        shutil.copy(ROOT / path, desk.directory)
    server = desk.directory / "server"
    server.mkdir()
    for number in range(20):
        (server / f"{number:02}").write_bytes(os.urandom(20_000))
    args = ["--data=server", "--slow=server", "--open-seconds=0.02", "--samples=400"]
    resources = {"time": "5:00", "memory": "200M"}
    desk.run("images", command=[PYTHON, "trialtraining.py"], args=args, resources=resources)

    (finding,) = desk.json("report", "last")["findings"]
    assert finding["kind"] == "waits-for-data"
    (entry,) = finding["changes"][0]["value"]
    assert entry == {"name": "data", "source": str(server), "target": "shm"}
    tried = desk.hpml("report", "last", "--try", "--repeats", "2", "--minutes", "0.03", "--yes")

    assert "try      4 runs in turn: 2 of the job and 2 of the changed one" in tried.stderr
    assert "The changed job was " in tried.stdout
    assert " times as fast, but 2 pairs are not enough to exclude noise" in tried.stdout
    runs = desk.json("sweep", "report", "last")["attempts"]
    assert [one["row"]["state"] for one in runs] == ["COMPLETED"] * 4
    assert len({one["row"]["run"] for one in runs}) == 4
    ids = ",".join(one["row"]["job_id"] for one in runs)
    jobs = desk.slurm("sacct", "--noheader", "-X", f"--jobs={ids}", "--format=State%20,User%20")
    assert [line.split()[0] for line in jobs.splitlines()] == ["COMPLETED"] * 4
    assert "root" not in jobs
    assert not desk.staged()
