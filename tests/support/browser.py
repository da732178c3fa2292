"""A headless Chromium that tests control by the DevTools protocol, over two pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

PROGRAM = shutil.which("chromium")
_PATIENCE_S = 120.0
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab: its network requests, its errors and its content.

    Attributes:
        requests: the URLs requested.
        complaints: errors and warnings, also those of its Content-Security-Policy.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        return self._browser.call(method, params, self._session)

    def show(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a page in a window of that size, and wait until its charts are drawn."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        drawn = "document.readyState === 'complete' && document.body.dataset.drawn"
        self.run(f"new Promise(done => {{ const look = () => {drawn} ? done() : setTimeout(look, 20); look() }})")

    def run(self, script: str) -> Any:
        """Return the value of an expression; of a promise, the value that it resolves to."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key in the focused element."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        fields = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0])), "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a screenshot of the whole page, or of what the window shows, as PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def record_event(self, event: dict[str, Any]) -> None:
        """Record an event of the tab."""
        params = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))


class Browser:
    """A running Chromium."""

    def __init__(self, directory: Path) -> None:
        assert PROGRAM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4
        words = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', PROGRAM, *_OPTIONS]
        with (directory / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*words, f"--user-data-dir={directory}/profile"],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        self._numbers = itertools.count(1)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def call(self, method: str, params: dict[str, Any], session: str = "") -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = Queue()
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._out.write(json.dumps(message).encode() + b"\0")
        response = answer.get(timeout=_PATIENCE_S)
        assert "error" not in response, (method, response["error"])
        return response["result"]

    def page(self) -> Page:
        """Open a tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        return page

    def stop(self) -> None:
        """Stop the browser."""
        with contextlib.suppress(OSError):
            self._out.close()
        self._process.terminate()
        self._process.wait(30)
        self._listener.join(30)
        self._in.close()

    def _listen(self) -> None:
        rest = b""
        while chunk := self._in.read1(1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.record_event(message)


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Run a Chromium with a new profile in `directory`."""
    running = Browser(directory)
    try:
        yield running
    finally:
        running.stop()
