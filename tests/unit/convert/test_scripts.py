"""Whole scripts become job files that ask for the same and run the same."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.convert import Imported, Place, import_script, read_script
from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.spec import Job, load_job
from tests.unit.convert.expected import EXPECTED, Expected

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPTS = Path(__file__).parent / "scripts"
PLACE = Place(
    directory="/home/ada/proj",
    base="/home/ada/proj",
    environment={"HOME": "/home/ada", "USER": "ada", "SCRATCH": "/scratch/ada"},
)


@pytest.fixture(params=sorted(EXPECTED))
def case(request: pytest.FixtureRequest) -> tuple[str, Expected]:
    """The name of a script, and what is expected of it."""
    return request.param, EXPECTED[request.param]


def imported(name: str) -> Imported:
    path = SCRIPTS / f"{name}.sh"
    return import_script(read_script(path), name=path.name, place=PLACE)


def test_every_script_is_expected_to_become_something() -> None:
    """No script lies there without an expectation."""
    assert sorted(path.stem for path in SCRIPTS.glob("*.sh")) == sorted(EXPECTED)


def test_a_script_becomes_the_job_file_that_one_would_write(case: tuple[str, Expected]) -> None:
    """Each field holds what the script says, and nothing else stands there."""
    name, expected = case
    assert imported(name).job == expected.job


def test_what_is_not_carried_over_is_reported_with_its_line(case: tuple[str, Expected]) -> None:
    """Every finding is expected, and every expected one is there, with a reason."""
    name, expected = case
    findings = imported(name).findings
    assert all(finding.why for finding in findings)
    for kind, wanted in (("lost", expected.lost), ("changed", expected.changed)):
        reported = {(f.line, f.text[:40].rstrip()) for f in findings if f.kind == kind}
        assert reported == wanted


def test_the_text_is_the_job(case: tuple[str, Expected], tmp_path: Path) -> None:
    """What is printed loads as the very job that was made."""
    made = imported(case[0])
    path = tmp_path / "job.yaml"
    path.write_text(made.text, encoding="utf-8")
    loaded = load_job(path).job
    wanted = Job.model_validate(made.job)
    assert loaded.args == wanted.args
    assert loaded.command == wanted.command
    assert loaded.module == wanted.module
    assert loaded.resources == wanted.resources
    assert loaded.environment.variables == wanted.environment.variables
    assert [stage.name for stage in loaded.stage] == [stage.name for stage in wanted.stage]
    assert made.text.startswith("# Made from ")


def job_at_home(made: Imported) -> Job:
    """The job with its paths made absolute, as in the directory of the script."""
    job = Job.model_validate(made.job)
    workdir = str(Path(PLACE.base) / job.workdir)
    changes: dict[str, object] = {"workdir": workdir}
    if job.script is not None:
        changes["script"] = str(Path(workdir) / job.script)
    return job.model_copy(update=changes)


def directives(script: str) -> Iterator[tuple[str, str]]:
    header = itertools.takewhile(lambda line: line.startswith("#"), script.split("\n"))
    for line in header:
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            yield name, value


def argv(script: str, setup: str, directory: Path) -> list[str]:
    """The program as bash makes it of the rendered script, started with a recording python."""
    block = re.search(r"^hpml_command=\(\n.*?^\)\n", script, re.MULTILINE | re.DOTALL)
    assert block is not None
    (directory / "params.txt").write_text("first line\nsecond line\nthird line\n")
    (directory / "python").write_text('#!/bin/bash\nprintf "%s\\0" python "$@"\n')
    (directory / "python").chmod(0o755)
    (directory / "show").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (directory / "show").chmod(0o755)
    start = (
        'if [[ ${hpml_command[0]} == bash ]]; then "${hpml_command[@]}"; '
        'else show "${hpml_command[@]}"; fi'
    )
    stages = ("imagenet", "vocab", "labels")
    done = subprocess.run(
        ["bash", "-c", f"{{ {setup or ':'}\n}} >/dev/null\n{block[0]}{start}"],
        env={
            "PATH": f"{directory}:/usr/bin:/bin",
            "TMPDIR": str(directory),
            "HPML_RUN_DIR": "/run",
            "SLURM_ARRAY_TASK_ID": "2",
            **{f"HPML_STAGE_{name.upper()}": f"/staged/{name}" for name in stages},
        },
        cwd=directory,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return done.stdout.decode().split("\0")[:-1]


def test_the_rendered_script_asks_for_the_same_and_runs_the_same(
    case: tuple[str, Expected], tmp_path: Path
) -> None:
    """Nodes, ranks, CPUs, GPUs, memory, time, partition; program and arguments; variables."""
    name, expected = case
    made = imported(name)
    script = render(job_at_home(made), Capabilities(interpreter="/usr/bin/python3"))
    asked = dict(directives(script))
    nodes, ranks, cpus, gpus, memory = expected.size
    assert int(asked["nodes"]) == nodes
    tasks = int(asked["ntasks-per-node"])
    assert int(asked["cpus-per-task"]) * tasks == cpus
    assert (
        sum(int(gpu.split(":")[-1]) for gpu in asked.get("gpus-per-node", "0").split(",")) == gpus
    )
    assert asked.get("mem") == (None if memory is None else f"{memory}M")
    resources = expected.job["resources"]
    assert asked["time"] == resources.get("time", "01:00:00")
    for option in ("partition", "account", "qos", "constraint"):
        assert asked.get(option) == resources.get(option)
    launched = re.search(r"--nproc-per-node=(\d+)", script)
    started = int(launched[1]) if launched else tasks
    assert started * nodes == ranks
    launcher = expected.job.get("launcher", "torchrun")
    assert ("torch.distributed.run" in script) == (launcher == "torchrun")
    assert re.search(r"^env .*mpirun .*ppr:8:node", script, re.MULTILINE) or launcher != "mpirun"
    assert re.search(r"^.*horovodrun -np 4 -H localhost:4", script, re.MULTILINE) or (
        launcher != "horovodrun"
    )
    setup = expected.job.get("environment", {}).get("setup", "")
    path = "export PATH=/opt/tool/bin:$PATH"
    assert argv(script, setup.replace(path, ""), tmp_path) == expected.argv
    for variable, value in expected.job.get("environment", {}).get("variables", {}).items():
        exported = re.search(rf"^export {variable}=(.*)$", script, re.MULTILINE)
        assert exported is not None
        shown = subprocess.run(
            ["bash", "-c", f"printf %s {exported[1]}"], capture_output=True, check=True, text=True
        )
        assert shown.stdout == value
