"""A built wheel works without a checkout: its templates are found, its jobs run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("hatchling", "build")


def run(command: list[str | Path], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    dropped = ("PYTHON", "SLURM", "HPML", "VIRTUAL_ENV")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **more},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without network."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: no wheel can be built")
    out = tmp_path_factory.mktemp("dist")
    build: list[str | Path] = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run([*build, "--outdir", out, ROOT], out)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an environment's programs that has the wheel, and no checkout.

    The network is not used: the dependencies come from this environment's packages through a path
    file. Path files of that directory are not read there, so its editable install of the checkout
    does not count.
    """
    place = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    here = [path for path in sys.path if path.endswith("site-packages")]
    site = Path(
        run([python, "-c", "import site; print(site.getsitepackages()[0])"], place).stdout.strip()
    )
    target: list[str | Path] = ["--python", python, "install", "--no-deps", "--no-index", wheel]
    run([sys.executable, "-m", "pip", "--quiet", *target], place)
    (site / "zz-dependencies.pth").write_text("".join(f"{path}\n" for path in here))
    return place / "bin"


def test_the_wheel_holds_what_is_no_module(wheel: Path) -> None:
    """Templates and training jobs lie under _assets/; tests and the rest of the checkout do not."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assets = "hpml_orchestrator/_assets"
    for name in (
        "templates/sbatch/base.sh.j2",
        "templates/sbatch/hpml-job.sh",
        "training_jobs/digits.yaml",
        "docs/man/man1/hpml.1",
        "deploy/prometheus/rules/hpml-alerts.yml",
    ):
        assert f"{assets}/{name}" in names
    assert "hpml_exporters/__main__.py" in names
    assert {"hpml_dashboards/json/hpml-job.json", "hpml_dashboards/viewer/viewer.js"} <= {*names}
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    assert {name.split("/")[0].split("-")[0] for name in names} <= {
        "hpml_orchestrator",
        "hpml_exporters",
        "hpml_dashboards",
    }


def test_the_wheel_installs_manual_pages(installed: Path, tmp_path: Path) -> None:
    """`man hpml` works in the activated environment, with a page for every command."""
    there = {path.name for path in (installed.parent / "share" / "man" / "man1").iterdir()}
    assert there == {path.name for path in (ROOT / "docs" / "man" / "man1").iterdir()}
    assert {"hpml.1", "hpml-submit.1", "hpml-run.1"} <= there
    if shutil.which("man") is None:
        pytest.skip("NOT TESTED: man is not installed (apt-get install man-db)")
    path = f"{installed}:{os.environ['PATH']}"
    found = run(["man", "-w", "hpml-submit"], tmp_path, PATH=path, MANPATH="").stdout.strip()
    assert Path(found) == installed.parent / "share" / "man" / "man1" / "hpml-submit.1"


def test_the_installed_hpml_renders_and_runs(installed: Path, tmp_path: Path) -> None:
    """Its modules and templates are the environment's; scripts name its Python, and jobs run."""
    code = (
        "import hpml_orchestrator as p, hpml_exporters as e; from hpml_orchestrator import assets\n"
        "print(p.__file__, e.__file__, assets.path('templates/sbatch'), sep='\\n')"
    )
    for path in run([installed / "python", "-c", code], tmp_path).stdout.splitlines():
        assert Path(path).is_relative_to(installed.parent)
    job = {"name": "wheel", "launcher": "srun", "command": ["sh", "-c", "echo $RANK of wheel"]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    rendered = run([installed / "hpml", "render", "job.yaml"], tmp_path).stdout
    assert f"hpml_begin {installed}/python" in rendered
    records = str(tmp_path / "records")
    done = run([installed / "hpml", "run", "--local", "job.yaml"], tmp_path, HPML_HOME=records)
    assert "0 of wheel\n" in done.stdout
    assert "COMPLETED" in done.stdout
    assert run([installed / "hpml-bind", "--", "echo", "bound"], tmp_path).stdout == "bound\n"
    metrics = run([installed / "hpml", "export", "metrics"], tmp_path).stdout
    assert "hpml_exporter_up\tgauge\tcollector\t" in metrics


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("dashboards check", "all dashboards match their code"),
        ("dashboards build --output built", "built/hpml-job.json"),
        ("schema job", '"$defs"'),
        ("man submit", "hpml submit [OPTIONS]"),
        ("man --output pages", "pages"),
        ("import script.sh", "launcher: srun"),
        ("topo --json", '"source": "sysfs"'),
    ],
)
def test_commands_find_their_files(
    installed: Path, tmp_path: Path, command: str, output: str
) -> None:
    """The wheel has all files that a command reads."""
    (tmp_path / "script.sh").write_text("#!/bin/bash\n#SBATCH -N 1\nsrun python train.py\n")
    assert output in run([installed / "hpml", *command.split()], tmp_path).stdout
