"""The exporter as a process: it starts, prints its address, ends on a signal, and never hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters import NodeCollector
from hpml_exporters.app import sources_of
from hpml_exporters.options import COLLECTORS, NodeOptions
from prometheus_client import CollectorRegistry

from hpml_orchestrator.log import message_of
from tests.patience import eventually
from tests.unit.exporters.collecting import figures
from tests.unit.exporters.web.support import make_certificates

Start = Callable[..., subprocess.Popen[str]]
NOTHING = list(COLLECTORS)
COMMAND = [sys.executable, "-P", "-m", "hpml_exporters"]
OWN = """
import sys, time
from hpml_exporters.app import run
from hpml_exporters.core import sampler
from hpml_exporters.core.collector import MetricSpec
from hpml_exporters.options import NodeOptions
from tests.unit.exporters.collecting import Probe

sampler._JOIN_SECONDS = 60  # a busy machine must not cost the last reading
spec = MetricSpec("hpml_train_samples_total", "counter", "X.", ("jobid",), source="x")

def act(turn):
    if {hangs} and turn > 1:
        time.sleep(600)  # a fake driver's call that never returns
    return [spec.family([(("7",), 100 * turn)])]

probe = Probe("own", interval={interval}, act=act)
sys.exit(run(NodeOptions.from_json(sys.argv[1]), [probe.source()]))
"""
"""The exporter of job 7 with a collector of ours."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process; whatever is still there at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def begin(
        options: dict[str, object], *words: str, command: list[str] = COMMAND, **more: Any
    ) -> subprocess.Popen[str]:
        given = {"listen": "127.0.0.1:0", "address_file": str(tmp_path / "address"), **options}
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([root, os.path.join(root, "exporters")])
        process: subprocess.Popen[str] = subprocess.Popen(
            [*command, json.dumps(given), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            **more,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and standard error."""
    err = process.communicate(timeout=120)[1]
    return process.returncode, err


def address(tmp_path: Path) -> str:
    """The address that the exporter wrote."""
    path = tmp_path / "address"
    eventually(path.exists)
    return path.read_text().strip()


def scraped(tmp_path: Path) -> dict[str, float]:
    """What a scrape gets."""
    with urllib.request.urlopen(f"http://{address(tmp_path)}/metrics", timeout=60) as answer:
        return figures(answer.read())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_until_told_to_end(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    """It prints its address in one line, answers there, and ends with 0 at once."""
    process = start({"without": NOTHING})
    now = scraped(tmp_path)
    assert now["hpml_exporter_open_connections"] == 1
    assert 5e6 < now["process_resident_memory_bytes"] < 45e6
    assert now["process_cpu_seconds_total"] > 0
    assert abs(now["process_start_time_seconds"] - time.time()) < 120
    process.send_signal(number)
    code, logged = ended(process)
    assert code == 0
    line = rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO http://{address(tmp_path)}/metrics\n"
    assert re.fullmatch(line, logged)


@pytest.mark.parametrize(
    ("around", "numbers"),
    [
        ([], (signal.SIGSTOP, signal.SIGCONT)),  # by `scontrol suspend`
        (["nohup"], (signal.SIGHUP,)),  # the terminal goes
        (["sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-'], ()),
    ],
    ids=["suspended", "nohup", "closed streams"],
)
def test_it_goes_on(
    start: Start, tmp_path: Path, around: list[str], numbers: tuple[signal.Signals, ...]
) -> None:
    """After these signals, and without standard streams: sockets do not get their numbers."""
    process = start({"without": NOTHING}, command=[*around, *COMMAND], stdin=subprocess.DEVNULL)
    assert scraped(tmp_path)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    assert scraped(tmp_path)
    if "sh" in around:
        opened = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert opened == [os.devnull] * 3
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ERROR one argument is wanted"),
        (["a", "b"], "ERROR one argument is wanted"),
        (["{"], "ERROR the options are no JSON object of NodeOptions"),
        (["5"], "ERROR the options are no JSON object of NodeOptions"),
        (['{"frob": 1}'], "unknown: frob"),
        (['{"job": 5}'], "ERROR the options are no JSON object of NodeOptions"),
        (['{"listen": 9445}'], "ERROR the options are no JSON object of NodeOptions"),
        (
            ['{"listen": "localhost"}'],
            "ERROR listen: not an address with a port (got 'l",
        ),
        (['{"listen": "127.0.0.1:99999"}'], "ERROR listen: not an address with a port"),
        (['{"gpu_interval": 0}'], "ERROR gpu_interval: must be 0.1 to 3600 seconds (got 0)"),
        (['{"node_interval": NaN}'], "ERROR node_interval: must be 0.1 to 3600 seconds"),
        (['{"exit_seconds": 5}'], "ERROR exit_seconds: must be more than the 10 s after which"),
        (['{"without": ["gpus"]}'], "ERROR without: unknown collector (got 'gpus')"),
        (['{"gpu_interval": "1"}'], "ERROR the options are no JSON object of NodeOptions"),
        (['{"roots": {"dev": "x"}}'], "ERROR the options are no JSON object of NodeOptions"),
        (['{"web_config": "/none/web.yml"}'], "ERROR "),
        (['{"listen": "127.0.0.1:0", "address_file": "/none/a"}'], "ERROR address_file: cannot"),
    ],
)
def test_wrong_options_are_told(words: list[str], message: str) -> None:
    """Status 2 and what is wrong, as a line and no traceback."""
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    # a collector of the last case may have found nothing to read before the file is written
    assert [line for line in done.stderr.splitlines() if message in line]
    assert "Traceback" not in done.stderr


def test_it_says_when_it_speaks_tls(start: Start, tmp_path: Path) -> None:
    """The line on standard error is what a browser or curl can be given."""
    make_certificates(tmp_path)
    config = tmp_path / "web.yml"
    config.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    process = start({"without": NOTHING, "web_config": str(config)})
    where = address(tmp_path)
    process.terminate()
    code, logged = ended(process)
    assert (code, message_of(logged)) == (0, f"https://{where}/metrics\n")


def test_a_port_that_is_taken_is_told(start: Start, tmp_path: Path) -> None:
    """The second exporter on a port reports this and ends with 2."""
    start({"without": NOTHING})
    where = address(tmp_path)
    code, err = ended(start({"without": NOTHING, "listen": where}))
    assert code == 2
    assert message_of(err).startswith(f"listen: Address already in use (got '{where}')")


def summary_of(tmp_path: Path) -> dict[str, Any]:
    """The options that have the figures of job 7 written."""
    return {"job": {"jobid": "7"}, "summary_file": str(tmp_path / "summary.json")}


def test_a_stuck_driver_ends_the_process(start: Start, tmp_path: Path) -> None:
    """With 75, although a thread hangs in a call, and with the job's figures written."""
    script = OWN.format(hangs=True, interval=0.1)
    options = {"stuck_seconds": 1.0, "exit_seconds": 2.5, **summary_of(tmp_path)}
    code, err = ended(start(options, command=[sys.executable, "-c", script]))
    assert code == 75
    assert "collector own: stuck for" in err
    assert json.loads((tmp_path / "summary.json").read_text())["training"]["samples"] == 100


def test_the_last_reading_of_a_job_counts(start: Start, tmp_path: Path) -> None:
    """A job shorter than an interval is not lost: everything is read again at the end."""
    script = OWN.format(hangs=False, interval=60)
    process = start(summary_of(tmp_path), command=[sys.executable, "-c", script])
    eventually(lambda: scraped(tmp_path).get("hpml_train_samples_total{jobid=7}") == 100)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    assert json.loads((tmp_path / "summary.json").read_text())["training"]["samples"] == 200


def test_it_ends_with_its_parent(start: Start, tmp_path: Path) -> None:
    """An agent that was killed outright leaves no exporter behind."""
    script = (
        "import json, os, subprocess, sys, time\n"
        "options = {**json.loads(sys.argv[1]), 'parent_pid': os.getpid()}\n"
        "words = [sys.executable, '-P', '-m', 'hpml_exporters', json.dumps(options)]\n"
        "child = subprocess.Popen(words)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = start({"without": NOTHING}, command=[sys.executable, "-c", script])
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert scraped(tmp_path)
    process.kill()
    assert "is gone" in ended(process)[1]
    eventually(
        lambda: (
            not os.path.exists(f"/proc/{child}/cmdline")
            or not Path(f"/proc/{child}/cmdline").read_bytes()
        )
    )


def test_collectors_are_switched(tmp_path: Path) -> None:
    """All of them without a word, those of `without` not; jobs come first, for others ask them."""
    assert sorted(one.name for one in sources_of(NodeOptions())) == sorted(COLLECTORS)
    assert sources_of(NodeOptions())[0].name == "jobs"
    left = sources_of(NodeOptions(without=("jobs", "gpu", "lustre")))
    assert [one.name for one in left] == [
        "processes",
        "shm",
        "disks",
        "infiniband",
        "nfs",
        "health",
        "training",
    ]


def test_a_collector_for_anybodys_registry() -> None:
    """`NodeCollector` brings the node's metrics into a program of one's own."""
    registry = CollectorRegistry()
    collector = NodeCollector(NodeOptions(cluster="c1", node="n1", without=("gpu",)))
    try:
        registry.register(collector)
        eventually(lambda: registry.get_sample_value("hpml_exporter_up", {"collector": "jobs"}))
        labels = {"cluster": "c1", "node": "n1", "scope": "node"}
        assert registry.get_sample_value("hpml_node_info", labels) == 1
    finally:
        collector.stop()


def test_it_imports_nothing_heavy() -> None:
    """What stays in memory for as long as a node runs has only what is used."""
    code = (
        "import sys, hpml_exporters.__main__, hpml_exporters.app, hpml_exporters.web\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    heavy = "typer rich pydantic jinja2 ruamel torch numpy nvitop pynvml psutil asyncio bcrypt"
    assert not loaded & set(heavy.split())
