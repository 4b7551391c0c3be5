"""Jobs on this machine bring data as job file and site profile say, and it goes as they end."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.unit.local_runs import Desk, kill_agent_for_good

FILES = 40
NODE = socket.gethostname().partition(".")[0]


class Stager(Desk):
    """Somebody with data, and a place to stage it to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.target = root / "target"
        self.target.mkdir()
        self.source = root / "source"
        self.source.mkdir()
        for index in range(FILES):
            (self.source / f"{index}.bin").write_bytes(os.urandom(1000))

    def start(
        self,
        verb: str,
        *command: str,
        code: int = 0,
        limit: str = "10:00",
        opens: int = 10**6,
        ranks: int = 1,
        options: tuple[str, ...] = (),
        **stage: Any,
    ) -> Any:
        """Run or submit a job at a site that allows so many opens a second; returns its record."""
        (self.root / "site.toml").write_text(f"[staging]\nopens_per_second = {opens}\n")
        file = self.job(
            name="staging",
            command=[*(command or ("true",))],
            resources={"time": limit, "ranks_per_node": ranks},
            stage=[{"name": "data", "source": "source", "target": str(self.target), **stage}],
        )
        return self.json("--site=site.toml", verb, "--local", *options, file, code=code)

    def run(self, *command: str, **more: Any) -> Any:
        """Run a job to its end."""
        return self.start("run", *command, **more)

    def sleeping(self) -> Any:
        """Submit a job that sleeps, and wait until its rank runs."""
        job = self.start("submit", "sleep", "600")
        binding = Path(job["directory"], "attempts", "0", "binding")
        eventually(lambda: list(binding.glob("*.jsonl")))
        assert len(self.staged()) == FILES
        return job

    def staged(self) -> list[Path]:
        """Return which of the data are in the target."""
        return list(self.target.rglob("*.bin"))


@pytest.fixture
def desk(tmp_path: Path) -> Stager:
    """A desk of this test alone."""
    return Stager(tmp_path)


def test_what_is_kept_is_there_for_the_next_job(desk: Stager) -> None:
    """The second job copies nothing, has the same contents, and its record has that."""
    first = desk.run(keep=True)["summary"]["stages"][0]
    assert (first["reused"], first["kept"], first["methods"]) == (0, 1, ["copy"])
    assert len(desk.staged()) == FILES
    again = desk.run("sh", "-c", "ls {stage.data}/ | wc -l", keep=True)
    second = again["summary"]["stages"][0]
    assert (second["reused"], second["kept"]) == (1, 1)
    assert second["digests"] == first["digests"] != []
    assert re.fullmatch(r"\w+_128:[0-9a-f]{32}", *first["digests"])
    assert f"\n{FILES}\n" in Path(again["output"]).read_text("utf-8")
    shown = desk.hpml("show", "last")
    assert f"data: {FILES} files, 39.1 KiB in {second['path']}, there already (" in shown
    assert "; kept for later jobs\n" in shown
    (desk.source / "0.bin").write_bytes(b"other")
    assert desk.run(keep=True)["summary"]["stages"][0]["reused"] == 0


def test_paths_of_staged_data(desk: Stager) -> None:
    """Ranks and `collect` have them; lines of setup, which run while it is copied, do not."""
    file = desk.job(
        name="paths",
        command=["sh", "-c", 'cmp "$HPML_STAGE_DATA/0.bin" {stage.data}/0.bin'],
        environment={"setup": 'echo "setup: ${HPML_STAGE_DATA-not known}"'},
        stage=[{"name": "data", "source": "source", "target": str(desk.target)}],
        collect=[{"source": "{stage.data}/0.bin", "target": "results"}],
    )
    ran = desk.json("run", "--local", file)
    assert "setup: not known\n" in Path(ran["output"]).read_text("utf-8")
    (one,) = ran["summary"]["collected"]
    assert Path(one["path"]).read_bytes() == (desk.source / "0.bin").read_bytes()


def test_the_sites_limit_holds(desk: Stager) -> None:
    """20 files a second: 40 files take over a second and a half; without a hash, no digest."""
    (stage,) = desk.run(opens=20, hash=False)["summary"]["stages"]
    assert (stage["files"], stage["digests"]) == (FILES, [])
    assert stage["seconds"] > (FILES - 8) / 20
    assert desk.staged() == []


def test_links_that_lead_out_are_refused_unless_asked_for(desk: Stager) -> None:
    """The job file decides; the check before a submission reports it, and so does the node."""
    (desk.source / "out").symlink_to("/etc/passwd")
    refused = desk.run(code=6, options=("--no-check",))
    assert "out: " in Path(refused["output"]).read_text("utf-8")
    desk.hpml("run", "--local", "job.yaml", code=2)
    assert desk.run(outside_links=True)["state"] == "COMPLETED"
    (desk.source / "gone").symlink_to("none")
    ran = desk.run("sh", "-c", "test ! -L {stage.data}/out", follow_links=True)
    assert "links that lead nowhere in the copy: 1" in Path(ran["output"]).read_text("utf-8")


