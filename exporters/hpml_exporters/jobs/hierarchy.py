"""Where Slurm's control groups are: the directories that hold its jobs, in every layout.

Version 1: `<controller>/slurm[_<node>]/uid_<uid>/<job>`; the name of the first is CgroupPrepend's.
Version 2: `system.slice/[<node>_]slurmstepd.scope/<job>`, in the slice that CgroupSlice names, or
below the group of a container.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from hpml_exporters.jobs import raw

__all__ = ["CONTROLLERS", "JobsRoot", "controllers", "is_uid", "jobs_roots", "roots_of_process"]

CONTROLLERS = ("freezer", "memory", "cpuacct", "cpuset", "devices", "cpu", "pids", "blkio")
"""Of version 1, in the order in which jobs are looked for.

The freezer is what proctrack/cgroup tracks processes with, the others are there as configured.
"""

_SCOPE = "slurmstepd.scope"
_DEPTH = 5
_NOT_SLURMS = ("user.slice", "machine.slice", "init.scope")


@dataclass(frozen=True)
class JobsRoot:
    """A directory whose children are jobs (version 2), or users with jobs (version 1).

    Attributes:
        path: of the directory.
        controller: of version 1; empty: version 2.
        below: path without the controller's mount point, the same in all controllers.
    """

    path: str
    controller: str = ""
    below: str = ""


def controllers(cgroup: str) -> dict[str, str]:
    """Return the mount points of the controllers of version 1 by name; several may share one."""
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(cgroup))
    except OSError:
        return {}
    for name in names:
        for one in name.split(","):
            path = f"{cgroup}/{name}"
            if one in CONTROLLERS and os.path.exists(f"{path}/cgroup.procs"):
                found[one] = path
    return found


def unified(cgroup: str) -> list[str]:
    """Return the mount points of version 2: the whole tree, or a hybrid's part of it."""
    found = (cgroup, f"{cgroup}/unified")
    return [path for path in found if os.path.exists(f"{path}/cgroup.controllers")]


def jobs_roots(cgroup: str) -> list[JobsRoot]:
    """Look through the tops of all hierarchies for directories that hold Slurm's jobs."""
    found = [JobsRoot(path) for mount in unified(cgroup) for path in _scopes(mount, _DEPTH)]
    for controller, mount in controllers(cgroup).items():
        found += [
            JobsRoot(f"{mount}{below}", controller, below) for below in _version_1(mount, "", 2)
        ]
    return sorted(found, key=_order)


def roots_of_process(text: str, cgroup: str) -> list[JobsRoot]:
    """Return the directories that hold the job of a process, by its /proc/PID/cgroup.

    It finds what no search by name can: prefixes of containers, names of the site's own.
    """
    found = []
    mounts = controllers(cgroup)
    for line in text.split("\n"):  # alone: groups that users name may have other ends of lines
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        parts = path.split("/")
        if number == "0":
            at = next((n for n, part in enumerate(parts) if part.startswith("step_")), 0) - 1
            below = "/".join(parts[:at]) if at > 0 else ""
            found += [JobsRoot(mount + below) for mount in unified(cgroup) if below]
            continue
        at = next((n for n, part in enumerate(parts) if is_uid(part)), 0)
        below = "/".join(parts[:at])
        found += [
            JobsRoot(mounts[name] + below, name, below)
            for name in names.split(",")
            if below and name in mounts
        ]
    return sorted((one for one in found if os.path.isdir(one.path)), key=_order)


def is_uid(name: str) -> bool:
    """Return whether a directory is that of a user in version 1."""
    return name.startswith("uid_") and name[4:].isdigit()


def _order(root: JobsRoot) -> tuple[int, str]:
    return (CONTROLLERS.index(root.controller) + 1 if root.controller else 0, root.path)


def _scopes(path: str, depth: int) -> Iterable[str]:
    for name in raw.subdirectories(path) or ():
        inside = f"{path}/{name}"
        if name == _SCOPE or name.endswith(f"_{_SCOPE}"):
            yield inside
        elif depth and name not in _NOT_SLURMS and _may_hold_slurm(name):
            yield from _scopes(inside, depth - 1)


def _may_hold_slurm(name: str) -> bool:
    """Services and logins hold no scopes; slices do, and the groups of containers may."""
    return not name.endswith((".service", ".mount", ".socket", ".swap")) and (
        name.endswith((".slice", ".scope")) or "docker" in name or "slurm" in name
    )


def _version_1(mount: str, below: str, depth: int) -> Iterable[str]:
    for name in raw.subdirectories(mount + below) or ():
        if name in _NOT_SLURMS:
            continue
        inside = f"{below}/{name}"
        # A root of Slurm's stays for good, users come and go.
        if (
            name == "slurm"
            or name.startswith("slurm_")
            or any(map(is_uid, raw.subdirectories(mount + inside) or ()))
        ):
            yield inside
        elif depth > 1 and not name.endswith((".slice", ".service", ".scope")):
            yield from _version_1(mount, inside, depth - 1)
