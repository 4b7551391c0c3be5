"""The functions of `hpml-job.sh`, called by small scripts; hpml-node.pyz is a fake."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.script import archive
from tests.patience import eventually

BEGIN = 'source "$PWD/hpml-job.sh"\nhpml_begin "$PWD/node" 600\n'
NODE = """\
#!/bin/bash
shift 3  # -I -S hpml-node.pyz
echo "$@" >> "$HOME/calls"
case $1 in
  claim) echo "$HOME/runs/7/attempts/0"; exit "${CLAIM:-0}" ;;
  finish) eval "${FINISH:-}" ;;
  rendezvous) echo node1 20000 ;;
  agent) until [[ -e $2/over || -n ${AGENT_ENDS-} ]]; do sleep .02; done ;;
  shield) exec "${@:2}" ;;
  wait-ready) until grep -q ^agent "$HOME/calls"; do sleep .02; done; exit "${READY:-0}" ;;
esac
"""
SRUN = """\
#!/bin/bash
[[ $1 != *help ]] || { echo "${NO_BINDING:-}"; exit; }
until [[ $1 == bash ]]; do shift; done
exec "$@"
"""


class Bench:
    """A submission's directory, in which scripts call the functions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempt = root / "runs/7/attempts/0"
        self.attempt.mkdir(parents=True)
        self.places = f"{self.attempt} {root}"
        (root / "hpml-job.sh").write_bytes(archive.node_files()["hpml-job.sh"])
        (root / "hpml-node.pyz").touch()
        (root / "agent.json").touch()
        for name, text in (("node", NODE), ("srun", SRUN)):
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def start(self, code: str, **variables: str) -> subprocess.Popen[str]:
        (self.root / "job.sh").write_text(f"set -euo pipefail\n{code}\n")
        return subprocess.Popen(
            ["/bin/bash", "job.sh"],
            cwd=self.root,
            env={
                "PATH": f"{self.root}:/usr/bin:/bin",
                "HOME": str(self.root),
                "SLURM_JOB_ID": "7",
                "SLURM_NNODES": "1",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **variables: str) -> tuple[int, str, str]:
        """Run a script; return its status, output and errors."""
        process = self.start(code, **variables)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def calls(self, name: str) -> list[str]:
        """What hpml-node.pyz was called with, by that command."""
        lines = (self.root / "calls").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.split()[0] == name]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_attempt_is_claimed(bench: Bench) -> None:
    """Paths, key and times are exported; each rank is started through hpml-bind."""
    shown = "ATTEMPT_DIR RUN_DIR JOB_KEY"
    names = [*(f"HPML_{name}" for name in shown.split()), "SLURM_JOB_START_TIME"]
    code = f"{BEGIN}unset -v SLURM_JOB_ID\nprintenv {' '.join(names)} SLURM_JOB_END_TIME\n"
    code += 'echo "${hpml_unbound[@]} ${hpml_bind[0]}"; hpml_run true'
    status, out, err = bench.run(code, SLURM_CLUSTER_NAME="a", SLURM_JOB_START_TIME="1000")
    assert (status, err) == (0, "")
    run = bench.root / "runs/7"
    assert out.split("\n")[:3] == [f"{run}/attempts/0", str(run), "a-7"]
    assert out.split("\n")[3:6] == ["1000", "1600", f"--cpu-bind=none {bench.root}/node"]
    assert bench.calls("claim") == [str(bench.root)]
    assert bench.calls("finish") == [f"{run}/attempts/0 {bench.root} 0 "]


def test_slurms_own_times_count_and_its_limits(bench: Bench) -> None:
    """The end that Slurm sets stays, its variables of CPUs go, and --cpu-bind if it has none."""
    code = BEGIN + 'echo "$SLURM_JOB_END_TIME ${SRUN_CPUS_PER_TASK-unset} ${#hpml_unbound[@]}"\n'
    no_binding = "srun: error: this plugin lacks support for cpu binding"
    variables = {"SRUN_CPUS_PER_TASK": "2", "SLURM_JOB_END_TIME": "5", "NO_BINDING": no_binding}
    assert bench.run(f"{code}hpml_run true", **variables)[1] == "5 unset 0\n"


