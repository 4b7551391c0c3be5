"""Arrows between the rooms point one way, and what travels to the nodes needs nothing else."""

from __future__ import annotations

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import hpml_dashboards
import hpml_exporters

import hpml_orchestrator

PACKAGE = Path(hpml_orchestrator.__file__).parent
NAME = "hpml_orchestrator"
GROUND = frozenset({"errors", "assets", "log", "version"})  # what every room may know
ROW = re.compile(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", re.MULTILINE)
# The table of rooms: what comes after a semicolon there is no import.
ARROWS = {
    room: set(re.findall(r"\w+", uses.partition(";")[0])) - {"nobody"}
    for room, uses in ROW.findall((PACKAGE.parent / "docs/architecture.md").read_text("utf-8"))
}
PLAIN = ("topology", "placement", "records", "staging", "node")
ROOMS = sorted(
    path.parent.name for path in PACKAGE.glob("*/__init__.py") if "_" not in path.parent.name
)
SOURCES = sorted(PACKAGE.rglob("*.py"))
EXPORTERS = Path(hpml_exporters.__file__).parent
EXPORTED = sorted(EXPORTERS.rglob("*.py"))
PRODUCT = [
    path
    for name in ("hpml_orchestrator", "exporters", "dashboards", "training_jobs")
    for path in sorted((PACKAGE.parent / name).rglob("*.py"))
]
PUBLIC = {
    PACKAGE / "__init__.py",
    EXPORTERS / "__init__.py",
    Path(hpml_dashboards.__file__),
    PACKAGE.parent / "training_jobs" / "hpml_waits.py",
}
EXPORTER = "hpml_exporters"
OURS_FOR_EXPORTERS = {"version", "errors", "log", "records", "scheduler", "jobfile", "topology"}
EXPORTER_ARROWS: dict[str, set[str]] = {
    # parts of the exporters' package that keep to themselves; what is not here may know all
    "core": set(),
    "web": set(),
    "jobs": {"core", "options"},
    "gpu": {"core", "jobs", "options"},
    "node": {"core", "jobs", "options"},
    "training": {"core", "jobs", "options"},
    "slurm": {"__main__", "core", "options"},
}
TOO_HEAVY = {"typer", "rich", "pydantic", "jinja2", "torch", "numpy", "pandas", "requests"}
HEAVY_AT_IMPORT = {"asyncio", "ssl", "concurrent", "multiprocessing", "subprocess"}


def imports(path: Path) -> set[str]:
    """Full names of everything that a file imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            if node.module == NAME:
                found |= {f"{NAME}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def module_name(path: Path) -> str:
    """The full name of a module of the package or of the exporters."""
    home = PACKAGE if path.is_relative_to(PACKAGE) else EXPORTERS
    parts = path.relative_to(home.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    """The room of one of our modules; empty for the top."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_room_is_in_the_plan() -> None:
    """A new room gets its row in architecture.md."""
    assert set(ROOMS) == set(ARROWS)
    assert len(SOURCES) > 50


def test_a_room_uses_what_the_plan_says() -> None:
    """It imports itself, the ground, and exactly the rooms of its row in architecture.md."""
    used: dict[str, set[str]] = {}
    for room in ROOMS:
        names = {name for path in (PACKAGE / room).rglob("*.py") for name in imports(path)}
        known = {room_of(name) for name in names if name.split(".")[0] == NAME}
        used[room] = known - GROUND - {room}
    assert used == ARROWS


def test_the_ground_knows_no_room() -> None:
    """Errors and assets import nothing of ours but each other; the package itself has the API."""
    for path in PACKAGE.glob("*.py"):
        known = {room_of(name) for name in imports(path) if name.split(".")[0] == NAME}
        exported = {"api", "diagnosis", "records"} if path.name == "__init__.py" else set()
        assert known <= GROUND | exported, path


def test_there_is_no_circle() -> None:
    """The plan itself has an order in which the rooms can be built."""
    TopologicalSorter(ARROWS).prepare()


def test_no_two_modules_import_each_other() -> None:
    """Not in a circle either, also not inside functions or for types alone."""
    names = {module_name(path): path for path in SOURCES}
    graph = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text("utf-8"))
        known = {
            f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in names else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        graph[name] = {one for one in known if one in names and one != name}
    TopologicalSorter(graph).prepare()


def test_what_travels_is_standard_library_only() -> None:
    """Records, staging and node run without any installed package."""
    allowed = {*sys.stdlib_module_names, NAME}
    paths = [path for room in PLAIN for path in (PACKAGE / room).rglob("*.py")]
    for path in [PACKAGE / "errors.py", PACKAGE / "log.py", *paths]:
        # On the login node pydantic asks the fields for their schemas.
        late = {"pydantic_core"} if path.name == "units.py" else set()
        assert {name.split(".")[0] for name in imports(path)} <= allowed | late, path
        assert imported_at_once(path) <= allowed, path


def test_nothing_imports_the_command_line() -> None:
    """Only the entry point does."""
    for path in SOURCES:
        if "cli" not in path.relative_to(PACKAGE).parts:
            assert not any(name.startswith(f"{NAME}.cli") for name in imports(path)), path


def test_only_public_packages_list_their_names() -> None:
    """`__all__` stands where users import from, and names what is there, once each."""
    with_list = {path for path in PRODUCT if "__all__ = [" in path.read_text("utf-8")}
    assert with_list == PUBLIC
    for module in (hpml_orchestrator, hpml_exporters, hpml_dashboards):
        assert len(set(module.__all__)) == len(module.__all__), module
        assert all(hasattr(module, name) for name in module.__all__), module


def test_private_functions_need_no_manual() -> None:
    """Their docstrings have no sections, and say more than name and signature do."""
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not re.match("_[^_]", node.name):
                continue
            text = ast.get_docstring(node) or "Every function without one."
            place = f"{path}:{node.lineno}: {text}"
            assert not re.search(r"^(Args|Raises):$", text, re.MULTILINE), place
            signature = words(
                f"{node.name} {ast.unparse(node.args)} {ast.unparse(node.returns or node.args)}"
            )
            assert words(text) - signature, place


def words(text: str) -> set[str]:
    """Words of a sentence or of names, without articles, prepositions and common endings."""
    found = re.findall(r"[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", text).lower())
    small = {
        "a",
        "an",
        "the",
        "of",
        "in",
        "on",
        "for",
        "from",
        "to",
        "and",
        "return",
        "yield",
        "its",
    }
    return {re.sub("(s|es|ed|ing)$", "", word) for word in found if word not in small}


