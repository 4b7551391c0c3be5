"""`python -m hpml_exporters OPTIONS_JSON`: the exporter of a node as a lean process.

Exit statuses: 0 on request, 2 for wrong options, 75 if a driver call does not return (start the
exporter again), those of `hpml_orchestrator.errors` for other errors.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from hpml_exporters.core.sampler import CollectorSource
    from hpml_exporters.options import NodeOptions

    Load = Callable[[str], tuple[NodeOptions, list[CollectorSource] | None]]

_WRONG_OPTIONS = 2
_STANDARD_ERROR = 2


def _load_node(text: str) -> tuple[NodeOptions, list[CollectorSource] | None]:
    from hpml_exporters.options import NodeOptions  # noqa: PLC0415 - signals first

    return NodeOptions.from_json(text), None


def main(words: list[str], load: Load = _load_node) -> int:
    """Run an exporter with options as one JSON object; returns the exit status.

    Args:
        words: the arguments.
        load: parses the options; also returns collectors other than a node's.
    """
    from hpml_exporters.app import block_signals, print_once, run  # noqa: PLC0415 - signals first

    block_signals()
    import logging  # noqa: PLC0415 - as above

    from hpml_exporters.options import check  # noqa: PLC0415 - as above
    from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415 - as above
    from hpml_orchestrator.log import log_to_stderr  # noqa: PLC0415 - as above

    log_to_stderr("hpml_exporters")
    log = logging.getLogger("hpml_exporters")
    if len(words) != 1:
        log.error("one argument is wanted: options as JSON, see hpml_exporters/options.py")
        return _WRONG_OPTIONS
    try:
        try:
            options, sources = load(words[0])
            check(options)
        except (ValueError, TypeError, AttributeError) as error:
            log.error("the options are no JSON object of NodeOptions: %s", error)  # noqa: TRY400
            return _WRONG_OPTIONS
        return print_once(options) if options.once else run(options, sources)
    except HpmlError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        log.error("%s%s", error, hint)  # noqa: TRY400 - a user's mistake has no traceback
        return error.exit_code
    except OSError as error:
        log.error("%s", error)  # noqa: TRY400 - as above
        return 1


def _open_standard_descriptors() -> None:
    """Keep a closed 0, 1 or 2 from becoming a socket: libraries write to these descriptors."""
    last = os.open(os.devnull, os.O_RDWR)
    while last <= _STANDARD_ERROR:
        last = os.open(os.devnull, os.O_RDWR)
    os.close(last)


def program(load: Load = _load_node) -> NoReturn:
    """Run as an exporter's process, from its arguments to its exit status."""
    _open_standard_descriptors()
    status = main(sys.argv[1:], load)
    for stream in (sys.stdout, sys.stderr):
        # It is None if the caller closed it, and its reader may be gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)  # do not wait for threads in a driver call or with a client


if __name__ == "__main__":
    program()
