"""A model behind an OpenAI-compatible server, as the agents' `generate`, and as a model that answers plain prompts.

Token ids go in, and come back where the server returns them (vLLM does). Otherwise the returned text is encoded: good
enough to measure with, not to train on. Every failure of the server or the network is a `ServiceFault`, never a
completion.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from mempipe.agents.protocol import Tokenizer
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.faults import ServiceFault
from mempipe.http_client import HttpClient, RetryPolicy
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates
from mempipe.types import Completion, FinishReason

MAX_ANSWER_BYTES = 64 * 2**20


class Endpoint:
    """One client. Any number of calls may be in flight; at most `config.max_concurrency` are sent to the server."""

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
        self._gives_logprobs = False
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ConfigError(
                f"endpoint.api_key_env is {config.api_key_env!r}, but no such environment variable is set"
            )
        self._http = HttpClient(
            config.url,
            RetryPolicy(timeout_s=config.timeout_s, setting="endpoint.timeout_s"),
            max_answer_bytes=MAX_ANSWER_BYTES,
            max_concurrency=config.max_concurrency,
            key=key,
        )

    async def check(self, *, context_tokens: int = 0) -> None:
        """Raises ConfigError when the server cannot be asked for its models, does not serve the configured one, or
        says that its contexts are shorter than `context_tokens`."""
        try:
            answer = await self._ask("GET", "models", None)
        except ServiceFault as fault:
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
        length = models[self._config.model].get("max_model_len")  # given by vLLM
        if isinstance(length, int) and length < context_tokens:
            raise ConfigError(
                f"budget.context_tokens is {context_tokens}, but {self._config.model} is served with contexts of "
                f"{length}"
            )

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingConfig | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Samples one completion after `token_ids`; log-probs are NaN where the server gives none. Raises ServiceFault.

        `sampling` is that of this completion, where it differs from the client's own.
        """
        assert self._tokenizer is not None, "an endpoint that generates needs the model's tokenizer"
        sampling = sampling or self._sampling
        request = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 0,
            # Extensions of vLLM: ids instead of text, and the agent's own stop tokens.
            "stop_token_ids": sorted(self._tokenizer.stop_token_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling.top_k > 0:
            request["top_k"] = sampling.top_k
        if seed is not None:
            request["seed"] = seed
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

    async def gives_logprobs(self) -> bool:
        """Returns whether the server's tokens have log-probs, by a completion of one token. Raises ServiceFault."""
        if not self._gives_logprobs:  # a server that gives none may be replaced by one that does
            assert self._tokenizer is not None, "an endpoint that generates needs the model's tokenizer"
            completion = await self.generate(self._tokenizer.encode_text("?"), max_tokens=1)
            self._gives_logprobs = not any(map(math.isnan, completion.logprobs))
        return self._gives_logprobs

    async def chat(
        self, prompt: str, *, max_tokens: int, temperature: float, top_p: float = 1.0, num_samples: int = 1
    ) -> list[str]:
        """Returns `num_samples` answers to a user message. Raises ServiceFault."""
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
            raise ServiceFault("the server answered with a choice without a text")
        return [replace_surrogates(str(text)) for text in texts]

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def _ask(self, method: str, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the JSON object that the server answers with."""
        answer = await self._http.request(method, path, request)
        try:
            value = answer.json()
        except ValueError as error:
            raise ServiceFault(f"{self._config.url}/{path} answered with text that is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ServiceFault(f"{self._config.url}/{path} answered with {type(value).__name__}; expected an object")
        return value


def _choices(answer: dict[str, Any], *, num: int) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != num or not all(isinstance(choice, dict) for choice in choices):
        raise ServiceFault(f"the server answered with {str(choices)[:80]}; expected {num} choices")
    return choices


def _completion(
    answer: dict[str, Any], *, prompt: list[int], max_tokens: int, tokenizer: Tokenizer, stop_texts: Sequence[str]
) -> Completion:
    (choice,) = _choices(answer, num=1)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise ServiceFault(f"finish_reason is {str(reason)[:40]!r}; expected stop or length")
    if choice.get("prompt_token_ids") not in (None, prompt):
        raise ServiceFault("the server completed another prompt than it was sent")
    token_ids = choice.get("token_ids")
    exact = token_ids is not None
    if not exact:
        token_ids = _encoded(choice.get("text"), stopped=reason == "stop", tokenizer=tokenizer, stop_texts=stop_texts)
        if len(token_ids) > max_tokens:  # the same text in more tokens than it was sampled in
            token_ids, reason = token_ids[:max_tokens], "length"
    if not isinstance(token_ids, list) or not all(type(i) is int and i >= 0 for i in token_ids):
        raise ServiceFault(f"token_ids is {str(token_ids)[:80]}; expected ids")
    if len(token_ids) > max_tokens:
        raise ServiceFault(f"the server sampled {len(token_ids)} tokens, {max_tokens} were allowed")
    if reason == "length" and exact and len(token_ids) < max_tokens:
        raise ServiceFault(
            f"the server stopped after {len(token_ids)} of {max_tokens} tokens; its context is shorter than the "
            "budget's"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=_logprobs(choice.get("logprobs"), num_tokens=len(token_ids)),
        finish_reason=FinishReason(reason),
        policy_version=0,
    )


def _encoded(text: object, *, stopped: bool, tokenizer: Tokenizer, stop_texts: Sequence[str]) -> list[int]:
    """Encodes a text whose own ids are not known, with the stop token or stop text that ended it. Special tokens inside
    it stay text.
    """
    if not isinstance(text, str):
        raise ServiceFault(f"text is {str(text)[:80]}; expected a text")
    if stopped and text.endswith(tuple(stop_texts)):
        return tokenizer.encode_text(text)
    if stopped:
        for stop_text in stop_texts:  # most servers cut it off: the closing tag is missing
            if text.rfind(stop_text.replace("</", "<")) > text.rfind(stop_text):
                return tokenizer.encode_text(text + stop_text)
    return tokenizer.encode_text(text) + [min(tokenizer.stop_token_ids)] * stopped


def _logprobs(given: object, *, num_tokens: int) -> list[float]:
    values = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(values, list) or len(values) != num_tokens:
        return [math.nan] * num_tokens
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]
