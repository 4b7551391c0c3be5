"""The viewer's web server: the page, the dashboards, and the query endpoints of one Prometheus.

Only a browser with the token from the address gets an answer. The server listens on this machine
only, answers GET only, and forwards only queries with a bounded number of points.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import hmac
import http.client
import json
import secrets
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpml_dashboards import JSON
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.text import LOCAL_NAMES, opener_for, split_login

DEFAULT_URL = "http://127.0.0.1:9090"
VIEWER = Path(__file__).parent / "viewer"

_MAX_POINTS = 11_000  # of a series; Prometheus' own limit
_MAX_BYTES = 32 * 1024 * 1024
_QUERY_SECONDS = 30
_FIRST_SECONDS = 5
_CLIENT_SECONDS = 60
_PARAMETERS = {
    "query": ("query", "time"),
    "query_range": ("query", "start", "end", "step"),
    "series": ("match[]", "start", "end"),
    "labels": ("match[]", "start", "end"),
    "values": ("match[]", "start", "end"),
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PrometheusServerError(Exception):
    """Prometheus gave no usable answer; the message names the remedy."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_GATEWAY) -> None:
        super().__init__(message)
        self.status = status


class PrometheusServer:
    """The query endpoints of a Prometheus.

    Args:
        url: its address, with a path if it has one.
        authorization: the header that it wants, from `jobfile.address.read_credentials`.

    Raises:
        InputError: it is not an HTTP address.
    """

    def __init__(self, url: str, authorization: str = "") -> None:
        self.url, login = split_login(url, field="--prometheus")
        self._authorization = authorization or login
        self._opener = opener_for(self.url)

    def has_metrics(self) -> bool:
        """Return whether it scrapes an exporter of hpml.

        Raises:
            PrometheusServerError: it does not answer, or is not a Prometheus.
        """
        query = {"query": "count(hpml_exporter_up)"}
        status, body = self.get("query", query, seconds=_FIRST_SECONDS)
        if status != HTTPStatus.OK:
            raise PrometheusServerError(f"{self.url}: {json.loads(body).get('error', status)}")
        return bool(json.loads(body)["data"]["result"])

    def get(
        self,
        endpoint: str,
        parameters: Mapping[str, str | list[str]],
        *,
        seconds: float = _QUERY_SECONDS,
    ) -> tuple[int, bytes]:
        """Return status and JSON of `/api/v1/<endpoint>`, also if Prometheus refuses the query.

        Raises:
            PrometheusServerError: it does not answer in time, or is not a Prometheus.
        """
        query = urllib.parse.urlencode(parameters, doseq=True)
        request = urllib.request.Request(f"{self.url}/api/v1/{endpoint}?{query}")  # noqa: S310 - http or https, see __init__
        if self._authorization:
            # Do not send it again after a redirect, which may lead to another host.
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                return self._checked(answer.status, answer)
        except urllib.error.HTTPError as error:
            with error:
                return self._checked(error.code, error)
        except TimeoutError:
            message = f"Prometheus at {self.url} did not answer within {seconds:.0f} s"
            raise PrometheusServerError(message, HTTPStatus.GATEWAY_TIMEOUT) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"no answer within {seconds:.0f} s"
            why = getattr(reason, "strerror", None) or reason
            raise PrometheusServerError(f"cannot reach Prometheus at {self.url}: {why}") from None

    def _checked(
        self, status: int, answer: http.client.HTTPResponse | urllib.error.HTTPError
    ) -> tuple[int, bytes]:
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            what = "refuses these credentials" if self._authorization else "asks for a password"
            message = f"Prometheus at {self.url} {what}: use --prometheus-auth FILE"
            raise PrometheusServerError(message)
        body: bytes = answer.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise PrometheusServerError(
                f"the answer is larger than {_MAX_BYTES >> 20} MiB: query less"
            )
        try:
            is_prometheus = "status" in json.loads(body)
        except (ValueError, TypeError):
            is_prometheus = False
        if not is_prometheus:
            raise PrometheusServerError(f"{self.url} is not a Prometheus (HTTP status {status})")
        return status, body


def _check_points(parameters: Mapping[str, list[str]]) -> None:
    try:
        start, end, step = (float(parameters[name][0]) for name in ("start", "end", "step"))
        points = (end - start) / step + 1
    except (KeyError, ValueError, ZeroDivisionError):
        message = "start, end and step must be numbers of seconds"
        raise PrometheusServerError(message, HTTPStatus.BAD_REQUEST) from None
    if not 0 < points <= _MAX_POINTS:
        message = (
            f"{points:,.0f} points per series, of at most {_MAX_POINTS:,}: "
            "choose a shorter time range or a longer step"
        )
        raise PrometheusServerError(message, HTTPStatus.BAD_REQUEST)


