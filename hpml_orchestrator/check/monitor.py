"""Whether a job's monitor will start, can be scraped by Prometheus, and is closed to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from site import ENABLE_USER_SITE, getusersitepackages
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.finding import CheckFinding, warning
from hpml_orchestrator.errors import extra_hint
from hpml_orchestrator.records.targets import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.records.job import Job, Monitor

_OPEN = "everybody who can reach the nodes"
_READ_SECONDS = 10.0


def check_monitor(
    job: Job, *, on_nodes: bool, installed: Callable[[str], bool] | None = None
) -> list[CheckFinding]:
    """Return warnings about a job's monitor; the job runs in any case.

    Args:
        job: a complete job.
        on_nodes: whether the job runs on other machines than this one.
        installed: whether the interpreter that runs hpml has a module; looked up when left out.
    """
    if not job.monitor.enabled:
        return []
    return [*_software(job, installed or _installed), *_listening(job.monitor, on_nodes)]


def _installed(name: str) -> bool:
    """Return whether an isolated interpreter, as the exporter's, has a module: without `--user`."""
    spec = find_spec(name)
    path = (spec.origin if spec else None) or ""
    return bool(path) and not (ENABLE_USER_SITE and path.startswith(getusersitepackages()))


def _warning(code: str, field: str, value: object, message: str, hint: str) -> CheckFinding:
    return warning(f"monitor.{code}", f"monitor.{field}", value, message, None, hint)


def _software(job: Job, installed: Callable[[str], bool]) -> Iterator[CheckFinding]:
    if not installed("hpml_exporters"):
        message = "hpml_exporters is not installed with hpml: the job will not be monitored"
        yield _warning("missing", "enabled", True, message, extra_hint("export"))
    elif job.resources.gpu_count:
        missing = [name for name in ("nvitop", "pynvml") if not installed(name)]
        if missing:
            message = f"{' and '.join(missing)} not installed: GPUs will not be monitored"
            yield _warning("no_gpus", "enabled", True, message, extra_hint("export"))


def _listening(monitor: Monitor, on_nodes: bool) -> Iterator[CheckFinding]:
    alone = is_loopback(monitor.listen.rpartition(":")[0].strip("[]"))
    if alone and on_nodes:
        message = "is reachable from the node itself only: Prometheus elsewhere cannot scrape it"
        hint = "`listen: 0.0.0.0:0` with a `web_config`; the summary in the record needs neither"
        yield _warning("alone", "listen", monitor.listen, message, hint)
    if monitor.web_config is not None:
        yield from _web_config(monitor.web_config, alone=alone)
    elif not alone:
        message = f"{_OPEN} can read the job's metrics"
        hint = "name a `web_config` with TLS and users, or a loopback address"
        yield _warning("open", "listen", monitor.listen, message, hint)


def _web_config(path: str, *, alone: bool) -> Iterator[CheckFinding]:
    """Yield the exporter's error about the file; nothing if it cannot be started."""
    if not os.access(path, os.R_OK):
        message = "is not readable by you: the job will not be monitored"
        yield _warning("web_config", "web_config", path, message, "create it, or name another")
        return
    answer = _read(path)
    if "error" in answer:
        message = f"{answer['error']}: the job will not be monitored"
        hint = answer.get("hint") or "`hpml export node --web-config FILE` reads the same format"
        yield _warning("web_config", "web_config", path, message, hint)
    elif alone or not answer:
        return
    elif not answer["locked"]:
        message = f"requires neither users nor verified client certificates: {_OPEN} can read all"
        hint = "`basic_auth_users`, or `client_auth_type: RequireAndVerifyClientCert` with TLS"
        yield _warning("open", "web_config", path, message, hint)
    elif not answer["tls"]:
        message = "has no TLS: passwords and metrics cross the network unencrypted"
        hint = "`tls_server_config` with `cert_file` and `key_file`, which the nodes can read"
        yield _warning("unencrypted", "web_config", path, message, hint)


def _read(path: str) -> dict[str, Any]:
    """Return what the exporter's reader makes of a file; empty if it cannot be started.

    It runs as a separate process, isolated as the job's exporter will be, because no room imports
    the exporters.
    """
    argv = [sys.executable, "-I", "-m", "hpml_exporters.web.config", path]
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_SECONDS, check=False
        )
        answer = json.loads(process.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
