"""What a job names on this machine is looked at: program, software, modules, records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.paths import (
    check_program,
    check_records,
    check_shared,
    check_software,
)
from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.job import Environment, Job
from hpml_orchestrator.scheduler.command import Completed, SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import is_one_machine
from hpml_orchestrator.testing.runner import FakeRunner

PATH = {"PATH": "/usr/bin:/bin"}
PY = {"environment": {"python": "sh"}}


def codes(root: Path, path: str = PATH["PATH"], **fields: Any) -> dict[str, str]:
    """Code and level of what is found of a job that is right but for these fields."""
    if not {"script", "module", "command"} & set(fields):
        fields["command"] = ["true"]
    job = Job.from_json({"name": "j", "workdir": str(root), **fields})
    findings = check_program(job, {"PATH": path})
    return {finding.code: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"script": "{root}/t.py", "environment": {"venv": "{root}/v"}}, {}),
        ({"script": "{root}/t.py", "environment": {"conda": "{root}/c"}}, {}),
        ({"script": "/nope/t.py", **PY}, {"script.missing": "error"}),
        ({"script": "{root}", **PY}, {"script.kind": "error"}),
        ({"workdir": "{root}/none"}, {"workdir.missing": "error"}),
        ({"command": ["no-such-program"]}, {"program.missing": "warning"}),
        ({"command": ["./t.sh"]}, {"program.missing": "warning"}),
        ({"command": ["./t.py"]}, {"program.mode": "warning"}),
        ({"module": "m", "environment": {"python": "py"}}, {"program.missing": "warning"}),
        ({"environment": {"venv": "{root}"}}, {"venv.missing": "error"}),
        ({"environment": {"conda": "{root}"}}, {"conda.missing": "error"}),
    ],
)
def test_what_a_job_names_must_exist(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, str]
) -> None:
    """Programs may come with the nodes, so they are warnings."""
    (tmp_path / "t.py").touch(0o644)
    for name in ("v/bin/activate", "v/bin/python", "c/conda-meta/history"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o755)
    for name in ("v", "c"):
        (tmp_path / name / "lib/python3.12/site-packages/torch").mkdir(parents=True)

    def here(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: here(inner) for name, inner in value.items()}
        return value.replace("{root}", str(tmp_path)) if isinstance(value, str) else value

    assert codes(tmp_path, **here(fields)) == expected


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--lr 0.1", "write --lr=0.1, or two entries: --lr and 0.1"),
        ("-n 4", "write two entries: -n and 4"),
        ("--name my=run", "write --name=my=run, or"),
        ("--name=my run", ""),
        ("--name", ""),
        ("-5 6", ""),
        ("a --lr 0.1", ""),
        ("- a", ""),
    ],
)
def test_an_option_and_its_value_in_one_word(tmp_path: Path, word: str, remedy: str) -> None:
    """The program receives them as one argument: probably two were meant."""
    job = Job.from_json({"name": "j", "command": ["true", word], "workdir": str(tmp_path)})
    findings = check_program(job, PATH)
    assert [(one.code, one.level, one.field) for one in findings] == [
        ("args.one_word", "warning", "command.1")
    ] * bool(remedy)
    assert all(one.hint.startswith(remedy) for one in findings)


@pytest.mark.parametrize(
    ("fields", "place", "remedy"),
    [
        ({"args": ["--data=~/x"]}, "args.0", "write --data={env.HOME}/x"),
        ({"args": ["--out", "~/x"]}, "args.1", "write {env.HOME}/x"),  # as a point of a sweep
        ({"args": ["$SCRATCH/${A_1}b"]}, "args.0", "write {env.SCRATCH}/{env.A_1}b"),
        ({"args": ["--rank=$SLURM_PROCID"]}, "args.0", "read SLURM_PROCID in the program"),
        ({"args": ["data/*.bin"]}, "args.0", "list the files"),
        ({"command": ["true", "-n", "$HOME"]}, "command.2", "write {env.HOME}"),
        (
            {"environment": {"variables": {"LIBRARY": "/a:$LIBRARY"}}},
            "environment.variables.LIBRARY",
            "write /a:{env.LIBRARY}",
        ),
        ({"command": ["bash", "-lc", "ls ~/x $HOME *.bin"]}, "", ""),
        ({"args": ["run=${name}", "a~/b", "$5", "none/*", "data/a.bin", "x?", "--re=^a$"]}, "", ""),
    ],
)
def test_no_shell_reads_the_arguments(
    tmp_path: Path, fields: dict[str, Any], place: str, remedy: str
) -> None:
    """What a shell would change reaches the program as it is written: the hint says what to do."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").touch()
    given = {"name": "j", "command": ["true"], "workdir": str(tmp_path), **fields}
    findings = check_program(Job.from_json(given), PATH)
    assert [(one.code, one.level, one.field) for one in findings] == [
        ("args.unexpanded", "warning", place)
    ] * bool(place)
    assert all(one.hint.startswith(remedy) for one in findings)


