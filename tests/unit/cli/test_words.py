"""Commands explain themselves; errors are a line, a hint and an exit status of their class."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main

from hpml_orchestrator.cli.main import app
from hpml_orchestrator.records.store import Store

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]
HPML = Path(sys.executable).parent / "hpml"
COMMANDS = sorted(
    "render check submit run list status logs cancel wait show doctor schema init template "
    "man import topo pack prune stage export".split()
)
HEAVY = (
    *("torch", "scipy", "numpy", "matplotlib", "nvitop", "submitit", "pyslurm", "optuna"),
    *("grafana", "grafana_foundation_sdk", "grafanalib", "prometheus_client", "sklearn", "PIL"),
    "xxhash",
)
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])(;[0-9;]*)?m")


def test_every_command_is_known_here() -> None:
    """The tests below try every command that there is."""
    group = typer.main.get_command(app)
    assert sorted(group.commands) == COMMANDS  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(hpml: Hpml, command: str) -> None:
    """`--help` and `-h` say how to call it, what it does, and each of its options."""
    told = hpml(command, "--help")
    assert (told.code, told.err) == (0, "")
    assert f"hpml {command}" in told.out
    assert hpml(command, "-h").out == told.out


def test_hpml_alone_lists_its_commands(hpml: Hpml) -> None:
    """Without a command it says which there are; `--version` says which hpml this is."""
    told = hpml("--help")
    assert told.code == 0
    for command in COMMANDS:
        assert re.search(rf"\b{command} +[A-Z]", told.out), command
    assert "render" in hpml().out
    assert re.fullmatch(r"hpml \d+\.\d+\.\d+\S*\n", hpml("--version").out)


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (["frobnicate"], 2, "COMMAND: hpml has no such command (got 'frobnicate')", "there are: "),
        (["run"], 2, "JOB_FILE: must be given", "hint: hpml run job.yaml"),
        (["render", "job.yaml", "--frob"], 2, "--frob: hpml render has no such option", "hint: "),
        (["list", "-n", "0"], 2, "--number: must be a whole number, 1 or more (got '0')", "hint:"),
        (["render", "none.yaml"], 3, "no such job file", "hint: "),
        (["render", "bad.yaml"], 2, "nam: there is no such field; did you mean name?", "hint: in"),
        (["render", "two.yaml"], 2, "             resources.nodes: must be at least 1", "hint:"),
        (["render", "good.yaml", "--set", "x"], 2, "--set: must be FIELD=VALUE", ""),
        (["render", "good.yaml", "-o", "good.yaml/x"], 2, "--output: cannot be made", ""),
        (["submit"], 2, "JOB_FILE: must be given", "hint: hpml submit job.yaml"),
        (["submit", "good.yaml", "--resume", "x"], 2, "--resume: takes no job file", ""),
        (["submit", "--resume", "x"], 3, "no run 'x' under", "hint: `hpml list`"),
        (["run", "good.yaml", "--backend", "pbs"], 2, "--backend: must be auto, slurm or l", ""),
        (["run", "big.yaml", "--local"], 2, "asks for 2 nodes; this machine", "--no-check"),
        (
            ["--records", "other", "run", "big.yaml", "--local", "--no-check"],
            4,
            "asks for 2 nodes",
            "hint",
        ),
        (["status", "nothing"], 3, "no run 'nothing' under", "hint: `hpml list` shows"),
        (["show"], 3, "no runs under", "hint: start one with `hpml run`"),
        (["logs", "nothing"], 3, "no run 'nothing'", "hint"),
        (["wait", "nothing"], 3, "no run 'nothing'", "hint"),
        (["cancel", "nothing"], 3, "no run 'nothing'", "hint"),
        (["show", ""], 2, "RUN: must name a run", "hint: see `hpml list`"),
        (["schema", "sweep"], 2, "WHAT: must be job or site (got 'sweep')", ""),
        (["--records", "good.yaml/x", "submit", "good.yaml", "--local"], 7, "cannot", "HPML_HOME"),
        (["--records", "good.yaml", "list"], 7, "cannot read", ""),
    ],
)
def test_what_is_wrong_is_told(
    shell: Shell, hpml: Hpml, words: list[str], code: int, message: str, hint: str
) -> None:
    """The status says what kind of fault it is; no traceback, nothing on standard output."""
    (shell.root / "good.yaml").write_text("name: good\ncommand: ['true']\nlauncher: srun\n")
    (shell.root / "bad.yaml").write_text("nam: a\n")
    (shell.root / "two.yaml").write_text("name: a b\nscript: x\nresources: {nodes: 0}\n")
    (shell.root / "big.yaml").write_text("name: a\nscript: x\nresources: {nodes: 2}\n")
    told = hpml(*words)
    assert (told.code, told.out) == (code, ""), told
    assert message in told.err
    assert hint in told.err
    assert "Traceback" not in told.err


def test_a_traceback_is_for_those_who_ask(shell: Shell) -> None:
    """`--debug` shows where an error came from, as a process that fails."""
    quiet, loud = shell.hpml("show", "nothing"), shell.hpml("--debug", "show", "nothing")
    assert (quiet.code, "Traceback" in quiet.err) == (3, False)
    assert (loud.code, "Traceback" in loud.err) == (1, True)
    assert "NotFoundError" in loud.err


def test_a_fault_of_hpmls_own_is_told_as_such(hpml: Hpml, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is one line too, with a status of its own and what to do."""
    target = importlib.import_module("hpml_orchestrator.spec.schema")

    def broken() -> None:
        raise KeyError("oops")

    monkeypatch.setattr(importlib.import_module("hpml_orchestrator.spec"), "job_schema", broken)
    told = hpml("schema")
    assert target
    assert (told.code, told.out) == (70, "")
    assert told.err.startswith("hpml: internal error: KeyError: 'oops'\nhint: ")


