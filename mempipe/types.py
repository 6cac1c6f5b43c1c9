"""The records that travel through the pipeline, in order of birth.

A `Question` is asked `group_size` times; every attempt is a `Trajectory` of short `Context`s, each made of injected
tokens and of `Completion`s sampled by the engine; attempts of a group form a `Group`; every context becomes a
`TrainingSample`; samples are packed into `MicroBatch`es (`mempipe.rl.packing`).

Records are plain dataclasses whose fields are numbers, strings, lists and other records, so that `to_row` gives a row
that Arrow, Parquet and JSON hold without loss and `from_row` gives the record back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types as python_types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
N = TypeVar("N", int, float)


class Column(Sequence[N], Generic[N]):
    """Per-token numbers of a record: one NumPy array with the interface of a list.

    A step has tens of millions of them, for which lists of Python's numbers are too slow. `numpy.asarray` gives the
    array without a copy; elements and slices are Python's numbers and lists, and a column equals a list of the same
    numbers.
    """

    __slots__ = ("_array",)

    def __init__(self, array: npt.NDArray) -> None:
        self._array = array

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[N]:
        return iter(self._array.tolist())

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> list[N]: ...
    def __getitem__(self, index: int | slice) -> N | list[N]:
        return self._array[index].tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | list | tuple):
            return NotImplemented
        return self._array.tolist() == list(other)

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self._array.tolist())


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"  # a stop token was sampled, the last of the completion's ids; or one of the agent's stop texts was
    LENGTH = "length"  # the token limit was reached


class EndReason(StrEnum):
    """Why a trajectory ended. Infrastructure faults are not among them: they are retried or end the run (promise 8 of
    docs/architecture.md).
    """

    ANSWERED = "answered"
    NO_ACTION = "no_action"  # neither a tool call nor an answer
    INVALID_CALL = "invalid_call"  # a tool call with a wrong name or wrong arguments
    LENGTH = "length"  # a message did not end within its token limit
    BAD_MEMORY = "bad_memory"  # the memory message held no (or an empty) memory block
    MEMORY_OVERFLOW = "memory_overflow"  # memory longer than its budget while `budget.on_overflow` is "end"
    MAX_TURNS = "max_turns"
    CONTEXT_LIMIT = "context_limit"  # the history of a ReAct agent left no room for another turn

    @property
    def sentence(self) -> str:
        """Returns the reason in words, for a person."""
        return _END_SENTENCES[self]


_END_SENTENCES = {
    EndReason.ANSWERED: "it answered",
    EndReason.NO_ACTION: "its message held neither a tool call nor an answer",
    EndReason.INVALID_CALL: "it called a tool with a wrong name or with wrong arguments",
    EndReason.LENGTH: "a message did not end within its tokens (budget.action_tokens, budget.memory_message_tokens)",
    EndReason.BAD_MEMORY: "it wrote no memory where it had to write one",
    EndReason.MEMORY_OVERFLOW: "its memory became longer than its budget (budget.memory_tokens)",
    EndReason.MAX_TURNS: "it used up its turns (budget.max_turns)",
    EndReason.CONTEXT_LIMIT: "its history left no room for another turn (budget.context_tokens)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One fact that a question needs: the passage that states it and the string it contributes. `objective` is the
    place of the objective that needs it in `Question.objectives`, from 0; a fact that two of them need is listed twice.
    """

    passage_id: str
    value: str
    objective: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and the answers that count as right.

    `partition` names the part of the corpus that may be searched ("" = all of it): a synthetic world, a tenant, a
    document. `evidence` lists the needed facts as they are needed, when the data set knows them (memory-quality metrics
    use it); those of an objective are a separate chain. `context` is the long text that a chunk-reading agent
    reads. `objectives` are the golden answers of every objective of a multi-objective question, in order;
    `golden_answers` then holds them joined by "; " (the first of each). `recall_targets` are entities of `context` that
    MemTrain's recall may ask for, each with its surface forms. `user` is who asks ("" = nobody in particular): a tool
    that remembers longer than one attempt keeps a separate store for each user.
    """

    id: str
    text: str
    golden_answers: list[str]
    source: str = ""
    partition: str = ""
    num_hops: int = 0
    evidence: list[Evidence] = field(default_factory=list)
    context: str = ""
    objectives: list[list[str]] = field(default_factory=list)
    recall_targets: list[list[str]] = field(default_factory=list)
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text of the corpus. `score` is its similarity to the query that found it; `partition` is what
    `Question.partition` names.
    """

    id: str
    title: str
    text: str
    score: float = 0.0
    partition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Passages, best first, and the hash of the index snapshot that answered."""

    passages: list[Passage]
    snapshot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the engine sampled for one prompt.

    `token_ids` include the stop token; `logprobs` has one entry per id and is taken from the distribution that was
    sampled from (temperature applied); `policy_version` is the version that sampled the last of them. Where
    weights were replaced meanwhile, `policy_versions` has one entry per id; else it is empty. `num_cached_tokens` are
    the tokens of the prompt that the engine's prefix cache held.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int
    policy_versions: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search of a turn, as it happened."""

    query: str
    num_passages: int
    passages: list[Passage]
    snapshot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One call of a tool other than search: its arguments as the policy wrote them (JSON), and the texts that came
    back.
    """

    tool: str
    arguments: str
    texts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A named number: one that a user-defined reward function returned in addition to the reward, or what a turn
    earned.
    """

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One context of a trajectory: everything the model saw and wrote in it.

    The four sequences have one entry per token: lists while it grows, `Column`s once it has travelled. `loss_mask` is 1
    on sampled tokens (stop token included) and 0 on injected ones, where `logprobs` is 0.0 and `policy_versions` is -1.
    The text fields are for people: traces, reports, metrics.
    """

    index: int
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: Sequence[int]
    num_prompt_tokens: int  # injected before the first sampled token
    num_question_tokens: int
    num_memory_tokens: int  # of the memory the context started from
    num_observation_tokens: int = 0  # of passages and echoed calls, or of the chunk that was read
    num_dropped_tokens: int = 0  # sampled after the end of an action: in no context, in no loss
    chunk: str = ""  # the part of a long text that it read, a recall with its entity replaced
    action: str = ""
    searches: list[Search] = field(default_factory=list)
    tool_uses: list[ToolUse] = field(default_factory=list)
    memory_before: str = ""
    memory_after: str = ""
    num_new_memory_tokens: int = 0  # of the memory it left, after any cut
    memory_truncated: bool = False
    generate_seconds: float = 0.0
    search_seconds: float = 0.0
    turn_rewards: list[Measure] = field(default_factory=list)  # of `reward.per_turn`, each times its weight
    advantage: float | None = None  # None: the trajectory's
    ref_logprobs: Sequence[float] = field(default_factory=list)  # one per token, once the reference model has scored it

    @property
    def num_tokens(self) -> int:
        """Counts all tokens, also where a file was read without their ids."""
        return len(self.loss_mask)

    @property
    def num_sampled_tokens(self) -> int:
        """Counts the tokens in the loss."""
        return int(np.sum(self.loss_mask))

    @property
    def turn_reward(self) -> float | None:
        """Returns what the turn itself earned; None where nothing was paid or could be."""
        return math.fsum(measure.value for measure in self.turn_rewards) if self.turn_rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """One sample of MemTrain's intermediate memory recall: the memory of a step is asked for an entity of an earlier
    chunk. A recall is a context in addition to those of its trajectory, with its own score and advantage.
    """

    context: Context
    step: int  # chunks that had been read, from 1
    chunk: int  # of them the one that is asked about, from 0
    target: list[str]  # surface forms of the entity
    answer: str | None
    score: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a question. Reward and advantage belong to the trajectory; every context inherits them
    (multi-context GRPO), and what a single turn earned is added to its context. `reward` is optimised;
    `em`, `f1` and `measures` are logged.
    """

    id: str
    group_id: str
    member: int
    contexts: list[Context]
    end_reason: EndReason
    answer: str | None
    reward: float = 0.0
    em: float = 0.0
    f1: float = 0.0
    measures: list[Measure] = field(default_factory=list)
    recalls: list[Recall] = field(default_factory=list)
    advantage: float = 0.0

    @property
    def all_contexts(self) -> list[Context]:
        """Returns the contexts of the attempt itself, then those of its recall samples."""
        return [*self.contexts, *(recall.context for recall in self.recalls)]

    @property
    def last_memory(self) -> str:
        """Returns the memory that the attempt ended with; "" where it has no context."""
        if not self.contexts:  # of a user-defined agent
            return ""
        return self.contexts[-1].memory_after or self.contexts[-1].memory_before

    @property
    def earned(self) -> float:
        """Returns the reward and what the turns earned."""
        return math.fsum([self.reward, *(context.turn_reward or 0.0 for context in self.contexts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The `group_size` trajectories of one question, scored together.

    In an evaluation a question may have no trajectories, because it could not be answered; then `failed` says why.
    """

    id: str
    question: Question
    trajectories: list[Trajectory]
    num_retries: int = 0  # calls that were repeated after an infrastructure fault
    seconds: float = 0.0
    reference_seconds: float = 0.0  # that the reference model took to score it
    failed: str = ""

    @property
    def started_at(self) -> int | None:
        """Returns the oldest policy version that sampled one of its tokens; None where nothing was sampled, as by a
        user-defined agent that answers before it asks the model."""
        contexts = [context for trajectory in self.trajectories for context in trajectory.all_contexts]
        versions = (version for context in contexts for version in context.policy_versions if version >= 0)
        return min(versions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One context as the learner needs it. Sequences have one entry per token; `ref_logprobs` is empty until the
    reference model filled it (and stays so when `kl_coef` is 0). `trajectory_tokens` is the number of loss tokens of
    the whole trajectory."""

    trajectory_id: str
    group_id: str
    context_index: int
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: Sequence[int]
    advantage: float
    trajectory_tokens: int
    ref_logprobs: Sequence[float] = field(default_factory=list)


def to_row(record: Any) -> dict[str, Any]:
    """Returns the record as nested dicts and lists, ready for Arrow or JSON."""
    return {name: _plain(getattr(record, name)) for name in _fields(type(record))}


def from_row(cls: type[T], row: Mapping[str, Any]) -> T:
    """Returns the record of type `cls` that `to_row` turned into `row`.

    Raises KeyError with the field's place when one without default is missing, and TypeError with place and value for a
    value of another type: a text is not read as a list of letters, and a list is not read as a text. What a list of
    numbers holds is not looked at.
    """
    return _record(cls, row, "")


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(cls)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Column):
        return list(value)
    if isinstance(value, list):
        # Ids and log-probs are most of a record: the entries of such a list need not be checked one by one.
        flat = not value or isinstance(value[0], (int, float, str))
        return list(value) if flat else [_plain(item) for item in value]
    return to_row(value) if dataclasses.is_dataclass(value) else value


def _record(cls: type[T], row: Any, place: str) -> T:
    if not isinstance(row, Mapping):
        raise _wrong(row, place.removesuffix("."), "an object with fields")
    values = {}
    for name, (hint, required) in _fields(cls).items():
        if name in row:
            values[name] = _convert(hint, row[name], f"{place}{name}")
        elif required:
            raise KeyError(f"{place}{name}")
    return cls(**values)


def _convert(hint: Any, value: Any, place: str) -> Any:
    if type(value) is hint:  # nearly always
        return value
    origin = typing.get_origin(hint)
    if origin in (list, Sequence):
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise _wrong(value, place, "a list")
        (item,) = typing.get_args(hint)
        if item in (int, float):  # ids and log-probs are most of a record
            return list(value)
        return [_convert(item, each, f"{place}[{i}]") for i, each in enumerate(value)]
    if origin is python_types.UnionType:  # only `X | None`
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return None if value is None else _convert(inner, value, place)
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint), value, f"{place}.")
    if issubclass(hint, StrEnum):
        if value not in list(hint):
            raise _wrong(value, place, f"one of {', '.join(hint)}")
    elif not _is_scalar(hint, value):
        raise _wrong(value, place, _SCALARS[hint])
    return hint(value)


_SCALARS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _is_scalar(hint: type, value: Any) -> bool:
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is int:  # a column with gaps comes back as floats
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float if hint is float else str)


def _wrong(value: Any, place: str, expected: str) -> TypeError:
    return TypeError(f"{place} is {reprlib.repr(value)}; expected {expected}")
