"""Health of a node, from trees as the kernel shows them, and what `hpml doctor --node` makes of it.

The files' forms: proc(5), Documentation/hwmon/sysfs-interface.rst, sysfs-class-net-statistics and
Documentation/driver-api/edac.rst of the kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hpml_exporters.node.health import make, read_health

from hpml_orchestrator.cli import site
from hpml_orchestrator.cli.site import Expected, examine_node
from tests.unit.exporters.collectors.reading import context, sampled, write

MOUNT = "30 1 {device} / {point} {here} shared:1 - {kind} /dev/sda {super}\n"
STAT = "{pid} (py (x) thon) {state} 1 1 1 0 -1 0 0 0 0 0 7 3 0 0 20 0 1 0 {start} 0 0"
PORT = "class/infiniband/mlx5_{number}/ports/1"


def mount(point: str, device: str, here: str = "rw", superblock: str = "rw,errors=x") -> str:
    return MOUNT.format(device=device, point=point, here=here, kind="xfs", super=superblock)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A healthy node: two GPUs, two ports, an EDAC controller, sensors, two file systems."""
    gpus = {f"0000:0{number}:00.0": ("0x10de", "0x030200") for number in (1, 2)}
    devices = gpus | {
        "0000:03:00.0": ("0x15b3", "0x020700"),
        "0000:04:00.0": ("0x10de", "0x068000"),
    }
    sys_files = {
        f"bus/pci/devices/{name}/{file}": text
        for name, texts in devices.items()
        for file, text in zip(("vendor", "class"), texts, strict=True)
    }
    for number in (0, 1):
        sys_files |= {
            f"{PORT.format(number=number)}/state": "4: ACTIVE",
            f"{PORT.format(number=number)}/phys_state": "5: LinkUp",
        }
    sys_files |= {
        "devices/system/edac/mc/mc0/ce_count": "3",
        "devices/system/edac/mc/mc0/ue_count": "0",
        "devices/system/edac/mc/mc1/ce_count": "4",
        "devices/system/edac/mc/mc1/ue_count": "0",
        "class/hwmon/hwmon0/name": "coretemp",
        "class/hwmon/hwmon0/temp1_input": "50000",
        "class/hwmon/hwmon0/temp1_crit": "100000",
        "class/hwmon/hwmon0/temp2_input": "61000",
        "class/hwmon/hwmon0/temp2_crit": "100000",
        "class/hwmon/hwmon1/name": "nvme",
        "class/hwmon/hwmon1/temp1_input": "40850",
        "class/net/eth0/device/vendor": "0x8086",
        "class/net/eth0/carrier_down_count": "2",
        "class/net/lo/carrier_down_count": "0",
    }
    write(tmp_path / "sys", sys_files)
    mounts = mount("/", "8:1") + mount(str(tmp_path), "8:2")
    image = mount("/image", "7:0", here="ro", superblock="ro")  # mounted so on purpose
    write(tmp_path / "proc", {"self/mountinfo": mounts + image})
    for pid, state in {1: "S", 20: "D", 21: "Z"}.items():
        write(tmp_path / "proc", {f"{pid}/stat": STAT.format(pid=pid, state=state, start=pid)})
        write(tmp_path / "proc", {f"{pid}/comm": "python\n"})
    return tmp_path


def test_the_collector(node: Path) -> None:
    """What a healthy node shows, at the first reading."""
    collector = make(context(proc=node / "proc", sys=node / "sys"))
    first = sampled(collector)
    assert first["hpml_node_stuck_processes",] == 0
    assert first["hpml_node_zombies",] == 1
    assert first["hpml_filesystem_read_only", "/", "xfs"] == 0
    assert first["hpml_filesystem_read_only", "/image", "xfs"] == 0
    assert first["hpml_node_memory_errors_total", "corrected"] == 7
    assert first["hpml_node_temperature_celsius", "coretemp"] == 61
    assert first["hpml_node_temperature_limit_celsius", "coretemp"] == 100
    assert ("hpml_node_temperature_limit_celsius", "nvme") not in first
    assert first["hpml_network_link_down_total", "eth0"] == 2
    assert ("hpml_network_link_down_total", "lo") not in first
    assert first["hpml_node_clock_error_seconds",] >= 0


def test_stuck_processes(node: Path) -> None:
    """The same process without a context switch for ten minutes, and none of the kernel's own.

    A loader on a busy file server (21) is in uninterruptible sleep at each reading, and moves on.
    """
    kthread = STAT.format(pid=30, state="D", start=30).replace(" D 1 ", " D 2 ")
    write(node / "proc", {"30/stat": kthread, "30/status": switches(4)})
    collector = make(context(proc=node / "proc", sys=node / "sys"))

    def stuck(minutes: float, *, start: int = 20) -> float:
        files = {"20/stat": STAT.format(pid=20, state="D", start=start), "20/status": switches(7)}
        files |= {"21/stat": STAT.format(pid=21, state="D", start=21)}
        write(node / "proc", files | {"21/status": switches(round(10 * minutes))})
        return sampled(collector, 60 * minutes)["hpml_node_stuck_processes",]

    counts = [stuck(minutes) for minutes in (0, 0.5, 5, 9.5, 10, 30)]
    assert counts == [0, 0, 0, 0, 1, 1]
    assert stuck(31, start=99) == 0, "another process of that number"


def switches(count: int) -> str:
    """The end of /proc/PID/status."""
    return f"Threads:\t1\nvoluntary_ctxt_switches:\t{count}\nnonvoluntary_ctxt_switches:\t3\n"


UNSYNC = 0x40


