"""A real S3 server in a process of its own, and a server of files over HTTP that can fail."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import urlopen

from cluster import free_ports, until

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tester",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of moto's server."""
    (port,) = free_ports(1)
    code = "from moto.server import main; import sys; main(sys.argv[1:])"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        assert server.poll() is None
        try:
            with urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5):
                return True
        except OSError:
            return False

    try:
        until(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Files:
    """Files over HTTP, with ranges and ETags; `fault(handler)` is called first, and answers in
    place of them if it returns true.

    `asked` has the path, the range and the headers of each request.
    """

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.links: dict[str, tuple[str, dict[str, str]]] = {}  # path -> address, headers
        self.fault: Callable[[Any], bool] = lambda handler: False
        self.asked: list[tuple[str, str, dict[str, str]]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                files.answer(self, body=False)

            def do_GET(self) -> None:
                files.answer(self, body=True)

        files = self
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def parts(self, path: str) -> list[str]:
        """The ranges asked of a file."""
        return [asked for name, asked, _ in self.asked if name == path and asked]

    def answer(self, handler: Any, *, body: bool) -> None:
        asked = handler.headers.get("Range", "")
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.asked.append((handler.path, asked, headers))
        if self.fault(handler):
            return
        if handler.path in self.links:
            to, headers = self.links[handler.path]
            self.send(handler, 302, b"", {"Location": to, **headers})
            return
        data = self.content.get(handler.path)
        if data is None:
            self.send(handler, 404, b"")
            return
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if handler.headers.get("If-None-Match") == tag:
            self.send(handler, 304, b"", {"ETag": tag})
            return
        if handler.headers.get("If-Match", tag) != tag:
            self.send(handler, 412, b"")
            return
        headers = {"ETag": tag, "Last-Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", asked):
            begin, end = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            self.send(handler, 206, data[begin : end + 1], headers, body=body)
        else:
            self.send(handler, 200, data, headers, body=body)

    def send(
        self,
        handler: Any,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        body: bool = True,
    ) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            handler.wfile.write(data)


def stall(handler: Any) -> bool:
    """A fault: begins an answer, and never goes on."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"x")
    handler.wfile.flush()
    time.sleep(30)
    return True
