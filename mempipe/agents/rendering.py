"""Prompts and observations as token ids, made from a prompt set and the model's own chat template.

The template's text (`mempipe.agents.chat_frame`) and the prompt set's own words are trusted and encoded once, special
tokens included. The texts in the slots are neutralised and encoded as plain text, piece by piece. So special tokens and
the template's role marks come from the template only, and every part of a context has a separate length. Each agent's
file has its own renderer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

from mempipe.agents.budget import Budget, SearchBudget
from mempipe.agents.chat_frame import chat_frame, closing_id, role_marks
from mempipe.agents.prompt_set import split_slots
from mempipe.agents.protocol import QuestionTooLong, Tokenizer
from mempipe.agents.tools import SearchTool
from mempipe.settings import ConfigError
from mempipe.text import Neutralizer
from mempipe.types import Passage, Question

_LONGEST_MARK = 256  # characters of a tag or a role mark, at most

B = TypeVar("B", bound=Budget)
S = TypeVar("S", bound=SearchBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProbe:
    """A context of question and memory up to where the policy's answer begins, and the golden answer's tokens."""

    prompt: list[int]
    answer: list[int]


class Renderer(Generic[B]):
    """The base of all renderers: turns texts into ids for one tokenizer, chat template and budget, and makes untrusted
    ones safe.

    `template_tokens` is the most that a context holds besides the parts of the budget; `closing_id` is the token with
    which the chat template ends an assistant message. A renderer is built once and never changes. Raises ConfigError
    when the chat template cannot serve, or when template and budget do not fit `budget.context_tokens`.
    """

    TAGS: ClassVar[tuple[str, ...]]
    """Tags that mean something to the agent, and are broken in untrusted text."""
    HAS_BOX: ClassVar[bool] = True
    """`\\boxed` means something to the agent too."""

    template_tokens: int

    def __init__(
        self, tokenizer: Tokenizer, *, system: str, budget: B, instructions: str = "", question_mark: bool = False
    ) -> None:
        """`instructions` is the prompt set's text of that key. `question_mark`: a question that does not end in "?" is
        given one.
        """
        self.tokenizer = tokenizer
        self.budget = budget
        self._question_mark = question_mark
        self._chat = chat_frame(tokenizer, system=system)
        self.closing_id = closing_id(tokenizer, self._chat.after_action)
        marks = role_marks(tokenizer, tags=self.TAGS)
        self._role_marks, self._role_texts = marks.token_ids, marks.texts
        self._neutralize = Neutralizer([*tokenizer.special_tokens, *marks.texts], tags=self.TAGS, box=self.HAS_BOX)
        self._instructed = encode_pieces(tokenizer, "", instructions, "") if instructions else None
        self._instructions: list[int] | None = None

    def encode(self, text: str) -> list[int]:
        """Encodes untrusted text: no special token is among the ids, and no protocol tag or role mark in their text."""
        token_ids = self.tokenizer.encode_text(self._neutralize(text))
        # A tokenizer that normalises may produce a tag itself, from full-width letters for example.
        written = self.tokenizer.decode(token_ids)
        safe = self._neutralize(written)
        return token_ids if safe == written else self.tokenizer.encode_text(safe)

    @property
    def takes_instructions(self) -> bool:
        """Returns whether the prompt set has a place for the caller's instructions."""
        return self._instructed is not None

    def instructed(self, instructions: str) -> Self:
        """Returns a renderer that adds `instructions` to every question, which leaves fewer tokens for the question.
        Only for one that `takes_instructions`.
        """
        assert self._instructed is not None, "the prompt set has no text `instructions`"
        changed = copy.copy(self)
        changed._instructions = self.encode(instructions)
        return changed

    def question(self, question: Question) -> list[int]:
        """Encodes the question's text, with the instructions of `instructed`. Raises QuestionTooLong when that has more
        than budget.question_tokens.
        """
        text, limit = question.text, self.budget.question_tokens
        if self._question_mark and not text.rstrip().endswith("?"):
            text = text.rstrip() + "?"
        token_ids, what = self.encode(text), "has"
        if self._instructed is not None and self._instructions is not None:
            token_ids = self._instructed.filled({"question": token_ids, "instructions": self._instructions})
            what = "and its instructions have"
        if len(token_ids) > limit:
            raise QuestionTooLong(
                f"question {question.id} {what} {len(token_ids)} tokens, more than budget.question_tokens {limit}"
            )
        return token_ids

    def answer_probe(self, question: Question, memory: str) -> AnswerProbe:
        """Returns prompt and answer tokens for scoring log p(first golden answer | question, memory). `memory` "" is
        the memory that an attempt starts from. Raises ConfigError for an agent that answers from no memory.
        """
        raise ConfigError("reward.information_weight is for agents that answer from a memory; set it to 0")

    def _probe(self, prompt: list[int], question: Question, *, written: str, answer_open: str) -> AnswerProbe:
        """Builds the probe: closes a thought that `written` (the prefilled start of the message) leaves open, and
        appends the opening of the answer. Cuts the answer to the tokens that fit budget.action_tokens.
        """
        closing = "</think>" if written.count("<think>") > written.count("</think>") else ""
        # A space belongs to the word after it: most tokenizers have a token for both.
        opening = answer_open.rstrip(" ")
        start = self.tokenizer.encode_template(closing + opening)
        answer = self.encode(answer_open[len(opening) :] + question.golden_answers[0])
        room = max(0, self.budget.action_tokens - len(start) - 1)
        return AnswerProbe(prompt=prompt + start, answer=answer[:room])

    def check(self, question: Question) -> None:
        """Raises UnfitQuestion when the agent cannot take the question within its budget."""
        self.question(question)

    def check_trained(self, question: Question) -> None:
        """Raises UnfitQuestion when the agent cannot take the question, or cannot be trained on it."""
        self.check(question)

    def prepare(self, question: Question) -> None:
        """Encodes the text that a rollout of the question reads first and keeps the ids, so that the rollout does not
        wait. Raises UnfitQuestion as `check` does.
        """

    def breaks_roles(self, token_ids: Sequence[int]) -> bool:
        """Returns whether sampled ids hold a token, or spell a text, with which the chat template tells roles apart."""
        if not self._role_marks.isdisjoint(token_ids):
            return True
        written = self.tokenizer.decode(token_ids) if self._role_texts else ""
        return any(mark in written for mark in self._role_texts)

    def length_until(self, token_ids: Sequence[int], ends: Callable[[str], bool]) -> int | None:
        """Returns the least number of the ids whose text `ends` is true for, None if it is not for all of them. What is
        true for a text must be true for every longer one.
        """

        def ended(length: int) -> bool:
            return ends(self.tokenizer.decode(token_ids[:length]))

        low, high = 0, len(token_ids)  # not ended, ended
        if not ended(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if ended(middle) else (middle, high)
        return high

    def _checked_empty_memory(self, text: str) -> list[int]:
        token_ids, limit = self.encode(text), self.budget.memory_limit
        if limit is not None and len(token_ids) > limit:
            raise ConfigError(
                f"prompts.empty_memory has {len(token_ids)} tokens, more than budget.memory_tokens {limit}"
            )
        return token_ids

    def _check_budget(self) -> None:
        parts = {"template": self.template_tokens, **self.budget.parts()}
        if sum(parts.values()) > self.budget.context_tokens:
            listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
            raise ConfigError(
                f"budget.context_tokens is {self.budget.context_tokens}, but {listed} tokens need "
                f"{sum(parts.values())}; raise context_tokens or lower the parts"
            )


class SearchRenderer(Renderer[S]):
    """The base of renderers of agents that search: it turns passages into ids too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str,
        passage: str,
        separator: str,
        search: SearchTool,
        budget: S,
        instructions: str = "",
        question_mark: bool = False,
    ) -> None:
        super().__init__(
            tokenizer, system=system, budget=budget, instructions=instructions, question_mark=question_mark
        )
        self.search = search
        for key, text in {"passage": passage, "passage_separator": separator}.items():
            if self._neutralize(text) != text:
                raise ConfigError(
                    f"prompts.{key} is {text!r}: passages are plain text, no special token, protocol tag or role mark "
                    "of the chat template may occur in it"
                )
        self._passage, self._separator = split_slots(passage), separator

    def _passage_pieces(self, passages: Sequence[Passage]) -> list[list[int]]:
        texts = []
        for index, passage in enumerate(passages, start=1):
            values = {"title": passage.title, "text": passage.text, "index": str(index)}
            texts.append("".join(values[piece] if place % 2 else piece for place, piece in enumerate(self._passage)))
        return self._text_pieces(texts)

    def _text_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, a tool's or those of passages, that are shown one after the other."""
        pieces: list[list[int]] = []
        shown = ""
        for text in texts:
            text = self._separator + text if pieces else text
            # Two adjacent texts may form a tag or a role mark together.
            joined = shown + self._neutralize(text)
            if self._neutralize(joined) != joined:
                text = "\n" + text
            shown = (shown + self._neutralize(text))[-_LONGEST_MARK:]
            pieces.append(self.encode(text))
        return pieces


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ids of trusted text, one list more than there are slots between them."""

    literals: list[list[int]]
    slots: list[str]

    def filled(self, values: Mapping[str, list[int]]) -> list[int]:
        """Returns all ids, with the value of its name in every slot. Raises TypeError for a text in place of ids."""
        if texts := [name for name in self.slots if isinstance(values[name], str)]:
            raise TypeError(f"the slot {{{texts[0]}}} is filled with a text; expected token ids (renderer.encode)")
        return list(itertools.chain.from_iterable(alternate(self.literals, [values[name] for name in self.slots])))

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of the trusted text."""
        return sum(map(len, self.literals))


def encode_pieces(tokenizer: Tokenizer, before: str, text: str, after: str) -> Pieces:
    """Encodes `text` with its slots left open, between `before` and `after`, which have no slots."""
    pieces = split_slots(text)
    pieces[0], pieces[-1] = before + pieces[0], pieces[-1] + after
    return Pieces([tokenizer.encode_template(literal) for literal in pieces[::2]], pieces[1::2])


def alternate(literals: Sequence[list[int]], filled: Sequence[list[int]]) -> list[list[int]]:
    pairs = zip(literals, [*filled, []], strict=True)
    return list(itertools.chain.from_iterable(pairs))


def fit_passages(results: Sequence[list[list[int]]], *, room: int) -> list[list[int]]:
    """Returns the shown text of each call's passages. The best ones of all calls come first, whole as long as they fit;
    then a part of one.
    """
    shown: list[list[int]] = [[] for _ in results]
    ranked = [
        (call, piece)
        for rank in itertools.zip_longest(*results)
        for call, piece in enumerate(rank)
        if piece is not None
    ]
    for call, piece in ranked:
        shown[call] += piece[:room]
        room -= len(piece)
        if room <= 0:
            break
    return shown


def opened_thought(opening: str) -> str:
    """Returns the thought that the chat template itself opens (and perhaps closes) in an assistant message."""
    return "".join(opening.partition("<think>")[1:])


def unless_open(prefill: str, opening: str) -> str:
    """Returns the prefill, or nothing when the chat template itself ends with it."""
    return "" if opening.rstrip().endswith(prefill.strip()) else prefill