@pytest.mark.parametrize(
    ("status", "error", "synchronized"),
    [
        (0x2001, 0.004, True),
        (0x2001, 1.5, True),  # 500 ppm for 50 minutes without an update
        (UNSYNC, 0.02, True),  # chrony without rtcsync: the right bound, and the flag
        (UNSYNC, 16.0, False),
    ],
)
def test_a_clock_is_judged_by_its_error(status: int, error: float, *, synchronized: bool) -> None:
    """The flag alone says nothing: not every daemon clears it."""
    assert read_health(clock=lambda: (status, error)).synchronized is synchronized


def test_a_file_system_that_became_read_only(node: Path) -> None:
    """After an error the file system is read-only while its mount stays writable."""
    write(
        node / "proc", {"self/mountinfo": mount("/local", "8:3", superblock="ro,errors=remount-ro")}
    )
    assert read_health(str(node / "proc"), str(node / "sys")).read_only == {("/local", "xfs"): True}


@pytest.fixture
def smi(node: Path) -> Path:
    """Stands for nvidia-smi: prints what gpus.csv has; a real one cannot fail on demand."""
    (node / "gpus.csv").write_text("0, No, No, 0\n1, No, No, [N/A]\n")
    script = node / "smi"
    script.write_text(f"#!/bin/sh\nexec cat {node}/gpus.csv\n")
    script.chmod(0o755)
    return script


def judged(node: Path, **more: object) -> dict[str, tuple[str, str]]:
    """Result and words by check."""
    expected = Expected(
        proc=str(node / "proc"), sys=str(node / "sys"), nvidia_smi=str(node / "smi")
    )
    found = examine_node(Expected(**{**vars(expected), **more}))
    return {finding.check: (finding.result, finding.found) for finding in found}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "_STUCK_SECONDS", 0.0)


def test_a_fit_node(node: Path, smi: Path) -> None:
    """Nothing is an error; a process stuck in the kernel is named."""
    assert smi.exists()
    found = judged(node)
    assert found["GPUs"] == ("ok", "2 answer, without memory faults")
    assert found["processes"] == ("warning", "stuck in the kernel: python (20)")
    assert found["memory"] == ("ok", "no uncorrected errors, 7 corrected ones since boot")
    assert found["temperatures"] == ("ok", "hottest is coretemp with 61 °C")
    assert found["InfiniBand"] == ("ok", "2 of 2 ports active")
    assert found["file servers"] == ("none", "none mounted")
    assert "error" not in {result for result, _ in found.values()}


@pytest.mark.parametrize(
    ("files", "check", "found"),
    [
        ({"gpus.csv": "0, No, No, 0\n"}, "GPUs", "1 of 2 answer"),
        ({"gpus.csv": "0, Yes, No, 0\n1, No, No, 0\n"}, "GPUs", "GPU 0: a memory row could not"),
        ({"gpus.csv": "0, No, No, 0\n1, No, No, 3\n"}, "GPUs", "GPU 1: uncorrected memory"),
        ({"smi": "#!/bin/sh\nexit 9\n"}, "GPUs", "0 of 2 answer: nvidia-smi fails or hangs; 2 on"),
        ({"sys/devices/system/edac/mc/mc1/ue_count": "1"}, "memory", "1 uncorrected error"),
        ({"sys/class/hwmon/hwmon0/temp2_input": "100000"}, "temperatures", "coretemp has 100 °C"),
        ({f"sys/{PORT.format(number=1)}/state": "1: DOWN"}, "InfiniBand", "mlx5_1/1 is DOWN"),
        (
            {"proc/self/mountinfo": mount("/", "8:1", superblock="ro")},
            "local file systems",
            "/ is read-only",
        ),
    ],
)
def test_what_is_an_error(
    node: Path, smi: Path, files: dict[str, str], check: str, found: str
) -> None:
    """Each fault alone makes its check an error and no other one."""
    assert smi.exists()
    write(node, files)
    results = judged(node)
    assert results[check][0] == "error"
    assert found in results[check][1]
    assert [name for name, (result, _) in results.items() if result == "error"] == [check]


def test_warnings(node: Path, smi: Path) -> None:
    """A row that waits for a reset, a port without a cable, and a GPU that was expected."""
    assert smi.exists()
    write(node, {"gpus.csv": "0, No, Yes, 0\n1, No, No, 0\n"})
    write(node / "sys" / PORT.format(number=1), {"state": "1: DOWN", "phys_state": "3: Disabled"})
    found = judged(node)
    assert found["GPUs"][0] == "warning"
    assert found["InfiniBand"] == ("warning", "1 of 2 ports active")
    assert judged(node, gpus=8)["GPUs"] == ("error", "2 of 8 answer")


def test_a_node_without_the_driver(node: Path) -> None:
    """No GPU answers where nvidia-smi is not installed."""
    assert judged(node, nvidia_smi=str(node / "none"), gpus=4)["GPUs"] == (
        "error",
        "0 of 4 answer: nvidia-smi is not installed; 2 on the PCI bus",
    )


def test_the_command(tmp_path: Path) -> None:
    """The exit status is that of the errors, and options that need --node say so."""
    command = [sys.executable, "-m", "hpml_orchestrator.cli", "doctor"]
    done = subprocess.run(
        [*command, "--node", "--json"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    found = json.loads(done.stdout)
    assert [one["check"] for one in found][:2] == ["GPUs", "clock"]
    errors = [one["check"] for one in found if one["result"] == "error"]
    assert done.returncode == (1 if errors else 0)
    assert done.stderr.count("ERROR: hpml: ") == len(errors)
    done = subprocess.run([*command, "--drain"], capture_output=True, text=True, check=False)
    assert (done.returncode, "--drain: needs --node" in done.stderr) == (2, True)
