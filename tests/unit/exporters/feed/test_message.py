"""Messages of training feeds: what is none of ours is refused, what is taken is sane."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hpml_exporters.training.message import BUCKETS, COUNTERS, MAX_MESSAGE_BYTES, parse, part_of
from hypothesis import given
from hypothesis import strategies as st

RANK: dict[str, Any] = {
    "r": 3,
    "age": 0.5,
    "t": [320, 10, 0.25, 5, 1.5],
    "b": [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "m": "hook",
    "g": {"loss": 0.5, "accuracy": 0.9},
}
WHOLE: dict[str, Any] = {"pid": 11, "binding": [7, 1], "ranks": [RANK]}


def message(data: object, part: object = 0) -> bytes:
    return f"hpml-feed 1 {part}\n".encode() + json.dumps(data).encode()


def test_a_message() -> None:
    """All that it says, by name."""
    datagram = message(WHOLE, 5)
    assert part_of(datagram) == 5
    told = parse(datagram)
    assert (told.pid, told.binding) == (11, (7, 1))
    (rank,) = told.ranks
    assert rank.totals == (320, 10, 0.25, 5, 1.5)
    assert rank.buckets == (0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert (rank.rank, rank.age, rank.method) == (3, 0.5, "hook")
    assert (rank.loss, rank.accuracy, rank.mfu) == (0.5, 0.9, None)


BAD = [
    b"",
    b"\n",
    b"hpml-feed 2 0\n{}",
    b"hpml-feed 1 -1\n{}",
    b"hpml-feed 1 1.5\n{}",
    b"hpml-feed 1 86\n{}",
    b"hpml-feed 1 0{}",
    b"hpml-feed 1 0\n",
    b"hpml-feed 1 0\n[]",
    b"hpml-feed 1 0\n\xff",
    b"hpml-feed 1 0\n" + b"[" * 20000,
    b'hpml-feed 1 0\n{"pid": ' + b"9" * 5000 + b"}",
    message(WHOLE) + b" " * MAX_MESSAGE_BYTES,
    message({}),
    message({**WHOLE, "pid": "1"}),
    message({**WHOLE, "pid": True}),
    message({**WHOLE, "binding": [1]}),
    message({**WHOLE, "binding": [1, -1]}),
    message({**WHOLE, "ranks": [RANK] * 65}),
    message({**WHOLE, "ranks": [1]}),
    message({**WHOLE, "ranks": [{**RANK, "r": -1}]}),
    message({**WHOLE, "ranks": [{**RANK, "age": -1}]}),
    message({**WHOLE, "ranks": [{**RANK, "t": [1, 2, 3, 4]}]}),
    message({**WHOLE, "ranks": [{**RANK, "t": [1, 2, 3, 4, math.nan]}]}),
    message({**WHOLE, "ranks": [{**RANK, "t": [1, 2, 3, 4, math.inf]}]}),
    message({**WHOLE, "ranks": [{**RANK, "t": [1, 2, 3, 4, 1e300]}]}),
    message({**WHOLE, "ranks": [{**RANK, "b": [1]}]}),
    message({**WHOLE, "ranks": [{**RANK, "b": [0.5] * BUCKETS}]}),
    message({**WHOLE, "ranks": [{**RANK, "g": None}]}),
    message({**WHOLE, "ranks": [{**RANK, "g": {"loss": "x"}}]}),
    message({**WHOLE, "ranks": [{**RANK, "g": {"mfu": math.nan}}]}),
]


@pytest.mark.parametrize("datagram", BAD)
def test_what_is_no_message_is_refused(datagram: bytes) -> None:
    """With a ValueError, and with nothing else."""
    with pytest.raises(ValueError):
        parse(datagram)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def mutated(keys: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={key: values | st.just(value) for key, value in keys.items()}
    )


@given(
    st.binary(max_size=200)
    | values.map(message)
    | st.builds(
        lambda whole, ranks: message({**WHOLE, **whole, "ranks": ranks}),
        mutated(WHOLE),
        st.lists(mutated(RANK).map(lambda more: {**RANK, **more}), max_size=3),
    )
)
def test_whatever_comes_is_refused_or_sane(datagram: bytes) -> None:
    """No other exception, and no figure that a series cannot have."""
    try:
        told = parse(datagram)
    except ValueError:
        return
    for rank in told.ranks:
        assert len(rank.totals) == COUNTERS
        assert all(0 <= one < 1e18 for one in (*rank.totals, rank.age))
        assert rank.buckets is None or min(rank.buckets) >= 0
        assert len(rank.method) <= 64
        assert rank.method.isascii()
        assert not any(one < " " for one in rank.method)
        assert all(math.isfinite(one or 0) for one in (rank.loss, rank.accuracy, rank.mfu))
