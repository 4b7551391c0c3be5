"""The order of a pack's names: files of one sample are neighbours, and a name is quick to find."""

from __future__ import annotations

__all__ = ["place", "sample"]


def place(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what names are sorted by: directory, name up to its first dot, name.

    Plain order would tear samples apart: `a.d/x` stands between `a.cls` and `a.jpg`.

    >>> sorted([b"a.jpg", b"a.d/x", b"b", b"a.cls"], key=place)
    [b'a.cls', b'a.jpg', b'b', b'a.d/x']
    """
    directory, _, base = name.rpartition(b"/")
    return directory, base.partition(b".")[0], base


def sample(name: bytes) -> tuple[bytes, bytes]:
    """Return what the files of one sample have in common, by webdataset's convention.

    >>> sample(b"train/0001.jpg") == sample(b"train/0001.seg.png")
    True
    """
    return place(name)[:2]
