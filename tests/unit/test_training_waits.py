"""hpml_waits.py: who waits for whom, measured by real ranks over gloo, and what that costs."""

from __future__ import annotations

import json
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.training_runs import JOBS, TRAINS, finish, load, start_ranks

pytestmark = TRAINS

DELAY_SECONDS = 0.08
RANKS = 3
# The ranks train the same model several times, in one process each because PyTorch is slow to
# import: one rank sleeps in each step, and each prints its mean wait and its weights.
PROGRAM = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from hpml_waits import Waits, measure_waits

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks, delay = dist.get_rank(), dist.get_world_size(), float(sys.argv[2])


class Counts(dict):
    def count(self, **more):
        for name, value in more.items():
            self.setdefault(name, []).append(value)

    def gauge(self, **more):
        self.update(more)


def pause(case, place, slow):
    if case == place and rank == slow:
        time.sleep(delay)


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(context, values, case, slow):
        context.place = case, slow
        pause(case, "forward", slow)
        return values.view_as(values)

    @staticmethod
    def backward(context, gradient):
        pause(context.place[0], "backward", context.place[1])
        return gradient, None, None


def train(case, slow=None, wrap="measured", steps=36):
    counts = Counts()
    torch.manual_seed(1)
    first, last = torch.nn.Linear(100, 100), torch.nn.Linear(100, 9)
    model, waits = torch.nn.ModuleList([first, last]), None
    parameters = list(model.parameters())

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, values):
            return last(Pause.apply(first(values).relu(), case, slow))

    network = Model()
    if wrap != "loop":  # two buckets: what comes between them is seen, too
        network = DistributedDataParallel(network, bucket_cap_mb=0.003)
    if wrap == "measured":
        measure_waits(network, counts)
    elif wrap == "loop":
        waits = Waits(counts)
    elif wrap == "fp16":
        network.register_comm_hook(None, fp16_compress_hook)
    elif wrap == "fp16 measured":
        measure_waits(network, counts, hook=fp16_compress_hook)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        if waits:
            waits.step()
        batch = torch.randn(8, 100, generator=random)
        pause(case, "loading", slow)
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        if waits:
            waits.meet()
            for one in parameters:
                dist.all_reduce(one.grad)
        optimizer.step()
    waits = counts.get("wait_seconds", ())
    print(json.dumps({
        "case": f"{case} {wrap}",
        "slow": slow,
        "wait": sum(waits) / max(1, len(waits)),
        "counted": sorted(counts),
        "gradients": [counts.get("gradient_bytes"), counts.get("gradient_buckets")],
        "measured": sum(counts.get("measured_steps", ())),
        "slowest": sum(counts.get("slowest_steps", ())),
        "weights": [one.double().sum().item().hex() for one in parameters],
    }), flush=True)


train("", wrap="plain")
train("")
train("", wrap="fp16")
train("", wrap="fp16 measured")
train("loading", 0)
train("forward", 1)
train("backward", 2)
train("backward", 0, wrap="loop")
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank prints in each case."""
    program = tmp_path_factory.mktemp("waits") / "train.py"
    program.write_text(PROGRAM)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for process in start_ranks(RANKS, [program, JOBS, DELAY_SECONDS]):
        done = finish(process)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            row = json.loads(line)
            found[row["case"]].append(row)
    return found


@pytest.mark.parametrize(
    "case", ["loading measured", "forward measured", "backward measured", "backward loop"]
)
def test_the_slow_rank_waits_least(told: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Wherever it is slow: the others wait for about as long as it is slower, and it does not."""
    waits = [row["wait"] for row in told[case]]
    slow = told[case][0]["slow"]
    others = [wait for rank, wait in enumerate(waits) if rank != slow]
    assert waits[slow] < DELAY_SECONDS / 2 < min(others), waits
    measured = {row["measured"] for row in told[case]}
    assert len(measured) == 1
    assert 10 < min(measured) < 36
    often = [row["slowest"] > 0.8 * row["measured"] for row in told[case]]
    assert often == [rank == slow for rank in range(RANKS)], told[case]


