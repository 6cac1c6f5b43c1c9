"""A server that stands in for an engine where a test is not about engines: it always writes the same message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER = "new"
MESSAGE = f"I know</think>\\boxed{{ {ANSWER}}}"


class _Completions(BaseHTTPRequestHandler):
    """POST .../completions of an OpenAI-compatible server."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        content = json.dumps({"choices": [{"text": MESSAGE, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def completions_server() -> Iterator[str]:
    """Gives the address of an OpenAI-compatible server of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
