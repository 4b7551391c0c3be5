"""`hpml export`: wrong values are told before anything starts, and what starts is lean."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hpml_exporters.metrics import ALL

from tests.patience import eventually
from tests.unit.exporters.collecting import figures

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]
SWITCHES = "gpu jobs processes shm disks infiniband nfs lustre training".split()
NOTHING = [f"--no-{name}" for name in SWITCHES]


@pytest.fixture
def exporter(shell: Shell) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `hpml export node` as a user does; whatever is left at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        (shell.root / "address").unlink(missing_ok=True)  # that of the test before
        given = ("--listen", "127.0.0.1:0", "--address-file", "address", *words)
        begun.append(shell.start("export", "node", *given))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def scraped(shell: Shell) -> dict[str, float]:
    """What a scrape gets from the exporter that was started last."""
    path = shell.root / "address"
    eventually(path.exists)
    with urllib.request.urlopen(f"http://{path.read_text().strip()}/metrics", timeout=120) as got:
        return figures(got.read())


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--listen", "localhost"], "--listen: no address with a port (got 'localhost')", "9445"),
        (["--listen", ":99999"], "--listen: no port (got ':99999')", "hint: a port is a number"),
        (["--gpu-interval", "0"], "--gpu-interval: must be 0.1 to 3600 seconds (got 0.0)", ""),
        (["--job-interval", "nan"], "--job-interval: must be 0.1 to 3600 seconds", ""),
        (["--process-interval", "x"], "--process-interval: must be a number (got 'x')", "hint:"),
        (["--node-interval", "1e9"], "--node-interval: must be 0.1 to 3600 seconds", ""),
        (["--stuck-seconds", "0"], "--stuck-seconds: must be 1 to 3600 seconds (got 0.0)", ""),
        (["--exit-seconds", "9"], "--exit-seconds: must be more than --stuck-seconds, which", ""),
        (["--web-config", "none.yml"], "--web-config: cannot be read: No such file", ""),
        (["--web-config", ""], "--web-config: must not be empty", "hint: is a variable"),
        (["--address-file", " "], "--address-file: must not be empty", "hint: is a variable"),
        (["--no-gpus"], "--no-gpus: hpml export node has no such option", "--no-gpu"),
        (["--root", "dev=/x"], "--root: must be NAME=DIR (got 'dev=/x')", "hint: NAME is one of"),
        (["there"], "", "hint: "),
    ],
)
def test_what_is_wrong_is_told(
    hpml: Hpml, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str, hint: str
) -> None:
    """With the option, its value and what would be right; nothing is started."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the exporter was started"))
    told = hpml("export", "node", *words)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"hpml: error: {message}"), told.err
    assert hint in told.err
    assert "Traceback" not in told.err


def handed_over(
    hpml: Hpml, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[dict[str, object], str]:
    """The options that the lean process would get, and what was said before."""
    caught: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: caught.append(given))
    told = hpml("export", "node", *words)
    assert told.code == 0, told.err
    ((program, command, environment),) = caught
    assert program == command[0] == sys.executable
    assert command[1:4] == ["-P", "-m", "hpml_exporters"]
    assert environment["MALLOC_ARENA_MAX"] == "2"
    return json.loads(command[4]), told.err


