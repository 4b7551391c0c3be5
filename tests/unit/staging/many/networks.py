"""Network namespaces that act as nodes on a network, joined by a bridge."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class NoNetworkError(Exception):
    """Namespaces, or shaping of their links, are not available here, for the given reason."""


class Network:
    """So many namespaces; each has `eth0` with the address 10.77.0.(index + 1).

    Args:
        count: how many.
        rate: bits per second of each link and direction, as `tc` has it ("400mbit"); None: any.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        self._name = f"hpml{os.getpid()}"
        self._count = count
        self._rate = rate

    def namespace(self, index: int) -> str:
        return f"{self._name}n{index}"

    def prefix(self, index: int) -> tuple[str, ...]:
        """Return the words that run a command in a namespace."""
        return ("ip", "netns", "exec", self.namespace(index))

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def cut(self, index: int) -> None:
        """Pull a node's cable: packets are lost without an error."""
        self._ip("-n", self._switch, "link", "set", f"p{index}", "down")

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def __enter__(self) -> Self:
        try:
            self._ip("netns", "add", self._switch)
            self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            self._ip("-n", self._switch, "link", "set", "br0", "up")
            for index in range(self._count):
                self._plug(index)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _plug(self, index: int) -> None:
        name, port = self.namespace(index), f"p{index}"
        self._ip("netns", "add", name)
        words = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("-n", self._switch, *words)
        self._ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        self._ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip("-n", name, "link", "set", device, "up")
        if self._rate is not None:
            for space, device in ((self._switch, port), (name, "eth0")):
                self._shape(space, device)

    def _shape(self, space: str, device: str) -> None:
        words = ["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf"]
        _run([*words, "rate", str(self._rate), "burst", "256k", "latency", "50ms"])

    def _ip(self, *words: str) -> None:
        _run(["ip", *words])

    def _remove(self) -> None:
        for name in (*map(self.namespace, range(self._count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except OSError as error:
        raise NoNetworkError(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        raise NoNetworkError(f"{' '.join(words)}: {done.stderr.strip()}")
