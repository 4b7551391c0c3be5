"""A process with a GPU collector; it reads commands from standard input, one JSON per line.

NVML is loaded once per process and found through LD_LIBRARY_PATH, which must be set before the
process starts; so every test of the collector starts a new process.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from hpml_exporters.gpu.collector import GpuCollector
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen
from hpml_exporters.options import Context, NodeOptions


class Child:
    """The commands."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("hide"):
            sys.modules[settings["hide"]] = None  # type: ignore[assignment]
        self.context = Context(NodeOptions.from_json(json.dumps(settings.get("options", {}))))
        self.look = settings.get("look", 30.0)
        self.retry = tuple(settings.get("retry", (5.0, 300.0)))
        self.make()

    def make(self) -> dict[str, Any]:
        self.collector = GpuCollector(self.context, look=self.look, retry=self.retry)
        return {}

    def renew(self) -> dict[str, Any]:
        """Be another exporter, that has counted nothing yet, on a node without jobs."""
        self.collector.close()
        self.context = Context(self.context.options)
        self.context.jobs.post(Jobs({}))
        return self.make()

    def jobs(self, jobs: list[dict[str, Any]]) -> dict[str, Any]:
        seen = {}
        for one in jobs:
            gpus = one.get("gpus")
            facts = JobFacts(one["jobid"], gpus=None if gpus is None else tuple(gpus))
            seen[facts.jobid] = JobSeen(facts, pids=frozenset(one.get("pids", ())))
        self.context.jobs.post(Jobs(seen))
        return {}

    def sample(self, ahead: float = 0.0) -> dict[str, Any]:
        began = time.time()
        try:
            families = self.collector.sample(time.monotonic() + ahead)
        except Exception as error:  # noqa: BLE001 - passed to the test
            return {"error": type(error).__name__, "text": str(error)}
        return {
            "began": began,
            "ended": time.time(),
            "series": [
                [sample.name, sample.labels, sample.value]
                for family in families
                for sample in family.samples
            ],
        }

    def repeat(self, times: int, pause: float = 0.0) -> dict[str, Any]:
        """Many samples, one a second by the collector's clock, in less time."""
        base, before = time.monotonic(), time.thread_time()
        for number in range(times):
            self.collector.sample(base + number + 1)
            time.sleep(pause)
        return {"cpu": (time.thread_time() - before) / times}

    def close(self) -> dict[str, Any]:
        self.collector.close()
        return {}

    def libraries(self) -> dict[str, Any]:
        """Files of NVML that are mapped."""
        with open("/proc/self/maps") as stream:
            lines = [line.split(maxsplit=5)[5].strip() for line in stream if "libnvidia-ml" in line]
        return {"libraries": sorted(set(lines))}

    def modules(self) -> dict[str, Any]:
        return {"modules": sorted(sys.modules)}


def main() -> None:
    child = Child(json.loads(sys.argv[1]))
    for line in sys.stdin:
        words = json.loads(line)
        answer = getattr(child, words.pop("do"))(**words)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
