"""The web-config file of Prometheus' exporters, checked: TLS, users, headers, rate limit.

The format is that of the exporter toolkit, so one file serves node_exporter and this exporter. What
the toolkit takes in silence and cannot mean (a lowest version above the highest) is refused here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from hpml_exporters.server import yamlfile
from hpml_orchestrator.errors import InputError, did_you_mean

__all__ = ["CIPHERS", "CURVES", "VERSIONS", "RateLimit", "TlsConfig", "WebConfig", "read"]

VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
CURVES = {"X25519": "X25519", "CurveP256": "P-256", "CurveP384": "P-384", "CurveP521": "P-521"}
"""Names of the file, and those of OpenSSL."""

CIPHERS = {
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}
"""Names of IANA, and those of OpenSSL; those of TLS 1.3 are always on and have no switch."""

_AUTH_TYPES = {
    "": "NoClientCert",
    "NoClientCert": "NoClientCert",
    "RequestClientCert": "RequestClientCert",
    "RequireAnyClientCert": "RequireAnyClientCert",
    "RequireClientCert": "RequireAnyClientCert",  # its older name
    "VerifyClientCertIfGiven": "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert": "RequireAndVerifyClientCert",
}
_HEADERS = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
_TRUE = frozenset("y Y yes Yes YES true True TRUE on On ON".split())
_FALSE = frozenset("n N no No NO false False FALSE off Off OFF".split())
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_HASH = re.compile(r"\$2[abxy]?\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class TlsConfig:
    """`tls_server_config`; every path is absolute or counts from the process's directory.

    Attributes:
        cert_file: certificate with what signed it, PEM.
        key_file: its private key, PEM.
        client_ca_file: certificates that sign those of clients, PEM.
        cert: the certificate itself, in place of a file.
        key: the key itself, in place of a file.
        client_ca: those certificates themselves, in place of a file.
        client_auth_type: which certificates clients show.
        client_allowed_sans: names of which a client's certificate has one; empty: any.
        min_version: lowest of VERSIONS.
        max_version: highest of VERSIONS.
        cipher_suites: OpenSSL's names, best first; empty: OpenSSL's own choice; none: not given.
        curve_preferences: OpenSSL's names, best first; empty: OpenSSL's own choice.
        prefer_server_cipher_suites: our order counts, not the client's.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    cert: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    client_ca: str = field(default="", repr=False)
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] | None = None
    curve_preferences: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True


@dataclass(frozen=True)
class RateLimit:
    """`rate_limit`: a bucket of `burst` requests that gets one more each `interval` seconds."""

    interval: float
    burst: int


@dataclass(frozen=True)
class WebConfig:
    """All of a file.

    Attributes:
        tls: nothing: plain HTTP.
        users: bcrypt hashes by name; empty: everybody may read.
        headers: lines that are added to every answer.
        rate_limit: nothing: no limit.
        files: whose change asks for another reading.
        warnings: what was taken and yet is probably not what was meant.
    """

    tls: TlsConfig | None = None
    users: dict[str, bytes] = field(default_factory=dict, repr=False)
    headers: tuple[str, ...] = ()
    rate_limit: RateLimit | None = None
    files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def locked(self) -> bool:
        """Whether only whom the file names gets in: its users, or owners of verified certificates.

        Any certificate, or one that need not be shown, names nobody.
        """
        named = self.tls is not None and self.tls.client_auth_type == "RequireAndVerifyClientCert"
        return bool(self.users) or named


def read(path: str) -> WebConfig:
    """Return what a web-config file says, checked as far as its own text goes.

    Raises:
        InputError: a field is unknown or its value wrong.
    """
    sections = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
    data = _mapping(yamlfile.read(path), "", sections)
    tls, warnings = _tls(_section(data, sections[0]), os.path.dirname(path))
    named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()
    return WebConfig(
        tls=tls,
        headers=_http(_section(data, sections[1])),
        users=_users(_section(data, sections[2])),
        rate_limit=_rate_limit(_section(data, sections[3])),
        files=(path, *(one for one in named if one)),
        warnings=warnings,
    )


