"""Ages and moments on the command line and in the Python API, such as 90m, 3d or 2026-11-20."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.units import read_span

_DAYS = {"today": 0, "yesterday": 1}


def parse_age(text: str, *, field: str) -> float:
    """Return the seconds of an age such as 7d.

    Raises:
        InputError: it is in another form; names the option.

    >>> parse_age("90m", field="--older"), parse_age("1.5h", field="--older")
    (5400.0, 5400.0)
    """
    seconds = read_span(text)
    if seconds is None:
        raise InputError(
            "must be a number with a unit (s, m, h, d, w), e.g. 90m, 12h or 7d",
            field=field,
            value=text,
        )
    return seconds


def parse_since(text: str | datetime, *, field: str, now: float) -> float:
    """Return the moment that an age such as 3d, a day such as yesterday or 2026-11-20, means.

    Args:
        text: the age, or the local date with or without a time; or a datetime.
        field: the option or argument.
        now: seconds since the epoch.

    Raises:
        InputError: it is in another form, or in the future; names the option.
    """
    try:
        if isinstance(text, datetime):
            moment = text.timestamp()
        elif (age := read_span(text)) is not None:
            moment = now - age
        elif (ago := _DAYS.get(text.strip().lower())) is not None:
            day = datetime.fromtimestamp(now, UTC).astimezone().date() - timedelta(ago)
            moment = datetime.combine(day, time()).timestamp()
        else:
            moment = datetime.fromisoformat(text.strip()).timestamp()
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InputError(
            "must be an age such as 2h or 3d, today, yesterday, or a date such as 2026-11-20 or"
            " 2026-11-20T08:00",
            field=field,
            value=text,
        ) from None
    if moment > now:
        raise InputError("is in the future", field=field, value=text)
    return moment
