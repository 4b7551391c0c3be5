"""scontrol's text becomes records, whatever its values hold."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.scheduler.slurm.scontrol import parse_config, parse_records

DATA = Path(__file__).parent / "data"

ONE_LINE = (
    "NodeName=node2 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 Gres=gpu:a100:2 "
    "OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 State=IDLE+DRAIN "
    "Partitions=main,low  AllocTRES= CapWatts=n/a "
    "Reason=bad disk = slow, see ticket=12 [root@1795228609]\n"
)
JOB = """\
JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=a b=c d
goes on
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:4
     Nodes=node[1-2] CPU_IDs=0-1 Mem=2000 GRES=gpu:a100:2(IDX:0-1)
     Nodes=node3 CPU_IDs=4,6 Mem=0 GRES=
   Command=/x/run.sh --lr=0.1 Power=high
   Comment=one Reason=two
   Power=


JobId=8 JobName=next
   Reason=x
"""


def test_fields_and_details_of_a_job() -> None:
    """Free text takes its whole line; a detail is no field; a name's second line belongs to it."""
    first, second = parse_records(JOB)
    assert first["JobName"] == "a b=c d\ngoes on"
    assert first["Reason"] == "None"
    assert first["Dependency"] == "(null)"
    assert first["CPUs/Task"] == "1"
    assert first["ReqB:S:C:T"] == "0:0:*:*"
    assert first["Command"] == "/x/run.sh --lr=0.1 Power=high"
    assert first["Comment"] == "one Reason=two"
    assert first["Power"] == ""
    assert first["absent"] == ""
    assert first.details == (
        {
            "Nodes": "node[1-2]",
            "CPU_IDs": "0-1",
            "Mem": "2000",
            "GRES": "gpu:a100:2(IDX:0-1)",
        },
        {"Nodes": "node3", "CPU_IDs": "4,6", "Mem": "0", "GRES": ""},
    )
    assert second["JobName"] == "next"


def test_one_line_form() -> None:
    """What `-o` prints says the same."""
    (node,) = parse_records(ONE_LINE)
    assert node["NodeName"] == "node2"
    assert node["OS"] == "Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0"
    assert node["AllocTRES"] == ""
    assert node["Reason"] == "bad disk = slow, see ticket=12 [root@1795228609]"
    (job,) = parse_records(
        "JobId=7 JobName=a JOB_GRES=(null)   Nodes=node1 CPU_IDs=0 Mem=10 GRES= MinCPUsNode=1 "
        "Nodes=x\n"
    )
    assert job.details == ({"Nodes": "node1", "CPU_IDs": "0", "Mem": "10", "GRES": ""},)
    assert job["MinCPUsNode"] == "1"
    assert job["Nodes"] == "x"


def test_a_long_reason_goes_on() -> None:
    """Lines without a name belong to the text above."""
    (node,) = parse_records("NodeName=a State=DOWN\n   Reason=first\n          second\n")
    assert node["Reason"] == "first\nsecond"


def test_nothing_there() -> None:
    """Slurm says it in words."""
    assert parse_records("No reservations in the system\n") == []
    assert parse_records("") == []


def test_config_of_a_real_cluster() -> None:
    """Values keep their equals signs and blanks; the heading is no value."""
    config = parse_config((DATA / "22.05.8" / "config.txt").read_text())
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["AuthInfo"] == "socket=/tmp/devcluster/run/munge.socket,cred_expire=5"
    assert config["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert config["MessageTimeout"] == "10 sec"
    assert "Configuration" not in config


@given(st.text(max_size=200))
def test_any_text_gives_records(text: str) -> None:
    """No text is an error."""
    for record in parse_records(text) + parse_records(f"JobId=1 {text}\n   A=b\n{text}"):
        assert all(isinstance(value, str) for value in record.fields.values())
    parse_config(text)
