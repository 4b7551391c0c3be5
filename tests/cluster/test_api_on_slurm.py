"""The Python API on a real Slurm, used by an ordinary user."""

from __future__ import annotations

import json

from tests.cluster.hpml_on_slurm import PYTHON, Desk

SCRIPT = """\
import json
from hpml_orchestrator import JobFailedError, list_runs, make_job, run, submit

fields = {"launcher": "srun", "resources": {"nodes": 2, "memory": "100M", "time": "5m"}}
text = 'echo "$SLURM_PROCID"; echo "{\\\\"loss\\\\": 2}" > "$HPML_RUN_DIR/result.json"'
done = submit(make_job(name="api", command=["bash", "-c", text], **fields))
before = done.state()
after = done.wait(timeout=200)
error = ""
try:
    run(make_job(name="bad", command=["false"], **fields), timeout=200)
except JobFailedError as failure:
    error = str(failure)
slow = submit(make_job(name="slow", command=["sleep", "600"], **fields))
cancelled = slow.cancel()
print(json.dumps({
    "id": done.id,
    "states": [before, after, slow.wait(200, must_complete=False)],
    "ranks": sorted(done.logs().split()[-2:]),
    "results": done.results(),
    "info": done.info(),
    "error": error,
    "runs": [one.id for one in list_runs()],
}))
"""


def test_a_script_submits_waits_and_reads(desk: Desk) -> None:
    """Its jobs are jobs of Slurm, each submitted once, and runs like those of the command."""
    (desk.directory / "script.py").write_text(SCRIPT)
    answer = json.loads(desk.call(PYTHON, "script.py").stdout.splitlines()[-1])
    assert answer["states"][0] in {"PENDING", "RUNNING", "CONFIGURING"}
    assert answer["states"][1:] == ["COMPLETED", "CANCELLED"]
    assert answer["ranks"] == ["0", "1"]
    assert answer["results"] == {"loss": 2}
    assert answer["info"]["backend"] == "slurm"
    assert "ended FAILED, exit code 1" in answer["error"]
    assert answer["runs"] == [row["id"] for row in desk.json("list")]
    submission = desk.records / "submissions" / answer["id"]
    assert desk.jobs_of(submission) == [answer["info"]["job_id"]]
