"""The web-config file of Prometheus' exporters: TLS, users and headers, reloaded when it changes.

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpml_orchestrator.errors import InputError, did_you_mean

__all__ = ["Settings", "TlsConfig", "Watcher", "WebConfig", "load", "main", "read"]

_TLS, _HTTP, _USERS = "tls_server_config", "http_server_config", "basic_auth_users"
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # whoever shows any certificate, or none, may read
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
# Fields of the format that are refused, and why they are not needed.
_UNSUPPORTED = {
    f"{_TLS}.cert": "use cert_file",
    f"{_TLS}.key": "use key_file",
    f"{_TLS}.client_ca": "use client_ca_file",
    f"{_TLS}.cipher_suites": "leave it out: OpenSSL's defaults apply",
    f"{_TLS}.curve_preferences": "leave it out: OpenSSL's defaults apply",
    f"{_TLS}.prefer_server_cipher_suites": "leave it out: OpenSSL's defaults apply",
    "rate_limit": "leave it out: the server limits connections and handshakes by itself",
}
_BCRYPT = re.compile(r"\$2[abxy]?\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NULL = frozenset({"", "~", "null"})
_MOST_BYTES = 1 << 20
_LOOKS_BEFORE_RETRY = 15
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

    cert_file: str
    key_file: str
    client_ca_file: str = ""
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """Whether clients must show a certificate."""
        return _CLIENT_AUTH[self.client_auth_type]


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


@dataclass(frozen=True)
class Settings:
    """What a server applies: a file, its TLS context, and the state of all files read."""

    config: WebConfig = field(default_factory=WebConfig)
    context: ssl.SSLContext | None = None
    files: tuple[str, ...] = ()
    stamp: Sequence[object] = ()


def load(path: str) -> Settings:
    """Return the settings of a file, with its certificates loaded.

    Raises:
        InputError: a value, or a file that it names, is wrong.
    """
    stamp = _stamp([path])  # before reading, so that a change meanwhile is seen as one
    config = read(path)
    tls = config.tls
    named = [tls.cert_file, tls.key_file, tls.client_ca_file] if tls else []
    named = [file for file in named if file]
    stamp += _stamp(named)
    context = _context(tls) if tls else None
    return Settings(config, context, (path, *named), stamp)


def read(path: str) -> WebConfig:
    """Return what a file says, without opening the certificates that it names.

    Raises:
        InputError: a field is unknown or not supported, or its value is wrong.
    """
    data = _Section("", _parse(path))
    data.refuse_unknown([_TLS, _HTTP, _USERS])
    return WebConfig(
        tls=_tls(data.section(_TLS), os.path.dirname(path)),
        users=_users(data.section(_USERS)),
        headers=_headers(data.section(_HTTP)),
    )


class _Section:
    """A mapping of the file; its errors name the whole field."""

    def __init__(self, name: str, data: Any) -> None:
        """Take a mapping.

        Raises:
            InputError: it is something else.
        """
        self.name = name
        if isinstance(data, str) and data in _NULL:
            data = {}
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise InputError("must be a mapping", field=name or "web_config")
        self.data: dict[str, Any] = data

    def field(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def section(self, key: str) -> _Section:
        return _Section(self.field(key), self.data.get(key, {}))

    def text(self, key: str, default: str = "", choices: Sequence[str] = ()) -> str:
        """Return a text.

        Raises:
            InputError: it is something else, or not one of the choices.
        """
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise InputError("must be a text", field=self.field(key))
        value = default if value in _NULL else value
        if choices and value not in choices:
            hint = did_you_mean(value, choices) or f"one of {', '.join(choices)}"
            raise InputError("not supported", field=self.field(key), value=value, hint=hint)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.data.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InputError("must be a list of texts", field=self.field(key))
        return tuple(values)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Refuse fields that are unknown, or known and not supported.

        Raises:
            InputError: there is one.
        """
        for key in self.data:
            where = self.field(key)
            if where in _UNSUPPORTED:
                raise InputError("not supported", field=where, hint=_UNSUPPORTED[where])
            if key not in known:
                hint = did_you_mean(key, known) or f"one of {', '.join(known)}"
                raise InputError("unknown field", field=where, hint=hint)


