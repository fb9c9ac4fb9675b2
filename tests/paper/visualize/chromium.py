"""Controls headless Chromium through a pipe, for tests.

Source: the Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab of the browser.

    Args:
        send, receive: file descriptors of the pipes to and from the browser.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, receive
        self.rest, self.count, self.session = b"", 0, None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of one command; errors of the page are recorded in `problems`."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            self._record(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + 30
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.receive], [], [], until - time.monotonic())
            assert ready, "no answer from the browser for 30 seconds"
            read = os.read(self.receive, 1 << 20)
            assert read, "the browser has exited"
            self.rest += read
        first, self.rest = self.rest.split(b"\0", 1)
        return json.loads(first)

    def _record(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(params))
        if kind == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.problems.append(f"requests {url} from the network")

    def open(self, file: Path, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Open a file in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1.5,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self.call("Page.navigate", url=file.as_uri())
        self.ask(
            "new Promise(done => document.readyState === 'complete' ? done()"
            " : addEventListener('load', done))"
        )
        self.settle()

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has been redrawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, what: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, **more)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        for what, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=what, touchPoints=points)
        self.settle()

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        if key == "Enter":
            text = {"text": "\r", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in `folder`; it exits at the end of the block."""
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",  # tests may run as root, as in containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    # The browser reads commands from file descriptor 3 and answers on 4.
    program = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", program, "bash", *command],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Page(send, receive)
    finally:
        process.terminate()
        process.wait(30)
        os.close(send)
        os.close(receive)
