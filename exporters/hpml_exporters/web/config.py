"""The web-config file of Prometheus' exporters: TLS, users and headers; read once, at the start.

`python -m hpml_exporters.web.config FILE` prints a file's demands on clients as one JSON object:
`{"locked": BOOL, "tls": BOOL}`, or `{"error": TEXT, "hint": TEXT}`. `hpml check` runs it before a
job starts; certificates are not opened, as they may exist on the nodes only.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from hpml_orchestrator.errors import InputError, did_you_mean

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # no valid certificate is required
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT = r"^\$2[abxy]?\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}$"
_MAX_BYTES = 1 << 20
_EXIT_USAGE = 2


Header = Literal[
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
]
Version = Literal["TLS12", "TLS13"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {key: one for key, one in data.items() if one not in (None, {}) or key not in known}


class Tls(_Section):
    """The fields of `tls_server_config`; files as absolute paths once they are read."""

    cert_file: str
    key_file: str
    client_auth_type: Literal[
        "NoClientCert",
        "RequestClientCert",
        "VerifyClientCertIfGiven",
        "RequireAndVerifyClientCert",
    ] = "NoClientCert"
    client_ca_file: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    max_version: Version = "TLS13"
    min_version: Version = "TLS12"

    @property
    def verify(self) -> ssl.VerifyMode:
        """Which certificate clients must show."""
        return _CLIENT_AUTH[self.client_auth_type]

    @field_validator("client_ca_file", "client_allowed_sans", "min_version")
    @classmethod
    def _fit(cls, value: object, info: ValidationInfo) -> object:
        mode = _CLIENT_AUTH[info.data.get("client_auth_type", "NoClientCert")]
        unverified = {"client_ca_file": ssl.CERT_NONE, "client_allowed_sans": ssl.CERT_OPTIONAL}
        name = info.field_name or ""
        if name == "client_ca_file" and not value and mode is not ssl.CERT_NONE:
            raise PydanticCustomError("missing", "missing")
        if value and mode <= unverified.get(name, -1):
            raise PydanticCustomError("unverified", "needs a client_auth_type")
        if name == "min_version" and str(value) > info.data.get("max_version", "TLS13"):
            raise PydanticCustomError("order", "above max_version")
        return value


class _Http(_Section):
    http2: Literal[False] = False
    headers: dict[Header, Annotated[str, StringConstraints(pattern=r"^[ -~]*$")]] = {}


class WebConfig(_Section):
    """A whole file."""

    tls_server_config: Tls | None = None
    http_server_config: _Http = _Http()
    basic_auth_users: dict[str, Annotated[str, StringConstraints(pattern=_BCRYPT)]] = {}

    @property
    def tls(self) -> Tls | None:
        """TLS; None: plain HTTP."""
        return self.tls_server_config

    @property
    def locked(self) -> bool:
        """Whether only users with a password or a verified certificate may read."""
        verified = self.tls is not None and self.tls.verify is ssl.CERT_REQUIRED
        return bool(self.basic_auth_users or verified)


_KNOWN: Mapping[str, Iterable[str]] = {
    "": WebConfig.model_fields,
    "tls_server_config": Tls.model_fields,
    "http_server_config": _Http.model_fields,
    "headers": get_args(Header),
}
_HINTS = {
    "basic_auth_users": "`htpasswd -nBC 10 '' | tr -d ':\\n'` asks for the password and prints"
    " its hash",
    "cert_file": "name a PEM file",
    "key_file": "name a PEM file",
    "client_ca_file": "client_auth_type: RequireAndVerifyClientCert",
}


def read(path: str) -> WebConfig:
    """Return the settings in a file, without opening the certificates that it names.

    Raises:
        InputError: a field is unknown or not supported, or its value is wrong. The message has file
            and field but no value, which may be a password.
    """
    data = _parse(path)
    if not isinstance(data, dict):
        hint = f"fields: {', '.join(WebConfig.model_fields)}"
        raise InputError("must be a mapping", field=path, hint=hint)
    try:
        config = WebConfig.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_input=False, include_url=False)
        # A wrong name also leaves the right one missing: report the former.
        raise _refusal(
            min(errors, key=lambda one: one["type"] != "extra_forbidden"), path
        ) from None
    if config.tls is None:
        return config
    folder = os.path.dirname(path)
    files = {
        key: os.path.join(folder, file)
        for key in ("cert_file", "key_file", "client_ca_file")
        if (file := getattr(config.tls, key))
    }
    return config.model_copy(update={"tls_server_config": config.tls.model_copy(update=files)})


def _refusal(error: ErrorDetails, path: str) -> InputError:
    where = [str(word) for word in error["loc"] if word != "[key]"]
    name, message, hint = where[-1], error["msg"], ""
    unknown_header = where[-2:-1] == ["headers"] and error["type"] == "literal_error"
    if error["type"] == "extra_forbidden" or unknown_header:
        known = list(_KNOWN.get(where[-2] if len(where) > 1 else "", ()))
        message = "unknown or not supported"
        hint = did_you_mean(name, known) or f"supported: {', '.join(known)}"
    elif error["type"] == "missing":
        message, hint = "missing", "name a PEM file"
    elif where[0] == "basic_auth_users":
        message, hint = "not a bcrypt hash", _HINTS["basic_auth_users"]
    else:
        hint = _HINTS.get(name, "")
    return InputError(message, field=f"{path}: {'.'.join(where)}", hint=hint)


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
        return YAML(typ="safe", pure=True).load(text) or {}
    except (YAMLError, ValueError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f"line {mark.line + 1}: " if mark else ""
        repeated = isinstance(error, DuplicateKeyError)
    message = "the same field twice" if repeated else "not valid YAML: expected FIELD: VALUE"
    hint = "indent with spaces, and close every quote, bracket and brace"
    raise InputError(f"{line}{message}", field=path, hint="" if repeated else hint)


def tls_context(tls: Tls, path: str) -> ssl.SSLContext:
    """Return a TLS context for connections of clients.

    Args:
        tls: of a `WebConfig`.
        path: the web-config file, for messages.

    Raises:
        InputError: a file cannot be read, or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.num_tickets = 0  # no resumed sessions: nobody needs their memory
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = tls.verify
    no_chain = message = "not a PEM file of certificates"
    key = "cert_file"
    try:
        # Loaded separately, so that an error names the right file.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(tls.cert_file)
        key, message = "key_file", "not a private key of cert_file without a password"
        # An empty password prevents a prompt on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, password=str)
        key, message = "client_ca_file", no_chain
        if tls.client_ca_file:
            context.load_verify_locations(tls.client_ca_file)
    except (OSError, ValueError) as error:
        if not isinstance(error, ssl.SSLError):
            message = f"cannot be read: {getattr(error, 'strerror', error)}"
        field = f"{path}: tls_server_config.{key}"
        raise InputError(message, field=field, value=getattr(tls, key)) from None
    return context


