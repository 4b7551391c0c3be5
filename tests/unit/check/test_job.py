"""What a job names on this machine is looked at; the cluster is asked with little patience."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check import data as check_data
from hpml_orchestrator.check.data import check_stages, check_targets
from hpml_orchestrator.check.files import check_files
from hpml_orchestrator.check.job import check_job, refusal
from hpml_orchestrator.check.local import check_local
from hpml_orchestrator.check.modules import check_modules
from hpml_orchestrator.check.records import check_records, one_machine
from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.packing.claim import Claim
from hpml_orchestrator.scheduler.command import Completed, SubprocessRunner
from hpml_orchestrator.scheduler.local.resources import MAX_TASKS, Machine
from hpml_orchestrator.spec import Job
from hpml_orchestrator.testing import FakeRunner

PATH = {"PATH": "/usr/bin:/bin"}


def job(root: Path, **fields: Any) -> Job:
    """A job that is right, but for these fields."""
    if not {"script", "module", "command"} & set(fields):
        fields["command"] = ["true"]
    return Job.model_validate({"name": "j", "workdir": str(root), **fields})


def codes(root: Path, **fields: Any) -> dict[str, str]:
    """Code and level of what is found of such a job's files."""
    return {one.code: one.level for one in check_files(job(root, **fields), PATH)}


