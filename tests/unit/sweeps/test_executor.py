"""Functions submitted with submitit, on the local backend."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.auto import test_auto
from submitit.core import plugins, test_plugins
from submitit.core.plugins import get_executors, get_job_environments
from submitit.core.utils import FailedJobError, UncompletedJobError, cloudpickle_dump, pickle_load
from submitit.local import local, test_local
from submitit.slurm.slurm import SlurmExecutor

from hpml_orchestrator.errors import HpmlError, InputError, SchedulerError
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.sweeps.executor import HpmlExecutor, HpmlJob
from hpml_orchestrator.sweeps.submitit_parameters import NAMES
from tests.patience import eventually


class LocalExecutor(HpmlExecutor):
    """The executor on this machine."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.update_parameters(backend="local")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Records of the test's own; the working directory is the test's, too."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HPML_HOME", str(tmp_path / "records"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Store(tmp_path / "records")


@pytest.fixture
def executor(tmp_path: Path) -> submitit.AutoExecutor:
    made = submitit.AutoExecutor(tmp_path / "logs", cluster="hpml")
    made.update_parameters(hpml_backend="local", timeout_min=5)
    return made


@pytest.mark.parametrize(
    "own_test",
    [
        test_local.test_local_map_array,
        test_local.test_local_submit_array,
        test_local.test_local_error,
        test_local.test_pickle_output_from_main,
        test_local.test_stdout,
        test_local.test_requeuing,
        test_local.test_custom_checkpoint,
        test_local.test_load_submission,
    ],
    ids=lambda own_test: own_test.__name__,
)
def test_submitits_tests_of_an_executor_pass(
    own_test: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of submitit's local executor pass with this one."""
    monkeypatch.setattr(local, "LocalExecutor", LocalExecutor)
    monkeypatch.setattr(local, "LocalJob", HpmlJob)
    own_test(tmp_path / "logs")


def test_the_folder_may_have_any_name(tmp_path: Path) -> None:
    """It reaches the job unchanged, and `%j` in it becomes the job's id."""
    name = "a'; echo \n0" + r'a\=0 {b}$c"'
    executor = LocalExecutor(tmp_path / name / "%j")
    job = executor.submit(max, 3, 4)
    assert job.result() == 4
    assert job.paths.folder == tmp_path / name / job.job_id


def test_submitits_tests_of_plugins_and_streams_pass(executor: submitit.AutoExecutor) -> None:
    """Both entry points are there; each stream has a separate log unless they are merged."""
    test_plugins.test_executors(get_executors()["hpml"])
    test_plugins.test_env(get_job_environments()["hpml"])
    test_auto.test_redirect_stdout_stderr(executor)


VALUES: dict[str, Any] = {
    "setup": ["module load cuda"],
    "teardown": ["date"],
    "stderr_to_stdout": True,
    "mem_gb": 1.5,
    "name": "a name",
    "additional_parameters": {"reservation": "course"},
    **dict.fromkeys("array_parallelism signal_delay_s timeout_min nodes cpus_per_task".split(), 2),
    **dict.fromkeys("gpus_per_node tasks_per_node".split(), 1),
}
SLURM_NAMES = SlurmExecutor._valid_parameters()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cluster", ["slurm", "local", "debug"])
def test_other_executors_keep_their_parameters(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter has the same effect on them as without this plugin, or the same error."""
    monkeypatch.setattr(SlurmExecutor, "affinity", lambda *_: 2)

    def effect(name: str, executors: dict[str, Any]) -> tuple[type[Exception] | None, Any]:
        monkeypatch.setattr(plugins, "get_executors", lambda: executors)
        made = submitit.AutoExecutor(tmp_path / "logs", cluster=cluster)
        try:
            made.update_parameters(**{name: VALUES.get(name.removeprefix("slurm_"), "x")})
        except (NameError, ValueError) as error:
            return type(error), None
        return None, dict(made.parameters)

    installed = dict(get_executors())
    others = {name: kind for name, kind in installed.items() if name != "hpml"}
    assert others.keys() < installed.keys()
    for name in {*NAMES, *SLURM_NAMES, "nonsense"}:
        assert effect(name, installed) == effect(name, others), name
        assert effect(f"slurm_{name}", installed) == effect(f"slurm_{name}", others), name


def test_a_site_profile_chooses_where_jobs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `hpml run`, even if sbatch is there."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (commands / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (tmp_path / "work" / "hpml.toml").write_text('backend = "local"\n')
    made = submitit.AutoExecutor(tmp_path / "logs", cluster="hpml")
    made.update_parameters(timeout_min=5)
    job = made.submit(pow, 2, 3)
    assert job.result() == 8
    assert hpml_run(job).record()["backend"] == "local"


def hpml_run(job: submitit.Job[Any]) -> Submission:
    assert isinstance(job, HpmlJob)
    assert job.run is not None
    return job.run


def about() -> dict[str, Any]:
    environment = submitit.JobEnvironment()
    names = "cluster job_id array_job_id array_task_id num_nodes num_tasks node global_rank"
    return {name: getattr(environment, name) for name in [*names.split(), "local_rank"]}


def test_a_job_of_two_ranks(executor: submitit.AutoExecutor, records: Store) -> None:
    """Each rank has its place, the data and a result; hpml binds them, and has their output."""

    def function(word: str) -> dict[str, Any]:
        print(f"{word} from {submitit.JobEnvironment().global_rank}")
        submitit.helpers.TorchDistributedEnvironment().export()
        staged = Path(os.environ["HPML_STAGE_WORDS"], "word").read_text()
        return {**about(), "cwd": str(Path.cwd()), "staged": staged}

    Path("data").mkdir()
    Path("data/word").write_text("text")
    executor.update_parameters(
        tasks_per_node=2,
        name="two_ranks",
        hpml_binding="spread",
        hpml_stage=[{"name": "words", "source": "data"}],
    )
    job = executor.submit(function, "hello")
    results = job.results()
    common = {"cluster": "hpml", "job_id": job.job_id, "num_tasks": 2, "num_nodes": 1, "node": 0}
    for rank, result in enumerate(results):
        wanted = {**common, "global_rank": rank, "local_rank": rank, "array_job_id": None}
        assert result.items() >= {**wanted, "cwd": str(Path.cwd()), "staged": "text"}.items()
        assert f"hello from {rank}\n" in str(job.task(rank).stdout())
    run = hpml_run(job)
    assert run == records.resolve(job.job_id)
    (state,) = eventually(lambda: [state for state in states(records, [run]) if state.over])
    assert (state.name, state.state) == ("two_ranks", "COMPLETED")
    assert {"hello from 0", "hello from 1"} <= set(state.run.output.read_text().splitlines())
    assert [rank["bound"] for rank in state.run.attempts()[0].bindings()] == [True, True]
    assert job.paths.submission_file.read_text() == run.script.read_text()


def state_is(job: submitit.Job[Any], state: str) -> bool:
    return job.watcher.get_state(job.job_id, "force") == state


def test_an_array_with_an_error(
    executor: submitit.AutoExecutor, records: Store, tmp_path: Path
) -> None:
    """A batch is one submission; one task's exception is its own."""

    def divide(number: int) -> tuple[float, Any]:
        return 6 / number, about()["array_task_id"]

    executor.update_parameters(hpml_array_parallelism=2)
    with executor.batch():
        jobs = [executor.submit(divide, number) for number in (3, 0)]
        with pytest.raises(AttributeError):
            print(jobs[0].job_id)
    assert jobs[0].result() == (2, "0")
    error = jobs[1].exception()
    assert isinstance(error, FailedJobError)
    assert "ZeroDivisionError" in str(error)
    assert [job.job_id.partition("_")[2] for job in jobs] == ["0", "1"]
    (submission,) = records.submissions()
    assert submission.record()["job"]["array"] == "0-1%2"
    for job, end in zip(jobs, ("COMPLETED", "FAILED"), strict=True):
        eventually(partial(state_is, job, end))
    path = tmp_path / "jobs.pkl"
    cloudpickle_dump(jobs, path)
    assert pickle_load(path)[0].result() == (2, "0")
    executor.update_parameters(hpml_after=[jobs[0].job_id])
    assert executor.submit(divide, 2).result() == (3, None)
    executor.update_parameters(hpml_dependency=f"afterok:{jobs[1].job_id}")
    with pytest.raises(InputError, match="ended FAILED"):
        executor.submit(divide, 1)


def test_a_job_is_cancelled(
    executor: submitit.AutoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over then, which asking for its result shows; a state is never older than a result."""
    failing = executor.submit(divmod, 1, 0)
    assert "ZeroDivisionError" in str(failing.exception())
    job = executor.submit(time.sleep, 600)
    job.watcher.update()
    before = job.watcher.num_calls
    failing.wait()
    assert failing.state != "UNKNOWN"
    assert job.watcher.num_calls > before
    eventually(lambda: state_is(job, "RUNNING"))
    job.cancel()
    eventually(lambda: job.done(force_check=True))
    assert job.state == "CANCELLED"
    eventually(lambda: failing.state == "FAILED")
    monkeypatch.setattr(HpmlJob, "_results_timeout_s", 0)
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()


class Counter(submitit.helpers.Checkpointable):
    """Counts starts until it has been checkpointed."""

    def __init__(self, started: Path) -> None:
        self.started = started
        self.checkpoints = 0

    def __call__(self) -> tuple[int, int]:
        rank = submitit.JobEnvironment().global_rank
        (self.started / f"{self.checkpoints}.{rank}").touch()
        while not (self.checkpoints or rank):  # rank 1 ends, and starts again all the same
            time.sleep(0.05)
        return rank, self.checkpoints

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        self.checkpoints += 1
        return submitit.helpers.DelayedSubmission(self)


def test_all_ranks_start_again_from_a_checkpoint(
    executor: submitit.AutoExecutor, tmp_path: Path, records: Store
) -> None:
    """Every rank continues with the first rank's checkpoint."""
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(Counter(tmp_path))
    eventually(lambda: len(list(tmp_path.glob("0.?"))) == 2)
    attempt = records.run(hpml_run(job).sid).attempts()[0]
    eventually(job.task(1).done)
    for rank in attempt.bindings():
        os.killpg(rank["pid"], signal.SIGUSR2)  # as srun signals a task
    eventually((tmp_path / "1.1").exists)
    assert job.results() == [(0, 1), (1, 1)]
    assert "Requeued" in str(job.stdout())


def test_parameters_are_fields_of_the_job(
    executor: submitit.AutoExecutor, tmp_path: Path, records: Store
) -> None:
    """Each goes where a job file has it, over the job file that is the base."""
    (tmp_path / "base.yaml").write_text(
        "{name: base, launcher: torchrun, script: train.py, args: [--lr, '1'], "
        "resources: {time: 30, gpus: 'a100:2', extra: [--hint=nomultithread]}, "
        "environment: {variables: {LEVEL: '3'}}}"
    )
    Path("data").mkdir()
    executor.update_parameters(
        timeout_min=90,
        gpus_per_node=4,
        mem_gb=1.5,
        hpml_job_file=tmp_path / "base.yaml",
        hpml_partition="gpu",
        hpml_stage=[{"name": "data", "source": "data"}],
        hpml_binding={"policy": "numa", "verify": "strict"},
        hpml_set={"resources.cpus_per_rank": 7, "environment.variables.MORE": "4"},
        hpml_setup=["export A=1", "export B=2"],
        hpml_additional_parameters={"no_kill": True},
    )
    with pytest.raises(SchedulerError, match="GPU"):  # as this machine has not so many
        executor.submit(about)
    (submission,) = records.submissions()
    wanted = {
        "name": "base",
        "launcher": "srun",
        "script": None,
        "workdir": str(Path.cwd()),
        "stage.0.source": str(Path("data").absolute()),
        "binding.policy": "numa",
        "binding.verify": "strict",
        "environment.setup": "export A=1\nexport B=2",
        "environment.variables.LEVEL": "3",
        "environment.variables.MORE": "4",
        "resources.gpus": "4",
        "resources.memory": "1536M",
        "resources.partition": "gpu",
        "resources.cpus_per_rank": 7,
        "resources.extra": ["--hint=nomultithread", "--no-kill"],
        "resources.time": "01:31:00",
    }
    assert {name: value_at(submission.record()["job"], name) for name in wanted} == wanted
    assert list((tmp_path / "logs").glob("*.pkl")) == []


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({"hpml_partition": "a,b", "hpml_qos": "q"}, "--partition=a,b --qos=q"),
        ({"hpml_exclude": "n[1-3]", "hpml_nodelist": "n4"}, "--exclude=n[1-3] --nodelist=n4"),
        ({"hpml_gres": "gpu:a100:4,nvme:1"}, "--gpus-per-node=a100:4 --gres=nvme:1"),
        ({"tasks_per_node": 4, "hpml_gpus_per_task": "a100:2"}, "--gpus-per-node=a100:8"),
        ({"hpml_num_gpus": 2, "hpml_mem_per_gpu": "16GB"}, "--gpus-per-node=2 --mem=32768M"),
        ({"cpus_per_task": 4, "hpml_mem_per_cpu": 1000}, "--mem=4000M"),
        ({"mem_gb": 2, "hpml_mem": "3G"}, "--mem=3072M"),
        ({"gpus_per_node": 2, "hpml_cpus_per_gpu": 4}, "--cpus-per-task=8"),
        ({"timeout_min": 5, "hpml_time": 120}, "--time=02:00:00"),
        ({"tasks_per_node": 5, "hpml_ntasks_per_node": 2}, "--ntasks-per-node=2"),
        (
            {"hpml_mail_user": "ada", "hpml_mail_type": "ALL"},
            "--mail-user=ada --mail-type=BEGIN,END,FAIL,REQUEUE",
        ),
        (
            {"hpml_additional_parameters": {"mail-user": "eve", "reservation": "r", "mem": "1G"}},
            "--mail-user=eve --reservation=r --mem=1024M",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_parameters_of_submitits_slurm_executor_keep_their_meaning(
    parameters: dict[str, Any], options: str, fake_sbatch: submitit.AutoExecutor, records: Store
) -> None:
    """Behind `hpml_` they become options of sbatch, also where hpml counts in other units."""
    fake_sbatch.update_parameters(**parameters)
    fake_sbatch.submit(about)
    (submission,) = records.submissions()
    script = submission.script.read_text().splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH ")}
    assert set(options.split()) <= directives


@pytest.fixture
def fake_sbatch(
    executor: submitit.AutoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> submitit.AutoExecutor:
    """The executor with an sbatch that accepts everything."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 4711\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    executor.update_parameters(hpml_backend="slurm")
    return executor


@pytest.mark.parametrize(
    ("name", "plain", "shown"),
    [
        ("my_job", "my_job", ""),
        ("a b/c:[1]", "a_b_c_1_", "a b/c:[1]"),
        ("[tab]\tü", "tab_", "[tab] ü"),
        ("x" * 67, "x" * 64, "x" * 67),
        ("///", "submitit", "///"),
    ],
)
def test_a_job_may_have_any_name(
    name: str,
    plain: str,
    shown: str,
    fake_sbatch: submitit.AutoExecutor,
    records: Store,
) -> None:
    """Slurm shows the user's, as it does the comment; hpml's is made of what it may have."""
    fake_sbatch.update_parameters(name=name, hpml_comment="why: a 'b'\n$c")
    fake_sbatch.submit(about)
    (submission,) = records.submissions()
    arguments = (submission.directory / "arguments").read_text().split("\0")
    assert [word for word in arguments if word.startswith("--job-name=")] == (
        [f"--job-name={shown}"] if shown else []
    )
    assert "--comment=why: a 'b' $c" in arguments
    assert submission.record()["name"] == plain
    assert f"#SBATCH --job-name={plain}\n" in submission.script.read_text()


def test_calls_that_are_too_large_are_refused(tmp_path: Path, records: Store) -> None:
    """In all, by the size of the first; nothing is submitted, and no file is left."""
    made = submitit.AutoExecutor(
        tmp_path / "logs", cluster="hpml", hpml_max_pickle_size_gb=3e-6, hpml_python="python3"
    )
    made.update_parameters(hpml_backend="local")
    with pytest.raises(RuntimeError, match="2 calls of about .* max_pickle_size_gb=3e-06"):
        made.map_array(len, [b"x" * 2000] * 2)
    assert not list(records.submissions())
    assert list((tmp_path / "logs").glob("*.pkl")) == []


def value_at(job: Any, field: str) -> Any:
    for part in field.split("."):
        job = job[int(part) if part.isdecimal() else part]
    return job


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"hpml_partion": "gpu"}, NameError, "Unknown argument 'partion' for executor 'hpml'"),
        ({"hpml_binding": "left"}, InputError, "binding.policy: must be"),
        ({"hpml_backend": "pbs"}, InputError, "must be auto, slurm or local"),
        ({"nodes": 0}, InputError, "resources.nodes"),
        ({"hpml_set": "resources.nodes=2"}, InputError, "set: must be a mapping"),
        ({"hpml_dependency": "singleton"}, InputError, "dependency: must be afterok"),
        ({"hpml_mem_per_gpu": "16GB"}, InputError, "mem_per_gpu: needs GPUs"),
        ({"hpml_mem_per_cpu": "much"}, InputError, "mem_per_cpu: must be a size"),
        ({"hpml_cpus_per_gpu": 3}, InputError, "cpus_per_gpu: the CPUs of 0 GPUs"),
        ({"hpml_job_file": "missing.yaml"}, HpmlError, "missing.yaml"),
        ({"hpml_array_parallelism": "x"}, InputError, "array_parallelism: must be a whole number"),
        ({"hpml_signal_delay_s": 0}, InputError, "signal_delay_s: must be a whole number above 0"),
        ({"hpml_set": {"resources.nods": 2}}, InputError, "resources.nods"),
        ({"hpml_set": {"checkpoint": True}}, InputError, "checkpoint: functions are saved"),
        (
            {"hpml_additional_parameters": {"chdir": "/tmp"}},
            InputError,
            "chdir has its own field",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_parameters_change_nothing(
    parameters: dict[str, Any],
    error: type[Exception],
    message: str,
    executor: submitit.AutoExecutor,
) -> None:
    """They are refused at once; the executor keeps its parameters."""
    before = dict(executor.parameters)
    with pytest.raises(error, match=re.escape(message)) as refused:
        executor.update_parameters(**parameters)
    assert error is not InputError or any("hint: " in note for note in refused.value.__notes__)
    assert executor.parameters == before
    with pytest.raises(InputError, match="is not a parameter") as raised:
        HpmlExecutor(executor.folder).update_parameters(partion="gpu")
    assert raised.value.hint == "did you mean partition?"


def test_the_killed_submitters_job_finds_its_call(
    executor: submitit.AutoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is written before its job exists, so the submitter need not live until then."""

    def never(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "symlink_to", never)
    with pytest.raises(KeyboardInterrupt):
        executor.submit(max, 5, 6)
    monkeypatch.undo()
    (result,) = eventually(lambda: list((tmp_path / "logs").glob("*_0_result.pkl")))
    assert pickle_load(result) == ("success", 6)
