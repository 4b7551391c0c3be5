"""Build `hpml-node.pyz`, the one file of hpml that the nodes need: a zip archive of plain modules.

Its commands run as `python -I -S hpml-node.pyz COMMAND …`.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

__all__ = ["BIND_CODE", "build"]

BIND_CODE = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from hpml_orchestrator.node.bind import main; sys.exit(main())"
)
"""Code for `python -I -S -c BIND_CODE hpml-node.pyz ATTEMPT -- COMMAND`.

Running the archive itself would import `runpy`, a third of a rank's start.
"""

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("records", "staging", "topology", "placement", "node")
_MAIN = """\
import sys

from hpml_orchestrator.node.main import main

sys.exit(main(sys.argv[1:]))
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the archive's bytes; equal sources give equal bytes.

    It is stored uncompressed, so that a rank's start does not pay for unpacking.
    """
    files = {"__main__.py": _MAIN.encode()}
    sources = [_PACKAGE / "__init__.py", _PACKAGE / "errors.py"]
    for room in _ROOMS:
        sources += sorted((_PACKAGE / room).rglob("*.py"))
    for source in sources:
        files[source.relative_to(_PACKAGE.parent).as_posix()] = source.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()
