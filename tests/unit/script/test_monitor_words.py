"""What the script tells the agents of monitoring is what they read."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from hpml_orchestrator.node.arguments import MonitorWish, parse_arguments
from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.spec import Job

HERE = Capabilities(interpreter="/opt/hpml/bin/python3.11")


def agent_words(**fields: Any) -> list[str]:
    """The words that the script of a job starts its agents with."""
    job = Job.model_validate({"name": "a", "command": ["true"], **fields})
    script = render(job, HERE)
    call = re.search(r"agent \"\$hpml_attempt\" ((?:.|\n)*?) &$", script, re.MULTILINE)
    assert call is not None
    return shlex.split(call[1].replace("\\\n", " "))


@pytest.mark.parametrize(
    ("monitor", "wish"),
    [
        (True, MonitorWish("127.0.0.1:0")),
        (
            {
                "enabled": True,
                "listen": "[::]:9445",
                "interval": 5,
                "web_config": "/etc/it's $HOME.yml",
                "targets": "/a b/*",
            },
            MonitorWish("[::]:9445", 5, "/etc/it's $HOME.yml", "/a b/*"),
        ),
    ],
)
def test_the_agent_reads_what_the_job_says(monitor: Any, wish: MonitorWish) -> None:
    """Letter by letter, whatever a shell would make of it, and beside data to stage."""
    stage = [{"name": "d", "source": "/data", "target": "/scratch"}]
    asked = parse_arguments(["/attempt", *agent_words(monitor=monitor, stage=stage)])
    assert asked.monitor == wish
    assert [one.request.name for one in asked.entries] == ["d"]
    assert asked.wish is not None


@pytest.mark.parametrize("monitor", [False, {"targets": "/t"}, {"enabled": False, "interval": 9}])
def test_without_a_monitor_the_script_has_no_word_of_it(monitor: Any) -> None:
    """To the byte that of a job that says nothing."""
    assert agent_words(monitor=monitor) == agent_words()
    assert parse_arguments(["/attempt", *agent_words()]).monitor is None
