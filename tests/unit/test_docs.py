"""The documentation is true: commands run, links lead somewhere, references are complete."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hpml_orchestrator.cli.main import COMMANDS, app
from hpml_orchestrator.jobfile.sweep import load_sweep
from hpml_orchestrator.records.feed import VOCABULARY
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.script.render import directives
from hpml_orchestrator.site.model import load_site
from hpml_orchestrator.sweeps.expand import make_plan
from tests.pages import (
    ROOT,
    RUN_PAGES,
    Block,
    Reader,
    blocks,
    commands,
    fits,
    pages_with,
    prose,
    read,
)
from tests.unit.training_runs import TRAINS

PAGES = [
    *RUN_PAGES,
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "exporters/README.md",
    "training_jobs/README.md",
    "deploy/devcluster/README.md",
    "deploy/gpusim/README.md",
]
SLURM_COMMANDS = "sbatch srun salloc squeue sacct sacctmgr scancel scontrol sinfo".split()
STAGING = "docs/staging-correctness.md"
INSTALLATION = "docs/install-cluster.md"


def path_without_slurm(directory: Path) -> str:
    """Make a directory with this machine's programs but Slurm's; return a PATH."""
    directory.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name not in SLURM_COMMANDS and not os.path.lexists(directory / name):
                (directory / name).symlink_to(f"{folder}/{name}")
    return f"{Path(sys.executable).parent}:{directory}"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader at a machine without Slurm."""
    made = Reader(tmp_path / "digits", {"PATH": path_without_slurm(tmp_path / "bin")})
    yield made
    made.leave()


@TRAINS
@pytest.mark.parametrize(
    "page",
    [
        # these train: ranks are bound to cores, which concurrent tests would share
        pytest.param(page, marks=pytest.mark.alone if "make_digits" in read(page) else ())
        for page in pages_with("console")
        if page != INSTALLATION
    ],
)
def test_commands_of_a_page_do_what_it_says(page: str, reader: Reader) -> None:
    """Every console block runs, with the exit status and the output that stand there."""
    assert reader.follow(page, "console")


def test_hpml_can_be_installed_and_removed_as_the_page_says(reader: Reader) -> None:
    """From a wheel into a directory of the test's; afterwards nothing of hpml is left."""
    pytest.importorskip("hatchling", reason="NOT TESTED: no wheel can be built without hatchling")
    if shutil.which("man") is None:
        pytest.skip("NOT TESTED: man is not installed (apt-get install man-db)")
    place = reader.administer()
    assert reader.follow(INSTALLATION, "console") > 20
    left = [path.name for path in place.rglob("*") if not path.is_dir()]
    assert left == ["python3.11"]


def test_wildcards_stand_for_lines_and_parts_of_lines() -> None:
    """The comparison of output accepts what it should and nothing else."""
    printed = ["a 1", "b", "c\t2"]
    assert fits(["a …", "…", "c 2"], printed)
    assert fits(["…"], [])
    assert fits(["…", "a 1", "b", "…", "…2"], printed)
    assert not fits(["a …", "c 2"], printed)
    assert not fits(["a …", "b"], printed)
    assert not fits(["…", "d"], printed)


@pytest.mark.parametrize("page", RUN_PAGES)
def test_every_block_has_a_tag_that_means_something(page: str) -> None:
    """No command hides from the tests behind a missing or misspelt tag."""
    known = {"console", "console slurm", "sh", "text", "yaml", "toml", "python"}
    for block in blocks(page):
        assert block.tag in known or (
            len(block.words) == 2 and block.words[0] in {"yaml", "text", "python", "toml"}
        ), f"{block}: unknown tag {block.tag!r}"
        if block.words[0] == "console":
            assert list(commands(block)), f"{block}: no command in a console block"
            assert block.text.startswith("$ "), f"{block}: output before the first command"


