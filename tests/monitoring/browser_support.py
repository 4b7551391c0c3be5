"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage "
    "--font-render-hinting=none --remote-debugging-pipe"
).split()


class Browser:
    """One page; `problems` has its errors, those of the console too."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._count = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """Let go of the pipes, at which Chromium ends."""
        self._commands.close()
        self._answers.close()

    def resize(self, width: int, height: int) -> None:
        """Give the page's size in pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Emulate a desktop's preference for light or dark; empty is Chromium's default."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def live_in(self, zone: str) -> None:
        """Change the time zone, such as Asia/Kolkata; empty is the machine's."""
        self._call("Emulation.setTimezoneOverride", timezoneId=zone)

    def open(self, url: str, ready: str) -> None:
        """Go to an address, and wait until an expression is true there."""
        self.problems.clear()
        self._call("Page.navigate", url=url)
        self.wait(ready)

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""

        def value() -> Any:
            with contextlib.suppress(AssertionError):  # the page may be on its way to another
                return self.evaluate(expression)

        try:
            return eventually(value, expression, 60, pause=0.1)
        except AssertionError as error:
            text = self.evaluate("document.body.innerText")
            raise AssertionError(f"{error}\n{self.problems}\n{text}") from None

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; returns its value as JSON has it."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, such as Tab with code 9."""
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol; events that come before its answer are looked at."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            text = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                assert byte, "Chromium has ended"
                text += byte
            answer = json.loads(text)
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.problems.append(json.dumps(details["args"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            entry = details["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url')}")


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Starts a Chromium with a directory for its profile, and ends it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium: apt-get install chromium")
    child_in, commands = os.pipe()
    answers, child_out = os.pipe()
    launch = [sys.executable, "-c", _LAUNCH, str(child_in), str(child_out)]
    process = subprocess.Popen(
        [*launch, program, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(child_in, child_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    opened = Browser(commands, answers)
    try:
        yield opened
    finally:
        opened.close()
        process.wait(60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium with an empty profile."""
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