def main(argv: list[str]) -> int:
    """Print the demands of the file in `argv` on clients, and return the exit status."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m hpml_exporters.web.config FILE\n")
        return _EXIT_USAGE
    summary: Mapping[str, object]
    try:
        config = read(argv[0])
        summary = {"locked": config.locked, "tls": config.tls is not None}
    except InputError as error:
        # `hpml check` adds the file's name
        summary = {"error": str(error).removeprefix(f"{argv[0]}: "), "hint": error.hint}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# Where the server listens: ADDRESS:PORT, parsed, resolved and bound.

_FORM = re.compile(r"(?:\[([^][/ ]+)\]|([^][:/ ]*)):([0-9]{1,5})")
_HINT = "ADDRESS:PORT, such as 127.0.0.1:9445, [::1]:9445, or :9445 for all addresses"
_PORT_MAX = 65535
_BACKLOG = 256
_SEND_BYTES, _RECEIVE_BYTES = 256 * 1024, 32 * 1024


def split(listen: str) -> tuple[str, int]:
    """Return host and port of ADDRESS:PORT; an empty host means all addresses.

    >>> split("[::1]:9445"), split("node1:0"), split(":9445")
    (('::1', 9445), ('node1', 0), ('', 9445))

    Raises:
        InputError: it has another form.
    """
    match = _FORM.fullmatch(listen)
    if not match or int(match[3]) > _PORT_MAX:
        raise InputError("not an address with a port", field="listen", value=listen, hint=_HINT)
    return match[1] or match[2], int(match[3])


def listen_on(listen: str, *, any_port: bool = False) -> socket.socket:
    """Return a non-blocking socket that listens.

    Args:
        listen: ADDRESS:PORT.
        any_port: if the port is in use, listen on a free one.

    Raises:
        InputError: the address is wrong, not of this machine, in use, or not permitted.
    """
    host, port = split(listen)
    try:
        try:
            return _bound(host, port)
        except OSError as error:
            if not (any_port and error.errno == errno.EADDRINUSE):
                raise
            return _bound(host, 0)
    except (OSError, UnicodeError) as error:
        number = 0 if isinstance(error, (socket.gaierror, UnicodeError)) else error.errno or 0
    hint = {
        errno.EADDRINUSE: f"another port; `ss -ltnp 'sport = :{port}'` shows who uses this one",
        errno.EADDRNOTAVAIL: "use an address of this machine; `ip address` lists them",
        errno.EACCES: "use a port from 1024 on",
    }.get(number, _HINT)
    why = os.strerror(number) if number else f"{host}: unknown host name"
    raise InputError(why, field="listen", value=listen, hint=hint)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address, IPv4 first, or on all of IPv6 and IPv4."""
    family, address = socket.AF_INET6, ("::", port)
    if host:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)  # type: ignore[assignment]
    elif not socket.has_dualstack_ipv6():
        family, address = socket.AF_INET, ("", port)
    listener = socket.create_server(
        address,
        family=family,
        backlog=_BACKLOG,
        dualstack_ipv6=not host and family == socket.AF_INET6,
    )
    # Accepted connections inherit both: a slow client's unread data stay small.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    listener.setblocking(False)
    return listener
