"""The settings of a running server: loaded from a web-config file, and again when it changes."""

from __future__ import annotations

import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpml_exporters.web.config import WebConfig, read, tls_context
from hpml_exporters.web.limits import Counters
from hpml_orchestrator.errors import InputError

__all__ = ["Settings", "Watcher", "load"]

_LOOKS_BEFORE_RETRY = 15
_NEVER = float("inf")
Stamp = tuple[object, ...]


@dataclass(frozen=True)
class Settings:
    """What a server applies.

    Attributes:
        config: what the file says.
        context: None: plain HTTP.
        files: the web-config file and the certificates that it names.
        stamp: the state of these files before they were read.
    """

    config: WebConfig = field(default_factory=WebConfig)
    context: ssl.SSLContext | None = None
    files: tuple[str, ...] = ()
    stamp: Stamp = ()


def load(path: str) -> Settings:
    """Return the settings of a file, with its certificates loaded.

    Raises:
        InputError: a value, or a file that it names, is wrong.
    """
    stamp = _stamp([path])  # before reading, so that a change meanwhile is seen as one
    config = read(path)
    if config.tls is None:
        return Settings(config, None, (path,), stamp)
    files = tuple(config.tls.files.values())
    stamp += _stamp(files)
    return Settings(config, tls_context(config.tls, path), (path, *files), stamp)


class Watcher:
    """Reloads a file when it, or a certificate that it names, changes; in a thread of its own.

    A file system that hangs delays the reload and nothing else. A file that cannot be used, or that
    would let in clients which the settings before kept out, is counted once and has no effect: a
    file caught half-written looks like that. Files are loaded once they did not change for a while.
    """

    def __init__(
        self,
        settings: Settings,
        seconds: float,
        changed: Callable[[Settings], None],
        counters: Counters,
    ) -> None:
        """Prepare.

        Args:
            settings: loaded at the start.
            seconds: between two looks.
            changed: gets new settings, in the watcher's thread.
            counters: of the server; changes that could not be used are counted there.
        """
        self._settings = settings
        self._seconds = seconds
        self._changed = changed
        self._counters = counters
        self._seen = self._tried = settings.stamp
        self._retry_at = _NEVER
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
            stamp = _stamp(self._settings.files)
            settled, self._seen = stamp == self._seen, stamp
            is_new = stamp != self._tried
            if settled and (is_new or time.monotonic() >= self._retry_at):
                self._tried = stamp
                self._reload(is_new=is_new)

    def _reload(self, *, is_new: bool) -> None:
        """Load the file and hand it over; a failure is counted if the files are new."""
        try:
            settings = load(self._settings.files[0])
            _refuse_weaker(self._settings, settings)
        except Exception as error:  # noqa: BLE001 - the file may be mended next time
            # what it lacks may be a file that is not watched: try again, and count no more
            self._retry_at = time.monotonic() + _LOOKS_BEFORE_RETRY * self._seconds
            message = f"{error}; the previous settings are kept"
            if is_new:
                self._counters.reload_failures += 1
            if message != self._message:
                self._message = message
                print(f"hpml export: {message}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._settings, self._tried = settings, settings.stamp
            self._retry_at, self._message = _NEVER, ""
            self._changed(settings)


def _refuse_weaker(old: Settings, new: Settings) -> None:
    """Refuse a change that lets in clients which were kept out before.

    Raises:
        InputError: it would.
    """
    before, after = old.config.tls, new.config.tls
    relaxed = {
        "tls_server_config": before is not None and after is None,
        "basic_auth_users": bool(old.config.users) and not new.config.users,
    }
    if before and after:
        relaxed |= {
            "client_auth_type": after.verify_mode < before.verify_mode,
            "client_allowed_sans": bool(before.client_allowed_sans)
            and not after.client_allowed_sans,
            "min_version": after.min_version < before.min_version,
        }
    for name, is_relaxed in relaxed.items():
        if is_relaxed:
            hint = "restart the exporter if this is intended"
            where = f"{new.files[0]}: {name}"
            raise InputError("cannot be relaxed while running", field=where, hint=hint)


def _stamp(files: Sequence[str]) -> Stamp:
    """Return what differs whenever one of the files was changed."""
    stamp: list[object] = []
    for file in files:
        try:
            stat = os.stat(file)
        except (OSError, ValueError) as error:
            stamp.append(getattr(error, "errno", None))
        else:
            stamp.append((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(stamp)