def _section(data: dict[str, Any], name: str) -> tuple[Any, str]:
    value = data.get(name, {})
    return ({} if isinstance(value, str) and value in _NULL else value), name


def _mapping(value: Any, name: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a mapping whose keys are known ones (all, where none are named).

    Raises:
        InputError: it is none, or has another key.
    """
    if not isinstance(value, dict):
        raise InputError("this is no mapping", field=name or "web_config")
    for key in value:
        where = f"{name}.{key}" if name else str(key)
        if not isinstance(key, str):
            raise InputError("a key is a text", field=name or "web_config", value=key)
        if known and key not in known:
            hint = did_you_mean(key, known) or f"known are {', '.join(known)}"
            raise InputError("there is no such field", field=where, hint=hint)
    return value


def _text(data: dict[str, Any], name: str, key: str) -> str:
    """Return a text; empty where there is none.

    Raises:
        InputError: it is a list or a mapping.
    """
    value = data.get(key, "")
    if not isinstance(value, str):
        raise InputError("this is a text", field=f"{name}.{key}")
    return "" if value in _NULL else value


def _bool(data: dict[str, Any], name: str, key: str, *, default: bool) -> bool:
    value = _text(data, name, key)
    if value in _TRUE or value in _FALSE or not value:
        return value in _TRUE if value else default
    raise InputError("this is true or false", field=f"{name}.{key}", value=value)


def _list(data: dict[str, Any], name: str, key: str) -> tuple[str, ...]:
    value = data.get(key, [])
    if isinstance(value, str) and value in _NULL:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InputError("this is a list of texts", field=f"{name}.{key}")
    return tuple(value)


def _chosen(value: str, where: str, known: tuple[str, ...]) -> str:
    """Return a value that is one of the known ones.

    Raises:
        InputError: it is none of them.
    """
    if value not in known:
        hint = f"one of {', '.join(one for one in known if one)}"
        raise InputError("there is no such value", field=where, value=value, hint=hint)
    return value


def _tls(section: tuple[Any, str], folder: str) -> tuple[TlsConfig | None, tuple[str, ...]]:
    """Return the settings of TLS, or nothing where it is off, and warnings.

    Raises:
        InputError: a value is wrong, or one is missing.
    """
    name = section[1]
    data = _mapping(*section, tuple(one.name for one in fields(TlsConfig)))
    text: dict[str, Any] = {key: _text(data, name, key) for key in ("cert", "key", "client_ca")}
    text |= {
        key: os.path.join(folder, path) if (path := _text(data, name, key)) else ""
        for key in ("cert_file", "key_file", "client_ca_file")
    }
    given_type = _text(data, name, "client_auth_type")
    auth = _AUTH_TYPES[_chosen(given_type, f"{name}.client_auth_type", tuple(_AUTH_TYPES))]
    chosen = TlsConfig(
        **text,
        client_auth_type=auth,
        client_allowed_sans=_list(data, name, "client_allowed_sans"),
        prefer_server_cipher_suites=_bool(data, name, "prefer_server_cipher_suites", default=True),
        **_negotiated(data, name),
    )
    if not any(text.values()) and not given_type:
        warning = "tls_server_config names no certificate: TLS is off, this is plain HTTP"
        return None, ((warning,) if data else ())
    _check_complete(chosen, name)
    return chosen, ()


def _negotiated(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return versions, cipher suites and curves.

    Raises:
        InputError: one has no such name, or no version is left.
    """
    least = _chosen(_text(data, name, "min_version") or "TLS12", f"{name}.min_version", VERSIONS)
    most = _chosen(_text(data, name, "max_version") or "TLS13", f"{name}.max_version", VERSIONS)
    if least > most:
        hint = f"{most} or lower, or a higher max_version"
        raise InputError("above max_version", field=f"{name}.min_version", value=least, hint=hint)
    suites = _list(data, name, "cipher_suites")
    for suite in suites:
        _chosen(suite, f"{name}.cipher_suites", tuple(CIPHERS))
    curves = _list(data, name, "curve_preferences")
    for curve in curves:
        _chosen(curve, f"{name}.curve_preferences", tuple(CURVES))
    older = tuple(CIPHERS[suite] for suite in suites if CIPHERS[suite])
    if suites and not older and most != "TLS13":
        hint = "a suite of TLS 1.2, or a higher max_version"
        raise InputError("all are of TLS 1.3", field=f"{name}.cipher_suites", hint=hint)
    return {
        "min_version": least if older or not suites else "TLS13",
        "max_version": most,
        "cipher_suites": older or None,
        "curve_preferences": tuple(CURVES[curve] for curve in curves),
    }


def _check_complete(tls: TlsConfig, name: str) -> None:
    """Check what needs each other.

    Raises:
        InputError: one of them is missing, or one too many.
    """
    for key in ("cert", "key"):
        if not getattr(tls, f"{key}_file") and not getattr(tls, key):
            raise InputError("it is missing", field=f"{name}.{key}_file", hint="a PEM file")
    if (tls.client_ca_file or tls.client_ca) and tls.client_auth_type == "NoClientCert":
        hint = "client_auth_type: RequireAndVerifyClientCert"
        words = "it has no effect without a client_auth_type"
        raise InputError(words, field=f"{name}.client_ca_file", hint=hint)
    if tls.client_allowed_sans and not tls.client_auth_type.startswith("Require"):
        hint = "client_auth_type: RequireAndVerifyClientCert"
        words = "clients need not show a certificate with a name"
        raise InputError(words, field=f"{name}.client_allowed_sans", hint=hint)


def _http(section: tuple[Any, str]) -> tuple[str, ...]:
    """Return lines of headers; HTTP/2 is not spoken here, whatever is said about it.

    Raises:
        InputError: a header cannot be set, or not to that.
    """
    name = section[1]
    data = _mapping(*section, ("http2", "headers"))
    _bool(data, name, "http2", default=True)
    lines = []
    given, where = _section(data, "headers")
    headers = _mapping(given, f"{name}.{where}", tuple(_HEADERS))
    for header in headers:
        value = _text(headers, f"{name}.headers", header)
        if not value:
            continue
        if _HEADERS[header]:
            _chosen(value, f"{name}.headers.{header}", _HEADERS[header])
        if not (value.isascii() and value.isprintable()):
            raise InputError(
                "this is one line of ASCII", field=f"{name}.headers.{header}", value=value
            )
        lines.append(f"{header}: {value}")
    return tuple(lines)


def _users(section: tuple[Any, str]) -> dict[str, bytes]:
    """Return hashes by user. A wrong one is never shown: it may be the password itself.

    Raises:
        InputError: a value is no hash of bcrypt.
    """
    name = section[1]
    users = {}
    for user, value in _mapping(*section).items():
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            hint = "`htpasswd -nBC 10 '' | tr -d ':\\n'` asks for the password and prints its hash"
            raise InputError("this is no hash of bcrypt", field=f"{name}.{user}", hint=hint)
        users[user] = value.encode()
    return users


def _rate_limit(section: tuple[Any, str]) -> RateLimit | None:
    """Return the limit of requests, or nothing.

    Raises:
        InputError: a value is no duration or no number.
    """
    name = section[1]
    data = _mapping(*section, ("interval", "burst"))
    text = _text(data, name, "interval") or "0"
    parts = _DURATION.findall(text)
    if text != "0" and "".join(number + unit for number, unit in parts) != text:
        hint = "a duration such as 100ms, 1s or 1m30s"
        raise InputError("this is no duration", field=f"{name}.interval", value=text, hint=hint)
    burst = _text(data, name, "burst") or "0"
    if not (burst.isascii() and burst.isdigit()):
        raise InputError("this is no number of requests", field=f"{name}.burst", value=burst)
    interval = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if interval and not int(burst):
        hint = "burst: 10, the requests that may come at once"
        raise InputError("no request would ever be answered", field=f"{name}.burst", hint=hint)
    return RateLimit(interval, int(burst)) if interval else None
