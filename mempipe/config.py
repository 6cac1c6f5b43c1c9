"""Every setting of mempipe, with its unit. Unknown keys and impossible values are refused before anything starts.

A run is one YAML file (`jobs/configs/`) plus `key=value` overrides with dotted keys: `load_config(path, ["algorithm.group_size=8"])`.
Importing this module imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

AgentName = Literal["memsearcher", "memagent", "mem1", "react"]


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right; commands exit with code 2."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Budget(Section):
    """What one context may hold, in tokens of the policy's tokenizer. The one source of these limits for prompts, engine and metrics."""

    question_tokens: int = Field(695, ge=1)
    """Longer questions are refused when the data is read (MemSearcher: 695)."""
    memory_tokens: int = Field(1024, ge=1)
    """The memory that goes from one context to the next (memsearcher, memagent)."""
    action_tokens: int = Field(1024, ge=1)
    """Sampled tokens of the action message (thought and call or answer), stop token included. What mem1 carries is such a message."""
    memory_message_tokens: int = Field(1088, ge=1)
    """Sampled tokens of the memory message: the memory, its tags and the stop token."""
    observation_tokens: int = Field(2048, ge=1)
    """Passages and echoed calls of one turn; whole passages first, the last one cut at a token boundary."""
    chunk_tokens: int = Field(5000, ge=1)
    """memagent: tokens of the long text that one context reads (MemAgent: 5000)."""
    max_chunks: int = Field(0, ge=0)
    """memagent: longer texts are refused; 0: none is. Nothing is ever left out of a text that is read."""
    max_turns: int = Field(5, ge=1)
    """Turns of a trajectory that searches; a context each, except for react. memagent reads all chunks, however many."""
    context_tokens: int = Field(8192, ge=8)
    """The model's context: the parts of the agent's largest one (`Budget.parts`) and the template must fit."""
    on_overflow: Literal["cut", "end"] = "cut"
    """A memory longer than memory_tokens is cut at a token boundary, or ends the trajectory."""

    def parts(self, agent: AgentName) -> dict[str, int]:
        """What shares the largest context of `agent` with the template. react's grows until the next turn does not fit: here its least,
        one search and an answer."""
        question = {"question": self.question_tokens}
        match agent:
            case "memsearcher":
                messages = {"action": self.action_tokens, "observation": self.observation_tokens}
                return {**question, "memory": self.memory_tokens, **messages, "memory message": self.memory_message_tokens}
            case "memagent":
                start = {**question, "memory": self.memory_tokens}
                update = {**start, "chunk": self.chunk_tokens, "memory message": self.memory_message_tokens}
                return max(update, {**start, "answer": self.action_tokens}, key=lambda parts: sum(parts.values()))
            case "mem1":
                return {**question, "state": self.action_tokens, "observation": self.observation_tokens, "action": self.action_tokens}
            case "react":
                return {**question, "action": self.action_tokens, "observation": self.observation_tokens, "answer": self.action_tokens}


class AgentConfig(Section):
    """Which agent, and the text it reads."""

    name: AgentName = "memsearcher"
    """MemSearcher (arXiv 2511.02805), MemAgent (2507.02259), MEM1 (2506.15841), or react: the full history (Search-R1, 2503.09516)."""
    prompts: str = ""
    """A built-in prompt set (`mempipe/agents/prompts/NAME.yaml`) or the path of a YAML file with the same keys; empty: the agent's own."""
    tool_name: str = "wikipedia_search"
    """memsearcher: the one function the policy may call."""
    chunk_first: bool = False
    """memagent: the chunk stands before the memory, so that siblings share it in the prefix cache. Off, as published."""
    final_answer_turn: bool = True
    """react: after max_turns one more message is sampled, in which no search is made (as published)."""

    @property
    def grows(self) -> bool:
        """Whether the whole history is carried in one context, so that every message that is sampled is a turn."""
        return self.name == "react"


