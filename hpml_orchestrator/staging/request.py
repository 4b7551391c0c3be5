"""What is to be staged, what came of it, and where it lies on the node."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.faults import StagingStopped, brief, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AUTO",
    "COMMANDS",
    "IN_PLACE",
    "KINDS",
    "Bases",
    "StageRequest",
    "StageResult",
    "StagingStopped",
    "kind_at",
    "kind_of",
    "name_of",
    "names_of",
    "requests_for",
    "shards_of",
    "target_path",
]

KINDS = ("auto", "file", "tree", "pack", "tar", "zip")
AUTO = "auto"
COMMANDS = ("ls", "verify", "clean")
"""What `hpml stage` does beside staging."""
IN_PLACE = "in place"
"""The method of data that is left where it is."""

TREE_SHARD = "tree.tar"
"""The shard of a pack with its directories and links."""
_SHARD = re.compile(r"data-\d{5,}\.tar|" + re.escape(TREE_SHARD))
TAR_SUFFIXES = tuple(
    ".tar .tar.gz .tgz .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar.zst .tar.zstd .tzst".split()
)
SUFFIXES = {**dict.fromkeys(TAR_SUFFIXES, "tar"), ".zip": "zip"}
_MAGIC = {
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b": "tar",
    b"BZh": "tar",
    b"\xfd7zXZ\0": "tar",
    b"\x28\xb5\x2f\xfd": "tar",
}
_USTAR, _USTAR_AT = b"ustar", 257

_WORDS = frozenset({AUTO, "shm", "local"})
_NAME_CHARACTERS = 31
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_JOB_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True)
class StageRequest:
    """One thing to bring to the node.

    Attributes:
        name: what the job calls it, `[a-z][a-z0-9_]{0,30}`.
        source: absolute path of a directory or a file.
        kind: "tree" or "file", which are copied as they are; "pack", "tar" or "zip", which are
            unpacked; or "auto". A "pack" is a directory of tar shards and nothing else. By "auto",
            whatever says that it is an archive arrives as the tree that it holds: a directory that
            `hpml pack` wrote, and a file by its suffix: .zip and those of TAR_SUFFIXES. Its
            contents then tell which kind it is. They alone make no archive: .npz and .pt files are
            zip archives. Other files are "file", other directories "tree": shards that a
            training reads itself, for example with webdataset, are not touched.
        target: "shm" (RAM), "local" (the node's disk), an absolute directory on the node, or "auto"
            until one of these is chosen.
        keep: leave it in the node's cache for later jobs, rather than remove it with the job.
        outside_links: take symbolic links that leave the tree as they are; else they are refused.
        trust_mtime: find kept data by the times of the source itself, without a look at everything
            in it; what was kept without this is not found.

    Raises:
        InputError: a field is wrong; names the field.
    """

    name: str
    source: str
    kind: str = "auto"
    target: str = "local"
    keep: bool = False
    outside_links: bool = False
    trust_mtime: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                "must be a small letter, then up to 30 of a-z, 0-9 and _",
                field="name",
                value=self.name,
            )
        if self.kind not in KINDS:
            gone = "squashfs is no longer unpacked: stage the image with kind file and mount it"
            hint = gone if self.kind == "squashfs" else ""
            message = f"must be one of {', '.join(KINDS)}"
            raise InputError(message, field="kind", value=self.kind, hint=hint)
        if not os.path.isabs(self.source) or "\0" in self.source:
            raise InputError("must be an absolute path", field="source", value=self.source)
        absolute = os.path.isabs(self.target) and "\0" not in self.target
        if self.target not in _WORDS and not absolute:
            raise InputError(
                "must be shm, local or an absolute path", field="target", value=self.target
            )


@dataclass(frozen=True)
class StageResult:
    """What lies on the node now.

    Attributes:
        name: the request's name.
        path: a directory; it holds the tree, the unpacked archive, or the one file by its name.
        bytes: sum of the sizes of its regular files, each inode counted once.
        files: number of its regular files, each name counted.
        seconds: wall time that this call took, waiting for another stager included.
        method: how the data came here: "copy", "unpack" or "chain".
        reused: the data was there already; this call copied nothing.
        digest: of all names, sizes and contents, as "xxh3_128:<hex>"; "" when it was not hashed.
        kept: it stays in the node's cache after the job.
        private: later jobs cannot find it, because the base is this job's own; says why.
        workers: processes times threads that copied.
        evicted: sources of kept data that had to go to make room.
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
    private: str = ""
    workers: int = 1
    evicted: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second of this call; 0 when nothing was copied."""
        copied = not self.reused and self.method != IN_PLACE
        return self.bytes / self.seconds if copied and self.seconds else 0.0


@dataclass(frozen=True)
class Bases:
    """The directories that "shm" and "local" stand for on this node; `local` "" means none."""

    shm: str = "/dev/shm"  # noqa: S108 - the node's tmpfs is the point
    local: str = ""

    def resolve(self, target: str) -> str:
        """Return the base directory of a request's target.

        Raises:
            InputError: the node has no local directory, or the target is no such word or path.
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


def target_path(base: str, uid: int, job_key: str, name: str) -> str:
    """Return where data is published; the batch script builds the same text.

    Raises:
        InputError: the job key is no plain file name.

    >>> target_path("/dev/shm", 1000, "4711.0", "train")
    '/dev/shm/hpml-1000/4711.0/train'
    """
    check_job_key(job_key)
    return f"{base.rstrip('/')}/hpml-{uid}/{job_key}/{name}"


def check_job_key(job_key: str) -> None:
    """Refuse a job key that is no plain, visible file name."""
    if not _JOB_KEY.fullmatch(job_key):
        raise InputError(
            "must begin with a letter or digit and hold only those and . _ + -",
            field="job_key",
            value=job_key,
        )


def kind_of(request: StageRequest) -> str:
    """Return the kind of a request, never "auto", by looking at its source.

    Raises:
        InputError: the source is not what the request says it is, or neither file nor directory.
        OSError: the source cannot be looked at.
    """
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
            f"kind pack, but no directory of tar shards alone: {found}",
            field="source",
            value=directory,
            hint="`hpml pack SOURCE DEST` makes one; kind: tree takes a directory as it is",
        )
    return [f"{directory}/{name}" for name in names]


