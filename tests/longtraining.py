"""A training of days, simulated in seconds, whose messages the real `ChannelReader` receives."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.testing.clock import FakeClock
from tests.patience import eventually

WEEK_SECONDS = 7 * 86400
COARSEST_SECONDS = 120.0


def pause_after(seconds: float) -> float:
    """Return when a rank counts next, so many seconds after the start: at first after a second.

    Later it is 0.5 % of the time since, at most two minutes: what comes between is not written.
    """
    return min(max(1.0, seconds / 200), COARSEST_SECONDS)


def counters(rank: int, seconds: float) -> dict[str, float]:
    """Return a rank's counters this many seconds after its start."""
    return {
        "samples_total": int(seconds * 1234.5),
        "steps_total": int(seconds * 4.8),
        "data_wait_seconds_total": seconds * 0.0312345,
        "step_seconds_total": seconds * 0.9712345,
        "loss": 1 / (1 + seconds) + rank / 7,
        "epoch": int(seconds / 500),
    }


def record_training(
    file: Path,
    *,
    node: str = "n1",
    ranks: int = 8,
    seconds: float = WEEK_SECONDS,
    chatter: Iterable[str] = (),
) -> ChannelReader:
    """Write the events of a node's ranks; time is simulated, and begins at 0.

    Args:
        file: where to.
        node: the node's name.
        ranks: how many it has.
        seconds: how long they train.
        chatter: events that every rank reports with each of its counters.
    """
    clock = FakeClock(0.0)
    name = f"hpml/test/{uuid.uuid4().hex}"
    reader = ChannelReader(name, file, node, clock=clock.time, monotonic=clock.monotonic)
    with reader, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sent = 0

        def say(rank: int, event: str, **data: object) -> None:
            nonlocal sent
            message = {"v": 1, "type": "event", "event": event, "time": clock.now}
            datagram = json.dumps({**message, "rank": rank, "world_size": ranks, "data": data})
            sender.sendto(datagram.encode(), "\0" + name)
            sent += 1

        for rank in range(ranks):
            say(rank, "rendezvous")
            say(rank, "warm-up")
        while clock.now < seconds:
            clock.sleep(min(pause_after(clock.now), seconds - clock.now))
            for rank in range(ranks):
                say(rank, "step", **counters(rank, clock.now))
                for event in chatter:
                    say(rank, event, seconds=clock.now, note="x" * 100)
            eventually(lambda: reader.received >= sent, pause=0.0002)
            time.sleep(0.0002)  # it writes what is due before the clock advances
        say(0, "evaluation", final=True, test_accuracy=0.97)
    return reader
