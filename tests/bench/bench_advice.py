"""Whether the advice of `hpml report` helps: two foreign training scripts with one bottleneck each.

    python -m tests.bench.bench_advice --nanogpt DIR --examples DIR [--only NAME...] [--json OUT]

DIR is a checkout or a bare clone of karpathy/nanoGPT and of pytorch/examples. Copies get the small
edits of advice.yaml: a bottleneck (advice_faults.py) and, unless `--channel off`, the lines of
hpml_channel.py that a user adds after training_jobs/README.md. Each case runs on this machine, its
report is read, its first change is made, and it runs again: by `--apply` if the job file changes,
else in the program, by a knob. Needs two idle cores. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.bench.advice_faults import make_store
from tests.unit.local_runs import Desk

HERE = Path(__file__).parent
PLAN: dict[str, Any] = YAML(typ="safe").load(HERE / "advice.yaml")
CASES: dict[str, dict[str, Any]] = PLAN["cases"]
GOAL_RIGHT, GOAL_SPEED = 12, 0.98
HEAD = """\
| case | script | channel | first finding | right? | change | samples/s | after | ratio |
|---|---|---|---|---|---|---|---|---|"""


def write_script(clone: Path, script: Mapping[str, Any], place: Path, *, channel: bool) -> None:
    """Write the edited copy of a script, and the modules that it imports."""
    place.mkdir()
    for name in script["files"]:
        words = ["git", "-C", str(clone), "show", f"HEAD:{script['folder']}{name}"]
        (place / name).write_bytes(subprocess.check_output(words))
    trains = place / script["files"][0]
    text = trains.read_text("utf-8")
    left_out, new_only = "-" if channel else "-#", "+#"
    for edit in script["edits"].split("\n\n"):
        lines = edit.splitlines(keepends=True)
        old = "".join(line[1:].rstrip() + "\n" for line in lines if line[0] not in new_only)
        new = "".join(line[1:].rstrip() + "\n" for line in lines if line[0] not in left_out)
        if old not in text:
            raise ValueError(f"{trains.name} has changed: it has no {old!r}")
        text = text.replace(old, new, 1)
    trains.write_text(text, "utf-8")
    shutil.copy(HERE / "advice_faults.py", place / "faults.py")
    for name in ("hpml_channel.py", "hpml_waits.py"):
        shutil.copy(HERE.parents[1] / "training_jobs" / name, place)


@contextlib.contextmanager
def others(count: int) -> Iterator[None]:
    """Keep CPUs busy, as other users' jobs do: each process in its own session."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            busy = [sys.executable, "-c", "while True: pass"]
            other = subprocess.Popen(busy, start_new_session=True)
            stack.callback(other.wait)
            stack.callback(other.kill)
        yield


