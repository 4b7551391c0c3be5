"""Carry a sweep on: collect what ended, decide what is next, submit it.

`tick` does one round and returns; it can be killed anywhere, and called from anywhere, by several
processes too. What it decides is on disk before it acts (`batches.py`), so that no point is
submitted twice and none is lost.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import SchedulerUnavailable, counted
from hpml_orchestrator.records.files import create_json, read_json, write_json
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.backend import backends_of
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.runs.submit import settle
from hpml_orchestrator.scheduler.recovery import Found
from hpml_orchestrator.spec.values import parse_time
from hpml_orchestrator.sweeps.batches import Batch, Sent, Task, create_batch, read_batches, send
from hpml_orchestrator.sweeps.limits import Limits, is_limit, max_array_size
from hpml_orchestrator.sweeps.rows import Row, RowLog, row_of, rows, sweep_directory, why_stopped
from hpml_orchestrator.sweeps.watch import QUERY_SECONDS, TaskState, TaskStates, completed, query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.sweeps.plan import Point, SweepPlan

__all__ = ["Controller", "Progress", "cancel", "resume", "tick"]
