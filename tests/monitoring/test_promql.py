"""The questions that docs/monitoring.md asks Prometheus have the answers that it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
HELD_UP, WHO = re.findall(
    r"^```text promql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
)

# Two jobs of four ranks on two nodes: in job 7, rank 3 waits 0.4 s of each second for its data.
SERIES = {
    ("n1", "7"): (0.01, 0.02, 1),
    ("n2", "7"): (0.02, 0.4, 3),
    ("n1", "8"): (0.01, 0.05, 0),
    ("n2", "8"): (0.03, 0.04, 2),
}


def asked(promtool: Promtool, tmp_path: Path, query: str, answers: list[dict[str, Any]]) -> None:
    """Have promtool ask, and compare the answers."""
    series = []
    for (node, job), (shortest, longest, rank) in SERIES.items():
        labels = f'instance="{node}",job="hpml",jobid="{job}"'
        wait, step = "hpml_train_rank_data_wait_seconds", "hpml_train_rank_step_duration_seconds"
        for name, value in (
            (f'{wait}{{{labels},rank="shortest"}}', shortest),
            (f'{wait}{{{labels},rank="longest"}}', longest),
            (f'{step}{{{labels},rank="fastest"}}', 1.0),
            (f'{step}{{{labels},rank="slowest"}}', 1.0),
            (f'hpml_train_longest_data_wait_info{{{labels},rank="{rank}"}}', 1),
        ):
            series.append({"series": name, "values": f"{value}x3"})
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": query, "eval_time": "2m", "exp_samples": answers}],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"tests": [test]}))  # which is YAML too
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_jobs_that_wait_for_their_slowest_reader(promtool: Promtool, tmp_path: Path) -> None:
    """Job 7 alone, over both of its nodes."""
    asked(promtool, tmp_path, HELD_UP, [{"labels": '{jobid="7"}', "value": 0.39}])


def test_which_rank_that_is(promtool: Promtool, tmp_path: Path) -> None:
    """With its node and its number; of a job that nobody holds up, whoever waits longest."""
    answers = [
        {"labels": '{instance="n2",job="hpml",jobid="7",rank="3"}', "value": 0.4},
        {"labels": '{instance="n1",job="hpml",jobid="8",rank="0"}', "value": 0.05},
    ]
    asked(promtool, tmp_path, WHO, answers)
