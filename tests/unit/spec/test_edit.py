"""Fields of a YAML document are changed in its text: nothing else moves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.spec.document import parse_yaml
from hpml_orchestrator.spec.edit import CannotEditError, block_text, set_field

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


@pytest.mark.parametrize(
    ("field", "value", "old", "new"),
    [
        ("resources.time", "5:00", "  time: 10:00 # MM:SS\n", "  time: 5:00 # MM:SS\n"),
        ("resources.memory", "4G", " # MM:SS\n", " # MM:SS\n  memory: 4G\n"),
        (
            "args",
            ["--data={stage.digits}", "--lr=0.1", "-w"],
            "  - --lr=0.05\n",
            "  - --lr=0.1\n  - -w\n",
        ),
        ("args.1", "--lr=0.1", "--lr=0.05", "--lr=0.1"),
        ("stage.0.target", "shm", "target: local", "target: shm"),
        (
            "stage.1",
            {"name": "b", "source": "/b: #"},
            "local\n",
            "local\n- {name: b, source: '/b: #'}\n",
        ),
        ("environment.variables.B", "2", '{A: "1"}', "{A: \"1\", B: '2'}"),
        ("environment.setup", None, '    setup: |\n      echo "hi"\n', ""),
        ("empty", [1], "empty:\n", "empty: [1]\n"),
        ("empty.a.b", 1, "empty:\n", "empty: {a: {b: 1}}\n"),
        ("binding.policy", "numa", "target: local\n", "target: local\nbinding: {policy: numa}\n"),
        ("checkpoint", False, "checkpoint: true", "checkpoint: false"),
        ("name", "true", "name: digits ", "name: 'true' "),
        ("name", "digits", "", ""),
    ],
)
def test_one_field_changes_and_nothing_else(field: str, value: Any, old: str, new: str) -> None:
    """Comments, blank lines, quotes and order stay; the comment is above the field."""
    assert set_field(JOB, field, value) == JOB.replace(old, new)
    explained = set_field(JOB, field, value, comment="because").splitlines()
    marks = [line for line in explained if line.strip() == "# because"]
    assert len(marks) == (old != new)
    assert [line for line in explained if line not in marks] == JOB.replace(old, new).splitlines()


def test_a_list_on_one_line_stays_one() -> None:
    """A text with braces gets its quotes there, and the comment stays."""
    before = 'args: ["--data=/data", "6"]  # where\n'
    after = set_field(before, "args.0", "--data={stage.data}")
    assert after.endswith("# where\n")
    assert parse_yaml(after, "job.yaml") == {"args": ["--data={stage.data}", "6"]}


@pytest.mark.parametrize("document", ["- 1\n", "a: [1\n", "", "a: *b\n"])
def test_what_is_no_mapping_is_refused(document: str) -> None:
    """The caller writes the file anew then."""
    with pytest.raises(CannotEditError):
        set_field(document, "a", 1)


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
@given(FIELDS, KEYS, KEYS, VALUES)
def test_what_is_written_is_read_again(
    fields: dict[str, Any], top: str, inner: str, value: Any
) -> None:
    """Any value takes the place of any other, in block style and in a document on one line."""
    wanted = copy.deepcopy(fields)
    wanted.setdefault(top, {})[inner] = value
    for text in (block_text(fields), json.dumps(fields), json.dumps(fields, indent=2)):
        changed = set_field(text, f"{top}.{inner}", value, comment="why")
        assert parse_yaml(changed, "text") == wanted