def test_a_run_that_is_claimed_already_ends_here(bench: Bench) -> None:
    """The status is that of the claim, and nothing is recorded."""
    status, out, _ = bench.run(f"{BEGIN}echo no", CLAIM="75")
    assert (status, out, bench.calls("finish")) == (75, "", [])


@pytest.mark.parametrize(
    ("finish", "ends"),
    [("echo 79", 79), ("echo 4; exit 0", 4), ("exit 1", 3), ("kill -9 $$", 3)],
)
def test_what_ended_the_job_is_its_exit_status(bench: Bench, finish: str, ends: int) -> None:
    """The status that `finish` prints replaces the script's own; without it the ranks' counts."""
    assert bench.run(f"{BEGIN}hpml_run bash -c 'exit 3'", FINISH=finish)[0] == ends


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("hpml_run true", 0, ""),
        ("hpml_run bash -c 'exit 9'; echo no", 9, ""),
        ("hpml_fail 78 'no such' thing", 78, "no such thing"),
        ("sleep 0 &", 1, "the script ended before its ranks: hpml_run has to start them"),
        ("false", 1, ""),
        ("exit 0", 1, "the script ended before its ranks: hpml_run has to start them"),
    ],
)
def test_every_end_is_recorded_and_stops_the_agents(
    bench: Bench, code: str, status: int, reason: str
) -> None:
    """The ranks' status, a reason of hpml's own, or a script that started nothing."""
    code = f"{BEGIN}hpml_agents --shm x\nhpml_wait_ready\n{code}"
    assert bench.run(code)[:2] == (status, "")
    assert bench.calls("finish") == [f"{bench.places} {status} {reason}"]
    assert bench.calls("agent") == [f"{bench.places} --shm x"]
    assert (bench.attempt / "over").exists()


def test_no_rank_starts_if_a_node_is_not_ready(bench: Bench) -> None:
    """The status is that of wait-ready."""
    code = f"{BEGIN}hpml_agents\nhpml_wait_ready\nhpml_run echo no"
    assert bench.run(code, READY="8")[:2] == (8, "")


@pytest.mark.parametrize(
    ("sent", "status", "reason", "got"),
    [
        (signal.SIGUSR1, 5, "", "USR1"),
        (signal.SIGUSR2, 5, "", "USR2"),
        (signal.SIGTERM, 143, "the script got SIGTERM", "TERM"),
        (signal.SIGINT, 130, "the script got SIGINT", "TERM"),
    ],
)
def test_signals(bench: Bench, sent: int, status: int, reason: str, got: str) -> None:
    """USR1 and USR2 reach the ranks, and the script waits for their end; others end the job."""
    traps = "".join(f"trap 'echo {one} > got; exit 5' {one}; " for one in ("USR1", "USR2", "TERM"))
    rank = f"{traps}touch ready; while sleep .02; do :; done"
    process = bench.start(f'{BEGIN}hpml_agents\nhpml_run bash -c "{rank}"')
    eventually((bench.root / "ready").exists)
    process.send_signal(sent)
    process.communicate(timeout=120)
    assert process.returncode == status
    assert (
        eventually(lambda: (bench.root / "got").exists() and (bench.root / "got").read_text())
        == f"{got}\n"
    )
    assert bench.calls("finish") == [f"{bench.places} {status} {reason}"]
    passed = [f"{bench.attempt} {got}"] if status == 5 else []
    assert bench.calls("note-signal") == passed


@pytest.mark.parametrize("agent_ends", [False, True])
def test_sigterm_of_a_job_with_checkpoints(bench: Bench, agent_ends: bool) -> None:
    """The script waits for its ranks, which the agents stop; without agents it ends at once."""
    rank = "trap '' TERM; touch ready; until [[ -e go ]]; do sleep .02; done"
    wait = "wait $hpml_agent" if agent_ends else ""
    code = f'{BEGIN}hpml_checkpoints saved\nhpml_agents\n{wait}\nhpml_run bash -c "{rank}"'
    ends = {"AGENT_ENDS": "1"} if agent_ends else {}
    process = bench.start(code, **ends)
    eventually((bench.root / "ready").exists)
    process.send_signal(signal.SIGTERM)
    if agent_ends:
        assert process.wait(timeout=120) == 143
        (bench.root / "go").touch()
    else:
        eventually(lambda: bench.calls("terminated"))
        (bench.root / "go").touch()
        assert process.wait(timeout=120) == 0
    process.communicate()
    code = "143" if agent_ends else "0"
    assert bench.calls("finish") == [f"{bench.places} {code} the script got SIGTERM"]
    assert bench.calls("go-on") == [f"{bench.places} {code}"]


