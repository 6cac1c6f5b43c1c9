"""vLLM's parsers of tool calls: each reads the form in which a family of models writes them."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from mempipe.agents.protocol import ParseCalls, ParsedCalls, UnreadableCall
from mempipe.settings import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest


def class_of(name: str) -> Any:
    """Returns vLLM's class of that name. Raises ConfigError for a name that vLLM does not know."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"agent.tool_parser is {name!r}; vLLM has {known}") from None


def parser_of(name: str, tokenizer: PreTrainedTokenizerFast) -> ParseCalls:
    """Returns vLLM's parser of that name. Raises ConfigError for a name that vLLM does not know, and for a parser that
    needs a token that the vocabulary lacks; the parser raises it for tools that vLLM does not take.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    kind = class_of(name)

    @functools.lru_cache(maxsize=64)
    def made(tools: str) -> tuple[Any, ChatCompletionRequest]:
        asked = [{"role": "user", "content": ""}]
        try:
            request = ChatCompletionRequest.model_validate({"messages": asked, "tools": json.loads(tools)})
            return kind(tokenizer, request.tools), request
        except Exception as error:  # RuntimeError, ValueError and VLLMValidationError were seen
            raise ConfigError(f"vLLM's tool parser {name!r} cannot be used: {error}") from error

    def parse(text: str, tools: str) -> ParsedCalls:
        parser, request = made(tools)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as error:  # a parser may fail at anything that a policy writes
            raise UnreadableCall(str(error)) from error
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return ParsedCalls(found.content or "", calls)

    made("null")
    return parse
