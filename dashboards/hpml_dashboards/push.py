"""Push the dashboards and alert rules to a Grafana through its HTTP API.

A push can be repeated: it leaves unchanged objects alone, and objects that a person changed in
Grafana. A dashboard's history shows who made a version: each version has a message, and ours
contains a digest of the pushed dashboard.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import niquests
from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaException
from ruamel.yaml import YAML

from hpml_dashboards import JSON
from hpml_orchestrator import assets
from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.jobfile.text import read_secret, split_login, web_address

Json = dict[str, Any]
_T = TypeVar("_T")

_MESSAGE = "hpml dashboards push "
_FOLDER = "hpml"
_DATASOURCE = "hpml-prometheus"
_TIMEOUT_SECONDS = 15.0
_EVALUATION_SECONDS = 60
_UID_LENGTH = 40  # Grafana's limit
_NO_SUCH = 404
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_PRECONDITION_FAILED = 412
_HINTS = {
    _UNAUTHORIZED: "is the token right, and not expired?",
    _FORBIDDEN: "give the service account the role Editor, or Admin with --prometheus",
    _NO_SUCH: "is a part of the path missing, as in https://example.org/grafana?",
}


@dataclass(frozen=True)
class Push:
    """What to push where.

    Attributes:
        url: Grafana's address, with its path if it has one.
        token: of a service account that may edit folders, data sources and alert rules.
        folder: title of the folder, created if necessary.
        prometheus: address at which Grafana reaches Prometheus; the push creates a data source.
        datasource: uid of the data source of alert rules; empty for that of `prometheus`, else for
            the only or default one.
        alerts: whether to push alert rules too.
        overwrite: whether to replace objects that a person changed.
        dry_run: whether to only report the changes.
    """

    url: str
    token: str
    folder: str = "hpml"
    prometheus: str = ""
    datasource: str = ""
    alerts: bool = True
    overwrite: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class PushOutcome:
    """The result for one object: created, updated, unchanged, kept (a person's) or failed."""

    action: str
    kind: str
    name: str
    reason: str = ""
    diff: str = ""


def read_token(path: str) -> str:
    """Return the token in a file; without a path, the one in $GRAFANA_TOKEN.

    Raises:
        InputError: there is none, or others may read the file.
    """
    if not path:
        if token := os.environ.get("GRAFANA_TOKEN", "").strip():
            return token
        raise InputError(
            "no token for Grafana",
            field="--token-file",
            hint="put a service account's token into a file of mode 600 or into $GRAFANA_TOKEN",
        )
    return read_secret(path, "--token-file")


def push(options: Push) -> Iterator[PushOutcome]:
    """Push everything, and yield each object's result as soon as it is known.

    A failure does not stop the other objects, except a failure of the folder.

    Raises:
        InputError: the address is not valid.
        HpmlError: Grafana is not at this address, or it refuses the token or the folder.
    """
    grafana = _Grafana(options)
    if options.prometheus:
        split_login(options.prometheus, field="--prometheus")
    grafana.check()
    yield grafana.folder()
    if options.prometheus:
        yield grafana.datasource()
    for path in sorted(JSON.glob("*.json")):
        dashboard = json.loads(path.read_text("utf-8"))
        yield grafana.dashboard(dashboard)
    if options.alerts:
        yield from grafana.alerts()


def alert_groups(folder: str, datasource: str) -> Iterator[Json]:
    """Yield Prometheus' alert rules as groups of rules that Grafana evaluates itself.

    Args:
        folder: uid of their folder.
        datasource: uid of the Prometheus that they query.
    """
    for path in sorted(assets.path("deploy/prometheus/rules").glob("*.yml")):
        for group in YAML(typ="safe").load(path)["groups"]:
            if rules := [rule for rule in group["rules"] if "alert" in rule]:
                name = group["name"]
                yield {
                    "title": name,
                    "folderUid": folder,
                    "interval": _EVALUATION_SECONDS,
                    "rules": [_alert_rule(rule, name, folder, datasource) for rule in rules],
                }


def _alert_rule(rule: Json, group: str, folder: str, datasource: str) -> Json:
    query = {"refId": "A", "expr": rule["expr"].strip(), "instant": True, "range": False}
    # Prometheus fires for each series that the expression returns, whatever its value.
    any_value = {"evaluator": {"type": "gt", "params": [-1e308]}}
    threshold = {"refId": "C", "type": "threshold", "expression": "A", "conditions": [any_value]}
    annotations = rule.get("annotations", {})
    return {
        "uid": f"hpml-{rule['alert']}"[:_UID_LENGTH],
        "title": rule["alert"],
        "ruleGroup": group,
        "folderUID": folder,
        "condition": "C",
        "data": [
            {
                "refId": ref,
                "datasourceUid": uid,
                "relativeTimeRange": {"from": 600, "to": 0},
                "model": model,
            }
            for ref, uid, model in (("A", datasource, query), ("C", "__expr__", threshold))
        ],
        # A rule without series is not firing; by default Grafana would alert.
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "labels": rule.get("labels", {}),
        "annotations": {
            name: text.replace("$value", "$values.A.Value") for name, text in annotations.items()
        },
    }


class _Grafana:
    """A Grafana, and the objects to push to it."""

    def __init__(self, options: Push) -> None:
        parts = web_address(options.url)
        if parts is None or "@" in parts.netloc:
            raise InputError(
                "not the address of a Grafana",
                field="--url",
                value=None if "@" in options.url else options.url,
                hint="write it like https://grafana.example.org; the token does not belong in it",
            )
        self._options = options
        path = parts.path.rstrip("/")
        url = f"{parts.scheme}://{parts.netloc}{path}{'/' if path else ''}"
        self._url = url
        self._api = GrafanaApi.from_url(url, credential=options.token, timeout=_TIMEOUT_SECONDS)
        self._folder = _FOLDER
        self._there = False  # whether the folder is
        self._asked = options.datasource or (_DATASOURCE if options.prometheus else "")

    def check(self) -> None:
        """Raise an error if no Grafana answers, or if it refuses the token."""
        # /health answers without a token, so only the second request shows whether ours is
        # accepted.
        health = self._ask(self._api.client.GET, "/health")
        if not isinstance(health, dict) or "database" not in health:
            raise HpmlError(f"{self._url} is not Grafana: /api/health gave {str(health)[:60]!r}")
        self._ask(self._api.client.GET, "/folders?limit=1")

    def folder(self) -> PushOutcome:
        """Find the folder by its title, or create it."""
        title = self._options.folder
        folders = self._ask(self._api.client.GET, "/folders?limit=1000")
        for folder in sorted(folders, key=lambda folder: folder["uid"] != _FOLDER):
            if folder["title"] == title:
                self._folder, self._there = folder["uid"], True
                return PushOutcome("unchanged", "folder", title)
        # The usual uid belongs to a folder with another title: leave that one alone.
        if any(folder["uid"] == _FOLDER for folder in folders):
            self._folder = f"hpml-{hashlib.sha256(title.encode()).hexdigest()[:12]}"
        if not self._options.dry_run:
            self._ask(self._api.folder.create_folder, title, self._folder)
            self._there = True
        return PushOutcome("created", "folder", title)

    def datasource(self) -> PushOutcome:
        """Create or update the data source of the given Prometheus."""
        wanted: Json = {
            "uid": _DATASOURCE,
            "name": "hpml Prometheus",
            "type": "prometheus",
            "access": "proxy",
            "url": self._options.prometheus,
            "jsonData": {"httpMethod": "POST", "timeInterval": "10s"},
        }

        def work() -> PushOutcome:
            current = self._find(self._api.datasource.get_datasource_by_uid, _DATASOURCE)
            theirs = (
                f"its address is {current['url']}"
                if current and current.get("url") != wanted["url"]
                else ""
            )

            def save() -> None:
                if current is None:
                    self._api.datasource.create_datasource(wanted)
                else:
                    merged = {**current, **wanted}
                    self._api.datasource.update_datasource_by_uid(_DATASOURCE, merged)

            return self._put("data source", wanted["name"], current, wanted, theirs, save)

        return _attempt("data source", wanted["name"], work)

    def dashboard(self, wanted: Json) -> PushOutcome:
        """Save one dashboard, unless a person saved its last version."""
        uid, title = wanted["uid"], wanted["title"]
        message = _MESSAGE + hashlib.sha256(_text(wanted).encode()).hexdigest()[:16]

        def work() -> PushOutcome:
            found = self._find(self._api.dashboard.get_dashboard, uid)
            current = found and found["dashboard"]
            last = self._last_message(uid) if found else ""
            # Compare digests: Grafana has added fields to the saved dashboard.
            if last == message:
                return PushOutcome("unchanged", "dashboard", title)
            if found and found["meta"].get("provisioned"):
                raise HpmlError("it is provisioned from files, so only these can change it")
            theirs = "" if last.startswith(_MESSAGE) else "a person changed it in Grafana"

            def save() -> None:
                version = found["dashboard"]["version"] if found else 0
                self._api.dashboard.update_dashboard(
                    {
                        "dashboard": {**wanted, "id": None, "version": version},
                        # A dashboard that a person has moved stays where it is.
                        "folderUid": found["meta"]["folderUid"] if found else self._folder,
                        "message": message,
                        # With the version above, Grafana refuses if somebody has saved since it was
                        # read.
                        "overwrite": False,
                    }
                )

            return self._put("dashboard", title, current, wanted, theirs, save)

        return _attempt("dashboard", title, work)

    def alerts(self) -> Iterator[PushOutcome]:
        """Save the groups of alert rules; Grafana itself keeps people from changing them there."""
        try:
            datasource = self._asked or self._prometheus()
        except (HpmlError, GrafanaException) as error:
            yield PushOutcome("failed", "alert rules", "all", str(error))
            return
        for group in alert_groups(self._folder, datasource):
            yield _attempt("alert rules", group["title"], partial(self._group, group))

    def _group(self, wanted: Json) -> PushOutcome:
        provisioning = self._api.alertingprovisioning
        name = wanted["title"]
        get = provisioning.get_rule_group
        current = self._find(get, self._folder, name) if self._there else None
        # Rules pushed through the API carry that provenance, and Grafana's editor locks them. Any
        # other rule was made by a person.
        rules = current["rules"] if current else []
        theirs = (
            "" if all(rule.get("provenance") == "api" for rule in rules) else "a person made it"
        )
        return self._put(
            "alert rules",
            name,
            current,
            wanted,
            theirs,
            lambda: provisioning.update_rule_group(self._folder, name, wanted),
        )

    def _put(
        self,
        kind: str,
        name: str,
        current: Json | None,
        wanted: Json,
        theirs: str,
        save: Callable[[], object],
    ) -> PushOutcome:
        if current is not None and _of_interest(current, wanted) == wanted:
            return PushOutcome("unchanged", kind, name)
        diff = _diff(current, wanted, name)
        if current is not None and theirs and not self._options.overwrite:
            return PushOutcome("kept", kind, name, theirs, diff)
        if not self._options.dry_run:
            save()
        return PushOutcome("created" if current is None else "updated", kind, name, diff=diff)

    def _last_message(self, uid: str) -> str:
        answer = self._api.client.GET(f"/dashboards/uid/{uid}/versions?limit=1")
        versions = answer["versions"] if isinstance(answer, dict) else answer  # before Grafana 11.5
        return str(versions[0].get("message", "")) if versions else ""

    def _prometheus(self) -> str:
        """Return the uid of the data source to use if none was given."""
        sources = self._api.datasource.list_datasources()
        sources = [source for source in sources if source["type"] == "prometheus"]
        default = [source for source in sources if source.get("isDefault")]
        if len(sources) == 1 or default:
            return str((default or sources)[0]["uid"])
        raise HpmlError(
            f"Grafana has {len(sources) or 'no'} data sources for Prometheus"
            f"{' and none is the default' if sources else ''}: use --datasource or --prometheus"
        )

    def _find(self, call: Callable[..., object], *arguments: str) -> Json | None:
        try:
            found = call(*arguments)
        except GrafanaException as error:
            if error.status_code == _NO_SUCH:
                return None
            raise
        return found if isinstance(found, dict) else None

    def _ask(self, call: Callable[..., _T], *arguments: str) -> _T:
        try:
            return call(*arguments)
        except GrafanaException as error:
            raise HpmlError(
                f"{self._url}: {_reason(error)}", hint=_HINTS.get(error.status_code, "")
            ) from error
        except (niquests.RequestException, ValueError) as error:
            raise HpmlError(
                f"{self._url} does not answer as a Grafana: {_reason(error)}"
            ) from error


def _attempt(kind: str, name: str, work: Callable[[], PushOutcome]) -> PushOutcome:
    try:
        return work()
    except (GrafanaException, HpmlError, niquests.RequestException, ValueError) as error:
        hint = _HINTS[_FORBIDDEN] if getattr(error, "status_code", 0) == _FORBIDDEN else ""
        return PushOutcome("failed", kind, name, ": ".join(filter(None, (_reason(error), hint))))


def _reason(error: BaseException) -> str:
    if isinstance(error, GrafanaException):
        if error.status_code == _PRECONDITION_FAILED:
            return "it was changed in Grafana at this moment; push again"
        return str(error) if "<" not in str(error) else f"HTTP {error.status_code}"
    if isinstance(error, HpmlError):
        return str(error)
    if isinstance(error, niquests.Timeout):
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "no such host"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return "it speaks no HTTP" if isinstance(error, niquests.RequestException) else "no JSON"


def _of_interest(current: object, wanted: object) -> object:
    if isinstance(current, dict) and isinstance(wanted, dict):
        # Grafana adds fields: compare only those that we set.
        shared = current.keys() & wanted.keys()
        return {key: _of_interest(current[key], wanted[key]) for key in shared}
    if isinstance(current, list) and isinstance(wanted, list) and len(current) == len(wanted):
        return list(map(_of_interest, current, wanted))
    return current


def _text(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _diff(current: Json | None, wanted: Json, name: str) -> str:
    if current is None:
        return ""
    lines = (_text(_of_interest(current, wanted)).splitlines(), _text(wanted).splitlines())
    names = (f"{name} in Grafana", f"{name} of hpml")
    return "\n".join(difflib.unified_diff(*lines, *names, lineterm="", n=2))
