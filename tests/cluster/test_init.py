"""`hpml init` on a real Slurm: what it writes is true, and Slurm takes jobs that go through it."""

from __future__ import annotations

import tomllib
from typing import Any

from tests.cluster.hpml_on_slurm import Desk, eventually

LSTOPO = """#!/bin/sh
test "$1" = --disallowed || exit 1
echo '<?xml version="1.0" encoding="UTF-8"?>'
echo '<topology version="2.0"><object type="Machine"/></topology>'
"""


def profile(desk: Desk, name: str = "hpml.toml") -> dict[str, Any]:
    return tomllib.loads((desk.directory / name).read_text("utf-8"))


def test_the_profile_says_what_slurm_says(desk: Desk) -> None:
    """Partitions, nodes, CPUs and GPUs as sinfo shows them; a second call keeps the file."""
    told = desk.hpml("init")
    assert told.stdout.splitlines()[-1].endswith("hpml check job.yaml")
    assert 5 <= len(told.stdout.splitlines()) <= 10
    data = profile(desk)
    listed = desk.slurm("sinfo", "--noheader", "--format=%R %c %m %D").split("\n")[:-1]
    assert set(data["partitions"]) == {line.split()[0] for line in listed}
    _, cpus, memory, count = listed[0].split()
    kind = data["node_types"]["a100x2"]
    assert (kind["cpus"], kind["memory"], kind["count"]) == (int(cpus), f"{memory}M", int(count))
    assert kind["gpus"] == "a100:2"
    assert desk.hpml("init", "-o", "-").stdout.startswith("#")  # as TOML, and no file
    before = (desk.directory / "hpml.toml").read_bytes()
    again = desk.hpml("init", code=2)
    assert "--force" in again.stderr
    assert (desk.directory / "hpml.toml").read_bytes() == before


def test_slurm_takes_jobs_through_the_profile(desk: Desk) -> None:
    """One job per partition, as large as the profile allows, ends well."""
    desk.hpml("init", "--probe")
    data = profile(desk)
    kind = data["node_types"]["a100x2"]
    for name in data["partitions"]:
        whole = {"nodes": kind["count"], "gpus": kind["gpus"], "memory": kind["memory"]}
        ranks = {"ranks_per_node": 1, "cpus_per_rank": kind["cpus"]}
        resources = {"partition": name, **whole, **ranks}
        assert desk.run(f"in-{name}", command=["true"], resources=resources)["state"] == "COMPLETED"


def test_nodes_that_do_not_see_the_records(desk: Desk) -> None:
    """Each has its own /tmp; a directory that they share is seen."""
    seen = desk.json("init", "--probe", "-o", "seen.toml")["node_types"][0]
    assert seen["sees_records"] is True
    records = desk.call("mktemp", "--directory", "--tmpdir=/tmp").stdout.strip()
    desk.more["HPML_HOME"] = records
    told = desk.hpml("init", "--probe", "-o", "site.toml").stdout
    desk.call("rmdir", records)
    assert "a100x2 cannot see records: set HPML_HOME" in told


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
    kind = profile(desk, "site.toml")["node_types"]["a100x2"]
    assert kind["topology"] == "topology/a100x2.xml"
    assert (desk.directory / kind["topology"]).read_text().endswith("</topology>\n")
    eventually(lambda: desk.slurm("squeue", "--noheader", "--states=PD,R").strip() == "")


def test_a_look_is_refused_where_slurm_refuses_it(desk: Desk) -> None:
    """Drained nodes are not probed, and the profile mentions it."""
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
