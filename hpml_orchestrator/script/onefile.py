"""Several modules as one, and a module as bytecode: what makes the start of `hpml-bind` cheap.

From an archive, each module costs its reading two or three times over (zipimport reads it once to
find its name, once to run it), and each source its compilation, in every rank. So `hpml-bind` and
what it imports become one module, with only those functions that it reaches. Its bytecode is made
without annotations and docstrings, so that it needs no `__future__`, which is a file of its own.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import marshal
from pathlib import Path

__all__ = ["bytecode", "one_module"]

_FUTURE = "from __future__ import annotations"
_UNCHECKED_HASH = (1).to_bytes(4, "little")  # PEP 552: the source is beside it and not compared
_MARSHAL_VERSION = 2  # later ones mark shared objects, which differ from process to process


def one_module(package: Path, modules: list[str], entry: str) -> str:
    """Return the source of one module that defines a function and all that it uses.

    Args:
        package: the directory of `hpml_orchestrator`.
        modules: names below the package, such as `node.bind`; whatever they import of ours at
            their beginning is among them.
        entry: the function; run as a program, the module exits with what it returns for the
            program's arguments.

    Raises:
        ValueError: two modules define one name, or a name is imported from elsewhere in the package
            or under another name.
    """
    ours = {f"{package.name}.{name}" for name in modules}
    parts: dict[str, ast.stmt] = {}
    texts: dict[ast.stmt, str] = {}
    brought: dict[str, None] = {"import sys": None}
    for name in modules:
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        text = path.read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                if not _is_merged(node, package.name, ours):
                    brought[ast.unparse(node)] = None
                continue
            # The text as it was written: newer Pythons unparse f-strings as older ones cannot read.
            texts[node] = ast.get_source_segment(text, node) or ""
            for defined in _defined(node):
                if parts.setdefault(defined, node) is not node:
                    raise ValueError(f"{path}: {defined} is defined in two modules")
    reached = _reached(parts, entry)
    kept = dict.fromkeys(node for name, node in parts.items() if name in reached)
    lines = [f"# Made of {', '.join(sorted(ours))} by hpml: change those."]
    lines += [_FUTURE, *brought, *(texts[node] for node in kept)]
    lines += [f'if __name__ == "__main__":\n    sys.exit({entry}(sys.argv[1:]))']
    return "\n\n".join(lines) + "\n"


def bytecode(source: str, name: str) -> bytes:
    """Return what a `.pyc` file of this interpreter holds; equal sources give equal bytes.

    Another version of Python sees by the magic number that it is not for it, and reads the source.
    """
    tree = ast.fix_missing_locations(_Bare().visit(ast.parse(source)))
    code = compile(tree, name, "exec", dont_inherit=True, optimize=0)
    digest = importlib.util.source_hash(source.encode())
    return (
        importlib.util.MAGIC_NUMBER
        + _UNCHECKED_HASH
        + digest
        + marshal.dumps(code, _MARSHAL_VERSION)
    )


def _is_merged(node: ast.Import | ast.ImportFrom, package: str, ours: set[str]) -> bool:
    """Whether an import is of a module that is part of the whole."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return True  # it stands at the beginning of the whole
    names = (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    )
    if not any(name.split(".")[0] == package for name in names):
        return False
    if isinstance(node, ast.Import) or names[0] not in ours or any(a.asname for a in node.names):
        raise ValueError(f"cannot be merged: {ast.unparse(node)}")
    return True


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines; none where it is not kept."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list:
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [one.id for one in targets if isinstance(one, ast.Name)]
        return [name for name in names if name not in ("__all__", "TYPE_CHECKING")]
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse:
        return []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []  # the text below a constant
    raise ValueError(f"cannot be merged: {ast.unparse(node)}")


def _reached(parts: dict[str, ast.stmt], entry: str) -> set[str]:
    """The names that a function uses, and those that these use."""
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        bare = _Bare().visit(copy.deepcopy(parts[name]))
        used = {one.id for one in ast.walk(bare) if isinstance(one, ast.Name)}
        waiting += sorted(used & set(parts))
    return found


class _Bare(ast.NodeTransformer):
    """Takes away what nobody reads at run time: docstrings and annotations."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module == "__future__" else node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _without_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)
