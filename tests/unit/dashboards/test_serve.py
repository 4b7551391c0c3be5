"""The viewer's server, over HTTP: who may see what, and which queries reach Prometheus."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpml_dashboards
import pytest
from hpml_dashboards.serve import (
    PrometheusServer,
    PrometheusServerError,
    ViewerServer,
)

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.text import read_credentials
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[3]
HPML = Path(sys.executable).with_name("hpml")
YEAR_SECONDS = 31_536_000


class FakePrometheus(ThreadingHTTPServer):
    """Answers every request alike and keeps it; for answers that a real one would not give."""

    def __init__(self, status: int = 200, body: bytes = b"", kind: str = "application/json"):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answer = (status, body or json.dumps(VECTOR).encode(), kind)
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: FakePrometheus

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        status, body, kind = self.server.answer
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


VECTOR = {"status": "success", "data": {"resultType": "vector", "result": [{}]}}


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Serve in a thread as long as the block lasts."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def source() -> Iterator[FakePrometheus]:
    """A Prometheus with one series."""
    with serving(FakePrometheus()) as server:
        yield server


@pytest.fixture
def viewer(source: FakePrometheus, tmp_path: Path) -> Iterator[ViewerServer]:
    """The server, with one dashboard."""
    dashboard = {"uid": "hpml-one", "title": "One", "tags": ["hpml"], "panels": []}
    (tmp_path / "hpml-one.json").write_text(json.dumps(dashboard))
    with serving(ViewerServer(PrometheusServer(source.url), dashboards=tmp_path)) as server:
        yield server


def ask(
    server: ViewerServer, path: str, *, method: str = "GET", cookie: bool = True, **headers: str
) -> tuple[int, str, Mapping[str, str]]:
    """Ask with the cookie of who opened the address; returns status, body and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    if cookie:
        headers["Cookie"] = f"{server.cookie}={server.token}"
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.headers)


def test_the_address_gives_a_cookie_and_forgets_the_token(viewer: ViewerServer) -> None:
    """The cookie is for this server alone; the page's new address has no token."""
    path = f"/d/hpml-one?token={viewer.token}&var-jobid=17"
    status, _, headers = ask(viewer, path, cookie=False)
    assert status == 200
    assert headers["Refresh"] == "0; url=/d/hpml-one?var-jobid=17"
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    status, page, headers = ask(viewer, "/d/hpml-one", cookie=False, Cookie=cookie.split(";")[0])
    assert status == 200
    assert "/viewer/viewer.js" in page
    assert "script-src 'self'" in headers["Content-Security-Policy"]


def test_a_token_never_leads_to_another_site(viewer: ViewerServer) -> None:
    """`//host/` would be the address of another site."""
    _, _, headers = ask(viewer, f"//evil.example/?token={viewer.token}", cookie=False)
    assert headers["Refresh"] == "0; url=/evil.example/"


