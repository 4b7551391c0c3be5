"""Every command explains itself, starts lean, speaks JSON, and ends with the status of its kind."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hpml_orchestrator.cli.main import COMMANDS, app
from hpml_orchestrator.cli.reference import EXAMPLES
from hpml_orchestrator.records.store import Store
from tests.unit.cli.support import COLOUR, HPML, Hpml, Shell, in_terminal

HEAVY = set(
    "torch scipy numpy matplotlib nvitop submitit pyslurm optuna grafana grafanalib "
    "prometheus_client sklearn PIL".split()
)


def test_every_command_explains_itself(hpml: Hpml) -> None:
    """`--help` and `-h` show usage, one imperative sentence and an example."""
    listed = hpml("--help").out
    for command, entry in COMMANDS.items():
        shown = hpml(command, "--help")
        assert (shown.code, shown.err) == (0, "")
        assert f"hpml {command}" in shown.out
        assert "Examples:" in shown.out
        assert " ".join(entry.help.split()[:4]) in shown.out
        assert re.fullmatch(r"[A-Z].*\.", entry.help)
        assert re.search(rf"\b{command} +[A-Z]", listed), command
    assert hpml("run", "-h").out == hpml("run", "--help").out
    alone = hpml()
    assert (alone.code, "Usage: hpml" in alone.out + alone.err) == (2, True)
    assert re.fullmatch(r"hpml \d+\.\d+\.\d+\S*\n", hpml("--version").out)


def test_examples_can_be_typed() -> None:
    """Every command has examples, and each of them is a call of the command that it is for."""
    root: Any = typer.main.get_command(app)
    called: list[str] = []
    known: list[str] = []

    def record(command: Any, path: str) -> None:
        known.append(path)
        if not hasattr(command, "commands") or command.invoke_without_command:
            command.callback = lambda **_: called.append(path)
        for name, child in getattr(command, "commands", {}).items():
            record(child, f"{path} {name}".strip())

    for name in COMMANDS:
        root.load(name)
    record(root, "")
    assert set(EXAMPLES) == set(known)
    for command, examples in EXAMPLES.items():
        for _, line in examples:
            called.clear()
            name, *words = shlex.split(line)
            root.main(args=words, prog_name=name, standalone_mode=False)
            assert len(called) == 1, line
            assert f"{called[0]} ".startswith(f"{command} ".lstrip()), line


def loaded_by(shell: Shell, *words: str) -> set[str]:
    """The modules that a command has loaded when it ends."""
    code = (
        "import sys, json\nfrom hpml_orchestrator.cli.main import main\n"
        "sys.argv = ['hpml', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "sys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=shell.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("--help", "pydantic jinja2 ruamel hpml_orchestrator.records hpml_orchestrator.jobfile"),
        (
            "list",
            "jinja2 ruamel rich.table hpml_orchestrator.jobfile.rules hpml_orchestrator.staging",
        ),
        (
            "status",
            "jinja2 ruamel rich.table hpml_orchestrator.jobfile.rules hpml_orchestrator.staging",
        ),
        ("wait --help", "jinja2 pydantic hpml_orchestrator.runs.attach"),
        ("stage --help", "jinja2 pydantic hpml_orchestrator.jobfile.rules"),
        ("top --help", "jinja2 pydantic hpml_orchestrator.jobfile.rules"),
        ("sweep --help", "jinja2 hpml_orchestrator.check hpml_orchestrator.runs.prepare"),
        ("sweep status", "jinja2 hpml_orchestrator.check hpml_orchestrator.runs.prepare"),
        ("render {job}", "hpml_orchestrator.node.agent hpml_orchestrator.staging"),
        ("run --local {job}", "hpml_orchestrator.node.agent hpml_orchestrator.staging"),
    ],
)
def test_a_command_loads_what_it_needs(shell: Shell, words: str, absent: str) -> None:
    """The help loads no command, a job without `stage` no staging, lists no templates."""
    modules = loaded_by(shell, *words.format(job=shell.job("light")).split())
    assert not modules & {*HEAVY, *absent.split()}
    if words == "--help":
        ours = {name for name in modules if name.startswith("hpml_orchestrator")}
        assert len(ours) <= 8, ours


def test_a_traceback_is_for_those_who_ask(shell: Shell) -> None:
    """`--debug` shows where an error came from, as a process that fails."""
    quiet, loud = shell.hpml("show", "nothing"), shell.hpml("--debug", "show", "nothing")
    assert (quiet.code, "Traceback" in quiet.err) == (3, False)
    assert (loud.code, "Traceback" in loud.err) == (1, True)
    assert "NotFoundError" in loud.err


def test_verbose_shows_what_slurm_is_asked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command as a shell reads it, its seconds, and a status other than 0; only if asked."""
    home = shell.root / "fakes"
    home.mkdir()
    for name, line in (
        ("sbatch", "echo '4711;fake'"),
        ("squeue", "exit 3"),
        ("scontrol", "exit 1"),
    ):
        (home / name).write_text(f"#!/bin/sh\n{line}\n")
        (home / name).chmod(0o755)
    monkeypatch.setitem(shell.variables, "PATH", f"{home}:{os.environ['PATH']}")
    submitted = shell.hpml("--verbose", "submit", "--no-check", shell.job("told"))
    assert re.search(r"^hpml: sbatch .*/job\.sh: \d+\.\d\d s$", submitted.err, re.MULTILINE)
    state = shell.hpml("--verbose", "status")
    assert re.search(
        r"^hpml: squeue .* '--Format=.*': \d+\.\d\d s, exit status 3$", state.err, re.MULTILINE
    )
    assert "squeue" not in shell.hpml("status").err


