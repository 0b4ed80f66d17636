"""A real browser without a screen, driven through chromedriver's own protocol (W3C WebDriver).

Nothing is installed for it into the Python environment: the protocol is JSON over HTTP on this
machine.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
#: Why no browser can be had; empty where one can.
MISSING = "" if CHROMIUM and DRIVER else "chromium and chromedriver are not installed"

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--force-color-profile=srgb",
)


class Browser:
    """One window."""

    def __init__(self, port: int, profile: Path) -> None:
        self._port = port
        capabilities = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*OPTIONS, f"--user-data-dir={profile}"],
            },
        }
        self._session = ""
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            text = json.dumps(body if body is not None else {}) if method == "POST" else None
            connection.request(
                method, f"{self._session}{path}", text, {"Content-Type": "application/json"}
            )
            answer = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(answer, dict) and "error" in answer:
            message = f"{answer['error']}: {answer.get('message')}"
            raise RuntimeError(message)
        return answer

    def close(self) -> None:
        """End the session and with it the browser."""
        self._call("DELETE", "")

    def open(self, page: Path) -> None:
        """Open a page and wait until it says that it is ready."""
        self._call("POST", "/url", {"url": page.as_uri()})
        wait = (
            "const done = arguments[0]; const look = () => document.documentElement.dataset.ready"
            " ? done(document.documentElement.dataset.ready) : setTimeout(look, 10); look();"
        )
        state = self._call("POST", "/execute/async", {"script": wait, "args": []})
        assert state == "true", f"{state}: {self.text('#fallback')}\n{self.log()}"
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; its ``return`` comes back."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        script = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0));"
        self._call("POST", "/execute/async", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """The text of an element, shown or not."""
        return str(
            self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def click(self, selector: str, x: float, y: float, *, drag_to: float | None = None) -> None:
        """Click into an element at fractions of its width and height, or drag from there."""
        place = (
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.left + arguments[1] * r.width, r.top + arguments[2] * r.height, r.width]"
        )
        left, top, width = self.run(place, selector, x, y)
        actions: list[dict[str, Any]] = [
            {"type": "pointerMove", "x": int(left), "y": int(top), "duration": 0},
            {"type": "pointerDown", "button": 0},
        ]
        if drag_to is not None:
            there = int(left + (drag_to - x) * width)
            actions += [
                {"type": "pointerMove", "x": part, "y": int(top), "duration": 20}
                for part in ((int(left) + there) // 2, there)
            ]
        actions.append({"type": "pointerUp", "button": 0})
        pointer = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": actions,
        }
        self._call("POST", "/actions", {"actions": [pointer]})
        self.settle()

    def wheel(self, selector: str, x: float, y: float, delta: int) -> None:
        """Turn the wheel over an element at fractions of its width and height."""
        place = (
            "const e = document.querySelector(arguments[0]); const r = e.getBoundingClientRect();"
            "return [r.left + arguments[1] * r.width, r.top + arguments[2] * r.height]"
        )
        left, top = self.run(place, selector, x, y)
        scroll = {
            "type": "scroll",
            "x": int(left),
            "y": int(top),
            "deltaX": 0,
            "deltaY": delta,
            "duration": 0,
        }
        actions = [{"type": "wheel", "id": "wheel", "actions": [scroll]}]
        self._call("POST", "/actions", {"actions": actions})
        self.settle()

    def press(self, selector: str, *keys: str) -> None:
        """Focus an element and press keys."""
        self.run("document.querySelector(arguments[0]).focus({preventScroll: true})", selector)
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": strokes}]
        self._call("POST", "/actions", {"actions": actions})
        self.settle()

    def protocol(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """Give the page a width and a height."""
        self.protocol(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.settle()

    def emulate(self, **features: str) -> None:
        """Set media features, such as ``prefers_color_scheme="dark"``."""
        media = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.protocol("Emulation.setEmulatedMedia", features=media)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page."""
        shot = self.protocol("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def log(self) -> list[str]:
        """What the console said since the last time."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def requests(self) -> list[str]:
        """The addresses that the page asked for since the last time."""
        entries = self._call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [str(parameters["request"]["url"]) for parameters in sent]


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder; ended with what it started."""
    assert DRIVER is not None
    with subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        assert driver.stdout is not None
        port = 0
        for line in driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                port = int(found[1])
                break
        assert port, "chromedriver did not start"
        try:
            browser = Browser(port, folder)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(timeout=10)
