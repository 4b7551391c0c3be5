"""Options that contradict one another, or say nothing, are refused: none is passed over."""

from __future__ import annotations

from collections.abc import Mapping

from hpml_orchestrator.errors import InputError

__all__ = ["refuse_empty", "refuse_with"]


def refuse_empty(options: Mapping[str, str | None]) -> None:
    """Refuse options that were given without a word in them, as by an unset shell variable.

    Args:
        options: each with what was given for it; None where it was not given.

    Raises:
        InputError: one of them is empty.
    """
    for option, given in options.items():
        if given is not None and not given.strip():
            raise InputError(
                "must not be empty",
                field=option,
                value=given,
                hint="is a variable of the shell not set? without the option, its default counts",
            )


def refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Refuse what was given together with an option that rules it out.

    Args:
        option: the option that was given.
        others: options that it rules out, with what was given for them.

    Raises:
        InputError: one of the others was given as well.
    """
    for other, given in others.items():
        if given:
            raise InputError(
                f"cannot be given together with {option}", field=other, hint="give one of the two"
            )
