"""Whatever is sent to the agent service: no 5xx, and no answer that its schema does not name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
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
    ("POST", "/v1/conversations"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{session}"),
    ("DELETE", "/v1/sessions/{session}"),
    ("POST", "/v1/documents"),
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
