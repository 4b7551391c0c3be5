"""Addresses of servers, and the credentials for requests to them."""

from __future__ import annotations

import base64
import os
import re
import stat
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

LOCAL_NAMES = ("127.0.0.1", "localhost")


def web_address(url: str) -> SplitResult | None:
    """Return the parts of a valid http or https address; None for any other text.

    >>> [web_address(url) for url in ("http://[::1", "http://h:99999", "ftp://h", "http://a b")]
    [None, None, None, None]
    """
    try:
        parts = urlsplit(url)
        parts.hostname.encode("idna") if parts.hostname else None
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets that are not closed, a port that is too large, a label of 64
        return None
    return parts if is_whole and not re.search(r"[\x00-\x20\x7f]", url) else None


def split_login(url: str, *, field: str) -> tuple[str, str]:
    """Return an http or https address without user and password, and their Authorization header.

    The header is empty where the address has neither.

    Raises:
        InputError: it is not such an address; the value is not shown if it may hold a password.
    """
    parts = web_address(url)
    if parts is None:
        raise InputError(
            "must be an http or https address",
            field=field,
            value=None if "@" in url else url,
            hint="for example http://prometheus.example.org:9090",
        )
    host = parts.netloc.rpartition("@")[2]
    header = ""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        header = f"Basic {base64.b64encode(login.encode()).decode()}"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), header


def opener_for(url: str) -> OpenerDirector:
    """Return an opener for an address; proxies of the environment are not used for this machine."""
    from urllib.request import ProxyHandler, build_opener  # noqa: PLC0415 - few need it

    return build_opener(*([ProxyHandler({})] if urlsplit(url).hostname in LOCAL_NAMES else []))


def read_secret(path: str, option: str) -> str:
    """Return the one line of a file that nobody else may read.

    Args:
        path: the file.
        option: the option that named it, for errors.

    Raises:
        InputError: the file cannot be read, others may read it, or it has not one line of ASCII.
    """
    try:
        with open(path, encoding="utf-8") as file:
            # Of the open file, not of the path: the file could be swapped between the check and the
            # read.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().strip()
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(message, field=option, value=path) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        hint = f"chmod 600 {path}"
        raise InputError(f"others can read it: mode {mode:o}", field=option, value=path, hint=hint)
    if not text or not text.isprintable() or not text.isascii():
        message = "must have one line of ASCII" if text else "is empty"
        raise InputError(message, field=option, value=path)
    return text


def read_credentials(path: str) -> str:
    """Return the Authorization header for a file with `user:password` or a token.

    It is empty without a path.

    Raises:
        InputError: the file cannot be read, others may read it, or it has not one line.
    """
    if not path:
        return ""
    text = read_secret(path, "--prometheus-auth")
    if ":" in text:
        return f"Basic {base64.b64encode(text.encode()).decode()}"
    return f"Bearer {text}"
