"""Control Chromium through its DevTools pipe: JSON over two file descriptors, without driver or library."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-client-side-phishing-detection",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-features=OptimizationHints,MediaRouter,Translate,NetworkTimeServiceQuerying",
    "--disable-sync",
    "--disable-default-apps",
    "--metrics-recording-only",
    "--no-pings",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """A browser with one tab. `console` and `requests` contain the messages and requests of its page.

    Both come from DevTools events of the tab, without the browser's internal requests.
    """

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._replies: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._rest = b""
        self._session: str | None = None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        words = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        command = f"exec {shlex.join(words)} 3<&{to_browser} 4>&{from_browser}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.look(width=width, height=height, dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the window size and the color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        """Open a URL and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def open_fresh(self, url: str) -> None:
        """Open a URL in a default window and reset `console` and `requests`."""
        self.call("Page.navigate", url="about:blank")  # the previous page must not report anymore
        self.run("1")
        self.console.clear()
        self.requests.clear()
        self.look()
        self.open(url)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page (promises are awaited)."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise AssertionError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, condition: str, *, seconds: float = 30) -> None:
        """Wait until a JavaScript condition is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.run(condition):
                    return
            except AssertionError:
                pass  # the page is loading
            time.sleep(0.05)
        shown = self.run("document.body ? document.body.innerText.slice(0, 1500) : ''")
        raise AssertionError(f"not within {seconds} s: {condition}\n{shown}\n{self.console}")

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png"}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, **_box(size), "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def outside(self, own: str) -> list[str]:
        """Return requests to other addresses than `own`."""
        return [u for u in self.requests if not u.startswith((own, "data:", "about:")) and re.match(r"\w+:", u)]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while number not in self._replies:
            self._receive()
        reply = self._replies.pop(number)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def _receive(self) -> None:
        data = os.read(self._read, 1 << 20)
        if not data:
            raise AssertionError("the browser has gone")
        *whole, self._rest = (self._rest + data).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._replies[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url')}")


def _box(size: dict[str, Any]) -> dict[str, Any]:
    return {"width": size["width"], "height": min(size["height"], 4000)}
