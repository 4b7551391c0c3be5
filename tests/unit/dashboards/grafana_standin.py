"""A stand-in for Grafana's HTTP API, because no Grafana server can be installed here.

It is not Grafana: it supports only the calls that `hpml dashboards push` makes, as Grafana's
documentation of versions 10 to 12 describes them, and refuses what that refuses (401, 403, 404,
409, 412). `fail` makes single calls answer otherwise.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

TOKEN = "glsa_right"  # noqa: S105 - of the stand-in below


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Grafana:
    """What a Grafana keeps, and the requests that it got."""

    def __init__(self) -> None:
        self.url = ""
        self.folders: list[Json] = []
        self.sources: list[Json] = []
        self.dashboards: dict[str, list[Json]] = {}  # all versions of each, the oldest first
        self.groups: dict[tuple[str, str], Json] = {}
        self.writes: list[str] = []
        self.fail: dict[str, tuple[int, str]] = {}  # regular expression -> status and message
        self.hang_seconds = 0.0

    def save_as_person(self, uid: str, change: Json) -> None:
        last = self.dashboards[uid][-1]
        changed = {**last["dashboard"], **change, "version": last["dashboard"]["version"] + 1}
        self.dashboards[uid].append({**last, "dashboard": changed, "message": "wider"})

    def answer(self, method: str, path: str, body: Any) -> Any:
        if method != "GET":
            self.writes.append(f"{method} {path}")
        for pattern, (status, message) in self.fail.items():
            if re.search(pattern, f"{method} {path}"):
                raise Refusal(status, message)
        for pattern, call in (
            (r"GET /health", lambda: {"database": "ok", "version": "12.4.0"}),
            (r"GET /folders", lambda: self.folders),
            (r"POST /folders", lambda: self._folder(body)),
            (r"GET /datasources", lambda: self.sources),
            (r"GET /datasources/uid/(.+)", self._source),
            (r"POST /datasources", lambda: self._new_source(body)),
            (r"PUT /datasources/uid/(.+)", lambda uid: self._source(uid).update(body) or {}),
            (r"GET /dashboards/uid/([^/]+)", self._dashboard),
            (r"GET /dashboards/uid/([^/]+)/versions", self._versions),
            (r"POST /dashboards/db", lambda: self._save(body)),
            (r"GET /v1/provisioning/folder/(.+)/rule-groups/(.+)", self._group),
            (
                r"PUT /v1/provisioning/folder/(.+)/rule-groups/(.+)",
                lambda folder, group: self._put_group(folder, group, body),
            ),
        ):
            if match := re.fullmatch(pattern, f"{method} {path}"):
                return call(*match.groups())
        raise Refusal(404, f"Not found: {method} {path}")

    def _folder(self, body: Json) -> Json:
        if any(folder["uid"] == body["uid"] for folder in self.folders):
            raise Refusal(412, "a folder with the same uid already exists")
        if any(folder["title"] == body["title"] for folder in self.folders):
            raise Refusal(409, "a folder with the same name already exists in the current location")
        self.folders.append({"uid": body["uid"], "title": body["title"], "id": len(self.folders)})
        return self.folders[-1]

    def _source(self, uid: str) -> Json:
        for source in self.sources:
            if source["uid"] == uid:
                return source
        raise Refusal(404, "Data source not found")

    def _new_source(self, body: Json) -> Json:
        if any(source["name"] == body["name"] for source in self.sources):
            raise Refusal(409, "data source with the same name already exists")
        self.sources.append({"id": len(self.sources) + 1, "version": 1, **body})
        return self.sources[-1]

    def _dashboard(self, uid: str) -> Json:
        if uid not in self.dashboards:
            raise Refusal(404, "Dashboard not found")
        last = self.dashboards[uid][-1]
        return {
            "meta": {"folderUid": last["folderUid"], "provisioned": last.get("provisioned", False)},
            "dashboard": last["dashboard"],
        }

    def _versions(self, uid: str) -> Json:
        saved = self.dashboards[uid]
        rows = [{"version": n, "message": one["message"]} for n, one in enumerate(saved, 1)]
        return {"continueToken": "", "versions": rows[::-1]}

    def _save(self, body: Json) -> Json:
        dashboard, folder = body["dashboard"], body["folderUid"]
        if folder not in {one["uid"] for one in self.folders}:
            raise Refusal(400, "folder not found")
        saved = self.dashboards.setdefault(dashboard["uid"], [])
        version = saved[-1]["dashboard"]["version"] if saved else 0
        if not body["overwrite"] and dashboard["version"] != version:
            raise Refusal(412, "The dashboard has been changed by someone else")
        kept = {**dashboard, "id": len(self.dashboards), "version": version + 1}
        saved.append({"dashboard": kept, "folderUid": folder, "message": body["message"]})
        return {"status": "success", "uid": dashboard["uid"], "version": version + 1}

    def _group(self, folder: str, group: str) -> Json:
        if (folder, group) not in self.groups:
            raise Refusal(404, "rule group does not exist")
        return self.groups[folder, group]

    def _put_group(self, folder: str, group: str, body: Json) -> Json:
        taken = {
            rule["title"]
            for (other, name), kept in self.groups.items()
            if other == folder and name != group
            for rule in kept["rules"]
        }
        known = {"__expr__"} | {source["uid"] for source in self.sources}
        for rule in body["rules"]:
            if rule["title"] in taken or len(rule["uid"]) > 40:
                raise Refusal(400, f"invalid alert rule {rule['title']}")
            if unknown := {query["datasourceUid"] for query in rule["data"]} - known:
                raise Refusal(400, f"data source not found: {unknown}")
        rules = [{**rule, "id": n, "provenance": "api"} for n, rule in enumerate(body["rules"])]
        self.groups[folder, group] = {**body, "rules": rules}
        return self.groups[folder, group]


@contextmanager
def serving(grafana: Grafana) -> Iterator[Grafana]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            time.sleep(grafana.hang_seconds)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            path = self.path.removeprefix("/grafana/api").partition("?")[0]
            try:
                if path != "/health" and self.headers["Authorization"] != f"Bearer {TOKEN}":
                    raise Refusal(401, "Invalid API key")
                status, reply = 200, grafana.answer(self.command, path, body)
            except Refusal as refusal:
                status, reply = refusal.status, {"message": str(refusal)}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client gave up
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    grafana.url = f"http://127.0.0.1:{server.server_port}/grafana"
    try:
        yield grafana
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
