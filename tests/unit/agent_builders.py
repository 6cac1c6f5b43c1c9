"""Builders for the agents' tests:
small byte-level tokenizers with published chat templates, a scripted engine, a tiny retriever.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mempipe.agents.memsearcher import (
    MemSearcher,
    MemSearcherBudget,
    MemSearcherCompat,
    MemSearcherPrompts,
    MemSearcherRenderer,
)
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.rendering import Renderer
from mempipe.agents.tools import SearchTool, Toolbox
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.types import Completion, Context, FinishReason, Passage, Question, SearchResult

TOOL = SearchTool(name="wikipedia_search", num_passages=5, max_passages=10, max_query_chars=1000)
TOOLS = Toolbox(search=TOOL)
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a place up.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
"""A tool of a program, in OpenAI's form."""
CALL = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "capital of France"}}</tool_call>'

BOS = {
    "llama3": "<|begin_of_text|>",
    "llama3_1": "<|begin_of_text|>",
    "gemma": "<bos>",
    "gemma3": "<bos>",
    "deepseekv3": "<｜begin▁of▁sentence｜>",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    special: list[str]
    eos: str
    plain: list[str] = field(default_factory=list)  # added tokens that are not flagged as special
    stops: list[str] = field(default_factory=list)  # further stop tokens, as the generation config names them
    template: str = ""  # where trl carries none


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
FAMILIES = {
    "qwen2_5": Family(special=CHATML, plain=["<tool_call>", "</tool_call>"], eos="<|im_end|>"),
    "qwen3": Family(special=CHATML, plain=["<tool_call>", "</tool_call>", "<think>", "</think>"], eos="<|im_end|>"),
    "llama3": Family(special=LLAMA, eos="<|eot_id|>"),
    "llama3_1": Family(special=LLAMA, eos="<|eot_id|>"),
    "gemma": Family(special=GEMMA, plain=["\n\n", "<table>"], eos="<eos>", stops=["<end_of_turn>"]),
    "gemma3": Family(special=GEMMA, plain=["\n\n"], eos="<eos>", stops=["<end_of_turn>"]),
    "phi3": Family(
        special=["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        eos="<|endoftext|>",
        stops=["<|end|>"],
    ),
    "deepseekv3": Family(
        special=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        plain=["<think>"],
        eos="<｜end▁of▁sentence｜>",
    ),
    "glm4moe": Family(
        special=["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
        plain=["<think>", "</think>"],
        eos="<|endoftext|>",
        stops=["<|user|>", "<|observation|>"],
    ),
}
ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set start = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}\
{% else %}{% set rest = messages %}{% set start = '' %}{% endif %}\
{% for message in rest %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + ((start if loop.first else '') + message['content']).strip() + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
ALPACA = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}\
{% else %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""
VICUNA = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
OPENCHAT = """\
{{ bos_token }}{% for message in messages %}\
{{ 'GPT4 Correct ' + message['role'].title() + ': ' + message['content'] + '<|end_of_turn|>'}}{% endfor %}\
{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"""
TEXT_MARKED = {
    name: Family(special=["<s>", "</s>"], eos="</s>", template=template)
    for name, template in (("zephyr", ZEPHYR), ("llama2", LLAMA2), ("alpaca", ALPACA))
}
"""Families whose chat templates mark roles with plain text."""
REFUSED = {"vicuna": Family(special=["<s>", "</s>"], eos="</s>", template=VICUNA)}
OTHERS = {"openchat": Family(special=["<s>", "<|end_of_turn|>"], eos="<|end_of_turn|>", template=OPENCHAT)}
BOS |= dict.fromkeys([*TEXT_MARKED, *REFUSED, *OTHERS], "<s>")
Step = str | tuple[str, FinishReason] | list[int]
"""What an engine samples: a text (its stop token is added), a text with another finish, or ids."""


def published_template(name: str) -> str:
    """A chat template as its model's authors published it."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None, (
        "the templates of the tests come with trl, a development dependency"
    )
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def byte_level_tokenizer() -> str:
    """A byte-level BPE with a few merges and no special tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        "the question, the memory and the search",
        "what is the capital of France",
        "think, then search or answer",
        '{"name": "query"}',
    ]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer.to_str()


def family_of(name: str) -> Family:
    return {**FAMILIES, **TEXT_MARKED, **REFUSED, **OTHERS}[name]


def hf_tokenizer(family: str, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    tokens = family_of(family)
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.add_special_tokens(tokens.special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens.plain])
    template = tokens.template or published_template(family) if chat_template is None else chat_template
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS.get(family), eos_token=tokens.eos, chat_template=template
    )


def build_tokenizer(family: str = "qwen2_5", *, chat_template: str | None = None) -> HFTokenizer:
    tokenizer = hf_tokenizer(family, chat_template=chat_template)
    return HFTokenizer(
        tokenizer, stop_token_ids=[tokenizer.convert_tokens_to_ids(token) for token in family_of(family).stops]
    )


def build_budget(**changes: object) -> MemSearcherBudget:
    values = {
        "question_tokens": 200,
        "memory_tokens": 64,
        "action_tokens": 400,
        "memory_message_tokens": 300,
        "observation_tokens": 500,
    }
    return MemSearcherBudget(**{**values, "context_tokens": 8192, **changes})


def build_prompts(**changes: str) -> MemSearcherPrompts:
    """A prompt set of few words."""
    texts = {
        "system": "Search or answer. {tools}",
        "user": "<question>\n{question}\n</question>\n<memory>\n{memory}\n</memory>",
        "action_prefill": "<think>",
        "observation": "<tool_response>\n{call}\n{passages}\n</tool_response>\nWrite the memory.",
        "passage": "[{index}] {title}\n{text}",
        "passage_separator": "\n\n",
        "memory_prefill": "",
        "empty_memory": "",
    }
    return MemSearcherPrompts(**{**texts, **changes})


def build_renderer(
    tokenizer: HFTokenizer | None = None,
    *,
    prompts: MemSearcherPrompts | None = None,
    tool: SearchTool = TOOL,
    compat: MemSearcherCompat | None = None,
    **budget: object,
) -> MemSearcherRenderer:
    prompts = prompts or load_prompts("memsearcher", MemSearcherPrompts)
    return MemSearcherRenderer(
        tokenizer or build_tokenizer(),
        prompts=prompts,
        tools=Toolbox(search=tool),
        budget=build_budget(**budget),
        compat=compat,
    )


def build_question(text: str = "What is the capital of France?", **changes: object) -> Question:
    return Question(**{"id": "q-1", "text": text, "golden_answers": ["Paris"], **changes})


class ScriptedEngine:
    """Samples what the script says. Log-probs are -1/8, -2/8, …, so that every token has its own;
    versions count calls."""

    def __init__(self, tokenizer: HFTokenizer, script: Sequence[Step], *, stop: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._script = iter(script)
        self._stop = tokenizer.encode_template(stop) if stop else [min(tokenizer.stop_token_ids)]
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.completions: list[Completion] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        self.prompts.append(list(token_ids))
        self.limits.append(max_tokens)
        step = next(self._script)
        finish = step[1] if isinstance(step, tuple) else FinishReason.STOP
        if isinstance(step, list):
            sampled = step
        else:
            text = step[0] if isinstance(step, tuple) else step
            sampled = self._tokenizer.encode_template(text) + (self._stop if finish is FinishReason.STOP else [])
        if len(sampled) > max_tokens:
            sampled, finish = sampled[:max_tokens], FinishReason.LENGTH
        logprobs = [-number / 8 for number in range(1, len(sampled) + 1)]
        version = len(self.completions)
        self.completions.append(
            Completion(token_ids=sampled, logprobs=logprobs, finish_reason=finish, policy_version=version)
        )
        return self.completions[-1]


class Library:
    """Answers every search with the same passages, best first."""

    def __init__(self, *passages: Passage) -> None:
        self.passages = list(passages) or [Passage(id="p1", title="France", text="Paris is the capital of France.")]
        self.calls: list[tuple[str, int, str]] = []

    async def __call__(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        self.calls.append((query, num_passages, partition))
        return SearchResult(passages=self.passages[:num_passages], snapshot="s1")


def segments(context: Context) -> list[tuple[int, list[int]]]:
    """Runs of tokens with the same mask."""
    rows = zip(context.loss_mask, context.token_ids, strict=True)
    return [(mask, [token for _, token in run]) for mask, run in itertools.groupby(rows, key=lambda row: row[0])]


def injected_text(renderer: Renderer, context: Context) -> str:
    return "".join(renderer.tokenizer.decode(ids) for mask, ids in segments(context) if not mask)


def assert_token_exact(contexts: Sequence[Context], engine: ScriptedEngine) -> None:
    """Every context is the prompts that the engine was called with and the first tokens that it sampled for each,
    with their log-probs and version, and nothing else; what is missing of a sample is counted as dropped."""
    calls = iter(zip(engine.prompts, engine.completions, strict=True))
    for context in contexts:
        assert len(context.token_ids) == len(context.loss_mask) == len(context.logprobs) == len(context.policy_versions)
        place, dropped = 0, 0
        while place < len(context.token_ids):
            prompt, completion = next(calls)
            assert context.token_ids[: len(prompt)] == prompt and context.loss_mask[place : len(prompt)] == [0] * (
                len(prompt) - place
            )
            if not place:
                assert context.num_prompt_tokens == len(prompt)
            assert not any(context.logprobs[place : len(prompt)]) and set(
                context.policy_versions[place : len(prompt)]
            ) <= {-1}
            place = len(prompt)
            kept = next(
                (n for n, mask in enumerate(context.loss_mask[place:]) if not mask), len(context.token_ids) - place
            )
            assert context.token_ids[place : place + kept] == completion.token_ids[:kept]
            assert context.logprobs[place : place + kept] == completion.logprobs[:kept]
            assert context.policy_versions[place : place + kept] == [completion.policy_version] * kept
            place, dropped = place + kept, dropped + len(completion.token_ids) - kept
        assert context.num_dropped_tokens == dropped
    assert next(calls, None) is None, "a completion is in no context"


def build_agent(
    renderer: MemSearcherRenderer, script: Sequence[Step], *, library: Library | None = None
) -> MemSearcher:
    return MemSearcher(renderer, generate=ScriptedEngine(renderer.tokenizer, script), search=library or Library())
