"""Addresses of servers that may have user and password in them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

__all__ = ["LOCAL_NAMES", "opener_for", "split_login"]

LOCAL_NAMES = ("127.0.0.1", "localhost")


def split_login(url: str, *, field: str) -> tuple[str, str]:
    """Return an http or https address without user and password, and their Authorization header.

    The header is empty where the address has neither.

    Raises:
        InputError: it is no such address; the value is not shown if it may hold a password.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(
            "must be an http or https address",
            field=field,
            value=None if "@" in url else url,
            hint="for example http://prometheus.example.org:9090",
        )
    header = ""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        header = f"Basic {base64.b64encode(login.encode()).decode()}"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), header


def opener_for(url: str) -> OpenerDirector:
    """Return what opens an address: a proxy of the environment is for other machines."""
    from urllib.request import ProxyHandler, build_opener  # noqa: PLC0415 - few need it

    return build_opener(*([ProxyHandler({})] if urlsplit(url).hostname in LOCAL_NAMES else []))
