"""Profile a few steps for `hpml report`: a trace, and the most expensive Python functions.

    with trace_steps(options.profile, rank, after=warm_up_steps) as tracing:
        for step in range(steps):
            with record_function("hpml.step"):      # of torch.profiler
                with record_function("hpml.data"):  # the wait for data
                    ...
            tracing.step()

Needs twelve steps after the warm-up: torch.profiler traces five of them, and cProfile measures five
others, since it would slow down the traced ones.
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
Times = tuple[int, int, float, float]  # calls, calls, own seconds, cumulative seconds
Measured = Mapping[Function, tuple[int, int, float, float, Mapping[Function, Times]]]
STEPS = 5
SHOWN = 10  # number of functions to write
# C functions that wait: for data of another process, for ranks and for their messages.
WAITS = (
    *("_distributed_c10d", "torch._C.wait", "torch._C.Future", "horovod"),
    *("_thread.lock", "select.", "_socket.socket"),
)


@contextmanager
def trace_steps(directory: Path | None, rank: int, *, after: int) -> Iterator[SimpleNamespace]:
    """Profile ten steps; none without a directory.

    Call `step` at the end of each step. Mark steps with
    `torch.profiler.record_function("hpml.step")`, and the wait for data in them with `"hpml.data"`.

    Args:
        directory: where to write `trace-rank0.json.gz` and `functions-rank0.json`.
        rank: this rank; each writes its own files.
        after: steps to skip, such as the warm-up.
    """
    if directory is None:
        yield SimpleNamespace(step=lambda: None)
        return
    directory.mkdir(parents=True, exist_ok=True)
    trace = str(directory / f"trace-rank{rank}.json.gz")
    # In the step in between, a rank may still wait for others to write their traces.
    functions = FunctionTimes(directory / f"functions-rank{rank}.json", after=after + STEPS + 2)
    with profile(  # of the CPU, and of a GPU if there is one
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
    """Writes the most expensive Python functions of the calling thread in five steps.

    Args:
        file: JSON file to write; its times are sums over the steps.
        after: steps to skip.
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
            except ValueError:  # another tool, such as coverage, is already measuring
                self._profile = None
            self._began = time.perf_counter()
        elif self._done == self._after + STEPS:
            self.finish()

    def finish(self) -> None:
        """Write the results, unless that was done before."""
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

    A function's time includes the C functions that it calls, such as `json.loads`, which have no
    line; but not PyTorch's operators, which are in the trace.

    Args:
        stats: from pstats: the times of each function, and those that each caller causes.
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
        kinds["waiting_seconds"] += own.pop(function)  # waits for a loader's workers
    ours = {function: seconds for function, seconds in own.items() if function[0] != "~"}
    kinds["python_seconds"] = sum(ours.values())
    functions = [
        {"name": name, "file": file, "line": line, "seconds": ours[file, line, name]}
        for file, line, name in sorted(ours, key=lambda one: -ours[one])[:SHOWN]
    ]
    return {"waiting_seconds": 0, "operators_seconds": 0, **kinds, "functions": functions}
