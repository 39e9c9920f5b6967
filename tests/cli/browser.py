"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. Use it as a context manager."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._place = Path(tempfile.mkdtemp(prefix="chromium", dir="/tmp"))
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.errors: list[str] = []
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", "--no-first-run",
                   "--disable-dev-shm-usage", f"--user-data-dir={self._place}"]  # fmt: skip
        if os.getuid() == 0:
            options.append("--no-sandbox")
        # Chromium leaves a directory (org.chromium.*) where temporary files go: it goes with the rest.
        env = {**os.environ, "HOME": str(self._place), "TMPDIR": str(self._place)}
        self._process = subprocess.Popen([PROGRAM, *options], stderr=subprocess.DEVNULL, env=env)

    def __enter__(self) -> Browser:
        self._run(self._connect())
        for domain in ("Page", "Runtime", "Accessibility"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._session.close())
        self._loop.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 90))

    async def _connect(self) -> None:
        where = self._place / "DevToolsActivePort"
        while not where.exists() or "\n" not in where.read_text():
            assert self._process.poll() is None, "chromium has ended"
            await asyncio.sleep(0.05)
        port = where.read_text().split("\n")[0]
        self._session = aiohttp.ClientSession()
        while True:
            async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            if pages:
                break
            await asyncio.sleep(0.05)
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def ask(self, method: str, **more: Any) -> Any:
        return self._run(self._ask(method, more))

    async def _ask(self, method: str, more: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": more})
        while True:
            told = await self._socket.receive_json()
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]))
            if told.get("id") == self._number:
                assert "error" not in told, (method, told)
                return told["result"]

    def open(self, path: Path, width: int, height: int, *, dark: bool) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.as_uri())
        while self.run("[document.readyState, location.href]") != ["complete", path.as_uri()]:
            self._run(asyncio.sleep(0.05))

    def run(self, script: str) -> Any:
        """What an expression of JavaScript is."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: int, *, control: bool) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=2 * control)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def photograph(self, path: Path) -> bytes:
        data = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def printed(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"])
