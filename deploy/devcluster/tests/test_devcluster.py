"""The development cluster is what the other cluster tests take it for."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.hpml_on_slurm import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import SlurmCluster

DEVCLUSTER = Path(__file__).parents[2] / "devcluster" / "devcluster"


def processes_mentioning(text: str) -> list[str]:
    """Command lines of all processes with the text in them, but for this process."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    return "State:\tZ" in status


def submit(cluster: SlurmCluster, folder: Path, script: str, *options: str) -> int:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    output = folder / "out.txt"
    result = cluster.run("sbatch", "--parsable", f"--output={output}", *options, path, cwd=folder)
    return int(result.stdout)


def job(cluster: SlurmCluster, number: int) -> dict[str, Any]:
    return next(job for job in cluster.jobs() if job["job_id"] == number)


def state(cluster: SlurmCluster, number: int) -> str:
    told = job(cluster, number)["job_state"]  # a list from Slurm 23.11 on
    return str(told[0] if isinstance(told, list) else told)


def accounted(cluster: SlurmCluster, number: int) -> str:
    return cluster.run("sacct", "-n", "-X", "-P", "-j", str(number), "-o", "State").stdout.strip()


@pytest.fixture
def small_box(slurm_cluster: SlurmCluster) -> Iterator[Path]:
    """An empty box for a cluster of the test's own, which is down at the end in any case."""
    box = Path(tempfile.mkdtemp(prefix="hpml-devcluster-test-", dir="/tmp"))
    yield box
    slurm_cluster.run(DEVCLUSTER, "down", "--box", box, "--purge")
    shutil.rmtree(box, ignore_errors=True)


def test_status_shows_every_daemon_and_node_alive(slurm_cluster: SlurmCluster) -> None:
    """The status command finds all daemons running and all nodes known to Slurm."""
    shown = json.loads(
        slurm_cluster.run(DEVCLUSTER, "status", "--json", "--box", slurm_cluster.box).stdout
    )
    assert shown["up"]
    assert shown["dead"] == []
    assert {daemon["name"] for daemon in shown["daemons"]} == {
        "munged",
        "mariadbd",
        "slurmdbd",
        "slurmctld",
    }
    assert [node["name"] for node in shown["nodes"]] == list(slurm_cluster.nodes)
    assert all(node["state"] for node in shown["nodes"])


def test_env_prints_the_line_that_a_shell_evaluates(slurm_cluster: SlurmCluster) -> None:
    """A shell that evaluates the output of env reaches the cluster."""
    line = slurm_cluster.run(DEVCLUSTER, "env", "--box", slurm_cluster.box).stdout
    assert line == f"export SLURM_CONF={slurm_cluster.slurm_conf}\n"


def test_the_fixture_leaves_the_environment_alone(slurm_cluster: SlurmCluster) -> None:
    """Tests of other things do not get the cluster's SLURM_CONF by accident."""
    assert os.environ.get("SLURM_CONF") != str(slurm_cluster.slurm_conf)


def test_each_node_has_its_own_host_name(slurm_cluster: SlurmCluster) -> None:
    """A job on two nodes sees two host names, which are the names of the nodes."""
    names = slurm_cluster.run("srun", "-N2", "-n2", "hostname").stdout.split()
    assert sorted(names) == ["node1", "node2"] == list(slurm_cluster.nodes)


@pytest.mark.parametrize(
    ("daemon", "kill"), [("node1", True), ("node2", False), ("slurmctld", False)]
)
def test_a_restarted_daemon_finds_the_jobs_and_files_of_before(
    slurm_cluster: SlurmCluster, tmp_path: Path, daemon: str, kill: bool
) -> None:
    """A job runs on, a file in /tmp stays, and a later job starts on the node."""
    node = daemon if daemon in slurm_cluster.nodes else "node1"
    slurm_cluster.exec(node, "touch", "/tmp/stays")
    go = tmp_path / "go"
    number = submit(slurm_cluster, tmp_path, f"until [ -e {go} ]; do sleep 0.1; done", f"-w{node}")
    eventually(lambda: state(slurm_cluster, number) == "RUNNING")
    before = slurm_cluster.pids[daemon]
    slurm_cluster.restart(daemon, kill=kill)
    assert ended(before)
    assert slurm_cluster.leftovers(node) == ["/tmp/stays"]
    assert slurm_cluster.run("srun", "-w", node, "--overcommit", "hostname").stdout == f"{node}\n"
    assert state(slurm_cluster, number) == "RUNNING"
    go.touch()
    eventually(lambda: state(slurm_cluster, number) == "COMPLETED")
    slurm_cluster.exec(node, "rm", "/tmp/stays")


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_temporary_folders_are_private_to_a_node(slurm_cluster: SlurmCluster, folder: str) -> None:
    """What a job leaves in /tmp or /dev/shm is on its node only, and leftovers reports it."""
    mine = f"{folder}/only-on-node1"
    slurm_cluster.run("srun", "-w", "node1", "touch", mine)
    assert slurm_cluster.leftovers("node1") == [mine]
    assert slurm_cluster.leftovers("node2") == []
    assert not Path(mine).exists()
    slurm_cluster.exec("node1", "rm", mine)
    assert slurm_cluster.leftovers("node1") == []