def test_the_time_limit_while_data_come_leaves_nothing(desk: Stager) -> None:
    """Two files a second and four seconds: no half of the data, no rank, and the state TIMEOUT."""
    ran = desk.run("sh", "-c", "echo RANK RAN", limit="0:04", opens=2, keep=True, code=6)
    assert ran["state"] == "TIMEOUT"
    assert "RANK RAN" not in Path(ran["output"]).read_text("utf-8")
    assert desk.staged() == []


def test_auto_is_decided_at_submission(desk: Stager) -> None:
    """By this machine's memory, with the reason in the script, in --explain and in check."""
    render = ("render", "--backend", "local", "job.yaml")
    auto = {"name": "data", "source": "source", "target": "auto"}
    job = {"name": "auto", "launcher": "torchrun", "command": ["true"], "stage": [auto]}
    desk.job(**job, resources={"memory": "100M"})
    script = desk.hpml(*render)
    assert "\n# data: target auto is shm here: 1M are at most half of the " in script
    assert "\n#SBATCH --mem=101M\n" in script
    assert "auto: 1M are at most half" in desk.hpml(*render, "--explain")
    assert "note: stage.0.target: auto is shm here: 1M" in desk.hpml("check", "--local", "job.yaml")
    desk.job(**job)
    assert "target auto is local here: the job asks for no memory" in desk.hpml(*render)


def test_a_cancelled_job_takes_its_data_along(desk: Stager) -> None:
    """After `hpml cancel` the staging target is empty and the state CANCELLED."""
    job = desk.sleeping()
    desk.hpml("cancel", job["id"])
    assert desk.json("wait", job["id"], code=6)["state"] == "CANCELLED"
    assert list(desk.target.iterdir()) == []


def test_a_job_at_its_time_limit_takes_its_data_along(desk: Stager) -> None:
    """At the time limit the ranks end, the staging target is empty, and the state is TIMEOUT."""
    for limit in ("0:04", "0:20", "1:40"):  # a busy machine needs longer until the ranks begin
        ran = desk.run("sh", "-c", "ls {stage.data} | wc -l; sleep 600", limit=limit, code=6)
        if f"\n{FILES}\n" in Path(ran["output"]).read_text():
            break
    assert ran["state"] == "TIMEOUT"
    assert list(desk.target.iterdir()) == []


def test_a_failing_job_takes_its_data_along(desk: Stager) -> None:
    """A rank's exit status is the job's; its data is gone all the same."""
    ran = desk.run("sh", "-c", "ls {stage.data} >/dev/null && exit 7", code=6)
    assert (ran["state"], ran["exit_code"]) == ("FAILED", 7)
    assert list(desk.target.iterdir()) == []


def test_an_agent_that_is_killed_is_replaced(desk: Stager) -> None:
    """The next one holds the data of the ranks, removes them at the end, and `show` names it."""
    job = desk.start("submit", "sh", "-c", f"until [ -e {desk.root}/go ]; do sleep 0.1; done")
    records = Path(job["directory"], "attempts", "0")
    (marker,) = eventually(lambda: list((records / "nodes").glob("*.ready.json")))
    os.kill(int(json.loads(marker.read_text())["pid"]), 9)
    eventually(lambda: "SIGKILL" in (records / "events" / f"{NODE}.jsonl").read_text())
    assert desk.run()["state"] == "COMPLETED"  # which removes what dead jobs left
    assert len(desk.staged()) == FILES
    (desk.root / "go").touch()
    assert desk.json("wait", job["id"])["state"] == "COMPLETED"
    assert list(desk.target.iterdir()) == []
    assert f"signals    SIGKILL of the agent of {NODE} 1x, last " in desk.hpml("show", job["id"])
    output = Path(job["directory"], "output.log").read_text("utf-8")
    assert f"hpml: {NODE}: the agent was killed (status 137); the ranks continue\n" in output


def test_what_a_killed_job_left_goes_with_the_next(desk: Stager) -> None:
    """Data of a job whose agents' step was killed outright is removed when the next job stages."""
    job = desk.sleeping()
    (marker,) = Path(job["directory"], "attempts", "0", "nodes").glob("*.ready.json")
    kill_agent_for_good(int(json.loads(marker.read_text())["pid"]))
    desk.hpml("cancel", job["id"])
    desk.hpml("wait", job["id"], code=6)
    assert len(desk.staged()) == FILES
    assert desk.run()["state"] == "COMPLETED"
    assert list(desk.target.iterdir()) == []


def test_ranks_do_not_wait_for_an_agent_that_was_killed(desk: Stager) -> None:
    """Killed while it stages: no rank runs; the job fails long before its limit and prints why."""
    ranks = min(8, len(os.sched_getaffinity(0)))
    job = desk.start("submit", "sh", "-c", "echo RANK RAN", ranks=ranks, opens=2)
    partial = eventually(lambda: list(desk.target.rglob(".data.partial-*")))
    os.kill(int(partial[0].name.split("-")[1]), 9)
    done = desk.json("wait", job["id"], code=6)
    assert done["state"] == "FAILED"
    output = Path(done["output"]).read_text("utf-8")
    assert "RANK RAN" not in output
    assert "the node agents ended before all nodes were ready (0 of 1 are)" in output
    assert desk.run()["state"] == "COMPLETED"
    assert list(desk.target.iterdir()) == []


