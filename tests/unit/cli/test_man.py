"""The manual pages say what `--help` says, are correct roff, and are the same everywhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import typer

from hpml_orchestrator import __version__
from hpml_orchestrator.cli.examples import EXAMPLES
from hpml_orchestrator.cli.main import app
from hpml_orchestrator.cli.manpages import RELEASED, pages
from hpml_orchestrator.cli.manual import manual
from hpml_orchestrator.cli.manualtext import markdown, plain
from tests.conftest import skip_or_fail
from tests.unit.cli.test_words import HPML, in_terminal

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

Hpml = Callable[..., "Result"]
ROOT = Path(__file__).parents[3]
LINTERS = {
    "groff": ["groff", "-ww", "-man", "-z"],
    "man": ["man", "--warnings=w", "-l"],
    "mandoc": ["mandoc", "-Tlint", "-Wwarning"],
}


def commands() -> list[str]:
    """Every command as it is typed after `hpml`; empty for hpml itself."""

    def walk(command: Any, path: str) -> Iterator[str]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            if not child.hidden:
                yield from walk(child, f"{path} {name}".strip())

    return list(walk(typer.main.get_command(app), ""))


def page_of(command: str) -> str:
    return pages(app)[f"{f'hpml {command}'.strip().replace(' ', '-')}.1"]


def unescaped(text: str) -> str:
    """What roff prints of a line."""
    plain_text = re.sub(r"\\f[BIP]|\\&", "", text).replace(r"\-", "-").replace(r"\(aq", "'")
    return re.sub(r"\\\[u([0-9A-F]{4,5})\]", lambda found: chr(int(found[1], 16)), plain_text)


def section(page: str, title: str) -> list[str]:
    """The lines of a section."""
    found = page.partition(f'.SH "{title}"\n')[2].partition("\n.SH")[0]
    return unescaped(found).splitlines()


def terms(page: str, title: str) -> list[str]:
    """What the items of a section are about."""
    lines = section(page, title)
    return [lines[at + 1] for at, line in enumerate(lines) if line == ".TP"]


def helped(hpml: Hpml, shell: Shell, command: str) -> dict[str, set[str]]:
    """Arguments and options as Typer's help has them."""
    shell.variables["COLUMNS"] = "300"
    told = hpml(*command.split(), "--help").out
    del shell.variables["COLUMNS"]
    found: dict[str, set[str]] = {}
    for title in ("Arguments", "Options"):
        box = told.partition(f"─ {title} ")[2].partition("╰")[0]
        rows = re.findall(r"^│[ *]*(\S.*)│$", box, re.MULTILINE)
        options = {
            word for row in rows for word in row.split("  ")[0].split() if word.startswith("-")
        }
        options |= {
            word for row in rows for word in re.findall(r"(?<!\S)-{1,2}[a-z][\w-]*(?=  )", row)
        }
        found[title] = options if title == "Options" else {row.split()[0] for row in rows}
    return found


@pytest.mark.parametrize("command", commands())
def test_a_page_has_what_the_help_has(hpml: Hpml, shell: Shell, command: str) -> None:
    """Every option and argument of `--help` has its item, and no other has one."""
    there = helped(hpml, shell, command)
    page = page_of(command)
    options = {
        word
        for term in terms(page, "OPTIONS")
        for word in re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", term)
    }
    assert "--help" in options
    assert options == there["Options"]
    arguments = {one.strip("[]") for one in there["Arguments"]}
    assert set(terms(page, "ARGUMENTS")) == arguments
    for name in arguments:
        assert name in " ".join(section(page, "SYNOPSIS"))


def test_the_first_page_lists_every_command() -> None:
    """And every command has a page that leads back."""
    assert terms(page_of(""), "COMMANDS") == [
        f"hpml {one}" for one in commands() if one and " " not in one
    ]
    made = pages(app)
    assert set(made) == {
        f"{' '.join(['hpml', *one.split()])}.1".replace(" ", "-") for one in commands()
    }
    for command in commands()[1:]:
        above = "\\-".join(["hpml", *command.split()[:-1]])
        assert f".BR {above} (1)," in page_of(command)


@pytest.mark.parametrize("command", commands())
def test_a_page_has_the_parts_of_a_manual_page(command: str) -> None:
    """In their customary order, with statuses, variables, files and examples."""
    page = page_of(command)
    titles = [title.strip('"') for title in re.findall(r"^\.SH (.*)$", page, re.MULTILINE)]
    order = (
        (
            "NAME SYNOPSIS DESCRIPTION ARGUMENTS OPTIONS COMMANDS EXIT_STATUS ENVIRONMENT FILES "
            "EXAMPLES SEE_ALSO"
        )
        .replace(" ", "\n")
        .replace("_", " ")
        .splitlines()
    )
    assert titles == [title for title in order if title in titles]
    assert set(order) - set(titles) <= {"ARGUMENTS", "COMMANDS"}
    statuses = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "70", "74", "75", "79", "130", "143"]
    assert terms(page, "EXIT STATUS") == statuses
    assert "HPML_HOME" in terms(page, "ENVIRONMENT")
    assert any("/etc/hpml/site.toml" in term for term in terms(page, "FILES"))


