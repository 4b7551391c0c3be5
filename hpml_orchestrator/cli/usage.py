"""Wrong command lines, reported as every other error of hpml: field, value, hint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.cli.reference import EXAMPLES
from hpml_orchestrator.errors import HpmlError, InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["USAGE_ERROR", "asks_for_help", "explained"]

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Typer's class for wrong command lines. Some versions of Typer bundle Click, others import it;
this is the class of either."""

_NUMBERS = {int: "a whole number", float: "a number"}


def asks_for_help(error: Exception) -> bool:
    """Whether no command was given at all, which prints the help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def explained(error: Any) -> HpmlError:
    """Return Typer's error, a `USAGE_ERROR`, as one of hpml's."""
    kind = type(error).__name__
    if kind == "BadOptionUsage":  # comes without a context
        message = "needs a value" if "requires" in error.message else "takes no value"
        return InputError(message, field=error.option_name, hint="see the command's --help")
    context = error.ctx
    path, command = _path(context), context.command
    usage = f"{path} --help"
    if kind == "NoSuchOption":
        return _unknown_option(error)
    if kind == "MissingParameter":
        example = EXAMPLES.get(path.removeprefix("hpml").strip())
        hint = example[0][1] if example else usage
        return InputError("must be given", field=_field(error.param), hint=hint)
    if kind == "BadParameter" and error.param is not None:
        return _bad_value(error, usage)
    if missing := re.match(r"No such command '(.*?)'", error.message, re.DOTALL):
        return _unknown_command(missing[1], command, path)
    if error.message.startswith("Missing command"):
        return InputError("must be given", field="COMMAND", hint=usage)
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message):
        setting = next((word for word in extra[1].split() if re.match(r"[a-z_.]+=", word)), "")
        hint = f"set a field with --set {setting}" if setting else usage
        return InputError("unexpected argument", field=path, value=extra[1], hint=hint)
    return InputError(error.format_message().rstrip("."), hint=usage)


def _unknown_option(error: Any) -> InputError:
    """Name the option that was meant; options of `hpml` itself go before the command."""
    option, path = error.option_name, _path(error.ctx)
    for above in list(_upwards(error.ctx))[1:]:
        if any(option in one.opts for one in above.command.params):
            rest = path.removeprefix(_path(above))
            message = f"goes before the command: {_path(above)} {option} …{rest}"
            return InputError(message, field=option, hint=f"{path} --help")
    near = next(iter(error.possibilities or ()), "")
    hint = f"did you mean {near}?" if near else f"{path} --help"
    return InputError(f"{path} has no such option", field=option, hint=hint)


def _path(context: Any) -> str:
    """Return the command as it is typed, such as `hpml template list`."""
    names = [one.info_name for one in _upwards(context)][:-1]
    return " ".join(["hpml", *reversed(names)])


def _upwards(context: Any) -> Iterator[Any]:
    while context is not None:
        yield context
        context = context.parent


def _unknown_command(word: str, group: Any, path: str) -> InputError:
    near = nearest(word, group.commands)
    if near:
        hint = f"did you mean {path} {near}?"
    elif word.endswith((".yaml", ".yml", ".toml")):
        hint = f"{path} run {word}"
    else:
        hint = f"commands: {', '.join(group.commands)}"
    return InputError(f"{path} has no such command", field="COMMAND", value=word, hint=hint)


def _bad_value(error: Any, usage: str) -> InputError:
    """Report a value of the wrong type or out of range, with the value that was given."""
    param = error.param
    cause = getattr(error.__cause__, "errors", None)
    value = cause()[0].get("input") if callable(cause) else None
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    number = _NUMBERS.get(kind, "") if isinstance(kind, type) else ""
    if number:
        low, high = getattr(param, "min", None), getattr(param, "max", None)
        number += f", {low} or more" if low is not None else ""
        number += f", {high} or less" if high is not None else ""
        return InputError(f"must be {number}", field=_field(param), value=value, hint=usage)
    text = error.message.rstrip(".")
    return InputError(text[0].lower() + text[1:], field=_field(param), hint=usage)


def _field(param: Any) -> str:
    is_argument = param.param_type_name == "argument"
    return _metavar(param) if is_argument else str(max(param.opts, key=len))


def _metavar(param: Any) -> str:
    return (param.metavar or str(param.name).upper()).strip("[]")
