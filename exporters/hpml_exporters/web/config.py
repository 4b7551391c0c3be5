"""The web-config file of Prometheus' exporters: TLS, users and headers.

`python -m hpml_exporters.web.config FILE` prints what a file asks of clients as one JSON object:
`{"locked": BOOL, "tls": BOOL}`, or `{"error": TEXT, "hint": TEXT}`. `hpml check` runs it before a
job starts; certificates are not opened, as they may exist on the nodes only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from hpml_orchestrator.errors import InputError, did_you_mean

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # whoever shows any certificate, or none, may read
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT = re.compile(r"\$2[abxy]?\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_ONE_LINE = re.compile(r"[ -~]*")
_FILES: tuple[Literal["cert_file", "key_file", "client_ca_file"], ...]
_FILES = ("cert_file", "key_file", "client_ca_file")
_NO_TYPE = "needs a client_auth_type"
_ANY = ""  # any name
# A mapping has these fields, a tuple lists the values of a text, and a pattern is that of a text.
_FIELDS = {
    "tls_server_config": {
        "cert_file": str,
        "key_file": str,
        "client_ca_file": str,
        "client_auth_type": tuple(_CLIENT_AUTH),
        "client_allowed_sans": list,
        "min_version": tuple(_VERSIONS),
        "max_version": tuple(_VERSIONS),
    },
    "http_server_config": {
        "http2": ("false",),
        "headers": {
            "Content-Security-Policy": _ONE_LINE,
            "Strict-Transport-Security": _ONE_LINE,
            "X-Content-Type-Options": _ONE_LINE,
            "X-Frame-Options": _ONE_LINE,
            "X-XSS-Protection": _ONE_LINE,
        },
    },
    "basic_auth_users": {_ANY: _BCRYPT},
}
_NOT_A_TEXT = {
    _BCRYPT: (
        "not a bcrypt hash",
        "`htpasswd -nBC 10 '' | tr -d ':\\n'` asks for the password and prints its hash",
    ),
    _ONE_LINE: ("must be one line of ASCII", ""),
}
_NULL = frozenset({"", "~", "null"})
_MAX_BYTES = 1 << 20
_EXIT_USAGE = 2


class Tls(TypedDict, total=False):
    """The fields of `tls_server_config`; files as absolute paths."""

    cert_file: str
    key_file: str
    client_ca_file: str
    client_auth_type: str
    client_allowed_sans: tuple[str, ...]
    min_version: str
    max_version: str


@dataclass(frozen=True)
class WebConfig:
    """A whole file.

    Attributes:
        tls: empty: plain HTTP.
        users: bcrypt hashes by name; empty: no passwords.
        headers: lines added to every response.
    """

    tls: Tls = field(default_factory=Tls)
    users: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    headers: tuple[str, ...] = ()

    @property
    def locked(self) -> bool:
        """Whether only users with a password or a verified certificate may read."""
        return bool(self.users or (self.tls and _verify_mode(self.tls) is ssl.CERT_REQUIRED))


def read(path: str) -> WebConfig:
    """Return the settings in a file, without opening the certificates that it names.

    Raises:
        InputError: a field is unknown or not supported, or its value is wrong; it names file and
            field, and shows no value, which may be a password.
    """
    data = _mapping(_parse(path), _FIELDS, path, f"{path}: ")
    tls = data.get("tls_server_config", {})
    tls |= {key: os.path.join(os.path.dirname(path), tls[key]) for key in _FILES if key in tls}
    if tls:
        _check_tls(tls, path)
    return WebConfig(
        tls,
        {user: text.encode() for user, text in data.get("basic_auth_users", {}).items()},
        tuple(
            f"{name}: {text}"
            for name, text in data.get("http_server_config", {}).get("headers", {}).items()
        ),
    )


def _parse(path: str) -> object:
    from ruamel.yaml import YAML  # noqa: PLC0415 - only with a file
    from ruamel.yaml.constructor import DuplicateKeyError  # noqa: PLC0415 - as above
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - as above

    try:
        with open(path, "rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(message, field="web_config", value=path) from None
    if len(text) > _MAX_BYTES:
        raise InputError("longer than 1 MiB", field=path)
    try:
        return YAML(typ="base", pure=True).load(text) or {}
    except (YAMLError, ValueError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f"line {mark.line + 1}: " if mark else ""
        repeated = isinstance(error, DuplicateKeyError)
    message = "the same field twice" if repeated else "not valid YAML: expected FIELD: VALUE"
    hint = "indent with spaces, and close every quote, bracket and brace"
    raise InputError(f"{line}{message}", field=path, hint="" if repeated else hint)


def _mapping(data: object, kinds: Mapping[str, object], name: str, prefix: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError("must be a mapping", field=name, hint=f"fields: {', '.join(kinds)}")
    values = {}
    for key, value in data.items():
        kind = kinds.get(_ANY, kinds.get(key))
        if kind is None:
            hint = did_you_mean(key, kinds) or f"supported: {', '.join(kinds)}"
            raise InputError("unknown or not supported", field=prefix + key, hint=hint)
        # Other fields may be empty. A user without a hash is refused: leaving him out could leave
        # the server without any password.
        if kind is _BCRYPT or not (isinstance(value, str) and value in _NULL):
            values[key] = _value(value, kind, prefix + key)
    return values


def _value(value: object, kind: object, name: str) -> object:
    if isinstance(kind, dict):
        return _mapping(value, kind, name, f"{name}.")
    if kind is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError("must be a list of texts", field=name)
        return tuple(value)
    if isinstance(kind, re.Pattern) and not (isinstance(value, str) and kind.fullmatch(value)):
        message, hint = _NOT_A_TEXT[kind]
        raise InputError(message, field=name, hint=hint)
    if not isinstance(value, str):
        raise InputError("must be a text", field=name)
    if isinstance(kind, tuple) and value not in kind:
        hint = did_you_mean(value, kind) or f"supported: {', '.join(kind)}"
        raise InputError("not supported", field=name, value=value, hint=hint)
    return value


def _check_tls(tls: Tls, path: str) -> None:
    mode, pem = _verify_mode(tls), "name a PEM file"
    verify = "client_auth_type: RequireAndVerifyClientCert"
    no_ca = "client_ca_file" not in tls
    names = "client_allowed_sans" in tls
    least, most = _versions(tls)
    for key, wrong, message, hint in (
        ("cert_file", "cert_file" not in tls, "missing", pem),
        ("key_file", "key_file" not in tls, "missing", pem),
        ("client_ca_file", no_ca and mode is not ssl.CERT_NONE, "missing", pem),
        ("client_ca_file", not no_ca and mode is ssl.CERT_NONE, _NO_TYPE, verify),
        ("client_allowed_sans", names and mode is not ssl.CERT_REQUIRED, _NO_TYPE, verify),
        ("min_version", least > most, "above max_version", ""),
    ):
        if wrong:
            raise InputError(message, field=f"{path}: tls_server_config.{key}", hint=hint)


def _verify_mode(tls: Tls) -> ssl.VerifyMode:
    return _CLIENT_AUTH[tls.get("client_auth_type", "NoClientCert")]


def _versions(tls: Tls) -> tuple[ssl.TLSVersion, ssl.TLSVersion]:
    least, most = tls.get("min_version", "TLS12"), tls.get("max_version", "TLS13")
    return _VERSIONS[least], _VERSIONS[most]


def tls_context(tls: Tls, path: str) -> ssl.SSLContext:
    """Return a TLS context for connections of clients.

    Args:
        tls: of a `WebConfig`.
        path: the web-config file, for messages.

    Raises:
        InputError: a file cannot be read, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _versions(tls)
    context.num_tickets = 0  # no resumed sessions: nobody needs their memory
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = _verify_mode(tls)
    for key in (name for name in _FILES if name in tls):
        message = "not a PEM file of certificates"
        try:
            if key == "cert_file":  # by itself, so that an error names the right file
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(tls[key])
            elif key == "client_ca_file":
                context.load_verify_locations(tls[key])
            else:
                message = "not a private key of cert_file without a password"
                # the empty text as password: the terminal is not asked for one
                context.load_cert_chain(tls["cert_file"], tls[key], password=str)
        except (OSError, ValueError) as error:
            if not isinstance(error, ssl.SSLError):
                message = f"cannot be read: {getattr(error, 'strerror', error)}"
            where = f"{path}: tls_server_config.{key}"
            raise InputError(message, field=where, value=tls[key]) from None
    return context


def fingerprint(path: str, config: WebConfig) -> bytes:
    """Return a hash of the file and of the files that it names, as they are now."""
    found = hashlib.sha256()
    for file in (path, *(config.tls[key] for key in _FILES if key in config.tls)):
        try:
            with open(file, "rb") as stream:
                content = stream.read(_MAX_BYTES)
        except (OSError, ValueError):
            content = b""
        found.update(hashlib.sha256(content).digest())
    return found.digest()


def main(argv: list[str]) -> int:
    """Print what the file in `argv` asks of clients; returns the exit status."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m hpml_exporters.web.config FILE\n")
        return _EXIT_USAGE
    summary: dict[str, object]
    try:
        config = read(argv[0])
        summary = {"locked": config.locked, "tls": bool(config.tls)}
    except InputError as error:
        # `hpml check` names the file by itself
        summary = {"error": str(error).removeprefix(f"{argv[0]}: "), "hint": error.hint}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
