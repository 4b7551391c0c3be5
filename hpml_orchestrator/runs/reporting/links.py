"""Other pages about a run: links that the training reported, and TensorBoard's files."""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hpml_orchestrator.runs.reporting.summary import Summary
    from hpml_orchestrator.runs.state import State

_TENSORBOARD = "events.out.tfevents."
_SEARCHED_DIRECTORIES = 200  # a run's directory may hold the millions of files of a data set
_LEVELS = 4
_ITS_OWN = {"attempts", "checkpoints", "code"}


def link_of(data: Mapping[str, object]) -> tuple[str, str] | None:
    """Return name and address in the data of an event `link`; None if it is not a web address."""
    name, url = str(data.get("name") or "link"), data.get("url")
    if isinstance(url, str) and url.startswith(("https://", "http://")) and not url.split()[1:]:
        return name, url
    return None


def read_links(state: State, summary: Summary) -> dict[str, str]:
    """Return the address of each page about a run, by name.

    `TensorBoard` is the directory in `{run.dir}` that holds its files, unless the training reported
    a link of that name.
    """
    links = dict(summary.links)
    if not state.tasks and "TensorBoard" not in links:
        found = list(_tensorboard_directories(state.run.directory))
        if found:
            links["TensorBoard"] = os.path.commonpath(found)
    return links


def _tensorboard_directories(run: Path) -> Iterator[str]:
    top = str(run)
    for place, directories, files in islice(os.walk(top), _SEARCHED_DIRECTORIES):
        if any(name.startswith(_TENSORBOARD) for name in files):
            yield place
        depth = os.path.relpath(place, top).count(os.sep) + (place != top)
        kept = [] if depth >= _LEVELS else sorted(set(directories) - _ITS_OWN)
        directories[:] = kept
