"""An agent that answers questions inside this process."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import ValidationError

from mempipe.answers.answering import Answering
from mempipe.answers.api import AnswerRequest, TurnReply
from mempipe.answers.errors import ApiError, sentence
from mempipe.api.objects import with_names
from mempipe.api.reply import Reply, reply_of
from mempipe.api.roles import AgentRoles, started
from mempipe.api.settings import nested
from mempipe.config import RunConfig
from mempipe.environment import prepare_process
from mempipe.faults import InfrastructureFault
from mempipe.loader import parse_section
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.served_run import ServedRun, resolve, searched_by
from mempipe.settings import ConfigError

T = TypeVar("T")


class AskOptions(TypedDict, total=False):
    """Options of a question. Omitted ones are as the agent was loaded."""

    partition: str | None
    """The part of the corpus that is searched; "" is all of it, None is that of the agent."""
    text: str
    """The text that the agent reads, for agents that read (memagent, memtrain, full_text)."""
    memory: str
    """The memory that the agent starts from, for example `memory` of an earlier reply."""
    user: str
    """Who asks, for tools and programs that remember longer than one question."""
    instructions: str
    """Instructions for the agent in addition to the question, if its prompt set has a place for them."""
    budget: Mapping[str, int]
    """Limits in tokens and turns: memory_tokens, action_tokens, observation_tokens, question_tokens, chunk_tokens,
    document_tokens, max_turns."""
    sampling: Mapping[str, Any]
    """temperature, top_p, top_k, max_tokens, seed."""
    num_samples: int
    """Attempts; the most frequent answer is given. More than one needs a temperature above 0."""
    on_turn: Callable[[TurnReply], None]
    """Is called with every turn of the first attempt when it is finished, in a thread of the agent's."""


class HasFolder(Protocol):
    """A run (`mempipe.Run`), or anything else that is a folder."""

    @property
    def folder(self) -> Path: ...


Source = str | Path | HasFolder | Mapping[str, Any]
"""Source of an agent: a folder, a YAML file, a name on the Hugging Face hub, a `Run`, or an endpoint."""


def load(
    source: Source,
    *,
    index: str | Path = "",
    endpoint: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    partition: str | None = None,
    **settings: Any,
) -> Agent:
    """Starts an agent on this machine and returns it when it can answer.

    `source` is one of these:

    - the folder of a run or its `Run`: the trained weights, the agent, its prompts, its budget and its index;
    - a run's YAML file: the same settings with the model that the file names;
    - a Hugging Face folder or name: its weights, with the agent that `settings` describe and the index `index`;
    - an endpoint, `{"url": "http://127.0.0.1:8000/v1", "model": NAME, "tokenizer": FOLDER}`: an OpenAI-compatible
      server samples.

    `index` is an index folder in place of the run's own. `endpoint` samples in place of an own engine. `sampling`
    (temperature, top_p, top_k) holds for questions that say nothing of it; without it they are sampled as the run
    was validated, which by default takes the likeliest token. `partition` is the part of the corpus that is searched
    if a question names none; None: the part that most held-out questions of the run are about; "": all of it.
    `settings` replace settings of the run, by section or with dots: `budget={"max_turns": 4}` or
    `**{"budget.max_turns": 4}`; `mempipe config` prints them all. An agent or a tool of your own may be the Python
    object itself.

    The engine runs in this process, and its weights are in memory until `close`, the end of a `with` block, or the end
    of the process. Raises ConfigError, which names the setting, before anything is started.
    """
    prepare_process()
    values = with_names(nested(settings))
    if index:
        values["retrieval"] = {"url": "", **values.get("retrieval", {}), "index": str(index)}
    if isinstance(source, Mapping):
        endpoint, source = source, ""
    described: dict[str, Any] = {
        "settings": values,
        "endpoint": dict(endpoint) if endpoint is not None else None,
        "sampling": dict(sampling) if sampling is not None else None,
        "partition": partition,
    }
    if source:
        described |= _named(source, other=bool(index or endpoint))
    return Agent(parse_section(described, AgentServiceConfig))


def _named(source: str | Path | HasFolder, *, other: bool) -> dict[str, str]:
    """Returns the setting of the service that `source` is. `other`: another source was named too."""
    path = str(source if isinstance(source, str | Path) else source.folder)
    if path.startswith(("http://", "https://")):
        raise ConfigError(
            f"the source is the address {path}; an endpoint is given as "
            f"{{'url': {path!r}, 'model': NAME, 'tokenizer': FOLDER}}"
        )
    is_run = path.endswith((".yaml", ".yml")) or (Path(path) / "state.json").exists()
    if not Path(path).exists() and not (other and not is_run):
        raise ConfigError(
            f"{path} does not exist; give the folder of a run, its YAML file, or a model together with `index`"
        )
    return {"run" if is_run else "checkpoint": path}


