"""What a check finds: one thing that is wrong with a job, what the limit is, and what would do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "errors_of", "listed"]

_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        level: `error` (the job would not run) or `warning` (it may not, or not as is thought).
        code: short word for programs, such as `time.partition`; stays the same over releases.
        field: the field of the job file.
        value: what stands there; None where nothing does.
        message: what is wrong with it.
        limit: what is allowed, where that is a value.
        hint: what would do; may be empty.
    """

    level: Literal["error", "warning"]
    code: str
    field: str
    value: Any
    message: str
    limit: Any = None
    hint: str = ""

    def __str__(self) -> str:
        """Return the finding in one line, without its hint."""
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        told = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w])", self.message)
        got = "" if self.value is None or told else f" ({value})"
        return f"{self.field}{got}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding for programs."""
        return asdict(self)


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return those that keep the job from running."""
    return [finding for finding in findings if finding.level == "error"]


def listed(words: Sequence[str], *, last: str = "and", none: str = "none") -> str:
    """Return words as a sentence has them; a long list is cut.

    >>> listed(["a", "b", "c"]), listed([])
    ('a, b and c', 'none')
    """
    if not words:
        return none
    if len(words) > _SHOWN:
        return f"{', '.join(words[:_SHOWN])} and {len(words) - _SHOWN} more"
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