def test_a_command_line_in_one_word(tmp_path: Path) -> None:
    """No program has that name: the hint shows how to write it."""
    job = Job.from_json({"name": "j", "command": ["python x.py"], "workdir": str(tmp_path)})
    (finding,) = check_program(job, PATH)
    assert (finding.code, "a separate entry" in finding.hint) == ("program.missing", True)


def test_a_container_has_its_own_files(tmp_path: Path) -> None:
    """A script may be inside: a warning. An image has to exist; a reference is not looked up."""
    container = {"engine": "apptainer", "image": f"{tmp_path}/i.sif", "mounts": ["/none:/x"]}
    assert codes(tmp_path, script="/inside/t.py", environment={"container": container}) == {
        "script.missing": "warning",
        "image.missing": "error",
        "engine.missing": "warning",
        "mount.missing": "warning",
    }
    container = {"engine": "apptainer", "image": "docker://x/y"}
    assert codes(tmp_path, environment={"container": container}) == {"engine.missing": "warning"}


def test_an_image_file_of_pyxis_has_to_exist(tmp_path: Path) -> None:
    """Its other images are references; without srun nothing is known of the plugin."""
    container = {"engine": "pyxis", "image": f"{tmp_path}/torch.sqsh"}
    asked = {"container": container}
    assert codes(tmp_path, "/none", environment=asked) == {"image.missing": "error"}
    (tmp_path / "torch.sqsh").touch()
    assert codes(tmp_path, "/none", environment=asked) == {}
    container["image"] = "nvcr.io#nvidia/pytorch:26.09-py3"
    assert codes(tmp_path, "/none", environment=asked) == {}


def test_enroot_has_to_be_installed(tmp_path: Path) -> None:
    """On PATH, as apptainer; a file must exist, a container is named as on the nodes."""
    container = {"engine": "enroot", "image": f"{tmp_path}/torch"}
    asked = {"container": container}
    missing = {"image.missing": "error", "engine.missing": "warning"}
    assert codes(tmp_path, environment=asked) == missing
    enroot = tmp_path / "bin" / "enroot"
    enroot.parent.mkdir()
    enroot.touch(0o755)
    container["image"] = "torch"
    assert codes(tmp_path, str(enroot.parent), environment=asked) == {}