class Trial:
    """A case, with or without the channel, in its own directory."""

    def __init__(self, case: Mapping[str, Any], place: Path, store: Path, seconds: float) -> None:
        self.case, self.script = case, PLAN["scripts"][case["script"]]
        self.desk, self.store, self.seconds = Desk(place), store, seconds

    def write_job(self, changed: Mapping[str, Any]) -> str:
        """Write the job file of the case, with some of its settings changed."""
        settings = {"others": 0, **self.script["options"], **self.case.get("set", {}), **changed}
        self.others = settings.pop("others")
        options = [name for name in settings if name in self.script["options"]]
        variables = {name: settings[name] for name in settings if name.isupper()}
        knobs = {name: settings[name] for name in settings.keys() - {*options, *variables}}
        knobs |= {"out": str(self.desk.root / "out"), "seconds": self.seconds}
        variables["KNOBS"] = json.dumps(knobs)
        words = [f"--{name}={settings[name]}".replace("STORE", str(self.store)) for name in options]
        job = {
            "name": "advice",
            "script": self.script["files"][0],
            "args": [*self.script["args"], *words],
            "monitor": True,
            "environment": {"venv": sys.prefix, "variables": variables},
            "resources": {"ranks_per_node": 2, "cpus_per_rank": 1, "time": "20:00"},
        }
        return self.desk.job(**job | self.case.get("job", {}))

    def run(self, file: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Run a job file; return its report, and the figures of speed.json."""
        out = self.desk.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (self.desk.root / "snapshot.pt").unlink(missing_ok=True)
        with others(self.others):
            self.desk.hpml("run", "--local", file)
        return self.desk.json("report", "last"), json.loads((out / "speed.json").read_text())

    def follow(self, finding: Mapping[str, Any], *, right: bool) -> tuple[str, str]:
        """Make the first change of a finding; return the job file, empty without, and its text."""
        change = next(iter(finding["changes"]), {"text": "", "field": ""})
        text: str = change["text"]
        if change["field"]:
            self.desk.hpml("report", "last", "--apply", "tuned.yaml")
            return "tuned.yaml", f"--apply: {text}"
        known = {"others", *self.script["options"], *self.case.get("set", {})}
        for pattern, settings in PLAN["advice"]:
            made = {n: value for n, value in settings.items() if n in known or n.isupper()}
            if made and re.search(pattern, text):
                return self.write_job(made), text
        return (self.write_job(self.case["cure"]), text) if right else ("", f"(not made) {text}")

    def measure(self) -> dict[str, Any]:
        """Run the case, make the first change, and run it again."""
        report, before = self.run(self.write_job({}))
        row: dict[str, Any] = {"report": report, "before": before, "change": "", "ratio": None}
        findings = report["findings"]
        if not findings:
            return {**row, "right": "unknown" if self.case["right"] else "yes"}
        said = [findings[0]["verdict"], *(one["text"] for one in findings[0]["changes"][:2])]
        right = findings[0]["kind"] in self.case["right"]
        right = right and not re.search(self.case.get("never", "$^"), " ".join(said))
        row["right"] = "yes" if right else "no"
        file, row["change"] = self.follow(findings[0], right=right)
        if file:
            row["report_after"], row["after"] = self.run(file)
            row["ratio"] = self.speed(row["after"]) / self.speed(before)
        return row

    def speed(self, figures: Mapping[str, float]) -> float:
        """Return samples/s of the loop, or of the whole process."""
        return figures["samples"] / figures["whole" if self.case.get("whole") else "seconds"]

    def line(self, row: Mapping[str, Any]) -> str:
        """Return the row of the table."""
        cells = [row["case"], self.case["script"], "yes" if row["channel"] else "no"]
        if "failed" in row:
            cells += [f"FAILED: {row['failed']}"[:300], "", "", "", "", ""]
        else:
            first = next(iter(row["report"]["findings"]), None)
            cells.append(f"`{first['kind']}` {first['verdict']}" if first else "nothing found")
            cells += [row["right"], row["change"], f"{self.speed(row['before']):.0f}"]
            cells.append(f"{self.speed(row['after']):.0f}" if "after" in row else "")
            cells.append(f"x{row['ratio']:.2f}" if row["ratio"] else "")
        return "| " + " | ".join(re.sub(r"[|\n]", " ", cell) for cell in cells) + " |"


def judge(rows: list[dict[str, Any]]) -> int:
    """Print which goals are reached; return 1 if one is missed."""
    done = [row for row in rows if "failed" not in row]
    faulty = [row for row in done if CASES[row["case"]]["right"]]
    told = [row["right"] for row in faulty if row["channel"]]
    untold = [row["right"] for row in faulty if not row["channel"]]
    slower = [row["case"] for row in faulty if (row["ratio"] or 1) < GOAL_SPEED]
    accused = [row["case"] for row in done if row not in faulty and row["report"]["findings"]]
    failed = [row["case"] for row in rows if row not in done]
    print(f"\nfirst findings with the channel: {told.count('yes')} of {len(told)} right")
    print(f"first findings without it: {untold.count('yes')} right, {untold.count('no')} wrong")
    print(f"changes below x{GOAL_SPEED}: {', '.join(slower) or 'none'}")
    print(f"healthy runs with a finding: {', '.join(accused) or 'none'}")
    print(f"failed: {', '.join(failed) or 'none'}; {sum(row['took'] for row in rows):.0f} s in all")
    missed = told.count("yes") < min(GOAL_RIGHT, len(told))
    return int(missed or bool(slower or accused or failed))


def main() -> int:
    """Measure and print; the status is 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, metavar="DIR")
    parser.add_argument("--examples", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--channel", choices=["on", "off", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training per run")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures and reports")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="a new directory that is kept")
    given = parser.parse_args()
    if not (given.nanogpt and given.examples):
        print("skipped: --nanogpt and --examples name the clones of the scripts")
        return 0
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host {platform.node()}, {os.cpu_count()} CPUs, load {load}\n\n{HEAD}", flush=True)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        root = given.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = root.resolve()
        make_store(root / "store")
        for name in given.only:
            for channel in (True, False):
                is_left_out = given.channel == ("off" if channel else "on")
                if is_left_out or CASES[name].get("channel", channel) != channel:
                    continue
                row: dict[str, Any] = {"case": name, "channel": channel}
                began, place = time.time(), root / f"{name}-{'with' if channel else 'without'}"
                trial = Trial(CASES[name], place, root / "store", given.seconds)
                try:
                    clone = vars(given)[CASES[name]["script"]]
                    write_script(clone, trial.script, place, channel=channel)
                    row |= trial.measure()
                except Exception as error:  # noqa: BLE001 - the other cases are still measured
                    row["failed"] = str(error) or repr(error)
                row["took"] = time.time() - began
                rows.append(row)
                print(trial.line(row), flush=True)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1))
    return judge(rows)


if __name__ == "__main__":
    sys.exit(main())
