"""Jobs on this machine bring data as job file and site profile say, and tell what came of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HPML = [sys.executable, "-m", "hpml_orchestrator.cli"]
FILES = 40


class Desk:
    """A directory with data, and a place to stage it to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "target"
        self.target.mkdir()
        self.source = root / "source"
        self.source.mkdir()
        for index in range(FILES):
            (self.source / f"{index}.bin").write_bytes(os.urandom(1000))

    def hpml(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [*HPML, *arguments],
            cwd=self.root,
            env={
                **os.environ,
                "HPML_HOME": str(self.root / "records"),
                "XDG_CONFIG_HOME": str(self.root / "config"),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    def run(
        self,
        *command: str,
        code: int = 0,
        limit: str = "10:00",
        opens: int = 0,
        options: tuple[str, ...] = (),
        **stage: Any,
    ) -> Any:
        """Run a job to its end and return its record; at a site that allows so many opens/s."""
        (self.root / "site.toml").write_text(f"[staging]\nopens_per_second = {opens or 10**6}\n")
        entry = {"name": "data", "source": "source", "target": str(self.target), **stage}
        job = {
            "name": "staging",
            "launcher": "srun",
            "command": [*(command or ("true",))],
            "resources": {"time": limit},
            "stage": [entry],
        }
        (self.root / "job.yaml").write_text(json.dumps(job))
        words = ("--site=site.toml", "run", "--local", *options, "job.yaml", "--json")
        return json.loads(self.hpml(*words, code=code))

    def staged(self) -> list[Path]:
        """What of the data lies in the target."""
        return list(self.target.rglob("*.bin"))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """An empty desk."""
    return Desk(tmp_path)


def test_what_is_kept_is_there_for_the_next_job(desk: Desk) -> None:
    """The second job copies nothing, has the same contents, and its record says so."""
    first = desk.run(keep=True)["summary"]["stages"][0]
    assert (first["reused"], first["kept"], first["methods"]) == (0, 1, ["copy"])
    assert len(desk.staged()) == FILES
    again = desk.run("sh", "-c", "ls {stage.data}/ | wc -l", keep=True)
    second = again["summary"]["stages"][0]
    assert (second["reused"], second["kept"]) == (1, 1)
    assert second["digests"] == first["digests"] != []
    assert f"\n{FILES}\n" in Path(again["output"]).read_text("utf-8")
    shown = desk.hpml("show", "last")
    assert f"data: {FILES} files, 39.1 KiB in {second['path']}, there already (" in shown
    assert "; kept for later jobs\n" in shown
    (desk.source / "0.bin").write_bytes(b"other")
    assert desk.run(keep=True)["summary"]["stages"][0]["reused"] == 0


def test_whether_staging_pays_is_told(desk: Desk) -> None:
    """With both times measured, beside what the job file says of epochs; in words and figures."""
    (stage,) = desk.run(epochs=1_000_000)["summary"]["stages"]
    payback = stage["payback"]
    assert min(payback["stage_seconds"], payback["remote_seconds"], payback["local_seconds"]) > 0
    shown = desk.hpml("show", "last")
    assert "data: staging " in shown
    assert "from the node out of the page cache, staging took" in shown
    assert stage["epochs"] == 1_000_000
    assert desk.staged() == []


def test_without_a_hash_there_is_no_digest(desk: Desk) -> None:
    """And with one there is."""
    assert desk.run(hash=False)["summary"]["stages"][0]["digests"] == []
    (digest,) = desk.run()["summary"]["stages"][0]["digests"]
    assert re.fullmatch(r"\w+_128:[0-9a-f]{32}", digest)


def test_links_that_lead_out_are_refused_unless_asked_for(desk: Desk) -> None:
    """The job file decides; the check before a submission says it, and so does the node."""
    (desk.source / "out").symlink_to("/etc/passwd")
    refused = desk.run(code=6, options=("--no-check",))
    assert "out: " in Path(refused["output"]).read_text("utf-8")
    desk.hpml("run", "--local", "job.yaml", code=2)
    assert desk.run(outside_links=True)["state"] == "COMPLETED"


def test_the_sites_limit_holds(desk: Desk) -> None:
    """20 files a second: 40 files take over a second and a half."""
    (stage,) = desk.run(opens=20)["summary"]["stages"]
    assert stage["files"] == FILES
    assert stage["seconds"] > (FILES - 8) / 20


def test_the_time_limit_while_data_come_leaves_nothing(desk: Desk) -> None:
    """Two files a second and four seconds: no half of the data, no rank, and the state TIMEOUT."""
    ran = desk.run("sh", "-c", "echo RANK RAN", limit="0:04", opens=2, keep=True, code=6)
    assert ran["state"] == "TIMEOUT"
    assert "RANK RAN" not in Path(ran["output"]).read_text("utf-8")
    assert desk.staged() == []
    assert desk.run()["state"] == "COMPLETED"
    assert desk.staged() == []


def test_auto_is_decided_at_submission(desk: Desk) -> None:
    """By this machine's memory, with the reason in the script, in --explain and in check."""
    job = {
        "name": "auto",
        "command": ["true"],
        "resources": {"memory": "100M"},
        "stage": [{"name": "data", "source": "source", "target": "auto"}],
    }
    (desk.root / "job.yaml").write_text(json.dumps(job))
    script = desk.hpml("render", "--backend", "local", "job.yaml")
    assert "\n# data: target auto is shm here: 1M are at most half of the " in script
    assert "\n#SBATCH --mem=101M\n" in script
    explained = desk.hpml("render", "--backend", "local", "job.yaml", "--explain")
    assert "auto: 1M are at most half" in explained
    assert "note: stage.0.target: auto is shm here: 1M" in desk.hpml("check", "--local", "job.yaml")
    (desk.root / "job.yaml").write_text(json.dumps({**job, "resources": {}}))
    script = desk.hpml("render", "--backend", "local", "job.yaml")
    assert "target auto is local here: the job asks for no memory" in script
