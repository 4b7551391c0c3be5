"""The tools' own tests run when a tool has changed since they last passed, or with HPML_TOOLS=1.

`tests/TESTED` of each tool holds the digest of the version that last passed its tests.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.conftest import ignored_signals, pytest_runtest_makereport

__all__ = ["ignored_signals", "pytest_runtest_makereport"]

DEPLOY = Path(__file__).parent
ALL = os.environ.get("HPML_TOOLS") == "1"


def digest(tool: Path) -> str:
    """Return the SHA-256 of a tool's sources, its tests among them."""
    total = hashlib.sha256()
    for path in sorted(tool.rglob("*")):
        if path.is_file() and path.name != "TESTED" and "__pycache__" not in path.parts:
            total.update(f"{path.relative_to(tool)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def tested(tool: Path) -> Path:
    """Return the file with the digest of the tool that passed its tests."""
    return tool / "tests" / "TESTED"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip the tests of a tool that has not changed."""
    if collection_path.name != "tests" or collection_path.parent.parent != DEPLOY:
        return None
    stamp = tested(collection_path.parent)
    unchanged = stamp.exists() and stamp.read_text().strip() == digest(collection_path.parent)
    return True if unchanged and not ALL else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the digests if a whole run, all tools' tests included, has passed."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if exitstatus == 0 and ALL and whole and not hasattr(config, "workerinput"):
        for tests in DEPLOY.glob("*/tests"):
            tested(tests.parent).write_text(digest(tests.parent) + "\n")
