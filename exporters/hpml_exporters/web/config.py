"""The web-config file of Prometheus' exporters: TLS, users and headers.

`python -m hpml_exporters.web.config FILE` prints what a file asks of clients as one JSON object:
`{"locked": BOOL, "tls": BOOL}`, or `{"error": TEXT, "hint": TEXT}`. `hpml check` runs it before a
job starts; certificates are not opened, as they may exist on the nodes only.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpml_orchestrator.errors import InputError, did_you_mean

__all__ = ["TlsConfig", "WebConfig", "main", "read", "tls_context"]

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # whoever shows any certificate, or none, may read
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT = re.compile(r"\$2[abxy]?\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_ONE_LINE = re.compile(r"[ -~]*")
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


@dataclass(frozen=True)
class TlsConfig:
    """`tls_server_config`.

    Attributes:
        cert_file: certificate chain of the server, PEM.
        key_file: its private key, PEM.
        client_ca_file: certificates that sign those of clients, PEM; empty: none.
        client_auth_type: which certificates clients must show.
        client_allowed_sans: subject alternative names, of which a client needs one; empty: any.
        min_version: TLS12 or TLS13.
        max_version: TLS12 or TLS13.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """Whether clients must show a certificate."""
        return _CLIENT_AUTH[self.client_auth_type]

    @property
    def files(self) -> dict[str, str]:
        """The files that it names, by field."""
        names = ("cert_file", "key_file", "client_ca_file")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class WebConfig:
    """A whole file.

    Attributes:
        tls: None: plain HTTP.
        users: bcrypt hashes by name; empty: no passwords.
        headers: lines added to every response.
    """

    tls: TlsConfig | None = None
    users: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    headers: tuple[str, ...] = ()

    @property
    def locked(self) -> bool:
        """Whether only users with a password or a verified certificate may read."""
        return bool(self.users) or (
            self.tls is not None and self.tls.verify_mode is ssl.CERT_REQUIRED
        )


def read(path: str) -> WebConfig:
    """Return what a file says, without opening the certificates that it names.

    Raises:
        InputError: a field is unknown or not supported, or its value is wrong; it names file and
            field, and shows no value, which may be a password.
    """
    data = _mapping(_parse(path), _FIELDS, path, f"{path}: ")
    http = data.get("http_server_config", {})
    return WebConfig(
        tls=_tls(data.get("tls_server_config"), path),
        users={user: text.encode() for user, text in data.get("basic_auth_users", {}).items()},
        headers=tuple(f"{name}: {text}" for name, text in http.get("headers", {}).items()),
    )


def _parse(path: str) -> Any:
    """Return the content of a YAML file, every scalar as text.

    Raises:
        InputError: it cannot be read or parsed; its text is not shown.
    """
    from ruamel.yaml import YAML  # noqa: PLC0415 - only where there is a file
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
    except (YAMLError, ValueError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f"line {mark.line + 1}: " if mark else ""
        repeated = isinstance(error, DuplicateKeyError)
    message = "the same field twice" if repeated else "not valid YAML: expected FIELD: VALUE"
    hint = "indent with spaces, and close every quote, bracket and brace"
    raise InputError(f"{line}{message}", field=path, hint="" if repeated else hint)


def _mapping(data: Any, kinds: Mapping[str, Any], name: str, prefix: str) -> dict[str, Any]:
    """Return the fields that have a value.

    Args:
        data: of the file.
        kinds: of its fields.
        name: of the mapping in messages.
        prefix: of its fields' names.

    Raises:
        InputError: it is no mapping, or a field is unknown or wrong.
    """
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError("must be a mapping", field=name, hint=f"fields: {', '.join(kinds)}")
    values = {}
    for key, value in data.items():
        kind = kinds.get(_ANY, kinds.get(key))
        if kind is None:
            hint = did_you_mean(key, kinds) or f"supported: {', '.join(kinds)}"
            raise InputError("unknown or not supported", field=prefix + key, hint=hint)
        if kind is _BCRYPT or not (isinstance(value, str) and value in _NULL):
            values[key] = _value(value, kind, prefix + key)
    return values


def _value(value: Any, kind: Any, name: str) -> Any:
    """Return the value of one field.

    Raises:
        InputError: it is of another kind.
    """
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


def _tls(values: dict[str, Any] | None, path: str) -> TlsConfig | None:
    """Return the settings of TLS; None where there are none.

    Raises:
        InputError: values are missing or contradict each other.
    """
    if not values:
        return None
    for key in TlsConfig(**values).files:
        values[key] = os.path.join(os.path.dirname(path), values[key])
    tls = TlsConfig(**values)
    verifies = tls.verify_mode is not ssl.CERT_NONE
    wanted = ["cert_file", "key_file"] + ["client_ca_file"] * verifies
    for key in wanted:
        if key not in values:
            raise InputError("missing", field=_tls_field(path, key), hint="name a PEM file")
    strict = tls.verify_mode is ssl.CERT_REQUIRED
    for key, has_effect in (("client_ca_file", verifies), ("client_allowed_sans", strict)):
        if key in values and not has_effect:
            hint = "client_auth_type: RequireAndVerifyClientCert"
            raise InputError("needs a client_auth_type", field=_tls_field(path, key), hint=hint)
    if tls.min_version > tls.max_version:
        raise InputError("above max_version", field=_tls_field(path, "min_version"))
    return tls


def _tls_field(path: str, key: str) -> str:
    return f"{path}: tls_server_config.{key}"


def tls_context(tls: TlsConfig, path: str) -> ssl.SSLContext:
    """Return a TLS context for connections of clients.

    Args:
        tls: what it is made of.
        path: the web-config file, for messages.

    Raises:
        InputError: a file cannot be read, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    # No resumed sessions: each connection is checked against the settings of its time.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = tls.verify_mode
    for key, file in tls.files.items():
        message = "not a PEM file of certificates"
        try:
            if key == "cert_file":  # by itself, so that an error names the right file
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
            elif key == "client_ca_file":
                context.load_verify_locations(file)
            else:
                message = "not a private key of cert_file without a password"
                # the empty text as password: the terminal is not asked for one
                context.load_cert_chain(tls.cert_file, file, password=str)
        except ssl.SSLError:
            raise InputError(message, field=_tls_field(path, key), value=file) from None
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise InputError(message, field=_tls_field(path, key), value=file) from None
    return context


def main(argv: list[str]) -> int:
    """Print what the file in `argv` asks of clients; returns the exit status."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m hpml_exporters.web.config FILE\n")
        return _EXIT_USAGE
    summary: dict[str, object]
    try:
        config = read(argv[0])
        summary = {"locked": config.locked, "tls": config.tls is not None}
    except InputError as error:
        # `hpml check` names the file by itself
        summary = {"error": str(error).removeprefix(f"{argv[0]}: "), "hint": error.hint}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
