"""A server of tools over standard input and output, which a test starts: JSON lines alone, since the SDK takes half a
second to import."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = {
    "double": (lambda number: str(2 * number), NUMBER),
    "process": (lambda: str(os.getpid()), {"type": "object"}),
    "environment": (lambda: " ".join(sorted(os.environ)), {"type": "object"}),
    "hangs": (lambda: time.sleep(60), {"type": "object"}),
    "dies": (lambda: os._exit(3), {"type": "object"}),
}


def reply(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the result of a request, None for a method that this server lacks."""
    if method == "initialize":
        server = {"name": "tools", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": schema} for name, (_, schema) in TOOLS.items()]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": TOOLS[params["name"]][0](**params["arguments"])}]}
    return None


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = reply(asked["method"], asked.get("params", {}))
        told = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
