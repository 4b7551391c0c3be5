"""Write the command reference and the manual pages from the commands: `make docs`.

docs/commands.md comes from Typer's own generator. Each page of docs/man/man1 is written as
reStructuredText, which docutils turns into roff. The same commands give the same bytes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from docutils.core import publish_string
from typer.cli import get_docs_for_click

from hpml_orchestrator.cli.main import COMMANDS, app
from hpml_orchestrator.cli.reference import EXAMPLES, VARIABLES, exit_statuses
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ABOUT = (
    "A run is named by its id, a unique beginning or end of its id, its job id, the name of its "
    "job (commands that only read take the newest run of that name), or `last`; "
    "`RUN.INDEX` is one task of a job array. Commands that print data take `--json`. Options of "
    "`hpml` itself go before the command."
)


def loaded() -> Any:
    """Return the application with all of its commands imported."""
    root: Any = typer.main.get_command(app)
    for name in COMMANDS:
        root.load(name)
    return root


def markdown() -> str:
    """Return docs/commands.md."""
    root = loaded()
    for name, command in commands(root):
        lines = [f"{purpose}\n\n```sh\n{line}\n```" for purpose, line in EXAMPLES[name]]
        command.epilog = "\n\n".join(["**Examples**:", *lines])
        command.short_help = (command.help or "").partition("\n\n")[0]
    context = typer.Context(root, info_name="hpml", **root.context_settings)
    text = get_docs_for_click(obj=root, ctx=context, name="hpml", title="Commands")
    text = re.sub(r"^(#+) `(.*)`$", r"\1 \2", text, flags=re.MULTILINE)
    head, mark, rest = text.replace("```console\n$ ", "```text\n").partition("**Commands**:")
    shared = [ABOUT, "", "**Exit status**:", ""]
    shared += [f"* `{status}`: {meaning}" for status, meaning in exit_statuses().items()]
    shared += ["", "**Environment**:", ""]
    shared += [f"* `{name}`: {meaning}" for name, meaning in VARIABLES.items()]
    return "\n".join([head + "\n".join(shared), "", mark + rest.rstrip(), ""])


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with its name after `hpml`, the application first."""
    yield name, command
    for child_name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {child_name}".strip())


def pages() -> dict[str, str]:
    """Return file name and text of every manual page."""
    root = loaded()
    settings = {"report_level": 2, "halt_level": 2, "_disable_config": True}
    made = {}
    for name, command in commands(root):
        title = f"hpml {name}".strip()
        text = publish_string(_page(title, command), writer="manpage", settings_overrides=settings)
        made[f"{title.replace(' ', '-')}.1"] = text.decode("utf-8")
    return made


def _page(title: str, command: Any) -> str:
    """Return a page as reStructuredText."""
    name = title.removeprefix("hpml").strip()
    context = typer.Context(command, info_name=title, help_option_names=["-h", "--help"])
    summary, *paragraphs = (command.help or "").split("\n\n")
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            records[param.param_type_name].append(record)
    below = getattr(command, "commands", {})
    sections = {
        "SYNOPSIS": [f"``{title} {' '.join(command.collect_usage_pieces(context))}``"],
        "DESCRIPTION": [_rst(part) for part in (summary, *paragraphs, *([] if name else [ABOUT]))],
        "ARGUMENTS": _definitions(records["argument"]),
        "OPTIONS": _definitions(records["option"]),
        "COMMANDS": _definitions((f"{title} {one}", child.help) for one, child in below.items()),
    }
    if not name:
        statuses = exit_statuses().items()
        sections["EXIT STATUS"] = _definitions((str(code), text) for code, text in statuses)
        sections["ENVIRONMENT"] = _definitions(VARIABLES.items())
    sections["EXAMPLES"] = [f"{purpose}:\n\n    {line}" for purpose, line in EXAMPLES[name]]
    above = ["hpml"] if name else []
    related = [*above, *(f"{title} {one}".replace(" ", "-") for one in below), "sbatch"]
    sections["SEE ALSO"] = [", ".join(f"{page}(1)" for page in related)]
    page = title.replace(" ", "-")
    rule, subtitle = "=" * len(page), _rst(summary.rstrip("."))
    lines = [rule, page, rule, "-" * len(subtitle), subtitle, "-" * len(subtitle), ""]
    lines += [":Manual section: 1", ":Manual group: hpml manual", f":Version: hpml {__version__}"]
    for heading, blocks in sections.items():
        if blocks:
            lines += ["", heading, "=" * len(heading), "", "\n\n".join(blocks)]
    return "\n".join(lines) + "\n"


def _definitions(items: Iterable[tuple[str, str]]) -> list[str]:
    return [f"``{term}``\n    {_rst(text.partition(chr(10))[0])}" for term, text in items]


def _rst(text: str) -> str:
    """Return a help text as reStructuredText: `literal` becomes a literal, the rest is plain."""
    parts = " ".join(text.split()).split("`")
    plain = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts]
    return "".join(
        f"\\ ``{part}``\\ " if number % 2 else plain[number] for number, part in enumerate(parts)
    )


def main() -> None:
    """Write all files below a directory, that of this file if none is named."""
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (docs / "man" / "man1").mkdir(parents=True, exist_ok=True)
    (docs / "commands.md").write_text(markdown(), encoding="utf-8")
    for name, text in pages().items():
        (docs / "man" / "man1" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
