"""A hub on this machine, for the hub's own client: it hands out files, refuses them as the real one does, or hangs."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, utils

from corp_cli.runtime import hub

ASK = hub.unreachable  # before conftest.py puts something in its place
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandIn:
    """What the stand-in answers, and what it was asked."""

    endpoint: str
    files: dict[str, bytes] = field(default_factory=dict)  # OWNER/NAME/REVISION/FILE → content
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)  # OWNER/NAME → status, X-Error-Code
    seconds: float = 0.0  # before it answers
    asked: list[str] = field(default_factory=list)  # METHOD address


def handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    """What http.server calls."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            time.sleep(stand_in.seconds)
            if not self.path.startswith("/api/"):  # of which some are none of ours
                stand_in.asked.append(f"{self.command} {self.path}")
            repository, _, rest = self.path.strip("/").partition("/resolve/")
            if repository in stand_in.refuses:
                return self.send(stand_in.refuses[repository][0], b"", stand_in.refuses[repository][1])
            known = {key.rpartition("/")[0] for key in stand_in.files}
            if f"{repository}/{rest}" in stand_in.files:
                return self.send(200, stand_in.files[f"{repository}/{rest}"])
            if f"{repository}/{rest.partition('/')[0]}" in known:
                return self.send(404, b"", "EntryNotFound")
            found = any(one.startswith(f"{repository}/") for one in known)
            return self.send(404, b"", "RevisionNotFound" if found else "RepoNotFound")

        def send(self, status: int, content: bytes, error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving() -> Iterator[StandIn]:
    """A stand-in at an address of this machine."""
    stand_in = StandIn("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stand_in))
    stand_in.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def hole() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def close_sessions() -> None:
    """Let the hub's client read the environment again; before version 1.0, it had another name for this."""
    close: Any = getattr(utils, "close_session", None) or utils.reset_sessions
    close()


def take_for_hub(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client ask `endpoint`, and keep what it gets in the empty folder `cache`."""
    monkeypatch.setattr(hub, "unreachable", ASK)
    monkeypatch.setattr(hub, "_answers", {})
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_sessions()
