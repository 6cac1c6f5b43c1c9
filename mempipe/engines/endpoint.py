"""A model behind an OpenAI-compatible server, as the agents' `generate`, and as somebody who answers plain prompts.

Token ids go in, and come back where the server returns them (vLLM does). Elsewhere the text that comes back is encoded:
good enough to measure with, not to train on. Whatever the server or the network does wrong is an `EndpointFault`, never
a completion.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import httpx

from mempipe.agents.protocol import Tokenizer
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.faults import InfrastructureFault, retry_pauses
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates
from mempipe.types import Completion, FinishReason

MAX_ANSWER_BYTES = 64 * 2**20
NUM_ATTEMPTS = 3
"""An attempt may take this part of the time, so that one that hangs leaves some for others."""
_CONNECT_S = 10.0
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
_MAX_REASON_CHARS = 300


class EndpointFault(InfrastructureFault):
    """The server did not answer in time, refused, or answered with something that is no completion."""


class Endpoint:
    """One client. Any number of calls may be under way, of which `config.max_concurrency` are with the server."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        sampling: SamplingConfig | None = None,
        tokenizer: Tokenizer | None = None,
        stop_texts: Sequence[str] = (),
    ) -> None:
        """`tokenizer` is needed by `generate` only, whose completions also end with the token in which one of
        `stop_texts` ends.

        Raises ConfigError when the variable that holds the key is not set.
        """
        self._config = config
        self._stop_texts = list(stop_texts)
        self._sampling = sampling or SamplingConfig()
        self._tokenizer = tokenizer
        self._key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        if config.api_key_env and not self._key:
            raise ConfigError(
                f"endpoint.api_key_env is {config.api_key_env!r}, but no such environment variable is set"
            )
        self._client: httpx.AsyncClient | None = None
        self._places = asyncio.Semaphore(config.max_concurrency)

    async def check(self, *, context_tokens: int = 0) -> None:
        """Raises ConfigError when the server cannot be asked for its models, does not serve the configured one, or
        says that its contexts are shorter than `context_tokens`."""
        try:
            answer = await self._ask("GET", "models", None)
        except EndpointFault as fault:
            raise ConfigError(f"endpoint.url is {self._config.url!r}, which does not answer: {fault}") from fault
        listed = answer.get("data")
        models = (
            {str(model.get("id")): model for model in listed if isinstance(model, dict)}
            if isinstance(listed, list)
            else {}
        )
        if self._config.model not in models:
            raise ConfigError(
                f"endpoint.model is {self._config.model!r}; {self._config.url} serves {', '.join(models) or 'none'}"
            )
        length = models[self._config.model].get("max_model_len")  # vLLM says it
        if isinstance(length, int) and length < context_tokens:
            raise ConfigError(
                f"budget.context_tokens is {context_tokens}, but {self._config.model} is served with contexts of "
                f"{length}"
            )

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """One completion after `token_ids`; log-probs are NaN where the server gives none. Raises EndpointFault."""
        assert self._tokenizer is not None, "an endpoint that generates needs the model's tokenizer"
        sampling = self._sampling
        request = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 0,
            # Of vLLM: ids instead of text, and the agent's own stop tokens.
            "stop_token_ids": sorted(self._tokenizer.stop_token_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling.top_k > 0:
            request["top_k"] = sampling.top_k
        if self._stop_texts:
            request |= {"stop": self._stop_texts, "include_stop_str_in_output": True}
        answer = await self._ask("POST", "completions", request)
        return _completion(
            answer,
            prompt=list(token_ids),
            max_tokens=max_tokens,
            tokenizer=self._tokenizer,
            stop_texts=self._stop_texts,
        )

    async def chat(
        self, prompt: str, *, max_tokens: int, temperature: float, top_p: float = 1.0, num_samples: int = 1
    ) -> list[str]:
        """`num_samples` answers to a user message. Raises EndpointFault."""
        request = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "n": num_samples,
        }
        answer = await self._ask("POST", "chat/completions", request)
        choices = _choices(answer, num=num_samples)
        texts = [
            choice["message"].get("content") if isinstance(choice.get("message"), dict) else None for choice in choices
        ]
        if not all(isinstance(text, str) for text in texts):
            raise EndpointFault("the server answered with a choice without a text")
        return [replace_surrogates(str(text)) for text in texts]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask(self, method: str, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object that the server answers with. Repeats what may pass, until the deadline."""
        fault = EndpointFault("no attempt was made")
        try:
            async with asyncio.timeout(self._config.timeout_s):
                for pause in retry_pauses():
                    try:
                        async with self._places, asyncio.timeout(self._config.timeout_s / NUM_ATTEMPTS):
                            return await self._attempt(method, path, request)
                    except _Passing as passing:
                        fault = EndpointFault(str(passing))
                    except TimeoutError:
                        fault = EndpointFault(f"no answer within {self._config.timeout_s / NUM_ATTEMPTS:g} s")
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            raise EndpointFault(f"{fault}; given up after {self._config.timeout_s:g} s") from error
        raise fault

    async def _attempt(self, method: str, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        if self._client is None:  # made where it is used: a client belongs to an event loop
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            # The key goes to the configured host only: no redirects, and no proxy that the environment names for
            # others.
            limits = httpx.Limits(max_connections=self._config.max_concurrency)
            timeout = httpx.Timeout(self._config.timeout_s, connect=_CONNECT_S)
            self._client = httpx.AsyncClient(
                headers=headers, timeout=timeout, limits=limits, follow_redirects=False, trust_env=False
            )
        try:
            async with self._client.stream(method, f"{self._config.url.rstrip('/')}/{path}", json=request) as response:
                body = await _read(response)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Passing(f"{type(error).__name__}: {self._public(str(error))}") from error
        if response.status_code in _AGAIN:
            raise _Passing(f"status {response.status_code}: {self._public(body.decode(errors='replace'))}")
        if response.status_code != 200:
            raise EndpointFault(f"status {response.status_code}: {self._public(body.decode(errors='replace'))}")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _Passing(f"the answer is not JSON: {self._public(body[:80].decode(errors='replace'))!r}") from error
        if not isinstance(answer, dict):
            raise _Passing(f"the answer is {type(answer).__name__}, expected an object")
        return answer

    def _public(self, text: str) -> str:
        """What a server says, short and without the key (some repeat it when they refuse it)."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:_MAX_REASON_CHARS]


class _Passing(Exception):
    """What may be better at the next attempt."""


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_ANSWER_BYTES:
            raise EndpointFault(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _choices(answer: dict[str, Any], *, num: int) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != num or not all(isinstance(choice, dict) for choice in choices):
        raise EndpointFault(f"the server answered with {str(choices)[:80]}; expected {num} choices")
    return choices


def _completion(
    answer: dict[str, Any], *, prompt: list[int], max_tokens: int, tokenizer: Tokenizer, stop_texts: Sequence[str]
) -> Completion:
    (choice,) = _choices(answer, num=1)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise EndpointFault(f"finish_reason is {str(reason)[:40]!r}; expected stop or length")
    if choice.get("prompt_token_ids") not in (None, prompt):
        raise EndpointFault("the server completed another prompt than it was sent")
    token_ids = choice.get("token_ids")
    exact = token_ids is not None
    if not exact:
        token_ids = _encoded(choice.get("text"), stopped=reason == "stop", tokenizer=tokenizer, stop_texts=stop_texts)
        if len(token_ids) > max_tokens:  # the same text in more tokens than it was sampled in
            token_ids, reason = token_ids[:max_tokens], "length"
    if not isinstance(token_ids, list) or not all(type(i) is int and i >= 0 for i in token_ids):
        raise EndpointFault(f"token_ids is {str(token_ids)[:80]}; expected ids")
    if len(token_ids) > max_tokens:
        raise EndpointFault(f"the server sampled {len(token_ids)} tokens, {max_tokens} were allowed")
    if reason == "length" and exact and len(token_ids) < max_tokens:
        raise EndpointFault(
            f"the server stopped after {len(token_ids)} of {max_tokens} tokens; its context is shorter than the "
            "budget's"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=_logprobs(choice.get("logprobs"), num_tokens=len(token_ids)),
        finish_reason=FinishReason(reason),
        policy_version=0,
    )


def _encoded(text: Any, *, stopped: bool, tokenizer: Tokenizer, stop_texts: Sequence[str]) -> list[int]:
    """The ids of a text whose own ids are not known, with what ended it:
    a stop token, or a stop text. What it says stays text.
    """
    if not isinstance(text, str):
        raise EndpointFault(f"text is {str(text)[:80]}; expected a text")
    if stopped and text.endswith(tuple(stop_texts)):
        return tokenizer.encode_text(text)
    if stopped:
        for stop_text in stop_texts:  # most servers cut it off; it is the closing tag that lacks
            if text.rfind(stop_text.replace("</", "<")) > text.rfind(stop_text):
                return tokenizer.encode_text(text + stop_text)
    return tokenizer.encode_text(text) + [min(tokenizer.stop_token_ids)] * stopped


def _logprobs(given: Any, *, num_tokens: int) -> list[float]:
    values = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(values, list) or len(values) != num_tokens:
        return [math.nan] * num_tokens
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]
