"""Several modules become one that does the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import vermin

from hpml_orchestrator.script import archive
from hpml_orchestrator.script.onefile import bytecode, one_module

FIRST = '''
"""First."""
from __future__ import annotations
__all__ = ["one"]
TYPE_CHECKING = False
if TYPE_CHECKING:
    from nowhere import Nothing
LIMIT: int = 3
"""Text below a constant."""
class Kept:
    """Kept."""
    field: int = 4
def one(value: Nothing) -> int:
    """One."""
    return min(value, LIMIT) + Kept.field
def unused(x):
    import nowhere
'''
SECOND = '''
from __future__ import annotations
import os
from pack.room.first import one
def main(argv: list[str]) -> int:
    """Only a docstring follows."""
    def nothing():
        """This."""
    return one(len(argv)) + (nothing() or 0)
'''


def package(root: Path, **modules: str) -> Path:
    room = root / "pack" / "room"
    room.mkdir(parents=True)
    for name, text in modules.items():
        (room / f"{name}.py").write_text(text)
    return root / "pack"


def test_what_the_entry_reaches_is_kept_and_no_more(tmp_path: Path) -> None:
    """In one module, without imports of ours, it still does the same."""
    pack = package(tmp_path, first=FIRST, second=SECOND)
    source = one_module(pack, ["room.first", "room.second"], "main")
    for gone in ("unused", "pack.room.first import", "__all__"):
        assert gone not in source, gone
    ended = subprocess.run([sys.executable, "-c", source, "a", "b"], check=False, timeout=120)
    assert ended.returncode == 6


def test_bytecode_has_neither_annotations_nor_docstrings(tmp_path: Path) -> None:
    """Nor the import that annotations need; it does the same."""
    pack = package(tmp_path, first=FIRST, second=SECOND)
    source = one_module(pack, ["room.first", "room.second"], "main")
    program = tmp_path / "one.pyc"
    program.write_bytes(bytecode(source, "one.py"))
    for gone in (b"__future__", b"Nothing", b"Only a docstring"):
        assert gone in source.encode()
        assert gone not in program.read_bytes()
    assert subprocess.run([sys.executable, program, "a"], check=False, timeout=120).returncode == 5


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({"first": "x = 1\ndef one(): return x", "second": "x = 2"}, "x is defined in two modules"),
        ({"first": "import pack.other"}, "cannot be merged: import pack.other"),
        ({"first": "from pack.other import x"}, "cannot be merged: from pack.other import x"),
        (
            {"first": "y = 1", "second": "from pack.room.first import y as z"},
            "cannot be merged: from pack.room.first import y as z",
        ),
        ({"first": "for x in (): pass"}, "cannot be merged: for x in ():"),
        ({"first": "print('effect')"}, "cannot be merged: print"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    tmp_path: Path, modules: dict[str, str], told: str
) -> None:
    """Rather than made into a module that does something else."""
    pack = package(tmp_path, **modules)
    with pytest.raises(ValueError, match=told.replace("(", r"\(").replace(")", r"\)")):
        one_module(pack, [f"room.{name}" for name in modules], "one")


def test_bytecode_does_not_depend_on_the_process() -> None:
    """Strings that this process has seen before are written as in one that has not."""
    source = (
        'def f(x):\n    """Doc."""\n    return {"some text": x, "name": "name"}, (1, 2.5, None)\n'
    )
    code = (
        "import sys; from hpml_orchestrator.script.onefile import bytecode\n"
        "sys.stdout.buffer.write(bytecode(sys.stdin.read(), 'x.py'))"
    )
    kept = [sys.intern("some text"), compile(source, "y.py", "exec")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=source.encode(),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert (done.stdout, len(kept)) == (bytecode(source, "x.py"), 2)


def test_the_bind_module_keeps_to_python_3_9() -> None:
    """What the generator of this Python writes is no newer than what it read."""
    source = one_module(archive._PACKAGE, list(archive._BIND), "run")
    config = vermin.Config()
    visitor = vermin.visit(source, config)
    assert (visitor.minimum_versions()[1] or (3, 0)) <= (3, 9), visitor.output_text()
    imported = {line for line in source.splitlines() if line.startswith(("import ", "from "))}
    future = "from __future__ import annotations"
    assert imported == {future, "import os", "import sys", "import time"}
