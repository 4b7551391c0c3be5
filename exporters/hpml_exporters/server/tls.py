"""A TLS context as the web-config file describes it."""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hpml_exporters.server.regular import open_regular
from hpml_exporters.server.web_config import TlsConfig
from hpml_orchestrator.errors import InputError

__all__ = ["allowed", "context_of"]

_NAME = "tls_server_config"
_VERSION = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_OLD = frozenset({"TLS10", "TLS11"})
_DEFAULT_WITH_OLD = "ECDHE+AESGCM:ECDHE+CHACHA20:ECDHE+AES:RSA+AES:!aNULL:!eNULL"
_ASKS = {
    "NoClientCert": ssl.CERT_NONE,
    # Whoever shows none, or any, gets in: not asking lets the same clients in.
    "RequestClientCert": ssl.CERT_NONE,
    "RequireAnyClientCert": ssl.CERT_REQUIRED,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


def context_of(tls: TlsConfig) -> ssl.SSLContext:
    """Return a context for connections of clients.

    Raises:
        InputError: a file cannot be read or is not what it should be, or a setting cannot be made.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TLS 1.0 and 1.1, on demand
        context.minimum_version = _VERSION[tls.min_version]
        context.maximum_version = _VERSION[tls.max_version]
    # Every connection is checked anew: no session outlives a change of users' certificates.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    _choose_ciphers(context, tls)
    _load_certificate(context, tls)
    _ask_clients(context, tls)
    if tls.curve_preferences:
        _choose_curves(context, tls.curve_preferences)
    return context


def allowed(connection: ssl.SSLSocket, names: tuple[str, ...]) -> bool:
    """Return whether a client's certificate has one of the names; all are, where none are given."""
    if not names:
        return True
    shown: dict[str, object] = dict(connection.getpeercert() or {})
    alternatives = shown.get("subjectAltName", ())
    if not isinstance(alternatives, tuple):
        return False
    wanted = {_same_address(name) for name in names}
    return any(
        (_same_address(value.strip()) if kind == "IP Address" else value) in wanted
        for kind, value in alternatives
        if kind in {"DNS", "email", "IP Address", "URI"}
    )


def _same_address(name: str) -> str:
    """Return an address of IPv6 in its shortest form, and everything else as it is."""
    if ":" not in name:
        return name
    import ipaddress  # noqa: PLC0415 - rarely needed

    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def _choose_ciphers(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Set suites, and whose order of them counts.

    Raises:
        InputError: OpenSSL has none of them.
    """
    chosen = ":".join(tls.cipher_suites or ())
    if (
        tls.min_version in _OLD
    ):  # OpenSSL 3 counts their signatures as too weak on every other level
        chosen = f"{chosen or _DEFAULT_WITH_OLD}:@SECLEVEL=0"
    if chosen:
        try:
            context.set_ciphers(chosen)
        except ssl.SSLError:
            words = f"this OpenSSL ({ssl.OPENSSL_VERSION}) has none of them"
            raise InputError(words, field=f"{_NAME}.cipher_suites", value=chosen) from None
    if tls.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE


def _choose_curves(context: ssl.SSLContext, curves: tuple[str, ...]) -> None:
    """Set the curves of the key exchange.

    Raises:
        InputError: OpenSSL does not know one, or cannot be told.
    """
    from hpml_exporters.server import openssl  # noqa: PLC0415 - ctypes, for those who ask

    try:
        known = openssl.set_curves(context, list(curves))
    except openssl.NotReachableError as error:
        hint = f"leave it out: OpenSSL's own order is good ({error})"
        raise InputError(
            "this Python cannot set curves", field=f"{_NAME}.curve_preferences", hint=hint
        ) from None
    if not known:
        words = f"this OpenSSL ({ssl.OPENSSL_VERSION}) does not know all of them"
        raise InputError(words, field=f"{_NAME}.curve_preferences", value=", ".join(curves))


def _load_certificate(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Load certificate and key.

    Raises:
        InputError: one cannot be read, is none, or they do not belong together.
    """
    with (
        _readable(tls.cert_file, tls.cert, "cert", "CERTIFICATE") as cert,
        _readable(tls.key_file, tls.key, "key", "PRIVATE KEY") as key,
    ):
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or ""
            words, named = "this is no usable certificate and key", "cert"
            if reason == "KEY_VALUES_MISMATCH":
                words, named = "this key belongs to another certificate", "key"
            elif isinstance(error, ValueError):
                words, named = "the key is locked by a password", "key"
            elif reason:
                words = f"{words}: {reason.lower().replace('_', ' ')}"
            shown = getattr(tls, f"{named}_file") or None
            raise InputError(words, field=f"{_NAME}.{named}_file", value=shown) from None


def _no_password() -> str:
    """Refuse to ask a terminal for a password.

    Raises:
        ValueError: always.
    """
    raise ValueError("locked")


@contextmanager
def _readable(path: str, text: str, name: str, holds: str) -> Iterator[str]:
    """Give a path that can be read: the file's, or one in memory for a text of the web-config file.

    Raises:
        InputError: it cannot be read, or does not hold what it should.
    """
    made = -1
    where = f"{_NAME}.{name}_file" if path else f"{_NAME}.{name}"
    try:
        if path:
            with open_regular(path) as file:
                content = file.read()
        else:
            content = text.encode()
            made = os.memfd_create(name)
            os.write(made, content)
        if holds.encode() not in content:
            hint = f"a PEM file with -----BEGIN {holds}-----"
            raise InputError(
                f"there is no {holds.lower()} in it", field=where, value=path or None, hint=hint
            )
        yield path or f"/proc/self/fd/{made}"
    except OSError as error:
        why = error.strerror or "it cannot be read"
        raise InputError(why, field=where, value=path or None) from None
    finally:
        if made >= 0:
            os.close(made)


def _ask_clients(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Set which certificates clients show, and who signs them.

    Raises:
        InputError: a file is wrong, or this interpreter cannot do it.
    """
    context.verify_mode = _ASKS[tls.client_auth_type]
    if tls.client_ca_file or tls.client_ca:
        with _readable(tls.client_ca_file, tls.client_ca, "client_ca", "CERTIFICATE") as path:
            try:
                context.load_verify_locations(path)
            except ssl.SSLError as error:
                words = f"this is no usable certificate: {error.reason}"
                shown = tls.client_ca_file or None
                raise InputError(words, field=f"{_NAME}.client_ca_file", value=shown) from None
    elif "Verify" in tls.client_auth_type:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    if tls.client_auth_type == "RequireAnyClientCert":
        from hpml_exporters.server import openssl  # noqa: PLC0415 - ctypes, for those who ask

        try:
            openssl.accept_any_certificate(context)
        except openssl.NotReachableError as error:
            hint = f"RequireAndVerifyClientCert, which is safe besides ({error})"
            raise InputError(
                "this Python cannot ask for certificates without checking them",
                field=f"{_NAME}.client_auth_type",
                value=tls.client_auth_type,
                hint=hint,
            ) from None