def test_a_bug_of_hpml_is_reported_as_such(hpml: Hpml, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is one line too, with its own status and what to do."""

    def broken(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(Store, "submissions", broken)
    ended = hpml("list")
    assert (ended.code, ended.out) == (70, "")
    assert ended.err.startswith("hpml: internal error: KeyError: 'oops'\nhint: ")


def test_no_runs_yet(hpml: Hpml, tmp_path: Path) -> None:
    """An empty store is not an error: nothing on standard output, an empty list for programs."""
    for command in ("list", "status"):
        shown = hpml("--records", str(tmp_path), command)
        assert (shown.code, shown.out, shown.err) == (0, "", "no runs\n")
        assert hpml("--records", str(tmp_path), command, "--json").json() == []


def test_render_explains(shell: Shell, hpml: Hpml) -> None:
    """Each value with its origin."""
    path = shell.job("explained", resources={"nodes": 2})
    shown = hpml("render", path, "--explain", "--set", "resources.time=5").out
    for field, value, origin in [
        ("resources.nodes", "2", "job file"),
        ("resources.time", "00:05:00", "command line"),
        ("resources.account", "null", "default"),
        ("command", '["bash", "-c", "echo hi"]', "job file"),
    ]:
        pattern = rf"^{re.escape(field)} +{re.escape(value)} +{origin}$"
        assert re.search(pattern, shown, re.MULTILINE), field


def test_render_writes_what_sbatch_needs(shell: Shell, hpml: Hpml) -> None:
    """`-o` writes the script and its files; a script edited by hand is not replaced."""
    path = shell.job("written")
    plain = hpml("--records", str(shell.root / "fresh"), "render", path)
    assert (plain.code, plain.err) == (0, "")
    assert not (shell.root / "fresh").exists(), "rendering leaves no trace"
    made = shell.root / "by hand"
    assert f"cd '{made}' && sbatch job.sh" in hpml("render", path, "-o", "by hand").out
    assert (made / "job.sh").read_text() == plain.out
    assert os.access(made / "job.sh", os.X_OK)
    assert (made / "hpml-node.pyz").read_bytes().startswith(b"PK")
    printed = hpml("render", path, "--json").json()
    assert printed["script"] == plain.out
    assert printed["agent"] == json.loads((made / "agent.json").read_text())
    for name in ("job.sh", "hpml-job.sh", "agent.json"):
        before = (made / name).read_text()
        (made / name).write_text("# my edit\n")
        assert hpml("render", path, "-o", "by hand").refuses(2, f"{name} that differs", "--force")
        assert (made / name).read_text() == "# my edit\n"
        assert hpml("render", path, "-o", "by hand", "--force").code == 0
        assert (made / name).read_text() == before
    assert (made / "job.sh").read_text() == plain.out


def test_no_color_is_honoured(shell: Shell) -> None:
    """With NO_COLOR nothing that a terminal gets is coloured."""
    environment = {**shell.environment(), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    assert COLOUR.search(in_terminal([HPML, "--help"], environment))
    plain = in_terminal([HPML, "--help"], {**environment, "NO_COLOR": "1"})
    assert plain.strip()
    assert not COLOUR.search(plain)


def complete(shell: Shell, line: str, kind: str = "bash") -> str:
    """What the shell is offered for a line that was begun."""
    environment = {
        **shell.environment(),
        "_HPML_COMPLETE": f"complete_{kind}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run(
        [HPML], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_completion_of_runs(shell: Shell, kind: str) -> None:
    """By their beginning, in the records that the line names."""
    store = Store(shell.root / f"completed-{kind}")
    ids = [f"{name}-20240101-000000-abcdef" for name in ("alpha", "alps", "beta")]
    for sid in ids:
        store.prepare(sid, script="", shared={}, submit={}, runs={0: {}})
    offered = complete(shell, f"hpml --records {store.root} show al", kind)
    assert [sid in offered for sid in ids] == [True, True, False]
    assert complete(shell, "hpml --records /proc/none show al", kind).strip() in ("", "_files")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stat", "status"),
        ("stage ver", "verify"),
        ("stage data ver", ""),
        ("stage data --ope", "--opens-per-second"),
        ("stage clean --ol", "--older"),
    ],
)
def test_completion_of_words(shell: Shell, line: str, words: str) -> None:
    """Commands and options by their beginning; files the shell knows itself."""
    assert complete(shell, f"hpml {line}").split() == words.split()


@pytest.mark.parametrize(
    ("words", "redirect", "status"),
    [
        ("list", ">&-", 0),
        ("list --json", ">/dev/full", 74),
        ("render {job}", ">/dev/full", 74),
        ("submit --local {job}", ">&-", 0),
        ("submit --local {job}", ">/dev/full", 0),
    ],
)
def test_an_output_that_cannot_be_written(
    shell: Shell, words: str, redirect: str, status: int
) -> None:
    """A closed output is nobody's; a full one is reported. A job that was submitted exists."""
    ended = shell.bash(f'"$@" {redirect}', *words.format(job=shell.job("full")).split())
    assert ended.code == status, ended.err
    assert "internal error" not in ended.err
    if redirect == ">/dev/full":
        assert "cannot write to standard output: No space left on device" in ended.err
        assert ("hpml: submitted full-" in ended.err) == (status == 0)


CTRL_C_WHILE_LOADING = """
import os, signal, sys
from hpml_orchestrator.cli.__main__ import run
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hpml_orchestrator.cli.main":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass  # lost, as in a callback of the import system
sys.meta_path.insert(0, Finder())
run()
"""


def test_ctrl_c_while_modules_are_loaded() -> None:
    """It ends without a traceback."""
    words = [sys.executable, "-c", CTRL_C_WHILE_LOADING, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
