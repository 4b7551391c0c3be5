"""What all tests need."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# An example that takes 200 ms, hypothesis' limit, is one during which the machine was busy.
# CI tries the same examples each time: it judges a change, and people's runs look for new ones.
# `make test-long` tries more of them.
settings.register_profile(
    "patient",
    settings(),
    max_examples=200 if os.environ.get("HPML_LONG") == "1" else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
    database=None if os.environ.get("CI") == "true" else settings().database,
)
settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail on CI: there all is installed, but for hardware and an old Python."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "HARDWARE:" not in reason and "no Python 3.9 found" not in reason:
            report.outcome, report.longrepr = "failed", f"on CI nothing may skip: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def ignored_signals() -> Iterator[None]:
    """Let what tests start be interrupted, even where pytest was started with `&` or by nohup.

    Such a shell has SIGINT ignored, nohup SIGHUP, and programs inherit that. A handler they do not
    inherit: they start with the default, and pytest itself continues as before.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