@pytest.mark.parametrize(
    "path", ["/", "/d/hpml-one", "/viewer/viewer.js", "/api/v1/query?query=up"]
)
def test_who_has_no_token_sees_nothing(
    path: str, viewer: ViewerServer, source: FakePrometheus
) -> None:
    """Neither page nor data, with no cookie, a wrong one, or a wrong token."""
    separator = "&" if "?" in path else "?"
    for wrong in (path, f"{path}{separator}token=x"):
        status, body, _ = ask(viewer, wrong, cookie=False, Cookie=f"{viewer.cookie}=x")
        assert status == 403
        assert viewer.token not in body
    assert source.asked == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_403(viewer: ViewerServer) -> None:
    """A process with another uid, which can connect but has no token."""
    code = (
        "import os, urllib.request, urllib.error, encodings.idna\nos.setuid(65534)\n"
        f"try: urllib.request.urlopen('http://127.0.0.1:{viewer.server_port}/api/dashboards')\n"
        "except urllib.error.HTTPError as error: print(os.getuid(), error.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "65534 403\n"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_rebound_name_is_refused(host: str, viewer: ViewerServer) -> None:
    """A foreign page that resolves its own name to this machine sends that name as Host."""
    assert ask(viewer, "/api/dashboards", Host=host)[0] == 403
    assert ask(viewer, "/api/dashboards", Host="localhost:8080")[0] == 200  # a tunnel's port


@pytest.mark.parametrize(
    "path",
    [
        "/viewer/../serve.py",
        "/viewer/%2e%2e/serve.py",
        "/viewer//etc/passwd",
        "/api/dashboards/../../serve",
        "/api/v1/admin/tsdb/delete_series",
        "/api/v1/query/../admin",
        "/api/v1/label/../../x/values",
        "/api/v1/status/config",
        "/metrics",
    ],
)
def test_nothing_else_is_served(path: str, viewer: ViewerServer, source: FakePrometheus) -> None:
    """No other file, and no endpoint of Prometheus that is not for queries."""
    assert ask(viewer, path)[0] == 404
    assert source.asked == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(method: str, viewer: ViewerServer) -> None:
    """Every other method is refused."""
    assert ask(viewer, "/api/v1/query", method=method)[0] == 501


def test_it_lists_and_shows_dashboards(viewer: ViewerServer) -> None:
    """By uid."""
    listed = json.loads(ask(viewer, "/api/dashboards")[1])
    assert listed == [{"uid": "hpml-one", "title": "One", "tags": ["hpml"]}]
    assert json.loads(ask(viewer, "/api/dashboards/hpml-one")[1])["panels"] == []


def test_the_bundle_is_sent_packed_and_once(viewer: ViewerServer) -> None:
    """2.3 MB would take a second through a slow tunnel, at each look."""
    connection = http.client.HTTPConnection("127.0.0.1", viewer.server_port, timeout=30)
    headers = {"Cookie": f"{viewer.cookie}={viewer.token}", "Accept-Encoding": "gzip"}
    connection.request("GET", "/viewer/viewer.js", headers=headers)
    answer = connection.getresponse()
    packed = answer.read()
    assert gzip.decompress(packed).decode() == ask(viewer, "/viewer/viewer.js")[1]
    assert len(packed) < 1_000_000
    again = {**headers, "If-None-Match": str(answer.headers["ETag"])}
    connection.request("GET", "/viewer/viewer.js", headers=again)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (304, b"")
    connection.close()


@pytest.mark.parametrize(
    ("path", "passed"),
    [
        ("query?query=up&time=5&x=1", "query?query=up&time=5&timeout=30s"),
        (
            "query_range?query=up&start=0&end=60&step=15&timeout=9h",
            "query_range?query=up&start=0&end=60&step=15&timeout=30s",
        ),
        ("series?match[]=up&match[]=down", "series?match%5B%5D=up&match%5B%5D=down"),
        ("labels?start=0", "labels?start=0"),
        ("label/node/values?end=7", "label/node/values?end=7"),
    ],
)
def test_queries_are_passed_on(
    path: str, passed: str, viewer: ViewerServer, source: FakePrometheus
) -> None:
    """With the parameters that the endpoint has and a time limit, without the page's cookie."""
    status, body, _ = ask(viewer, f"/api/v1/{path}")
    assert (status, json.loads(body)) == (200, VECTOR)
    assert [address for address, _ in source.asked] == [f"/api/v1/{passed}"]
    assert "Cookie" not in source.asked[0][1]


@pytest.mark.parametrize(
    ("start", "end", "step", "message"),
    [
        ("0", str(YEAR_SECONDS), "1", "31,536,001 points per series, of at most 11,000"),
        ("0", "60", "0", "must be numbers"),
        ("60", "0", "1", "points per series"),
        ("a", "60", "1", "must be numbers"),
        ("0", "nan", "1", "points per series"),
    ],
)
def test_long_queries_are_refused(
    start: str, end: str, step: str, message: str, viewer: ViewerServer, source: FakePrometheus
) -> None:
    """A year in steps of a second never reaches Prometheus."""
    query = urllib.parse.urlencode({"query": "up", "start": start, "end": end, "step": step})
    status, body, _ = ask(viewer, f"/api/v1/query_range?{query}")
    assert status == 400
    assert message in json.loads(body)["error"]
    assert source.asked == []


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"secret", "asks for a password: use --prometheus-auth FILE"),
        (200, b"<html>", "is not a Prometheus (HTTP status 200)"),
        (404, b"[1]", "is not a Prometheus (HTTP status 404)"),
        (200, b" " * (32 * 1024 * 1024 + 1), "larger than 32 MiB"),
    ],
    ids=["password", "page", "json", "large"],
)
def test_what_prometheus_cannot_answer(
    status: int, body: bytes, message: str, viewer: ViewerServer, source: FakePrometheus
) -> None:
    """One message that names the remedy."""
    source.answer = (status, body, "text/html")
    got, text, _ = ask(viewer, "/api/v1/query?query=up")
    assert got == 502
    assert message in json.loads(text)["error"]


