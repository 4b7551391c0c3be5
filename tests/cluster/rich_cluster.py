"""A cluster with limits of every kind, for what looks at a cluster before a job is submitted."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.cluster.conftest import SlurmCluster, booted, clean_environment

USER = "games"
# Two kinds of nodes; one of them has a MIG profile as well as whole GPUs.
CONFIGURATION = """\
EnforcePartLimits=NO
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:1g.10gb
DefMemPerCPU=500
MaxArraySize=11
GresTypes=gpu
NodeName=node1 CPUs=8 CoresPerSocket=8 RealMemory=8000 TmpDisk=100 Gres= Feature=cpu,avx512,rack1
NodeName=node2 CPUs=8 CoresPerSocket=8 RealMemory=8000 TmpDisk=100 Gres= Feature=cpu,avx512,rack1
NodeName=node3 CPUs=16 CoresPerSocket=16 RealMemory=32000 Gres=gpu:a100:4 Feature=gpu,avx512,rack2
NodeName=node4 CPUs=16 CoresPerSocket=16 RealMemory=32000 Gres=gpu:a100:2,gpu:1g.10gb:4 Feature=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=2:00:00
PartitionName=long Nodes=node[1-2] MaxTime=7-0 MaxNodes=1
PartitionName=gpu Nodes=node[3-4] MaxTime=1-0 MaxMemPerNode=16000 MaxCPUsPerNode=12
PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE MaxTime=1-0 MinNodes=2
PartitionName=vip Nodes=ALL MaxTime=1-0
PartitionName=nodev Nodes=ALL MaxTime=1-0
PartitionName=fast Nodes=ALL MaxTime=1-0
PartitionName=noslow Nodes=ALL MaxTime=1-0
PartitionName=capped Nodes=ALL MaxTime=1-0
PartitionName=broken Nodes=ALL State=DOWN
PartitionName=off Nodes=ALL State=INACTIVE
PartitionName=drained Nodes=ALL State=DRAIN
PartitionName=percpu Nodes=node[1-2] MaxMemPerCPU=1000
PartitionName=rootonly Nodes=ALL RootOnly=YES
PartitionName=games Nodes=ALL AllowGroups=games
PartitionName=booked Nodes=ALL ReqResv=YES
"""
# Added once these accounts and QOS exist: newer controllers do not boot before.
NAMING = {
    "vip": "AllowAccounts=vip",
    "nodev": "DenyAccounts=dev",
    "fast": "AllowQos=fast",
    "noslow": "DenyQos=slow",
    "capped": "QOS=cap",
}
# The words after `sacctmgr -i`, in order.
ACCOUNTS = """\
add account vip,course Description=x Organization=x
add qos fast,slow,gpuq,tiny,grpq,minq,cap,nojobs,minutes
modify qos fast set MaxWall=00:30:00 Flags=DenyOnLimit
modify qos slow set MaxTRESPerJob=cpu=8 MaxWall=01:00:00
modify qos gpuq set MaxTRESPerJob=gres/gpu=2 Flags=DenyOnLimit
modify qos tiny set MaxTRESPerNode=cpu=2
modify qos grpq set GrpTRES=cpu=4,node=2 MaxTRESPerUser=mem=3000
modify qos minq set MinTRESPerJob=cpu=4
modify qos cap set MaxTRESPerJob=node=2
modify qos nojobs set MaxJobsPerUser=0
modify qos minutes set MaxTRESMinsPerJob=cpu=40
add user root account=vip
add user games account=course
modify account course set MaxWall=00:20:00 MaxTRES=cpu=4 GrpTRES=mem=6000
modify user games account=dev set qos+=fast,slow,gpuq,tiny,grpq,minq,nojobs,minutes
modify user games account=course set qos=normal
modify user root set qos+=fast,slow
"""


@contextlib.contextmanager
def rich_cluster() -> Iterator[SlurmCluster]:
    """Boot the cluster, and take it down again."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as lines:
        lines.write(CONFIGURATION)
        lines.flush()
        with booted("--nodes", "4", "--slurm-conf", lines.name) as cluster:
            for line in ACCOUNTS.splitlines():
                cluster.run("sacctmgr", "-i", *line.split())
            text = cluster.slurm_conf.read_text()
            for partition, words in NAMING.items():
                name = f"PartitionName={partition} "
                text = _edited(text, name, f"{name}{words} ")
            cluster.reconfigure(text)
            yield cluster


def enforce(cluster: SlurmCluster, how: str) -> None:
    """Set EnforcePartLimits, and have the controller read it."""
    text = cluster.slurm_conf.read_text()
    cluster.reconfigure(_edited(text, r"EnforcePartLimits=\w+", f"EnforcePartLimits={how}"))


def _edited(text: str, old: str, new: str) -> str:
    text, count = re.subn(old, new, text)
    assert count == 1
    return text


def as_user(
    cluster: SlurmCluster, *command: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command as the user without rights."""
    return subprocess.run(
        command,
        env={**clean_environment(), "SLURM_CONF": str(cluster.slurm_conf)},
        cwd="/",
        user=USER,
        group="nogroup",
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
