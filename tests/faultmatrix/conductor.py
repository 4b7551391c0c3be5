"""Run a case of the fault matrix with hpml, on this machine.

python -m tests.faultmatrix.conductor slow-disk 1     # and print its report
python -m tests.faultmatrix.conductor --record [NAME...]
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.gpusim.gpusim import Simulator, State, h100
from tests.faultmatrix.matrix import CASES, HEALTHY, SEEDS, Case
from tests.unit.local_runs import Desk

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS = HERE / "records"
ALL = {**CASES, **HEALTHY}
BASE = {
    "launcher": "srun",
    "resources": {"ranks_per_node": 2, "cpus_per_rank": 1, "time": "10:00"},
}
OPTIONS = {"epochs": 7, "width": 48, "batch_size": 32}  # with ddp
FILES, FILE_BYTES = 64, 4096
LIMITED = "ip link set lo up mtu 9000 && tc qdisc add dev lo root tbf rate {} burst 128k latency 4s"
KEPT = """
run.json submit.json job.json final.json runs.tsv sbatch.started ended.json head.json over
job_id restart""".split()
KEPT_SUFFIXES = (".jsonl", ".txt", ".monitor.json", ".ready.json", ".topology.json", ".proof.json")


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with another one laid over it."""
    both = {**base, **more}
    for name in base.keys() & more.keys():
        if isinstance(base[name], Mapping):
            both[name] = merged(base[name], more[name])
    return both


