"""What the policy reads: prompts and observations as token ids, made from a prompt set and the model's own chat template.

The chat template is rendered once, with marks in place of the messages. Template text and the prompt set's own words are trusted and
encoded once, special tokens included; what goes into the slots is neutralised and encoded as plain text, piece by piece. So special
tokens come from the template only, and every part of a context has a length of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mempipe.agents.prompt_set import PromptSet, split_slots
from mempipe.agents.protocol import TAGS, ChatTemplateError, Neutralizer, Tokenizer, Tool, ToolCall
from mempipe.config import Budget, ConfigError
from mempipe.types import Passage, Question

# Private-use characters that stand for whole messages while the chat template is rendered.
SYSTEM, USER, ACTION, OBSERVATION = "\ue000", "\ue001", "\ue002", "\ue003"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What stands between an action with calls and the memory message."""

    token_ids: list[int]
    num_tokens: int  # of them, those that count against budget.observation_tokens


class Layout:
    """Prompts and observations of one tokenizer, prompt set, tool and budget. Build it once; nothing in it changes.

    `template_tokens` is the most that a context holds besides question, memory, observation and sampled tokens. `action_start` and
    `memory_start` are what an assistant message holds before the first sampled token. Raises ConfigError when the chat template cannot
    serve, or when template and budget do not fit `budget.context_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompts: PromptSet, tool: Tool, budget: Budget) -> None:
        self.tokenizer = tokenizer
        self.tool = tool
        self.budget = budget
        self._neutralize = Neutralizer(tokenizer.special_tokens)
        chat = _chat_frame(tokenizer, system=prompts.system.replace("{tools}", tool.schema()))
        action_prefill = _unless_open(prompts.action_prefill, chat.after_user)
        memory_prefill = _unless_open(prompts.memory_prefill, chat.after_observation)
        calls = split_slots(prompts.observation)

        self.action_start = _opened_thought(chat.after_user) + action_prefill
        self.memory_start = _opened_thought(chat.after_observation) + memory_prefill
        self.empty_memory = self.encode(prompts.empty_memory)
        self._prompt = _pieces(tokenizer, chat.before_user, prompts.user, chat.after_user + action_prefill)
        self._reply = _pieces(tokenizer, chat.after_action, prompts.observation, chat.after_observation + memory_prefill)
        self._next_call = tokenizer.encode_template(calls[-1] + calls[0])
        self.closing_id = self._take_closing_id(chat.after_action)
        self._role_marks = _role_marks(tokenizer, chat.skeleton)
        self._passage, self._separator = self._checked_passage(prompts)
        self.template_tokens = sum(map(len, self._prompt.literals)) + sum(map(len, self._reply.literals)) + 1  # the closing id
        self._check_budget()

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text: no special token, no protocol tag."""
        token_ids = self.tokenizer.encode_text(self._neutralize(text))
        # A tokenizer that normalises may write a tag of its own accord, from full-width letters for example.
        written = self.tokenizer.decode(token_ids)
        safe = self._neutralize(written)
        return token_ids if safe == written else self.tokenizer.encode_text(safe)

    def question(self, question: Question) -> list[int]:
        """Ids of the question's text. Raises ValueError when they are more than budget.question_tokens."""
        token_ids, limit = self.encode(question.text), self.budget.question_tokens
        if len(token_ids) > limit:
            raise ValueError(f"question {question.id} has {len(token_ids)} tokens, more than budget.question_tokens {limit}")
        return token_ids

    def prompt(self, *, question: list[int], memory: list[int]) -> list[int]:
        """A context up to its first sampled token."""
        slots = {"question": question, "memory": memory}
        filled = [slots[name] for name in self._prompt.slots]
        return list(itertools.chain.from_iterable(_alternate(self._prompt.literals, filled)))

    def observation_room(self, calls: Sequence[ToolCall]) -> int:
        """Tokens of the observation budget that are left for passages; below 1 the calls are too long or too many."""
        between = len(self._next_call) + sum(map(len, self._reply.literals[1:-1]))
        return self.budget.observation_tokens - sum(len(self._echo(call)) for call in calls) - (len(calls) - 1) * between

    def observation(self, calls: Sequence[ToolCall], results: Sequence[Sequence[Passage]], *, last_id: int) -> Observation:
        """The answer to `calls` after an action whose last token is `last_id`, with as many of the passages as there is room for."""
        room = self.observation_room(calls)
        shown = _fit([self._passage_pieces(passages) for passages in results], room=room)
        # The policy may end a message with a stop token that is not the template's; then the template's follows it.
        token_ids = [] if last_id == self.closing_id else [self.closing_id]
        first, *inner, last = self._reply.literals
        for number, (call, passages) in enumerate(zip(calls, shown, strict=True)):
            slots = {"call": self._echo(call), "passages": passages}
            filled = [slots[name] for name in self._reply.slots]
            token_ids.extend(itertools.chain.from_iterable(_alternate([self._next_call if number else first, *inner, []], filled)))
        used = self.budget.observation_tokens - room + sum(map(len, shown))
        return Observation(token_ids=token_ids + last, num_tokens=used)

    def breaks_roles(self, token_ids: Sequence[int]) -> bool:
        """Whether sampled ids hold a token with which the chat template tells roles apart."""
        return not self._role_marks.isdisjoint(token_ids)

    def _echo(self, call: ToolCall) -> list[int]:
        return self.encode(call.text) if "call" in self._reply.slots else []

    def _passage_pieces(self, passages: Sequence[Passage]) -> list[list[int]]:
        pieces = []
        for index, passage in enumerate(passages, start=1):
            values = {"title": passage.title, "text": passage.text, "index": str(index)}
            text = "".join(values[piece] if place % 2 else piece for place, piece in enumerate(self._passage))
            pieces.append(self.encode(text if index == 1 else self._separator + text))
        return pieces

    def _take_closing_id(self, after_action: str) -> int:
        """Takes the token that ends an assistant message off the reply: the policy samples it."""
        closing, self._reply.literals[0] = self._reply.literals[0][:1], self._reply.literals[0][1:]
        stops = self.tokenizer.stop_token_ids
        if not stops.issuperset(closing) or not closing:
            texts = [self.tokenizer.decode([i]) for i in sorted(stops)]
            raise ConfigError(
                f"the chat template goes on after an assistant message with {after_action[:32]!r}, which does not start with a stop token "
                f"{texts}; add its token to eos_token_id in generation_config.json"
            )
        return closing[0]

    def _checked_passage(self, prompts: PromptSet) -> tuple[list[str], str]:
        for key, text in {"passage": prompts.passage, "passage_separator": prompts.passage_separator}.items():
            if self._neutralize(text) != text:
                raise ConfigError(f"prompts.{key} is {text!r}: passages are plain text, no special token or protocol tag may stand in it")
        return split_slots(prompts.passage), prompts.passage_separator

    def _check_budget(self) -> None:
        budget = self.budget
        if len(self.empty_memory) > budget.memory_tokens:
            raise ConfigError(
                f"prompts.empty_memory has {len(self.empty_memory)} tokens, more than budget.memory_tokens {budget.memory_tokens}"
            )
        parts = {
            "template": self.template_tokens,
            "question": budget.question_tokens,
            "memory": budget.memory_tokens,
            "action": budget.action_tokens,
            "observation": budget.observation_tokens,
            "memory message": budget.memory_message_tokens,
        }
        if sum(parts.values()) > budget.context_tokens:
            listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
            raise ConfigError(
                f"budget.context_tokens is {budget.context_tokens}, but {listed} tokens need {sum(parts.values())}; "
                "raise context_tokens or lower the parts"
            )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Ids of trusted text, one list more than there are slots between them."""

    literals: list[list[int]]
    slots: list[str]


def _pieces(tokenizer: Tokenizer, before: str, text: str, after: str) -> _Pieces:
    pieces = split_slots(text)
    pieces[0], pieces[-1] = before + pieces[0], pieces[-1] + after
    return _Pieces([tokenizer.encode_template(literal) for literal in pieces[::2]], pieces[1::2])


def _alternate(literals: Sequence[list[int]], filled: Sequence[list[int]]) -> list[list[int]]:
    pairs = zip(literals, [*filled, []], strict=True)
    return list(itertools.chain.from_iterable(pairs))


def _fit(results: Sequence[list[list[int]]], *, room: int) -> list[list[int]]:
    """What is shown of each call's passages: best ones of all calls first, whole ones as long as they fit, then a part of one."""
    shown: list[list[int]] = [[] for _ in results]
    ranked = [(call, piece) for rank in itertools.zip_longest(*results) for call, piece in enumerate(rank) if piece is not None]
    for call, piece in ranked:
        shown[call] += piece[:room]
        room -= len(piece)
        if room <= 0:
            break
    return shown


