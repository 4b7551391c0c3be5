"""Wrong command lines in the words of hpml's own errors: what was wrong, what is right, a hint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.errors import HpmlError, InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["USAGE_ERROR", "asks_for_help", "explained"]

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""What Typer raises for a wrong command line. Typer brings its own Click in some versions and
imports it in others: this is the class of either."""

_NUMBERS = {int: "a whole number", float: "a number"}


def asks_for_help(error: Exception) -> bool:
    """Whether no command was given at all, which is answered with the help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def explained(error: Any, words: Sequence[str], root: Any) -> HpmlError:
    """Return Typer's error as one of hpml's.

    Args:
        error: a `USAGE_ERROR`.
        words: the command line after `hpml`.
        root: the command `hpml`.
    """
    chain = list(_chain(root, words))
    path, command = chain[-1]
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _no_option(error.option_name, chain)
    if kind == "BadOptionUsage":
        return _without_value(error, path, command)
    if kind == "MissingParameter":
        return InputError("must be given", field=_field(error.param), hint=_example(path))
    if kind == "BadParameter" and error.param is not None:
        return _bad_value(error, path)
    missing = re.match(r"No such command '(.*?)'", error.message, re.DOTALL)
    if missing:
        known = ", ".join(_shown(command))
        return InputError(
            f"{path} has no such command",
            field="COMMAND",
            value=missing[1],
            hint=_meant(missing[1], command, path) or f"there are: {known}",
        )
    surplus = re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message)
    if surplus:
        return _surplus(surplus[1], path)
    if error.message.startswith("Missing command"):
        return InputError("must be given", field="COMMAND", hint=f"{path} {_shown(command)[0]} …")
    return InputError(error.format_message().rstrip("."), hint=f"{path} --help")


def _chain(root: Any, words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield `hpml` and the commands below it that a command line names, with their names."""
    path, command = "hpml", root
    yield path, command
    skip = False
    for word in words:
        commands = getattr(command, "commands", None)
        if not commands:
            return
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = "=" not in word and any(
                word in option.opts and not getattr(option, "is_flag", False)
                for option in _options(command)
            )
        elif word in commands:
            path, command = f"{path} {word}", commands[word]
            yield path, command
        else:
            return


def _options(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option"]


def _names(command: Any) -> list[str]:
    names = [name for one in _options(command) for name in (*one.opts, *one.secondary_opts)]
    return [*names, "--help", "-h"]


def _near_option(option: str, command: Any) -> str:
    """Return the option that was probably meant; dashes, which all have, make none alike."""
    bare = {name.lstrip("-"): name for name in _names(command)}
    return bare.get(nearest(option.lstrip("-"), bare), "")


def _shown(group: Any) -> list[str]:
    return [name for name, one in group.commands.items() if not one.hidden]


def _no_option(option: str, chain: list[tuple[str, Any]]) -> InputError:
    path = chain[-1][0]
    for above, group in chain[:-1]:
        if option in _names(group):
            rest = path.removeprefix(above)
            return InputError(
                f"stands before the command: {above} {option} …{rest}",
                field=option,
                hint=f"{path} --help",
            )
    near = next(filter(None, (_near_option(option, one) for _, one in reversed(chain))), "")
    return InputError(
        f"{path} has no such option",
        field=option,
        hint=f"did you mean {near}?" if near else f"{path} --help",
    )


def _without_value(error: Any, path: str, command: Any) -> InputError:
    option = next((one for one in _options(command) if error.option_name in one.opts), None)
    if "requires" in error.message:
        wanted = _metavar(option) if option is not None else "VALUE"
        return InputError(
            f"needs a value: {error.option_name} {wanted}",
            field=error.option_name,
            hint=f"{path} --help",
        )
    return InputError(
        "takes no value", field=error.option_name, hint=f"{error.option_name} alone will do"
    )


def _bad_value(error: Any, path: str) -> InputError:
    """Tell a value that Typer cannot take; the value comes from the error that it came of."""
    param = error.param
    cause = getattr(error.__cause__, "errors", None)
    value = cause()[0].get("input") if callable(cause) else None
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    words = _NUMBERS.get(kind, "") if isinstance(kind, type) else ""
    if words:
        words += f", {low} or more" if low is not None else ""
        words += f", {high} or less" if high is not None else ""
        return InputError(
            f"must be {words}", field=_field(param), value=value, hint=f"{path} --help"
        )
    text = error.message.rstrip(".")
    return InputError(text[0].lower() + text[1:], field=_field(param), hint=f"{path} --help")


def _surplus(text: str, path: str) -> InputError:
    """Tell words too many; a field of the job file among them is meant for `--set`."""
    setting = next((word for word in text.split() if re.match(r"[a-z_.]+=", word)), "")
    return InputError(
        "no word is taken there" if path == "hpml" else f"{path} takes no such word",
        field="arguments",
        value=text,
        hint=f"a field is set with --set {setting}" if setting else f"{path} --help",
    )


def _meant(word: str, group: Any, path: str) -> str:
    near = nearest(word, _shown(group))
    if near:
        return f"did you mean {path} {near}?"
    if word.endswith((".yaml", ".yml", ".toml")):
        return f"{path} run {word}"
    near = _near_option(word, group) if word.startswith("-") else ""
    return f"did you mean {near}?" if near else ""


def _field(param: Any) -> str:
    if param.param_type_name == "argument":
        return _metavar(param)
    return str(max(param.opts, key=len))


def _metavar(param: Any) -> str:
    return (param.metavar or str(param.name).upper()).strip("[]")


def _example(path: str) -> str:
    from hpml_orchestrator.cli.examples import EXAMPLES  # noqa: PLC0415 - for errors alone

    known = EXAMPLES.get(path.removeprefix("hpml").strip())
    return known[0][1] if known else f"{path} --help"
