"""A job on this machine: its record has what its program ran in."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.unit.local_runs import Desk

# It ends when the record is there, so that no time has to be guessed; the limit ends it otherwise.
WAIT = 'until [ -e "$HPML_ATTEMPT_DIR/software.json" ]; do sleep 0.1; done'


def test_show_has_the_software_of_a_run(tmp_path: Path) -> None:
    """Packages are those of the job's virtual environment, modules those that its ranks see."""
    desk = Desk(tmp_path)
    job = desk.job(
        name="soft",
        command=["bash", "-c", WAIT],
        resources={"time": "2m"},
        environment={"venv": sys.prefix, "variables": {"LOADEDMODULES": "gcc/12:cuda/12.4"}},
    )
    desk.hpml("run", "--local", job)
    software = desk.json("show")["software"]
    assert software["python"] == f"{sys.prefix}/bin/python"
    assert software["packages"]["pytest"]
    assert software["modules"] == ["gcc/12", "cuda/12.4"]
    assert (software["torch"] or {}).get("version") == software["packages"].get("torch")
    assert Path(software["file"]).is_file()
    (line,) = [line for line in desk.hpml("show").splitlines() if line.startswith("software")]
    assert "packages" in line
    assert "modules gcc/12 and cuda/12.4" in line
    wanted = {f"{name}=={number}" for name, number in software["packages"].items()}
    lines = desk.hpml("show", "--requirements").splitlines()
    assert {line for line in lines if line[0] != "#"} == wanted - {f"pip=={version('pip')}"}
    own = ".".join(map(str, sys.version_info[:3]))
    assert f"# Python {own}, {sys.prefix}/bin/python; loaded modules: gcc/12, cuda/12.4" in lines


@pytest.mark.parametrize(
    ("variables", "names"),
    [({}, "nosuch0,lo lo"), ({"GLOO_SOCKET_IFNAME": "eth9"}, "nosuch0,lo eth9")],
)
def test_network_interfaces_of_a_site(
    tmp_path: Path, variables: dict[str, str], names: str
) -> None:
    """Gloo ends a rank if an interface is missing, so it gets the first that this node has."""
    desk = Desk(tmp_path)
    (tmp_path / "site.toml").write_text('interfaces = ["nosuch0", "lo"]\n')
    command = ["bash", "-c", "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"]
    job = desk.job(name="net", command=command, environment={"variables": variables})
    desk.hpml("--site", "site.toml", "run", "--local", job)
    assert f"\n{names}\n" in desk.hpml("logs")


def test_show_names_a_script_that_changed_while_queued(tmp_path: Path) -> None:
    """Outside git the record has the script as submitted, and its modules; `show` compares them."""
    desk = Desk(tmp_path)
    written = "import os, time\npath = os.environ['HPML_ATTEMPT_DIR'] + '/software.json'\n"
    written += "while not os.path.exists(path): time.sleep(0.1)\n"
    script = tmp_path / "train.py"
    script.write_text(written)
    (tmp_path / "model.py").write_text("layers = 2\n")
    environment = {"python": sys.executable}
    fields = {"name": "edited", "script": "train.py", "resources": {"time": "2m"}}
    desk.hpml("run", "--local", desk.job(launcher="srun", **fields, environment=environment))
    assert "changed " not in desk.hpml("show")
    environment["setup"] = f"echo '# new' >> {script}"
    ran = desk.json("run", "--local", desk.job(launcher="srun", **fields, environment=environment))
    (line,) = [line for line in desk.hpml("show").splitlines() if line.startswith("changed ")]
    assert f"{script} changed between submission and start; as submitted: " in line
    copy = Path(line.split()[-1])
    assert (copy.read_text(), script.read_text()) == (written, f"{written}# new\n")
    assert (copy.parent / "model.py").read_text() == "layers = 2\n"
    assert ran["id"] in str(copy)


def test_the_environment_of_a_uv_project(tmp_path: Path) -> None:
    """It is a virtual environment; without it the check names the command that creates it."""
    desk = Desk(tmp_path)
    code = "import os, sys; print(sys.prefix, os.environ['VIRTUAL_ENV'])"
    job = desk.job(name="uv", command=["python", "-c", code], environment={"venv": ".venv"})
    (tmp_path / "uv.lock").touch()
    (finding,) = desk.json("check", "--local", job, code=2)["findings"]
    assert (finding["code"], finding["hint"]) == (
        "venv.missing",
        f"`uv sync --project {tmp_path}` creates it",
    )
    uv = str(Path(sys.executable).with_name("uv"))
    words = [uv, "venv", "--quiet", "--no-project", "--offline", "--python", sys.executable]
    subprocess.run([*words, ".venv"], cwd=tmp_path, check=True)
    desk.hpml("run", "--local", job)
    place = tmp_path / ".venv"
    assert f"{place} {place}\n" in desk.hpml("logs")


def test_the_environment_of_a_pixi_project(tmp_path: Path) -> None:
    """The lines of the documentation, with a fake pixi: no package index here has the real one.

    It prints what rattler, the library that pixi is made of, prints for an environment.
    """
    page = (Path(__file__).parents[2] / "docs" / "job-environment.md").read_text("utf-8")
    lines = re.findall(r"^    (hook=.*|eval .*)$", page, re.MULTILINE)
    assert "pixi shell-hook" in lines[0]
    prefix, pixi = tmp_path / ".pixi/envs/default", tmp_path / "pixi"
    (prefix / "etc/conda/activate.d").mkdir(parents=True)
    (prefix / "etc/conda/activate.d/a.sh").write_text("export FROM_PACKAGE=1\n")
    (prefix / "bin").mkdir()
    (prefix / "bin/python").symlink_to(sys.executable)
    pixi.write_text(
        f"#!/bin/sh\n[ \"$*\" = 'shell-hook --frozen' ] && [ \"$PWD\" = '{tmp_path}' ] || exit 1\n"
        f"cat <<'END'\nexport PATH=\"{prefix}/bin:${{PATH}}\"\nexport CONDA_SHLVL=1\n"
        f"export CONDA_PREFIX={prefix}\n. {prefix}/etc/conda/activate.d/a.sh\nEND\n"
    )
    pixi.chmod(0o755)
    desk = Desk(tmp_path)
    code = (
        "import os, shutil; e = os.environ;"
        "print(shutil.which('python'), e['CONDA_PREFIX'], e['FROM_PACKAGE'])"
    )
    setup = "\n".join(lines).replace("pixi", str(pixi), 1)
    job = desk.job(name="pixi", command=["python", "-c", code], environment={"setup": setup})
    desk.hpml("run", "--local", job)
    assert f"{prefix}/bin/python {prefix} 1\n" in desk.hpml("logs")
    pixi.write_text("#!/bin/sh\nexit 3\n")
    assert desk.json("run", "--local", job, code=6)["exit_code"] == 3
