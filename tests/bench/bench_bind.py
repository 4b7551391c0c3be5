"""Start-up of `hpml-bind` vs. taskset, numactl and a bare interpreter, and the files it opens.

    python tests/bench/bench_bind.py [RUNS] [PYTHON]

A rank's start from the archive, with a plan that sets CPUs and memory and with verify at warn,
until /bin/true has ended. All commands take turns, so that whatever else the machine does meets
all of them alike; each figure is the median of RUNS (default 40) wall-clock times, files warm: two
rounds before do not count. PYTHON (default: this one) runs the rank. Goal: at most 5 times
`python -I -S -c pass` in the same run; what follows, `import torch`, takes a hundred times that.

The files are counted by strace: those that a start really opens, those that it looks for and does
not find, and questions about a name (stat, readlink, access), since on a shared file system each is
a request to its server. Own files are the archive, the plan and the record.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.planfile import write
from hpml_orchestrator.script.archive import build, node_files

GOAL = 5.0
LEAST_RUNS = 10
BARE = "python -I -S -c pass"
BIND = "hpml-bind, the short way"
KINDS = ("opened", "listed", "missed", "asked")
CALL = re.compile(
    r"(openat|open|stat|newfstatat|lstat|statx|readlink|readlinkat|access|faccessat2?)\("
)


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Return the wall-clock time of one run of a command."""
    begin = time.perf_counter()
    process = os.posix_spawn(command[0], command, environment)
    _, status = os.waitpid(process, 0)
    took = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    return took


def files(command: list[str], environment: dict[str, str], own: str) -> dict[str, Counter[str]]:
    """Return how often a start opens, misses and asks for files: own ones, /proc and the others."""
    calls = "trace=%file"
    done = subprocess.run(
        ["strace", "-f", "-e", calls, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = {name: Counter[str]() for name in ("own", "/proc", "interpreter")}
    for line in done.stderr.splitlines():
        if 'execve("/bin/true"' in line:
            break
        call, path = CALL.search(line), re.search(r'"([^"]*)"', line)
        if not call or not path or not path[1]:  # no path: the file is open already
            continue
        whose = "own" if path[1].startswith(own) else "interpreter"
        whose = "/proc" if path[1].startswith("/proc/") else whose
        opened = call[1].startswith("open")
        kind = "opened" if opened and "O_DIRECTORY" not in line else "listed" if opened else "asked"
        found[whose][kind if " = -1 " not in line else "missed"] += 1
    return found


def machine(python: str) -> list[str]:
    """Return what the figures depend on, one line each."""
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tempfile.gettempdir()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return [
        f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}",
        f"kernel    {platform.system()} {platform.release()}",
        f"python    {version.strip()} runs the rank",
        f"files     on {kind}, warm",
    ]


def main() -> int:
    """Measure and print; the status is 1 when the goal is missed."""
    runs = max(LEAST_RUNS, int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    python = sys.argv[2] if len(sys.argv) > 2 else sys.executable
    cpu = min(os.sched_getaffinity(0))
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "SLURMD_NODENAME": "n1"}
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory, "hpml-node.pyz")
        archive.write_bytes(build())
        functions = node_files()["hpml-job.sh"].decode()
        (code,) = re.findall(r"^hpml_bind_code='(.*)'$", functions, re.MULTILINE)
        for name in ("plan", "binding"):
            Path(directory, name).mkdir()
        plan = Plan((RankPlan(0, cpus=(cpu,), cores=(0,), numa=(0,), memory=0),))
        head = {"verify": "warn", "channel": "hpml-0-bench"}
        Path(directory, "plan", "n1.txt").write_text(write(plan, head), "ascii")
        bare = [python, "-I", "-S"]
        words = [str(archive), directory, "--", "/bin/true"]
        commands = {
            BARE: [*bare, "-c", "pass"],
            "python, os.execv(true)": [*bare, "-c", "import os; os.execv('/bin/true', ['true'])"],
            BIND: [*bare, "-c", code, *words],
            "hpml-node.pyz bind": [*bare, words[0], "bind", *words[1:]],
            "taskset -c N true": ["taskset", "-c", str(cpu), "/bin/true"],
            "numactl --preferred=0": ["numactl", "--preferred=0", "/bin/true"],
        }
        missing = [name for name, words in commands.items() if not shutil.which(words[0])]
        for name in missing:
            print(f"not installed: {commands.pop(name)[0]}")
        for words in commands.values():
            words[0] = shutil.which(words[0]) or words[0]
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(runs + 2):
            for name, words in commands.items():
                took = seconds(words, environment)
                if number > 1:
                    times[name].append(took)
        print(*machine(python), sep="\n")
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(f"runs      {runs} of each, interleaved; median (least to most), ms")
        print(f"\n{'command':<26}{'ms':>8}  {'least-most':>14}  {'x python':>9}")
        for name, median in medians.items():
            spread = f"{min(times[name]) * 1e3:.1f}-{max(times[name]) * 1e3:.1f}"
            ratio = median / medians[BARE]
            print(f"{name:<26}{median * 1e3:>8.1f}  {spread:>14}  {ratio:>9.2f}")
        if shutil.which("strace"):
            print(f"\n{'files per start':<38}" + "".join(f"{kind:>8}" for kind in KINDS))
            for name in (BARE, BIND, "hpml-node.pyz bind"):
                for whose, kinds in files(commands[name], environment, directory).items():
                    cells = "".join(f"{kinds[kind]:>8}" for kind in KINDS)
                    print(f"{name:<26}{whose:<12}{cells}")
        else:
            print("\nfiles: not counted, strace is not installed")
    ratio = medians[BIND] / medians[BARE]
    reached = ratio <= GOAL
    print(
        f"\nhpml-bind takes {ratio:.2f} times a bare interpreter; goal {GOAL:g}: "
        f"{'reached' if reached else 'MISSED'}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
