"""`python -m hpml_exporters OPTIONS_JSON`: the exporter of a node as a lean process.

Exit statuses: 0 told to end, 2 the options are wrong, 75 a driver call does not return (start me
again), those of `hpml_orchestrator.errors` for what else is wrong.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["main"]

_WRONG_OPTIONS = 2
_STANDARD_ERROR = 2


def main(words: list[str]) -> int:
    """Run the exporter with options as one JSON object; returns the exit status."""
    from hpml_exporters.app import block_signals, run  # noqa: PLC0415 - signals first

    block_signals()
    from hpml_exporters.core.sampler import tell  # noqa: PLC0415
    from hpml_exporters.options import NodeOptions, check  # noqa: PLC0415
    from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415

    if len(words) != 1:
        tell("error: one argument is wanted: options as JSON, see hpml_exporters/options.py")
        return _WRONG_OPTIONS
    try:
        options = NodeOptions.from_json(words[0])
    except (ValueError, TypeError, AttributeError) as error:
        tell(f"error: the options are no JSON object of NodeOptions: {error}")
        return _WRONG_OPTIONS
    try:
        check(options)
        return run(options)
    except HpmlError as error:
        tell(f"error: {error}")
        if error.hint:
            tell(f"hint: {error.hint}")
        return error.exit_code
    except OSError as error:
        tell(f"error: {error}")
        return 1


def _open_standard_descriptors() -> None:
    """Keep 0, 1 and 2 from becoming sockets where the caller closed them: libraries write there."""
    last = os.open(os.devnull, os.O_RDWR)
    while last <= _STANDARD_ERROR:
        last = os.open(os.devnull, os.O_RDWR)
    os.close(last)


if __name__ == "__main__":
    _open_standard_descriptors()
    status = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        # It is None where the caller closed it; and whoever read it may be gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)  # threads that wait in a driver or for a client keep nobody
