"""Chromium without a window, driven as a person would use it; skips where it is not installed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from cluster import WAIT_S

KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Backspace": 8}


class Browser:
    """A page in a Chromium of its own; speaks the DevTools protocol over two pipes.

    Attributes  problems  what the page logged as errors, and scripts that failed
    """

    def __init__(self) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.skip("chromium is not installed")
        self._profile = tempfile.TemporaryDirectory(
            prefix="dlm-chromium-", ignore_cleanup_errors=True
        )
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        line = (
            f"exec {program} --headless --no-sandbox --disable-gpu --remote-debugging-pipe "
            f"--user-data-dir={self._profile.name} about:blank 3<&{theirs_in} 4>&{theirs_out}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._said, self._number, self.problems = b"", 0, []
        self._session = ""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_S
        while True:
            while b"\0" not in self._said:
                assert select.select([self._in], [], [], end - time.monotonic())[0], method
                more = os.read(self._in, 1 << 20)
                assert more, "chromium ended"
                self._said += more
            one, self._said = self._said.split(b"\0", 1)
            found = json.loads(one)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            if found.get("method") == "Runtime.exceptionThrown" or (
                found.get("method") == "Log.entryAdded"
                and found["params"]["entry"]["level"] == "error"
            ):
                self.problems.append(found["params"])

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a page in a window of this size, in pixels."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + WAIT_S
        while not (found := self.run(script)):
            assert time.monotonic() < end, script
        return found

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses a key of `KEYS`."""
        more = {"text": "\r"} if key == "Enter" else {}
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self("Input.dispatchKeyEvent", type="keyDown", **shared, **more)
        self("Input.dispatchKeyEvent", type="keyUp", **shared)

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        found = self("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()
