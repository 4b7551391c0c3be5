"""`hpml export`: wrong values are refused before anything starts, and what starts is lean."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from hpml_exporters.app import ALL
from hpml_exporters.options import NodeOptions, Roots

from tests.patience import eventually
from tests.unit.cli.support import Hpml, Shell

SWITCHES = "gpu jobs processes shm disks infiniband nfs lustre training".split()
NOTHING = [f"--no-{name}" for name in SWITCHES]


def handed_over(
    hpml: Hpml, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[dict[str, object], str]:
    """The options that the lean process would get, and what was printed before."""
    caught: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: caught.append(given))
    ended = hpml("export", "node", "--listen", "127.0.0.1:0", *words)
    assert ended.code == 0, ended.err
    ((program, command, environment),) = caught
    assert [program, "-P", "-m", "hpml_exporters"] == command[:4]
    assert environment["MALLOC_ARENA_MAX"] == "2"
    return json.loads(command[4]), ended.err


def test_the_clusters_name_is_that_of_slurm_conf(
    hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the jobs' own exporters, so that both have the same label; an option overrides it."""
    conf = shell.root / "slurm.conf"
    conf.write_text("# ClusterName=old\nclustername = Main # ours\n")
    monkeypatch.setitem(shell.variables, "SLURM_CONF", str(conf))
    assert handed_over(hpml, monkeypatch)[0]["cluster"] == "main"
    assert handed_over(hpml, monkeypatch, "--cluster", "other")[0]["cluster"] == "other"


def test_every_option_arrives(hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each switch and each value, with paths made absolute."""
    monkeypatch.chdir(shell.root)
    (shell.root / "web.yml").write_text("")
    given, _ = handed_over(
        hpml,
        monkeypatch,
        *NOTHING,
        *("--listen", ":0", "--web-config", "web.yml", "--address-file", "a"),
        *("--gpu-interval", "2", "--job-interval", "3", "--process-interval", "4"),
        *("--node-interval", "5", "--stuck-seconds", "6", "--exit-seconds", "7"),
        *("--root", "proc=/p", "--root", "sys=/s", "--cluster", "c1"),
    )
    options = NodeOptions(
        listen=":0",
        web_config=str(shell.root / "web.yml"),
        without=tuple(SWITCHES),
        gpu_interval=2.0,
        job_interval=3.0,
        process_interval=4.0,
        node_interval=5.0,
        stuck_seconds=6.0,
        exit_seconds=7.0,
        cluster="c1",
        address_file=str(shell.root / "a"),
        roots=Roots(proc="/p", sys="/s"),
    )
    assert given == json.loads(options.to_json())


HASH = "$2y$10$" + "a" * 53
USERS = f"basic_auth_users: {{prometheus: '{HASH}'}}\n"
TLS = "tls_server_config: {cert_file: a.crt, key_file: a.key%s}\n"


@pytest.mark.parametrize(
    ("listen", "config", "warning"),
    [
        ("127.0.0.1:0", None, ""),
        ("[::1]:0", "", ""),
        ("0.0.0.0:0", None, "anyone who can reach 0.0.0.0:0 can read job metrics, unencry"),
        (":0", TLS % "", "anyone who can reach :0 can read job metrics, without a pass"),
        (":0", TLS % ", client_auth_type: RequestClientCert", "anyone who can reach"),
        (":0", USERS, "passwords for :0 are sent unencrypted"),
        (":0", USERS + TLS % "", ""),
        (":0", TLS % ", client_ca_file: ca, client_auth_type: RequireAndVerifyClientCert", ""),
    ],
)
def test_an_unprotected_address_is_warned_of(
    hpml: Hpml,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    config: str | None,
    warning: str,
) -> None:
    """The contents of the web-config file count, not that it exists; nothing is refused."""
    words: list[str] = []
    if config is not None:
        (shell.root / "web.yml").write_text(config)
        words = ["--web-config", str(shell.root / "web.yml")]
    err = handed_over(hpml, monkeypatch, "--no-gpu", "--listen", listen, *words)[1]
    assert err.startswith(f"hpml: warning: {warning}") if warning else err == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export node --listen 192.0.2.1:0", "--listen: Cannot assign requested address (got '19"),
        ("export node --exit-seconds 5", "--exit-seconds: must be more than the 10 s after"),
        ("export node --address-file /none/a", "--address-file: cannot be written (got '/none/a')"),
        ("export slurm --listen x", "--listen: not an address with a port (got 'x')"),
        ("export slurm --web-config /none", "--web-config: cannot be read: No such file"),
        ("export slurm --source sql", "--source: no such source (got 'sql')"),
        ("export slurm --interval 5", "--interval: must be 30 to 3600 seconds (got 5.0)"),
        ("export node --web-config web.yml", "/web.yml: line 2: not valid YAML: expected FIELD: "),
        ("targets --serve x", "--serve: not an address with a port (got 'x')"),
        ("targets --output /none/targets.json", "--output: cannot "),
    ],
    ids=range(10),
)
def test_messages_name_what_was_typed(
    hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    """The option, or the file and its line."""
    (shell.root / "web.yml").write_text("basic_auth_users:\n  bob: x: y\n")
    a_sinfo(shell, monkeypatch, "exit 0")
    assert hpml(*line.split()).refuses(2, message)


def a_sinfo(shell: Shell, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a script in the place of sinfo."""
    program = shell.root / "bin" / "sinfo"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setitem(shell.variables, "PATH", f"{program.parent}:{os.environ['PATH']}")


def test_targets_where_there_is_no_slurm(
    hpml: Hpml, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint names what helps here: a job's options and records do not."""
    a_sinfo(
        shell, monkeypatch, "echo 'sinfo: fatal: Could not establish a configuration' >&2; exit 1"
    )
    ended = hpml("targets")
    assert ended.refuses(5, "hint: run it where sinfo works")
    assert "--local" not in ended.err


def test_without_nvitop_gpus_are_left_out(hpml: Hpml, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what to install; with `--no-gpu` it is not needed."""
    monkeypatch.setitem(sys.modules, "nvitop", None)
    err = handed_over(hpml, monkeypatch)[1]
    assert "no GPU metrics: nvitop is not installed\nhint: install hpml with its extra: pip" in err
    assert handed_over(hpml, monkeypatch, "--no-gpu")[1] == ""


def test_a_node_is_exported(shell: Shell) -> None:
    """It serves in the same process that was started, and Ctrl-C ends it."""
    (shell.root / "queue.py").write_text("raise SystemExit('a file of the user was imported')")
    address = shell.root / "address"
    listen = ("--listen", "127.0.0.1:0", "--address-file", "address")
    with shell.start("export", "node", *listen, *NOTHING) as process:
        eventually(address.exists)
        url = f"http://{address.read_text().strip()}/metrics"
        with urllib.request.urlopen(url, timeout=120) as answer:
            assert b"process_cpu_seconds_total " in answer.read()
        assert b"hpml_exporters" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert err.endswith(f"Z INFO {url}\n")


def test_the_catalogue_is_printed(hpml: Hpml) -> None:
    """Every metric as a line, or as JSON with everything known about it."""
    lines = hpml("export", "metrics").out.splitlines()
    assert lines[0] == "METRIC\tTYPE\tLABELS\tMEANING"
    assert [line.split("\t")[0] for line in lines[1:]] == [metric.name for metric in ALL]
    rows = hpml("export", "metrics", "--json").json()
    assert len(rows) == len(ALL)
    assert set(rows[0]) == {"name", "type", "help", "labels", "unit", "source"}