def test_commands_that_are_not_run_name_things_that_exist() -> None:
    """In sh blocks, make's targets, the extras of pip and the paths of the project are there."""
    makefile = read("Makefile")
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    seen = set()
    for page in PAGES:
        for block in blocks(page):
            text = block.text.replace("\\\n", " ")  # a command may span several lines
            for line in text.splitlines() if block.tag == "sh" else ():
                words = shlex.split(line, comments=True)
                for before, word in zip(["", *words], words, strict=False):
                    if before == "make":
                        assert re.search(rf"^{word}:", makefile, re.MULTILINE), f"{block}: {line}"
                    extra = re.fullmatch(r"\.\[(.*)\]", word)
                    if extra:
                        assert extra[1] in extras, f"{block}: {line}"
                    if word.split("/")[0] in {"deploy", "tests", "training_jobs", ".ci"}:
                        assert (ROOT / word).exists(), f"{block}: {line}"
                    seen.add((before, word))
    assert {("make", "demo"), ("make", "test"), ("pip", "install")} <= seen


@cache
def options(command: str) -> frozenset[str]:
    """The options in a command's help, "" being hpml itself."""
    environment = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    arguments = [command, "--help"] if command else ["--help"]
    told = CliRunner().invoke(app, arguments, env=environment)
    assert told.exit_code == 0, f"hpml has no command {command!r}"
    output = told.output
    root: Any = typer.main.get_command(app)
    if command:
        root.load(command)
        for below in getattr(root.commands[command], "commands", {}):
            output += CliRunner().invoke(app, [command, below, "--help"], env=environment).output
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])", output))


def calls_of_hpml(page: str) -> Iterator[tuple[str, list[str]]]:
    """Every mention of a call of hpml as code: where, and its words."""
    snippets = [(page, span) for span in re.findall(r"`([^`\n]+)`", prose(page))]
    for block in blocks(page):
        if block.words[:1] in {("sh",), ("console",)}:
            lines = block.text.splitlines()
            if block.words[0] == "console":
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            snippets += [(str(block), line) for line in lines]
    for place, snippet in snippets:
        for part in re.split(r"&&|\|\||[;|]", snippet):
            words = part.split("  #")[0].split()
            if words and words[0].rpartition("/")[2] == "hpml":
                yield place, words[1:]


def test_calls_of_hpml_have_commands_and_options_that_exist() -> None:
    """What pages say to type is what `--help` offers."""
    count = 0
    for page in PAGES:
        for place, words in calls_of_hpml(page):
            command = next((word for word in words if word.isalpha() and word.islower()), "")
            known = options(command) | options("")
            # words after `--` are the program's
            for word in words[: words.index("--") if "--" in words else None]:
                option = word.partition("=")[0] if word.startswith("--") else word[:2]
                if word.startswith("-") and option != "--epochs":
                    assert option in known, f"{place}: hpml {' '.join(words)}: no {option}"
            count += 1
    assert count > 30


def test_the_readme_lists_commands_that_exist() -> None:
    """The ones that a newcomer needs; the manual has the others."""
    first = re.findall(r"^\| (`hpml [^|]+)\|", read("README.md"), re.MULTILINE)
    assert set(re.findall(r"`hpml (\w+)", " ".join(first))) <= set(COMMANDS)


def table(page: str, *header: str) -> list[list[str]]:
    """The rows of every table with that header; cells without their backticks."""
    rows: list[list[str]] = []
    inside = False
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells == list(header):
            inside = True
        elif inside and not set(line) <= set("|-"):
            rows.append(cells)
    assert rows, f"{page} has no table {header}"
    return rows


@pytest.mark.parametrize("name", sorted(runpy.run_path(str(ROOT / "docs/fields.py"))["PAGES"]))
def test_the_references_are_current(name: str) -> None:
    """They are generated from the fields' descriptions: `make docs` writes them anew."""
    page = runpy.run_path(str(ROOT / "docs/fields.py"))["page"]
    assert read(f"docs/{name}") == page(name)


def test_the_reference_has_every_directive(tmp_path: Path) -> None:
    """The `#SBATCH` lines of a job that asks for everything are those of the table, in order."""
    path = tmp_path / "everything.yaml"
    resources = {
        "gpus": 1,
        "memory": "1G",
        **dict.fromkeys(("partition", "account", "qos", "constraint"), "a"),
        "exclusive": True,
        "mail": {"to": "ada"},
    }
    job = {"name": "a", "script": "a.py", "array": "0-3", "checkpoint": True}
    job["resources"] = resources
    path.write_text(json.dumps(job))
    there = [line.partition("=")[0] for line in directives(load_job(path).job)]
    rows = table("docs/job-file.md", "directive", "from")
    told = [name for row in rows for name in re.findall(r"--[a-z-]+", row[0])]
    assert told == there


