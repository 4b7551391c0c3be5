"""The text of scontrol and sacctmgr is read in every form of Slurm's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.records.units import read_count
from hpml_orchestrator.scheduler.cluster import Gres
from hpml_orchestrator.scheduler.slurm.records import (
    node_from,
    node_states,
    parse_config,
    parse_gres,
    parse_memory,
    parse_records,
    parse_tres,
    partition_from,
)

DATA = Path(__file__).parent / "data"
NODE = """\
NodeName=node2 Arch=x86_64 CoresPerSocket=4
   OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0
   RealMemory=16000 State=IDLE+DRAIN AllocTRES=
   Comment=one Reason=two
   Reason=bad disk = slow, see ticket=12 [root@1795228609]
          second line


NodeName=node3 State=DOWN*
"""


def test_free_text_takes_its_whole_line() -> None:
    """It may hold equals signs and continue in the next line; blank lines do not matter."""
    first, second = parse_records(f"a heading\n{NODE}")
    assert first["OS"] == "Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0"
    assert first["AllocTRES"] == first["absent"] == ""
    assert first["Comment"] == "one Reason=two"
    assert first["Reason"].endswith("ticket=12 [root@1795228609]\nsecond line")
    assert (second["NodeName"], second["State"]) == ("node3", "DOWN*")
    assert parse_records("No reservations in the system\n") == parse_records("") == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:00:00", 86_400),
        ("00:01:00", 60),
        ("365-00:00:00", 31_536_000),
        *((word, None) for word in ("UNLIMITED", "INFINITE", "NONE", "N/A", "4294967295", "")),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    """A word for no limit, or for nothing, is None."""
    (record,) = parse_records(f"PartitionName=main\n   MaxTime={text}\n")
    assert partition_from(record).max_seconds == seconds


def test_config_of_a_real_cluster() -> None:
    """Values keep their equals signs and blanks; the heading is not a value."""
    config = parse_config((DATA / "22.05.8" / "config.txt").read_text())
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["AuthInfo"] == "socket=/tmp/devcluster/run/munge.socket,cred_expire=5"
    assert config["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert config["MessageTimeout"] == "10 sec"
    assert "Configuration" not in config


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16000", 16_000),
        ("62.50G", 64_000),
        ("1000M", 1000),
        ("1000Mc", 1000),
        ("1000Mn", 1000),
        ("2T", 2_097_152),
        ("512K", 0),
        ("16?", 16),
        ("0", 0),
        ("UNLIMITED", None),
        ("(null)", None),
        ("18446744073709551615", None),
        ("lots", None),
    ],
)
def test_memory(text: str, mib: int | None) -> None:
    """In MiB, whatever the unit; sacct's c and n say per CPU and per node."""
    assert parse_memory(text) == mib


def test_tres() -> None:
    """Types of GPUs keep their names, memory is in MiB, what is not set is left out."""
    assert parse_tres("cpu=16,mem=62.50G,billing=16,gres/gpu=4,gres/gpu:a100=4") == {
        "cpu": 16,
        "mem": 64_000,
        "billing": 16,
        "gres/gpu": 4,
        "gres/gpu:a100": 4,
    }
    assert parse_tres("cpu=-1,node=3,energy=18446744073709551614") == {"node": 3}
    for text in ("", "(null)", "N/A", "cpu", "=4"):
        assert parse_tres(text) == {}


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("(null)", ()),
        ("N/A", ()),
        ("", ()),
        ("gpu:4", (Gres("gpu", "", 4),)),
        ("gpu", (Gres("gpu", "", 1),)),
        ("gpu:a100", (Gres("gpu", "a100", 1),)),
        ("gpu:a100:4(S:0-1)", (Gres("gpu", "a100", 4),)),
        ("gpu:a100:4(IDX:0-1,3)", (Gres("gpu", "a100", 4),)),
        ("gpu:1g.10gb:7(S:0)", (Gres("gpu", "1g.10gb", 7),)),
        ("gpu:a100:no_consume:4", (Gres("gpu", "a100", 4),)),
        ("lustre:no_consume:4K", (Gres("lustre", "", 4096),)),
        ("gres/gpu:2", (Gres("gpu", "", 2),)),
        (
            "gpu:a100:2(S:0,2),gpu:v100:1(S:1),mps:2M",
            (Gres("gpu", "a100", 2), Gres("gpu", "v100", 1), Gres("mps", "", 2_097_152)),
        ),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", (Gres("gpu", "a100", 4),)),
    ],
)
def test_gres(text: str, gres: tuple[Gres, ...]) -> None:
    """Sockets and indices are not part of the count; commas may be in brackets."""
    assert parse_gres(text) == gres


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", {"IDLE"}),
        ("IDLE+DRAIN", {"IDLE", "DRAIN"}),
        ("DOWN*", {"DOWN", "NOT_RESPONDING"}),
        ("MIXED+PLANNED", {"MIXED", "PLANNED"}),
        ("IDLE+CLOUD+POWERED_DOWN", {"IDLE", "CLOUD", "POWERED_DOWN"}),
        ("idle~", {"IDLE", "POWERED_DOWN"}),
        ("MIXED#", {"MIXED", "POWERING_UP"}),
        ("IDLE!", {"IDLE", "POWER_DOWN"}),
        ("IDLE%", {"IDLE", "POWERING_DOWN"}),
        ("DOWN$", {"DOWN", "MAINTENANCE"}),
        ("MIXED@", {"MIXED", "REBOOT_REQUESTED"}),
        ("DOWN^*+DRAIN", {"DOWN", "REBOOT_ISSUED", "NOT_RESPONDING", "DRAIN"}),
        ("IDLE-", {"IDLE", "PLANNED"}),
        ("IDLE+", {"IDLE"}),
        ("", set()),
    ],
)
def test_states_of_nodes(text: str, states: set[str]) -> None:
    """Marks stand for flags."""
    assert node_states(text) == states


@given(st.text(alphabet="0123456789:-.KMGcn?(),=+*~ gpua/UNL\n", max_size=40))
def test_any_text_is_read_or_passed_over(text: str) -> None:
    """What nobody knows stops no reader."""
    for read in (read_count, parse_memory):
        value = read(text)
        assert value is None or value >= 0
    assert all(count >= 0 for count in parse_tres(text).values())
    assert all(one.count >= 0 for one in parse_gres(text))
    assert "" not in node_states(text)
    parse_config(text)
    for record in parse_records(text) + parse_records(f"NodeName=1 {text}\n   A=b\n{text}"):
        assert node_from(record).memory_mib >= 1
