"""The node exporters of a cluster as Prometheus' file_sd and http_sd want them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from threading import Lock

from hpml_exporters.slurm.commands import Commands
from hpml_exporters.slurm.view import ClusterNode
from hpml_orchestrator.errors import SchedulerUnavailable

_CACHE_SECONDS = 60.0
_CLIENT_SECONDS = 10.0
_AWAY = frozenset({"down", "drained", "powered_down"})


def targets(nodes: Iterable[ClusterNode], port: int, *, only_up: bool = False) -> str:
    """Return JSON with a target per node and its labels.

    Args:
        nodes: of the cluster.
        port: of the node exporters.
        only_up: leave out nodes that are down, drained or powered down.
    """
    groups = [
        {
            "targets": [f"{node.address or node.name}:{port}"],
            "labels": {
                "node": node.name,
                "__meta_slurm_state": node.state,
                "__meta_slurm_partitions": f",{','.join(node.partitions)},",
                "__meta_slurm_gpu_types": f",{','.join(sorted(filter(None, node.gpus)))},",
                "__meta_slurm_gpus": str(sum(node.gpus.values())),
            },
        }
        for node in nodes
        if not (only_up and node.state in _AWAY)
    ]
    return json.dumps(groups, indent=1) + "\n"


class TargetServer(ThreadingHTTPServer):
    """Answers /targets for http_sd; Slurm is asked at most once a minute."""

    daemon_threads = True

    def __init__(self, listener: socket, source: Commands, port: int, *, only_up: bool) -> None:
        """Serve on a socket that listens; see `targets` for the other arguments."""
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self._source, self._port, self._only_up = source, port, only_up
        self._lock = Lock()
        self._body = b""
        self._due = 0.0

    def body(self) -> bytes:
        """Return the list of targets; the previous one while Slurm does not answer.

        Raises:
            SchedulerUnavailable: Slurm gave none yet.
        """
        with self._lock:
            # Asked under the lock: however many clients come at once, Slurm gets one request.
            if time.monotonic() >= self._due:
                try:
                    text = targets(self._source.nodes(), self._port, only_up=self._only_up)
                    self._body = text.encode("utf-8", "replace")
                except SchedulerUnavailable:
                    if not self._body:
                        raise
                # After a failure too: a controller in trouble is not asked more often.
                self._due = time.monotonic() + _CACHE_SECONDS
            return self._body


class _Handler(BaseHTTPRequestHandler):
    server: TargetServer
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/targets":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = self.server.body()
        except SchedulerUnavailable as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as http.server's
        pass