# The viewer's bundle is 2.3 MB: uncompressed it takes a second through a slow tunnel.
@functools.lru_cache(maxsize=16)
def _packed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: ViewerServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hpml", ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answer by path; without token or cookie a client learns nothing."""
        url = urllib.parse.urlsplit(self.path)
        parameters = urllib.parse.parse_qs(url.query)
        if urllib.parse.urlsplit(f"//{self.headers['Host']}").hostname not in LOCAL_NAMES:
            # DNS rebinding: a foreign page may resolve its own name to this machine, and would then
            # count as the same origin. Its name is in the header all the same.
            self._refuse(HTTPStatus.FORBIDDEN, "this address is for 127.0.0.1 and localhost only")
        elif self._is_token(parameters.pop("token", [""])[0]):
            self._welcome(url.path, urllib.parse.urlencode(parameters, doseq=True))
        elif not self._has_cookie():
            message = "open the address that `hpml dashboards show` printed"
            self._refuse(HTTPStatus.FORBIDDEN, message)
        elif url.path.startswith("/api/v1/"):
            self._query(url.path.removeprefix("/api/v1/"), parameters)
        elif content := self.server.content(url.path):
            self._send_file(*content)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"no such page: {url.path.removeprefix('/api')}")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _has_cookie(self) -> bool:
        try:
            morsel = SimpleCookie(self.headers["Cookie"] or "").get(self.server.cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_token(morsel.value)

    def _welcome(self, path: str, query: str) -> None:
        """Move the token from the address into a cookie.

        Use `Refresh`: a redirect would count as a navigation from the page with the link, and the
        browser would not send a cookie with `SameSite=Strict`.
        """
        cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        # Exactly one slash: `//host/` would be the address of another site.
        location = f"/{path.lstrip('/')}" + (f"?{query}" if query else "")
        more = {"Set-Cookie": cookie, "Refresh": f"0; url={location}"}
        self._send(HTTPStatus.OK, b'<link rel="icon" href="data:,">', "text/html", more)

    def _query(self, endpoint: str, parameters: Mapping[str, list[str]]) -> None:
        label = endpoint.removeprefix("label/").removesuffix("/values")
        is_label = endpoint == f"label/{label}/values" and "/" not in label
        known = _PARAMETERS.get("values" if is_label else endpoint)
        if known is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"not an endpoint for queries: {endpoint}")
            return
        passed = {name: parameters[name] for name in known if name in parameters}
        try:
            if endpoint == "query_range":
                _check_points(passed)
            if endpoint.startswith("query"):
                # Prometheus then drops a query whose client has gone.
                passed["timeout"] = [f"{_QUERY_SECONDS}s"]
            status, body = self.server.prometheus.get(endpoint, passed)
            self._send(status, body, "application/json")
        except PrometheusServerError as error:
            self._refuse(error.status, str(error))

    def _send_file(self, body: bytes, kind: str) -> None:
        """Send a file, compressed, unless the browser has this version."""
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        more = {"Cache-Control": "private, no-cache", "ETag": tag}
        if self.headers["If-None-Match"] == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", kind, more)
        elif "gzip" in (self.headers["Accept-Encoding"] or ""):
            self._send(HTTPStatus.OK, _packed(body), kind, {**more, "Content-Encoding": "gzip"})
        else:
            self._send(HTTPStatus.OK, body, kind, more)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"status": "error", "error": message}).encode()
        self._send(status, body, "application/json")

    def _send(
        self, status: int, body: bytes, kind: str, more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
        """Print nothing: addresses contain the token."""


class ViewerServer(ThreadingHTTPServer):
    """Shows dashboards with the data of a Prometheus, at `address`.

    Args:
        prometheus: answers the queries.
        port: of 127.0.0.1; 0 for a free one.
        dashboards: directory of their JSON files.

    Raises:
        InputError: the port is in use or not permitted.
    """

    daemon_threads = True

    def __init__(
        self, prometheus: PrometheusServer, port: int = 0, dashboards: Path = JSON
    ) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(f"{error.strerror}", field="--listen", value=port) from None
        self.prometheus = prometheus
        self.token = secrets.token_urlsafe(24)
        # Browsers keep cookies by host, not by port: two viewers need two names.
        self.cookie = f"hpml-{self.server_port}"
        self._files = {f"/viewer/{path.name}": path for path in VIEWER.iterdir()}
        self._dashboards = {
            path.stem: path.read_bytes() for path in sorted(dashboards.glob("*.json"))
        }

    def handle_error(self, request: Any, client_address: object) -> None:
        """Report errors, except a browser's closed connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The viewer's address, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def content(self, path: str) -> tuple[bytes, str] | None:
        """Return body and content type of a path; None if there is nothing."""
        if path == "/" or path.startswith("/d/"):
            path = "/viewer/index.html"
        if path == "/api/dashboards":
            models = [json.loads(text) for text in self._dashboards.values()]
            listed = [{key: model.get(key) for key in ("uid", "title", "tags")} for model in models]
            return json.dumps(listed).encode(), "application/json"
        if dashboard := self._dashboards.get(path.removeprefix("/api/dashboards/")):
            return dashboard, "application/json"
        file = self._files.get(path)
        return (file.read_bytes(), _TYPES.get(file.suffix, "text/plain")) if file else None
