"""What a release needs says the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import hpml_orchestrator

ROOT = Path(__file__).parents[2]
VERSION = hpml_orchestrator.__version__


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_version_stands_in_changelog_and_citation() -> None:
    """With the same date; between releases there is a section [Unreleased] above."""
    sections = re.findall(r"^## \[(\S+)\](?: - (\S+))?$", text("CHANGELOG.md"), re.MULTILINE)
    released = [section for section in sections if section != ("Unreleased", "")]
    cited = YAML(typ="safe").load(text("CITATION.cff"))
    assert released[0] == (VERSION, str(cited["date-released"]))
    assert cited["version"] == VERSION
    assert "version" in tomllib.loads(text("pyproject.toml"))["project"]["dynamic"]


def test_the_project_has_one_address() -> None:
    """Metadata, citation and the page about security name the same repository."""
    urls = tomllib.loads(text("pyproject.toml"))["project"]["urls"]
    cited = YAML(typ="safe").load(text("CITATION.cff"))["repository-code"]
    assert {url.split("/blob/")[0].removesuffix("/issues") for url in urls.values()} == {cited}
    assert f"{cited}/security" in text("SECURITY.md")


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda one: one.stem
)
def test_issue_templates_are_valid(path: Path) -> None:
    """GitHub shows no form that lacks a name, a description or a body with ids."""
    form = YAML(typ="safe").load(path.read_text("utf-8"))
    if path.stem == "config":
        assert form["contact_links"]
        return
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) > 0


def test_commit_hooks_are_the_linters_of_make_lint() -> None:
    """`pre-commit` runs what `make lint` runs, from the same environment."""
    hooks = YAML(typ="safe").load(text(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    entries = {hook["entry"].removeprefix(".venv/bin/").split(" --force")[0] for hook in hooks}
    linters = text("Makefile").split("\nlint:")[1].split("\n\n")[0]
    wanted = set(re.findall(r"\$\(BIN\)/(ruff check|ruff format|mypy)", linters))
    assert entries == wanted
