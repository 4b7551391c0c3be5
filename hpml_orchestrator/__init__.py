"""hpml: run machine-learning training on Slurm clusters well.

The Python API is in `api/` and is imported when one of its names is used, so that
`import hpml_orchestrator` stays cheap. docs/python.md describes it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpml_orchestrator.api.runs import Run, list_runs, make_job, run, submit, sweep_report
    from hpml_orchestrator.diagnosis.report import Report
    from hpml_orchestrator.errors import (
        HpmlError,
        InputError,
        JobFailedError,
        NotFoundError,
        RecordError,
        SchedulerError,
        SchedulerUnavailable,
        WaitTimeoutError,
    )
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.version import __version__

__all__ = [
    "HpmlError",
    "InputError",
    "Job",
    "JobFailedError",
    "NotFoundError",
    "RecordError",
    "Report",
    "Run",
    "SchedulerError",
    "SchedulerUnavailable",
    "WaitTimeoutError",
    "__version__",
    "list_runs",
    "make_job",
    "run",
    "submit",
    "sweep_report",
]


_API = frozenset({"Job", "Report", "Run", "list_runs", "make_job", "run", "submit", "sweep_report"})
"""The names in `api/runs.py`; the errors are in `errors.py`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - few users of the package need it

    module = "api.runs" if name in _API else "version" if name == "__version__" else "errors"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