class Agent:
    """An agent with an engine and, if it searches, a retriever. `load` makes it.

    It may be asked from several threads, and from an event loop with `ask_async`. Questions that are asked together
    share the engine's batches.
    """

    def __init__(self, service: AgentServiceConfig) -> None:
        """Starts what `service` describes. Raises ConfigError as `load` does."""
        served = resolve(service)
        self.name = served.name
        """The name of the run, or of the model."""
        self.config: RunConfig = served.main
        """All settings of the agent, its engine and its retriever."""
        self.partition = searched_by(served).partition
        """The part of the corpus that is searched where a question names none; "" is all of it."""
        self._numbers = itertools.count(1)
        with ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal(name="mempipe-agent"))
            self.roles: AgentRoles = stack.enter_context(
                self._portal.wrap_async_context_manager(started(served.main, service.endpoint))
            )
            """The engine and the retriever. They are used from the agent's own event loop (`run`)."""
            self._answering = _answering(served, service, self.roles, partition=self.partition)
            self._end = weakref.finalize(self, _end, stack.pop_all())
            """Runs once: in `close`, when nobody holds the agent any more, or when the process ends."""

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Reply:
        """Answers a question (`AskOptions` lists the options).

        Raises ConfigError for a question or an option that the agent cannot take, and InfrastructureFault when the
        engine or the retriever fails.
        """
        return self.run(self._ask(question, options))

    async def ask_async(self, question: str, **options: Unpack[AskOptions]) -> Reply:
        """Answers a question without blocking the event loop. It raises as `ask` does."""
        return await asyncio.wrap_future(self._begin(self._ask(question, options)))

    def ask_many(self, questions: Sequence[str], **options: Unpack[AskOptions]) -> list[Reply]:
        """Answers questions side by side, all with the same options. It returns the replies in the order of the
        questions and raises as `ask` does."""
        if isinstance(questions, str):
            raise ConfigError("ask_many takes a list of questions; `ask` takes a single one")
        limit = asyncio.Semaphore(self.config.stream.groups_in_flight)

        async def limited(question: str) -> Reply:
            async with limit:
                return await self._ask(question, options)

        async def all_of_them() -> list[Reply]:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(limited(question)) for question in questions]
            return [each.result() for each in asked]

        return self.run(all_of_them())

    def close(self) -> None:
        """Ends the engine and the retriever and frees their memory. It does nothing the second time."""
        self._end()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine that ran in the agent's event loop; Ctrl-C cancels it.

        Of several exceptions that were raised together it raises the first.
        """
        running = self._begin(work)
        try:
            return running.result()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        except BaseException:
            running.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._end.alive:
            work.close()
            raise ConfigError(f"the agent {self.name!r} is closed; load it again")

        async def awaited() -> T:
            return await work

        return self._portal.start_task_soon(awaited)

    async def _ask(self, question: str, options: AskOptions) -> Reply:
        wanted: dict[str, Any] = {**options, "question": question}
        on_turn, memory = wanted.pop("on_turn", None), wanted.pop("memory", None)
        if memory is not None and not isinstance(memory, str):
            raise ConfigError(f"memory is {memory!r}; it is a text, for example `memory` of an earlier reply")

        def emit(event: str, data: dict[str, Any]) -> None:
            if event == "turn" and data["sample"] == 0:
                on_turn(TurnReply.model_validate({name: data[name] for name in TurnReply.model_fields}))

        try:
            request = AnswerRequest.model_validate(wanted)
            plan = await self._answering.plan(request, text=request.text or "", memory=memory)
            answered = await self._answering.answer(
                plan,
                request_id=f"question-{next(self._numbers)}",
                session=None,
                emit=emit if on_turn is not None else None,
            )
        except ValidationError as error:
            raise ConfigError("; ".join(sentence(each["loc"], each) for each in error.errors())) from error
        except ApiError as error:
            raise (InfrastructureFault if error.status >= 500 else ConfigError)(str(error)) from error
        return reply_of(answered)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"weights {self.roles.engine.version}" if self._end.alive else "closed"
        return f"<Agent {self.name!r}: {self.config.agent.name}, {state}>"


def _end(stack: ExitStack) -> None:
    """Ends everything that an agent has started."""
    # While the process ends, Python starts no thread for the shutdown any more: the engine then ends by itself.
    with suppress(RuntimeError):
        stack.close()


def _answering(served: ServedRun, service: AgentServiceConfig, roles: AgentRoles, *, partition: str) -> Answering:
    return Answering(
        served.name,
        served.agents,
        tokenizer=roles.tokenizer,
        engine=lambda: roles.engine,
        search=roles.search,
        sampling=served.sampling,
        max_turns=service.max_turns,
        timeout_s=service.timeout_s,
        partition=partition,
    )