@pytest.mark.parametrize(
    "block",
    [one for page in PAGES for one in blocks(page) if one.words[:1] in {("yaml",), ("toml",)}],
    ids=str,
)
def test_job_files_and_profiles_in_pages_load(block: Block, tmp_path: Path) -> None:
    """Examples are valid; a part of a job file is completed with a name and a command."""
    if block.words[1:] in {("hpml.toml",), ("site.toml",)}:
        profile = tmp_path / block.words[1]
        profile.write_text(block.text, encoding="utf-8")
        assert load_site([profile]).origins
        return
    text, path = block.text, tmp_path / f"job.{block.words[0]}"
    if re.search(r"^mode:", text, re.MULTILINE):
        shutil.copy(ROOT / "training_jobs/digits.yaml", tmp_path)
        for other in blocks(block.page):
            if other.words[0] == "python" and other.words[1:]:
                (tmp_path / other.words[1]).write_text(other.text, encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        assert make_plan(load_sweep(path), backend="slurm", now=0).shapes
        return
    if not re.search(r"^name\b", text, re.MULTILINE):
        text = f"name: part\ncommand: [program]\n{text}"
    path.write_text(text, encoding="utf-8")
    assert load_job(path).job.name


def test_links_lead_somewhere() -> None:
    """Every relative link of a page names a file, and every anchor a heading there."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            assert target.exists(), f"{page}: {link}"
            if anchor:
                assert anchor in _anchors(target.read_text(encoding="utf-8")), f"{page}: {link}"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_every_page_of_docs_is_listed() -> None:
    """Every page is linked from another one."""
    for page in RUN_PAGES[1:]:
        assert page == "docs/pages.md" or f"]({Path(page).name})" in read("docs/pages.md"), page


@pytest.mark.parametrize("page", PAGES)
def test_pages_hold_no_path_of_the_machine_they_were_written_on(page: str) -> None:
    """Captured output was captured in a neutral place."""
    assert not re.search(rf"/root/|/work/|{re.escape(str(ROOT))}", read(page))


def test_the_map_names_files_that_exist() -> None:
    """A module that the map names by its path is there."""
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", prose("docs/architecture.md")):
        assert (ROOT / name).exists() or (ROOT / "hpml_orchestrator" / name).exists(), name


def test_the_map_has_every_event() -> None:
    """The vocabulary of events stands there complete and in order."""
    rows = table("docs/records.md", "event", "written by", "when")
    assert [row[0].strip("`") for row in rows] == list(VOCABULARY)


def test_the_map_has_every_file_of_a_record(reader: Reader) -> None:
    """What a run leaves behind is explained file by file."""
    job = reader.directory / "record.yaml"
    job.write_text("name: record\nlauncher: srun\ncommand: ['true']\n")
    done = reader.call("hpml run record.yaml --json 2>errors.txt")
    assert done.returncode == 0, done.stdout + (reader.directory / "errors.txt").read_text()
    told = set(re.findall(r"`([^`\n]+)`", prose("docs/records.md")))
    state = json.loads(done.stdout)
    run = Path(state["directory"])
    attempt = run / "attempts" / "0"
    left = {path.name for path in Path(state["submission"]).iterdir()}
    left |= {path.name for path in run.iterdir() if path.is_file()}
    for path in attempt.rglob("*"):
        if path.is_file():
            name = path.relative_to(attempt).as_posix()
            left.add(name.replace(state["nodes"], "<node>"))
    assert left <= told


def test_every_promise_of_staging_has_its_tests() -> None:
    """All twelve lines are there, in order; every row names tests, and these exist."""
    promises = table(STAGING, "line", "promise", "tests")
    faults = table(STAGING, "fault", "tests")
    numbers = [int(row[0]) for row in promises]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 12))
    assert len(faults) >= 10
    for row in promises + faults:
        assert re.fullmatch(r"(`tests/[\w/]+\.py::test_\w+` ?)+", row[-1]), row
        for path, name in re.findall(r"`(\S+)::(\w+)`", row[-1]):
            assert f"\ndef {name}(" in read(path), f"{path} has no {name}"
