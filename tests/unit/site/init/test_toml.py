"""TOML that is written reads back as what went in."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.site import toml

SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
)


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    SCALARS | st.lists(SCALARS, max_size=40),
    st.text(),
)
def test_values_survive(name: str, value: toml.Scalar | list[toml.Scalar], remark: str) -> None:
    """Any key, any value and any remark, in a table of any name."""
    lines = [toml.header("a", name), *toml.entry(name, value, remark=remark)]
    assert tomllib.loads("\n".join(lines)) == {"a": {name: {name: value}}}


@given(st.text(), SCALARS | st.lists(SCALARS, max_size=40))
def test_a_proposal_does_not_count(remark: str, value: toml.Scalar | list[toml.Scalar]) -> None:
    """A setting that is not active is all comment, and one again without its `#`."""
    lines = toml.entry("name", value, active=False, remark=remark)
    assert all(line.startswith("#") for line in lines)
    taken = [line.removeprefix("#") for line in lines if not line.startswith("# ") and line != "#"]
    assert tomllib.loads("\n".join(taken)) == {"name": value}


@given(st.text())
def test_a_comment_is_nothing_but_a_comment(text: str) -> None:
    """Newlines, control characters and lone surrogates in a reason do not get out of it."""
    made = "\n".join(toml.comment(text))
    assert tomllib.loads(made) == {}
    made.encode("utf-8")


def test_a_byte_that_was_no_text_is_replaced() -> None:
    """What Slurm printed in no encoding becomes the replacement character."""
    assert tomllib.loads(f"a = {toml.value(chr(0xDCFF))}") == {"a": "\ufffd"}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ([], "[]"),
        (["a", 'b"c'], '["a", "b\\"c"]'),
        (False, "false"),
        ("C:\\x\t", '"C:\\\\x\\t"'),
        ("\x7f\u2028", '"\\u007F\\u2028"'),
    ],
)
def test_it_is_written_in_the_plain_way(
    value: toml.Scalar | list[toml.Scalar], written: str
) -> None:
    """Values look as a person would write them."""
    assert toml.value(value) == written


def test_long_lists_are_broken_into_lines() -> None:
    """No line of a long list is wider than a screen."""
    names = [f"account-{number}" for number in range(200)]
    lines = toml.entry("accounts", names)
    assert max(map(len, lines)) <= 100
    assert tomllib.loads("\n".join(lines)) == {"accounts": names}
