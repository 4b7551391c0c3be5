"""Requests to stage data, their results, and the directories that they name."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.faults import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["auto", "file", "tree", "pack", "tar", "zip"]
AUTO = "auto"
IN_PLACE = "in place"
"""The method of data that is used in place."""

TREE_SHARD = "tree.tar"
"""The shard of a pack with its directories and links."""
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
    """The staged data on the node.

    Attributes:
        name: the request's name.
        path: a directory with the tree, the unpacked archive, or the one file by its name.
        bytes: sum of the sizes of its regular files, each inode counted once.
        files: number of its regular files, each name counted.
        seconds: wall time of this call, waiting for another stager included.
        method: how the data was brought: "copy", "unpack", "chain" or IN_PLACE.
        reused: the data was there already; this call copied nothing.
        digest: of all names, sizes and contents, as "xxh3_128:<hex>"; "" without hashing.
        kept: it stays in the node's cache after the job.
        evicted: sources of kept data that was removed to make room.
        broken_links: number of symbolic links that lead nowhere in the copy.
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
        """Text about links that lead nowhere; empty if there is none."""
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
    """The directories of "shm" and "local" on this node; `local` is "" if there is none."""

    shm: str = "/dev/shm"  # noqa: S108 - the node's tmpfs is the point
    local: str = ""

    def resolve(self, target: str) -> str:
        """Return the base directory of a request's target.

        Raises:
            InputError: the node has no local directory, or the target is neither word nor path.
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
    """Return the paths of the shards in a directory, sorted.

    Raises:
        InputError: there is none, or something else.
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
    """Return the kind of a source, never "auto"; reads its directory if needed.

    Raises:
        InputError: it is not of the given kind, or neither file nor directory.
        OSError: it cannot be looked at.
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
    # Only `hpml pack` writes this shard. Directories of tar files alone are common as training data
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

    Sources may be relative paths; `options` are fields of all.

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
    """Return how to download a source that is a URL; empty if it is none.

    Args:
        source: what is to be staged.
        directory: where the download goes.

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
    recursive = "" if "." in name else "--recursive "  # one object, or all below it
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