def test_values_are_told() -> None:
    """Defaults, variables and repeated options stand in the text."""
    assert "Default: auto." in " ".join(section(page_of("submit"), "OPTIONS"))
    assert "may be repeated" in " ".join(section(page_of("submit"), "OPTIONS"))
    root = " ".join(section(page_of(""), "OPTIONS"))
    assert "--records DIR Where records live. Default: ~" in root.replace(r"\(ti", "~")
    assert "Environment variable: HPML_HOME." in root
    assert "Default: last." in " ".join(section(page_of("show"), "ARGUMENTS"))


@pytest.mark.parametrize("linter", LINTERS)
def test_pages_are_correct_roff(linter: str, tmp_path: Path) -> None:
    """Neither groff nor man nor mandoc has a word to say against any page."""
    if shutil.which(linter) is None:
        skip_or_fail(f"NOT TESTED: {linter} is not installed (apt-get install man-db groff mandoc)")
    for name, text in pages(app, date="2026-01-02").items():
        path = tmp_path / name
        path.write_text(text, encoding="ascii")
        done = subprocess.run(
            [*LINTERS[linter], path],
            env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
            stdout=subprocess.DEVNULL if linter == "man" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout or "", done.stderr) == (0, "", ""), name


ODD = r"""Do 'odd' things.

.so /etc/passwd is no request, and 'ne 3 neither; \fBthis\fR and \n are what they are.

'quoted' at the beginning: a-b --c -1 ~/x ^y "z" `code \e` → ß … 🙂
"""


def odd_app() -> typer.Typer:
    """An application whose help is hard to set, with a group of commands."""
    outer = typer.Typer(help="Odd.")
    inner = typer.Typer(help="Templates.")

    def eject(
        where: Annotated[
            str,
            typer.Option("--where", "-w", help=".dot 'quote' \\x", envvar=["ODD_A", "ODD_B"]),
        ] = "a\\b",
        many: Annotated[list[str] | None, typer.Option("--many", help="More.")] = None,
        hidden: Annotated[bool, typer.Option("--secret", hidden=True)] = False,
    ) -> None:
        pass

    eject.__doc__ = ODD
    inner.command("eject")(eject)
    inner.command("gone", hidden=True)(lambda: None)
    outer.add_typer(inner, name="template")
    outer.command("other")(lambda: None)
    return outer


