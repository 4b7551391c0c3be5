"""How the tests are shared out among workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

CLUSTER = "tests/cluster/"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to a worker, and all tests of the real cluster to one: they share it.

    In place of `--dist=loadgroup`: pytest 9.2 took away what xdist 3.8 needs to see its groups, and
    without them that mode shares out every test by itself, in silence.
    """
    from xdist.scheduler import (  # type: ignore[import-untyped]  # noqa: PLC0415 - if used
        LoadScopeScheduling,
    )

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return CLUSTER if nodeid.startswith(CLUSTER) else nodeid.partition("::")[0]

    return ByFile(config, log)
