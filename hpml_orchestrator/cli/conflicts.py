"""Options that contradict one another are refused: none is passed over in silence."""

from __future__ import annotations

from collections.abc import Mapping

from hpml_orchestrator.errors import InputError

__all__ = ["refuse_with"]


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
