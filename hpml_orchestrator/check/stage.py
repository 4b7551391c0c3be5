"""What a job's way of staging does not go with, and whether its data fit what the site tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.script.render import memory_mebibytes
from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import NodeType, Site

__all__ = ["Seen", "check_staging", "check_staging_room", "target_notes"]


@dataclass(frozen=True)
class Seen:
    """What is known of an entry's source and of the program that reads it.

    Attributes:
        is_directory: None where the source cannot be looked at here.
        knows_parts: whether the program's own text says that it reads a part of the data; None
            where it cannot be looked at.
    """

    is_directory: bool | None = None
    knows_parts: bool | None = None


def check_staging(job: Job, seen: Mapping[str, Seen]) -> list[Finding]:
    """Return what does not go together in the entries of `stage`.

    Args:
        job: a complete job.
        seen: what is known of the entries, by name.
    """
    found = []
    for index, stage in enumerate(job.stage):
        here = seen.get(stage.name, Seen())
        field = f"stage.{index}"
        if stage.keep and stage.target == "shm":
            found.append(
                Finding(
                    "warning",
                    "stage.keep_ram",
                    f"{field}.keep",
                    True,
                    f"{stage.name} stays in the memory of the nodes when the job is over, until "
                    "room is needed; many sites empty /dev/shm between jobs, or count it against "
                    "whoever comes next",
                    hint="`target: local` keeps it on the disk",
                )
            )
        if stage.distribution == "sbcast" and here.is_directory:
            found.append(
                Finding(
                    "error",
                    "stage.sbcast",
                    f"{field}.distribution",
                    "sbcast",
                    f"sbcast brings one file, and {stage.source} is a directory",
                    hint="`distribution: chain`, or stage one archive of it",
                )
            )
        if stage.distribution == "partition" and here.is_directory is False:
            found.append(
                Finding(
                    "error",
                    "stage.partition",
                    f"{field}.distribution",
                    "partition",
                    f"the files of a directory are shared out, and {stage.source} is one file",
                    hint="`distribution: auto`, or stage a directory of several files",
                )
            )
        elif stage.distribution == "partition" and not here.knows_parts:
            variable = f"HPML_PART_{stage.name.upper()}"
            found.append(
                Finding(
                    "warning",
                    "stage.sampler",
                    f"{field}.distribution",
                    "partition",
                    f"each node gets a part of {stage.name} only, and "
                    + (
                        f"the program does not read {variable}, which says which part"
                        if here.knows_parts is False
                        else f"a program that does not read {variable} misses the rest"
                    ),
                    hint="`PartSampler` of training_jobs/hpml_packed.py obeys it",
                )
            )
        if stage.distribution not in ("auto", "shared") and job.resources.nodes == 1:
            found.append(
                Finding(
                    "warning",
                    "stage.one_node",
                    f"{field}.distribution",
                    stage.distribution,
                    "the job has one node: there is nothing to distribute",
                    hint="leave it out",
                )
            )
    return found


def check_staging_room(job: Job, site: Site | None, *, disk_mib: int) -> list[Finding]:
    """Return whether data fit the local disks and the memory that a site profile tells of.

    Args:
        job: a complete job.
        site: the site profile, if there is one.
        disk_mib: what goes to each node's local disk, as far as known.
    """
    kinds = site.kinds_of(job.resources.partition) if site else {}
    own = int((job.resources.memory or "0M").removesuffix("M"))
    memory = memory_mebibytes(job)
    return [
        *_too_small("local_disk", "target: shm", kinds, disk_mib, "of local disk"),
        *(
            _too_small("memory", "target: local", kinds, memory, "of memory")
            if memory > own
            else []
        ),
    ]


def target_notes(job: Job, targets: Mapping[str, str]) -> list[str]:
    """Return what became of each `target: auto`, a line each.

    Args:
        job: a complete job.
        targets: why, by the entry's name.
    """
    return [
        f"stage.{index}.target: auto is {stage.target} here: {targets[stage.name]}"
        for index, stage in enumerate(job.stage)
        if stage.name in targets
    ]


def _too_small(
    what: str, other: str, kinds: Mapping[str, NodeType], need_mib: int, words: str
) -> list[Finding]:
    """Return a finding where data are more than kinds of nodes have: of all of them an error."""
    told = {name: getattr(kind, what) for name, kind in kinds.items()}
    sizes = {name: int(size.removesuffix("M")) for name, size in told.items() if size}
    small = sorted(name for name, size in sizes.items() if size < need_mib)
    if not need_mib or not small:
        return []
    everywhere = len(small) == len(kinds)
    most = max(sizes[name] for name in small)
    return [
        Finding(
            "error" if everywhere else "warning",
            f"stage.{what}",
            "stage",
            size_text(need_mib),
            f"with what is staged the job needs {size_text(need_mib)} {words}, and nodes of type "
            f"{listed(small)} have at most {size_text(most)}, by the site profile",
            size_text(most),
            f"stage less, use `{other}`"
            + ("" if everywhere else ", or choose the other nodes by `constraint`"),
        )
    ]
