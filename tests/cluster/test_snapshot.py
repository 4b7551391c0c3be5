"""On a real Slurm: a job that waits runs the code that it was submitted with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cluster.hpml_on_slurm import PYTHON, Desk

IDENTITY = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")


def git(top: Path, *words: str) -> None:
    """Call git in a repository."""
    # the user owns it by now, and root is who asks
    subprocess.run(
        ["git", "-c", "safe.directory=*", *IDENTITY, "-C", top, *words], check=True, timeout=120
    )


def test_the_code_of_the_submission_runs(desk: Desk, tmp_path: Path) -> None:
    """Held, edited, moved away, released: both nodes run the old code, with its uncommitted change.

    The script, and Slurm's copy of it, equal the output of `hpml render` to the byte.
    """
    top = tmp_path / "my code"
    (top / "tools").mkdir(parents=True)
    script = top / "tools" / "train.py"
    script.write_text("print('first')\n")
    git(top, "init", "--quiet")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "--message", "x")
    tried = "import os, helper\nprint('tried out', helper.WORD, os.getcwd(), flush=True)\n"
    script.write_text(tried)
    (top / "tools" / "helper.py").write_text("WORD = 'untracked'\n")
    job = desk.job(
        "held",
        script="tools/train.py",
        workdir=str(top),
        snapshot=True,
        environment={"python": PYTHON},
        resources={"nodes": 2, "time": "5:00", "extra": ["--hold"]},
    )
    rendered = desk.hpml("render", job).stdout
    submitted = desk.json("submit", job)
    submission = Path(submitted["submission"])
    held = desk.slurm("scontrol", "write", "batch_script", submitted["job_id"], "-")
    assert rendered == (submission / "job.sh").read_text() == held
    assert desk.json("status", submitted["id"])[0]["state"] == "PENDING"

    script.write_text("print('edited')\n")
    git(top, "checkout", "--quiet", "--orphan", "other")
    git(top, "rm", "--quiet", "-r", "--force", ".")
    top.rename(tmp_path / "moved")
    desk.slurm("scontrol", "release", submitted["job_id"])

    desk.hpml("wait", submitted["id"])
    said = desk.hpml("logs", submitted["id"]).stdout
    assert said.count(f"tried out untracked {submission}/code\n") == 2
    assert "edited" not in said
    assert " + changes (snapshot)\n" in desk.hpml("show", submitted["id"]).stdout


def test_a_rendered_directory_runs_by_hand(desk: Desk, tmp_path: Path) -> None:
    """`render -o` puts the code next to the script; `sbatch` in that directory submits the job.

    The job stages its data, cleans up after it and records itself there.
    """
    top = tmp_path / "code"
    top.mkdir()
    (top / "train.py").write_text("import os, sys; print('by hand', *os.listdir(sys.argv[1]))\n")
    (top / "data").mkdir()
    (top / "data" / "word").touch()
    git(top, "init", "--quiet")
    job = desk.job(
        "hand",
        script="train.py",
        workdir=str(top),
        snapshot=True,
        environment={"python": PYTHON},
        args=["{stage.d}"],
        stage=[{"name": "d", "source": str(top / "data"), "target": "shm"}],
        resources={"time": "5:00"},
    )
    desk.hpml("render", job, "-o", "by hand")
    (top / "train.py").unlink()
    out = tmp_path / "by hand"
    done = desk.call("sbatch", "--wait", "--parsable", "--output=output", "job.sh", cwd=out)
    assert (out / "output").read_text().count("by hand word\n") == 1
    ended = out / "runs" / done.stdout.strip() / "attempts" / "0" / "ended.json"
    assert json.loads(ended.read_text())["exit_code"] == 0
    assert desk.staged(done.stdout.strip()) == []
