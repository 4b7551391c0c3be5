"""What the Slurm exporter says of a real cluster, against squeue and sinfo."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hpml_exporters.slurm.options import SlurmOptions

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk, eventually


def series(options: SlurmOptions) -> dict[str, Counter[tuple[str, ...]]]:
    """One refresh: values by name and by the values of the labels, in order of their names."""
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for family in options.collector().sample(0.0):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, Counter())[labels] += int(sample.value)
    return found


def test_jobs_and_nodes_of_a_cluster(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running, held, dependent, delayed, an array, a drained node: as squeue and sinfo count."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.slurm_conf))

    def submit(*options: str, wrap: str = "true") -> str:
        words = ("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={wrap}")
        return slurm_cluster.run(*words, cwd=tmp_path).stdout.strip()

    running = submit("--gres=gpu:1", wrap="sleep 600")
    failed = submit(wrap="exit 3")
    jobs = [running, submit("--hold"), submit(f"--dependency=afterok:{running}")]
    jobs += [submit("--begin=now+1hour"), submit("--hold", "--array=0-9:3%2")]
    try:
        state = ("squeue", "--noheader", "--states=all", "--format=%T", "--jobs")
        eventually(lambda: "RUNNING" in slurm_cluster.run(*state, running).stdout)
        eventually(lambda: "FAILED" in slurm_cluster.run(*state, failed).stdout)
        slurm_cluster.run("scontrol", "update", "node=node2", "state=drain", "reason=a b")

        def agree() -> bool:
            shown = series(SlurmOptions(source="commands", users=True))
            rows = slurm_cluster.run("squeue", "--array", "--noheader", "--format=%P %q %T").stdout
            states = Counter(tuple(row.lower().split()) for row in rows.splitlines())
            command = ("squeue", "--array", "--noheader", "--states=PENDING", "--format=%P %r")
            reasons = Counter(
                tuple(row.split()) for row in slurm_cluster.run(*command).stdout.splitlines()
            )
            same = shown["hpml_slurm_jobs"] == states
            return same and shown["hpml_slurm_jobs_pending"] == reasons

        eventually(agree)
        shown = series(SlurmOptions(source="commands"))
        nodes = json.loads(slurm_cluster.run("sinfo", "--json").stdout)["nodes"]
        assert shown["hpml_slurm_cpus"]["allocated",] == sum(node["alloc_cpus"] for node in nodes)
        assert shown["hpml_slurm_gpus"].total() == 4
        assert shown["hpml_slurm_gpus"]["allocated", "a100"] == 1
        assert "a b" in {labels[1] for labels in shown["hpml_slurm_node_reason_info"]}
    finally:
        slurm_cluster.run("scontrol", "update", "node=node2", "state=resume", check=False)
        slurm_cluster.run("scancel", *jobs)


def test_a_user_of_a_cluster_lists_its_targets(desk: Desk) -> None:
    """`hpml targets` prints all nodes, with what Slurm knows of them."""
    groups = json.loads(desk.hpml("targets", "--port", "9999").stdout)
    assert [group["labels"]["node"] for group in groups] == list(desk.cluster.nodes)
    assert all(group["targets"][0].endswith(":9999") for group in groups)