def test_equal_ranks_wait_for_nobody(told: dict[str, list[dict[str, Any]]]) -> None:
    """What the meeting itself takes is not counted as waiting."""
    assert max(row["wait"] for row in told[" measured"]) < DELAY_SECONDS / 2
    assert told[" measured"][0]["counted"] == [
        "comm_method",
        "comm_seconds",
        "gradient_buckets",
        "gradient_bytes",
        "measured_steps",
        "slowest_steps",
        "wait_seconds",
    ]
    # 11,009 numbers; a hook of the user's own may send fewer bytes.
    assert [row["gradients"] for row in told[" measured"]] == [[4 * 11_009, 2]] * RANKS
    assert [row["gradients"] for row in told[" fp16 measured"]] == [[None, None]] * RANKS
    assert sum(row["slowest"] for row in told[" measured"]) >= told[" measured"][0]["measured"]


@pytest.mark.parametrize(("plain", "measured"), [("plain", "measured"), ("fp16", "fp16 measured")])
def test_measuring_does_not_change_the_training(
    told: dict[str, list[dict[str, Any]]], plain: str, measured: str
) -> None:
    """Three ranks, whose gradients are divided by 3: the weights are equal to the bit."""
    without = [row["weights"] for row in told[f" {plain}"]]
    assert [row["weights"] for row in told[f" {measured}"]] == without
    assert len(set(map(str, without))) == 1


class Loop:
    """Steps of one rank on a clock of the test's own."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step_seconds, self.meeting_seconds, self.late_seconds = (
            1.0,
            0.01,
            0.0005,
            0.0,
        )
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.spent, self.measured = 0.0, 0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(module, "time", clock)
        self.waits = module.Waits(self, highest=self.meet)

    def count(self, **more: float) -> None:
        for name, value in more.items():
            self.totals[name] += value

    def meet(self, value: Any) -> Any:
        self.now += self.meeting_seconds + self.late_seconds
        self.spent += self.meeting_seconds
        self.late_seconds = 0.0  # once met, nobody is late
        return value

    def run(self, steps: int, late_seconds: float = 0.0) -> None:
        for _ in range(steps):
            self.waits.step()
            self.now += self.step_seconds
            self.late_seconds = late_seconds
            self.measured += self.waits.is_measured
            self.waits.meet()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A loop that has run nothing yet."""
    return Loop(load(JOBS / "hpml_waits.py"), monkeypatch)


@pytest.mark.parametrize(
    ("step_seconds", "meeting_seconds"),
    [(0.01, 0.0005), (0.003, 0.0005), (0.2, 0.0001), (1.0, 0.001)],
)
def test_it_costs_a_thousandth_of_the_time(
    loop: Loop, step_seconds: float, meeting_seconds: float
) -> None:
    """After the first sixty, however quick steps are; the more often, the cheaper it is."""
    loop.step_seconds, loop.meeting_seconds = step_seconds, meeting_seconds
    loop.run(20_000)
    assert loop.spent < 0.0011 * loop.now + 60 * 2 * meeting_seconds
    assert loop.measured >= 20_000 / 1000


def test_the_waits_stand_for_the_steps_between(loop: Loop) -> None:
    """Few steps are measured, and the sum is about that of all; short trainings have one, too."""
    loop.run(60, late_seconds=0.005)
    assert loop.measured >= 15
    # ranks compare what they waited when they meet again
    assert loop.measured - 2 <= loop.totals["measured_steps"] < loop.measured
    assert loop.totals["wait_seconds"] == pytest.approx(0.005 * 60, rel=0.15)


def test_what_is_rare_is_not_multiplied(loop: Loop) -> None:
    """Rank 0 writes a file for 5 s in a step that is measured: the steps after it do not wait."""
    loop.run(500)
    while not loop.waits.is_measured:
        loop.run(1)
    loop.run(1)
    while loop.waits._steps + 1 < loop.waits._due:
        loop.run(1)
    loop.run(1, late_seconds=5.0)
    assert loop.waits.is_measured
    loop.run(2000)
    assert loop.totals["wait_seconds"] < 0.01


def test_parts_of_a_step_are_timed_without_other_ranks(loop: Loop) -> None:
    """A training on one GPU has its copies to it measured, as few times."""
    for _ in range(3000):
        loop.waits.step()
        with loop.waits.timed("transfer_seconds"):
            loop.now += 0.002
        loop.now += 0.008
    assert loop.totals["transfer_seconds"] == pytest.approx(0.002 * 3000, rel=0.01)
    assert "measured_steps" not in loop.totals
