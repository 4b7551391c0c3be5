"""A group of commands that does something itself: `hpml stage data` beside `hpml stage verify`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

__all__ = ["OwnArguments"]


class OwnArguments(TyperGroup):
    """A group whose callback takes arguments; what is done is decided by the first word.

    The name of a command is that command, and so a file of that name is given as `./name`. Anything
    else, an option too, is for the callback.
    """

    allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the words of a command to it; the callback is not called then."""
        if args and args[0] in self.commands:
            super().parse_args(ctx, [])  # fills in the defaults, which nobody looks at
            ctx.args = list(args)
            return list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named, else the callback."""
        if not ctx.args:
            return super().invoke(ctx)
        name, command, rest = self.resolve_command(ctx, ctx.args)
        assert command is not None  # noqa: S101 - it was found among the commands
        ctx.invoked_subcommand = name
        ctx.args = []
        with command.make_context(name, rest, parent=ctx) as below:
            return below.command.invoke(below)
