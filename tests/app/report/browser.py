"""Headless Chromium driven over the DevTools protocol by pipe, with nothing but the library."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab: sends commands, collects events."""

    def __init__(self, read, write):
        self.read, self.write, self.session = read, write, None
        self.buffer, self.number, self.events = b"", 0, []

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        end = time.monotonic() + 60
        while b"\0" not in self.buffer:
            ready = select.select([self.read], [], [], max(0, end - time.monotonic()))[0]
            chunk = os.read(self.read, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("chromium does not answer")
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url, width, dark=False):
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=theme)
        self.call("Page.navigate", url=url)
        state = "[location.href, document.readyState]"
        while self.evaluate(state) != [url, "complete"]:
            time.sleep(0.05)

    def evaluate(self, expression):
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _of(self, *methods):
        return [event for event in self.events if event.get("method") in methods]

    def complaints(self):
        """Console errors and warnings, failed requests and uncaught exceptions."""
        spoken = ("error", "warning", "assert")
        said = self._of("Runtime.consoleAPICalled")
        wrong = self._of("Runtime.exceptionThrown", "Network.loadingFailed", "Log.entryAdded")
        return wrong + [event for event in said if event["params"]["type"] in spoken]

    def requests(self):
        return [e["params"]["request"]["url"] for e in self._of("Network.requestWillBeSent")]


@contextlib.contextmanager
def page(profile):
    """A fresh browser with a profile directory of its own."""
    ours, theirs = [], []
    for kept, given in ((1, 0), (0, 1)):
        pipe = os.pipe()
        ours.append(pipe[kept])
        # The browser's ends go to descriptors 3 and 4; keep the originals clear of those.
        theirs.append(fcntl.fcntl(pipe[given], fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(pipe[given])
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    actions = quiet + [(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(theirs, 3)]
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions, setpgroup=0)
    for fd in theirs:
        os.close(fd)
    write, read = ours
    try:
        tab = Page(read, write)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(read)
        os.close(write)
