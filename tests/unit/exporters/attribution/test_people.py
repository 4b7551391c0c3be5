"""Names of users come from the system, and a slow directory service stops nothing."""

from __future__ import annotations

import threading
import time

import pytest
from hpml_exporters.jobs import people as module
from hpml_exporters.jobs.people import People

from tests.patience import eventually


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to begin with a thread."""
    monkeypatch.setattr(module, "_WAIT_SECONDS", 120)


@pytest.mark.usefixtures("patient")
def test_names_of_the_system() -> None:
    """Root is root; a number without a name is its own."""
    people = People()
    assert people.name(0, 0.0) == "root"
    assert people.name(3999999, 0.0) == "3999999"
    assert people.name(-1, 0.0) == ""


def test_a_service_that_does_not_answer() -> None:
    """Names stay empty until it does, and no second question is asked meanwhile."""
    answer, asked = threading.Event(), []

    def lookup(uid: int) -> str:
        asked.append(uid)
        answer.wait(120)
        return f"user{uid}"

    people = People(lookup)
    started = time.monotonic()
    assert [people.name(uid, 0.0) for uid in range(1, 51)] == [""] * 50
    assert time.monotonic() - started < 60  # one look-up that hangs takes 120
    assert asked == [1]
    answer.set()
    eventually(lambda: people.name(1, 1.0) == "user1")


@pytest.mark.usefixtures("patient")
def test_a_name_is_asked_for_once_an_hour() -> None:
    """A thousand looks are one question."""
    asked: list[int] = []
    people = People(lambda uid: asked.append(uid) or f"n{len(asked)}")  # type: ignore[func-returns-value]
    assert {people.name(7, float(now)) for now in range(0, 3600, 5)} == {"n1"}
    assert people.name(7, 3601.0) == "n2"


@pytest.mark.usefixtures("patient")
def test_an_error_keeps_the_name_that_was_known() -> None:
    """And is not asked again at once."""
    calls: list[int] = []

    def lookup(uid: int) -> str:
        calls.append(uid)
        if len(calls) > 1:
            raise OSError("down")
        return "alice"

    people = People(lookup)
    assert people.name(7, 0.0) == "alice"
    assert people.name(7, 4000.0) == "alice"
    assert people.name(7, 4001.0) == "alice"
    assert len(calls) == 2
