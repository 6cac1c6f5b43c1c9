"""An agent service over real sockets, with a scripted policy that answers questions of the synthetic world right."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from mempipe.agents.protocol import SearchFn
from mempipe.agents.registry import agent_spec
from mempipe.answers.answering import Answering, Record, nowhere
from mempipe.answers.api import CorpusReply
from mempipe.config import RunConfig
from mempipe.data.scripted_agents import NO_NOISE
from mempipe.data.world import World
from mempipe.engines.config import SamplingConfig
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.faults import InfrastructureFault
from mempipe.loader import load_config
from mempipe.serve.agent_app import make_app
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http.keys import KeyRecord, KeyRing
from mempipe.serve.state.store import Store
from mempipe.types import Completion, FinishReason, SearchResult
from mempipe.user_code import load_user_object

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
WORLD = World(5)
QUESTIONS = WORLD.questions(60, seed=2)
BY_TEXT = {question.text: question for question in QUESTIONS}


def config_of(agent: str) -> RunConfig:
    name = "quickstart" if agent == "memsearcher" else f"quickstart_{agent}"
    return load_config(CONFIGS / f"{name}.yaml")


def config_with_instructions(folder: Path, *overrides: str) -> RunConfig:
    """The quickstart with a prompt set, in `folder`, that has a place for instructions."""
    tiny = (CONFIGS.parents[1] / "mempipe" / "agents" / "prompts" / "tiny.yaml").read_text()
    (folder / "prompts.yaml").write_text(tiny + 'instructions: "{question} heed {instructions}"\n')
    return load_config(CONFIGS / "quickstart.yaml", [f"agent.prompts={folder / 'prompts.yaml'}", *overrides])


async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
    """The passage of the entity that the query names, first."""
    if partition not in ("", QUESTIONS[0].partition):
        raise ValueError(f"partition {partition!r} is none of the index's 1")
    named = [passage for passage in WORLD.passages if passage.title in query.split()]
    return SearchResult(passages=[*named, WORLD.passages[0]][:num_passages], snapshot="")


@dataclass
class WorldEngine:
    """Plays the script of an agent, whatever question it is asked; `says` are messages in place of the script's."""

    tokenizer: HFTokenizer
    agent: str = "memsearcher"
    known: Sequence[str] = tuple(BY_TEXT)
    version: str = "v1"
    says: list[str] = field(default_factory=list)
    fault: InfrastructureFault | None = None
    logprob: float = 0.0
    go_on: threading.Event = field(default_factory=threading.Event)
    under_way: int = 0
    most_under_way: int = 0
    prompts: list[str] = field(default_factory=list)
    samplings: list[SamplingConfig] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go_on.set()

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        if self.fault is not None:
            raise self.fault
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            while not self.go_on.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        self.prompts.append(self.tokenizer.decode(token_ids))
        self.samplings.append(sampling)
        self.limits.append(max_tokens)
        self.seeds.append(seed)
        text = self.says.pop(0) if self.says else self._scripted(self.prompts[-1])
        whole = [*self.tokenizer.encode_template(text), min(self.tokenizer.stop_token_ids)]
        sampled = whole[:max_tokens]
        return Completion(
            token_ids=sampled,
            logprobs=[self.logprob] * len(sampled),
            finish_reason=FinishReason.STOP if sampled == whole else FinishReason.LENGTH,
            policy_version=0,
        )

    async def gives_logprobs(self) -> bool:
        return not math.isnan(self.logprob)

    def _scripted(self, prompt: str) -> str:
        question = next(text for text in self.known if text in prompt)
        script = load_user_object(agent_spec(self.agent).script, setting="script")
        return script(question=question, noise=NO_NOISE).reply(prompt)


@dataclass
class Service:
    app: FastAPI
    engine: WorldEngine
    url: str = ""


def build_service(
    tokenizer: HFTokenizer,
    state: Path,
    *,
    agent: str = "memsearcher",
    agents: Mapping[str, RunConfig] | None = None,
    keys: Sequence[KeyRecord] = (),
    metrics: Any = None,
    record: Record = nowhere,
    searched: CorpusReply | None = None,
    index: SearchFn | None = None,
    **settings: Any,
) -> Service:
    """The service of one agent; `settings` are of AgentServiceConfig."""
    config = AgentServiceConfig(**settings)
    engine = WorldEngine(tokenizer, agent=agent)
    served = Service(app=FastAPI(), engine=engine)
    answering = Answering(
        "tiny",
        agents or {agent: config_of(agent)},
        tokenizer=tokenizer,
        engine=lambda: served.engine,
        search=index or search,
        sampling=SamplingConfig(temperature=0.0),
        max_turns=config.max_turns,
        timeout_s=config.timeout_s,
        partition=searched.partition if searched else "",
        record=record,
        shows_user_errors=not keys,
    )
    store = Store(
        state / "service.sqlite",
        lifetime_s=config.session_hours * 3600,
        max_document_bytes=config.max_document_bytes,
        max_owner_bytes=config.max_key_bytes,
        max_bytes=config.max_stored_bytes,
    )
    served.app = make_app(answering, store, config, keys=KeyRing(keys), metrics=metrics, searched=searched)
    return served


@contextmanager
def running(service: Service) -> Iterator[str]:
    """The service at an address of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(service.app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        service.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            yield service.url
        finally:
            service.engine.go_on.set()
            server.should_exit = True
            thread.join(10)
