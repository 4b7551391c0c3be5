"""Two settings of OpenSSL that Python's `ssl` has no word for.

Asking for a certificate that nobody checks, and several curves in order (before Python 3.15). Both
are functions of the very OpenSSL that `ssl` runs on; where its names cannot be reached (an
interpreter with OpenSSL built in), the setting is refused.
"""

from __future__ import annotations

import ctypes
import ssl
import sys

__all__ = ["NotReachableError", "accept_any_certificate", "set_curves"]

_SET_GROUPS_LIST = 92  # SSL_CTRL_SET_GROUPS_LIST, openssl/ssl.h
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class NotReachableError(Exception):
    """This interpreter does not show the functions of its OpenSSL."""


def _accept(_store: int | None, _argument: int | None) -> int:
    """Take every chain of certificates."""
    return 1


_ACCEPT = _CALLBACK(_accept)  # kept for ever: OpenSSL holds its address


def accept_any_certificate(context: ssl.SSLContext) -> None:
    """Make a context that asks for certificates take every one without a look at who signed it.

    Raises:
        NotReachableError: it cannot be said to this OpenSSL.
    """
    library, pointer = _reach(context)
    library.SSL_CTX_set_cert_verify_callback(pointer, _ACCEPT, None)


def set_curves(context: ssl.SSLContext, names: list[str]) -> bool:
    """Set the curves of the key exchange in order of preference; return whether all are known.

    Raises:
        NotReachableError: it cannot be said to this OpenSSL.
    """
    library, pointer = _reach(context)
    return bool(library.SSL_CTX_ctrl(pointer, _SET_GROUPS_LIST, 0, ":".join(names).encode()))


def _reach(context: ssl.SSLContext) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return OpenSSL and its own context: the first field after the head of Python's object.

    Raises:
        NotReachableError: no such function, or what is found there is not that context.
    """
    try:
        library = ctypes.CDLL(getattr(sys.modules["_ssl"], "__file__", None))
        library.SSL_CTX_get_options.restype = ctypes.c_uint64
        library.SSL_CTX_get_options.argtypes = [ctypes.c_void_p]
        library.SSL_CTX_ctrl.restype = ctypes.c_long
        library.SSL_CTX_ctrl.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_char_p
        ]  # fmt: skip
        library.SSL_CTX_set_cert_verify_callback.restype = None
        library.SSL_CTX_set_cert_verify_callback.argtypes = [
            ctypes.c_void_p, _CALLBACK, ctypes.c_void_p
        ]  # fmt: skip
    except (AttributeError, OSError) as error:
        raise NotReachableError(str(error)) from None
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    mask = (1 << 32) - 1
    if not pointer.value or (library.SSL_CTX_get_options(pointer) ^ context.options) & mask:
        raise NotReachableError("Python's object is laid out in another way")
    return library, pointer
