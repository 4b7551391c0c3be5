"""`hpml-node.pyz` is one file, the same every time, that an old and bare Python runs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import vermin

from hpml_orchestrator.placement.model import RankPlan
from hpml_orchestrator.records.job import Job, NodeJob
from hpml_orchestrator.script import archive
from tests.unit.node.plans import MINE, put_plan, records

# Paths of pyenv and distributions; most machines do not have it.
OLD_PYTHON = next(
    iter(sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))),
    Path(shutil.which("python3.9") or "python3.9"),
)
PYTHONS = pytest.mark.parametrize("python", [OLD_PYTHON, Path(sys.executable)], ids=["3.9", "this"])
PACKAGE = Path(archive.__file__).parents[1]
ROOMS = ("records", "staging", "topology", "placement", "node")
IMPORT_ALL = (
    "import importlib, sys, zipfile; sys.path.insert(0, sys.argv[1])\n"
    "for name in zipfile.ZipFile(sys.argv[1]).namelist():\n"
    "    if '/' in name and name.endswith('.py'):\n"
    "        importlib.import_module(name[:-3].replace('/', '.'))"
)


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive as a file."""
    path = tmp_path_factory.mktemp("pyz") / "hpml-node.pyz"
    path.write_bytes(archive.build())
    return path


def run(python: Path | str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run Python isolated, without site, warnings as errors."""
    if not Path(python).exists():
        pytest.skip("no Python 3.9 found: that the node archive runs there is NOT tested")
    return subprocess.run(
        [python, "-I", "-S", "-W", "error", *arguments],
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_equal_sources_give_equal_bytes(pyz: Path) -> None:
    """Neither time nor order nor process changes a byte; it holds the nodes' rooms alone."""
    code = "import sys; from hpml_orchestrator.script.archive import build\n"
    code += "sys.stdout.buffer.write(build())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == pyz.read_bytes()
    names = zipfile.ZipFile(io.BytesIO(done.stdout)).namelist()
    assert {name.split("/")[1] for name in names if name.count("/") > 1} == set(ROOMS)
    sources = {name for name in names if name.endswith(".py")}
    assert set(names) - sources == {f"{name}c" for name in sources - {"__main__.py"}}


@PYTHONS
def test_a_rank_starts_the_short_way(python: Path, pyz: Path, tmp_path: Path) -> None:
    """It is bound as planned, with few modules; without an attempt it plans for itself."""
    (tmp_path / "binding").mkdir()
    put_plan(tmp_path, RankPlan(0, cpus=(MINE[0],), memory=0), verify="strict")
    functions = archive.node_files()["hpml-job.sh"].decode()
    (code,) = re.findall(r"^hpml_bind_code='(.*)'$", functions, re.MULTILINE)
    start = ("-c", code, pyz)
    done = run(python, *start, tmp_path, "--", "sh", "-c", "echo $HPML_CHANNEL")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hpml-0-")
    assert [(one["cpus"], one["bound"]) for one in records(tmp_path)] == [(str(MINE[0]), True)]
    loaded = run(python, "-X", "importtime", *start, "--help").stderr.split()
    assert not {"json", "re", "typing", "dataclasses"} & set(loaded)
    alone = run(python, *start, "--", "echo", "hi")
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "hi\n", "")


@PYTHONS
def test_a_bare_python_runs_it(python: Path, pyz: Path, tmp_path: Path) -> None:
    """Claim, rank, finish, and every import."""
    (tmp_path / "agent.json").write_text(NodeJob(Job("probe")).text())
    claimed = run(python, pyz, "claim", tmp_path)
    assert claimed.returncode == 0, claimed.stderr
    attempt = claimed.stdout.strip()
    assert attempt == f"{tmp_path}/runs/7/attempts/0"
    bound = run(python, pyz, "bind", attempt, "--", "echo", "hi")
    assert (bound.returncode, bound.stdout) == (0, "hi\n"), bound.stderr
    assert run(python, pyz, "rendezvous", attempt).stdout.startswith("127.0.0.1 ")
    assert run(python, pyz, "finish", attempt, tmp_path, "0").returncode == 0
    assert json.loads(Path(attempt, "ended.json").read_text())["exit_code"] == 0
    done = run(python, "-c", IMPORT_ALL, pyz)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ("", 2, ""),
        ("dance", 2, "no command 'dance'"),
        ("claim", 2, "claim: wrong number of arguments"),
        ("agent /a /b --stage x", 2, "unrecognized arguments: --stage x"),
        ("claim /proc/none", 7, "/proc/none/agent.json cannot be read (No such file"),
    ],
)
def test_a_wrong_call_is_one_line(pyz: Path, argv: str, status: int, message: str) -> None:
    """No traceback, whatever the script calls."""
    done = run(sys.executable, pyz, *argv.split())
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert message in done.stderr


def test_the_sources_keep_to_python_3_9() -> None:
    """By vermin's table of features; newer annotations are never evaluated."""
    config = vermin.Config()
    config.set_eval_annotations(False)
    sources = [
        PACKAGE / "errors.py",
        *(file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")),
    ]
    newer = {}
    for source in sources:
        text = source.read_text("utf-8")
        at_run_time = re.sub(r"^if TYPE_CHECKING:\n((    .*)?\n)+", "", text, flags=re.MULTILINE)
        visitor = vermin.visit(at_run_time, config, path=str(source))
        if visitor.minimum_versions()[1] not in (None, 0) and visitor.minimum_versions()[1] > (
            3,
            9,
        ):
            newer[source.name] = visitor.output_text()
        if re.search(r"^(class|def) ", text, re.MULTILINE):
            assert "from __future__ import annotations\n" in text, source
    assert newer == {}