def test_temporary_folders_are_bounded_memory_file_systems(slurm_cluster: SlurmCluster) -> None:
    """The private folders are of the size asked for, so no job can fill the machine."""
    shown = slurm_cluster.exec("node2", "df", "-m", "--output=size", "/tmp", "/dev/shm")
    assert shown.stdout.split()[-2:] == ["512", "512"]


def test_pytest_folders_are_shared_by_all_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A file written by a job on a node is under the same path on the login node."""
    slurm_cluster.run("srun", "-N2", "-n2", "bash", "-c", 'echo hello > "$0/$(hostname)"', tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node1", "node2"]


def test_a_node_resolves_every_node_to_an_address_of_its_own(slurm_cluster: SlurmCluster) -> None:
    """On each node both names stand for the same two different loopback addresses."""
    answers = [
        slurm_cluster.exec(node, "getent", "ahostsv4", "node1", "node2").stdout
        for node in slurm_cluster.nodes
    ]
    assert answers[0] == answers[1]
    assert {line.split()[0] for line in answers[0].splitlines()} == {"127.0.17.1", "127.0.17.2"}


def test_a_job_on_one_node_reaches_a_server_on_the_other_by_name(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """What a process binds to its own host name is reached by that name from elsewhere."""
    program = tmp_path / "meet.py"
    program.write_text(
        "import os, pathlib, socket, sys, time\n"
        "port = pathlib.Path(sys.argv[1])\n"
        "if os.environ['SLURM_PROCID'] == '0':\n"
        "    server = socket.create_server((socket.gethostname(), 0))\n"
        "    port.with_suffix('.new').write_text(str(server.getsockname()[1]))\n"
        "    port.with_suffix('.new').rename(port)\n"
        "    print(server.accept()[0].recv(99).decode())\n"
        "else:\n"
        "    while not port.exists():\n"
        "        time.sleep(0.05)\n"
        "    link = socket.create_connection(('node1', int(port.read_text())))\n"
        "    link.sendall(socket.gethostname().encode())\n",
        encoding="utf-8",
    )
    result = slurm_cluster.run(
        "srun", "-N2", "-n2", "-t1", "python3", program, tmp_path / "port", timeout=120
    )
    assert result.stdout == "node2\n"


def test_a_batch_job_runs_its_steps_on_all_nodes_and_is_accounted(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """An srun inside a batch job starts on both nodes, and sacct reports COMPLETED."""
    number = submit(slurm_cluster, tmp_path, "srun hostname", "-N2", "--wait", "-t1")
    assert sorted((tmp_path / "out.txt").read_text().split()) == ["node1", "node2"]
    assert state(slurm_cluster, number) == "COMPLETED"
    eventually(lambda: accounted(slurm_cluster, number) == "COMPLETED")


def test_a_failed_batch_job_is_accounted_with_its_status(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The exit status of a batch script is in the accounting."""
    number = submit(slurm_cluster, tmp_path, "exit 7", "-t1")
    eventually(lambda: accounted(slurm_cluster, number) == "FAILED")
    shown = slurm_cluster.run("sacct", "-n", "-X", "-P", "-j", str(number), "-o", "ExitCode")
    assert shown.stdout.strip() == "7:0"


def test_gpus_are_named_to_the_job(slurm_cluster: SlurmCluster) -> None:
    """A job that asks for GPUs finds them in CUDA_VISIBLE_DEVICES, and others find none."""
    show = ("bash", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}")
    both = slurm_cluster.run("srun", "-n1", "--gpus-per-node=2", *show).stdout
    each = slurm_cluster.run("srun", "-N1", "-n2", "--gpus-per-task=1", *show).stdout
    none = slurm_cluster.run("srun", "-n1", *show).stdout
    assert (both, sorted(each.split()), none) == ("0,1\n", ["0", "1"], "none\n")


def test_nodes_have_more_cpus_than_the_machine_may_have(slurm_cluster: SlurmCluster) -> None:
    """Eight tasks run at once on two nodes of four CPUs, with and without a binding option."""
    for options in ([], ["--cpu-bind=none"]):
        names = slurm_cluster.run("srun", "-n8", *options, "hostname").stdout.split()
        assert sorted(names) == ["node1"] * 4 + ["node2"] * 4


