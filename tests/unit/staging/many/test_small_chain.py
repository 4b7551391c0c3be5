"""A chain of data that is smaller than what is gathered before it is sent."""

from __future__ import annotations

from hpml_orchestrator.staging.many.chunks import HEAD_BYTES, Sender


class _Caller:
    """A fake connection that keeps what is sent: nothing but the bytes matters here."""

    def __init__(self) -> None:
        self.sock = self
        self.sent = bytearray()
        self.is_closed = False

    def settimeout(self, _seconds: float) -> None:
        """Take a timeout."""

    def sendall(self, data: bytes) -> None:
        """Keep what is sent."""
        self.sent += data

    def close(self) -> None:
        """Note the end."""
        self.is_closed = True


def test_what_was_gathered_is_sent_at_the_end() -> None:
    """Two small chunks and the end come through, though no block was ever full."""
    caller = _Caller()
    sender = Sender(lambda: caller, lambda _: bytes(16), "n2", 1.0)  # type: ignore[arg-type,return-value]
    sender.send(0, 0, b"abc")
    sender.send(1, 0, b"defg")
    assert not caller.sent
    sender.close()
    assert len(caller.sent) == 3 * HEAD_BYTES + 7
    assert caller.is_closed
    sender.close()


def test_nothing_sent_is_no_connection() -> None:
    """A worker without work opens none."""
    calls: list[None] = []
    Sender(lambda: calls.append(None), lambda _: bytes(16), "n2", 1.0).close()  # type: ignore[arg-type,return-value]
    assert calls == []
