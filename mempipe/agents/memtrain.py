"""MemTrain (arXiv 2606.03197): MemAgent's reading, trained on texts without labels.

The question asks for an entity that is masked everywhere in a document (end-to-end masked reconstruction). In addition,
one memory of every attempt is asked for another entity (intermediate memory recall): a separate context shows the
memory after step k and a chunk l < k in which that entity is replaced by [TARGET], and it is sampled `num_recalls`
times; with `num_recall_prompts` the samples are divided among several such contexts. The recall samples are drawn while
the reading continues. Rewards and advantages are those of Eq. 1 to 3 (`mempipe.rollout`, `mempipe.rl.advantages`).
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from mempipe.agents.memagent import Chunk, MemAgent, MemAgentBudget, MemAgentConfig, MemAgentPrompts, MemAgentRenderer
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer, UnfitQuestion, thought_of
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import encode_pieces
from mempipe.agents.tools import SearchLimits
from mempipe.agents.turn import Memory, OnContext, Turn
from mempipe.spelling import is_written, replaced
from mempipe.text import BOX, TARGET, check_mask, chunks_of
from mempipe.types import Context, Question, Recall, Trajectory


class MemTrainConfig(MemAgentConfig):
    """MemTrain reads as MemAgent does, and recalls."""

    mask: str = Field("[MASK]", min_length=1)
    """The mask of the entity in the documents (`mask` of `mempipe data memtrain`). No chunk ends inside
    it."""
    num_recalls: int = Field(8, ge=0)
    """Recall samples of every attempt (G2 in the paper); 0: reconstruction only."""
    num_recall_prompts: int = Field(1, ge=1)
    """Different recalls of an attempt (step, chunk and entity), among which its recall samples are divided evenly;
    the paper has one. A document with fewer that can be asked has as many as there are."""
    recall_last_step: bool = True
    """Let a recall ask for the memory after the last chunk too; the paper leaves this open."""

    @model_validator(mode="after")
    def _samples_can_be_divided(self) -> MemTrainConfig:
        if self.num_recalls % self.num_recall_prompts:
            raise ValueError(
                f"num_recalls {self.num_recalls} is not a multiple of num_recall_prompts {self.num_recall_prompts}; "
                "every recall has equally many samples"
            )
        return self

    @property
    def side_contexts(self) -> int:
        return self.num_recalls


class MemTrainBudget(MemAgentBudget):
    """The limits of one MemTrain context."""

    def parts(self) -> dict[str, int]:
        recall = {
            "memory": self.memory_tokens,
            "chunk": self.chunk_tokens,
            "marks": self.question_tokens,
            "answer": self.action_tokens,
        }
        return max(super().parts(), recall, key=lambda parts: sum(parts.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemTrainPrompts(MemAgentPrompts):
    """The words around question, memory and chunk; `prompts/memtrain.yaml` explains each key. Raises ConfigError."""

    REQUIRED: ClassVar = {**MemAgentPrompts.REQUIRED, "recall": {"memory", "chunk"}}

    recall: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Holds what one recall of an attempt asks for."""

    step: int  # chunks that have been read, from 1
    chunk: int  # of them the one that is asked about, from 0
    target: list[str]  # surface forms of the entity
    masked: Chunk  # that one with the entity replaced


