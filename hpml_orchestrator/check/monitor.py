"""Look whether a job's monitor will start, be found, and be seen by those alone who should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from site import ENABLE_USER_SITE, getusersitepackages
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.finding import Finding
from hpml_orchestrator.check.records import one_machines, unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.spec import Job, Monitor

__all__ = ["check_monitor", "check_port"]

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_OPEN = "everybody who reaches the nodes"
_READ_SECONDS = 10.0
_FIRST_PORT = 1024
_INSTALL = "pip install 'hpml-orchestrator[export]' where hpml is installed"


def check_monitor(
    job: Job,
    *,
    on_nodes: bool,
    mounts: str = "/proc/mounts",
    installed: Callable[[str], bool] | None = None,
) -> list[Finding]:
    """Return what keeps a job from being monitored as it wants; the job runs all the same.

    Args:
        job: a complete job.
        on_nodes: whether the job runs on other machines than this one.
        mounts: the table of mounts, for tests.
        installed: whether the interpreter that runs hpml has a module; looked for when left out.
    """
    if not job.monitor.enabled:
        return []
    found = [*_software(job, installed or _installed), *_listening(job.monitor, on_nodes)]
    if job.monitor.targets is not None:  # else they lie beside the records, which are looked at
        found += _targets(job.monitor.targets, on_nodes, mounts)
    return found


def check_port(job: Job, *, whole: bool) -> list[Finding]:
    """Return a warning where another job of the same node may have the port that this one wants.

    Args:
        job: a complete job, as the scheduler will see it.
        whole: whether it gets its nodes for itself.
    """
    listen = job.monitor.listen
    if not job.monitor.enabled or whole or not int(listen.rpartition(":")[2]):
        return []
    message = (
        "one process of a node can have this port: beside another monitored job this one takes "
        "any free port"
    )
    hint = (
        f"`listen: {listen.rpartition(':')[0]}:0`: Prometheus learns each job's port from its "
        "target's file"
    )
    return [_warning("port", "listen", listen, message, hint)]


def _installed(name: str) -> bool:
    """Say whether an isolated interpreter has a module, as the exporter's is: without `--user`."""
    found = find_spec(name)
    where = (found.origin if found else None) or ""
    return bool(where) and not (ENABLE_USER_SITE and where.startswith(getusersitepackages()))


def _warning(code: str, field: str, value: object, message: str, hint: str) -> Finding:
    return Finding("warning", f"monitor.{code}", f"monitor.{field}", value, message, None, hint)


def _software(job: Job, installed: Callable[[str], bool]) -> Iterator[Finding]:
    if not installed("hpml_exporters"):
        message = "hpml_exporters is not installed beside hpml: the job will not be monitored"
        yield _warning("missing", "enabled", True, message, _INSTALL)
    elif job.resources.gpu_count:
        left = [name for name in ("nvitop", "pynvml") if not installed(name)]
        if left:
            message = f"{' and '.join(left)} not installed: nothing will be told of the GPUs"
            yield _warning("no_gpus", "enabled", True, message, _INSTALL)


def _listening(asked: Monitor, on_nodes: bool) -> Iterator[Finding]:
    alone = asked.listen.startswith(_LOOPBACK)
    if 0 < int(asked.listen.rpartition(":")[2]) < _FIRST_PORT and os.geteuid() != 0:
        message = f"ports below {_FIRST_PORT} are for root: the job will not be monitored"
        hint = f"a port of {_FIRST_PORT} or more, or 0 for any that is free"
        yield _warning("port", "listen", asked.listen, message, hint)
    if alone and on_nodes:
        message = "is reached from the node itself only: no Prometheus elsewhere will find it"
        hint = "`listen: 0.0.0.0:0` with a `web_config`; the summary in the record needs neither"
        yield _warning("alone", "listen", asked.listen, message, hint)
    if asked.web_config is not None:
        yield from _web_config(asked.web_config, alone=alone)
    elif not alone:
        message = f"{_OPEN} can read the job's metrics"
        hint = "name a `web_config` with TLS and users, or a loopback address"
        yield _warning("open", "listen", asked.listen, message, hint)


def _web_config(path: str, *, alone: bool) -> Iterator[Finding]:
    """Look into the file, as the exporter will; what its reader cannot say is not spoken of."""
    if not os.access(path, os.R_OK):
        message = "cannot be read by you: the job will not be monitored"
        yield _warning("web_config", "web_config", path, message, "write it, or name another")
        return
    said = _read(path)
    if "error" in said:
        message = f"{said['error']}: the job will not be monitored"
        hint = said.get("hint") or "`hpml export node --web-config FILE` reads the same format"
        yield _warning("web_config", "web_config", path, message, hint)
    elif alone or not said:
        return
    elif not said["locked"]:
        message = f"asks for neither users nor verified client certificates: {_OPEN} can read all"
        hint = "`basic_auth_users`, or `client_auth_type: RequireAndVerifyClientCert` with TLS"
        yield _warning("open", "web_config", path, message, hint)
    elif not said["tls"]:
        message = "brings no TLS: passwords and metrics cross the network unencrypted"
        hint = "`tls_server_config` with `cert_file` and `key_file`, which the nodes can read"
        yield _warning("unencrypted", "web_config", path, message, hint)


def _read(path: str) -> dict[str, Any]:
    """Return what the exporter's reader says of a file; nothing where there is none.

    It is a process, isolated as the job's exporter will be: no room imports the exporters.
    """
    command = [sys.executable, "-I", "-m", "hpml_exporters.locks", path]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_READ_SECONDS,
            check=False,
        )
        said = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _targets(directory: str, on_nodes: bool, mounts: str) -> Iterator[Finding]:
    hint = "name a directory that you can write, that the nodes see and Prometheus reads"
    place = unwritable(Path(directory))
    if place:
        message = f"{place} cannot be written by you: Prometheus will not find the job"
        yield _warning("targets", "targets", directory, message, hint)
    elsewhere = one_machines(Path(directory), mounts) if on_nodes else ""
    if elsewhere:
        message = f"is on this machine alone ({elsewhere}): the nodes do not see it"
        yield _warning("targets_local", "targets", directory, message, hint)
