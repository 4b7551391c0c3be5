"""`python callfilter.py CALLS_FILE COMMAND...`: run a command that may use these system calls only.

It stands for systemd's SystemCallFilter= with SystemCallErrorNumber=EPERM, through the same
libseccomp, on machines where systemd does not run. Exits with 77 if that is impossible.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = -1


def main(calls: list[str], command: list[str]) -> None:
    """Load the filter, and become the command."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        sys.exit(77)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(_REFUSE))
    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != _UNKNOWN:  # negative numbers are those of other architectures
            library.seccomp_rule_add(rules, _ALLOW, number, 0)
    if library.seccomp_load(rules) != 0:
        sys.exit(77)
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text("utf-8").split(), sys.argv[2:])
