"""Build `hpml-node.pyz`: the one file that the nodes need of hpml."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

__all__ = ["build"]

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("records", "staging", "topology", "placement", "node")
_MAIN = "import sys\nfrom hpml_orchestrator.node.main import main\n\nsys.exit(main(sys.argv[1:]))\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the archive's bytes; equal sources give equal bytes.

    It holds plain sources (standard library only, Python 3.9 or newer), stored uncompressed so that
    a rank's start does not pay for unpacking.
    """
    sources = [_PACKAGE / "__init__.py", _PACKAGE / "errors.py"]
    for room in _ROOMS:
        sources += sorted((_PACKAGE / room).rglob("*.py"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _MAIN)
        for source in sources:
            name = source.relative_to(_PACKAGE.parent).as_posix()
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), source.read_bytes())
    return buffer.getvalue()