class CompatConfig(Section):
    """Where published code departs from its paper, or its evaluation from its training: what to do as it does, item by item."""

    preset: Literal["none", "memsearcher-train", "memsearcher-eval", "memagent-eval", "mem1", "search-r1"] = "none"
    """Sets the flags below as that code behaves; a flag that is named beside it wins."""
    bad_memory: Literal["end", "continue"] = "end"
    """memsearcher: a memory message without a memory ends the trajectory, or leaves an empty memory."""
    box_in_thought: bool = False
    """memsearcher, memagent: a box inside a thought is an answer too."""
    answer_sentence: bool = False
    """memagent: the answer is what follows the last "the answer is", not the last box."""
    question_mark: bool = False
    """A question that does not end in "?" is given one."""
    literal_newlines: bool = False
    """memsearcher: after every passage stands a backslash and an n, twice, instead of what the prompt set puts between passages."""
    num_passages: int | None = Field(None, ge=1)
    """Passages of a search that names no number, whatever retrieval.num_passages makes the tool schema promise; null: what it promises."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        return {**COMPAT_PRESETS[preset][1], **values} if isinstance(preset, str) and preset in COMPAT_PRESETS else values

    def active(self) -> list[str]:
        """The flags that change something, each with its value."""
        fields = {name: field.default for name, field in type(self).model_fields.items() if name != "preset"}
        return [f"{name}: {getattr(self, name)}" for name, default in fields.items() if getattr(self, name) != default]


COMPAT_PRESETS: dict[str, tuple[AgentName, dict[str, Any]]] = {
    "memsearcher-train": ("memsearcher", {"box_in_thought": True, "question_mark": True, "literal_newlines": True, "num_passages": 10}),
    "memsearcher-eval": ("memsearcher", {"bad_memory": "continue", "literal_newlines": True, "num_passages": 10}),
    "memagent-eval": ("memagent", {"answer_sentence": True}),
    "mem1": ("mem1", {"question_mark": True, "num_passages": 3}),
    "search-r1": ("react", {"question_mark": True, "num_passages": 3}),
}
"""The agent that each preset is for, and its flags."""


class SamplingConfig(Section):
    """How the policy is sampled. Training needs the full distribution (top_p 1, top_k -1), since the learner's log-probs are of it."""

    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)


