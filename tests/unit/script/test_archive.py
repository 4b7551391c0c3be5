"""`hpml-node.pyz` is one file, the same every time, that an old and bare Python runs."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vermin

from hpml_orchestrator.placement.model import RankPlan
from hpml_orchestrator.script import archive
from tests.unit.node.plans import MINE, put_plan, records

# Where pyenv or a distribution would have put one; most machines have none any more.
OLD_PYTHON = next(
    iter(sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))),
    Path(shutil.which("python3.9") or "python3.9"),
)
PACKAGE = Path(archive.__file__).parents[1]
ROOMS = ("records", "staging", "topology", "placement", "node")


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive as a file."""
    path = tmp_path_factory.mktemp("pyz") / "hpml-node.pyz"
    path.write_bytes(archive.build())
    return path


def run(python: Path | str, pyz: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    return subprocess.run(
        [python, "-I", "-S", "-W", "error", pyz, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_equal_sources_give_equal_bytes() -> None:
    """Neither time nor order nor process changes a byte."""
    code = "import sys; from hpml_orchestrator.script.archive import build\n"
    code += "sys.stdout.buffer.write(build())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == archive.build()


def test_it_holds_the_rooms_of_the_nodes_and_no_other() -> None:
    """Sources, and their bytecode for this interpreter; others read the source."""
    with zipfile.ZipFile(io.BytesIO(archive.build())) as opened:
        names = opened.namelist()
        assert opened.testzip() is None
        assert {info.compress_type for info in opened.infolist()} == {zipfile.ZIP_STORED}
    rooms = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert rooms == set(ROOMS)
    assert {"__main__.py", "hpml_orchestrator/errors.py", "hpml_orchestrator/node/main.py"} <= set(
        names
    )
    sources = {name for name in names if name.endswith(".py")}
    assert set(names) - sources == {f"{name}c" for name in sources - {"__main__.py"}}


def binder(python: Path, pyz: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a rank the short way."""
    return subprocess.run(
        [python, "-I", "-S", "-W", "error", "-c", archive.BIND_CODE, pyz, *arguments],
        env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("python", [OLD_PYTHON, Path(sys.executable)], ids=["3.9", "this"])
def test_a_rank_starts_the_short_way(python: Path, pyz: Path, tmp_path: Path) -> None:
    """It is bound as planned, with few modules; without an attempt it plans for itself."""
    if not python.exists():
        pytest.skip("no Python 3.9 found: that a rank starts there is NOT tested")
    (tmp_path / "binding").mkdir()
    put_plan(tmp_path, RankPlan(0, cpus=(MINE[0],), memory=0), verify="strict")
    done = binder(python, pyz, str(tmp_path), "--", "sh", "-c", "echo $HPML_CHANNEL")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hpml-0-")
    assert [(one["cpus"], one["bound"]) for one in records(tmp_path)] == [(str(MINE[0]), True)]
    command = [
        str(python),
        "-I",
        "-S",
        "-X",
        "importtime",
        "-c",
        archive.BIND_CODE,
        str(pyz),
        "--help",
    ]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()
    assert not {"json", "re", "typing", "dataclasses"} & set(loaded)
    assert binder(python, pyz, "--").stderr.startswith("usage: hpml-bind")
    alone = binder(python, pyz, "--", "echo", "hi")
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "hi\n", "")


@pytest.mark.parametrize("python", [OLD_PYTHON, Path(sys.executable)], ids=["3.9", "this"])
def test_a_bare_python_runs_it(python: Path, pyz: Path, tmp_path: Path) -> None:
    """Isolated, without site, warnings as errors: claim, rank, finish and every import."""
    if not python.exists():
        pytest.skip("no Python 3.9 found: that the node archive runs there is NOT tested")
    claimed = run(python, pyz, "claim", str(tmp_path))
    assert claimed.returncode == 0, claimed.stderr
    attempt = claimed.stdout.strip()
    assert attempt == f"{tmp_path}/runs/7/attempts/0"
    bound = run(python, pyz, "bind", attempt, "--", "echo", "hi")
    assert (bound.returncode, bound.stdout) == (0, "hi\n"), bound.stderr
    assert run(python, pyz, "rendezvous", attempt).stdout.startswith("127.0.0.1 ")
    assert run(python, pyz, "finish", attempt, "0", "").returncode == 0
    assert json.loads(Path(attempt, "ended.json").read_text())["exit_code"] == 0
    assert run(python, pyz, "--help").stdout.startswith("usage: hpml-node.pyz COMMAND")
    code = (
        "import importlib, sys, zipfile; sys.path.insert(0, sys.argv[1])\n"
        "for name in zipfile.ZipFile(sys.argv[1]).namelist():\n"
        "    if '/' in name and name.endswith('.py'):\n"
        "        importlib.import_module(name[:-3].replace('/', '.'))"
    )
    done = subprocess.run(
        [python, "-I", "-S", "-W", "error", "-c", code, pyz],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, ""),
        (["dance"], 2, "no command 'dance'"),
        (["claim"], 2, "claim: wrong number of arguments"),
        (["wait-ready", "x"], 2, "wait-ready: wrong number of arguments"),
        (["agent"], 2, "arguments are required: attempt"),
        (["agent", "/a", "--stage", "x"], 2, "--stage: cannot be read: "),
        (["agent", "/a", "--bind", '{"rank": 1}'], 2, "--bind: cannot be read: "),
        (["rendezvous", "/none"], 0, ""),
        (["claim", "/proc/none"], 1, "claim: "),
    ],
)
def test_wrong_words_are_told_in_a_line(
    pyz: Path, words: list[str], status: int, message: str
) -> None:
    """No traceback, whatever the script says."""
    done = run(sys.executable, pyz, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert message in done.stderr


class _ForTypesAlone(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse or ast.Pass()
        return node


def at_run_time(source: str) -> str:
    """The source without what type checkers alone read."""
    return ast.unparse(_ForTypesAlone().visit(ast.parse(source)))


def test_the_sources_keep_to_python_3_9() -> None:
    """By vermin's table of features, every file that travels runs on Python 3.9."""
    config = vermin.Config()
    config.set_eval_annotations(False)
    sources = [PACKAGE / "errors.py", PACKAGE / "__init__.py"]
    for room in ROOMS:
        sources += (PACKAGE / room).rglob("*.py")
    assert len(sources) > 20
    newer = {}
    for source in sources:
        visitor = vermin.visit(at_run_time(source.read_text("utf-8")), config, path=str(source))
        least = visitor.minimum_versions()[1]
        if least is not None and least != 0 and least > (3, 9):
            newer[source.name] = visitor.output_text()
    assert newer == {}


def test_no_annotation_is_evaluated_early() -> None:
    """Newer spellings such as `int | None` stand where nothing evaluates them on Python 3.9."""
    for room in ROOMS:
        for source in (PACKAGE / room).rglob("*.py"):
            text = source.read_text("utf-8")
            if re.search(r"^(class|def) ", text, re.MULTILINE):
                assert "from __future__ import annotations\n" in text, source