def test_scancel_ends_a_job_and_its_processes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """A cancelled job gets SIGTERM in its steps, its processes end, and it counts as cancelled."""
    script = "srun bash -c 'trap \": >ended; exit 1\" TERM; echo $$ >pid; sleep 600 & wait'"
    number = submit(slurm_cluster, tmp_path, script, "-t5")
    pid_file = tmp_path / "pid"
    eventually(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    assert not ended(pid)
    slurm_cluster.run("scancel", str(number))
    eventually(lambda: ended(pid))
    eventually(lambda: state(slurm_cluster, number) == "CANCELLED")
    assert (tmp_path / "ended").exists()


def test_a_requeued_job_runs_again_soon(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """A job that is requeued starts a second time within seconds and knows that it did."""
    script = 'echo run ${SLURM_RESTART_COUNT:-0}\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    number = submit(slurm_cluster, tmp_path, script, "-t5", "--requeue", "--open-mode=append")
    output = tmp_path / "out.txt"
    eventually(lambda: output.exists() and "run 0" in output.read_text())
    slurm_cluster.run("scontrol", "requeue", str(number))
    eventually(lambda: state(slurm_cluster, number) == "COMPLETED")
    assert [line for line in output.read_text().splitlines() if line.startswith("run")] == [
        "run 0",
        "run 1",
    ]


def test_a_job_of_main_takes_the_nodes_from_a_job_of_low(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A job in the partition low goes back to the queue when one in main needs its nodes."""
    low = submit(slurm_cluster, tmp_path, "sleep 600", "-p", "low", "-N2", "--exclusive", "-t5")
    eventually(lambda: state(slurm_cluster, low) == "RUNNING")
    names = slurm_cluster.run("srun", "-p", "main", "-N2", "-n8", "-t1", "hostname").stdout.split()
    requeued = job(slurm_cluster, low)["restart_cnt"]  # it may run again by now
    slurm_cluster.run("scancel", str(low))
    assert sorted(set(names)) == ["node1", "node2"]
    assert requeued == 1


def test_a_second_up_on_the_same_box_is_refused(slurm_cluster: SlurmCluster) -> None:
    """A box in use is not changed, and the message names the remedy."""
    result = slurm_cluster.run(DEVCLUSTER, "up", "--box", slurm_cluster.box, check=False)
    assert result.returncode == 1
    assert "already up" in result.stderr
    assert "Traceback" not in result.stderr
    assert slurm_cluster.run("srun", "hostname").stdout == "node1\n"


def _server_above_a_free_port() -> socket.socket:
    """Listen on a port below those that the kernel gives to anybody; the one before it is free."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000, 2):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return socket.create_server(("127.0.0.1", port + 1))
        except OSError:
            continue
    raise AssertionError("no two free ports")


def test_a_port_in_use_is_named_and_nothing_is_started(
    slurm_cluster: SlurmCluster, small_box: Path
) -> None:
    """A boot that cannot get its ports names the port and starts no daemon."""
    with _server_above_a_free_port() as server:
        port = server.getsockname()[1]
        result = slurm_cluster.run(
            *(DEVCLUSTER, "up", "--no-accounting", "--box", small_box),
            *("--port-base", str(port - 1)),
            check=False,
        )
    assert result.returncode == 1
    assert f"port {port} is in use" in result.stderr
    assert processes_mentioning(str(small_box)) == []


def test_a_box_that_holds_other_things_is_refused(
    slurm_cluster: SlurmCluster, small_box: Path
) -> None:
    """A folder with somebody's files in it is never taken for a box."""
    precious = small_box / "precious"
    precious.touch()
    result = slurm_cluster.run(DEVCLUSTER, "up", "--box", small_box, check=False)
    assert result.returncode == 1
    assert "other things" in result.stderr
    assert precious.exists()


def test_down_leaves_no_process_behind(slurm_cluster: SlurmCluster, small_box: Path) -> None:
    """The end of a cluster is the end of its daemons, jobs, and what has escaped from jobs."""
    up = slurm_cluster.run(
        *(DEVCLUSTER, "up", "--json", "--no-accounting", "--nodes", "2", "--box", small_box)
    )
    facts = json.loads(up.stdout)
    own = {"SLURM_CONF": facts["slurm_conf"]}
    sleep = f"sleep 600.{os.getpid()}"  # unique on the machine
    # Two forks and a new session: Slurm no longer recognizes the process as the job's.
    escape = "(setsid sleep 601 </dev/null >/dev/null 2>&1 & echo $! )"
    stray = int(slurm_cluster.run("srun", "-n1", "bash", "-c", escape, env=own).stdout)
    slurm_cluster.run(
        *("sbatch", "-N2", "-o", "/dev/null", "--wrap", f"trap '' TERM; srun {sleep}"),
        env=own,
    )
    listing = ("squeue", "-h", "-o", "%T")
    eventually(lambda: slurm_cluster.run(*listing, env=own).stdout == "RUNNING\n")
    assert processes_mentioning(str(small_box))
    assert not ended(stray)

    slurm_cluster.run(DEVCLUSTER, "down", "--box", small_box)

    assert [name for name, pid in facts["pids"].items() if not ended(pid)] == []
    assert ended(stray)
    assert processes_mentioning(str(small_box)) == []
    assert processes_mentioning(sleep) == []
    again = slurm_cluster.run(DEVCLUSTER, "down", "--box", small_box)
    assert "nothing is up" in again.stdout
    assert slurm_cluster.run("srun", "hostname").stdout == "node1\n"


def test_a_command_on_an_unknown_node_is_an_error_without_traceback(
    slurm_cluster: SlurmCluster,
) -> None:
    """A wrong node name gives a message with the right ones."""
    result = slurm_cluster.exec("node9", "true")
    assert result.returncode == 1
    assert result.stderr == "devcluster: no node node9; there are node1, node2\n"