@pytest.mark.parametrize("has_plugin", [True, False])
def test_pyxis_has_to_be_part_of_srun(tmp_path: Path, *, has_plugin: bool) -> None:
    """A fake srun, which prints one option: there is no pyxis to install here."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!/bin/sh\necho --container-{'image' if has_plugin else 'none'}=IMAGE\n")
    srun.chmod(0o755)
    container = {"engine": "pyxis", "image": "nvcr.io#nvidia/pytorch:26.09-py3"}
    found = codes(tmp_path, environment={"container": container}, path=f"{srun.parent}:/bin")
    assert found == ({} if has_plugin else {"engine.missing": "warning"})


@pytest.mark.parametrize(
    ("fields", "settings", "missing"),
    [
        ({}, "home = /usr/bin", True),
        ({"launcher": "srun"}, "home = /usr/bin", False),
        ({}, "include-system-site-packages = true", False),
        ({"environment": {"setup": "module load torch"}}, "home = /usr/bin", False),
        ({"environment": {"variables": {"PYTHONPATH": "/opt/torch"}}}, "home = /usr/bin", False),
    ],
)
def test_torchrun_needs_pytorch(
    tmp_path: Path, fields: dict[str, Any], settings: str, *, missing: bool
) -> None:
    """Only where all packages of the Python can be seen: in an environment that is closed."""
    (tmp_path / "v" / "bin").mkdir(parents=True)
    (tmp_path / "v" / "bin" / "activate").touch()
    (tmp_path / "v" / "pyvenv.cfg").write_text(f"{settings}\n")
    environment = {"venv": f"{tmp_path}/v", **fields.get("environment", {})}
    found = codes(tmp_path, **{**fields, "environment": environment})
    assert ("torch.missing" in found) == missing
    (tmp_path / "v/lib/python3.12/site-packages/torch").mkdir(parents=True)
    assert "torch.missing" not in codes(tmp_path, **{**fields, "environment": environment})


@pytest.mark.parametrize(
    ("launcher", "environment", "missing"),
    [
        ("mpirun", {}, True),
        ("mpirun", {"modules": ["x"]}, False),
        ("mpirun", {"container": {"engine": "apptainer", "image": "docker://x"}}, True),
        ("horovodrun", {}, True),
        ("horovodrun", {"container": {"engine": "apptainer", "image": "docker://x"}}, False),
        ("horovodrun", {"venv": "{root}/v"}, False),
        ("torchrun", {}, False),
        ("srun", {}, False),
    ],
)
def test_the_program_that_starts_the_ranks(
    tmp_path: Path, launcher: str, environment: dict[str, Any], missing: bool
) -> None:
    """On the job's PATH: a module may bring it, and a container horovodrun, but not mpirun."""
    (tmp_path / "v" / "bin").mkdir(parents=True)
    (tmp_path / "v" / "bin" / "horovodrun").touch(0o755)
    if "venv" in environment:
        environment = {"venv": f"{tmp_path}/v"}
    job = Job.from_json(
        {"name": "j", "command": ["true"], "launcher": launcher, "environment": environment}
    )
    findings = check_program(job, {"PATH": str(tmp_path / "bin")})
    assert [f.value for f in findings if f.field == "launcher"] == [launcher] * missing


MODULE = """\
module() {
  case "$1 $2" in
    "is-avail gcc/13") return 0;;
    "is-avail mpi/5") [ -n "$LOADED" ];;
    "load gcc/13") LOADED=1;;
    "-t avail") [ -z "$3" ] && printf '/site:\\ngcc/13\\ncuda/12.4\\n' >&2; return 0;;
    *) return 1;;
  esac
}
"""


@pytest.mark.parametrize(
    ("fields", "on_nodes", "expected", "unseen"),
    [
        ({"modules": ["gcc/13", "mpi/5"]}, True, [], []),
        (
            {"modules": ["gcc/13", "mpi/5", "cuda/12.5"]},
            True,
            [
                (
                    "environment.modules.2",
                    "warning",
                    "there is no module cuda/12.5 on this machine; ",
                )
            ],
            [],
        ),
        (
            {"modules": ["cuda/12.5"]},
            False,
            [("environment.modules.0", "error", "there is no module cuda/12.5 on this machine")],
            [],
        ),
        ({"modules": ["gcc/13"], "conda": "ml"}, True, [], []),  # the module brings conda
        ({"conda": "ml"}, True, [], ["conda environment ml (no conda here)"]),
        (
            {"modules": ["gcc/13"], "conda": "mll"},
            True,
            [
                (
                    "environment.conda",
                    "warning",
                    "there is no conda environment mll on this machine; ",
                )
            ],
            [],
        ),
        ({"conda": "/a/path"}, True, [], []),
    ],
)
def test_software_that_does_not_exist(
    tmp_path: Path,
    fields: dict[str, Any],
    on_nodes: bool,
    expected: list[tuple[str, str, str]],
    unseen: list[str],
) -> None:
    """A module that shows only after another one is loaded is found; the nodes may have more."""
    conda = tmp_path / "conda"
    conda.write_text('#!/bin/sh\necho \'{"envs": ["/opt/c", "/opt/c/envs/ml"]}\'\n')
    conda.chmod(0o755)
    start = tmp_path / "modules.sh"
    start.write_text(MODULE.replace("LOADED=1", f"LOADED=1 CONDA_EXE={conda}"))
    environment = {**PATH, "BASH_ENV": str(start)}
    findings, left = check_software(
        Environment.from_json(fields),
        SubprocessRunner(),
        environment,
        timeout=120,
        on_nodes=on_nodes,
    )
    assert [(one.field, one.level) for one in findings] == [one[:2] for one in expected]
    assert all(
        one.message.startswith(text[2]) for one, text in zip(findings, expected, strict=True)
    )
    assert left == unseen


