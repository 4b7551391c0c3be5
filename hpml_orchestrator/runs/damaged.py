"""Find damaged records of a run before figures are computed from them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError, counted
from hpml_orchestrator.records.damage import RUN_FIELDS, find_damage, record_damage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.records.damage import Damage
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.runs.state import State


def damage_of(state: State, attempts: Sequence[Attempt]) -> list[Damage]:
    """Return the damaged files of a run: its plan, and those of some attempts.

    Args:
        state: of the run.
        attempts: in order, up to the last one. Only that may still be written.
    """
    found = [*record_damage(state.run.directory / "run.json", RUN_FIELDS)]
    return found + [
        damage
        for attempt in attempts
        for damage in find_damage(
            attempt.directory,
            # The last line of a file that is still written may be incomplete; that is no damage.
            is_growing=attempt is attempts[-1] and state.unfinished and attempt.ended is None,
        )
    ]


def damage_error(state: State, found: Sequence[Damage]) -> RecordError:
    """Return the error that names damaged files."""
    more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    hint = f"`hpml show {state.submission.label}` prints what can be read; figures are incomplete"
    return RecordError(f"{found[0]}{more}", hint=hint)


@contextlib.contextmanager
def naming_damage(state: State) -> Iterator[None]:
    """Turn errors about a record's form into one that names the damaged file.

    Raises:
        RecordError: names the file if it can be found.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        attempts = state.run.attempts()
        if found := damage_of(state, attempts):
            raise damage_error(state, found) from error
        places = [str(state.submission.directory), *(str(one.directory) for one in attempts[-1:])]
        raise RecordError(
            f"a record in {' or '.join(places)} is damaged: it does not have the form that this "
            "hpml writes"
        ) from error
