"""Digests of staged data: XXH3-128 where the interpreter has xxhash, else BLAKE2b with 128 bits.

The node agent runs without site-packages; xxhash is loaded from those of its interpreter anyway.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple, Protocol, Union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

DIGEST_BYTES = 16
Buffer = Union[bytes, bytearray, memoryview]


class Digest(Protocol):
    """A digest under construction, as in hashlib."""

    def update(self, data: Buffer, /) -> object:
        """Take more data."""

    def digest(self) -> bytes:
        """Return the 16 bytes."""


class Hashing(NamedTuple):
    """A way to hash; `name` is "xxh3_128" or "blake2b_128"."""

    name: str
    new: Callable[[], Digest]


def _blake2b() -> Digest:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


@functools.cache
def hashing() -> Hashing:
    """Return the fastest hashing that this interpreter has."""
    return hashing_named("xxh3_128") or Hashing("blake2b_128", _blake2b)


def hashing_named(name: str) -> Hashing | None:
    """Return a hashing by its name; None if this interpreter does not have it."""
    if name == "blake2b_128":
        return Hashing(name, _blake2b)
    module = _xxhash()
    return Hashing(name, module.xxh3_128) if name == "xxh3_128" and module else None


def hashed(blocks: Iterable[Buffer], how: Hashing) -> bytes:
    """Return the digest of blocks of bytes."""
    digest = how.new()
    for data in blocks:
        digest.update(data)
    return digest.digest()


def _xxhash() -> ModuleType | None:
    try:
        return importlib.import_module("xxhash")
    except ImportError:
        pass
    # The agent runs with -S, so sys.path has no site-packages. Only this one package is loaded from
    # there: the rest of the user's environment stays out of the agent.
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [f"{prefix}/{lib}/{version}/site-packages" for lib in ("lib", "lib64")]
    spec = importlib.machinery.PathFinder.find_spec("xxhash", places)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as the import system does: the package imports its own parts.
    sys.modules["xxhash"] = module
    try:
        spec.loader.exec_module(module)
    except ImportError:  # built for another Python
        del sys.modules["xxhash"]
        return None
    return module
