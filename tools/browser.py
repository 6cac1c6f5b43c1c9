"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60.0


class Page:
    """One page. Keeps every request that it made and every error that it told."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools command."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=DEADLINE_S))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} did not come true; {self.errors}"
            time.sleep(0.02)

    def press(self, key: str, *, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def give_file(self, selector: str, path: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Writes the page as a PNG: its first `height` pixels, or all of it."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"]}
        clip["height"] = min(size["height"], height or size["height"])
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:300])
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


def _pages(url: str) -> list[str]:
    """Returns the addresses of a browser's open pages."""
    targets = httpx.get(url, timeout=DEADLINE_S).json()
    return [target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"]


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in `folder`."""
    assert CHROMIUM is not None, "there is no Chromium"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    browser = subprocess.Popen(
        [CHROMIUM, *options, *quiet, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
        start_new_session=True,
    )
    try:
        file, deadline = folder / "DevToolsActivePort", time.monotonic() + DEADLINE_S
        while not (file.exists() and len(file.read_text().split()) == 2):
            assert browser.poll() is None and time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.05)
        port = file.read_text().split()[0]
        while not (pages := _pages(f"http://127.0.0.1:{port}/json/list")):
            assert time.monotonic() < deadline, "Chromium opened no page"
            time.sleep(0.05)
        (url,) = pages
        with connect(url, max_size=2**26) as connection:
            yield Page(connection)
    finally:
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