class MemTrainRenderer(MemAgentRenderer):
    """MemAgent's two prompts and that of a recall. Raises as `Renderer` does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: MemTrainPrompts,
        mask: str = "[MASK]",
        num_recalls: int = 8,
        num_recall_prompts: int = 1,
        recall_last_step: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, prompts=prompts, **settings)
        check_mask(mask, self.encode, tokenizer.decode)
        self.mask, self.recall_last_step = mask, recall_last_step
        self.num_recalls, self.num_recall_prompts = num_recalls, num_recall_prompts
        # Siblings start one after the other with the same text, as with `_cut`.
        self._askable = functools.lru_cache(maxsize=1)(self._find_askable)
        self._recall = encode_pieces(tokenizer, self._chat.before_user, prompts.recall, self._chat.after_user)
        self._shown_in_recalls = f"{prompts.recall} {TARGET}"
        self.template_tokens = max(self.template_tokens, self._recall.num_tokens)
        self._check_budget()

    def check_trained(self, question: Question) -> None:
        super().check_trained(question)
        if self.num_recalls and not question.recall_targets:
            raise UnfitQuestion(
                f"question {question.id} has no recall_targets; agent.num_recalls {self.num_recalls} needs entities of "
                "its text, 0 trains without them"
            )

    def recall_prompt(self, *, memory: list[int], masked: list[int]) -> list[int]:
        """Returns the context of a recall, up to its first sampled token."""
        return self._recall.filled({"memory": memory, "chunk": masked})

    def probes(self, question: Question, *, seed: str) -> list[Probe]:
        """Draws `num_recall_prompts` different combinations of a step, an earlier chunk and an entity of it; fewer
        where there are fewer, and none when no chunk but the last one holds an entity.

        The step is drawn uniformly from those with an entity, then the chunk, then the entity. The document's own
        answer is never a target, nor is an entity that occurs in the words of the prompt ("LaTeX").
        """
        chunks = self.chunks(question)
        askable = self._askable(
            question.context, tuple(map(tuple, question.recall_targets)), tuple(question.golden_answers)
        )
        last = len(chunks) if self.recall_last_step else len(chunks) - 1
        steps = [step for step in range(2, last + 1) if any(askable[: step - 1])]
        different = {(step, chunk, target) for step in steps for chunk in range(step - 1) for target in askable[chunk]}
        rng = random.Random(seed)
        drawn: dict[tuple[int, int, tuple[str, ...]], None] = {}  # in the order of the draws
        while len(drawn) < min(self.num_recall_prompts, len(different)):
            step = rng.choice(steps)
            chunk = rng.choice([number for number in range(step - 1) if askable[number]])
            drawn[step, chunk, rng.choice(askable[chunk])] = None
        return [self._masked_probe(chunks[chunk], step, chunk, target) for step, chunk, target in drawn]

    def _masked_probe(self, chunk: Chunk, step: int, number: int, target: tuple[str, ...]) -> Probe:
        masked = self.encode(hide(chunk.text, target))
        # The mark may have more tokens than what it stands for; the place of the question has room for them.
        room = self.budget.chunk_tokens + self.budget.question_tokens
        return Probe(step=step, chunk=number, target=list(target), masked=self._chunk(masked[:room]))

    def _chunks(self, text: str) -> list[Chunk]:
        """Cuts between words, so that neither a mask nor an entity is in two halves; MemAgent cuts between tokens."""
        text, size = self._neutralize(text), self.budget.chunk_tokens
        pieces = chunks_of(text, size, lambda text: len(self.tokenizer.encode_text(text)), self.mask)
        encoded = [self.encode(piece) for piece in pieces]
        # One word alone may be longer than a chunk.
        return [
            self._chunk(token_ids[start : start + size])
            for token_ids in encoded
            for start in range(0, len(token_ids), size)
        ]

    def _find_askable(
        self, text: str, targets: Sequence[tuple[str, ...]], answers: Sequence[str]
    ) -> list[list[tuple[str, ...]]]:
        """Returns the targets that occur in each chunk, without the document's own answer and the entities that every
        recall prompt contains.
        """
        folded = set(map(str.casefold, answers))
        others = [
            target
            for target in targets
            if folded.isdisjoint(map(str.casefold, target)) and not is_written(self._shown_in_recalls, target)
        ]
        return [[target for target in others if is_written(chunk.text, target)] for chunk in self._cut(text)]


class MemTrain(MemAgent):
    """The agent."""

    renderer: MemTrainRenderer  # pyrefly: ignore[bad-override]

    async def rollout(
        self, question: Question, *, trajectory_id: str, group_id: str, member: int, on_context: OnContext | None = None
    ) -> Trajectory:
        probes = self.renderer.probes(question, seed=trajectory_id) if self.renderer.num_recalls else []
        contexts: list[Context] = []
        samples: list[asyncio.Task[Recall]] = []

        def finish(turn: Turn) -> None:
            contexts.append(turn.context())
            if on_context is not None:
                on_context(contexts[-1])

        try:
            async with asyncio.TaskGroup() as tasks:

                def on_memory(step: int, memory: Memory) -> None:
                    for number, probe in enumerate(probes):
                        if step == probe.step:
                            share = range(number, self.renderer.num_recalls, len(probes))
                            samples.extend(tasks.create_task(self._recall(probe, memory)) for _ in share)

                end_reason, answer = await self._read(question, finish, on_memory=on_memory)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        recalls = [
            replace(recall, context=replace(recall.context, index=len(contexts) + number))
            for number, recall in enumerate(sample.result() for sample in samples)
        ]
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            member=member,
            contexts=contexts,
            recalls=recalls,
            end_reason=end_reason,
            answer=answer,
        )

    async def _recall(self, probe: Probe, memory: Memory) -> Recall:
        """Samples one answer to the probe."""
        turn = Turn(index=0, question_ids=[], memory=memory, chunk=probe.masked.text)
        turn.inject(self.renderer.recall_prompt(memory=memory.token_ids, masked=probe.masked.token_ids))
        turn.num_observation_tokens = len(probe.masked.token_ids)
        message = await self._sample(turn, max_tokens=self.renderer.budget.action_tokens)
        turn.action = message.text
        _, answer = self._parse_answer(message)
        return Recall(context=turn.context(), step=probe.step, chunk=probe.chunk, target=probe.target, answer=answer)


def make_renderer(
    config: MemTrainConfig, budget: MemTrainBudget, *, limits: SearchLimits, tokenizer: Tokenizer
) -> MemTrainRenderer:
    """Makes the renderer that the settings describe."""
    return MemTrainRenderer(
        tokenizer,
        prompts=load_prompts(config.prompts or "memtrain", MemTrainPrompts, memory=budget),
        budget=budget,
        chunk_first=config.chunk_first,
        compat=config.compat,
        mask=config.mask,
        num_recalls=config.num_recalls,
        num_recall_prompts=config.num_recall_prompts,
        recall_last_step=config.recall_last_step,
    )


def hide(text: str, forms: Sequence[str]) -> str:
    """Returns the text with [TARGET] for every form of an entity, however it is spelled (`mempipe.spelling`)."""
    return replaced(text, forms, TARGET)[0]


AGENT = AgentSpec(
    config=MemTrainConfig,
    budget=MemTrainBudget,
    renderer=make_renderer,
    agent=MemTrain,
    prompts=MemTrainPrompts,
    paper="arXiv 2606.03197",
    reads=True,
    thought=functools.partial(thought_of, actions=(BOX,)),
    reward={"answer": "em", "wrong_answer": 0.0},
    script="mempipe.data.scripted_agents:ScriptedMemTrain",
    text_script="mempipe.masking.demonstrations:ReadingDemonstration",
)
