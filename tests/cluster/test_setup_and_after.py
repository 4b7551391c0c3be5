"""A job's own shell lines, and jobs that wait for others, on a real Slurm."""

from __future__ import annotations

from tests.cluster.hpml_on_slurm import Desk, eventually

SMALL = {"time": "5:00", "memory": "50M"}


def test_setup_reaches_ranks_on_all_nodes_or_ends_the_job(desk: Desk) -> None:
    """Ranks get exports, limits and directory; a failing line is reported, staged data removed."""
    data = desk.directory / "data"
    data.mkdir()
    (data / "word").write_text("hello\n")
    more = {
        "command": ["bash", "-c", 'echo "rank $RANK: $WORD $(ulimit -n) $PWD"'],
        "stage": [{"name": "words", "source": str(data), "target": "shm"}],
        "resources": {**SMALL, "nodes": 2},
    }
    lines = "export WORD=$(echo it)\nulimit -n 321\ntrap 'echo mine' EXIT\ncd data\n"
    done = desk.hpml("run", desk.job("good", environment={"setup": lines}, **more))
    for rank in range(2):
        assert f"rank {rank}: it 321 {data}\n" in done.stdout
    lines = "true\nsource ./none.sh\n"
    done = desk.hpml("run", desk.job("bad", environment={"setup": lines}, **more), code=6)
    assert "hpml: environment.setup, line 2: exited with 1: source ./none.sh\n" in done.stdout
    assert "reason     environment.setup, line 2, exited with 1\n" in done.stdout
    (state,) = desk.json("status", "last")
    assert (state["state"], state["exit_code"]) == ("FAILED", 1)
    eventually(lambda: not desk.staged())


def test_jobs_wait_for_other_runs(desk: Desk) -> None:
    """Each starts when its runs ended as wanted; one that never can is cancelled with a reason."""
    gate = desk.directory / "gate"
    until = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit "
    ends = (["bash", "-c", f"{until} {status}"] for status in (0, 3))
    good = desk.submit("good", array="0-1", command=next(ends), resources=SMALL)["id"]
    bad = desk.submit("bad", command=next(ends), resources=SMALL)["id"]
    wanted = {
        "all": ([f"{good}", f"any:{good}.1", f"notok:{bad}"], "COMPLETED"),
        "never": ([bad], "CANCELLED"),
        "unlike": ([f"notok:{good}"], "CANCELLED"),
    }
    for name, (after, _) in wanted.items():
        job = desk.job(name, command=["true"], after=after, resources=SMALL)
        assert "--dependency" not in desk.hpml("render", job).stdout
        desk.hpml("submit", job)
    chain = desk.job("chain", command=["true"], resources=SMALL)
    desk.hpml("submit", chain, "--after", "any:never-")
    (state,) = desk.json("status", "never-")
    assert (state["state"], state["reason"]) == ("PENDING", f"waits for {bad} (ok)")
    gate.touch()
    for name, (_, end) in [*wanted.items(), ("chain", ([], "COMPLETED"))]:
        desk.hpml("wait", f"{name}-", code=0 if end == "COMPLETED" else 6)
        (state,) = desk.json("status", f"{name}-")
        assert state["state"] == end, state
    (state,) = desk.json("status", "never-")
    assert state["reason"] == f"did not start: it waited for {bad} (ok), which ended otherwise"
    refused = desk.hpml("submit", chain, "--after", bad, code=2)
    assert f"{bad} ended FAILED, and the job should start only after it completed" in refused.stderr
