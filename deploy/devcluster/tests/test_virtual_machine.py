"""Nodes of `devcluster up --machine` are taken for that machine by Slurm, tools and hpml alike."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.topology.sysfs import read_sysfs
from tests.cluster.conftest import DEVCLUSTER, SlurmCluster, booted

if TYPE_CHECKING:
    from collections.abc import Iterator

# Domain -> CPUs of a DGX A100, from NVIDIA's table; written out, not computed.
DGX_CPUS = [
    "0-15,128-143",
    "16-31,144-159",
    "32-47,160-175",
    "48-63,176-191",
    "64-79,192-207",
    "80-95,208-223",
    "96-111,224-239",
    "112-127,240-255",
]
DGX_GPUS = [3, 3, 1, 1, 7, 7, 5, 5]
SET_MEMPOLICY, GET_MEMPOLICY, PREFERRED = 238, 239, 1
PYTHON = sys.executable


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes that look like DGX A100, without accounting."""
    options = ("--machine", "dgx-a100", "--nodes", "2", "--no-accounting")
    with booted(*options, shares=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the development cluster's modules, which are not a package."""
    monkeypatch.syspath_prepend(str(DEVCLUSTER.parent))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("_"):
            del sys.modules[name]


@pytest.fixture
def preloaded(modules: Any, tmp_path: Path) -> dict[str, str]:
    """An environment whose processes have the CPUs and domains of a DGX A100, without a cluster."""
    if shutil.which("gcc") is None:
        pytest.skip("not installed: gcc (deploy/devcluster/devcluster install)")
    records, library = tmp_path / "records", tmp_path / "vmachine.so"
    records.mkdir()
    modules("_virtual").compile_library(modules("_machines").MACHINES["dgx-a100"], library, records)
    return os.environ | {"LD_PRELOAD": str(library)}


def python(code: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [PYTHON, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def batch(cluster: SlurmCluster, folder: Path, script: str, *options: str) -> str:
    """Runs a batch job on both whole nodes; returns what it printed."""
    path, output = folder / "job.sh", folder / "out.txt"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    whole = ("--nodes=2", "--exclusive", "--mem=0", "--ntasks-per-node=8", "--cpus-per-task=32")
    cluster.run("sbatch", "--wait", f"--output={output}", *(options or whole), path, cwd=folder)
    return output.read_text(encoding="utf-8")


ALLOWED = "grep Cpus_allowed_list /proc/self/status | cut -f2"
SHOWN_BY_PYTHON = """
import os
def cpus(path="/proc/self/status"):
    with open(path) as status:
        return next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))
"""


def test_hpml_topo_on_a_node_tells_the_machine_described(dgx: SlurmCluster) -> None:
    """Domains, cores, distances, GPUs, cards and UUIDs come out of the node's /sys and /proc."""
    shown = dgx.exec("node2", PYTHON, "-m", "hpml_orchestrator.cli", "topo", "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert told["source"] == "sysfs"
    assert told["warnings"] == []
    assert [one["cpus"] for one in told["domains"]] == DGX_CPUS
    assert told["domains"][5]["distances"] == {
        str(other): 10 if other == 5 else 12 if other >= 4 else 32 for other in range(8)
    }
    assert len(told["cores"]) == 128
    assert told["cores"][127] == {"number": 127, "socket": 1, "domain": 7, "cpus": "127,255"}
    assert [one["domain"] for one in told["gpus"]] == DGX_GPUS
    assert [one["address"][5:7] for one in told["gpus"]] == "07 0f 47 4e 87 90 b7 bd".split()
    assert len({one["uuid"] for one in told["gpus"]}) == 8
    assert all(re.fullmatch("GPU-[0-9a-f-]{36}", one["uuid"]) for one in told["gpus"])
    assert {one["name"]: one["domain"] for one in told["nics"]} == {
        "mlx5_0": 3,
        "mlx5_1": 3,
        "mlx5_2": 1,
        "mlx5_3": 1,
        "mlx5_6": 7,
        "mlx5_7": 7,
        "mlx5_8": 5,
        "mlx5_9": 5,
    }


@pytest.mark.parametrize(
    ("name", "sockets", "domains", "gpus", "nics"),
    [
        ("milan-reversed", 1, ["0-15", "16-31", "32-47", "48-63"], [3, 2, 1, 0], [3, 2]),
        (
            "intel-2s",
            2,
            [",".join(str(cpu) for cpu in range(first, 80, 2)) for first in (0, 1)],
            [0, 0, 1, 1],
            [0, 1],
        ),
        (
            "mi250x",
            1,
            ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"],
            [3, 3, 1, 1, 0, 0, 2, 2],
            [3, 1, 0, 2],
        ),
        ("cpu-2s", 2, ["0-11", "12-23"], [], []),
    ],
)
def test_a_machines_files_are_read_as_it_is_described(
    modules: Any,
    tmp_path: Path,
    name: str,
    sockets: int,
    domains: list[str],
    gpus: list[int],
    nics: list[int],
) -> None:
    """The reader that hpml has for a real /sys finds what each of the other machines has."""
    modules("_sysfs").write_tree(modules("_machines").MACHINES[name], tmp_path)
    told = read_sysfs(str(tmp_path / "sys"), str(tmp_path / "proc"))
    assert told.warnings == ()
    assert len({core.socket for core in told.cores}) == sockets
    listed = modules("_sysfs").cpu_list
    assert [listed(one.cpus) for one in told.domains] == domains
    assert [one.domain for one in told.gpus] == gpus
    assert all(one.uuid for one in told.gpus)
    assert [one.domain for one in told.nics] == nics


def test_slurm_binds_each_task_to_exactly_the_domain_asked_for(dgx: SlurmCluster) -> None:
    """Slurm's own map_ldom and mem-bind give every task its GPU's domain, on both nodes."""
    asked = ",".join(str(domain) for domain in DGX_GPUS)
    told = (
        f"echo $SLURMD_NODENAME $SLURM_LOCALID $({ALLOWED}) $(numactl --show | grep -m1 ^membind)"
    )
    found = dgx.run(
        *("srun", "--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=32", "--mem=0"),
        *("--gpus-per-node=8", f"--cpu-bind=map_ldom:{asked}", "--mem-bind=local"),
        *("bash", "-c", told),
    ).stdout.splitlines()
    memory = "membind:" if shutil.which("numactl") else ""
    assert sorted(" ".join(line.split()) for line in found) == sorted(
        f"{node} {task} {DGX_CPUS[domain]}" + (f" {memory} {domain}" if memory else "")
        for node in dgx.nodes
        for task, domain in enumerate(DGX_GPUS)
    )


def test_a_job_gets_cores_on_the_socket_of_its_gpu(dgx: SlurmCluster) -> None:
    """gres.conf lists the cores of each GPU; Slurm 22.05 uses only their socket."""
    part = ("-N1", "-n1", "--nodelist=node1", "--mem=100", "--gres-flags=enforce-binding")
    first = dgx.run(
        *("sbatch", "--parsable", "--output=/dev/null", "--gres=gpu:4", *part),
        *("--wrap", "sleep 600"),
    ).stdout.strip()
    told = f"echo $CUDA_VISIBLE_DEVICES $({ALLOWED})"
    try:
        # GPU 4 is the first of socket 1.
        second = dgx.run("srun", "-c8", "--gres=gpu:1", *part, "bash", "-c", told)
    finally:
        dgx.run("scancel", first)
    assert second.stdout.split() == ["4", "64-67,192-195"]


def test_a_batch_script_and_its_children_are_on_the_machine(
    dgx: SlurmCluster, tmp_path: Path
) -> None:
    """Nothing special in a script: its CPUs are the job's, and so are those of what it starts."""
    script = f"{ALLOWED}; nproc; bash -c '{ALLOWED}'; (taskset -c 5,7 bash -c 'nproc; {ALLOWED}')"
    options = ("--nodes=1", "--ntasks=1", "--cpus-per-task=16", "--mem=100")
    lines = batch(dgx, tmp_path, script, *options).splitlines()
    assert lines == ["0-7,128-135", "16", "0-7,128-135", "2", "5,7"]


def test_a_mask_set_inside_a_task_is_seen_from_outside(dgx: SlurmCluster, tmp_path: Path) -> None:
    """Another process of the node reads the new CPUs of a task in /proc/PID/status."""
    pid_file = tmp_path / "pid"
    script = (
        f"srun --ntasks=1 --nodes=1 --nodelist=node2 bash -c "
        f"'taskset -pc 96-127 $$ >/dev/null; echo $$ >{pid_file}.new; "
        f"mv {pid_file}.new {pid_file}; exec sleep 600'"
    )
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    submitted = dgx.run(
        "sbatch", "--parsable", "-N2", "--exclusive", "--mem=0", "--output=/dev/null", path
    )
    try:
        end = time.monotonic() + 120
        while not pid_file.exists() and time.monotonic() < end:
            time.sleep(0.05)
        status = f"/proc/{pid_file.read_text(encoding='utf-8').strip()}/status"
        seen = dgx.exec("node2", "grep", "Cpus_allowed", status).stdout.split()
        assert seen == [
            *("Cpus_allowed:", "00000000,00000000,00000000,00000000,ffffffff" + ",00000000" * 3),
            *("Cpus_allowed_list:", "96-127"),
        ]
    finally:
        dgx.run("scancel", submitted.stdout.strip())


def test_mpirun_binds_to_the_virtual_cores_of_two_nodes(dgx: SlurmCluster, tmp_path: Path) -> None:
    """Open MPI inside a job finds the machine, binds its ranks and reports what they then have."""
    if shutil.which("mpirun") is None:
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    script = (
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
        "mpirun -np 4 --map-by ppr:1:socket --bind-to core --report-bindings "
        f"bash -c 'echo $OMPI_COMM_WORLD_RANK $(hostname) $({ALLOWED})' 2>&1"
    )
    output = batch(dgx, tmp_path, script)
    ranks = sorted(line for line in output.splitlines() if re.match("[0-9] node", line))
    assert ranks == ["0 node1 0,128", "1 node1 64,192", "2 node2 0,128", "3 node2 64,192"]
    # version 4 also prints the hardware threads; version 5 words it differently
    for rank, (socket, core) in enumerate(((0, 0), (1, 64)) * 2):
        old = rf"MCW rank {rank} bound to socket {socket}\[core {core}\[hwt 0-1\]\]"
        new = rf"Rank {rank} bound to package\[{socket}\]\[core:L?{core}\]"
        assert re.search(f"{old}|{new}", output)


def test_a_nodes_bus_has_the_machines_cpus_and_domains(dgx: SlurmCluster) -> None:
    """Some hwlocs, such as those in wheels of Open MPI, read these folders and not the others."""
    for kind, number in (("cpu", 256), ("node", 8)):
        folder = f"/sys/bus/{kind}/devices"
        told = dgx.exec("node1", "bash", "-c", f"cd {folder} && echo */ && ls {kind}7/").stdout
        names, *inside = told.splitlines()
        assert sorted(names.split()) == sorted(f"{kind}{one}/" for one in range(number))
        assert {"cpu": "topology", "node": "cpumap"}[kind] in inside


def test_a_job_of_another_user_is_on_the_machine(dgx: SlurmCluster) -> None:
    """A user without rights binds itself, and cannot bind what is not its own."""
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    script = f"{ALLOWED}; taskset -pc 2 $$ >/dev/null; {ALLOWED}; taskset -pc 7 $PPID"
    found = dgx.run(
        *(*user, "srun", "-N1", "-n1", "-c4", "--mem=100", "bash", "-c", script),
        check=False,
        cwd="/",  # this user may enter it
    )
    assert found.stdout.splitlines()[:2] == ["0-1,128-129", "2"]
    assert "Operation not permitted" in found.stderr


def test_nodes_without_a_machine_see_the_real_one(slurm_cluster: SlurmCluster) -> None:
    """Without --machine nothing is laid over /sys, and nothing is preloaded."""
    online = Path("/sys/devices/system/cpu/online")
    script = f"cat {online}; echo [$LD_PRELOAD]"
    found = slurm_cluster.run("srun", "-n1", "sh", "-c", script, env={"LD_PRELOAD": ""})
    assert found.stdout.split() == [online.read_text(encoding="utf-8").strip(), "[]"]


def test_cpus_cannot_be_given_beside_a_machine(tmp_path: Path) -> None:
    """A machine has its own number of CPUs: another one is refused, in one line."""
    done = subprocess.run(
        [DEVCLUSTER, "up", "--box", tmp_path, "--machine", "cpu-2s", "--cpus", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "devcluster: --cpus is the machine's; leave it out with --machine\n"


def test_threads_and_children_keep_what_their_creator_had(preloaded: dict[str, str]) -> None:
    """A later change of the creator's mask is not theirs; a thread's own mask is its alone."""
    code = f"""{SHOWN_BY_PYTHON}
import subprocess, sys, threading
os.sched_setaffinity(0, range(16, 24))
go, done = threading.Event(), threading.Event()
tids = []
def body():
    tids.append(threading.get_native_id())
    done.set()
    go.wait()
    os.sched_setaffinity(0, [200])
    print(cpus("/proc/thread-self/status"), cpus())
thread = threading.Thread(target=body)
thread.start()
done.wait()
child = subprocess.Popen(["sleep", "60"])
forked = os.fork() or (os.read(os.pipe()[0], 1), os._exit(0))
os.sched_setaffinity(0, [3])
print(cpus(), cpus(f"/proc/self/task/{{tids[0]}}/status"))
print(cpus(f"/proc/{{child.pid}}/status"), cpus(f"/proc/{{forked}}/status"))
go.set()
thread.join()
child.kill()
os.kill(forked, 9)
"""
    for _ in range(5):
        assert python(code, preloaded) == ["3 16-23", "16-23 16-23", "200 3"]


def test_a_mask_set_for_a_child_that_just_began_is_not_lost(preloaded: dict[str, str]) -> None:
    """As slurmstepd binds its tasks: the parent sets a new child's mask while that one starts."""
    code = """
import os
lost = 0
for _ in range(100):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.read(ours, 1)
        os._exit(os.sched_getaffinity(0) != {77})
    os.sched_setaffinity(child, [77])
    os.write(theirs, b"x")
    lost += os.waitpid(child, 0)[1] != 0
    os.close(ours)
    os.close(theirs)
print(lost)
"""
    assert python(code, preloaded) == ["0"]


def test_calls_by_number_and_wrong_masks_end_as_the_kernel_has_it(
    preloaded: dict[str, str],
) -> None:
    """As libnuma calls it, by syscall(2); a mask of no CPU of the machine is refused."""
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
mask = (ctypes.c_ulong * 4)(0b1100, 0, 0, 1)
print(libc.syscall(203, 0, ctypes.c_ulong(32), mask))
got = (ctypes.c_ulong * 16)()
print(libc.syscall(204, 0, ctypes.c_ulong(128), got), list(got[:4]))
print(sorted(os.sched_getaffinity(0)))
print(libc.syscall(204, 0, ctypes.c_ulong(8), got), errno.errorcode[ctypes.get_errno()])
for cpus, pid in (([256], 0), ([1], 2**22 + 1)):
    try:
        os.sched_setaffinity(pid, cpus)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    assert python(code, preloaded) == [
        "0",
        "32 [12, 0, 0, 1]",
        "[2, 3, 192]",
        "-1 EINVAL",
        "EINVAL",
        "ESRCH",
    ]


def test_memory_policies_are_kept_and_domains_that_are_not_there_refused(
    preloaded: dict[str, str],
) -> None:
    """set_mempolicy takes the machine's domains alone; children have their parent's policy."""
    code = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
bits = ctypes.c_ulong(1024)
def put(mode, domains):
    mask = (ctypes.c_ulong * 16)(domains)
    if libc.syscall({SET_MEMPOLICY}, mode, mask, bits) < 0:
        return errno.errorcode[ctypes.get_errno()]
    return get()
def get(flags=0):
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    libc.syscall({GET_MEMPOLICY}, ctypes.byref(mode), mask, bits, None, ctypes.c_ulong(flags))
    return mode.value, mask[0]
print(get(), get(4), put(2, 0b11), put({PREFERRED}, 1 << 8), put({PREFERRED}, 1 << 7), flush=True)
if not os.fork():
    print(get(), put(0, 0), flush=True)
    os._exit(0)
os.wait()
print(get())
"""
    assert python(code, preloaded) == [
        "(0, 0) (0, 255) (2, 3) EINVAL (1, 128)",
        "(1, 128) (0, 0)",
        "(1, 128)",
    ]


def test_a_process_without_any_record_goes_on_as_on_the_whole_machine(
    preloaded: dict[str, str], tmp_path: Path
) -> None:
    """With the records gone nothing breaks: files are read, threads and children start."""
    (tmp_path / "records").rmdir()
    code = f"""{SHOWN_BY_PYTHON}
import subprocess, threading
thread = threading.Thread(target=lambda: print(cpus("/proc/thread-self/status")))
thread.start()
thread.join()
print(cpus(), subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
status = os.path.join({str(tmp_path)!r}, "status")
with open(status, "w") as file:
    file.write("Pid: a file of somebody else")
print(open(status).read())
"""
    assert python(code, preloaded) == [
        "0-255",
        "0-255 child",
        "Pid: a file of somebody else",
    ]
