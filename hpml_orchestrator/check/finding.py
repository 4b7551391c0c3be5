"""A finding of a check: one problem of a job, and the limit."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class CheckFinding:
    """One problem, or a possible one.

    Attributes:
        level: `error` (the job would not run) or `warning` (it may not, or not as intended).
        code: short word for programs, such as `time.partition`; stays the same over releases.
        field: the field of the job file.
        value: its value; None if it has none.
        message: what is wrong with it.
        limit: the value that is allowed, if there is one.
        hint: how to fix it, if the message does not contain that.
    """

    level: Level
    code: str
    field: str
    value: object
    message: str
    limit: object = None
    hint: str = ""

    def __str__(self) -> str:
        """Return the finding in one line, without its hint."""
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        repeated = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w])", self.message)
        shown = "" if self.value is None or repeated else f" ({value})"
        return f"{self.field}{shown}: {self.message}"

    def to_json(self) -> dict[str, object]:
        """Return the finding for programs."""
        return asdict(self)


error = functools.partial(CheckFinding, "error")
warning = functools.partial(CheckFinding, "warning")


def errors_first(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Return each finding once, errors before warnings."""
    unique = {(finding.code, finding.field, finding.message): finding for finding in findings}
    return sorted(unique.values(), key=lambda finding: finding.level != "error")