def _opened_thought(opening: str) -> str:
    """The thought that the chat template itself opens (and perhaps closes) in an assistant message."""
    return "".join(opening.partition("<think>")[1:])


def _unless_open(prefill: str, opening: str) -> str:
    """The prefill, or nothing when the chat template itself ends with it."""
    return "" if opening.rstrip().endswith(prefill.strip()) else prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatFrame:
    """The template text around the messages of a context: system, user, action, observation, memory."""

    before_user: str  # with the system text in it
    after_user: str
    after_action: str
    after_observation: str
    skeleton: str  # all of it, with marks in place of the messages


def _chat_frame(tokenizer: Tokenizer, *, system: str) -> _ChatFrame:
    start = [{"role": "system", "content": SYSTEM}] if system else []
    user = {"role": "user", "content": USER}
    try:
        accepted = SYSTEM in tokenizer.render_chat([*start, user], add_generation_prompt=True)
    except ChatTemplateError:
        accepted = False
    if not accepted:  # no system role: its text goes before the user's
        start = []
    turn = [*start, user, {"role": "assistant", "content": ACTION}, {"role": "user", "content": OBSERVATION}]
    try:
        prompt = tokenizer.render_chat([*start, user], add_generation_prompt=True)
        skeleton = tokenizer.render_chat(turn, add_generation_prompt=True)
    except ChatTemplateError as error:
        raise ConfigError(f"the chat template refuses a conversation of user, assistant and user: {error}") from error
    before_user, after_user = _split_at(USER, prompt)
    after_action, after_observation = _split_at(OBSERVATION, _split_at(ACTION, skeleton)[1])
    return _ChatFrame(
        before_user=before_user.replace(SYSTEM, system) if accepted else f"{before_user}{system}\n\n" if system else before_user,
        after_user=after_user,
        after_action=after_action.lstrip(),
        after_observation=after_observation,
        skeleton=skeleton,
    )


def _split_at(mark: str, text: str) -> tuple[str, str]:
    if text.count(mark) != 1:
        raise ConfigError(f"the chat template repeats or leaves out a message: its text stands {text.count(mark)} times in the rendering")
    before, _, after = text.partition(mark)
    return before, after


def _role_marks(tokenizer: Tokenizer, skeleton: str) -> frozenset[int]:
    """Special tokens of the template that are no protocol tags."""
    template = skeleton.translate({ord(mark): None for mark in (SYSTEM, USER, ACTION, OBSERVATION)})
    tags = {i for tag in TAGS for i in tokenizer.encode_template(f"<{tag}></{tag}>")}
    return frozenset(tokenizer.special_token_ids & set(tokenizer.encode_template(template)) - tags)
