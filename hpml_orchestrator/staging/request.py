"""What to stage, the results, and the errors of staging."""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.job import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# File system faults: which are retried, and how they are reported.

T = TypeVar("T")

PATHS_TOLD = 20
_PATH_CHARACTERS = 1000
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
OUTSIDE_LINKS = "outside_links: true (as an option --outside-links) takes links that leave the tree"
UNREADABLE = "ask its owner for access"
NO_ROOM_LEFT = "something else took the room that was free before; choose another target"
_WRITTEN = "if the source is being written, stage it when it is complete"
_FIRST_DELAY_SECONDS = 0.1
_DELAYS = 6  # 6.3 s in total
_GIVEN_UP_SECONDS = 60.0


def links_hint(root: str, targets: Sequence[str]) -> str:
    """Return advice for links that leave a tree, given its real path and their targets."""
    hint = "follow_links: true (as an option --follow-links) copies what links lead to"
    hint += f"; {OUTSIDE_LINKS} as they are"
    if any(target.startswith("/") for target in targets):
        return hint  # absolute links are never allowed
    parent = os.path.commonpath([root, *(os.path.normpath(f"{root}/{one}") for one in targets)])
    told = f"; {shown(parent)} is above the links and what they lead to"
    return hint + told if parent.count("/") > 1 else hint


class StagingStopped(StagingError):  # noqa: N818 - an event, not a fault
    """Staging was stopped (SIGTERM, time limit); nothing was published."""

    def __init__(self) -> None:
        super().__init__("stopped")


class SourceChangedError(Exception):
    """The source has changed since it was scanned."""

    def __init__(self, how: str = "changed while it was copied") -> None:
        super().__init__(how)


def shown(path: str) -> str:
    """Return a path as one line of valid text; a very long one is abbreviated in the middle."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _PATH_CHARACTERS:
        return text
    half = _PATH_CHARACTERS // 2
    return f"{text[:half]}…{text[-half:]} ({len(text)} characters)"


def why(error: BaseException) -> str:
    """Return the reason of a fault, without the path: the caller adds that."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def is_directory(path: str) -> bool:
    """Return whether a path is a directory.

    Raises:
        StagingError: unknown, because this user may not enter a parent directory.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {shown(path)}: {why(error)}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return False


def request_error(name: str, source: str, error: BaseException) -> BaseException:
    """Convert an OSError or RecordError to an error about the request; return others unchanged."""
    if isinstance(error, (StagingError, InputError)):
        return error
    if isinstance(error, HpmlError):
        return StagingError(f"cannot stage {name}: {error}")
    if not isinstance(error, OSError):
        return error
    named = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = shown(os.fsdecode(named) or source)
    return StagingError(
        f"cannot stage {name} from {shown(source)}: {path}: {why(error)}",
        hint=UNREADABLE if isinstance(error, PermissionError) else "",
    )


class Retry:
    """Retries after transient faults: EIO, ESTALE, EAGAIN, EINTR; 0.1 s to 3.2 s apart.

    If a fault persists, nothing else is retried for a minute: a failing disk causes many faults,
    and the copy is lost in any case.
    """

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sleep = sleep
        self._should_stop = should_stop
        self._given_up = float("-inf")

    def stops(self) -> bool:
        """Return whether staging must stop."""
        return self._should_stop()

    def check_stop(self) -> None:
        """Raise StagingStopped if staging must stop."""
        if self._should_stop():
            raise StagingStopped

    def __call__(self, call: Callable[[], T]) -> T:
        """Call with retries and return the result; raises OSError if the fault persists."""
        try:
            return call()
        except OSError as error:
            return self.again(call, error)

    def again(self, call: Callable[[], T], fault: OSError) -> T:
        """Retry after a call's first fault; raises the fault if it is not transient."""
        delay = _FIRST_DELAY_SECONDS
        for _ in range(_DELAYS):
            # After one fault that outlasted all retries, later ones fail at once: 6.3 s for each of
            # a thousand unreadable files would delay the job for hours.
            if fault.errno not in TRANSIENT or time.monotonic() < self._given_up:
                raise fault
            self.check_stop()
            self.sleep(delay)
            self.check_stop()
            delay *= 2
            try:
                return call()
            except OSError as error:
                fault = error
        self._given_up = time.monotonic() + _GIVEN_UP_SECONDS
        raise fault

    def stopped_by(self, should_stop: Callable[[], bool]) -> Retry:
        """Return a copy with another stop condition."""
        return Retry(self.sleep, should_stop)


_HINTS = {
    os.strerror(errno.EACCES): UNREADABLE,
    os.strerror(errno.EPERM): UNREADABLE,
    os.strerror(errno.ENOENT): _WRITTEN,  # it existed when its directory was listed
    str(SourceChangedError()): _WRITTEN,
}
"""Hints by the text of a fault: workers in other processes report only text."""