def kind_at(source: str, kind: str) -> str:
    """Return the kind of a source, never "auto", by looking at it.

    Args:
        source: a path.
        kind: what it is said to be.

    Raises:
        InputError: it is not what is said, or neither file nor directory.
        OSError: it cannot be looked at.
    """
    is_dir = os.path.isdir(source)
    os.stat(source)
    if not is_dir and not os.path.isfile(source):
        raise InputError("must be a directory or a regular file", field="source", value=source)
    if kind == "auto":
        if is_dir:
            return "pack" if _is_packed(source) else "tree"
        return _kind_of_file(source)
    if is_dir != (kind in {"tree", "pack"}):
        found = "a directory" if is_dir else "a file"
        raise InputError(f"kind {kind} but {found}", field="source", value=source)
    if kind == "pack":
        shards_of(source)
    return kind


def _is_packed(directory: str) -> bool:
    """Say whether `hpml pack` wrote a directory."""
    if not os.path.isfile(f"{directory}/{TREE_SHARD}"):
        return False
    return all(_SHARD.fullmatch(name) for name in os.listdir(directory))


def _kind_of_file(path: str) -> str:
    kind = next((kind for end, kind in SUFFIXES.items() if path.lower().endswith(end)), "file")
    if kind == "file":
        return kind
    with open(path, "rb") as stream:
        start = stream.read(512)
    if start[_USTAR_AT:].startswith(_USTAR):
        return "tar"
    return next((found for magic, found in _MAGIC.items() if start.startswith(magic)), kind)


def requests_for(
    sources: Sequence[str],
    to: str,
    *,
    name: str = "",
    kind: str = "auto",
    keep: bool = False,
    outside_links: bool = False,
    trust_mtime: bool = False,
) -> list[StageRequest]:
    """Return a request for each source, by names made of theirs.

    Args:
        sources: paths, relative ones too.
        to: "auto", "shm", "local" or a directory's path.
        name: of the only source; made of its path when empty.
        kind: of all of them.
        keep: leave it in the node's cache.
        outside_links: take symbolic links that leave the tree as they are.
        trust_mtime: see `StageRequest`.

    Raises:
        InputError: nothing is to be staged, two sources have the same name, a value is wrong.
    """
    if not sources:
        raise InputError("must be given", field="SRC", hint="hpml stage data --to shm")
    for source in sources:
        if not source or "\0" in source:
            raise InputError("must name a directory or a file", field="SRC", value=source)
    if name and len(sources) > 1:
        raise InputError(
            f"names one source, and there are {len(sources)}", field="--name", value=name
        )
    target = _target(to)
    names = [name] if name else names_of(sources)
    return [
        StageRequest(
            name=one,
            source=os.path.abspath(source),
            kind=kind,
            target=target,
            keep=keep,
            outside_links=outside_links,
            trust_mtime=trust_mtime,
        )
        for one, source in zip(names, sources)
    ]


def name_of(source: str) -> str:
    """Return a valid name made of the last part of a path.

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


def names_of(sources: Sequence[str]) -> list[str]:
    """Return a name for each source.

    Raises:
        InputError: two of them would have the same; names both.
    """
    whose: dict[str, str] = {}
    for source in sources:
        name = name_of(source)
        if name in whose:
            raise InputError(
                f"{shown(whose[name])} and {shown(source)} would both be called {name}",
                field="SRC",
                hint="stage one after the other, each with a --name of its own",
            )
        whose[name] = source
    return list(whose)


def _target(to: str) -> str:
    if to in _WORDS:
        return to
    if "/" not in to:
        raise InputError(
            "must be auto, shm, local or the path of a directory",
            field="--to",
            value=to,
            hint=f"a directory of that name: --to {brief(f'./{to}')}" if to else "",
        )
    return os.path.abspath(to)
