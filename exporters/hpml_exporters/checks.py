"""Whether an exporter's options make sense, before anything is started."""

from __future__ import annotations

import math
from dataclasses import fields

from hpml_exporters.options import COLLECTORS, NodeOptions
from hpml_exporters.roots import Roots
from hpml_orchestrator.errors import InputError, did_you_mean

__all__ = ["SECONDS_MAX", "SECONDS_MIN", "check", "is_loopback"]

SECONDS_MIN = 0.1
"""Between two readings: more often would cost more than it tells."""
SECONDS_MAX = 3600.0

_INTERVALS = ("gpu_interval", "job_interval", "process_interval", "node_interval")
_TYPES: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (str, "must be a text", ("listen", "web_config", "address_file", "summary_file")),
    (int, "must be a whole number", ("feed_fd", "parent_pid")),
    (bool, "must be true or false", ("any_port",)),
)


def check(options: NodeOptions) -> None:
    """Refuse options that cannot be followed.

    Raises:
        InputError: one of them is wrong; its field is the option's name.
    """
    for kind, message, names in _TYPES:
        for name in names:
            _refuse_other_type(options, name, kind, message)
    for one in fields(Roots):
        if not isinstance(getattr(options.roots, one.name), str):
            raise InputError("must be a directory", field=f"roots.{one.name}")
    _check_listen(options.listen)
    for name in options.without:
        if name not in COLLECTORS:
            raise InputError(
                "there is no such collector",
                field="without",
                value=name,
                hint=did_you_mean(str(name), COLLECTORS) or f"there are: {', '.join(COLLECTORS)}",
            )
    for name in _INTERVALS:
        _check_seconds(options, name, SECONDS_MIN, SECONDS_MAX)
    _check_seconds(options, "stuck_seconds", 1.0, SECONDS_MAX)
    _check_seconds(options, "exit_seconds", 1.0, 24 * SECONDS_MAX)
    if options.exit_seconds <= options.stuck_seconds:
        raise InputError(
            f"must be more than stuck_seconds, which is {options.stuck_seconds:g}",
            field="exit_seconds",
            value=options.exit_seconds,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost")
    (True, True, True)
    >>> is_loopback(""), is_loopback("0.0.0.0"), is_loopback("node1")
    (False, False, False)
    """
    return host in {"localhost", "::1"} or host.startswith("127.")


def _check_listen(listen: str) -> None:
    from hpml_exporters.web.address import split  # noqa: PLC0415 - after the cheap ones

    split(listen)


def _check_seconds(options: NodeOptions, name: str, least: float, most: float) -> None:
    value = getattr(options, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:
        raise InputError(f"must be {least:g} to {most:g} seconds", field=name, value=value)


def _refuse_other_type(options: NodeOptions, name: str, kind: type, message: str) -> None:
    value = getattr(options, name)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InputError(message, field=name, value=value)
