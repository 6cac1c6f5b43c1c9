"""Every setting of mempipe, with its unit. Unknown keys and impossible values are refused before anything starts.

A run is one YAML file (`jobs/configs/`) plus `key=value` overrides with dotted keys: `load_config(path, ["algorithm.group_size=8"])`.
Importing this module imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right; commands exit with code 2."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Budget(Section):
    """What one context may hold, in tokens of the policy's tokenizer. The one source of these limits for prompts, engine and metrics."""

    question_tokens: int = Field(695, ge=1)
    """Longer questions are refused when the data is read (MemSearcher: 695)."""
    memory_tokens: int = Field(1024, ge=1)
    """The memory that goes from one context to the next."""
    action_tokens: int = Field(1024, ge=1)
    """Sampled tokens of the action message (thought and call or answer), stop token included."""
    memory_message_tokens: int = Field(1088, ge=1)
    """Sampled tokens of the memory message: the memory, its tags and the stop token."""
    observation_tokens: int = Field(2048, ge=1)
    """Passages and echoed calls of one turn; whole passages first, the last one cut at a token boundary."""
    max_turns: int = Field(5, ge=1)
    """Contexts per trajectory."""
    context_tokens: int = Field(8192, ge=8)
    """The model's context: template + question + memory + action + observation + memory message must fit."""
    on_overflow: Literal["cut", "end"] = "cut"
    """A memory longer than memory_tokens is cut at a token boundary, or ends the trajectory."""

    @model_validator(mode="after")
    def _messages_fit(self) -> Budget:
        if sum(self.parts.values()) > self.context_tokens:
            parts = " + ".join(f"{name} {tokens}" for name, tokens in self.parts.items())
            raise ValueError(
                f"budget.context_tokens is {self.context_tokens}, but {parts} tokens need {sum(self.parts.values())} before the template; "
                "raise context_tokens or lower the parts"
            )
        return self

    @property
    def parts(self) -> dict[str, int]:
        """What shares a context with the template."""
        return {
            "question": self.question_tokens,
            "memory": self.memory_tokens,
            "action": self.action_tokens,
            "observation": self.observation_tokens,
            "memory message": self.memory_message_tokens,
        }


class AgentConfig(Section):
    """Which agent, and the text it reads."""

    name: Literal["memsearcher"] = "memsearcher"
    prompts: str = "memsearcher"
    """A built-in prompt set (`mempipe/agents/prompts/NAME.yaml`) or the path of a YAML file with the same keys."""
    tool_name: str = "wikipedia_search"
    """The one function the policy may call."""


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
    num_passages: int = Field(5, ge=1)
    """Passages per search when the call names no number: told in the tool schema and used by the retriever."""
    max_passages: int = Field(10, ge=1)
    """The most a call may ask for."""
    max_query_chars: int = Field(1000, ge=1)
    num_replicas: int = Field(1, ge=1)
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long a search waits for others to share its batch."""
    timeout_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _default_allowed(self) -> RetrievalConfig:
        if self.num_passages > self.max_passages:
            raise ValueError(f"retrieval.num_passages is {self.num_passages}, more than retrieval.max_passages {self.max_passages}")
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
    answer: Literal["f1", "em"] = "f1"
    wrong_answer: float = Field(0.1, ge=0, le=1)
    """Reward of a well-formed answer that scores 0 (MemSearcher: 0.1)."""
    monotone: bool = False
    """Pay a partly right answer at least wrong_answer. Off, as published: MemSearcher pays an F1 of 0.06 less than a wrong answer."""


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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file describes, with `key=value` overrides (values are YAML). Raises ConfigError."""
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
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> RunConfig:
    """The run that nested dicts describe. Raises ConfigError with one line per wrong setting."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e) for e in error.errors())) from error


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
