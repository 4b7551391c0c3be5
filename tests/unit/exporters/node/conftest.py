"""What the tests of the node's collectors share."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of its own in the real /dev/shm."""
    path = Path("/dev/shm") / f"hpml-test-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)
