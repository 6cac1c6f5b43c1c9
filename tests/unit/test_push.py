"""`mempipe push` with the hub's own client, against a hub on loopback that keeps what it is sent."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = "ada/quickstart-agent"
TOKEN = "hf_write"


@dataclass
class Hub:
    """What the hub was asked and what it keeps."""

    url: str = ""
    created: dict[str, object] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: dict[str, int] = field(default_factory=dict)
    """The status that a path is answered with, by a part of the path."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    kept = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path.startswith("/api/whoami")  # the repository is not
            self._reply({"name": "ada", "type": "user"}, status=200 if is_there else 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/api/repos/create":
                kept.created = json.loads(body)
                self._reply({"url": f"{kept.url}/{REPOSITORY}"})
            elif "/preupload/" in self.path:
                asked = [{"path": file["path"]} for file in json.loads(body)["files"]]
                self._reply({"files": [each | {"uploadMode": "regular", "shouldIgnore": False} for each in asked]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        kept.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self._reply({"commitUrl": f"{kept.url}/{REPOSITORY}/commit/1", "commitOid": "1", "success": True})
            else:
                self._reply({})

        def _reply(self, body: object, *, status: int = 200) -> None:
            refused = next((status for part, status in kept.refuses.items() if part in self.path), 0)
            known = self.headers.get("authorization") == f"Bearer {TOKEN}"
            status = refused or (status if known else 401)
            payload = json.dumps(body if status == 200 else {"error": "no"}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:  # type: ignore[override]
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kept
    server.shutdown()
    server.server_close()


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    for name, content in {"mempipe.yaml": "agent: {}", "config.json": "{}", "README.md": "# An agent"}.items():
        (folder / name).write_text(content)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


def pushed(hub: Hub | str, *words: object, home: Path, token: str = TOKEN, **variables: str) -> tuple[int, str]:
    """Runs the command; returns its exit code and all that it wrote."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HOME": str(home), **variables}
    environment |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "mempipe.cli", "push", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_every_file_of_the_agent_arrives(hub, agent, tmp_path):
    code, said = pushed(hub, agent, f"hf://{REPOSITORY}", home=tmp_path)
    assert code == 0, said
    assert hub.files == {file.name: file.read_bytes() for file in agent.iterdir()}
    assert (hub.created["name"], hub.created["organization"]) == ("quickstart-agent", "ada")
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert f"hf download {REPOSITORY} --local-dir agent && mempipe ask agent" in said
    assert TOKEN not in said
    code, said = pushed(hub, agent, REPOSITORY, "--public", home=tmp_path)
    assert code == 0, said
    assert hub.created.get("visibility") == "public" or hub.created.get("private") is False


@pytest.mark.slow
def test_what_cannot_be_published_is_said_in_one_sentence(hub, agent, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, sentence in {
        (empty, REPOSITORY): "is neither a run (no config.yaml) nor an exported agent (no mempipe.yaml",
        (agent, "quickstart"): "'quickstart' is not a repository of the hub; expected OWNER/NAME",
        (agent, "ada/a b"): "'ada/a b' is not a repository of the hub",
        (agent, REPOSITORY, "--best"): "--step and --best choose a checkpoint of a run",
    }.items():
        code, said = pushed(hub, *words, home=tmp_path)
        assert (code, sentence in said) == (2, True), said
    for settings, code, sentence in (
        ({"token": ""}, 2, "no token of the Hugging Face hub was found; set HF_TOKEN"),
        ({"token": "hf_other"}, 2, "answered 401: the token (HF_TOKEN or `hf auth login`) is not valid"),
        ({"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE is set"),
    ):
        found, said = pushed(hub, agent, REPOSITORY, home=tmp_path, **settings)
        assert (found, sentence in said) == (code, True), said
    hub.refuses["/repos/create"] = 403
    code, said = pushed(hub, agent, REPOSITORY, home=tmp_path)
    assert (code, "answered 403" in said) == (2, True), said
    assert hub.files == {}
    code, said = pushed("http://127.0.0.1:9", agent, REPOSITORY, home=tmp_path)
    assert (code, "http://127.0.0.1:9 cannot be reached" in said) == (1, True), said
