"""`hpml stage bench`: real copies of little, and nothing that stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.patience import eventually
from tests.unit.cli.support import Node

LITTLE = ("--files", "60", "--size", "1K", "--large", "1M", "--runs", "1")


@pytest.fixture(autouse=True)
def nothing_stays(node: Node) -> Iterator[None]:
    yield
    assert os.listdir(node.ram) == os.listdir(node.disk) == []
    assert not [name for name in os.listdir(node.root) if name.startswith(".hpml")]


def test_every_way_has_a_figure(node: Node) -> None:
    """As JSON to both of the node's places; as a table to one that is named."""
    shown = node.stage("bench", "--from", str(node.root), *LITTLE, "--json")
    assert (shown.code, shown.err) == (0, ""), shown
    result = shown.json()
    assert [target["place"] for target in result["targets"]] == [str(node.disk), str(node.ram)]
    for target in result["targets"]:
        ways = {rung["way"]: rung for rung in target["rungs"]}
        assert {"cp -r", "hpml stage", "hpml stage --no-hash", "hpml stage PACK"} <= set(ways)
        assert all(rung["bytes_per_second"] > 0 and not rung["fault"] for rung in ways.values())
    lines = node.stage("bench", str(node.ram), "--from", str(node.root), *LITTLE).out.splitlines()
    assert "60 files of 1.0 KiB, one of 1.0 MiB, packed in " in lines[0]
    assert lines[2] == "TO\tWAY\tDIGESTS\tFILES/S\tMB/S\tSECONDS"
    rows = {line.split("\t")[1]: line.split("\t") for line in lines[3:]}
    assert (rows["hpml stage"][2], rows["cp -r"][2], rows["cp, one file"][3]) == ("yes", "no", "-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "{root}/none"], "--from: No such file or directory"),
        (["{root}/none"], "DIR: No such file or directory"),
        (["--size", "1Q"], "--size: must be a size"),
        (["--large", "900T"], "--from: needs"),
    ],
)
def test_what_is_wrong(node: Node, words: list[str], message: str) -> None:
    """Before anything is made."""
    refused = node.stage("bench", *(word.format(root=node.root) for word in words))
    assert (refused.code, refused.out) == (2, "")
    assert message in refused.err


def test_a_signal_leaves_nothing(node: Node) -> None:
    """At any moment; the fixture looks at the directories."""
    words = ("bench", "--from", str(node.root), "--files", "2000", "--runs", "50")
    process = node.start(*words, start_new_session=True)
    eventually(lambda: list(node.disk.glob(".hpml-bench-*/*/*")))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err
