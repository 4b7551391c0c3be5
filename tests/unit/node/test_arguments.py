"""The words by which the batch script tells an agent what to stage and how to bind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.node.arguments import Wish, parse_arguments


def test_data_to_stage() -> None:
    """ATTEMPT, then --stage NAME KIND SOURCE BASE any number of times; values may begin with -."""
    attempt, requests, wish = parse_arguments(
        ["/a/0", "--stage", "x", "tar", "/s", "/t", "--stage", "y", "auto", "/-", "/u"]
    )
    assert (attempt, wish) == (Path("/a/0"), None)
    found = [(one.name, one.kind, one.source, one.target) for one in requests]
    assert found == [("x", "tar", "/s", "/t"), ("y", "auto", "/-", "/u")]
    for wrong in (["/a", "--stage", "x"], ["/a", "--stage", "x", "tar", "/s"]):
        with pytest.raises(InputError, match="must be --stage NAME KIND SOURCE BASE"):
            parse_arguments(wrong)
    with pytest.raises(InputError, match="source"):
        parse_arguments(["/a", "--stage", "x", "tar", "relative", "/t"])


def test_ranks_to_bind() -> None:
    """Options come in any order, before and behind data; what is left out has its default."""
    words = "--ranks 8 --policy numa --verify strict --ranks-per-gpu 2 --loader-workers 3"
    everything = [*words.split(), "--one-thread", "--keep-threads", "--no-gpus"]
    _, requests, wish = parse_arguments(["/a/0", "--stage", "x", "tar", "/s", "/t", *everything])
    flags = {"one_thread": True, "keep_threads": True, "no_gpus": True}
    assert wish == Wish(8, "numa", "strict", 2, 3, **flags)
    assert len(requests) == 1
    assert parse_arguments(["/a/0", "--ranks", "1"])[2] == Wish(1, "gpu-local", "warn")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("x", "is no option of the agent"),
        ("--ranks", "--ranks: needs a value"),
        ("--ranks 0", "--ranks: must be a number from 1 on"),
        ("--ranks -1", "--ranks: must be a number from 1 on"),
        ("--ranks 1e3", "--ranks: must be a number from 1 on"),
        ("--ranks 99999999999", "--ranks: must be a number from 1 on"),
        ("--ranks 2 --policy near", "--policy: must be one of gpu-local, numa"),
        ("--ranks 2 --verify no", "--verify: must be one of strict, warn, off"),
        ("--ranks 2 --loader-workers many", "--loader-workers: must be a number from 0 on"),
        ("--policy numa", "--ranks: must be given"),
    ],
)
def test_wrong_words_name_the_option(words: str, told: str) -> None:
    """The error says which word is wrong, and what would be right."""
    with pytest.raises(InputError, match=told):
        parse_arguments(["/a/0", *words.split()])