def test_every_option_arrives(hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each switch and each value, with paths made absolute."""
    monkeypatch.chdir(shell.root)
    (shell.root / "web.yml").write_text("")
    given, _ = handed_over(
        hpml,
        monkeypatch,
        *NOTHING,
        *("--listen", ":1", "--web-config", "web.yml", "--address-file", "a"),
        *("--gpu-interval", "2", "--job-interval", "3", "--process-interval", "4"),
        *("--node-interval", "5", "--stuck-seconds", "6", "--exit-seconds", "7"),
        *("--root", "proc=/p", "--root", "sys=/s"),
    )
    roots = given.pop("roots")
    assert given == {
        "listen": ":1",
        "web_config": str(shell.root / "web.yml"),
        "without": SWITCHES,
        "gpu_interval": 2.0,
        "job_interval": 3.0,
        "process_interval": 4.0,
        "node_interval": 5.0,
        "stuck_seconds": 6.0,
        "exit_seconds": 7.0,
        "job": None,
        "address_file": str(shell.root / "a"),
        "summary_file": "",
        "any_port": False,
        "feed_fd": -1,
        "parent_pid": 0,
    }
    assert isinstance(roots, dict)
    assert (roots["proc"], roots["sys"], roots["shm"]) == ("/p", "/s", "/dev/shm")


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_is_that_of_its_collector(
    hpml: Hpml, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`--no-gpu` leaves out GPUs and nothing else."""
    assert handed_over(hpml, monkeypatch, f"--no-{name}")[0]["without"] == [name]


HASH = "$2y$10$" + "a" * 53
USERS = f"basic_auth_users: {{prometheus: '{HASH}'}}\n"
TLS = "tls_server_config: {cert_file: a.crt, key_file: a.key%s}\n"


@pytest.mark.parametrize(
    ("listen", "config", "warning"),
    [
        ("127.0.0.1:9445", None, ""),
        ("localhost:9445", None, ""),
        ("[::1]:9445", None, ""),
        ("127.0.0.1:9445", "", ""),
        (":9445", None, "whoever reaches :9445 can read who runs what here, unencrypted and with"),
        ("0.0.0.0:9445", None, "whoever reaches 0.0.0.0:9445 can read"),
        (":9445", "", "whoever reaches :9445 can read who runs what here, unencrypted and with"),
        (":9445", TLS % "", "whoever reaches :9445 can read who runs what here, without a pass"),
        (":9445", TLS % ", client_auth_type: RequireAnyClientCert", "whoever reaches :9445 can"),
        (":9445", USERS, "the password for :9445 crosses the network unencrypted"),
        (":9445", USERS + TLS % "", ""),
        (":9445", TLS % ", client_auth_type: RequireAndVerifyClientCert", ""),
    ],
)
def test_an_open_door_is_warned_of(
    hpml: Hpml,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    config: str | None,
    warning: str,
) -> None:
    """What counts is what the web-config file says, not that there is one; nothing is refused."""
    words: list[str] = []
    if config is not None:
        path = shell.root / "web.yml"
        path.write_text(config)
        words = ["--web-config", str(path)]
    err = handed_over(hpml, monkeypatch, "--no-gpu", "--listen", listen, *words)[1]
    assert err.startswith(f"hpml: warning: {warning}") if warning else err == ""


def test_a_wrong_web_config_is_told_before_the_start(
    hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the field; the value, which may be a password, is not shown."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the exporter was started"))
    path = shell.root / "web.yml"
    path.write_text("basic_auth_users: {ada: secret}\n")
    told = hpml("export", "node", "--no-gpu", "--web-config", str(path))
    assert told.code == 2
    assert told.err.startswith("hpml: error: basic_auth_users.ada: this is no hash of bcrypt")
    assert "secret" not in told.err


def test_without_nvitop_gpus_are_left_out(hpml: Hpml, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said with what to install; with `--no-gpu` nobody misses it."""
    monkeypatch.setitem(sys.modules, "nvitop", None)
    err = handed_over(hpml, monkeypatch)[1]
    assert "GPUs are left out: nvitop is not installed\nhint: pip install 'hpml-orch" in err
    assert handed_over(hpml, monkeypatch, "--no-gpu")[1] == ""


def test_a_node_is_exported(exporter: Callable[..., subprocess.Popen[str]], shell: Shell) -> None:
    """It serves in the same process that was started, and Ctrl-C ends it."""
    (shell.root / "queue.py").write_text("raise SystemExit('a file of the user was imported')")
    process = exporter(*NOTHING)
    now = scraped(shell)
    assert now["hpml_exporter_scrapes_total"] == 1
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    assert b"hpml_exporters" in command
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert re.fullmatch(r"hpml: http://127\.0\.0\.1:\d+/metrics\n", err)


def test_a_port_that_is_taken(exporter: Callable[..., subprocess.Popen[str]], shell: Shell) -> None:
    """The second exporter says what to do, and the first goes on."""
    exporter(*NOTHING)
    scraped(shell)
    where = (shell.root / "address").read_text().strip()
    second = shell.hpml("export", "node", *NOTHING, "--listen", where)
    assert (second.code, second.out) == (2, "")
    assert "something else listens there already" in second.err
    assert "hint: another port" in second.err
    assert scraped(shell)


def test_the_catalogue_is_printed(hpml: Hpml) -> None:
    """Every metric as a line, or as JSON with all that is known of it."""
    lines = hpml("export", "metrics").out.splitlines()
    assert lines[0] == "METRIC\tTYPE\tLABELS\tMEANING"
    assert [line.split("\t")[0] for line in lines[1:]] == [one.name for one in ALL]
    rows = hpml("export", "metrics", "--json").json()
    assert len(rows) == len(ALL)
    build = next(row for row in rows if row["name"] == "hpml_exporter_build_info")
    assert build == {
        "name": "hpml_exporter_build_info",
        "type": "info",
        "help": "Which exporter this is.",
        "labels": ["version", "python"],
        "unit": "",
        "source": "the exporter",
    }