def test_odd_texts_are_printed_as_they_are(tmp_path: Path) -> None:
    """What looks like roff in a help text is text; other alphabets and signs survive."""
    if shutil.which("man") is None or shutil.which("groff") is None:
        skip_or_fail("NOT TESTED: man is not installed (apt-get install man-db groff)")
    path = tmp_path / "hpml-template-eject.1"
    path.write_text(pages(odd_app(), date="2026-01-02")[path.name], encoding="ascii")
    done = subprocess.run(
        ["man", "--warnings=w", "-l", path],
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "200", "MANROFFOPT": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ODD.strip().splitlines():
        if line:
            assert line.replace("`", "") in shown
    assert ".dot 'quote' \\x Default: a\\b. Environment variable: ODD_A, ODD_B." in shown
    assert "More. May be given more than once." in shown
    assert "root:" not in done.stdout


def test_groups_have_pages_of_their_own() -> None:
    """A command of a group has its page, and what is hidden has none."""
    made = pages(odd_app())
    assert sorted(made) == ["hpml-other.1", "hpml-template-eject.1", "hpml-template.1", "hpml.1"]
    assert terms(made["hpml-template.1"], "COMMANDS") == ["hpml template eject"]
    assert r".BR hpml\-template (1)," in made["hpml-template-eject.1"]
    assert "secret" not in made["hpml-template-eject.1"]
    (page,) = (one for one in manual(odd_app()) if one.command == "hpml template eject")
    assert ".so /etc/passwd is no request" in plain(page)


def test_pages_are_the_same_everywhere(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """ASCII, without a path of this machine; the date is that of SOURCE_DATE_EPOCH, if set."""
    assert pages(app) == pages(app)
    for text in pages(app).values():
        assert text.isascii()
        assert str(ROOT) not in text
        assert str(Path.home()) not in text
    monkeypatch.setitem(shell.variables, "SOURCE_DATE_EPOCH", "1700000000")
    assert hpml("man", "--output", str(tmp_path)).code == 0
    dated = (tmp_path / "man1" / "hpml.1").read_text("ascii")
    assert f'.TH "HPML" 1 "2023-11-14" "hpml {__version__}" "hpml manual"' in dated
    monkeypatch.setitem(shell.variables, "SOURCE_DATE_EPOCH", "yesterday")
    told = hpml("man", "--output", str(tmp_path))
    assert (told.code, told.err.splitlines()[0]) == (
        2,
        "hpml: error: SOURCE_DATE_EPOCH: must be seconds since 1970 (got 'yesterday')",
    )


def test_the_date_is_the_changelogs() -> None:
    """A released version's pages carry the date of its release; before, they carry none."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.search(rf"^## \[{re.escape(__version__)}\] - (\S+)$", text, re.MULTILINE)
    assert (released[1] if released else "") == RELEASED


def test_the_pages_in_the_repository_are_current(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make docs` after a change of commands: these are the pages that the wheel installs."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert hpml("man", "--output", str(tmp_path)).code == 0
    made = {path.name: path.read_text() for path in (tmp_path / "man1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "man" / "man1").iterdir()}
    assert kept == made, "run: make docs"


def test_the_command_reference_is_current() -> None:
    """docs/commands.md has every command, from the same source."""
    kept = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert kept == markdown(app), "run: make docs"
    headings = re.findall(r"^## (hpml.*)$", kept, re.MULTILINE)
    assert headings == [f"hpml {one}".strip() for one in commands()]
    done = subprocess.run(
        [sys.executable, "-m", "hpml_orchestrator.cli.manualtext"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == kept


def test_examples_can_be_typed() -> None:
    """Every command has examples, and each of them is taken by the command that it is for."""
    assert set(EXAMPLES) == set(commands()), "hpml_orchestrator/cli/examples.py"
    called: list[str] = []

    def record(command: Any, path: str) -> None:
        if not hasattr(command, "commands") or command.invoke_without_command:
            command.callback = lambda **_: called.append(path)
        for name, child in getattr(command, "commands", {}).items():
            record(child, f"{path} {name}".strip())

    root: Any = typer.main.get_command(app)
    record(root, "")
    for command, examples in EXAMPLES.items():
        assert examples, command
        for text, line in examples:
            assert text.endswith(":"), text
            called.clear()
            name, *words = shlex.split(line)
            root.main(args=words, prog_name=name, standalone_mode=False)
            assert len(called) == 1, line
            assert f"{called[0]} ".startswith(f"{command} ".lstrip()), line


def test_man_is_plain_text_in_a_pipe(hpml: Hpml) -> None:
    """Readable lines of at most 80 characters, and no control characters."""
    for command in commands():
        told = hpml("man", *command.split())
        assert (told.code, told.err) == (0, "")
        lines = told.out.splitlines()
        assert lines[0] == "NAME"
        assert "\x1b" not in told.out
        assert "\b" not in told.out
        assert max(map(len, lines)) <= 80
        assert f"       hpml {command}".rstrip() in told.out
    assert "       0      Done; for `run` and `wait`" in hpml("man").out
    assert hpml("man", "hpml-submit").out == hpml("man", "submit").out


def test_man_takes_only_commands(hpml: Hpml, tmp_path: Path) -> None:
    """An unknown one is answered with the nearest; pages are written all together."""
    told = hpml("man", "sumbit")
    assert (told.code, told.out) == (2, "")
    assert (
        "COMMAND: there is no such command (got 'sumbit')\nhint: did you mean submit?" in told.err
    )
    told = hpml("man", "submit", "--output", str(tmp_path))
    assert (told.code, list(tmp_path.iterdir())) == (2, [])
    assert "--output: writes all pages" in told.err
    (tmp_path / "file").write_text("")
    told = hpml("man", "--output", str(tmp_path / "file"))
    assert (told.code, "--output: cannot be written" in told.err) == (2, True)


def test_man_shows_a_page_on_a_terminal(shell: Shell) -> None:
    """Through man(1) where there is one; else as plain text."""
    environment = {**shell.environment(), "TERM": "xterm", "PAGER": "cat", "MANPAGER": "cat"}
    nowhere = shell.root / "nowhere"
    nowhere.mkdir()
    alone = in_terminal([HPML, "man", "wait"], {**environment, "PATH": str(nowhere)})
    assert alone.startswith("NAME\r\n       hpml-wait - wait until a run is over")
    if shutil.which("man") is None or shutil.which("groff") is None:
        skip_or_fail("NOT TESTED: man is not installed (apt-get install man-db groff)")
    shown = in_terminal([HPML, "man", "wait"], environment)
    assert re.search(
        r"HPML.WAIT\(1\) +hpml manual +HPML.WAIT\(1\)", re.sub("\x1b.*?m|.\b", "", shown)
    )