@pytest.mark.parametrize(
    "answer", [Completed(0, "no module\nconda\n"), SchedulerUnavailable("bash gave no answer")]
)
def test_without_a_module_system_nothing_is_known(answer: Completed | Exception) -> None:
    """Nor if it hangs: what was not looked up is listed."""
    software = Environment.from_json({"modules": ["x", "y"], "conda": "ml"})
    assert check_software(software, FakeRunner({"bash": [answer]}), PATH, timeout=1) == (
        [],
        ["modules x and y (no `module` command here)", "conda environment ml (no conda here)"],
    )


@pytest.mark.parametrize(
    ("fields", "records", "found"),
    [
        ({}, "/nfs/r", []),
        ({}, "/tmp/r", ["--records"]),
        ({"script": "/tmp/c/t.py", "workdir": "/tmp/c"}, "/tmp/r", ["--records"]),
        ({"script": "/disk/t.py"}, "/nfs/r", ["script"]),
        ({"script": "/disk/t.py"}, "/dev/shm/r", ["--records", "script"]),
        ({"workdir": "/disk/c", "snapshot": True}, "/nfs/r", []),
        ({"environment": {"venv": "/usr/v"}}, "/nfs/r", []),
        ({"environment": {"conda": "ml"}}, "/nfs/r", []),
        ({"environment": {"venv": "/disk/v"}}, "/nfs/r", ["environment.venv"]),
        ({"stage": [{"name": "d", "source": "/disk/d"}]}, "/nfs/r", ["stage.0.source"]),
        ({"collect": [{"source": "{local.dir}", "target": "{run.dir}"}]}, "/nfs/r", []),
        ({"collect": [{"source": "{local.dir}", "target": "/disk/d"}]}, "/disk/r", ["--records"]),
        ({"checkpoint": {"enabled": True}}, "/nfs/r", []),
        ({"checkpoint": {"directory": "/disk/c"}}, "/nfs/r", ["checkpoint.directory"]),
        ({"checkpoint": {"directory": "/tmp/c"}}, "/nfs/r", []),
    ],
)
def test_the_nodes_have_to_see_what_a_job_names(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], records: str, found: list[str]
) -> None:
    """One warning for each file system of this machine alone, at the first path that is on it."""
    own = "hpml_orchestrator.check.paths.own_file_system"
    monkeypatch.setattr(own, lambda path: "" if path.startswith("/nfs/") else "ext4")
    command = None if "script" in fields else ["true"]
    job = Job.from_json({"name": "j", "command": command, "workdir": "/", **fields})
    findings = [*check_shared(job, Path(records))]
    assert [one.field for one in findings] == found
    codes = {one.field: one.code for one in findings}
    assert codes == dict.fromkeys(found, "paths.local") | (
        {"--records": "records.local"} if "--records" in found else {}
    )


def test_records_have_to_be_written(tmp_path: Path) -> None:
    """The directory may be new, but not below a file."""
    (tmp_path / "file").touch()
    findings = check_records(tmp_path / "file" / "records")
    assert [finding.code for finding in findings] == ["records.unwritable"]
    assert list(check_records(tmp_path / "new" / "records")) == []


def test_a_cluster_of_one_machine(tmp_path: Path) -> None:
    """Its controller is on loopback; without slurm.conf nothing is assumed."""
    conf = tmp_path / "slurm.conf"
    environment = {"SLURM_CONF": str(conf)}
    assert not is_one_machine(environment)
    conf.write_text("ClusterName=x\nSlurmctldHost=head(127.0.0.1)\n")
    assert is_one_machine(environment)
    conf.write_text("ClusterName=x\nSlurmctldHost=head(10.0.0.1)\n")
    assert not is_one_machine(environment)