def test_a_job_whose_files_are_there(tmp_path: Path) -> None:
    """Script, interpreter, virtual environment and conda environment: nothing is said."""
    (tmp_path / "t.py").write_text("")
    for made in ("v/bin/activate", "v/bin/python", "c/conda-meta/history"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch(0o755)
    script = str(tmp_path / "t.py")
    assert codes(tmp_path, script=script, environment={"venv": f"{tmp_path}/v"}) == {}
    assert codes(tmp_path, script=script, environment={"conda": f"{tmp_path}/c"}) == {}
    assert codes(tmp_path) == {}


@pytest.mark.parametrize(
    ("fields", "code", "level"),
    [
        ({"script": "/nope/t.py"}, "script.missing", "error"),
        ({"script": "{root}"}, "script.kind", "error"),
        ({"workdir": "{root}/none"}, "workdir.missing", "error"),
        ({"command": ["no-such-program"]}, "program.missing", "warning"),
        ({"command": ["./t.sh"]}, "program.missing", "warning"),
        ({"command": ["./plain"]}, "program.mode", "warning"),
        ({"module": "m", "environment": {"python": "py"}}, "program.missing", "warning"),
        (
            {"launcher": "horovodrun", "environment": {"variables": {"PATH": "/none"}}},
            "program.missing",
            "warning",
        ),
        ({"environment": {"venv": "{root}"}}, "venv.missing", "error"),
        ({"environment": {"conda": "{root}"}}, "conda.missing", "error"),
    ],
)
def test_what_is_not_there_is_told(
    tmp_path: Path, fields: dict[str, Any], code: str, level: str
) -> None:
    """Each with the field and the path; programs may come with the nodes, so they warn."""
    (tmp_path / "plain").touch(0o644)

    def here(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: here(one) for name, one in value.items()}
        return value.replace("{root}", str(tmp_path)) if isinstance(value, str) else value

    assert codes(tmp_path, **here(fields))[code] == level


def test_a_container_has_its_own_files(tmp_path: Path) -> None:
    """A script may be inside: a warning. An image has to be there; a reference is not looked at."""
    container = {"engine": "apptainer", "image": f"{tmp_path}/i.sif", "mounts": ["/none:/x"]}
    told = codes(tmp_path, script="/inside/t.py", environment={"container": container})
    assert told == {
        "script.missing": "warning",
        "image.missing": "error",
        "engine.missing": "warning",
        "mount.missing": "warning",
    }
    container = {"engine": "apptainer", "image": "docker://x/y"}
    assert codes(tmp_path, environment={"container": container}) == {"engine.missing": "warning"}


def staged(root: Path, source: str, **fields: Any) -> Job:
    return job(root, stage=[{"name": "d", "source": source, **fields}])


def test_data_are_measured(tmp_path: Path) -> None:
    """Sizes add up by target; a directory given by its path is nobody's disk that Slurm knows."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"x" * (3 * 1024**2))
    found, sizes = check_stages(staged(tmp_path, f"{tmp_path}/d"), seconds=9)
    assert (found, sizes.disk_mib, sizes.shm_mib) == ([], 3, 0)
    _, sizes = check_stages(staged(tmp_path, f"{tmp_path}/d", target="shm"), seconds=9)
    assert (sizes.disk_mib, sizes.shm_mib) == (0, 3)
    _, sizes = check_stages(staged(tmp_path, f"{tmp_path}/d", target="/scratch"), seconds=9)
    assert (sizes.disk_mib, sizes.shm_mib) == (0, 0)
    _, sizes = check_stages(staged(tmp_path, f"{tmp_path}/d", size="7M"), seconds=9)
    assert sizes.disk_mib == 7


def test_a_program_that_reads_parts_is_known_by_its_text(tmp_path: Path) -> None:
    """Partitioned data need a sampler: the script is looked at, a command cannot be."""
    (tmp_path / "data").mkdir()
    script = tmp_path / "train.py"
    stage = [{"name": "d", "source": str(tmp_path / "data"), "distribution": "partition"}]

    def found(**program: Any) -> list[str]:
        fields = {"script": None, "resources": {"nodes": 2}, "stage": stage, **program}
        fields = {key: value for key, value in fields.items() if value is not None}
        one = Job.model_validate({"name": "a", "workdir": str(tmp_path), **fields})
        return [finding.message for finding in check_stages(one, seconds=5)[0]]

    script.write_text("import torch\n")
    assert "does not read HPML_PART_D" in found(script=str(script))[0]
    assert "misses the rest" in found(command=["train"])[0]
    script.write_text("from hpml_packed import PackedDataset\n")  # which takes what is there
    assert "does not read HPML_PART_D" in found(script=str(script))[0]
    script.write_text("from hpml_packed import PackedDataset, PartSampler\n")
    assert found(script=str(script)) == []


def test_data_that_are_not_there(tmp_path: Path) -> None:
    """An error, but a warning where the user gave a size: then only the nodes need them."""
    (finding,), _ = check_stages(staged(tmp_path, "/none"), seconds=9)
    assert (finding.code, finding.level) == ("stage.missing", "error")
    assert "give its `size`" in finding.hint
    (finding,), _ = check_stages(staged(tmp_path, "/none", size="1G"), seconds=9)
    assert finding.level == "warning"


def test_data_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and directories; access is faked by mode bits, since root may read everything."""
    for name in ("ok/x", "shut/y"):
        (tmp_path / "d" / name).parent.mkdir(parents=True)
        (tmp_path / "d" / name).touch()
    (tmp_path / "d" / "ok" / "z").touch(0)
    (tmp_path / "d" / "shut").chmod(0)

    def by_mode_bits(path: str, _: int) -> bool:
        return bool(os.stat(path).st_mode & stat.S_IRUSR)

    monkeypatch.setattr(os, "access", by_mode_bits)
    (finding,), _ = check_stages(staged(tmp_path, f"{tmp_path}/d"), seconds=9)
    assert (finding.code, finding.level) == ("stage.unreadable", "error")
    assert f"{tmp_path}/d/shut" in finding.message
    assert f"{tmp_path}/d/ok/z" in finding.message
    assert "ok/x" not in finding.message
    (tmp_path / "d" / "shut").chmod(0o700)


def told(root: Path, source: str, **fields: Any) -> tuple[str, str, str]:
    """Code, message and hint of the one thing that is wrong with an entry."""
    (finding,), _ = check_stages(staged(root, source, **fields), seconds=9)
    assert (finding.level, finding.field) == ("error", "stage.0.source")
    return finding.code, finding.message, finding.hint


def test_a_pack_that_is_not_finished_is_an_error(tmp_path: Path) -> None:
    """As staging would say it; a job that stages it as a tree has said what it wants."""
    pack = tmp_path / "phuge"
    pack.mkdir()
    Claim(str(pack), "phuge").take("/data", None)
    for kind in ("auto", "pack"):
        code, message, hint = told(tmp_path, str(pack), kind=kind)
        assert code == "stage.kind"
        assert message.startswith("is no finished pack")
        assert "`hpml pack --resume" in hint
    assert check_stages(staged(tmp_path, str(pack), kind="tree"), seconds=9)[0] == []


def test_sources_of_another_kind_are_errors(tmp_path: Path) -> None:
    """A tree that is no pack, a directory for a tar, and archives that are none."""
    (tmp_path / "d").mkdir()
    (tmp_path / "notar.tar").write_bytes(b"x" * 2000)
    (tmp_path / "nozip.zip").write_bytes(b"x" * 2000)
    (tmp_path / "nosquash.sqfs").write_bytes(b"x" * 2000)
    kinds = {"pack": "no finished pack", "tar": "kind tar but a directory"}
    for kind, words in kinds.items():
        code, message, _ = told(tmp_path, f"{tmp_path}/d", kind=kind)
        assert code == "stage.kind"
        assert words in message
    for name in ("notar.tar", "nozip.zip", "nosquash.sqfs"):
        code, message, _ = told(tmp_path, f"{tmp_path}/{name}")
        assert code == "stage.kind"
        assert name in message


@pytest.mark.parametrize("form", ["v7", "ustar", "pax", "gnu", "gz", "zip", "empty"])
def test_archives_that_are_archives_pass(tmp_path: Path, form: str) -> None:
    """Also old ones without a magic number, empty and compressed ones."""
    (tmp_path / "a").write_text("a")
    name = "x.zip" if form == "zip" else "x.tar"
    if form == "zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(tmp_path / "a", "a")
    elif form == "empty":
        tarfile.open(tmp_path / name, "w").close()
    else:
        how = ["-z"] if form == "gz" else [f"--format={form}"]
        run = ["tar", "-C", str(tmp_path), *how, "-cf", str(tmp_path / name), "a"]
        subprocess.run(run, check=True)
    assert check_stages(staged(tmp_path, f"{tmp_path}/{name}"), seconds=9)[0] == []


def test_what_of_a_tree_is_refused_is_told(tmp_path: Path) -> None:
    """Links that lead out and fifos, as staging judges them; a pack's directory is none."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "in").symlink_to("..")
    (tree / "sub" / "up").symlink_to("../..")
    (tree / "etc").symlink_to("/etc")
    code, message, hint = told(tmp_path, f"{tree}/")
    assert code == "stage.refused"
    assert "etc: symbolic link to an absolute path (/etc)" in message
    assert "sub/up: symbolic link that leaves the tree (../..)" in message
    assert "sub/in" not in message
    assert "outside_links: true" in hint
    assert check_stages(staged(tmp_path, str(tree), outside_links=True), seconds=9)[0] == []
    os.mkfifo(tree / "sub" / "pipe")
    code, message, hint = told(tmp_path, str(tree), outside_links=True)
    assert (code, hint) == ("stage.refused", "")
    assert "sub/pipe: is a device, fifo or socket" in message


def test_only_so_many_links_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of links alone costs a remote file system no call for each of them."""
    for number in range(20):
        (tmp_path / f"l{number}").symlink_to("x")
    monkeypatch.setattr(check_data, "_MAX_LINKS", 5)
    real = os.readlink
    read: list[str] = []

    def counting(path: str, **more: Any) -> str:
        read.append(path)
        return real(path, **more)

    monkeypatch.setattr(os, "readlink", counting)
    monkeypatch.setattr(check_data, "kind_at", lambda *_: "tree")
    check_stages(staged(tmp_path, str(tmp_path)), seconds=9)
    assert read.count(f"{tmp_path}/l0") <= 1
    assert len([path for path in read if path.startswith(f"{tmp_path}/l")]) == 5


def test_targets_of_this_machine_are_looked_at(tmp_path: Path) -> None:
    """Where this machine stages; a cluster's nodes have directories of their own."""
    (tmp_path / "d").mkdir()
    missing = staged(tmp_path, f"{tmp_path}/d", target="/nosuch/dir")
    (finding,) = check_targets(missing)
    assert (finding.code, finding.field) == ("stage.target", "stage.0.target")
    assert finding.message.startswith("no such directory on this node")
    report = check_job(missing, backend="local", records=tmp_path / "r", environment=PATH)
    assert finding in report.errors
    assert check_targets(staged(tmp_path, f"{tmp_path}/d", target="/dev/shm")) == []
    assert check_targets(staged(tmp_path, f"{tmp_path}/d", target="local")) == []


def test_the_walk_through_data_ends(tmp_path: Path) -> None:
    """After its time it says how far it came, and claims to know no size."""
    for index in range(5):
        (tmp_path / f"{index}").write_bytes(b"x" * 1024**2)
    ticks = iter(range(100))
    stage = staged(tmp_path, str(tmp_path))
    (finding,), sizes = check_stages(stage, seconds=3, clock=lambda: float(next(ticks)))
    assert (finding.code, finding.level) == ("stage.partly", "warning")
    assert "only the first 3 entries" in finding.message
    assert sizes.disk_mib == 0


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


def test_modules_that_are_not_there(tmp_path: Path) -> None:
    """The nearest one is named; what shows only after another one is loaded is found."""
    start = tmp_path / "modules.sh"
    start.write_text(MODULE)
    environment = {**PATH, "BASH_ENV": str(start)}
    names = ["gcc/13", "mpi/5", "cuda/12.5"]
    (finding,) = check_modules(names, SubprocessRunner(), environment, timeout=120)
    assert finding.field == "environment.modules.2"
    assert finding.level == "warning"
    assert finding.hint == "did you mean cuda/12.4?"


def test_no_module_system_no_words() -> None:
    """Nothing is known then; nor where it hangs."""
    silent = FakeRunner({"bash": [Completed(77)]})
    assert check_modules(["x"], silent, PATH, timeout=1) == []
    hanging = FakeRunner({"bash": [SchedulerUnavailable("bash gave no answer")]})
    assert check_modules(["x"], hanging, PATH, timeout=1) == []


def test_this_machine_has_what_it_has(tmp_path: Path) -> None:
    """Nodes, GPUs, CPUs and memory are compared with the local backend's."""
    machine = Machine((0, 1), ("0",), 4096)
    fits = {"gpus": 1, "cpus_per_rank": 2, "memory": "4G"}
    assert check_local(job(tmp_path, resources=fits), machine) == []
    asks = {"nodes": 2, "gpus": 2, "cpus_per_rank": 3, "memory": "5G"}
    found = check_local(job(tmp_path, resources=asks), machine)
    assert [one.code for one in found] == [
        "local.nodes",
        "local.gpus",
        "local.cpus",
        "local.memory",
    ]
    assert [one.limit for one in found] == [1, 1, 2, "4G"]


def test_this_machine_takes_so_many_tasks_at_once(tmp_path: Path) -> None:
    """As many as the local backend, which would refuse the array when it is submitted."""
    machine = Machine((0, 1), (), 4096)
    assert check_local(job(tmp_path, array="0-999"), machine) == []
    (found,) = check_local(job(tmp_path, array="0-1000"), machine)
    assert (found.code, found.field, found.limit) == ("local.array", "array", MAX_TASKS)
    assert "1001 tasks" in found.message


def test_records_have_to_be_written_and_seen(tmp_path: Path) -> None:
    """A directory of this machine alone is a warning where the job runs on others."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\nnone /ram tmpfs rw 0 0\nnfs /home nfs rw 0 0\n")

    def told(root: str, *, on_nodes: bool = True) -> list[str]:
        found = check_records(Path(root), on_nodes=on_nodes, mounts=str(mounts))
        return [one.code for one in found if one.code == "records.local"]

    assert told("/home/ada/records") == []
    assert told("/ram/records") == ["records.local"]
    assert told("/dev/shm/records") == ["records.local"]
    assert told("/tmp/records") == ["records.local"]
    assert told("/tmp/records", on_nodes=False) == []
    (tmp_path / "file").touch()
    found = check_records(tmp_path / "file" / "records", on_nodes=False)
    assert [one.code for one in found] == ["records.unwritable"]
    assert check_records(tmp_path / "new" / "records", on_nodes=False) == []


def test_a_cluster_of_one_machine(tmp_path: Path) -> None:
    """Its controller is on loopback; where slurm.conf is not there nothing is assumed."""
    conf = tmp_path / "slurm.conf"
    environment = {"SLURM_CONF": str(conf)}
    assert not one_machine(environment)
    conf.write_text("ClusterName=x\nSlurmctldHost=head(127.0.0.1)\n")
    assert one_machine(environment)
    conf.write_text("ClusterName=x\nSlurmctldHost=head(10.0.0.1)\n")
    assert not one_machine(environment)


def test_a_controller_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """The commands get what is left of the time; the report says why nothing was asked."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    (bin_dir / "scontrol").chmod(0o755)
    began = time.monotonic()
    report = check_job(
        job(tmp_path, command=["nope"]),
        backend="slurm",
        records=tmp_path,
        environment={"PATH": f"{bin_dir}:/usr/bin:/bin"},
        run=SubprocessRunner(),
        cluster_seconds=0.5,
    )
    assert time.monotonic() - began < 120
    assert "scontrol gave no answer" in report.not_asked
    assert report.errors == []
    assert "program.missing" in [one.code for one in report.warnings]
    assert report.to_json()["ok"] is False


def test_an_answer_that_makes_no_sense_is_no_obstacle(tmp_path: Path) -> None:
    """What is wrong with the check is not wrong with the job."""
    run = FakeRunner({"scontrol": [ValueError("odd")]})
    report = check_job(job(tmp_path), backend="slurm", records=tmp_path, environment=PATH, run=run)
    assert "was not understood (ValueError: odd)" in report.not_asked


def test_a_refusal_tells_everything_at_once(tmp_path: Path) -> None:
    """Every finding with its hint in one error, whose hint says how to go on regardless."""
    report = check_job(
        job(tmp_path, resources={"nodes": 3, "memory": "100T"}),
        backend="local",
        records=tmp_path,
        environment=PATH,
    )
    error = refusal(report.errors)
    assert error.exit_code == 2
    assert "asks for 3 nodes" in str(error)
    assert "100T of memory" in str(error)
    assert error.field == "resources.nodes"
    assert "--no-check" in error.hint


def test_the_program_that_starts_the_ranks_is_looked_for(tmp_path: Path) -> None:
    """On the job's PATH: a module may bring it, and a container horovodrun, but not mpirun."""
    image = tmp_path / "i.sif"
    image.touch()

    def missing(launcher: str, **environment: Any) -> list[tuple[str, str]]:
        one = job(tmp_path, launcher=launcher, environment=environment)
        found = check_files(one, {"PATH": str(tmp_path / "bin")})
        return [(one.value, one.hint) for one in found if one.field == "launcher"]

    container = {"engine": "apptainer", "image": str(image)}
    for launcher, hint in (("mpirun", "Open MPI's module"), ("horovodrun", "`environment.venv`")):
        ((value, told),) = missing(launcher)
        assert (value, hint in told) == (launcher, True)
        assert missing(launcher, modules=["x"]) == []
    assert missing("torchrun") == []
    assert missing("srun") == []
    assert len(missing("mpirun", container=container)) == 1
    assert missing("horovodrun", container=container) == []
    (tmp_path / "v" / "bin").mkdir(parents=True)
    (tmp_path / "v" / "bin" / "horovodrun").touch(0o755)
    assert missing("horovodrun", venv=str(tmp_path / "v")) == []