def test_a_refusal_of_prometheus_is_passed_on(viewer: ViewerServer, source: FakePrometheus) -> None:
    """Its own words and status."""
    refusal = {"status": "error", "errorType": "bad_data", "error": "parse error"}
    source.answer = (400, json.dumps(refusal).encode(), "application/json")
    status, body, _ = ask(viewer, "/api/v1/query?query=(")
    assert (status, json.loads(body)) == (400, refusal)


@pytest.mark.parametrize(
    ("text", "header"),
    [("ada:pass word\n", "Basic YWRhOnBhc3Mgd29yZA=="), ("token\n", "Bearer token")],
)
def test_credentials_come_from_a_file(
    text: str, header: str, tmp_path: Path, source: FakePrometheus
) -> None:
    """A user with a password, or a token."""
    file = tmp_path / "auth"
    file.write_text(text)
    file.chmod(0o600)
    assert PrometheusServer(source.url, read_credentials(str(file))).has_metrics()
    assert source.asked[0][1]["Authorization"] == header


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ada:secret", 0o640, "others can read it"),
        ("", 0o600, "is empty"),
        ("ada:secret\nbob:secret", 0o600, "must have one line"),
        (None, 0, "cannot be read"),
    ],
)
def test_unsafe_credentials_are_refused(
    text: str | None, mode: int, message: str, tmp_path: Path
) -> None:
    """And not shown."""
    file = tmp_path / "auth"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(InputError, match=message) as caught:
        read_credentials(str(file))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "file:///etc/passwd", "ftp://ada:secret@host"])
def test_wrong_addresses_are_refused(url: str) -> None:
    """Before anything is asked; a password in the address is not shown."""
    with pytest.raises(InputError, match="--prometheus") as caught:
        PrometheusServer(url)
    assert "secret" not in str(caught.value)


def test_prometheus_that_is_down() -> None:
    """The message names its address and the reason."""
    with FakePrometheus() as gone:
        url = gone.url
    with pytest.raises(
        PrometheusServerError, match=f"cannot reach Prometheus at {url}: Connection ref"
    ):
        PrometheusServer(url).has_metrics()


def show(*options: str) -> list[str | Path]:
    return [HPML, "dashboards", "show", "--no-open", *options]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prometheus", "http://127.0.0.1:1"], "cannot reach Prometheus at http://127.0.0.1:1"),
        (["--prometheus", "x"], "--prometheus: must be an http or https address"),
        (["--listen", "0.0.0.0:8080"], "--listen: must be a port"),
    ],
)
def test_show_says_what_is_wrong(options: list[str], message: str) -> None:
    """In one message at the start, without a traceback."""
    done = subprocess.run(show(*options), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_show_prints_the_address_and_ends_quietly(source: FakePrometheus, tmp_path: Path) -> None:
    """Ctrl-C is how one ends it; a Prometheus without metrics of hpml gets a hint."""
    source.answer = (200, json.dumps({**VECTOR, "data": {"result": []}}).encode(), "")
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            show("--prometheus", source.url), stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdout is not None
    address = urllib.parse.urlsplit(process.stdout.readline().strip())
    connection = http.client.HTTPConnection(address.netloc, timeout=30)
    connection.request("GET", f"/?{address.query}")
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(2)
    eventually(lambda: process.poll() is not None)
    process.stdout.close()
    assert process.returncode == 0
    assert "has no metrics of hpml yet" in errors.read_text()
    assert len(errors.read_text().splitlines()) == 2


def test_the_bundle_is_built_from_these_sources() -> None:
    """`make viewer` was run after the last change: SHA256SUMS has what it read and wrote."""
    built = Path(hpml_dashboards.__file__).parent / "viewer"
    sources = ROOT / "dashboards" / "viewer"
    listed = {}
    for line in (built / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        path = sources / name
        assert sha256(path.read_bytes()).hexdigest() == digest, f"{name}: run `make viewer`"
        listed[path.resolve()] = digest
    present = {*(sources / "src").iterdir(), *built.iterdir()} - {built / "SHA256SUMS"}
    assert present <= set(listed)
