"""Certificates and a plain server for the tests of the web server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.exporters.web.support import Address, Certificates, make_certificates, serving


@pytest.fixture
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Fresh ones: tests of reloading replace them."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def address() -> Iterator[Address]:
    """Where a plain server listens."""
    with serving() as (_, address):
        yield address