def test_the_rendezvous_is_exported(bench: Bench) -> None:
    """For the ranks, as torch and horovod read it."""
    code = f"{BEGIN}hpml_rendezvous\nhpml_run printenv MASTER_ADDR MASTER_PORT"
    assert bench.run(code)[:2] == (0, "node1\n20000\n")


@pytest.mark.parametrize(
    ("variable", "before", "found"),
    [
        ("MODULESHOME", "", "init/bash"),
        ("LMOD_PKG", "", "init/bash"),
        ("MODULESHOME", "module() { :; }; ", "/dev/null"),
    ],
)
def test_the_module_command_is_found(bench: Bench, variable: str, before: str, found: str) -> None:
    """By the variables of its two implementations, unless the shell has it."""
    init = bench.root / "init/bash"
    init.parent.mkdir()
    init.touch()
    variables = {variable: str(bench.root)}
    status, out, _ = bench.run(f"{before}{BEGIN}hpml_module_init; hpml_run true", **variables)
    assert (status, Path(out.strip())) == (0, bench.root / found)


# What Modules 3.2.10 prints, and returns 0.
OLD = "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'cuda'"


@pytest.mark.parametrize(
    ("module", "ends"),
    [
        (f'echo "{OLD}" >&2', 1),
        ("echo 'unknown module' >&2; return 3", 3),
        ("LOADEDMODULES=gcc/11:cuda/12.4", 0),
        ("LOADEDMODULES=cuda; echo 'other:ERROR:102: in a module that it needs' >&2", 0),
        ("echo 'an alias of a loaded one' >&2", 0),
    ],
)
def test_a_module_that_is_not_loaded_ends_the_job(bench: Bench, module: str, ends: int) -> None:
    """By the status of `module load`, or by its words where that is always 0; these are shown."""
    code = f"module() {{ {module}; }}\n{BEGIN}set +eu; hpml_load_module cuda; hpml_run echo ranks"
    status, out, err = bench.run(code, LOADEDMODULES="gcc/11")
    assert (status, out) == (ends, "" if ends else "ranks\n")
    assert ("hpml: cannot load the module cuda\n" in err) == bool(ends)
    assert (OLD in err) == (OLD in module)


@pytest.mark.parametrize(
    ("named", "made", "ends"),
    [
        ("$HOME/env", "conda-meta etc/conda/activate.d bin", ""),
        ("$HOME/env", "bin", "not a conda environment: "),
        ("ml", "", "no conda on PATH: load its module first, or give the environment's path"),
    ],
)
def test_a_conda_environment_where_no_conda_is(
    bench: Bench, named: str, made: str, ends: str
) -> None:
    """Its path is enough, as for environments that micromamba makes."""
    for name in made.split():
        (bench.root / "env" / name).mkdir(parents=True)
    if not ends:
        (bench.root / "env/etc/conda/activate.d/a.sh").write_text("export FROM_PACKAGE=1\n")
    shown = 'echo "$CONDA_PREFIX ${PATH%%:*} $FROM_PACKAGE"'
    status, out, err = bench.run(f"{BEGIN}hpml_activate_conda {named}; {shown}; hpml_run true")
    env = bench.root / "env"
    assert (status, out) == ((78, "") if ends else (0, f"{env} {env}/bin 1\n")), err
    assert ends in err


@pytest.mark.parametrize(
    ("program", "status"),
    [("echo 'mpirun (Open MPI) 5.0.1'", 0), ("echo HYDRA build details", 78), ("exit 127", 78)],
)
def test_mpirun_has_to_be_open_mpis(bench: Bench, program: str, status: int) -> None:
    """Another one, or none, ends the job before any rank starts."""
    (bench.root / "mpirun").write_text(f"#!/bin/sh\n{program}\n")
    (bench.root / "mpirun").chmod(0o755)
    ended, out, err = bench.run(f"{BEGIN}hpml_need_mpirun; hpml_run echo ranks")
    assert (ended, out) == (status, "" if status else "ranks\n")
    assert ("no mpirun of Open MPI on PATH" in err) == bool(status)