class ModelConfig(Section):
    path: str = ""
    """A Hugging Face folder or name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights in the engine and compute in the learner; the learner's master weights are float32."""
    gradient_checkpointing: bool = False
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; otherwise a LoRA adapter of this rank (the reference is then the base with the adapter off)."""
    lora_alpha: float = Field(32.0, gt=0)
    lora_targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class RetrievalConfig(Section):
    index: str = ""
    """Folder made by `mempipe index build`: passages, faiss index, manifest."""
    url: str = ""
    """Address of a running service (`mempipe index serve`, or Search-R1's server) that is searched instead of an index folder."""
    mode: Literal["auto", "dense", "lexical", "fusion"] = "auto"
    """By vectors, by words (BM25), by both (reciprocal rank fusion), or by all that the index has."""
    encoder_path: str = ""
    """Where the index's encoder lies on this cluster; empty: where it lay when the index was built."""
    num_passages: int = Field(5, ge=1)
    """Passages per search when the call names no number: told in the tool schema and used by the retriever."""
    max_passages: int = Field(10, ge=1)
    """The most a call may ask for."""
    max_query_chars: int = Field(1000, ge=1)
    num_replicas: int = Field(1, ge=1)
    """Actors that answer searches, each with encoder, caches and passages."""
    shard_actors: int = Field(0, ge=0)
    """Actors among which the vectors are split; 0: every replica holds all of them (memory-mapped, shared by those on one machine)."""
    num_gpus: int = Field(0, ge=0)
    """GPUs of every actor that holds vectors, over which faiss spreads them in float16; 0: searched on CPUs."""
    num_threads: int = Field(0, ge=0)
    """CPU threads with which one actor encodes and searches; 0: as many as the machine has cores."""
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long a search waits for others to share its batch."""
    timeout_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _default_allowed(self) -> RetrievalConfig:
        if self.num_passages > self.max_passages:
            raise ValueError(f"retrieval.num_passages is {self.num_passages}, more than retrieval.max_passages {self.max_passages}")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> RetrievalConfig:
        if self.index and self.url:
            raise ValueError(f"retrieval.index is {self.index!r} and retrieval.url is {self.url!r}; a run searches one of them")
        address = urlsplit(self.url)
        if self.url and (address.scheme not in ("http", "https") or not address.hostname or address.port == 0):
            raise ValueError(f"retrieval.url is {self.url!r}; an address is of the form http://host:8000")
        return self


class GenerationConfig(Section):
    """The vLLM engines."""

    num_replicas: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    """Sequences in one engine step."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """KV cache of a CPU engine."""
    enforce_eager: bool = False
    num_threads: int = Field(1, ge=1)
    """CPU threads of one engine without a GPU."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one completion, waiting included."""
    canary_tolerance: float = Field(0.05, gt=0)
    """Largest |Δ log-prob| between learner and engine on the canary prompts after a sync (fp32: 1e-3 is right, bf16: 0.05)."""


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible server."""

    url: str
    """Of the API, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The name under which the server knows the model."""
    tokenizer: str = ""
    """A Hugging Face folder or name with the model's tokenizer and chat template; needed where token ids are sent."""
    api_key_env: str = ""
    """The environment variable that holds the key; empty: none is sent."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one completion, retries included."""
    max_concurrency: int = Field(64, ge=1)
    """Requests under way at the same time, per process that asks."""

    @model_validator(mode="after")
    def _is_address(self) -> EndpointConfig:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username or address.password:
            raise ValueError(f"endpoint.url is {self.url!r}; an address is of the form http://host:8000/v1, without a user or a password")
        return self


class AlgorithmConfig(Section):
    """Group statistics and loss (mempipe.rl)."""

    loss: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Per-token objective: clipped ratio (GRPO/PPO), sequence-level ratio (GSPO), clipped importance weight on log-prob (CISPO)."""
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """(R - mean) / std, or R - mean."""
    aggregation: Literal["token", "context", "trajectory"] = "token"
    """What the mean of the loss is over: all loss tokens of the step, contexts (MemTrain Eq. 4), or trajectories."""
    group_size: int = Field(5, ge=1)
    groups_per_step: int = Field(256, ge=1)
    updates_per_step: int = Field(1, ge=1)
    """Optimiser updates per collected batch; the groups are split evenly among them."""
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """Upper bound of the loss factor for negative advantages; None: off."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight of the low-variance KL to the reference model, in the loss."""
    filter_zero_variance: bool = False
    """Drop groups whose trajectories all have the same reward and sample others in their place (DAPO)."""
    max_off_policy_steps: int = Field(0, ge=0)
    """How many versions the sampler may be behind the learner; 0 is strictly on-policy."""
    max_importance_ratio: float | None = Field(2.0, gt=1)
    """With staleness: truncation of the importance weight between learner and sampler; None: off."""


class RewardConfig(Section):
    answer: Literal["f1", "em", "math", "objectives_em"] = "f1"
    """What a right answer earns: token F1, exact match, exact match of MATH-style stripped strings (MemAgent), or the number of
    objectives that match exactly (MEM1). All but the last are means over the objectives of a question."""
    wrong_answer: float = Field(0.1, ge=0, le=1)
    """Reward of a well-formed answer that scores 0 (MemSearcher: 0.1)."""
    monotone: bool = False
    """Pay a partly right answer at least wrong_answer. Off, as published: MemSearcher pays an F1 of 0.06 less than a wrong answer."""
    format: Literal["none", "search_r1"] = "none"
    """search_r1: exact match and the order of the tags are paid together, by the three scores below (react with answer: em)."""
    structure_score: float = Field(0.2, ge=0, le=1)
    """search_r1: what the right order of tags is worth: a right answer without it earns that much less, a wrong one with it that much."""
    retrieval_score: float = Field(0.0, ge=0, le=1)
    """search_r1: added for a wrong answer in the right order of tags when a gold was among what was found."""
    attempt_score: float = Field(0.1, ge=0, le=1)
    """search_r1: what a wrong answer in the wrong order of tags earns."""

    @model_validator(mode="after")
    def _one_measure(self) -> RewardConfig:
        if self.format != "none" and self.answer != "em":
            raise ValueError(
                f"reward.format is {self.format!r}, which pays exact match, but reward.answer is {self.answer!r}; set it to em"
            )
        return self


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where cosine and linear end, as a share of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    grad_clip: float = Field(1.0, gt=0)


class LearnerConfig(Section):
    num_ranks: int = Field(1, ge=1)
    """FSDP ranks: one GPU each, or one CPU process each."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Packed tokens in one forward and backward pass of one rank."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of one rank without a GPU."""
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """Where the ratio's denominator comes from."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one learner step, and of every collective in it."""


class StreamConfig(Section):
    """The Ray Data stage that drives trajectories."""

    num_drivers: int = Field(1, ge=1)
    groups_in_flight: int = Field(64, ge=1)
    """Groups that one driver works on at the same time."""
    num_attempts: int = Field(3, ge=1)
    """Tries for a group whose engine, retriever or driver failed; then the run ends with an error."""


class DataConfig(Section):
    train: str = ""
    """Question file: FlashRAG jsonl, or parquet written by mempipe."""
    validation: str = ""
    num_epochs: int = Field(1, ge=1)
    shuffle: bool = True


class EvaluationConfig(Section):
    every_steps: int = Field(0, ge=0)
    """Validation during training; 0: only before and after."""
    num_questions: int = Field(0, ge=0)
    """0: all of data.validation."""
    temperature: float = Field(0.0, ge=0)


class CheckpointConfig(Section):
    every_steps: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class TrackingConfig(Section):
    enabled: bool = True
    uri: str = ""
    """MLflow server; empty: MLFLOW_TRACKING_URI, else the sqlite file `mlflow.db` in `output`, for all its runs."""
    experiment: str = "mempipe"
    traces_per_step: int = Field(2, ge=0)
    """Trajectories logged as MLflow traces."""


class WorldConfig(Section):
    """The synthetic world (mempipe.data.world)."""

    num_train_worlds: int = Field(200, ge=1)
    num_train_questions: int = Field(4000, ge=1)
    num_validation_questions: int = Field(384, ge=1)
    hops: list[int] = [1, 2, 3]
    """Hop counts of the questions, in equal shares."""


class WarmStartConfig(Section):
    """Supervised start of the tiny model: one pass over scripted trajectories, faultless ones first, then ones with bad habits."""

    num_clean_trajectories: int = Field(4500, ge=0)
    num_noisy_trajectories: int = Field(1000, ge=0)
    lr: float = Field(2e-3, gt=0)
    tokens_per_step: int = Field(2048, ge=1)
    """Of one optimiser update, all ranks together."""


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    output: str = "runs"
    """The run's folder is output/name."""
    seed: int = 1
    num_steps: int = Field(100, ge=1)
    """Learner steps (groups_per_step groups each)."""
    ordered: bool = False
    """One driver, on-policy, groups in the order of the questions. Sampled tokens still depend on how the engine batched them."""
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""
    model: ModelConfig = ModelConfig()
    agent: AgentConfig = AgentConfig()
    compat: CompatConfig = CompatConfig()
    budget: Budget = Budget()
    sampling: SamplingConfig = SamplingConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    generation: GenerationConfig = GenerationConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    stream: StreamConfig = StreamConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    world: WorldConfig | None = None
    """Set: questions, corpus, index and model are made by the run itself (the embedded default)."""
    warm_start: WarmStartConfig | None = None

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @model_validator(mode="after")
    def _settings_agree(self) -> RunConfig:
        a = self.algorithm
        if a.groups_per_step % a.updates_per_step:
            raise ValueError(
                f"algorithm.groups_per_step {a.groups_per_step} is not a multiple of algorithm.updates_per_step {a.updates_per_step}"
            )
        if self.sampling.temperature == 0 or self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                f"sampling is temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, top_k {self.sampling.top_k}; "
                "training needs temperature > 0, top_p 1 and top_k -1, since the learner's log-probs are of the untruncated distribution"
            )
        if self.ordered and (a.max_off_policy_steps or self.stream.num_drivers > 1):
            raise ValueError("ordered needs algorithm.max_off_policy_steps 0 and stream.num_drivers 1")
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> RunConfig:
        parts, limit = self.budget.parts(self.agent.name), self.budget.context_tokens
        if sum(parts.values()) > limit:
            listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
            raise ValueError(
                f"budget.context_tokens is {limit}, but {listed} tokens need {sum(parts.values())} before the template; "
                "raise context_tokens or lower the parts"
            )
        return self

    @model_validator(mode="after")
    def _agent_agrees(self) -> RunConfig:
        name, compat = self.agent.name, self.compat
        meant, _ = COMPAT_PRESETS.get(compat.preset, (name, {}))
        if meant != name:
            raise ValueError(f"compat.preset is {compat.preset!r}, which is for agent.name {meant!r}, but agent.name is {name!r}")
        if compat.num_passages is not None and compat.num_passages > self.retrieval.max_passages:
            raise ValueError(
                f"compat.num_passages is {compat.num_passages}, more than retrieval.max_passages {self.retrieval.max_passages}"
            )
        if self.reward.format == "search_r1" and name != "react":
            raise ValueError(f"reward.format is 'search_r1', which reads the tags of agent.name 'react', but agent.name is {name!r}")
        return self