def test_no_runs_yet(hpml: Hpml) -> None:
    """An empty store is no error: nothing on standard output, an empty list for programs."""
    for command in ("list", "status"):
        told = hpml(command)
        assert (told.code, told.out, told.err) == (0, "", "no runs\n")
        assert hpml(command, "--json").json() == []


def test_status_when_all_is_over(hpml: Hpml, tmp_path: Path) -> None:
    """There are runs, and none is waiting or running: `hpml list` has them."""
    told_of = {"name": "old", "backend": "local", "host": "here", "created": 0.0}
    store = Store(tmp_path)
    made = store.prepare(
        "old-20240101-000000-aaaaaa", script="", archive=b"", submit=told_of, runs={0: {}}
    )
    made.record_refusal("no such partition", now=1.0)
    told = hpml("--records", str(tmp_path), "status")
    assert (told.code, told.out) == (0, "")
    assert told.err == "no run is waiting or running; `hpml list` shows those that are over\n"
    assert hpml("--records", str(tmp_path), "status", "--json").json() == []


def test_every_template_is_named_where_one_is_asked_for(hpml: Hpml) -> None:
    """The help has the base, and a template for each launcher."""
    said = " ".join(hpml("template", "eject", "--help").out.replace("│", " ").split())
    assert "Which: base, horovodrun, mpirun, srun or torchrun." in said


def test_render_explains(shell: Shell, hpml: Hpml) -> None:
    """Each value with its origin, for people and for programs."""
    path = shell.job("explained", resources={"nodes": 2})
    told = hpml("render", path, "--explain", "--set", "resources.time=5")
    assert re.search(r"^resources\.nodes +2 +job file$", told.out, re.MULTILINE)
    assert re.search(r"^resources\.time +00:05:00 +command line$", told.out, re.MULTILINE)
    assert re.search(r"^resources\.gpus +0 +default$", told.out, re.MULTILINE)
    assert re.search(r"^resources\.account +null +default$", told.out, re.MULTILINE)
    assert re.search(r"^snapshot +false +default$", told.out, re.MULTILINE)
    assert re.search(r'^command +\["bash", "-c", "echo hi"\] +job file$', told.out, re.MULTILINE)
    rows = hpml("render", path, "--explain", "--json").json()
    assert {"field": "resources.nodes", "value": 2, "origin": "job file"} in rows


def test_render_writes_what_sbatch_needs(shell: Shell, hpml: Hpml) -> None:
    """`-o` puts an executable script and the node archive side by side."""
    path = shell.job("written")
    plain = hpml("render", path)
    assert (plain.code, plain.err) == (0, "")
    told = hpml("render", path, "-o", "made/here")
    made = shell.root / "made" / "here"
    assert f"cd {made} && sbatch job.sh" in told.out
    assert (made / "job.sh").read_text() == plain.out
    assert os.access(made / "job.sh", os.X_OK)
    assert (made / "hpml-node.pyz").read_bytes().startswith(b"PK")
    assert hpml("render", path, "--json").json()["script"] == plain.out


