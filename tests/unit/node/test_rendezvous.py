"""The ranks meet at an address that all nodes resolve, on a port that is free and stays so."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.startup import (
    candidate_ports,
    ephemeral_range,
    rendezvous,
    resolve,
)
from hpml_orchestrator.records.files import write_json

USUAL = (32_768, 60_999)


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a job of one node."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_NNODES", "1")


@contextmanager
def taken(port: int, family: socket.AddressFamily, address: str) -> Iterator[None]:
    """Hold a port with a real listening socket."""
    with closing(socket.socket(family, socket.SOCK_STREAM)) as holder:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((address, port))
        holder.listen()
        yield


def test_candidates_lie_outside_the_ephemeral_range() -> None:
    """Every port of 10000 to 31999 comes up once; those that the kernel may give away come last."""
    ports = list(candidate_ports("17::", USUAL))
    assert sorted(ports) == list(range(10_000, 32_000))
    ports = list(candidate_ports("17::", (15_000, 61_000)))
    assert len(set(ports)) == 22_000
    assert max(ports[:5000]) < 15_000
    assert min(ports[5000:]) >= 15_000


def test_jobs_begin_at_different_ports() -> None:
    """The order depends on the key and on nothing else."""
    first = [next(candidate_ports(f"{job}::", USUAL)) for job in range(500)]
    assert len(set(first)) > 480
    head = list(itertools.islice(candidate_ports("1:2:3", USUAL), 9))
    assert head == list(itertools.islice(candidate_ports("1:2:3", USUAL), 9))


def test_jobs_of_one_id_and_two_records_begin_at_different_ports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job of every HPML_HOME is local job 1, and two of them may start at once."""
    ports = set()
    for index in range(20):
        attempt = tmp_path / f"home-{index}" / "runs" / "run" / "attempts" / "1"
        attempt.mkdir(parents=True)
        rendezvous(str(attempt))
        ports.add(capsys.readouterr().out)
    assert len(ports) >= 19


def test_one_node_meets_on_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of one node needs no name; the port can be bound right afterwards."""
    assert rendezvous(str(tmp_path)) == 0
    address, port = capsys.readouterr().out.split()
    assert address == "127.0.0.1"
    low, high = ephemeral_range()
    assert not low <= int(port) <= high
    with taken(int(port), socket.AF_INET, "0.0.0.0"):  # noqa: S104
        pass


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],  # noqa: S104
)
def test_a_taken_port_is_passed_over(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: socket.AddressFamily,
    address: str,
) -> None:
    """Whoever listens on the first choice, on whatever address, the next free one is taken."""
    rendezvous(str(tmp_path))
    first = int(capsys.readouterr().out.split()[1])
    try:
        with taken(first, family, address):
            rendezvous(str(tmp_path))
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    second = int(capsys.readouterr().out.split()[1])
    candidates = list(candidate_ports(str(tmp_path), ephemeral_range()))
    assert candidates.index(second) > candidates.index(first)


def nodes(attempt: Path, resolves: dict[str, list[str]]) -> None:
    (attempt / "nodes").mkdir()
    write_json(attempt / "head.json", {"node": "n1", "names": ["n1", "n1.cluster"]})
    for name, known in resolves.items():
        record = {"node": name, "resolves": dict.fromkeys(known, "10.0.0.1")}
        write_json(attempt / "nodes" / f"{name}.ready.json", record)


def test_nodes_meet_at_a_name_that_all_of_them_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's name of the head node where all resolve it, else its full name."""
    monkeypatch.setenv("SLURM_NNODES", "2")
    nodes(tmp_path, {"n1": ["n1", "n1.cluster"], "n2": ["n1.cluster"]})
    rendezvous(str(tmp_path))
    assert capsys.readouterr().out.startswith("n1.cluster ")


def test_a_node_that_cannot_find_the_head_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says which node knows none of which names."""
    monkeypatch.setenv("SLURM_NNODES", "3")
    nodes(tmp_path, {"n1": ["n1"], "n2": [], "n3": []})
    with pytest.raises(HpmlError, match=r"^nodes n2, n3 cannot resolve .* \(n1, n1.cluster\)$"):
        rendezvous(str(tmp_path))


def test_nodes_that_know_different_names_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node knows some name, but none is known to all: the message says who knows which."""
    monkeypatch.setenv("SLURM_NNODES", "3")
    nodes(tmp_path, {"n1": ["n1", "n1.cluster"], "n2": ["n1"], "n3": ["n1.cluster"]})
    with pytest.raises(
        HpmlError, match="no one name .* n2 resolves only n1; n3 resolves only n1.cluster"
    ):
        rendezvous(str(tmp_path))


def test_names_are_resolved_for_real() -> None:
    """The names that this machine knows come with an address; others are left out."""
    assert resolve(["localhost", "no-such-host.invalid", "bad\udcffname", ""]).keys() <= {
        "localhost",
        "",
    }
    assert resolve(["127.0.0.1"]) == {"127.0.0.1": "127.0.0.1"}


def test_the_ephemeral_range_comes_from_the_kernel(tmp_path: Path) -> None:
    """Read from /proc; Linux's own default where that cannot be read."""
    low, high = ephemeral_range()
    assert 1 <= low < high <= 65_535
    (tmp_path / "range").write_text("15000\t20000\n")
    assert ephemeral_range(str(tmp_path / "range")) == (15_000, 20_000)
    (tmp_path / "range").write_text("x")
    assert ephemeral_range(str(tmp_path / "range")) == USUAL
    assert ephemeral_range(str(tmp_path / "none")) == USUAL
