"""`hpml stage bench`: real copies of little, and nothing that stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.staging import ladder
from tests.unit.cli.stage_node import Hpml, Node

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Shell

LITTLE = ("--files", "60", "--size", "1K", "--large", "1M", "--runs", "1")
OURS = {
    "hpml stage",
    "hpml stage --no-hash",
    "hpml stage PACK",
    "hpml stage PACK --kind tree",
    "hpml stage, one file",
    "hpml stage --no-hash, one file",
}


@pytest.fixture
def node(hpml: Hpml, shell: Shell, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, hpml, shell)
    made.make()
    yield made
    assert os.listdir(made.ram) == os.listdir(made.disk) == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".hpml")]


def test_every_way_has_a_figure(node: Node) -> None:
    """To both of the node's places, from the directory that was named; nothing failed."""
    told = node.stage("bench", "--from", str(node.root), *LITTLE, "--json")
    assert (told.code, told.err) == (0, ""), told
    found = told.json()
    assert [one["place"] for one in found["targets"]] == [str(node.disk), str(node.ram)]
    assert found["skipped"] == []
    assert (found["data"]["files"], found["data"]["large_bytes"]) == (60, 1 << 20)
    assert found["latency"]["files"] == 60
    for target in found["targets"]:
        assert {one["way"] for one in target["rungs"]} > OURS
        for one in target["rungs"]:
            assert one["fault"] == ""
            assert one["seconds"] > 0
            assert one["bytes_per_second"] > 0


def test_people_get_a_table(node: Node) -> None:
    """A line for each way, the machine in the head."""
    told = node.stage("bench", str(node.ram), "--from", str(node.root), *LITTLE)
    lines = told.out.splitlines()
    assert lines[0].startswith(f"from {node.root} (")
    assert "60 files of 1.0 KiB, one of 1.0 MiB, packed in " in lines[0]
    assert lines[0].endswith("; warm cache")
    assert lines[1].startswith("open, read, close: ")
    assert lines[2] == "TO\tWAY\tDIGESTS\tFILES/S\tMB/S\tSECONDS"
    ways = {line.split("\t")[1]: line.split("\t") for line in lines[3:]}
    assert ways["hpml stage"][2] == "yes"
    assert ways["cp -r"][2] == "no"
    assert float(ways["cp -r"][3]) > 0
    assert ways["cp, one file"][3] == "-"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--from", "{root}/none"], 2, "--from: No such file or directory"),
        (["{root}/none"], 2, "DIR: No such file or directory"),
        (["--files", "0"], 2, "--files: must be a whole number, 1 or more"),
        (["--size", "1Q"], 2, "--size: must be a size"),
        (["--large", "900T"], 2, "--from: needs"),
        (["--files", "10000000", "--size", "1G"], 2, "--from: needs"),
    ],
)
def test_what_is_wrong_is_told(node: Node, words: list[str], code: int, message: str) -> None:
    """Before anything is made."""
    told = node.stage("bench", *(word.format(root=node.root) for word in words))
    assert (told.code, told.out) == (code, "")
    assert message in told.err


def test_places_that_were_not_named_are_passed_over(node: Node) -> None:
    """A node without a disk of its own has one target less, and is told."""
    (node.root / "site.toml").write_text(
        f'[paths]\nram = "{node.ram}"\nscratch = "$NO_SUCH_VARIABLE"\n', encoding="utf-8"
    )
    told = node.stage("bench", "--from", str(node.root), *LITTLE)
    assert told.code == 0
    assert told.err.startswith("note: local: ")
    assert str(node.ram) in told.out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(node: Node, sent: signal.Signals) -> None:
    """At any moment; the fixture looks at the directories."""
    process = node.start(
        *("bench", "--from", str(node.root), "--files", "2000", "--runs", "50"),
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(node.disk.glob(".hpml-bench-*/*/*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, sent)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + sent, ""), err
    assert "what was made for it is removed" in err
    assert "Traceback" not in err


def test_a_way_that_fails_does_not_end_the_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fault stands in the table."""
    real = ladder._timed

    def timed(way: ladder.Way, *rest: object) -> float:
        if way.name == "cp -r":
            raise OSError(5, "Input/output error")
        return real(way, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ladder, "_timed", timed)
    told = node.stage("bench", str(node.ram), "--from", str(node.root), *LITTLE)
    assert told.code == 0
    assert "\tcp -r\t-\t-\t-\tInput/output error\n" in told.out
    assert "\thpml stage\tyes\t" in told.out
