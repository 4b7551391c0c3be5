"""`hpml init` on a real Slurm: what it writes is true, and Slurm takes jobs that go through it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.hpml_on_slurm import Desk, eventually

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

LSTOPO = """#!/bin/sh
test "$1" = --disallowed || exit 1
echo '<?xml version="1.0" encoding="UTF-8"?>'
echo '<topology version="2.0"><object type="Machine"/></topology>'
"""


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk on the login node."""
    return Desk(slurm_cluster, tmp_path)


def profile(desk: Desk, name: str = "hpml.toml") -> dict[str, object]:
    return tomllib.loads((desk.directory / name).read_text("utf-8"))


def test_the_profile_says_what_slurm_says(desk: Desk) -> None:
    """Partitions, nodes, CPUs and GPUs as sinfo shows them; a second call keeps the file."""
    told = desk.hpml("init")
    assert told.stdout.splitlines()[-1].endswith("hpml check job.yaml")
    assert 5 <= len(told.stdout.splitlines()) <= 10
    data = profile(desk)
    listed = desk.slurm("sinfo", "--noheader", "--format=%R %c %m %D").split("\n")[:-1]
    assert set(data["partitions"]) == {line.split()[0] for line in listed}  # type: ignore[call-overload]
    _, cpus, memory, count = listed[0].split()
    kind = data["node_types"]["a100x2"]  # type: ignore[index]
    assert (kind["cpus"], kind["memory"], kind["count"]) == (int(cpus), f"{memory}M", int(count))
    assert kind["gpus"] == "a100:2"
    before = (desk.directory / "hpml.toml").read_bytes()
    again = desk.hpml("init", code=2)
    assert "--force" in again.stderr
    assert (desk.directory / "hpml.toml").read_bytes() == before


def test_slurm_takes_jobs_through_the_profile(desk: Desk) -> None:
    """One job per partition, as large as the profile allows, ends well."""
    desk.hpml("init", "--probe")
    data = profile(desk)
    kind = data["node_types"]["a100x2"]  # type: ignore[index]
    for name in data["partitions"]:  # type: ignore[attr-defined]
        job = desk.job(
            f"in-{name}",
            command=["true"],
            resources={
                "partition": name,
                "nodes": kind["count"],
                "gpus": kind["gpus"],
                "ranks_per_node": 1,
                "cpus_per_rank": kind["cpus"],
                "memory": kind["memory"],
            },
        )
        state = desk.json("run", job)
        assert state["state"] == "COMPLETED"
        rows = {row["field"] for row in desk.json("render", job, "--explain")}
        assert "resources.partition" in rows


def test_a_look_finds_what_the_node_has(desk: Desk) -> None:
    """Disks of the node, not of this one; topology where lstopo is; no job is left."""
    programs = desk.directory / "bin"
    programs.mkdir()
    (programs / "lstopo-no-graphics").write_text(LSTOPO)  # hwloc is not everywhere
    (programs / "lstopo-no-graphics").chmod(0o755)
    desk.more["PATH"] = f"{programs}:{desk.environment['PATH']}"
    told = desk.json("init", "--probe", "-o", "site.toml")
    assert told["node_types"][0]["looked_at"] in desk.cluster.nodes
    assert told["topology_files"] == [str(desk.directory / "topology" / "a100x2.xml")]
    text = (desk.directory / "site.toml").read_text()
    assert "/dev/shm: tmpfs (RAM), 0.5 of 0.5 GiB free" in text
    kind = profile(desk, "site.toml")["node_types"]["a100x2"]  # type: ignore[index]
    assert kind["topology"] == "topology/a100x2.xml"
    assert (desk.directory / kind["topology"]).read_text().endswith("</topology>\n")
    eventually(lambda: desk.slurm("squeue", "--noheader", "--states=PD,R").strip() == "")


def test_a_look_is_refused_where_slurm_refuses_it(desk: Desk) -> None:
    """Drained nodes are not looked at, and the profile says so."""
    nodes = ",".join(desk.cluster.nodes)
    desk.slurm("scontrol", "update", f"nodename={nodes}", "state=drain", "reason=fan = dead")
    try:
        told = desk.json("init", "--probe", "-o", "drained.toml")
    finally:
        desk.slurm("scontrol", "update", f"nodename={nodes}", "state=resume")
    assert told["node_types"][0]["looked_at"] is None
    text = (desk.directory / "drained.toml").read_text()
    assert "# Not probed: all nodes of this kind are out of service." in text
    assert ": fan = dead" in text
    profile(desk, "drained.toml")


def test_users_profile_counts_for_every_project(desk: Desk) -> None:
    """--user writes to the configuration directory; jobs elsewhere find it there."""
    desk.hpml("init", "--user")
    path = desk.directory / "config" / "hpml" / "site.toml"
    assert path.stat().st_mode & 0o777 == 0o644
    with path.open("a") as stream:
        stream.write("[directives.comment]\nomit = true\n")
    doctor = {row["check"]: row for row in json.loads(desk.hpml("doctor", "--json").stdout)}
    assert doctor["site profile"]["found"] == str(path)


def test_printed_it_is_not_written(desk: Desk) -> None:
    """`-o -` shows the profile, as TOML or within JSON."""
    printed = desk.hpml("init", "-o", "-").stdout
    assert tomllib.loads(printed)["cluster"] == "devcluster"
    told = desk.json("init", "-o", "-")
    assert told["file"] is None
    assert tomllib.loads(told["text"])["cluster"] == "devcluster"
    assert os.listdir(desk.directory) == []