def _parse(path: str) -> Any:
    """Return the content of a YAML file, every scalar as text.

    Raises:
        InputError: it cannot be read or parsed. Its text is not shown, as it holds secrets.
    """
    from ruamel.yaml import YAML  # noqa: PLC0415 - only where there is a file
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - as above

    try:
        with open(path, "rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise InputError(why, field="web_config", value=path) from None
    if len(text) > _MOST_BYTES:
        raise InputError("longer than 1 MiB", field="web_config", value=path)
    try:
        return YAML(typ="base", pure=True).load(text) or {}
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        message = line + _QUOTED.sub("…", (error.problem or "not YAML").splitlines()[0])
    except (YAMLError, ValueError, RecursionError):
        message = "not YAML"
    raise InputError(message, field="web_config", value=path)


def _tls(section: _Section, folder: str) -> TlsConfig | None:
    """Return the settings of TLS; None where the section is empty.

    Raises:
        InputError: a value is wrong or missing.
    """
    section.refuse_unknown(list(TlsConfig.__dataclass_fields__))
    if not section.data:
        return None
    files = {}
    for key in ("cert_file", "key_file", "client_ca_file"):
        file = section.text(key)
        files[key] = os.path.join(folder, file) if file else ""
    tls = TlsConfig(
        **files,
        client_auth_type=section.text("client_auth_type", "NoClientCert", list(_CLIENT_AUTH)),
        client_allowed_sans=section.texts("client_allowed_sans"),
        min_version=section.text("min_version", "TLS12", list(_VERSIONS)),
        max_version=section.text("max_version", "TLS13", list(_VERSIONS)),
    )
    if tls.min_version > tls.max_version:
        raise InputError("above max_version", field=section.field("min_version"), value="TLS13")
    verifies = tls.verify_mode is not ssl.CERT_NONE
    missing = [key for key in ("cert_file", "key_file") if not files[key]]
    if verifies and not tls.client_ca_file:
        missing.append("client_ca_file")
    if missing:
        raise InputError("missing", field=section.field(missing[0]), hint="name a PEM file")
    strict = tls.verify_mode is ssl.CERT_REQUIRED
    for key, has_effect in (("client_ca_file", verifies), ("client_allowed_sans", strict)):
        if key in section.data and not has_effect:
            hint = "client_auth_type: RequireAndVerifyClientCert"
            raise InputError("needs a client_auth_type", field=section.field(key), hint=hint)
    return tls


def _users(section: _Section) -> dict[str, bytes]:
    """Return bcrypt hashes by user.

    Raises:
        InputError: a value is not a hash. It is not shown: it may be the password itself.
    """
    for user, value in section.data.items():
        if not isinstance(value, str) or not _BCRYPT.fullmatch(value):
            hint = "`htpasswd -nBC 10 '' | tr -d ':\\n'` asks for the password and prints its hash"
            raise InputError("not a bcrypt hash", field=section.field(user), hint=hint)
    return {user: value.encode() for user, value in section.data.items()}


def _headers(section: _Section) -> tuple[str, ...]:
    """Return the lines that are added to every response.

    Raises:
        InputError: a header cannot be set, or HTTP/2 is asked for.
    """
    section.refuse_unknown(["http2", "headers"])
    section.text("http2", "false", ["false"])
    headers = section.section("headers")
    headers.refuse_unknown(_HEADERS)
    lines = {key: headers.text(key) for key in headers.data}
    for key, value in lines.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError("must be one line of ASCII", field=headers.field(key), value=value)
    return tuple(f"{key}: {value}" for key, value in lines.items() if value)


def _context(tls: TlsConfig) -> ssl.SSLContext:
    """Return a TLS context for connections of clients.

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
    for key in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, key)
        try:
            if path:
                with open(path, "rb"):
                    pass
        except OSError as error:
            raise InputError(str(error.strerror), field=f"{_TLS}.{key}", value=path) from None
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
    except (ssl.SSLError, _LockedKeyError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        wrong_key = mismatch or isinstance(error, _LockedKeyError)
        key = "key_file" if wrong_key else "cert_file"
        message = "does not belong to cert_file" if mismatch else f"cannot be used: {error}"
        value = getattr(tls, key)
        raise InputError(message, field=f"{_TLS}.{key}", value=value) from None
    context.verify_mode = tls.verify_mode
    if tls.client_ca_file:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except ssl.SSLError as error:
            message, value = f"cannot be used: {error}", tls.client_ca_file
            raise InputError(message, field=f"{_TLS}.client_ca_file", value=value) from None
    return context


class _LockedKeyError(Exception):
    """A private key has a password."""


def _no_password() -> str:
    """Refuse to ask a terminal for a password.

    Raises:
        _LockedKeyError: always.
    """
    raise _LockedKeyError("the private key has a password")


class Watcher:
    """Reloads a file when it, or a certificate that it names, changes; in a thread of its own.

    A file system that hangs holds up the reload and nothing else. A file that cannot be used, or
    that would let in clients that the settings before kept out, is counted and has no effect: a
    file caught half-written looks like that.
    """

    def __init__(
        self,
        settings: Settings,
        seconds: float,
        changed: Callable[[Settings], None],
        failed: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            settings: loaded at the start.
            seconds: between two looks.
            changed: gets new settings, in the watcher's thread.
            failed: called for each file that could not be used, in the watcher's thread.
        """
        self._settings = settings
        self._seconds = seconds
        self._changed = changed
        self._failed = failed
        self._seen = settings.stamp
        self._retry_at = float("inf")
        self._message = ""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="web-config", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the file may be mended next time
                self._retry_at = time.monotonic() + _LOOKS_BEFORE_RETRY * self._seconds
                self._failed()
                message = f"{self._settings.files[0]}: {error}; the previous settings are kept"
                if message != self._message:
                    self._message = message
                    print(f"hpml export: {message}", file=sys.stderr, flush=True)  # noqa: T201

    def _look(self) -> None:
        """Reload if something changed, or if it is time to try a refused file again.

        Raises:
            InputError: the file cannot be used.
        """
        stamp = _stamp(self._settings.files)
        if stamp == self._seen and time.monotonic() < self._retry_at:
            return
        self._seen = stamp
        settings = load(self._settings.files[0])
        _refuse_weaker(self._settings.config, settings.config)
        self._settings, self._seen = settings, settings.stamp
        self._retry_at, self._message = float("inf"), ""
        self._changed(settings)


def _refuse_weaker(before: WebConfig, after: WebConfig) -> None:
    """Refuse a change that lets in clients which were kept out before.

    Raises:
        InputError: it would.
    """
    weaker = []
    if (before.tls is None) != (after.tls is None):
        weaker.append(_TLS)
    if before.users and not after.users:
        weaker.append(_USERS)
    if before.tls and after.tls:
        if after.tls.verify_mode < before.tls.verify_mode:
            weaker.append(f"{_TLS}.client_auth_type")
        if before.tls.client_allowed_sans and not after.tls.client_allowed_sans:
            weaker.append(f"{_TLS}.client_allowed_sans")
        if after.tls.min_version < before.tls.min_version:
            weaker.append(f"{_TLS}.min_version")
    if weaker:
        hint = "restart the exporter if this is intended"
        raise InputError("cannot be relaxed while running", field=weaker[0], hint=hint)


def _stamp(files: Sequence[str]) -> list[object]:
    """Return what differs whenever one of the files was changed."""
    stamp: list[object] = []
    for file in files:
        try:
            found = os.stat(file)
        except OSError as error:
            stamp.append(error.errno)
        else:
            stamp.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return stamp


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
        summary = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
