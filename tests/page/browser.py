"""Chromium without a window, over the pipe of its DevTools protocol: no driver, no library."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

import pytest

PATIENCE_S = 60


class Browser:
    def __init__(self):
        program = shutil.which("chromium")
        if not program:
            pytest.skip("no Chromium: run tools/install-deps --page on Debian")
        self.profile = tempfile.mkdtemp(prefix="rekindle-page.")
        to_it, ours_out = os.pipe()
        ours_in, from_it = os.pipe()

        def give_pipes():
            # The protocol reads descriptor 3 and writes descriptor 4.
            low_in, low_out = os.dup(to_it), os.dup(from_it)
            os.dup2(low_in, 3)
            os.dup2(low_out, 4)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
             "--no-first-run", "--disable-extensions", "--disable-background-networking",
             "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
             f"--user-data-dir={self.profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=give_pipes)
        os.close(to_it)
        os.close(from_it)
        self.out, self.into = ours_out, ours_in
        self.buffer = b""
        self.number = 0
        self.told = []

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self.out, text):]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.told.append(answer)

    def _next(self, deadline):
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.into], [], [], max(left, 0))
            assert ready, "the browser does not answer"
            data = os.read(self.into, 1 << 20)
            assert data, "the browser has ended"
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def open(self, url, **look):
        return Page(self, url, **look)


class Page:
    """A tab. It keeps what the page says on its console, and which requests it makes."""

    def __init__(self, browser, url, width=1280, height=900, dark=False):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.look(width, height, dark)
        self.call("Page.navigate", url=url)
        self.eventually("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def look(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector):
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def eventually(self, expression):
        """Returns as soon as the expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if self.value(f"Boolean({expression})"):
                return
            assert time.monotonic() < deadline, (
                f"never true: {expression}; the page says: {self.value('document.body.innerText')[:2000]}")
            time.sleep(0.02)

    def press(self, key, code=None, modifiers=0):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "End": 35, "Home": 36}
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key,
                      windowsVirtualKeyCode=codes[key], modifiers=modifiers, **more)

    def _told(self, method):
        self.value("1")
        return [each["params"] for each in self.browser.told
                if each.get("sessionId") == self.session and each["method"] == method]

    def problems(self):
        """Exceptions, and what the console and the browser's log call errors and warnings."""
        found = [each["exceptionDetails"] for each in self._told("Runtime.exceptionThrown")]
        found += [each for each in self._told("Runtime.consoleAPICalled") if each["type"] in ("error", "warning")]
        found += [each["entry"] for each in self._told("Log.entryAdded") if each["entry"]["level"] in ("error", "warning")]
        return found

    def requests(self):
        return [each["request"]["url"] for each in self._told("Network.requestWillBeSent")]

    def nodes(self):
        """The accessibility tree: (role, name) of each node that is not ignored."""
        tree = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", ""))
                for node in tree if not node.get("ignored")]

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
