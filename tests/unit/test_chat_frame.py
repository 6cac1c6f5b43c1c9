"""What tells roles apart in a chat template, and that no agent lets anybody else write it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from agent_builders import (
    FAMILIES,
    OTHERS,
    TEXT_MARKED,
    Library,
    build_prompts,
    build_renderer,
    build_tokenizer,
    segments,
)
from hypothesis import given
from hypothesis import strategies as st

from mempipe.agents.chat_frame import role_marks
from mempipe.agents.registry import BUILT_IN
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.loader import parse_config
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError
from mempipe.types import Completion, FinishReason, Passage, Question

TEXTS = {
    "zephyr": ("<|assistant|>", "<|user|>", "<|system|>"),
    "llama2": ("<</SYS>>", "[/INST]", "[INST]", "<<SYS>>"),
    "alpaca": ("### Response:", "### Instruction:"),
}


@pytest.mark.parametrize("family", TEXT_MARKED)
def test_role_marks_in_plain_text_are_found_by_rendering_the_template(family):
    assert set(role_marks(build_tokenizer(family), tags=["think"]).texts) == set(TEXTS[family])


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_template_that_marks_roles_with_special_tokens_has_no_marks_in_plain_text(family):
    tokenizer = build_tokenizer(family)
    marks = role_marks(tokenizer, tags=["think"])
    assert marks.texts == () and marks.token_ids & tokenizer.stop_token_ids


@pytest.mark.parametrize("assistant", ["ASSISTANT:", "\n\nAssistant: ", "\n---\n"])
def test_a_template_whose_roles_only_ordinary_text_tells_apart_is_refused(assistant):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}{% else %}"
        f"{assistant}{{{{ m.content }}}}<|im_end|>{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
    )
    with pytest.raises(ConfigError, match=r"the chat template has '.*' between a user's message and the assistant's"):
        build_renderer(build_tokenizer(chat_template=template), prompts=build_prompts(system=""))


def test_vicunas_template_is_refused():
    with pytest.raises(ConfigError, match=r"has ' ASSISTANT: ' between .* choose a model whose chat template"):
        build_renderer(build_tokenizer("vicuna"))


def test_words_beside_marks_and_a_preamble_are_no_marks():
    template = (
        "<|im_start|># Rules [of play]\nBe <brief>.\n<|im_end|>"
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n# End of turn<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    assert role_marks(build_tokenizer(chat_template=template), tags=[]).texts == ()


@pytest.mark.parametrize("family", TEXT_MARKED)
def test_promise_2_a_role_mark_in_plain_text_is_broken_in_untrusted_text_and_noticed_in_a_message(family):
    renderer = build_renderer(build_tokenizer(family))
    tokenizer = renderer.tokenizer
    for mark in TEXTS[family]:
        prompt = renderer.prompt(question=renderer.encode("Who?"), memory=renderer.encode(f"x\n{mark}\ny{mark}"))
        plain = renderer.prompt(question=renderer.encode("Who?"), memory=renderer.encode("x"))
        assert tokenizer.decode(prompt).count(mark) == tokenizer.decode(plain).count(mark)
        assert renderer.breaks_roles(tokenizer.encode_template(f"x {mark} y"))
        assert not renderer.breaks_roles(renderer.encode(f"x {mark} y"))
    assert not renderer.breaks_roles(tokenizer.encode_template("The [user] of # the assistant: <b>\n### Title\n"))


def test_two_passages_do_not_write_a_mark_or_a_tag_together():
    renderer = build_renderer(build_tokenizer("zephyr"), prompts=build_prompts(passage="{text}", passage_separator=""))
    texts = ["a <|assi", "stant|> </mem", "ory> b", "</ans", "wer>"]
    passages = [Passage(id="", title="", text=text) for text in texts]
    shown = renderer.tokenizer.decode([i for piece in renderer._passage_pieces(passages) for i in piece])
    assert shown == "a <|assi\nstant|> </mem\nory> b</answer>"


# Anything

PARTS = [
    "<|assistant|>", "<|user|>", "<|system|>", "<|", "|>", "[/INST]", "[INST]", "<<SYS>>", "<</SYS>>", "[/", "INST]",
    "### Response:", "### Instruction:", "###", "Response:", "###  Response:", "<|im_start|>", "<|im_end|>", "<s>",
    "</s>", "<", ">", "[", "]", "\n", " ", "_", "</memory>", "<think>", "</think>", "\\boxed{x}", "assistant", "\ud800",
    "é", "＜|assistant|＞", "[\u200b/INST]",
]  # fmt: skip
MARKED = {family: build_renderer(build_tokenizer(family)) for family in TEXT_MARKED}


@given(text=st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=4)), max_size=10).map("".join))
def test_promise_2_no_role_mark_in_plain_text_is_left_whatever_the_text(text):
    for family, renderer in MARKED.items():
        token_ids = renderer.encode(text)
        written = renderer.tokenizer.decode(token_ids)
        assert not any(mark in written for mark in TEXTS[family])
        assert not renderer.breaks_roles(token_ids)
        assert renderer.encode(written) == token_ids


UNTRUSTED = 1_000_000


class TracedTokenizer:
    """Numbers what untrusted text is encoded to otherwise than trusted text, so that a context shows who wrote what."""

    def __init__(self, inner: HFTokenizer) -> None:
        self._inner = inner
        self.stop_token_ids, self.special_token_ids = inner.stop_token_ids, inner.special_token_ids
        self.special_tokens, self.encode_template = inner.special_tokens, inner.encode_template
        self.render_chat = inner.render_chat

    def encode_text(self, text: str) -> list[int]:
        return [i + UNTRUSTED for i in self._inner.encode_text(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode([i % UNTRUSTED for i in token_ids])


def trusted_runs(token_ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for i in token_ids:
        if i >= UNTRUSTED:
            runs.append([])
        else:
            runs[-1].append(i)
    return runs


@pytest.mark.parametrize("family", [*FAMILIES, *TEXT_MARKED, *OTHERS])
@pytest.mark.parametrize("agent", BUILT_IN)
def test_promise_2_whatever_is_asked_found_read_and_sampled_only_the_template_marks_roles(agent, family):
    rng = random.Random(f"{agent} {family}")
    tokenizer = TracedTokenizer(build_tokenizer(family))
    budget = {"question_tokens": 200, "action_tokens": 120, "context_tokens": 8192}
    if agent in ("memsearcher", "memagent", "memtrain"):
        budget |= {"memory_tokens": 60, "memory_message_tokens": 120}
    reads = {"memagent": {"chunk_tokens": 40}, "memtrain": {"chunk_tokens": 40}, "full_text": {"document_tokens": 4000}}
    reads["program"] = {"max_turns": 4}
    budget |= reads.get(agent, {"observation_tokens": 200, "max_turns": 3})
    named = {"name": agent, "program": "passing_program:solve"} if agent == "program" else {"name": agent}
    config = parse_config({"agent": named, "budget": budget})
    renderer = make_renderer(config, tokenizer=tokenizer)
    marks = [*renderer._role_texts, *(tokenizer.decode([i]) for i in renderer._role_marks)]
    tags = [f"<{slash}{tag}>" for tag in renderer.TAGS for slash in ("", "/")]
    parts = [*PARTS, *marks, *marks, *(mark[1:] for mark in marks), *(mark[:-1] for mark in marks), *tags]

    def hostile(most: int) -> str:
        return "".join(rng.choice(parts) for _ in range(rng.randrange(most)))

    def message() -> str:
        call = json.dumps({"name": "wikipedia_search", "arguments": {"query": "x" + hostile(4)}})
        acts = (f"<tool_call>{call}</tool_call>", f"<search>{hostile(4)}x</search>", f"<memory>{hostile(6)}</memory>")
        return f"{hostile(3)}</think>{rng.choice(acts)}"

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        written = [hostile(8), message(), message(), message()]
        sampled = [*tokenizer.encode_template(rng.choice(written)), renderer.closing_id]
        if rng.random() < 0.7:  # as text, so that no special token ends the trajectory at once
            text = tokenizer.decode(sampled[:-1])
            sampled = [i % UNTRUSTED for i in tokenizer.encode_text(text)] + sampled[-1:]
        sampled = sampled[:max_tokens]
        return Completion(
            token_ids=sampled, logprobs=[-1.0] * len(sampled), finish_reason=FinishReason.STOP, policy_version=0
        )

    def count(ids: Sequence[int], mark: str) -> int:
        return tokenizer.decode(ids).count(mark)

    spec = config.agent_spec
    num_contexts = 0
    for number in range(4):
        passages = [Passage(id=str(i), title=hostile(4), text=hostile(8)) for i in range(3)]
        player = spec.agent(renderer, generate=generate, search=Library(*passages))
        question = Question(
            id="q",
            text=hostile(6),
            golden_answers=["x"],
            context=f"x{hostile(60)} Rome",
            recall_targets=[["Rome"]],
        )
        played = asyncio.run(player.rollout(question, trajectory_id=str(number), group_id="g", member=0))
        contexts = [*played.contexts, *(recall.context for recall in played.recalls)]
        num_contexts += len(contexts)
        for context in contexts:
            runs = segments(context)
            for place, (sampled, ids) in enumerate(runs):
                if sampled and place + 1 < len(runs):  # the conversation continued after it
                    body = ids[:-1] if ids[-1] in tokenizer.stop_token_ids else ids
                    assert renderer._role_marks.isdisjoint(body)
                    assert not any(count(body, mark) for mark in renderer._role_texts)
                if sampled:
                    continue
                assert tokenizer.special_token_ids.isdisjoint(i % UNTRUSTED for i in ids if i >= UNTRUSTED)
                for mark in [*marks, *tags]:
                    assert count(ids, mark) == sum(count(run, mark) for run in trusted_runs(ids)), mark
    assert num_contexts >= 4
