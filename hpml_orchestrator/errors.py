"""Every error that hpml raises on purpose.

    HpmlError                     exit 1
    ├── WaitTimeoutError          exit 1   the time to wait has passed, and the job continues
    ├── InputError                exit 2   a value that the user gave is wrong
    │   └── CapacityError         exit 2   the request does not fit this machine
    ├── NotFoundError             exit 3   no such run, submission or file
    ├── SchedulerError            exit 4   the scheduler refused
    │   └── SchedulerUnavailable  exit 5   the scheduler gave no usable answer: try again
    ├── JobFailedError            exit 6   the job ended, and not well
    ├── RecordError               exit 7   a record cannot be read or written
    ├── StagingError              exit 8   data could not be brought to the node
    └── BindingError              exit 79  ranks are not bound as planned

Each class carries an exit code with its meaning, and may carry a hint: what the user can do next.
Standard library only: it travels to the nodes in `hpml-node.pyz`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# a path of a shared file system is shown whole; a file that was pasted as a value is not
_VALUE_SHOWN_CHARS = 300
_CLOSE_ENOUGH = 0.6


class HpmlError(Exception):
    """Something went wrong in a way that hpml understands."""

    exit_code = 1
    meaning = "any other error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InputError(HpmlError):
    """A value that the user gave is wrong; names the field, the value and what would be right.

    `message` is without field and value; the text of the error has all three.
    """

    exit_code = 2
    meaning = "a value that you gave is wrong"
    problems: Sequence[InputError] = ()  # each problem of an error that names several

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
            shown = _as_written(value)
            if len(shown) > _VALUE_SHOWN_CHARS:
                shown = f"{shown[:_VALUE_SHOWN_CHARS]}… ({len(shown)} characters)"
        prefix = f"{field}: " if field else ""
        got = f" (got {shown})" if shown else ""
        super().__init__(f"{prefix}{message}{got}", hint=hint)
        self.message = message
        self.field = field
        self.value = value

    def __str__(self) -> str:
        return str(self.args[0])


def _as_written(value: object) -> str:
    """Return a value as a job file has it, not as Python does: true, and 2024-01-01."""
    if isinstance(value, bool):
        return str(value).lower()
    date = getattr(value, "isoformat", None)
    return str(date()) if callable(date) else repr(value)


class CapacityError(InputError):
    """The request does not fit this machine, or the room that is left."""

    meaning = "the request does not fit this machine"


class NotFoundError(HpmlError):
    """No run, submission or file has that name."""

    exit_code = 3
    meaning = "no such run or file"
    job_id = ""  # what was asked for, if it has the form of a job id


class SchedulerError(HpmlError):
    """The scheduler refused the request."""

    exit_code = 4
    meaning = "the scheduler refused"


class SchedulerUnavailable(SchedulerError):  # noqa: N818 - a state of the scheduler, not a fault
    """The scheduler gave no usable answer; whether it acted on the request is not known."""

    exit_code = 5
    meaning = "the scheduler gave no usable answer: try again"


class JobFailedError(HpmlError):
    """The job ended in a state other than COMPLETED; `run` is its run's id, if that is known."""

    exit_code = 6
    meaning = "the job ended in another state than COMPLETED"

    def __init__(self, message: str, *, hint: str = "", run: str = "") -> None:
        super().__init__(message, hint=hint)
        self.run = run


class WaitTimeoutError(HpmlError, TimeoutError):
    """The job has not ended in the time that the caller waits; it continues."""


class RecordError(HpmlError):
    """A record on disk cannot be read or written."""

    exit_code = 7
    meaning = "a record cannot be read or written"


class StagingError(HpmlError):
    """Data could not be brought to the node; nothing was published."""

    exit_code = 8
    meaning = "data could not be brought to the node"


class BindingError(HpmlError):
    """Ranks are not, or cannot be, bound as planned, and the job has `verify: strict`."""

    exit_code = 79
    meaning = "ranks are not bound as planned"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words for a message.

    >>> counted(1, "core"), counted(2, "core")
    ('1 core', '2 cores')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def extra_hint(extra: str) -> str:
    """Return how to install an extra of hpml, which is on no package index.

    >>> extra_hint("export")
    "install hpml with its extra: pip install 'PATH[export]', PATH being its wheel or a clone"
    """
    return (
        f"install hpml with its extra: pip install 'PATH[{extra}]', PATH being its wheel or a clone"
    )


def nearest(word: str, known: Iterable[str], *, at_least: float = _CLOSE_ENOUGH) -> str:
    """Return the known name that a word was probably meant to be; empty when none is near.

    Args:
        word: what was written.
        known: names.
        at_least: how much of both is alike, from 0 to 1.

    >>> nearest("sumbit", ["list", "submit"])
    'submit'
    >>> nearest("lsat", ["last"]), nearest("zzz", ["last"])
    ('last', '')
    """
    import difflib  # noqa: PLC0415 - for those who mistyped alone

    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=at_least)
    return names[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question after the nearest known name, or nothing.

    >>> did_you_mean("slrum", ["local", "slurm"])
    'did you mean slurm?'
    """
    found = nearest(word, known)
    return f"did you mean {found}?" if found else ""
