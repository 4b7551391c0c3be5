"""Requests, targets and kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.request import Bases, StageRequest, kind_of
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", {"name": "Train"}),
        ("name", {"name": "../x"}),
        ("name", {"name": "a\n"}),
        ("name", {"name": "a" * 32}),
        ("source", {"source": "data"}),
        ("source", {"source": "/a\0b"}),
        ("kind", {"kind": "rar"}),
        ("kind", {"kind": "squashfs"}),
        ("target", {"target": "ram"}),
        ("target", {"target": "tmp/x"}),
    ],
)
def test_wrong_fields_are_named(field: str, values: dict[str, Any]) -> None:
    """A request refuses a wrong value and names its field; for a removed kind, what to use."""
    with pytest.raises(InputError) as caught:
        StageRequest(**{"name": "a", "source": "/data", **values})
    assert caught.value.field == field
    assert ("with kind file and mount it" in caught.value.hint) == ("squashfs" in values.values())


@pytest.mark.parametrize("key", [".hidden", "a/b", "..", "a b", "a\n"])
def test_job_keys_are_plain_names(key: str) -> None:
    """A job key that would leave the root or hide in it is refused."""
    with pytest.raises(InputError):
        CopyStager(key)


def test_local_needs_a_directory() -> None:
    """Target local is refused on a node that has none."""
    with pytest.raises(InputError, match="no local staging directory"):
        Bases().resolve("local")
    assert Bases(local="/scratch").resolve("local") == "/scratch"
    assert Bases().resolve("/mnt/x") == "/mnt/x"


def test_kind_must_fit_the_source(tmp_path: Path) -> None:
    """A directory is not a file, a file is not a tree, and a device is neither."""
    for source, kind in [(str(tmp_path), "tar"), ("/etc/passwd", "tree"), ("/dev/null", "auto")]:
        with pytest.raises(InputError):
            kind_of(StageRequest("a", source, kind=kind))
