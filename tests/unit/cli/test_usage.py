"""A wrong command line is answered as every other error: what, what is right, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import typer

from hpml_orchestrator.cli.main import app
from hpml_orchestrator.cli.usage import USAGE_ERROR, explained
from hpml_orchestrator.errors import HpmlError

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]

# command line, message, hint
WRONG = [
    ("sumbit x", "COMMAND: hpml has no such command (got 'sumbit')", "did you mean hpml submit?"),
    ("LIST", "COMMAND: hpml has no such command (got 'LIST')", "did you mean hpml list?"),
    ("job.yaml", "COMMAND: hpml has no such command (got 'job.yaml')", "hpml run job.yaml"),
    ("render j --jsn", "--jsn: hpml render has no such option", "did you mean --json?"),
    ("run j --loacl", "--loacl: hpml run has no such option", "did you mean --local?"),
    ("show --node", "--node: hpml show has no such option", "hpml show --help"),
    ("--recods x list", "--recods: hpml has no such option", "did you mean --records?"),
    ("list --zzz", "--zzz: hpml list has no such option", "hpml list --help"),
    (
        "list --records x",
        "--records: stands before the command: hpml --records … list",
        "hpml list --help",
    ),
    ("run", "JOB_FILE: must be given", "hpml run job.yaml"),
    ("cancel", "RUN…: must be given", "hpml cancel last"),
    ("submit", "JOB_FILE: must be given", "hpml submit job.yaml"),
    ("--records x", "COMMAND: must be given", "hpml render …"),
    ("submit --set", "--set: needs a value: --set FIELD=VALUE", "hpml submit --help"),
    ("list -n", "-n: needs a value: -n NUMBER", "hpml list --help"),
    ("show --json=x", "--json: takes no value", "--json alone will do"),
    (
        "list -n 0",
        "--number: must be a whole number, 1 or more (got '0')",
        "hpml list --help",
    ),
    (
        "logs -n many",
        "--lines: must be a whole number, 0 or more (got 'many')",
        "hpml logs --help",
    ),
    ("render a b", "arguments: hpml render takes no such word (got 'b')", "hpml render --help"),
    (
        "run j resources.nodes=3",
        "arguments: hpml run takes no such word (got 'resources.nodes=3')",
        "a field is set with --set resources.nodes=3",
    ),
    (
        "run j --backend slrum",
        "--backend: must be auto, slurm or local (got 'slrum')",
        "did you mean slurm?",
    ),
    (
        "run j --backend pbs",
        "--backend: must be auto, slurm or local (got 'pbs')",
        "auto is Slurm where sbatch is found, else this machine",
    ),
]


@pytest.mark.parametrize(("line", "message", "hint"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_command_line(hpml: Hpml, line: str, message: str, hint: str) -> None:
    """Two lines on standard error, status 2, and nothing else."""
    told = hpml(*line.split())
    assert (told.code, told.out) == (2, "")
    assert told.err == f"hpml: error: {message}\nhint: {hint}\n"


def test_near_runs_are_found(shell: Shell, hpml: Hpml) -> None:
    """A slip in `last`, or in a run's name, is answered with what was meant."""
    assert hpml("submit", shell.job("digits"), "--local").code == 0
    sid = hpml("list", "--json").json()[0]["id"]
    assert "hint: did you mean last? `hpml list`" in hpml("show", "lsat").err
    assert f"hint: did you mean {sid}?" in hpml("show", "digist").err
    told = hpml("show", "4711")
    assert (told.code, "did you mean" in told.err) == (3, False)
    assert hpml("wait", sid).code == 0


def test_commands_of_commands_are_told_as_well() -> None:
    """The errors of a nested group name the whole command."""
    outer, inner = typer.Typer(), typer.Typer()
    inner.command("list")(lambda: None)
    inner.command("eject")(lambda: None)
    outer.add_typer(inner, name="template")
    outer.command("other")(lambda: None)

    def told(*words: str) -> HpmlError:
        with pytest.raises(USAGE_ERROR) as caught:
            outer(list(words), standalone_mode=False)
        return explained(caught.value, words, typer.main.get_command(outer))

    assert told("template", "ejct").hint == "did you mean hpml template eject?"
    assert "hpml template list has no such option" in str(told("template", "list", "--x"))
    assert str(told("template", "list", "x")).startswith("arguments: hpml template list takes no")
    assert told("template").hint == "hpml template list …"


def test_hpml_alone_is_answered_with_the_help(hpml: Hpml) -> None:
    """No command is a wrong command line; there is more to say than one line."""
    told = hpml()
    assert told.code == 2
    assert "Usage: hpml" in told.out + told.err
    assert app.info.no_args_is_help
