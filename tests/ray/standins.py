"""What stands in for engines where a test is not about them. It starts at once and always writes the same message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.types import Completion, FinishReason

ANSWER = "new"
MESSAGE = f"I know</think>\\boxed{{ {ANSWER}}}"


class StandInReplica:
    """A deployment in the place of `GeneratorReplica`."""

    def __init__(self, config: RunConfig, version: str) -> None:
        tokenizer = load_tokenizer(config.model.path)
        self._version = version
        self._token_ids = [*tokenizer.encode_template(MESSAGE), min(tokenizer.stop_token_ids)]

    async def version(self) -> str:
        return self._version

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, sampling: SamplingConfig, stop_token_ids: Sequence[int]
    ) -> Completion:
        ids = self._token_ids[:max_tokens]
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=FinishReason.STOP, policy_version=0)


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
