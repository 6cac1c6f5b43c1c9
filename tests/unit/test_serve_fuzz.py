"""Whatever is sent to the agent service: no 5xx, and no answer that its schema does not name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service_builders import Service, build_service, running

from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow  # hundreds of requests

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/v1/answer"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response}"),
    ("DELETE", "/v1/responses/{response}"),
    ("GET", "/v1/responses/{response}/input_items"),
    ("POST", "/v1/conversations"),
    ("GET", "/v1/conversations/{conversation}"),
    ("POST", "/v1/conversations/{conversation}"),
    ("DELETE", "/v1/conversations/{conversation}"),
    ("GET", "/v1/conversations/{conversation}/items"),
    ("POST", "/v1/conversations/{conversation}/items"),
    ("GET", "/v1/models"),
    ("GET", "/v1/corpus"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{session}"),
    ("DELETE", "/v1/sessions/{session}"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("POST", "/v1/documents/{document}/pieces"),
    ("GET", "/v1/documents/{document}"),
    ("DELETE", "/v1/documents/{document}"),
]


class Noise(list[str]):
    """Messages that end every trajectory in its first turn, without end."""

    def pop(self, index: Any = -1) -> str:
        return "so</think>\\boxed{ yes}"

    def __bool__(self) -> bool:
        return True


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fuzz")
    build_tokenizer(folder)
    service = build_service(load_tokenizer(str(folder)), folder)
    service.engine.says = Noise()
    with running(service):
        yield service


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_documented_whatever_is_sent(service, method, path, mode):
    load_all_checks()
    operation = schemathesis.openapi.from_url(f"{service.url}/openapi.json")[path][method]
    if not operation.body and mode is GenerationMode.NEGATIVE and "{" not in path:
        pytest.skip("nothing can be wrong with it")
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(max_examples=15, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(mode))
    def fuzz(case: Any) -> None:
        answer = case.call(base_url=service.url)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    fuzz()
    assert statuses
    if mode is GenerationMode.NEGATIVE and path in ("/v1/answer", "/v1/chat/completions"):
        assert statuses[400]


TEXT = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = ("question", "session", "query", "num_passages", "partition", "document", "start", "num_chars")
CALL = st.fixed_dictionaries(
    {"name": st.sampled_from(["ask", "search", "read_document"]) | TEXT},
    optional={"arguments": st.dictionaries(st.sampled_from(ARGUMENTS) | TEXT, VALUES, max_size=4), "_meta": VALUES},
)
METHODS = ("initialize", "ping", "tools/list", "resources/read", "completion/complete", "notifications/cancelled")
MESSAGES = st.builds(
    lambda head, rest: {"jsonrpc": "2.0", "id": 1, **head, **rest},
    st.fixed_dictionaries({"method": st.just("tools/call"), "params": CALL})
    | st.fixed_dictionaries({"method": st.sampled_from(METHODS) | TEXT, "params": VALUES}),
    st.just({}) | st.dictionaries(st.sampled_from(["jsonrpc", "id", "method", "params"]), VALUES, max_size=1),
)
"""Messages of JSON-RPC, with at most one wrong field."""


@seed(1)
@settings(max_examples=60, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=(MESSAGES | VALUES).map(lambda each: json.dumps(each).encode()) | st.binary(max_size=20))
def test_every_answer_of_the_mcp_server_is_a_message_whatever_is_sent(service, body):
    headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    answer = httpx.post(f"{service.url}/mcp", content=body, headers=headers, timeout=20)
    assert answer.status_code in (200, 202, 400), answer.text
    lines = answer.text.replace("\r", "\n").split("\n")  # `splitlines` splits at letters of a text too
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    for message in events or [answer.text] * (answer.status_code != 202):
        assert json.loads(message)["jsonrpc"] == "2.0" and "Traceback" not in message
