"""Users with bcrypt hashes, as the web-config file names them."""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import bcrypt
import pytest
from hpml_exporters.server import Limits, Server
from hpml_exporters.server.passwords import Credentials, Passwords, credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import eventually
from tests.unit.exporters.server.support import (
    PATIENT,
    Answer,
    StaticPages,
    basic,
    exchange,
    scrape,
)

Address = tuple[str, int]
HELD = b"$2b$05$"


def hashed(password: str, cost: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


@contextmanager
def serving(folder: Path, users: dict[str, str], limits: Limits = PATIENT) -> Iterator[Address]:
    path = folder / "users.yml"
    path.write_text(json.dumps({"basic_auth_users": users}))
    server = Server("127.0.0.1:0", str(path), StaticPages(), limits)
    yield server.start()
    server.stop()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checks of bob's password last until this is set, as if his hash were very dear."""
    free = threading.Event()
    real = bcrypt.checkpw

    def checked(password: bytes, hashed_password: bytes) -> bool:
        if hashed_password.startswith(HELD):
            assert free.wait(120)
        return real(password, hashed_password)

    monkeypatch.setattr(bcrypt, "checkpw", checked)
    yield free
    free.set()


def test_who_gets_in(tmp_path: Path) -> None:
    """The right password of a user, and nothing else; it is asked for."""
    with serving(tmp_path, {"bob": hashed("pass:word"), "böb": hashed("ключ")}) as address:

        def asked(words: str) -> Answer:
            return scrape(address, Authorization=words)

        assert asked(basic("bob", "pass:word")).status == 200
        assert asked(basic("bob", "pass:word")).status == 200  # remembered
        assert asked(basic("böb", "ключ")).status == 200
        for wrong in (
            basic("bob", "wrong"),
            basic("bob", "wrong"),  # remembered too
            basic("bob", ""),
            basic("alice", "pass:word"),
            basic("", ""),
            "Basic",
            "Basic !!!",
            "Basic Ym9i",  # no colon
            "Basic /w==",  # no UTF-8
            "Bearer pass:word",
        ):
            answer = asked(wrong)
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
        assert scrape(address).status == 401


def test_a_stranger_with_a_users_password_stays_out(tmp_path: Path) -> None:
    """It is checked against the hash of the only user, and right, and of no use."""
    with serving(tmp_path, {"bob": hashed("x")}) as address:
        assert scrape(address, Authorization=basic("eve", "x")).status == 401
        assert scrape(address, Authorization=basic("bob", "x")).status == 200


def test_a_refused_head_has_no_body(tmp_path: Path) -> None:
    """Else the next answer on the connection would begin with it."""
    with serving(tmp_path, {"bob": hashed("x")}) as address:
        line = b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        answers = exchange(address, line * 2 + line.replace(b"1.1", b"1.0"))
    assert answers.startswith(b"HTTP/1.1 401")
    assert [one[:3] for one in answers.split(b"HTTP/1.1 ")[1:]] == [b"401"] * 3
    assert b"who" not in answers


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/nothing"])
def test_every_page_is_behind_the_password(tmp_path: Path, path: str) -> None:
    """Not even which pages there are is said before it."""
    with serving(tmp_path, {"bob": hashed("x")}) as address:
        assert scrape(address, path).status == 401
        assert scrape(address, path, method="DELETE").status == 401


def test_hashes_of_every_prefix_and_long_passwords(tmp_path: Path) -> None:
    """The tool htpasswd writes $2y$; of a password, bcrypt reads 72 bytes."""
    letters = "a" * 72
    users = {"y": hashed("x").replace("$2b$", "$2y$"), "a": hashed("x").replace("$2b$", "$2a$")}
    with serving(tmp_path, {**users, "long": hashed(letters)}) as address:
        for name, word in (("y", "x"), ("a", "x"), ("long", letters), ("long", letters + "b")):
            assert scrape(address, Authorization=basic(name, word)).status == 200
        assert scrape(address, Authorization=basic("long", letters[1:])).status == 401


def test_a_strangers_name_takes_as_long_as_a_users(tmp_path: Path) -> None:
    """So that nobody finds out names by the clock."""
    with serving(tmp_path, {"bob": hashed("x", 9)}) as address:

        def seconds(name: str, number: int) -> float:
            answer = scrape(address, Authorization=basic(name, f"wrong{number}"))
            assert answer.status == 401
            return answer.seconds

        taken = [(seconds("bob", one), seconds("eve", one)) for one in range(7)]
        users, strangers = map(min, zip(*taken, strict=True))
        print(f"a user {users * 1e3:.1f} ms, a stranger {strangers * 1e3:.1f} ms")
        assert strangers > users / 3  # the check was made: without it, it is a twentieth


def test_checks_do_not_hold_up_others(tmp_path: Path, held: threading.Event) -> None:
    """While an expensive check runs, a page for another connection comes at once."""
    with serving(tmp_path, {"bob": hashed("x", 5), "eve": hashed("y")}) as address:
        assert scrape(address, Authorization=basic("eve", "y")).status == 200
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(scrape(address, Authorization=basic("bob", "x")).status)
        )
        thread.start()
        for _ in range(5):
            assert scrape(address, Authorization=basic("eve", "y")).status == 200
        assert answers == []
        held.set()
        thread.join()
        assert answers == [200]


def test_a_queue_that_is_full_says_so(tmp_path: Path, held: threading.Event) -> None:
    """What cannot be checked in time is 503, not a wait without end."""
    short = replace(PATIENT, check_seconds=0.05)
    with serving(tmp_path, {"bob": hashed("x", 5)}, short) as address:
        assert scrape(address, Authorization=basic("bob", "x")).status == 503
        held.set()


def passwords(checks: int = 2) -> Passwords:
    made = Passwords(Limits(checks=checks), lambda: None)
    made.use({"bob": hashed("x", 5).encode()})
    return made


def test_a_full_queue_leaves_out_whoever_waits_for_most(held: threading.Event) -> None:
    """One address that guesses does not keep another one out."""
    made = passwords(checks=3)
    left_out = []
    for peer, word in (("guesser", "1"), ("guesser", "2"), ("guesser", "3"), ("good", "x"),
                       ("guesser", "4"), ("guesser", "5")):  # fmt: skip
        given = Credentials("bob", word.encode())
        key = made.ask(made.key(given), given, peer)
        if key:
            left_out.append(key)
    good = made.key(Credentials("bob", b"x"))
    assert left_out
    assert good not in left_out
    made.stop()
    assert not held.is_set()


def test_results_are_forgotten_with_the_users() -> None:
    """Nothing that was right under earlier users is right under later ones."""
    made = passwords()
    given = Credentials("bob", b"x")
    key = made.key(given)
    made.ask(key, given, "peer")
    eventually(lambda: made.answers(0.0))
    assert made.known(key, 1.0) is True
    assert made.known(key, 1.0 + Limits().remembered_seconds + 1) is None
    made.use({"bob": hashed("y").encode()})
    assert made.known(key, 1.0) is None
    assert made.known(made.key(given), 1.0) is None
    made.stop()


@settings(deadline=None)
@given(st.text(string.ascii_letters + string.digits + "+/= :\x00é", max_size=40))
def test_any_header_is_credentials_or_none(header: str) -> None:
    """Nothing else comes out."""
    found = credentials("Basic " + header)
    assert found is None or (isinstance(found.name, str) and ":" not in found.name)
