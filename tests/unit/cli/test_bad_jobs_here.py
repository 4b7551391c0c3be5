"""Jobs whose files are in order and that cannot run here: refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": None, "script": "nowhere.py"}, "script: "),
        ({"workdir": "nowhere"}, "workdir: "),
        ({"environment": {"venv": "nowhere"}}, "environment.venv: "),
        ({"environment": {"conda": "./nowhere"}}, "environment.conda: "),
        ({"stage": [{"name": "d", "source": "nowhere"}]}, "stage.0.source: "),
        ({"resources": {"nodes": 2}}, "resources.nodes"),
        ({"resources": {"gpus": 64}}, "resources.gpus"),
        ({"resources": {"ranks_per_node": 9000, "cpus_per_rank": 9}}, "resources.cpus_per_rank: "),
        ({"resources": {"memory": "900T"}}, "resources.memory"),
        (
            {"environment": {"container": {"engine": "apptainer", "image": "nowhere.sif"}}},
            "environment.container.image: ",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_a_job_that_cannot_run_here_is_refused(
    shell: Shell, hpml: Hpml, fields: dict[str, Any], words: str
) -> None:
    """One error that names the field, exit status 2, no record; `check` says the same."""
    given = {name: value for name, value in fields.items() if value is not None}
    job = shell.job("cannot", **given)
    if fields.get("command", "") is None:
        text = (shell.root / "cannot.yaml").read_text("utf-8")
        text = text.replace('"command": ["bash", "-c", "echo hi"], ', "")
        (shell.root / "cannot.yaml").write_text(text, "utf-8")
    result = hpml("submit", job, "--local")
    assert result.code == 2, result.err
    assert words in result.err
    assert result.err.count("hpml: error:") == 1
    assert "Traceback" not in result.err
    assert not list(shell.records.glob("submissions/cannot*"))
    checked = hpml("check", job, "--local", "--json")
    assert checked.code == 2
    errors = [one["field"] for one in checked.json()["findings"] if one["level"] == "error"]
    assert any(words.rstrip(": ") in field for field in errors)


def test_no_check_submits_all_the_same(shell: Shell, hpml: Hpml) -> None:
    """Who knows better is not kept from it: the job fails, and its record says why."""
    job = shell.job("known", environment={"venv": "nowhere"})
    assert hpml("submit", job, "--local").code == 2
    result = hpml("run", job, "--local", "--no-check")
    assert result.code == 6
    assert "cannot activate the virtual environment" in result.out + result.err
