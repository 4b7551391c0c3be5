"""A real training under a real agent, seen by the collector of a whole node and by a job's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import uuid
from pathlib import Path

import pytest
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.training.collector import make

from hpml_orchestrator.node.agent import Agent
from hpml_orchestrator.node.channel import attempt_channel
from hpml_orchestrator.node.environment import AgentOptions
from hpml_orchestrator.records.job import Job
from tests.patience import eventually
from tests.unit.exporters.collectors.reading import Series, context, post, sampled
from tests.unit.node.conftest import Node
from tests.unit.training_runs import JOBS, LIMIT_SECONDS, TRAINS, finish, result_of, start

pytestmark = TRAINS

RANKS = 2
BATCH = 11
SLEPT = 0.05  # seconds per image
# What all others sleep: a training that is over within a second is heard of once, and has no means.
ALWAYS = 0.002
PER_BATCH = BATCH * SLEPT
# The unchanged training, with slow data for one rank.
SLOW = f"""
import os, sys, time
sys.path.insert(0, {str(JOBS)!r})
import ddp_images
import images_data
which = sys.argv.pop()
quick = images_data.Images.__getitem__
def slow(self, index):
    time.sleep({SLEPT} if os.environ["RANK"] == which else {ALWAYS})
    return quick(self, index)
images_data.Images.__getitem__ = slow
ddp_images.main()
"""
Figures = dict[Series, float]


def trained(tmp_path: Path, *command: object) -> list[Figures]:
    """What the collector of a whole node shows from time to time of two ranks, and at the end."""
    run = Path("/tmp") / f"hpml-{uuid.uuid4().hex[:12]}"
    run.mkdir()
    told = context(run=run, cluster="c")
    collector = make(told)
    node = Node(tmp_path)
    status, attempt, _ = node.claim("1")
    assert status == 0
    attempt = attempt.strip()
    name = attempt_channel(node.environment("1"), attempt)
    agent = node.start("agent", *node.places, HPML_EXPORTER_SOCKET=str(run / "exporter.sock"))
    series: list[Figures] = []
    try:
        post(told.jobs, {"1": (os.getuid(), [agent.pid])})
        eventually((Path(attempt) / "nodes" / "n1.ready.json").exists)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        training = start([*launcher, *command], HPML_CHANNEL=name)

        def over() -> bool:
            series.append(sampled(collector))
            return training.poll() is not None

        eventually(over, "the end of the training", LIMIT_SECONDS, pause=0.2)
        done = finish(training)
        assert done.returncode == 0, done.stderr
    finally:
        (Path(attempt) / "over").touch()
        agent.send_signal(signal.SIGUSR1)
        agent.communicate(timeout=120)
        series += [sampled(collector) for _ in range(5)]  # one reads 128 messages, a second's each
        collector.close()
        shutil.rmtree(run)
    return series


@pytest.mark.parametrize(("slow", "epochs"), [("1", 3), ("none", 20)])
def test_a_training_of_two_ranks(tmp_path: Path, few: Path, slow: str, epochs: int) -> None:
    """Its figures are the run's own at its end, and the rank that holds the other up is known.

    Its steps last as long as the other's, which waits for it: only its own wait for data differs.
    The bounds are half of its sleep per batch, far more than any wait for a CPU.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    options = ["--data", few, "--epochs", epochs, "--batch-size", BATCH, "--workers", 0]
    more = ["--warm-up-steps", 1, "--eval-every", epochs, "--output", tmp_path, slow]
    series = trained(tmp_path, tmp_path / "slow.py", *options, *more)[-1]
    result = result_of(tmp_path)
    assert series["hpml_train_ranks", "c", "1"] == result["world_size"] == RANKS
    assert series["hpml_train_samples_total", "c", "1"] == result["train_images"] * epochs
    assert series["hpml_train_accuracy_ratio", "c", "1"] == result["validation_accuracy"]
    assert isinstance(series["hpml_train_loss", "c", "1"], float)
    steps = series["hpml_train_steps_total", "c", "1"]
    durations = "hpml_train_step_duration_seconds"
    assert (
        series[f"{durations}_count", "c", "1"]
        == series[f"{durations}_bucket", "c", "1", "60.0"]
        == steps
    )
    taken = result["steady_seconds"] * RANKS  # of rank 0; that of both is about twice as much
    assert series[f"{durations}_sum", "c", "1"] == pytest.approx(taken, rel=0.5)

    def figure(name: str, rank: str) -> float:
        value = series[f"hpml_train_rank_{name}_seconds", "c", "1", rank]
        assert isinstance(value, float)
        return value

    shortest, longest = (figure("data_wait", rank) for rank in ("shortest", "longest"))
    fastest, slowest = (figure("step_duration", rank) for rank in ("fastest", "slowest"))
    assert shortest < PER_BATCH / 2
    assert slowest - fastest < PER_BATCH / 2, "their steps do not differ"
    ranks = [key[3] for key in series if key[0] == "hpml_train_longest_data_wait_info"]
    if slow == "none":
        assert longest < PER_BATCH / 2
        assert len(ranks) == 1
    else:
        assert longest >= PER_BATCH
        assert fastest >= PER_BATCH / 2, "both are held up"
        assert ranks == [slow]


def test_the_agent_hands_over_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the exporter of the job itself: the last counters are there after the agent's end."""
    node = Node(tmp_path)
    status, attempt, _ = node.claim("1")
    assert status == 0
    for key, value in node.environment("1", HPML_EXPORTER_SOCKET="").items():
        monkeypatch.setenv(key, value)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    collector = make(context(cluster="c", job=JobFacts("1"), feed_fd=theirs.fileno()))
    agent = Agent(AgentOptions(Path(attempt.strip()), Job("probe")), node="n1")
    agent._feed.add_socket(ours)
    agent._feed.take(0, 11, {"samples_total": 32, "steps_total": 4})
    (Path(attempt.strip()) / "over").touch()
    assert agent.run() == 0
    assert sampled(collector)["hpml_train_samples_total", "c", "1"] == 32
    collector.close()
    theirs.close()
