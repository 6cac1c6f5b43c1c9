"""The service that the tests of a client reach, and what its policy got. No test runs in mempipe's environment, so
nothing of mempipe is imported."""

from __future__ import annotations

import json
import os
import urllib.request

SERVED = json.loads(os.environ["MEMPIPE_SERVED"])
URL, KEY, QUESTION, GOLD = f"{SERVED['url']}/v1", SERVED["key"], SERVED["question"], SERVED["gold"]


def engine(*says: str) -> dict[str, list]:
    """Returns prompts, token limits and seeds of the policy's calls since the last look; the policy then says the
    given answers in place of its script."""
    body = json.dumps([f"I know</think>\\boxed{{ {answer}}}" for answer in says]).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/engine", body, headers), timeout=20) as reply:
        return json.load(reply)
