"""submitit's executor `hpml`: `submitit.AutoExecutor(folder, cluster="hpml")`.

A function is submitted like any job: its parameters become fields of a job file, and `runs/`
submits, queries and cancels it. submitit's files are in its folder; `%j` is the scheduler's job id,
or on this machine the end of the run's id. `%A_submission.sh` is a link to the batch script in
hpml's records.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from submitit import AutoExecutor
from submitit.core import core
from submitit.core.utils import DelayedSubmission, JobPaths

from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable, did_you_mean
from hpml_orchestrator.jobfile.text import absolute
from hpml_orchestrator.records.ids import ArraySpec, new_id
from hpml_orchestrator.records.job import Job, Json
from hpml_orchestrator.records.store import Store, open_store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.cancel import cancel
from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.runs.prepare import Rendered, render_job
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.runs.submit import submit
from hpml_orchestrator.script.render import leaves_out
from hpml_orchestrator.sweeps.submitit_parameters import (
    NAMES,
    ParameterNames,
    Parameters,
    derived_from,
    fields_of,
    given_in,
    job_name,
)
from hpml_orchestrator.sweeps.submitit_rank import (
    SIGNAL_AFTER,
    HpmlJobEnvironment,
    call_pickle,
    local_job_id,
)
from hpml_orchestrator.sweeps.table import max_array_size

_MODULE = "hpml_orchestrator.sweeps.submitit_rank"
_DEFAULTS = {"name": "submitit", "resources": {"time": "5", "ranks_per_node": 1}}
"""The job without `job_file`; parameters are put on top of it."""
_PARALLEL_TASKS = 256  # of an array at the same time, as submitit has it
_SIGNAL_SECONDS = 90  # before the time limit, as submitit has it
_START_SECONDS = 60  # for a start or restart on this machine


class HpmlInfoWatcher(core.InfoWatcher):
    """Asks for the states of all jobs at once: their records first, then each scheduler once."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._paths: dict[str, JobPaths] = {}

    def watch(self, job_id: str, paths: JobPaths) -> None:
        """Watch a job by its files."""
        self._paths[job_id] = paths
        self.register_job(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the job's state, by Slurm's names."""
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job has ended for good."""
        self.get_info(job_id, mode=mode)
        return job_id in self._finished

    def update(self) -> None:
        """Ask for the states of all jobs that are not over."""
        self._last_status_check = time.time()
        runs: dict[Path, dict[str, Submission]] = defaultdict(dict)
        for job_id in self._registered - self._finished:
            run = _run_of(self._paths[job_id]) if job_id in self._paths else None
            if run is not None:
                runs[run.directory.parents[1]][job_id] = run
        for root, submissions in runs.items():
            self._num_calls += 1
            answer = states(Store(root), submissions.values())
            for (job_id, run), state in zip(submissions.items(), answer, strict=True):
                info = {"State": state.state, "Reason": state.reason, "NodeList": state.nodes}
                self._info_dict[job_id] = {"JobID": job_id, "Run": run.label, **info}
                if not state.unfinished or not run.directory.exists():
                    self._finished.add(job_id)


class HpmlJob(core.Job[core.R]):
    """A submitted function as submitit sees it; `run` is what hpml calls it."""

    watcher = HpmlInfoWatcher()

    @property
    def run(self) -> Submission | None:
        """Its submission, or task of one; None if its batch script is not in the folder."""
        return _run_of(self.paths)

    def _register_in_watcher(self) -> None:
        if not self._tasks[0]:  # all ranks of a job share one state
            self.watcher.watch(self.job_id, self.paths)

    def wait(self) -> None:
        """Wait for the results, or until the job is over without them.

        The job ends a moment after its results, so its state must be queried again.
        """
        super().wait()
        self.watcher.register_job(self.job_id)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; raise HpmlError if the scheduler does not, unless `check` is false."""
        with _hints() if check else contextlib.suppress(HpmlError):
            if self.run is not None:
                cancel(Store(self.run.directory.parents[1]), [self.run])


class HpmlExecutor(core.Executor):
    """Runs functions as jobs of hpml, on Slurm or on this machine.

    Args:
        folder: for submitit's files; all nodes must see it.
        max_num_timeout: how often a function that can checkpoint starts again after its time limit.
        max_pickle_size_gb: largest estimated size of calls that are submitted together, in GiB.
        python: the command that starts Python in the job; default: this interpreter.
    """

    job_class = HpmlJob

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder)
        self.max_num_timeout = max_num_timeout
        self.max_pickle_size_gb = max_pickle_size_gb
        self.python = shlex.quote(sys.executable) if python is None else python

    @classmethod
    def affinity(cls) -> int:
        """Return 0: it is never chosen unless it is named."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return ParameterNames(NAMES - AutoExecutor._valid_parameters())  # noqa: SLF001 - for plugins

    def _internal_update_parameters(self, **kwargs: object) -> None:
        for name in kwargs.keys() - NAMES:  # AutoExecutor checks names only for its calls
            hint = did_you_mean(name, NAMES) or f"there are: {', '.join(sorted(NAMES))}"
            raise InputError("is not a parameter of this executor", field=name, hint=hint)
        parameters = {**self.parameters, **kwargs}
        with _hints():
            for name in ("array_parallelism", "signal_delay_s"):
                value = kwargs.get(name)
                is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
                if value is not None and not is_count:
                    message, hint = "must be a whole number above 0", f"such as hpml_{name}=8"
                    raise InputError(message, field=name, value=value, hint=hint)
            self._load(parameters)
        self.parameters.update(kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[core.Job[object]]:
        """Submit one call as a job, several as an array; split an array that would be too large."""
        calls = list(delayed_submissions)
        jobs: list[core.Job[object]] = []
        with _hints():
            resolved = self._load(self.parameters)
            backend = resolved.backend
            size = max_array_size(backend, os.environ) if len(calls) > 1 else 1
            chunks = [calls[start : start + size] for start in range(0, len(calls), size)]
            together = self.parameters.get("array_parallelism", _PARALLEL_TASKS)
            # Slurm throttles each array by itself, so the chunks share the limit.
            limit = max(1, together // len(chunks))
            try:
                for chunk in chunks:
                    job = replace(resolved, job=self._job_of(chunk, resolved.job, backend, limit))
                    rendered = render_job(job)
                    jobs += self._submit(chunk, rendered, backend, of=len(calls))
            except BaseException:
                # The caller gets no jobs if one chunk fails, so it could not cancel those already
                # submitted.
                for submitted in jobs:
                    submitted.cancel(check=False)
                raise
        return jobs

    def _load(self, parameters: Parameters) -> ResolvedJob:
        """Return the job that parameters describe, with the backend that `hpml run` would use."""
        path = parameters.get("job_file") or Path.cwd() / "submitit.yaml"
        chosen = parameters.get("site") or os.environ.get("HPML_SITE", "")
        backend = choose(parameters.get("backend", "auto"), path, chosen)
        fields: dict[str, object] = {
            "launcher": "srun",
            "script": None,
            "module": None,
            "command": [*shlex.split(self.python), "-u", "-m", _MODULE, str(self.folder)],
            "args": ["--merge-output"] if parameters.get("stderr_to_stdout") else [],
            "array": None,
            "workdir": os.getcwd(),
            "environment.variables.SUBMITIT_EXECUTOR": HpmlExecutor.name(),
        }
        given = given_in(parameters)
        fields = absolute(fields | fields_of(given), Path.cwd())
        base, last = None if "job_file" in given else _DEFAULTS, given.get("set", {}).items()
        load = partial(load_job, path, backend=backend, fields=base)
        resolved = load([*fields.items(), *last], chosen)
        # Some parameters depend on the ranks and GPUs of the whole job (memory per CPU, for
        # example), so the job is loaded without them first.
        derived, options = derived_from(given, resolved.job.resources)
        if derived or options:
            extra = ("resources.extra", [*resolved.job.resources.extra, *options])
            settings = [*fields.items(), *derived.items(), *last, extra]
            resolved = load(settings, resolved.site)
        if resolved.job.checkpoint.enabled:  # both would start the job again
            hint = "remove the field; the function's method `checkpoint` decides what is saved"
            message = "functions are saved and requeued by submitit, not by hpml"
            raise InputError(message, field="checkpoint", hint=hint)
        return resolved

    def _job_of(
        self, calls: Sequence[DelayedSubmission], base: Job, backend: str, limit: int
    ) -> Job:
        """Return the job of some calls, of which at most `limit` run at the same time.

        The calls get the job's time limit, on which the signal before it depends.
        """
        resources, environment = base.resources, base.environment
        seconds, extra = resources.time, resources.extra
        for call in calls:
            call.set_timeout(math.ceil(seconds / 60), self.max_num_timeout)
        delay = int(self.parameters.get("signal_delay_s", _SIGNAL_SECONDS))
        delay = min(delay, seconds // 2)
        if backend == "local":
            # Its ranks start again in the same job, each time with the full time limit.
            again = any(hasattr(call.function, "checkpoint") for call in calls)
            starts = 1 + self.max_num_timeout if again else 1
            limits: Json = {"time": starts * (seconds + _START_SECONDS)}
            variables = {**environment.variables, SIGNAL_AFTER: str(seconds - delay)}
            environment = replace(environment, variables=variables)
        elif not any(option.startswith("--signal=") for option in extra):
            limits = {"extra": (*extra, f"--signal={HpmlJobEnvironment.USR_SIG}@{delay}")}
        else:
            limits = {}
        count = len(calls)
        return replace(
            base,
            array=ArraySpec(tuple(range(count)), min(limit, count)) if count > 1 else None,
            environment=environment,
            resources=replace(resources, **limits),
        )

    def _submit(
        self, calls: Sequence[DelayedSubmission], rendered: Rendered, backend: str, *, of: int
    ) -> list[core.Job[object]]:
        """Submit some of `of` calls as one job or array."""
        # Each rank of a submitit job imports this module, and submits nothing.
        from hpml_orchestrator.check.submission import prepare_checked  # noqa: PLC0415 - see above

        job = rendered.resolved.job
        sid = new_id(job.name)
        suffixes = [f".{index}" for index in range(len(calls))] if job.array else [""]
        # The job may start before sbatch has returned its number, so the pickle is named after the
        # run's id, which is known beforehand.
        pickles = [call_pickle(self.folder, f"{sid}{suffix}") for suffix in suffixes]
        store = open_store(self.parameters.get("records"))
        try:
            pickles[0].parent.mkdir(parents=True, exist_ok=True)
            for call, pickle in zip(calls, pickles, strict=True):
                call.dump(pickle)
                self._check_size(pickles[0], of)
            submission, scheduler = prepare_checked(
                store,
                rendered,
                checked=False,
                notice=lambda _: None,
                sid=sid,
                record=self._texts(rendered),
            )
            number = submit(submission, scheduler, environment=os.environ)
        except SchedulerUnavailable:  # a job may exist, and look for its pickle
            raise
        except Exception:
            for pickle in pickles:
                pickle.unlink(missing_ok=True)
            raise
        first = local_job_id(sid) if backend == "local" else number
        ranks = range(job.resources.nodes * job.resources.ranks)
        jobs: list[core.Job[object]] = []
        for suffix, pickle in zip(suffixes, pickles, strict=True):
            paths = JobPaths(self.folder, f"{first}{suffix.replace('.', '_')}")
            paths.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # the tasks of an array have one script
                paths.submission_file.symlink_to(submission.script)
            with contextlib.suppress(FileNotFoundError):  # the job has started and taken it
                pickle.rename(paths.submitted_pickle)
            jobs.append(HpmlJob(self.folder, str(paths.job_id), tasks=ranks))
        return jobs

    def _check_size(self, pickle: Path, calls: int) -> None:
        size = pickle.stat().st_size / 1024**3
        if calls * size > self.max_pickle_size_gb:
            raise RuntimeError(
                f"{calls} calls of about {size:.3g} GiB are more than the "
                f"max_pickle_size_gb={self.max_pickle_size_gb} that may go to the file system: "
                "pass paths instead of large objects, or raise executor.max_pickle_size_gb"
            )

    def _texts(self, rendered: Rendered) -> dict[str, str]:
        given, job, site = given_in(self.parameters), rendered.resolved.job, rendered.resolved.site
        texts = {}
        name = _one_line(given.get("job_name", given.get("name", "")))
        if name != job.name == job_name(name):
            texts["job_name"] = name
        if "comment" in given and not leaves_out(site.site.directives if site else {}, "comment"):
            texts["comment"] = _one_line(given["comment"])
        return texts


def _one_line(text: object) -> str:
    return re.sub(r"[\x00-\x1f\x7f]+", " ", str(text))


def _run_of(paths: JobPaths) -> Submission | None:
    """Return the run whose batch script a job's folder links to; None if there is none."""
    try:
        directory = paths.submission_file.readlink().parent
    except OSError:
        return None
    _, _, index = str(paths.job_id).partition("_")
    return Submission(directory, int(index) if index else None)


@contextlib.contextmanager
def _hints() -> Iterator[None]:
    try:
        yield
    except HpmlError as error:
        if error.hint:
            error.add_note(f"hint: {error.hint}")
        raise