def imported_at_once(path: Path) -> set[str]:
    """Top names of what a file imports when it is loaded; not for types, not in functions."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return found


def test_exporters_stay_small() -> None:
    """They know few rooms of hpml, and import what is heavy where it is used, or never.

    Their process lives on every node for as long as the node does.
    """
    for path in EXPORTED:
        known = imports(path)
        ours = {room_of(name) for name in known if name.split(".")[0] == NAME}
        assert ours <= OURS_FOR_EXPORTERS, path
        # The web-config file's model is loaded by the server where there is such a file.
        model = {"pydantic", "pydantic_core"} if path.name == "config.py" else set()
        assert not {name.split(".")[0] for name in known} & TOO_HEAVY - model, path
        at_once = imported_at_once(path) - model
        # GPUs' modules are imported by their own thread.
        late = {"nvitop", "pynvml"} if path.parent.name == "gpu" else set()
        known = {*sys.stdlib_module_names, NAME, EXPORTER, "prometheus_client"} | late
        assert at_once <= known, path
        assert not at_once & (HEAVY_AT_IMPORT - late) or path.parent.name == "web", path


def test_parts_of_the_exporters_keep_to_themselves() -> None:
    """Collectors know no server, the server no metrics, and descriptions nothing at all."""
    for part, allowed in EXPORTER_ARROWS.items():
        folder = EXPORTERS / part
        paths = list(folder.rglob("*.py")) if folder.is_dir() else [EXPORTERS / f"{part}.py"]
        for path in paths:
            known = {one.split(".")[1] for one in imports(path) if one.startswith(f"{EXPORTER}.")}
            assert known <= allowed | {part}, path


def test_only_the_command_line_knows_the_exporters() -> None:
    """Agents start them as processes."""
    for path in SOURCES:
        if "cli" not in path.relative_to(PACKAGE).parts:
            assert not any(name.split(".")[0] == EXPORTER for name in imports(path)), path


def test_every_file_says_what_it_is() -> None:
    """A module begins with a sentence. It is a concept, not a size: up to 1,000 lines."""
    for path in [*SOURCES, *EXPORTED]:
        text = path.read_text("utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{path}: no docstring"
        assert text.count("\n") <= 1000, path


def test_values_have_types() -> None:
    """`Any` stays at the edges: parsed documents, other programs' messages, foreign signatures."""
    places = [
        f"{path}:{number}"
        for path in PRODUCT
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"[\[ ,|=]Any\b(?! [a-z])", line) and "import" not in line
    ]
    assert len(places) < 100, "\n".join(places)


def test_a_class_name_has_one_meaning() -> None:
    """Nobody has to look which `Report` or `Row` a signature means."""
    homes: dict[str, set[str]] = {}
    for path in PRODUCT:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(str(path))
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    # `Job` and `Run` of the Python API are what users write; the training jobs stand alone.
    assert shared.keys() <= {"Checkpoint", "Data", "Job", "Run"}, shared