class FaissConfig(Section):
    """How vectors are kept and searched."""

    factory: str = "Flat"
    """faiss factory string: Flat, SQfp16 (half the memory), IVF4096,Flat, IVF65536_HNSW32,PQ64, HNSW32, ..."""
    search: str = ""
    """faiss search parameters, e.g. nprobe=64 or efSearch=128."""
    train_passages: int = Field(1_000_000, ge=1)
    """Passages drawn at random to train the kinds that need it (IVF, PQ, SQ8)."""
    shard_passages: int = Field(4_000_000, ge=1)
    """Passages in one faiss file. The build holds one shard in memory; shards can be searched by actors on several nodes."""
    graph_threads: int = Field(1, ge=1)
    """Threads that add to an HNSW graph. With more than one the graph, and so its checksum, differs from build to build."""


class IndexConfig(Section):
    """An index to be built: `mempipe index build`."""

    corpus: list[str]
    """Files or folders of passages (.jsonl, .jsonl.gz, .parquet), paths or fsspec URLs."""
    output: str
    """The folder of the finished index; all nodes of the cluster must see it."""
    encoder: dict[str, Any] | None = {"kind": "hashing"}
    """kind (hashing, huggingface, sentence_transformers) and its settings, path above all; null: no vectors."""
    lexical: bool = False
    """A BM25 index, for lexical search or, beside vectors, for their fusion."""
    faiss: FaissConfig = FaissConfig()
    segment_passages: int = Field(16_384, ge=1)
    """Passages read, encoded and written together: what a killed build loses at most, for each encoder."""
    num_encoders: int = Field(0, ge=0)
    """Actors that encode; 0: one for every GPU of the cluster, or for every two CPUs."""
    max_bad_rows: int = Field(0, ge=0)
    """Rows that are no passages (not JSON, no text, an id for the second time, ...) and are left out; one more is an error."""
    max_line_bytes: int = Field(2**20, ge=1)
    """A longer line of jsonl is a bad row."""
    seed: int = 1
    """Of the passages drawn for training and for measuring recall."""
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""

    @model_validator(mode="after")
    def _something_to_search(self) -> IndexConfig:
        if self.encoder is None and not self.lexical:
            raise ValueError("encoder is null and lexical is false: there would be nothing to search; set one of them")
        return self


