"""What a web-config file makes of the server, and its reading again when it or its files change."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_exporters.server.counters import Counters
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    import ssl

    from hpml_exporters.server.web_config import RateLimit

__all__ = ["Settings", "Watch", "load"]

Stamp = tuple[object, ...]
_LOOKS_BEFORE_RETRY = 15
"""A refused file is read again after so many looks: what it lacked may be there now."""


@dataclass(frozen=True)
class Settings:
    """Settings that can change while the server runs.

    Attributes:
        context: of TLS; nothing: plain HTTP.
        names: of which a client's certificate has one; empty: any.
        users: bcrypt hashes by name; empty: everybody may read.
        headers: lines that are added to every answer.
        rate_limit: nothing: no limit.
        files: that all of this was read from.
        stamp: of the files as they were when they were read.
        warnings: for whoever wrote them.
    """

    context: ssl.SSLContext | None = None
    names: tuple[str, ...] = ()
    users: dict[str, bytes] = field(default_factory=dict, repr=False)
    headers: tuple[str, ...] = ()
    rate_limit: RateLimit | None = None
    files: tuple[str, ...] = ()
    stamp: Stamp = ()
    warnings: tuple[str, ...] = ()


def load(path: str) -> Settings:
    """Return the settings of a web-config file; the plainest ones for no file.

    Raises:
        InputError: a value of it, or a file that it names, is wrong.
    """
    if not path:
        return Settings()
    from hpml_exporters.server import web_config  # noqa: PLC0415 - for those who have a file

    stamp = _stamp((path,))  # before the reading: a change in between is seen as one
    config = web_config.read(path)
    stamp += _stamp(config.files[1:])
    context: ssl.SSLContext | None = None
    names: tuple[str, ...] = ()
    if config.tls:
        from hpml_exporters.server import tls  # noqa: PLC0415 - OpenSSL, for those who have TLS

        context, names = tls.context_of(config.tls), config.tls.client_allowed_sans
    return Settings(
        context=context,
        names=names,
        users=config.users,
        headers=config.headers,
        rate_limit=config.rate_limit,
        files=config.files,
        stamp=stamp,
        warnings=config.warnings,
    )


class Watch:
    """Reads the settings again when a file of them changed, in a thread of its own.

    Files may lie on a file system that hangs; scrapes go on with what was read before.
    """

    def __init__(
        self, path: str, seconds: float, counters: Counters, changed: Callable[[Settings], None]
    ) -> None:
        """Prepare.

        Args:
            path: of the web-config file.
            seconds: between two looks.
            counters: where failures are counted.
            changed: gets new settings, in the thread that looks.
        """
        self._path = path
        self._seconds = seconds
        self._counters = counters
        self._changed = changed
        self._ended = threading.Event()
        self._settings = Settings()
        self._seen: Stamp = ()
        self._looks_left = 0
        self._refusal = ""

    def first(self) -> Settings:
        """Return the first settings.

        Raises:
            InputError: they are wrong.
        """
        self._settings = load(self._path)
        self._seen = self._settings.stamp
        for warning in self._settings.warnings:
            _say(f"{self._path}: {warning}")
        return self._settings

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="web-config", daemon=True).start()

    def stop(self) -> None:
        """End the looking."""
        self._ended.set()

    def _run(self) -> None:
        """Look until told otherwise."""
        while not self._ended.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Read again where something changed; keep what there is where that is of no use."""
        stamp = _stamp(self._settings.files)
        if self._looks_left:
            self._looks_left -= 1
        if stamp == self._seen and self._looks_left != 1:
            return
        self._seen = stamp
        try:
            settings = load(self._path)
            self._check_open_doors(settings)
        except InputError as error:
            self._refuse(str(error))
            return
        for warning in settings.warnings:
            _say(f"{self._path}: {warning}")
        self._looks_left, self._refusal = 0, ""
        self._settings = settings
        self._seen = settings.stamp
        self._changed(settings)

    def _refuse(self, words: str) -> None:
        """Say once why a changed file is of no use, and look at it again after a while."""
        self._looks_left = _LOOKS_BEFORE_RETRY
        self._counters.reload_failures += 1
        if words != self._refusal:
            self._refusal = words
            _say(f"{self._path}: {words}; the settings before it stay")

    def _check_open_doors(self, settings: Settings) -> None:
        """Refuse a change that takes the locks off: a file caught half-written reads like one.

        Raises:
            InputError: TLS comes or goes, or the last user goes.
        """
        hint = "start the exporter again if that is meant"
        if (settings.context is None) != (self._settings.context is None):
            words = "TLS is switched on and off at the start alone"
            raise InputError(words, field="tls_server_config", hint=hint)
        if self._settings.users and not settings.users:
            raise InputError("all users are gone", field="basic_auth_users", hint=hint)


def _stamp(files: tuple[str, ...]) -> Stamp:
    """Return what changes whenever one of the files does."""
    found: list[object] = []
    for path in files:
        try:
            seen = os.stat(path)
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(
                (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
            )
    return tuple(found)


def _say(words: str) -> None:
    """Write one line for whoever runs the exporter."""
    print(f"hpml export: {words}", file=sys.stderr, flush=True)  # noqa: T201
