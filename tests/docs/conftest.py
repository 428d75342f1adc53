"""The site that ``make docs`` has built, and a browser without network."""

from __future__ import annotations

import functools
import html
import http.server
import os
import pwd
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import ROOT

BUILT = ROOT / "site"
LOOK = Path(__file__).with_name("look.html").read_text()


class Browser:
    """Chromium, run as an ordinary user, with a copy of the site in the user's directory."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.site = directory / "site"
        self.port = port
        user = pwd.getpwnam("nobody")
        os.chown(directory, user.pw_uid, user.pw_gid)
        drop = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        self._words = [
            *(drop if os.geteuid() == 0 else []),
            *("chromium", "--headless", "--hide-scrollbars", "--disable-background-networking"),
            *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr"),
            f"--user-data-dir={directory}/profile",
        ]

    def show(self, address: str, *options: str) -> str:
        """Return a page after its scripts have run. Fails if a script fails."""
        words = [*self._words, "--virtual-time-budget=120000", *options, address]
        environ = {**os.environ, "HOME": str(self.directory)}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not complaints, "\n".join(complaints)
        return done.stdout

    def look(self, script: str) -> list[str]:
        """Return the lines that a script of look.html prints. The script may open pages of the site."""
        (self.site / "look.html").write_text(LOOK.replace("SCRIPT", script))
        document = self.show(f"http://127.0.0.1:{self.port}/look.html", "--dump-dom")
        return html.unescape(document.partition("<pre>")[2].partition("</pre>")[0]).splitlines()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert (BUILT / "index.html").exists(), "there is no site: run make docs"
    with tempfile.TemporaryDirectory(prefix="penroot-docs-") as name:
        shutil.copytree(BUILT, f"{name}/site")
        handler = functools.partial(Quiet, directory=f"{name}/site")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield Browser(Path(name), server.server_port)
            server.shutdown()
            thread.join()