WRITES = 'mkdir "$0/out"; echo 1 >"$0/out/a"; echo 2 >"$0/best.pt"; '
ENDS = {
    "well": ("true", "10:00", 0, "COMPLETED"),
    "badly": ("exit 3", "10:00", 6, "FAILED"),
    "at its time limit": (
        """trap 'echo 3 >"$0/out/last"; exit 1' TERM; sleep 600 & wait""",
        "0:20",  # a busy machine needs seconds until the ranks write
        6,
        "TIMEOUT",
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_results_come_back_however_a_job_ends(desk: Stager, how: str) -> None:
    """Written to the job's own directory on the node, which is gone then."""
    command, limit, code, state = ENDS[how]
    results = [
        {"source": "{local.dir}/best.pt", "target": "results"},
        {"source": "{local.dir}/out", "target": "results"},
    ]
    file = desk.job(
        name="results",
        command=["bash", "-c", WRITES + command, "{local.dir}"],
        resources={"time": limit},
        collect=results,
    )
    ran = desk.json("run", "--local", file, code=code)
    assert ran["state"] == state
    model, out = ran["summary"]["collected"]
    home = desk.root / "results" / ran["id"]
    assert Path(model["path"]).parents[1] == home
    assert Path(model["path"]).read_text() == "2\n"
    names = {path.name for path in Path(out["path"]).iterdir()}
    assert names == ({"a", "last"} if state == "TIMEOUT" else {"a"})
    assert [one["files"] for one in (model, out)] == [1, len(names)]
    assert not Path(model["source"]).parent.exists()
    shown = desk.hpml("show", "last")
    assert f"collected  {{local.dir}}/best.pt: 1 file, 2 bytes in {model['path']}" in shown


@pytest.mark.parametrize(("end", "code"), [("true", 8), ("exit 3", 3)])
def test_results_that_no_node_has(desk: Stager, end: str, code: int) -> None:
    """A job that ended well fails; output and `show` name what is there instead of it."""
    file = desk.job(
        name="typo",
        command=["bash", "-c", f"touch $0/model.pt; {end}", "{local.dir}"],
        collect=[{"source": "{local.dir}/modle.pt", "target": "{run.dir}/more"}],
    )
    ran = desk.json("run", "--local", file, code=6)
    assert (ran["state"], ran["exit_code"]) == ("FAILED", code)
    assert not list((Path(ran["directory"]) / "more").iterdir()), "made for nothing"
    told = "modle.pt; next to it: model.pt\n"
    assert (told in Path(ran["output"]).read_text("utf-8")) is (code == 8)
    there = "{local.dir}/modle.pt: nothing there; next to it: model.pt"
    assert there in desk.hpml("show", "last")


def test_the_own_directory_is_listed(desk: Stager) -> None:
    """As the job's own, not as a copy that was never finished."""
    script = f"echo 1 >$0/a; {sys.executable} -m hpml_orchestrator.cli stage ls {desk.target}"
    file = desk.job(
        name="own",
        command=["bash", "-c", f"{script} | grep local.dir", "{local.dir}"],
    )
    (desk.root / "site.toml").write_text(f'[paths]\nscratch = "{desk.target}"\n')
    ran = desk.json("--site=site.toml", "run", "--local", file)
    text = Path(ran["output"]).read_text("utf-8")
    assert "local.dir\t2 bytes\t1\town\twith its job\tjob " in text


def test_results_that_cannot_be_put_away(desk: Stager) -> None:
    """Where nobody may write the job fails before its ranks; a file in the way at their end."""
    (desk.root / "file").write_text("no directory")

    def job(script: str, target: str) -> str:
        command = ["bash", "-c", script, "{local.dir}"]
        collect = [{"source": "{local.dir}/out", "target": target}]
        return desk.job(name="results", command=command, collect=collect)

    desk.hpml("run", "--local", job("touch $0/out", "file"), code=2)
    ran = desk.json("run", "--local", "--no-check", "job.yaml", code=6)
    assert "collect.0.target: results cannot be put there: " in Path(ran["output"]).read_text()
    for base in (desk.target, desk.root / "new"):  # a job has its own directory there, or none yet
        base.mkdir(exist_ok=True)
        inside = base / f"hpml-{os.getuid()}" / "results"
        desk.hpml("run", "--local", job("touch $0/out", str(inside)), code=6)
        assert "removed with the job" in desk.hpml("show", "last")
        assert not inside.exists()
    spoils = "rmdir results/*/*; rmdir results/*; echo >results/$(basename $HPML_RUN_DIR)"
    ran = desk.json("run", "--local", job(f"touch $0/out; {spoils}", "results"), code=6)
    assert (ran["state"], ran["exit_code"]) == ("FAILED", 8)
    assert "NOT collected out: " in Path(ran["output"]).read_text()
    assert "out of " in desk.hpml("show", "last")
