"""Pushing to a Grafana; a stand-in for one, see grafana_standin."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpml_dashboards import JSON
from hpml_dashboards.push import Push, PushOutcome, push, read_token

from hpml_orchestrator.errors import HpmlError, InputError
from tests.unit.dashboards.grafana_standin import TOKEN, Grafana, serving

PROMETHEUS = "http://prometheus:9090"
UIDS = {path.stem for path in JSON.glob("*.json")}


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    with serving(Grafana()) as standin:
        yield standin


def pushed(grafana: Grafana, **options: object) -> list[PushOutcome]:
    wanted = {"token": TOKEN, "prometheus": PROMETHEUS, **options}
    return list(push(Push(grafana.url, **wanted)))  # type: ignore[arg-type]


def actions(outcomes: list[PushOutcome], kind: str = "") -> Counter[str]:
    return Counter(outcome.action for outcome in outcomes if kind in {"", outcome.kind})


def test_all_is_there_after_a_push_and_a_second_one_writes_nothing(grafana: Grafana) -> None:
    """Folder, data source, dashboards and alert rules; twice is once."""
    first = pushed(grafana)
    assert set(actions(first)) == {"created"}
    assert set(grafana.dashboards) == UIDS
    assert {saved[0]["folderUid"] for saved in grafana.dashboards.values()} == {"hpml"}
    assert grafana.groups
    for group in grafana.groups.values():
        for rule in group["rules"]:
            assert rule["data"][0]["datasourceUid"] == grafana.sources[0]["uid"]
            assert "$value " not in json.dumps(rule["annotations"])
    grafana.writes.clear()
    assert set(actions(pushed(grafana))) == {"unchanged"}
    assert grafana.writes == []


def test_a_dry_run_writes_nothing_and_shows_what_would_change(grafana: Grafana) -> None:
    outcomes = pushed(grafana, dry_run=True)
    assert set(actions(outcomes)) == {"created"}
    assert grafana.writes == []
    pushed(grafana)
    grafana.save_as_person("hpml-job", {"title": "Mine"})
    grafana.writes.clear()
    outcome = next(one for one in pushed(grafana, dry_run=True, overwrite=True) if one.diff)
    assert outcome.action == "updated"
    assert '- "title": "Mine"' in outcome.diff
    assert grafana.writes == []


def test_what_a_person_changed_stays_until_told_otherwise(grafana: Grafana) -> None:
    """A dashboard, the address of the data source, a group of rules made by hand."""
    pushed(grafana)
    grafana.save_as_person("hpml-job", {"title": "Mine"})
    grafana.sources[0]["url"] = "http://other:9090"
    group = next(iter(grafana.groups.values()))
    group["rules"][0] |= {"provenance": "", "for": "99m"}
    grafana.writes.clear()
    kept = [outcome for outcome in pushed(grafana) if outcome.action == "kept"]
    changed = [line for line in kept[-1].diff.splitlines()[2:] if line[0] in "+-"]
    assert [line.split()[1] for line in changed] == ['"for":'] * 2, "not what Grafana added"
    assert [outcome.kind for outcome in kept] == ["data source", "dashboard", "alert rules"]
    assert all(outcome.reason for outcome in kept)
    assert grafana.writes == []
    assert actions(pushed(grafana, overwrite=True))["updated"] == 3
    assert grafana.dashboards["hpml-job"][-1]["dashboard"]["title"] != "Mine"
    assert set(actions(pushed(grafana))) == {"unchanged"}


def test_our_own_older_version_is_replaced(grafana: Grafana) -> None:
    """The same push by a newer hpml needs no --overwrite."""
    pushed(grafana)
    last = grafana.dashboards["hpml-node"][-1]
    last["dashboard"] |= {"title": "Older"}
    last["message"] = "hpml dashboards push 0123456789abcdef"
    assert actions(pushed(grafana), "dashboard") == {"updated": 1, "unchanged": len(UIDS) - 1}


def test_a_folder_of_the_same_title_is_used(grafana: Grafana) -> None:
    """Whoever made it; and one with our uid but another title is left alone."""
    grafana.folders += [{"uid": "hpml", "title": "Theirs"}, {"uid": "abc", "title": "GPUs"}]
    pushed(grafana, folder="GPUs")
    assert {saved[0]["folderUid"] for saved in grafana.dashboards.values()} == {"abc"}
    assert actions(pushed(grafana, folder="New"), "folder") == {"created": 1}


@pytest.mark.parametrize(
    ("pattern", "answer", "kind", "reason"),
    [
        ("POST /dashboards/db", (412, "version-mismatch"), "dashboard", "push again"),
        ("POST /dashboards/db", (403, "no permission to edit"), "dashboard", "no permission"),
        ("POST /datasources", (409, "the name is taken"), "data source", "the name is taken"),
        ("PUT /v1/prov", (500, "database is locked"), "alert rules", "database is locked"),
    ],
)
def test_one_failure_stops_nothing_else(
    grafana: Grafana, pattern: str, answer: tuple[int, str], kind: str, reason: str
) -> None:
    grafana.fail[pattern] = answer
    outcomes = pushed(grafana)
    failed = [outcome for outcome in outcomes if outcome.kind == kind]
    assert {outcome.action for outcome in failed} == {"failed"}
    assert reason in failed[0].reason
    grafana.fail.clear()
    assert actions(pushed(grafana), kind) == {"created": len(failed)}  # and it can be repeated


def test_alert_rules_need_a_data_source(grafana: Grafana) -> None:
    """Without --prometheus the only or default one of Grafana is asked."""
    assert "no data sources" in pushed(grafana, prometheus="")[-1].reason
    grafana.sources += [{"uid": "a", "name": "a", "type": "prometheus", "isDefault": False}]
    assert actions(pushed(grafana, prometheus=""), "alert rules")["created"]
    grafana.sources += [{"uid": "b", "name": "b", "type": "prometheus", "isDefault": False}]
    assert "2 data sources" in pushed(grafana, prometheus="")[-1].reason
    assert "failed" not in actions(pushed(grafana, prometheus="", datasource="b"))


def test_a_wrong_token_changes_nothing(grafana: Grafana) -> None:
    with pytest.raises(HpmlError, match="Unauthorized") as caught:
        pushed(grafana, token="secret")  # noqa: S106 - a wrong one
    assert "secret" not in str(caught.value) + caught.value.hint
    assert grafana.writes == []


def test_what_is_no_grafana_is_named(tmp_path: Path, grafana: Grafana) -> None:
    """Nothing listens, another program does, or a path is missing."""
    with pytest.raises(HpmlError, match=r"refused|answer"):
        list(push(Push("http://127.0.0.1:1", TOKEN)))
    with pytest.raises(HpmlError) as caught:
        list(push(Push(grafana.url.removesuffix("/grafana"), TOKEN)))
    assert "path" in caught.value.hint
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "health").write_text("<html>welcome</html>")
    other = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0),
        lambda *a: http.server.SimpleHTTPRequestHandler(*a, directory=str(tmp_path)),
    )
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    try:
        with pytest.raises(HpmlError, match=r"Grafana"):
            list(push(Push(f"http://127.0.0.1:{other.server_port}", TOKEN)))
    finally:
        other.shutdown()
        thread.join()
        other.server_close()


def test_a_slow_grafana_is_given_up(grafana: Grafana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpml_dashboards.push._TIMEOUT_SECONDS", 0.1)
    grafana.hang_seconds = 0.6
    with pytest.raises(HpmlError, match="time"):
        pushed(grafana)


@pytest.mark.parametrize(
    "url",
    [
        *("grafana.example.org", "ftp://host", "https://", "https://admin:secret@host"),
        *("http://[::1", "http://[zz]", "http://h:0x1", "http://h:99999", "http://a b"),
        *("http://secret@[::1", "http://a..b"),
    ],
)
def test_a_wrong_address_is_refused(url: str) -> None:
    """The error names the option, and shows no password."""
    with pytest.raises(InputError, match="--url") as caught:
        list(push(Push(url, TOKEN)))
    assert "secret" not in str(caught.value)


def test_a_token_is_read_only_where_nobody_else_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From $GRAFANA_TOKEN, or a file of the user's alone."""
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    with pytest.raises(InputError, match="no token"):
        read_token("")
    monkeypatch.setenv("GRAFANA_TOKEN", "of-the-environment\n")
    assert read_token("") == "of-the-environment"
    path = tmp_path / "token"
    with pytest.raises(InputError, match="No such file"):
        read_token(str(path))
    path.write_text("of-the-file\n")
    path.chmod(0o640)
    with pytest.raises(InputError, match="640") as caught:
        read_token(str(path))
    assert "of-the-file" not in str(caught.value)
    path.chmod(0o600)
    assert read_token(str(path)) == "of-the-file"
    path.write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        read_token(str(path))
