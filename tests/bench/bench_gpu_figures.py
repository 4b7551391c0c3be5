"""What each figure of a GPU costs, and the least that it could: the calls of NVML alone, in C.

    python tests/bench/bench_gpu_figures.py [--gpus N] [--readings N]

The calls go to simulated GPUs, which answer faster than a driver: the table shows what the exporter
adds. A row is one call of NVML with the figures that it answers. The floor is the same calls at the
same periods as a C program, compiled for this run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hpml_exporters.gpu.collector import Session
from hpml_exporters.gpu.figures import Field, GpmMetric, NvmlCall
from hpml_exporters.gpu.reader import Question

from deploy.gpusim.gpusim import Simulator, State, h100

_HEAD = """
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
typedef void *handle_t;
struct field { unsigned number, scope; char rest[32]; };
struct metric { unsigned number; char rest[36]; };
static handle_t gpus[64], samples[64][2];
static uint64_t answer[16], other[16];
int nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, handle_t *);
int nvmlGpmSampleAlloc(handle_t *), nvmlGpmSampleGet(handle_t, handle_t), nvmlGpmMetricsGet(void *);
int nvmlDeviceGetFieldValues(handle_t, int, struct field *);
struct gpm { unsigned version, count; handle_t samples[2]; struct metric metrics[1024]; };
static void ask_gpm(struct gpm *gpm, unsigned g, unsigned reading) {
    handle_t newer = samples[g][0];
    nvmlGpmSampleGet(gpus[g], newer);
    samples[g][0] = samples[g][1];
    samples[g][1] = newer;
    memcpy(gpm->samples, samples[g], sizeof samples[g]);
    if (reading > 0)
        nvmlGpmMetricsGet(gpm);
}
"""
_MAIN = """
int main(void) {
    struct timespec from, to;
    nvmlInit_v2();
    for (unsigned g = 0; g < %(gpus)d; g++)
        if (nvmlDeviceGetHandleByIndex_v2(g, &gpus[g]) || nvmlGpmSampleAlloc(&samples[g][0]) ||
            nvmlGpmSampleAlloc(&samples[g][1]))
            return 1;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    for (unsigned r = 0; r < %(readings)d; r++)
        for (unsigned g = 0; g < %(gpus)d; g++)
            read_gpu(r, g);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    double seconds = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9;
    printf("%%.3f", seconds * 1e6 / %(readings)d);
}
"""


def c_call(number: int, every: int, question: Question) -> tuple[str, str]:
    """Return declarations and statements that make the call of a question."""
    sources = [row.source for row in question.rows]
    first = sources[0]
    if isinstance(first, Field):
        asked = [one for one in sources if isinstance(one, Field)]
        pairs = [(one.number, scope) for one in asked for scope in one.scopes]
        fields = ", ".join(f"{{{field}u, {scope}u}}" for field, scope in pairs)
        before = f"static struct field fields{number}[] = {{{fields}, {{0}}}};"
        call = f"nvmlDeviceGetFieldValues(gpus[g], {len(pairs)}, fields{number});"
    elif isinstance(first, GpmMetric):
        metrics = ", ".join(f"{{{getattr(one, 'number', 0)}u}}" for one in sources)
        before = f"static struct gpm gpm{number} = {{1, {len(sources)}, {{0}}, {{{metrics}}}}};"
        call = f"ask_gpm(&gpm{number}, g, r);"
    else:
        name = first.names[-1 if "Throttle" in first.names[-1] else 0]
        selector = "" if first.selector is None else f"{first.selector}u, "
        others = ", other" * (first.pointers - 1)
        before = f"int {name}();"
        size = ctypes.sizeof(first.layout)
        version = f"*(unsigned *)answer = {size | first.version << 24}u; " if first.version else ""
        call = f"{version}{name}(gpus[g], {selector}answer{others});"
    return before, f"if ((r + {number} + g) % {every} == 0) {{ {call} }}"


def floor(library: Path, plan: list[tuple[int, Question]], gpus: int, readings: int) -> float:
    """Return the microseconds of a reading of all GPUs in C."""
    made = [c_call(number, every, question) for number, (every, question) in enumerate(plan)]
    numbers = {"gpus": gpus, "readings": readings}
    body = "\n    ".join(after for _, after in made)
    text = "\n".join(
        [
            _HEAD,
            *dict.fromkeys(before for before, _ in made),
            f"static void read_gpu(unsigned r, unsigned g) {{\n    {body}\n}}",
            _MAIN % numbers,
        ]
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch, "floor.c"), Path(scratch, "floor")
        source.write_text(text)
        subprocess.run(["gcc", "-O2", "-w", "-o", program, source, library], check=True)
        done = subprocess.run([program], check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure(gpus: int, readings: int) -> None:
    """Print the table; runs with the simulator's library."""
    session = Session(1.0, {}, "/sys")
    session.discover(lambda devices: devices)
    plan = [(max(1, round(one.period)), one.question) for one in session.readers[0].plan]
    print("| call | figures | calls/s | us a call | us/s |\n|---|---|---|---|---|")
    total = 0.0
    for index, (every, question) in enumerate(plan):
        asked = [reader.plan[index].question for reader in session.readers]
        begun = time.thread_time()
        for _ in range(readings // every + 20):
            for one in asked:
                one.ask()
        each = (time.thread_time() - begun) * 1e6 / (readings // every + 20) / gpus
        first = question.rows[0].source
        name = first.names[0] if isinstance(first, NvmlCall) else type(first).__name__
        names = dict.fromkeys(row.figure.name.removeprefix("hpml_gpu_") for row in question.rows)
        total += each * gpus / every
        cells = f"{gpus / every:.2f} | {each:.1f} | {each * gpus / every:.0f}"
        print(f"| {name} | {', '.join(names)} | {cells} |")
    begun = time.thread_time()
    for reading in range(readings):
        for reader in session.readers:
            reader.read(float(reading))
    whole = (time.thread_time() - begun) * 1e6 / readings
    least = floor(Path(os.environ["HPML_BENCH_NVML"]), plan, gpus, readings)
    print(f"\nasking: {total:.0f} us/s; a reading of {gpus} GPUs with its notes: {whole:.0f} us")
    print(f"floor, the same calls in C: {least:.0f} us; ours is {whole / least:.2f} times that")


def main() -> None:
    """Start this file again on simulated GPUs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--readings", type=int, default=600)
    options = parser.parse_args()
    if "HPML_BENCH_NVML" in os.environ:
        measure(options.gpus, options.readings)
        return
    with tempfile.TemporaryDirectory() as scratch:
        simulator, state = Simulator(), Path(scratch, "state")
        gpus = tuple(h100(number, util=50, power=300, gpm_sm=40) for number in range(options.gpus))
        simulator.write(State(gpus=gpus), state)
        environment = simulator.environment(state)
        library = Path(environment["LD_LIBRARY_PATH"].split(":")[0], "libnvidia-ml.so.1")
        words = [sys.executable, __file__, *sys.argv[1:]]
        more = {"HPML_BENCH_NVML": str(library)}
        subprocess.run(words, env=os.environ | environment | more, check=True)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, {json.dumps(vars(options))}")


if __name__ == "__main__":
    main()
