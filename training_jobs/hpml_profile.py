"""Profile a few steps for `hpml report`: a trace of what runs, and the Python that costs most.

    with trace_steps(options.profile, rank, after=warm_up_steps) as tracing:
        for step in range(steps):
            with record_function("hpml.step"):      # of torch.profiler
                with record_function("hpml.data"):  # the wait for data
                    ...
            tracing.step()

It needs twelve steps after the warm-up: torch.profiler traces five, and cProfile measures five
others, since it would slow those down that are traced.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from types import SimpleNamespace

from torch.profiler import profile, schedule

Function = tuple[str, int, str]  # file, line and name
Times = tuple[int, int, float, float]  # calls, calls, own seconds, all seconds
Measured = Mapping[Function, tuple[int, int, float, float, Mapping[Function, Times]]]
STEPS = 5
SHOWN = 10  # functions that are written
# Functions in C that wait: for data of another process, for ranks and for what they send.
WAITS = (
    *("_distributed_c10d", "torch._C.wait", "torch._C.Future", "horovod"),
    *("_thread.lock", "select.", "_socket.socket"),
)


@contextmanager
def trace_steps(directory: Path | None, rank: int, *, after: int) -> Iterator[SimpleNamespace]:
    """Profile ten steps; without a directory, none.

    Its `step` ends a step. Mark steps with `torch.profiler.record_function("hpml.step")`, and in
    them the wait for data with `"hpml.data"`.

    Args:
        directory: where to write `trace-rank0.json.gz` and `functions-rank0.json`.
        rank: this one; all write theirs.
        after: steps to leave out, such as the warm-up.
    """
    if directory is None:
        yield SimpleNamespace(step=lambda: None)
        return
    directory.mkdir(parents=True, exist_ok=True)
    trace = str(directory / f"trace-rank{rank}.json.gz")
    # In the step in between, a rank may still wait for others to write their trace.
    functions = FunctionTimes(directory / f"functions-rank{rank}.json", after=after + STEPS + 2)
    with profile(  # the CPU, and a GPU if there is one
        schedule=schedule(wait=after, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(trace),
        acc_events=True,
    ) as traced:

        def step() -> None:
            traced.step()
            functions.step()

        yield SimpleNamespace(step=step)
    functions.finish()


class FunctionTimes:
    """Writes the Python functions that cost most in five steps of the thread that calls it.

    Args:
        file: to write, in JSON; its times are sums of all steps.
        after: steps to leave out.
    """

    def __init__(self, file: Path, *, after: int) -> None:
        self._file, self._after, self._done, self._began = file, after, 0, 0.0
        self._profile: Profile | None = None

    def step(self) -> None:
        """End a step."""
        self._done += 1
        if self._done == self._after:
            self._profile = Profile()
            try:
                self._profile.enable()
            except ValueError:  # another tool measures already, such as coverage
                self._profile = None
            self._began = time.perf_counter()
        elif self._done == self._after + STEPS:
            self.finish()

    def finish(self) -> None:
        """Write what was measured, unless it is written."""
        if self._profile is None:
            return
        seconds = time.perf_counter() - self._began
        self._profile.disable()
        measured = vars(Stats(self._profile))["stats"]
        steps, self._profile = min(self._done - self._after, STEPS), None
        if steps > 0:
            found = {"steps": steps, "seconds": seconds, **sum_up(measured)}
            self._file.write_text(json.dumps(found, indent=1) + "\n")


def sum_up(stats: Measured) -> dict[str, object]:
    """Return the seconds of Python, of PyTorch's operators, of waiting, and per function.

    A function's time includes what it calls in C, such as `json.loads`: that has no line. PyTorch's
    operators do not count: the trace shows these.

    Args:
        stats: of pstats: the times of each function, and those that each caller causes.
    """
    own: defaultdict[Function, float] = defaultdict(float)
    kinds: defaultdict[str, float] = defaultdict(float)
    for function, (_, _, seconds, _, callers) in stats.items():
        file, _, name = function
        if file != "~":
            own[function] += seconds
        elif any(word in name for word in WAITS):
            kinds["waiting_seconds"] += seconds
        elif "torch" in name:
            kinds["operators_seconds"] += seconds
        else:
            for caller, (_, _, part, _) in callers.items():
                own[caller] += part
    for function in [one for one in own if "/multiprocessing/" in one[0]]:
        kinds["waiting_seconds"] += own.pop(function)  # for the workers of a loader
    ours = {function: seconds for function, seconds in own.items() if function[0] != "~"}
    kinds["python_seconds"] = sum(ours.values())
    functions = [
        {"name": name, "file": file, "line": line, "seconds": ours[file, line, name]}
        for file, line, name in sorted(ours, key=lambda one: -ours[one])[:SHOWN]
    ]
    return {"waiting_seconds": 0, "operators_seconds": 0, **kinds, "functions": functions}
