"""Fields of a user's job file are changed by ruamel's round trip: nothing else moves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.jobfile.load import parse_yaml
from hpml_orchestrator.jobfile.write import JobDocument, job_text, one_line

JOB = """\
# My job
name: digits   # the name
args:
  - --data={stage.digits}   # where
  - --lr=0.05
# what we ask for

resources:
  nodes: 1
  time: 10:00 # MM:SS
checkpoint: true
empty:
environment:
  setup: |
    echo "hi"

  variables: {A: "1"}
# comes first
stage:
  - name: digits
    target: local
# the end
"""


def changed(text: str, field: str, value: Any, comment: str = "") -> str:
    """The text with another value of a field."""
    document = JobDocument(text)
    document.put(field, value, comment)
    return document.text()


JOB_FILES = sorted((Path(__file__).parents[3] / "training_jobs").glob("*.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        *(path.read_text() for path in JOB_FILES),
        JOB,
        "a:\n    b: 1\n    c:\n        - x\n        - y: null\n          z: Null\n",
        "# Mine\n%YAML 1.2\n---\n# head\na: &a {b: [1, 0x1f, 1.10, 1e-3]}\nc: *a\nd: ~\n",
        "a:\n- b\n# below\n- - 'c'\n  - \"d\"\nlong: " + "word " * 40 + "end\n",
    ],
)
def test_without_a_change_a_file_stays_byte_equal(text: str) -> None:
    """Whatever its indentation, header, numbers and quotes."""
    assert JobDocument(text).text() == text


@pytest.mark.parametrize(
    ("field", "value", "old", "new"),
    [
        ("resources.time", "5:00", "  time: 10:00 # MM:SS\n", "  time: 5:00  # MM:SS\n"),
        ("resources.memory", "4G", " # MM:SS\n", " # MM:SS\n  memory: 4G\n"),
        (
            "args",
            ["--data={stage.digits}", "--lr=0.1", "-w"],
            "  - --lr=0.05\n",
            "  - --lr=0.1\n  - -w\n",
        ),
        ("args", ["--data={stage.digits}"], "  - --lr=0.05\n", ""),
        ("args.1", "--lr=0.1", "--lr=0.05", "--lr=0.1"),
        ("stage.0.target", "shm", "target: local", "target: shm"),
        (
            "stage.1",
            {"name": "b", "source": "/b: #"},
            "local\n",
            "local\n  - {name: b, source: '/b: #'}\n",
        ),
        ("environment.variables.A", "2", '{A: "1"}', '{A: "2"}'),
        ("environment.variables.B", "2", '{A: "1"}', "{A: \"1\", B: '2'}"),
        ("environment.variables.B.C", None, "", ""),
        ("environment.setup", None, '  setup: |\n    echo "hi"\n', ""),
        ("environment.setup", "a\nb\n", 'echo "hi"', "a\n    b"),
        ("empty", [1], "empty:\n", "empty: [1]\n"),
        ("empty.a.b", 1, "empty:\n", "empty: {a: {b: 1}}\n"),
        ("binding.policy", "numa", "target: local\n", "target: local\nbinding: {policy: numa}\n"),
        ("checkpoint", False, "checkpoint: true", "checkpoint: false"),
        ("checkpoint.attempts", 2, "checkpoint: true", "checkpoint: {enabled: true, attempts: 2}"),
        ("name", "true", "name: digits ", "name: 'true' "),
        ("name", "digits", "", ""),
        ("name", None, "name: digits   # the name\n", ""),
        ("resources", {"nodes": 1}, "  time: 10:00 # MM:SS\n", ""),
        (
            "resources",
            None,
            "resources:\n  nodes: 1\n  time: 10:00 # MM:SS\n",
            "",
        ),
        ("stage.0", None, "stage:\n  - name: digits\n    target: local\n", "stage: []\n"),
    ],
)
def test_one_field_changes_and_nothing_else(field: str, value: Any, old: str, new: str) -> None:
    """Comments, blank lines, quotes and order stay; the comment is above the field."""
    assert changed(JOB, field, value) == JOB.replace(old, new)
    explained = changed(JOB, field, value, "because").splitlines()
    marks = [line for line in explained if line.strip() == "# because"]
    assert len(marks) == (old != new)
    assert [line for line in explained if line not in marks] == JOB.replace(old, new).splitlines()


def test_what_stands_below_a_removed_first_entry_stays() -> None:
    """It belongs to the next entry."""
    text = "a:\n  b: 1 # gone\n  # of c\n  c: 2\nd: 3\n"
    assert changed(text, "a.b", None) == "a:\n  # of c\n  c: 2\nd: 3\n"


TEXTS = st.text("ab :#-{}'\"\n", max_size=6)
SCALARS = st.one_of(st.booleans(), st.integers(-9, 9), TEXTS)
KEYS = st.text("abc", min_size=1, max_size=2)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=5,
)
FIELDS = st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=3)


@settings(max_examples=50)
@example({"a": {"a": 1}}, "a", "a", {"a": ":a"})
@example({"a": {}}, "a", "a", ":a")
@example({"a": {}}, "a", "a", {"b": {}})
@given(FIELDS, KEYS, KEYS, VALUES)
def test_what_is_written_is_read_again(
    fields: dict[str, Any], top: str, inner: str, value: Any
) -> None:
    """Any value takes the place of any other, in block style and in a document on one line."""
    wanted = copy.deepcopy(fields)
    wanted.setdefault(top, {})[inner] = value
    for text in (job_text(fields, ["new"]), json.dumps(fields), json.dumps(fields, indent=2)):
        assert parse_yaml(changed(text, f"{top}.{inner}", value, "why"), "text") == wanted
    assert parse_yaml(one_line([value]), "text") == [value]