class Problems:
    """Collects faults by path; reports the first 20 and the count."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._told: list[str] = []
        self._hints: dict[str, None] = {}  # an ordered set
        self._cause: BaseException | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._count > 0

    def add(
        self, path: str, reason: str, cause: BaseException | None = None, *, hint: str = ""
    ) -> None:
        """Record the fault of a path; safe from several threads.

        Args:
            path: path of the file.
            reason: the fault.
            cause: the error.
            hint: advice; for errors of the system it is looked up by the reason.
        """
        hint = hint or _HINTS.get(reason, "")
        with self._lock:
            if hint:
                self._hints[hint] = None
            self._count += 1
            self._cause = self._cause or cause
            if len(self._told) < PATHS_TOLD:
                self._told.append(f"{shown(path)}: {reason}")

    def raise_any(self, hint: str = "") -> None:
        """Raise one StagingError for all recorded faults, if any; `hint` replaces theirs."""
        if not self._count:
            return
        paths = "1 path" if self._count == 1 else f"{self._count} paths"
        lines = [f"{self._what}: {paths}", *self._told]
        if self._count > len(self._told):
            lines.append(f"and {self._count - len(self._told)} more")
        raise StagingError("\n  ".join(lines), hint=hint or "; ".join(self._hints)) from self._cause


Kind = Literal["auto", "file", "tree", "pack", "tar", "zip"]
AUTO = "auto"
IN_PLACE = "in place"
"""Method of data that is used in place."""

TREE_SHARD = "tree.tar"
"""Shard of a pack that holds its directories and links."""
_SHARD = re.compile(r"data-\d{5,}\.tar|" + re.escape(TREE_SHARD))
TAR_SUFFIXES = tuple(
    ".tar .tar.gz .tgz .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar.zst .tar.zstd .tzst".split()
)
SUFFIXES = {**dict.fromkeys(TAR_SUFFIXES, "tar"), ".zip": "zip"}
_WORDS = frozenset({AUTO, "shm", "local"})
_NAME_CHARACTERS = 31
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_JOB_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True)
class StageResult:
    """Staged data on the node.

    Attributes:
        name: name of the request.
        path: directory with the tree, the unpacked archive, or the single file.
        bytes: total size of its regular files, each inode counted once.
        files: number of its regular files, each name counted.
        seconds: wall time of this call, including waiting for another stager.
        method: how the data was brought here: "copy", "unpack", "chain" or IN_PLACE.
        reused: the data was already there; this call copied nothing.
        digest: digest of all names, sizes and contents, as "xxh3_128:<hex>"; "" without hashing.
        kept: it stays in the node's cache after the job.
        evicted: sources of kept data that was removed to make room.
        broken_links: number of symbolic links that are broken in the copy.
    """

    name: str
    path: str
    bytes: int
    files: int
    seconds: float
    method: str
    reused: bool
    digest: str = ""
    kept: bool = False
    evicted: tuple[str, ...] = ()
    broken_links: int = 0

    @property
    def warning(self) -> str:
        """A warning about broken links; empty if there are none."""
        text = f"{self.name}: links that lead nowhere in the copy: {self.broken_links}"
        text += f"; `find {shown(self.path)}/ -xtype l` lists them"
        return text if self.broken_links else ""

    @property
    def rate(self) -> float:
        """Bytes per second of this call; 0 if nothing was copied."""
        copied = not self.reused and self.method != IN_PLACE
        return self.bytes / self.seconds if copied and self.seconds else 0.0


@dataclass(frozen=True)
class Bases:
    """Directories of "shm" and "local" on this node; `local` is "" if there is none."""

    shm: str = "/dev/shm"  # noqa: S108 - the node's tmpfs is the point
    local: str = ""

    def resolve(self, target: str) -> str:
        """Return the base directory of a request's target.

        Raises:
            InputError: the node has no local directory, or the target is neither a keyword nor a
                path.
        """
        if target == "local" and not self.local:
            raise InputError(
                "this node has no local staging directory",
                field="target",
                value=target,
                hint="name one in the site profile, or use target shm or an absolute path",
            )
        base = {"shm": self.shm, "local": self.local}.get(target, target)
        if not os.path.isabs(base):
            raise InputError("must be an absolute path", field="target", value=base)
        return base


def check_job_key(job_key: str) -> None:
    """Refuse a job key that is not a plain, visible file name."""
    if not _JOB_KEY.fullmatch(job_key):
        raise InputError(
            "must begin with a letter or digit and hold only those and . _ + -",
            field="job_key",
            value=job_key,
        )


def kind_of(request: Stage) -> str:
    """Return the kind of a request, never "auto"; see `kind_at`."""
    return kind_at(request.source, request.kind)


def shards_of(directory: str) -> list[str]:
    """Return the sorted paths of the shards in a directory.

    Raises:
        InputError: there are none, or other files.
        OSError: the directory cannot be listed.
    """
    names = sorted(os.listdir(directory))
    others = [name for name in names if not name.endswith(".tar") or name.startswith(".")]
    if others or not names:
        found = f"it holds {others[0]}" if others else "it is empty"
        raise InputError(
            f"kind pack, but not a directory of tar shards alone: {found}",
            field="source",
            value=directory,
            hint="`hpml pack SOURCE DEST` makes one; kind: tree takes a directory as it is",
        )
    return [f"{directory}/{name}" for name in names]


def kind_at(source: str, kind: str) -> str:
    """Return the kind of a source, never "auto"; lists its directory if needed.

    Raises:
        InputError: it is not of the given kind, or neither file nor directory.
        OSError: its status cannot be read.
    """
    is_dir = os.path.isdir(source)
    os.stat(source)
    if not is_dir and not os.path.isfile(source):
        raise InputError("must be a directory or a regular file", field="source", value=source)
    if kind == "auto":
        if is_dir:
            return "pack" if _is_packed(source) else "tree"
        name = source.lower()
        return next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")
    if is_dir != (kind in {"tree", "pack"}):
        found = "a directory" if is_dir else "a file"
        raise InputError(f"has kind {kind}, but is {found}", field="source", value=source)
    if kind == "pack":
        shards_of(source)
    return kind


def _is_packed(directory: str) -> bool:
    # Only `hpml pack` writes this shard. Directories of plain tar files are common as training data
    # that is read as it is, so they are not unpacked by default.
    if not os.path.isfile(f"{directory}/{TREE_SHARD}"):
        return False
    names = os.listdir(directory)
    others = [name for name in names if not _SHARD.fullmatch(name)]
    if others and len(names) - len(others) > 1:
        raise InputError(
            f"looks like a pack, but also holds {shown(min(others))}",
            field="source",
            value=directory,
            hint="remove it, or take the directory as it is: kind: tree",
        )
    return not others


def requests_for(sources: Sequence[str], to: str, **options: Any) -> list[Stage]:
    """Return a request for each source, named after the last part of its path.

    Sources may be relative paths; `options` are fields of every request.

    Raises:
        InputError: a source is missing, or a value is wrong.
    """
    if not sources:
        raise InputError("must be given", field="SRC", hint="hpml stage data --to shm")
    for source in sources:
        if not source or "\0" in source:
            raise InputError("must name a directory or a file", field="SRC", value=source)
        if hint := download_hint(source, "."):
            raise InputError("hpml stages files, not URLs", field="SRC", value=source, hint=hint)
    target = _target(to)
    return [
        Stage(name_of(source), os.path.abspath(source), target=target, **options)
        for source in sources
    ]


def download_hint(source: str, directory: str) -> str:
    """Return advice on downloading a source that is a URL; empty if it is not one.

    Args:
        source: what is to be staged.
        directory: destination of the download.

    >>> download_hint("s3://bucket/images", "/data"), download_hint("/data/images", "/data")
    ('download it before: `aws s3 cp --recursive s3://bucket/images /data/images`', '')
    """
    match = _URL.fullmatch(source)
    if match is None:
        return ""
    scheme, path = match[1].lower(), match[2]
    if scheme == "file":
        return f"write the path: {shown(path)}"
    name = os.path.basename(path.partition("?")[0].rstrip("/")) or "data"
    quoted, to = shlex.quote(source), shlex.quote(os.path.join(directory, name))
    recursive = "" if "." in name else "--recursive "  # a single object, or a prefix
    commands = {
        "s3": f"aws s3 cp {recursive}{quoted} {to}",
        "gs": f"gcloud storage cp {recursive}{quoted} {to}",
        **dict.fromkeys(("http", "https", "ftp"), f"wget -O {to} {quoted}"),
    }
    command = commands.get(scheme, f"rclone copy REMOTE:{shlex.quote(path)} {to}")
    return f"download it before: `{command}`"


def name_of(source: str) -> str:
    """Return a valid name for a source, from the last part of its path.

    >>> name_of("/scratch/ImageNet-1k.tar.gz"), name_of("2024/"), name_of("/")
    ('imagenet_1k', 'data_2024', 'data')
    """
    last = os.path.basename(os.path.abspath(source)).lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if last.endswith(suffix):
            last = last[: -len(suffix)]
            break
    plain = re.sub(r"[^a-z0-9]+", "_", last).strip("_")
    if not re.match("[a-z]", plain):
        plain = f"data_{plain}" if plain else "data"
    return plain[:_NAME_CHARACTERS]


def _target(to: str) -> str:
    if to in _WORDS:
        return to
    if "/" not in to or _URL.fullmatch(to):
        is_name = bool(to) and "/" not in to
        raise InputError(
            "must be auto, shm, local or the path of a directory",
            field="--to",
            value=to,
            hint=f"a directory of that name: --to {shown(f'./{to}')}" if is_name else "",
        )
    return os.path.abspath(os.path.expanduser(to))
