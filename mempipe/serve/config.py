"""Settings of the agent service."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.settings import Section

ENGINES = "generator"
"""The application whose engines the agents ask, unless the user_config of their deployment names another one."""


class Replicas(Section):
    """Copies of one deployment; between `min` and `max` Ray Serve decides by the load."""

    min: int = Field(1, ge=1)
    """Minimum number of replicas."""
    max: int = Field(1, ge=1)
    """Maximum number of replicas."""
    target_ongoing_requests: int = Field(16, ge=1)
    """Target of Ray Serve for calls in flight per replica."""

    @model_validator(mode="after")
    def _in_order(self) -> Replicas:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, less than min {self.min}")
        return self


class AgentServiceConfig(Section):
    """An agent service. The limits hold for each of its replicas."""

    run: str = ""
    """A run's folder or its YAML file: agent, prompts, budget, index and sampling are as there."""
    checkpoint: str = ""
    """A Hugging Face folder or name, or the folder of a trained run; empty: the model of `run`."""
    settings: dict[str, Any] = {}
    """Settings of a run that replace those of `run`, nested as in its file."""
    endpoint: EndpointConfig | None = None
    """An OpenAI-compatible server that samples in place of our own engine."""
    name: str = Field("", pattern=r"^[\w.:/@-]{0,100}$")
    """Name of the model for clients; empty: the run's name."""
    agents: dict[str, str] = {}
    """Further agents that a request may name, and the YAML file or the run's folder that describes each; weights and
    index are the service's own."""
    sampling: SamplingConfig | None = None
    """How requests are sampled that say nothing; null: as the run is validated (evaluation.temperature)."""
    partition: str | None = None
    """The part of the corpus that is searched for requests that name none; empty: all of it; null: the part that most
    of the run's held-out questions are about (in the synthetic world one held-out world), else all of it."""
    state: str = ""
    """The folder of sessions and documents; empty: `service` in the run's folder."""
    keys: str = ""
    """A file of API keys, a line each (`mempipe key NAME`); MEMPIPE_API_KEYS may hold more. Without any, only callers
    on the same machine are answered."""
    requests_per_minute: int = Field(600, ge=1)
    """Requests of one key, to each agent replica."""
    requests_at_once: int = Field(32, ge=1)
    """Requests of one key in flight, at each agent replica."""
    max_in_flight: int = Field(32, ge=1)
    """Requests that one agent replica works on at the same time. With several keys, the last place is for a key that
    has none."""
    max_wait_s: float = Field(30.0, ge=0)
    """How long a request of a key with fewer requests in flight than another key waits for its turn before it gets 503;
    others get 503 at once. `Prefer: wait=N` makes any request wait N seconds, at most this long. Twice `max_in_flight`
    requests may wait."""
    max_body_bytes: int = Field(2**20, ge=1)
    """The largest request body; longer documents are uploaded in pieces."""
    max_document_bytes: int = Field(16 * 2**20, ge=1)
    """The longest uploaded document."""
    max_key_bytes: int = Field(2**28, ge=1)
    """Bytes that one key may store: memories of sessions and conversations, documents, responses, and replies to
    requests with an Idempotency-Key."""
    max_stored_bytes: int = Field(2**33, ge=1)
    """Bytes that all keys together may store."""
    max_turns: int = Field(64, ge=1)
    """The most turns that a request may ask for."""
    timeout_s: float = Field(300.0, gt=0)
    """Time limit of one answer."""
    session_hours: float = Field(24.0, gt=0)
    """How long a session or a document lives after its last use."""
    include_reasoning: bool = False
    """Chat completions have the thought and the memory of each turn as `reasoning_content`, unless a request says
    otherwise."""
    trace_share: float = Field(0.0, ge=0, le=1)
    """Share of the answered questions that are recorded as MLflow traces, with passages and answers, where the run's
    `tracking` says (settings.tracking); 0: none."""
    agent_replicas: Replicas = Replicas()
    """More than one only where all run on one machine: they share the database in `state`."""
    retriever_replicas: Replicas = Replicas()
    """Copies of the index."""
    generator_replicas: Replicas = Replicas()
    """Engines, each with all weights."""