def test_render_leaves_no_trace(shell: Shell, hpml: Hpml) -> None:
    """Rendering writes nothing, not even the directory of records."""
    fresh = shell.root / "fresh"
    assert hpml("--records", str(fresh), "render", shell.job("traceless")).code == 0
    assert not fresh.exists()


def test_the_schema_is_json(hpml: Hpml) -> None:
    """It can be given to an editor as it is."""
    assert hpml("schema", "job").json()["title"] == "hpml job file"
    assert hpml("schema").out == hpml("schema", "job").out


def test_the_doctor_speaks_both_ways(hpml: Hpml) -> None:
    """A table for people, a list for programs, and the status says whether all is there."""
    told = hpml("doctor", "--json")
    results = {one["check"]: one["result"] for one in told.json()}
    assert told.code == int("missing" in results.values())
    assert results["templates"] == "ok"
    assert hpml("doctor").out.startswith("CHECK\tRESULT\tFOUND\n")


def in_terminal(command: list[str | Path], environment: dict[str, str]) -> str:
    """What a command prints on a real terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        told = b""
        while True:
            try:
                data = os.read(leader, 65_536)
            except OSError:  # Linux's way to say that nobody writes there any more
                break
            if not data:
                break
            told += data
        process.wait(120)
    os.close(leader)
    return told.decode()


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["render", "none.yaml"]])
def test_no_color_is_honoured(shell: Shell, words: list[str]) -> None:
    """With NO_COLOR nothing that a terminal gets is coloured."""
    environment = {**shell.environment(), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    told = in_terminal([HPML, *words], {**environment, "NO_COLOR": "1"})
    assert told.strip()
    assert not COLOUR.search(told)
    if words == ["--help"]:
        assert COLOUR.search(in_terminal([HPML, *words], environment))


def complete(shell: Shell, kind: str, line: str) -> str:
    shell_words = line.split(" ")
    environment = {
        **shell.environment(),
        "_HPML_COMPLETE": f"complete_{kind}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(shell_words) - 1),
    }
    done = subprocess.run(
        [HPML], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: Shell, kind: str) -> None:
    """Hpml prints the completion of each shell; where that shell is here, it takes it."""
    done = subprocess.run(
        [HPML],
        env={**shell.environment(), "_HPML_COMPLETE": f"source_{kind}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"_HPML_COMPLETE=complete_{kind}" in done.stdout
    if shutil.which(kind):
        subprocess.run([kind, "-n"], input=done.stdout, text=True, check=True, timeout=120)


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_runs_and_commands_are_completed(shell: Shell, kind: str) -> None:
    """Commands by their beginning, runs by theirs, in the records that the line names."""
    store = Store(shell.root / f"completed-{kind}")
    ids = [f"{name}-20240101-000000-abcdef" for name in ("alpha", "alps", "beta")]
    for sid in ids:
        store.prepare(sid, script="", archive=b"", submit={}, runs={0: {}})
    assert "status" in complete(shell, kind, "hpml stat")
    line = f"hpml --records {store.root} show al"
    told = complete(shell, kind, line)
    assert [sid in told for sid in ids] == [True, True, False]
    assert "last" in complete(shell, kind, f"hpml --records {store.root} logs la")
    assert "alpha" not in complete(shell, kind, "hpml show al")
    assert complete(shell, kind, "hpml --records /proc/none show al").strip() in ("", "_files")


@pytest.mark.parametrize("words", [["--help"], ["render", "JOB"], ["list"], ["schema"]])
def test_nothing_heavy_is_imported(shell: Shell, words: list[str]) -> None:
    """Start-up stays small: no science, no plots, no schedulers' bindings."""
    words = [shell.job("light") if word == "JOB" else word for word in words]
    code = (
        "import sys, json\nfrom hpml_orchestrator.cli.main import main\n"
        "sys.argv = ['hpml', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "sys.stderr.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=shell.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = json.loads(done.stderr.splitlines()[-1].removeprefix("no runs"))
    assert not set(HEAVY) & set(loaded)
    if words == ["--help"]:
        assert not {"pydantic", "jinja2", "ruamel"} & set(loaded)