C = TypeVar("C", bound=Section)


def load_index_config(path: str | Path, overrides: Sequence[str] = ()) -> IndexConfig:
    """The index that a YAML file describes, with `key=value` overrides. Raises ConfigError."""
    return parse_section(load_values(path, overrides), IndexConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file describes, with `key=value` overrides (values are YAML). Raises ConfigError."""
    return parse_config(load_values(path, overrides))


def load_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that a YAML file names, with `key=value` overrides, not checked yet. Raises ConfigError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config {path}: {getattr(error, 'strerror', error)}") from error
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, expected a mapping of settings")
    for override in overrides:
        _apply(values, override)
    return values


def parse_config(values: dict[str, Any]) -> RunConfig:
    """The run that nested dicts describe. Raises ConfigError with one line per wrong setting."""
    return parse_section(values, RunConfig)


def parse_section(values: dict[str, Any], kind: type[C]) -> C:
    """The section of type `kind` that nested dicts describe. Raises ConfigError with one line per wrong setting."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e) for e in error.errors())) from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested settings that `key=value` words describe. Raises ConfigError."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value, e.g. algorithm.group_size=8")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        values = child
    try:
        values[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where} is not a setting; `mempipe config` lists them"
    if error["type"] == "value_error" and not where:
        return str(error["ctx"]["error"])
    message = str(error.get("ctx", {}).get("error", "")) or error["msg"].replace("Input should be", "should be")
    return message if message.startswith(where) and where else f"{where} is {error['input']!r}: {message}"
