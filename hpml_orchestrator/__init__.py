"""hpml: run machine-learning training on Slurm clusters well.

The Python API is in `api/` and is imported when one of its names is used, so that
`import hpml_orchestrator` stays cheap. docs/python.md describes it.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpml_orchestrator.api.job import Job, run, submit
    from hpml_orchestrator.api.runs import Report, Run, list_runs
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
    "run",
    "submit",
]

_MODULES = {
    "Job": "api.job",
    "Report": "api.runs",
    "Run": "api.runs",
    "list_runs": "api.runs",
    "run": "api.job",
    "submit": "api.job",
}
"""Where each name is defined; the errors are in `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - few users of the package need it

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
