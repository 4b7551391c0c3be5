"""Pages about a run: what the training reported, and TensorBoard's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.runs.reporting.summary import read_links, summarise
from hpml_orchestrator.runs.reporting.text import summary_lines
from hpml_orchestrator.runs.reporting.timeline import link_of

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World

WANDB = "https://wandb.ai/ada/fit/runs/1"


@pytest.fixture
def submitted(world: World) -> Submission:
    """A run that Slurm has accepted."""
    return world.submit()


@pytest.mark.parametrize(
    ("data", "link"),
    [
        ({"name": "W&B", "url": WANDB}, ("W&B", WANDB)),
        ({"url": "http://mlflow:5000/#/runs/1"}, ("link", "http://mlflow:5000/#/runs/1")),
        ({"name": "W&B", "url": None}, None),  # as run.url is in W&B's offline mode
        ({"url": "file:///etc/passwd"}, None),
        ({"url": "javascript:alert(1)"}, None),
        ({"url": "https://a b"}, None),
        ({}, None),
    ],
)
def test_only_web_addresses_are_links(data: dict[str, Any], link: tuple[str, str] | None) -> None:
    """Anything else that a program reports is passed over."""
    assert link_of(data) == link


def test_links_that_a_training_reports(world: World, submitted: Submission) -> None:
    """Of two with the same name the last counts; `hpml show` prints each."""
    attempt = world.starts(submitted, "1")
    world.event(attempt, "link", 0, name="W&B", url="https://wandb.ai/old")
    world.event(attempt, "link", 0, name="W&B", url=WANDB)
    world.event(attempt, "link", 1, name="MLflow", url="http://m/2")
    state = world.state(submitted)
    summary = summarise(state)
    assert read_links(state, summary) == {"W&B": WANDB, "MLflow": "http://m/2"}
    lines = summary_lines(state, summary)
    place = lines.index(("links", f"W&B: {WANDB}"))
    assert lines[place + 1] == ("", "MLflow: http://m/2")


def test_the_directory_of_tensorboard(world: World, submitted: Submission) -> None:
    """The one above all of its files; those of checkpoints and far below are not searched."""
    world.starts(submitted, "1")
    state = world.state(submitted)
    run = state.run.directory
    for place in ("checkpoints", "a/b/c/d/e"):
        (run / place).mkdir(parents=True)
        (run / place / "events.out.tfevents.1.n1.0").touch()
    assert read_links(state, summarise(state)) == {}
    for place in ("logs/train", "logs/test"):
        (run / place).mkdir(parents=True)
        (run / place / "events.out.tfevents.1.n1.0").touch()
    assert read_links(state, summarise(state)) == {"TensorBoard": str(run / "logs")}
