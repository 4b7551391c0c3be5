"""The words by which the batch script tells an agent what to stage and how to bind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.node.arguments import Entry, Limits, Wish, parse_arguments
from hpml_orchestrator.script.stage_words import entry_options, staging_options
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite
from hpml_orchestrator.staging import StageRequest


def test_data_to_stage() -> None:
    """ATTEMPT, then --stage NAME KIND SOURCE BASE any number of times; values may begin with -."""
    asked = parse_arguments(
        ["/a/0", "--stage", "x", "tar", "/s", "/t", "--stage", "y", "auto", "/-", "/u"]
    )
    assert (asked.attempt, asked.wish, asked.limits) == (Path("/a/0"), None, Limits())
    assert asked.entries == [
        Entry(StageRequest("x", "/s", "tar", "/t")),
        Entry(StageRequest("y", "/-", "auto", "/u")),
    ]
    for wrong in (["/a", "--stage", "x"], ["/a", "--stage", "x", "tar", "/s"]):
        with pytest.raises(InputError, match="must be --stage NAME KIND SOURCE BASE"):
            parse_arguments(wrong)
    with pytest.raises(InputError, match="source"):
        parse_arguments(["/a", "--stage", "x", "tar", "relative", "/t"])


def test_ranks_to_bind() -> None:
    """Options come in any order, before and behind data; what is left out has its default."""
    words = "--ranks 8 --policy numa --verify strict --ranks-per-gpu 2 --loader-workers 3"
    everything = [*words.split(), "--one-thread", "--keep-threads", "--no-gpus"]
    asked = parse_arguments(["/a/0", "--stage", "x", "tar", "/s", "/t", *everything])
    flags = {"one_thread": True, "keep_threads": True, "no_gpus": True}
    assert asked.wish == Wish(8, "numa", "strict", 2, 3, **flags)
    assert len(asked.entries) == 1
    assert parse_arguments(["/a/0", "--ranks", "1"]).wish == Wish(1, "gpu-local", "warn")


def test_how_an_entry_is_staged_stands_behind_it() -> None:
    """Options count for the entry before them alone."""
    more = "--keep --distribution chain --outside-links --no-hash --epochs 90"
    words = f"/a --stage x tree /s /t {more} --stage y file /u /v --ranks 1 --stage z tar /w /v"
    first, second, third = parse_arguments(words.split()).entries
    request = StageRequest("x", "/s", "tree", "/t", keep=True, outside_links=True)
    assert first == Entry(request, "chain", hash=False, epochs=90)
    assert second == Entry(StageRequest("y", "/u", "file", "/v"))
    assert third.request.name == "z"


def test_limits_of_the_site() -> None:
    """Numbers as they are, sizes in bytes."""
    words = (
        "/a --opens-per-second 2000 --opens-per-second-per-job 16000 --shared-rate 20480M"
        " --metadata-rate 50000 --link-rate 10240M --disk-rate 2048M --array-jitter 60"
        " --array-tasks 8 --interfaces ib0,eno1"
    )
    asked = parse_arguments(words.split())
    gib = 1 << 30
    assert asked.limits == Limits(2000, 16_000, 50_000, 20 * gib, 10 * gib, 2 * gib, 60, 8)
    assert asked.interfaces == ("ib0", "eno1")


def test_the_agent_understands_what_a_script_says() -> None:
    """Every option that `script/stage_words.py` can write is one that is read here."""
    entry = {"name": "x", "source": "/s", "keep": True, "outside_links": True, "hash": False}
    site = Site.model_validate(
        {
            "interfaces": ["ib0"],
            "staging": {
                "opens_per_second": 1,
                "opens_per_second_per_job": 2,
                "metadata_rate": 3,
                "shared_rate": "1M",
                "link_rate": "2M",
                "disk_rate": "3M",
                "array_jitter": 4,
            },
        }
    )
    job = Job.model_validate(
        {
            "name": "a",
            "command": ["x"],
            "array": "0-4",
            "resources": {"nodes": 2},
            "stage": [{**entry, "distribution": "shared", "epochs": 5}],
        }
    )
    options = staging_options(job, ResolvedSite(site))
    words = [*options, "--stage x tree /s /t", *entry_options(job.stage[0])]
    asked = parse_arguments(["/a", *" ".join(words).split()])
    assert asked.limits == Limits(1, 2, 3, 1 << 20, 2 << 20, 3 << 20, 4, 5)
    assert asked.interfaces == ("ib0",)
    request = StageRequest("x", "/s", "tree", "/t", keep=True, outside_links=True)
    assert asked.entries == [Entry(request, "shared", hash=False, epochs=5)]


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
        ("--shared-rate 5", "--shared-rate: must be whole MiB"),
        ("--shared-rate M", "--shared-rate: must be a number from 1 on"),
        ("--opens-per-second x", "--opens-per-second: must be a number"),
        ("--opens-per-second", "--opens-per-second: needs a value"),
        ("--stage x tree /s /t --epochs 0", "--epochs: must be a number from 1 on"),
        ("--stage x tree /s /t --distribution tree", "--distribution: must be one of auto, sh"),
        ("--keep", "is no option of the agent"),
    ],
)
def test_wrong_words_name_the_option(words: str, told: str) -> None:
    """The error says which word is wrong, and what would be right."""
    with pytest.raises(InputError, match=told):
        parse_arguments(["/a/0", *words.split()])
