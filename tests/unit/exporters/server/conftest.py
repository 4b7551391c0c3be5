"""Certificates and a plain server for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hpml_exporters.server import Server

from tests.unit.exporters.server.support import (
    PATIENT,
    Certificates,
    StaticPages,
    make_certificates,
)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(Path(tmp_path_factory.mktemp("certificates")))


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Where a plain server listens."""
    server = Server("127.0.0.1:0", "", StaticPages(), PATIENT)
    yield server.start()
    server.stop()
