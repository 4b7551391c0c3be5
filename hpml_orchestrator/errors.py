"""Every error that hpml raises on purpose.

    HpmlError                     exit 1
    ├── InputError                exit 2   a value that the user gave is wrong
    │   └── CapacityError         exit 2   what was asked for does not fit this machine
    ├── NotFoundError             exit 3   no such run, submission or file
    ├── SchedulerError            exit 4   the scheduler said no
    │   └── SchedulerUnavailable  exit 5   the scheduler gave no usable answer: try again
    ├── JobFailedError            exit 6   the job ended, and not well
    ├── RecordError               exit 7   a record cannot be read or written
    └── StagingError              exit 8   data could not be brought to the node

Each class carries an exit code and may carry a hint: what the user can do next.
Standard library only: it travels to the nodes in `hpml-node.pyz`.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "HpmlError",
    "InputError",
    "JobFailedError",
    "NotFoundError",
    "RecordError",
    "SchedulerError",
    "SchedulerUnavailable",
    "StagingError",
]

_VALUE_SHOWN_CHARS = 80


class HpmlError(Exception):
    """Something went wrong in a way that hpml understands."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InputError(HpmlError):
    """A value that the user gave is wrong; names the field, the value and what would be right."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = None,
        hint: str = "",
    ) -> None:
        shown = ""
        if value is not None:
            shown = repr(value)
            if len(shown) > _VALUE_SHOWN_CHARS:
                shown = f"{shown[:_VALUE_SHOWN_CHARS]}… ({len(shown)} characters)"
        prefix = f"{field}: " if field else ""
        got = f" (got {shown})" if shown else ""
        super().__init__(f"{prefix}{message}{got}", hint=hint)
        self.field = field
        self.value = value


class CapacityError(InputError):
    """What was asked for does not fit where it would have to go."""


class NotFoundError(HpmlError):
    """There is no run, submission or file of that name."""

    exit_code = 3


class SchedulerError(HpmlError):
    """The scheduler refused the request."""

    exit_code = 4


class SchedulerUnavailable(SchedulerError):  # noqa: N818 - a state of the scheduler, not a fault
    """The scheduler gave no usable answer; whether it acted on the request is not known."""

    exit_code = 5


class JobFailedError(HpmlError):
    """The job ended in a state other than COMPLETED."""

    exit_code = 6


class RecordError(HpmlError):
    """A record on disk cannot be read or written."""

    exit_code = 7


class StagingError(HpmlError):
    """Data could not be brought to the node; nothing was published."""

    exit_code = 8