class FaultDesk(Desk):
    """Somebody whose jobs have one thing wrong."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.prefix: list[str] = []
        self.more: dict[str, str] = {}
        trainings = (HERE / "faulty.py", HERE / "light.py")
        for file in (*(ROOT / "training_jobs").glob("*.py"), *trainings):
            shutil.copy(file, root)

    def _command(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        command = super()._command(arguments)
        command["args"] = [*self.prefix, *command["args"]]
        command["env"] |= self.more
        return command

    def carry_out(self, case: Case, seed: int) -> str:
        """Run a case to its end, and return its run's id."""
        data = self.root / "digits"
        if case.ddp:
            words = [sys.executable, str(self.root / "make_digits.py"), str(data)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        else:
            data.mkdir()
            for number in range(FILES):
                (data / f"{number}.bin").write_bytes(random.randbytes(FILE_BYTES))
        with self._around(case, seed):
            file = self.job(**self._document(case, seed))
            command = self._command(("run", "--local", file))
            done = subprocess.run(**command, capture_output=True, timeout=1800, check=False)
            assert done.returncode == 0, done.stderr + done.stdout
        (run,) = {one["id"] for one in self.json("list") if one["id"].startswith(self.name)}
        return str(run)

    def _document(self, case: Case, seed: int) -> dict[str, Any]:
        self.name = f"job-{random.randrange(16**6):06x}"
        job = merged({**BASE, "name": self.name}, case.job)
        job["environment"] = {"venv": sys.prefix}
        job["script"] = "faulty.py" if case.ddp else "light.py"
        options: dict[str, Any] = {**OPTIONS, "seed": seed} if case.ddp else {}
        options |= {**case.options, "data": "digits"}
        if any(entry["name"] == "digits" for entry in job.get("stage", ())):
            options["data"] = "{stage.digits}"
        if case.gpus:
            job["resources"]["gpus"] = case.gpus
            job = merged(job, {"monitor": True})
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        words += ["--slow-root", "digits", *case.words(seed)]
        if case.gpus:
            ranks = job["resources"]["ranks_per_node"]
            words += ["--fault", f"gpus={min(ranks, case.gpus)}"]
            words += ["--fault", f"xid={case.xid}"] * (case.xid > 0)
        job["args"] = words
        return job

    @contextlib.contextmanager
    def _around(self, case: Case, seed: int) -> Iterator[None]:
        """Make what is outside of the job: control groups, namespaces, GPUs, files."""
        self.prefix, self.more = [], {"CUDA_VISIBLE_DEVICES": ""}
        with contextlib.ExitStack() as stack:
            if case.gpus:
                self._make_gpus(case)
            if case.link:
                rate = LIMITED.format(f"{8 * case.link:.0f}bit")
                self.prefix = ["unshare", "-n", "sh", "-c", f'{rate} && exec "$@"', "sh"]
            if "quota" in case.faults:
                group = stack.enter_context(_group("cpu", self.root.name))
                words = " ".join(case.words(seed))
                percent = float(words.partition("quota=")[2].split()[0].partition(":")[2])
                (group / "cpu.cfs_quota_us").write_text(f"{percent * 1000:.0f}")
                self.more["FAULTY_GROUP"] = str(group)
            if "memory" in case.faults:
                self.more["FAULTY_MOST_MIB"] = "930"
            if case.megabytes:
                self._make_big_file(case.megabytes)
            if case.disk:
                group = stack.enter_context(_group("blkio", self.root.name))
                device = os.stat(self.root).st_dev
                limit = f"{os.major(device)}:{os.minor(device)} {case.disk:.0f}"
                (group / "blkio.throttle.read_bps_device").write_text(limit)
                self.prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
            for _ in range(case.busy):
                # a session for each, as other users' jobs have: the kernel shares CPUs by session
                busy = [sys.executable, "-c", "while True: pass"]
                other = subprocess.Popen(busy, start_new_session=True)
                stack.callback(other.wait)
                stack.callback(other.kill)
            if not case.channel:
                (self.root / "hpml_channel.py").unlink()
            yield
        self.prefix, self.more = [], {}

    def _make_gpus(self, case: Case) -> None:
        simulator, file = Simulator(), self.root / "gpus.state"
        gpus = [h100(number, self.root.name, **case.gpu) for number in range(case.gpus)]
        gpus[-1] = gpus[-1].changed(**case.gpu_faults)
        simulator.write(State(gpus=tuple(gpus)), file)
        self.more |= simulator.environment(file) | {"GPUSIM": str(file)}
        self.more["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        self.more["FAULTY_GPUSIM"] = str(ROOT / "deploy/gpusim/gpusim")

    def _make_big_file(self, megabytes: int) -> None:
        (self.root / "big").mkdir(exist_ok=True)
        file = self.root / "big" / "big.bin"
        with file.open("wb") as stream:
            for _ in range(megabytes):
                stream.write(random.randbytes(1 << 20))
            stream.flush()
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _group(controller: str, name: str) -> Iterator[Path]:
    """Make a control group (version 1), and remove it."""
    group = Path(f"/sys/fs/cgroup/{controller}/{name}")
    group.mkdir()
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def recorded(desk: FaultDesk, run: str) -> dict[str, str]:
    """Return the files of a run's record, without what only a scheduler needs."""
    home, files = desk.root / "records", {}
    for path in sorted(home.rglob("*")):
        name = str(path.relative_to(home))
        if run in name and path.is_file() and _is_kept(path):
            text = path.read_text()
            if path.name == "submit.json":
                record = json.loads(text) | {"environment_names": []}
                text = json.dumps(record, indent=1)
            files[name] = text.replace(str(desk.root), "@DESK@").replace(str(ROOT), "@CHECKOUT@")
    return files


def _is_kept(path: Path) -> bool:
    return path.name in KEPT or path.name.endswith(KEPT_SUFFIXES) or path.name == "sbatch.out"


def recorded_cases() -> list[tuple[str, int]]:
    """Return name and seed of each recorded run."""
    names = (path.name.removesuffix(".json.gz") for path in sorted(RECORDS.glob("*.json.gz")))
    return [(name.rpartition("-")[0], int(name.rpartition("-")[2])) for name in names]


def restore(name: str, seed: int, home: Path, *, reported: bool = True) -> str:
    """Write the recorded run of a case as records of hpml; return its id.

    Args:
        name: of the case.
        seed: of the case.
        home: the directory of the records.
        reported: False leaves out what the training and the monitor reported.
    """
    record = json.loads(gzip.decompress((RECORDS / f"{name}-{seed}.json.gz").read_bytes()))
    for path, text in record["files"].items():
        if not reported and path.endswith(".monitor.json"):
            continue
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.replace("@DESK@", str(home.parent)).splitlines(keepends=True)
        if not reported and "/events/" in path:
            lines = [line for line in lines if '"rank":' not in line]
        file.write_text("".join(lines).replace("@CHECKOUT@", "/opt/hpml"))
    return str(record["run"])


def record(name: str, seed: int) -> None:
    """Run a case, and keep its record."""
    RECORDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hpml-faults-") as root:
        desk = FaultDesk(Path(root))
        run = desk.carry_out(ALL[name], seed)
        facts = {
            "case": name,
            "seed": seed,
            "how": ALL[name].how,
            "recorded": time.strftime("%Y-%m-%d"),
            "origin": "tests/faultmatrix/conductor.py --record, 2 cores of an AMD EPYC",
            "run": run,
            "files": recorded(desk, run),
        }
        packed = gzip.compress(json.dumps(facts, indent=1).encode(), mtime=0)
        (RECORDS / f"{name}-{seed}.json.gz").write_bytes(packed)
        print(name, seed, run, len(packed), flush=True)


def main() -> None:
    """Run one case and print its report, or record cases."""
    if sys.argv[1] == "--record":
        for name in sys.argv[2:] or ALL:
            case, _, seed = name.partition(":")
            for one in [int(seed)] if seed else SEEDS:
                record(case, one)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hpml-faults-") as root:
        desk = FaultDesk(Path(root))
        run = desk.carry_out(ALL[sys.argv[1]], int(sys.argv[2]))
        print(desk.hpml("logs", run), desk.hpml("report", run), sep="\n")


if __name__ == "__main__":
    main()
