"""Defines RunConfig: all sections of a run's YAML file, and the validation rules across sections.

A run is one YAML file (`jobs/configs/`) plus `key=value` overrides with dotted keys: `load_config(path,
["algorithm.group_size=8"])` (`mempipe.loader`). Importing this module imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from mempipe.agents.budget import Budget, MemoryBudget, SearchBudget
from mempipe.agents.config import AgentConfig, SearchCompat
from mempipe.agents.memsearcher import MemSearcherBudget, MemSearcherConfig
from mempipe.agents.registry import AgentSpec, agent_spec
from mempipe.data.config import DataConfig, WorldConfig
from mempipe.data.scripted_agents import TOOL_NAME, facts_that_fit
from mempipe.engines.config import (
    CANARY_TOLERANCE,
    MISMATCH_TOLERANCE,
    CheckpointConfig,
    EndpointConfig,
    GenerationConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    SamplingConfig,
)
from mempipe.masking.config import AskedClozeConfig
from mempipe.retrieval.config import RetrievalConfig
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.settings import ConfigError, FolderName, Section, Seed
from mempipe.tracking.config import TrackingConfig

DEFAULT_AGENT = "memsearcher"
MODEL = ("model", "path", ("model",))
TRAIN = ("data", "train", ("world/train.parquet", "questions/train.parquet"))
MADE_BY_A_RUN = (
    MODEL,
    ("retrieval", "index", ("index",)),
    TRAIN,
    ("data", "validation", ("world/validation.parquet", "questions/test.parquet")),
)
"""Settings that name what a run with a `world`, a `cloze` section or a `model.source` makes, and its places in the
run's folder."""


def _folders_named(values: dict[str, Any], section: str, name: str, places: Sequence[str]) -> list[Path]:
    """Returns the run's folder in which a setting names one of these places, if it does."""
    settings = values.get(section)
    path = Path(str(settings.get(name))) if isinstance(settings, dict) else Path()
    return [path.parents[place.count("/")] for place in places if path.match(place)]


class StreamConfig(Section):
    """The Ray Data stage in which drivers play trajectories."""

    num_drivers: int = Field(1, ge=1)
    """Processes that play trajectories."""
    groups_in_flight: int = Field(64, ge=1)
    """Groups that one driver works on at the same time."""
    num_attempts: int = Field(3, ge=1)
    """Tries for a group whose engine, retriever or driver failed; then the run ends with an error."""


class EvaluationConfig(Section):
    """Held-out questions of a training run."""

    every_steps: int = Field(0, ge=0)
    """Learner steps between two validations; 0: only before and after."""
    num_questions: int = Field(0, ge=0)
    """Questions of data.validation, drawn by the seed in equal shares of its data sets; 0: all."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of validation."""
    untrained: bool = False
    """Answer them before the warm start as well."""

    @property
    def sampled(self) -> str:
        """Says how the answers are sampled, for a reader of their scores."""
        return f"temperature {self.temperature:g}" if self.temperature else "greedy"


class NoiseConfig(Section):
    """Says how often a script of noisy demonstrations errs, as probabilities per decision."""

    answer_early: float = Field(0.2, ge=0, le=1)
    """Answer although something is missing."""
    vague_query: float = Field(0.2, ge=0, le=1)
    """Search for too little."""
    forget: float = Field(0.65, ge=0, le=1)
    """Omit the passages just read from the memory. Above 0.5 the most likely memory is the useless one."""


class WarmStartConfig(Section):
    """Supervised start: one pass over trajectories to imitate.

    They are recorded ones, a teacher's, or a script's, which knows the facts of the synthetic world, the evidence of a
    cloze question, the answer that a text writes, or the entities of a masked document.
    """

    trajectories: list[str] = []
    """Folders or files of recorded trajectories: of evaluations, of their runs and sets (EVALUATION/RUN/SET), of
    training runs. Those are imitated whose `metric` is at least `min_score`.
    """
    teacher: EndpointConfig | None = None
    """A model that plays the agent on data.train; what scores at least `min_score` is imitated."""
    metric: Literal["em", "f1", "reward"] = "em"
    """Metric that filters recorded and taught trajectories."""
    min_score: float = 1.0
    """The least score of a trajectory that is imitated (rejection sampling)."""
    num_clean_trajectories: int = Field(4500, ge=0)
    """Trajectories without mistakes; of recorded and taught ones the most that are used."""
    num_noisy_trajectories: int = Field(1000, ge=0)
    """Trajectories of a script with mistakes, which reinforcement learning has to undo."""
    order: Literal["noisy_last", "mixed"] = "noisy_last"
    """When the noisy trajectories are seen: after the clean ones, so that their mistakes become the likeliest move, or
    among them, so that mistakes become about as frequent as they are in the whole.
    """
    noise: NoiseConfig = NoiseConfig()
    num_held_out: int = Field(0, ge=0)
    """Further trajectories that are not trained on, for the held-out loss."""
    lr: float = Field(2e-3, gt=0)
    """Learning rate at its peak; the schedule is a cosine."""
    warmup_steps: int = Field(20, ge=0)
    """Updates of linear warm-up."""
    tokens_per_step: int = Field(2048, ge=1)
    """Tokens of one optimiser update, all ranks together."""
    checkpoint_every: int = Field(50, ge=1)
    """Updates between two checkpoints, from which an interrupted start continues."""

    @property
    def scripted(self) -> bool:
        return not self.trajectories and self.teacher is None


class RunConfig(Section):
    """A whole run."""

    MOVED: ClassVar[dict[str, str]] = {"compat": "agent.compat"}
    FREE: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "data.num_epochs",
        "data.validation",
        "evaluation",
        "generation",
        "grace_s",
        "learner.max_tokens_per_micro_batch",
        "learner.num_ranks",
        "learner.num_threads",
        "learner.offload_optimizer",
        "learner.share_prefixes",
        "learner.timeout_s",
        "max_restarts",
        "model.gradient_checkpointing",
        "num_steps",
        "output",
        "placement",
        "ray_address",
        "reference.num_replicas",
        "retrieval.batch_wait_ms",
        "retrieval.encoder_path",
        "retrieval.num_gpus",
        "retrieval.num_replicas",
        "retrieval.num_threads",
        "retrieval.shard_actors",
        "retrieval.timeout_s",
        "stream",
        "tracking",
    )
    """Placement, speed, duration and measurement. None of them changes the learned result of a step."""

    name: FolderName = "run"
    """The run's folder is output/name."""
    output: str = "runs"
    """Parent of the runs' folders."""
    seed: Seed = 1
    """Seed of data order, sampling and adapters."""
    num_steps: int = Field(100, ge=1)
    """Learner steps (groups_per_step groups each)."""
    ordered: bool = False
    """One driver, on-policy, groups in the order of the questions, and a separate seed for every request. On CPUs
    two runs are then equal to the last bit, also after a restart (docs/determinism.md).
    """
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """GPUs of each role: its own, or the same ones for all, with as many ranks and engines as there are GPUs. auto:
    its own where there are enough."""
    max_restarts: int = Field(3, ge=0)
    """How often within an hour a run starts again by itself, from its newest checkpoint, after it lost an engine, a
    rank or a node."""
    grace_s: float = Field(30.0, gt=0)
    """Seconds between SIGTERM and the kill that follows it, as the cluster gives them (Kubernetes, Slurm: 30). Within
    them a run finishes the step in flight if it can, saves and ends."""
    model: ModelConfig = ModelConfig()
    agent: SerializeAsAny[AgentConfig] = Field(MemSearcherConfig(), validate_default=True)
    budget: SerializeAsAny[Budget] = Field(MemSearcherBudget(), validate_default=True)
    sampling: SamplingConfig = SamplingConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    generation: GenerationConfig = GenerationConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    stream: StreamConfig = StreamConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    world: WorldConfig | None = None
    """Set: the run itself makes questions, corpus and index, and a tiny model unless model.path names one."""
    cloze: AskedClozeConfig | None = None
    """Set: the run makes its questions and its index from data.corpus, without labels (mempipe.masking.cloze)."""
    warm_start: WarmStartConfig | None = None
    """Set: the model is trained on demonstrations before reinforcement learning starts."""

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def makes_model(self) -> bool:
        """Returns whether the run's `world` makes the model: no model is named, or only the one in the run's own
        folder."""
        own = self.folder / "model"
        return self.world is not None and (not self.model.path or Path(self.model.path).resolve() == own.resolve())

    @property
    def agent_spec(self) -> AgentSpec:
        """Returns what the system knows about the agent."""
        return agent_spec(self.agent.name)

    @property
    def has_memory(self) -> bool:
        """Returns whether the agent's contexts hand on a memory that transcripts show and metrics measure."""
        return self.agent_spec.has_memory(self.budget)

    def script(self) -> str:
        """Returns MODULE:NAME of what plays the agent on this run's questions. Raises ConfigError when nothing does."""
        where, found = (
            ("on questions made of text", self.agent_spec.text_script)
            if self.world is None
            else ("in the synthetic world", self.agent_spec.script)
        )
        if not found:
            raise ConfigError(
                f"warm_start: no script plays agent.name {self.agent.name!r} {where}; name warm_start.trajectories or "
                "a warm_start.teacher"
            )
        if self.world is not None and self.world.evidence_order != "reading" and self.agent_spec.script_needs_order:
            raise ConfigError(
                f"warm_start: the script of agent.name {self.agent.name!r} notes a fact only when it knows that the "
                f"question needs it, but world.evidence_order is {self.world.evidence_order!r}; set it to reading, or "
                "begin with the model of a MemTrain run (model.path, warm_start=null)"
            )
        tool = getattr(self.agent, "tool_name", TOOL_NAME)
        if self.world is not None and tool != TOOL_NAME:
            raise ConfigError(
                f"warm_start: in the synthetic world the script calls {TOOL_NAME!r}, but agent.tool_name is {tool!r}; "
                "leave it out"
            )
        return found

    @property
    def reference_place(self) -> Literal["none", "actors", "ranks"]:
        """Returns where the second model is that gives the reference's log-probs. With LoRA there is none: the learner
        computes them with the adapter off."""
        if not self.algorithm.uses_reference or self.model.lora_rank:
            return "none"
        return "ranks" if self.reference.on_ranks else "actors"

    @property
    def canary_tolerance(self) -> float:
        """Returns `generation.canary_tolerance`, or what follows from the model's dtype."""
        return self.generation.canary_tolerance or CANARY_TOLERANCE[self.model.dtype]

    @property
    def mismatch_tolerance(self) -> float:
        """Returns `generation.mismatch_tolerance`, the canary's that is set, or what follows from the model's dtype."""
        generation = self.generation
        return generation.mismatch_tolerance or generation.canary_tolerance or MISMATCH_TOLERANCE[self.model.dtype]

    @model_validator(mode="before")
    @classmethod
    def _made_by_the_run(cls, values: object) -> object:
        """Empties settings that name files which the run makes in its own folder, or made where it was before it was
        moved. The config.yaml of a run names them; a run that is started with this file makes them or continues with
        them."""
        if not isinstance(values, dict) or not isinstance(values.get("model") or {}, dict):
            return values
        if not (values.get("world") or values.get("cloze") or (values.get("model") or {}).get("source")):
            return values
        folder = Path(str(values.get("output", "runs"))) / str(values.get("name", "run"))
        # These two settings are nobody else's: with a path of the same run name they tell where a moved run was.
        telling = TRAIN if values.get("world") or values.get("cloze") else MODEL
        folders = {folder, *(each for each in _folders_named(values, *telling) if each.name == folder.name)}
        for section, name, places in MADE_BY_A_RUN:
            settings = values.get(section)
            made = {str(each / place) for each in folders for place in places}
            if isinstance(settings, dict) and str(settings.get(name)) in made:
                values = {**values, section: {**settings, name: ""}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _published_reward(cls, values: object) -> object:
        """Fills in the reward that the agent was published with, where the config says nothing."""
        if not isinstance(values, dict) or not isinstance(values.get("reward") or {}, dict):
            return values
        agent = values.get("agent") or {}
        name = agent.get("name", DEFAULT_AGENT) if isinstance(agent, dict) else getattr(agent, "name", DEFAULT_AGENT)
        try:
            published = agent_spec(name).reward
        except (ConfigError, TypeError):  # said where the name itself is checked
            return values
        return {**values, "reward": {**published, **(values.get("reward") or {})}}

    @field_validator("agent", mode="wrap")
    @classmethod
    def _settings_of_the_agent(cls, value: object, _: object) -> AgentConfig:
        if not isinstance(value, dict | AgentConfig):
            raise ValueError(f"agent is {value!r}; it is a section with a name")
        name = value.get("name", DEFAULT_AGENT) if isinstance(value, dict) else value.name
        if not isinstance(name, str):
            raise ValueError(f"agent.name is {name!r}; it is a name")
        return agent_spec(name).config.model_validate(value if isinstance(value, dict) else value.model_dump())

    @field_validator("budget", mode="wrap")
    @classmethod
    def _limits_of_the_agent(cls, value: object, _: object, info: ValidationInfo) -> Budget:
        agent = info.data.get("agent")
        if agent is None:  # was refused
            return Budget()
        kind = agent_spec(agent.name).budget
        if isinstance(value, Budget):  # the default, or that of another agent: the set keys that have a meaning here
            value = value.model_dump(exclude_unset=True, include=set(kind.model_fields))
        return kind.model_validate(value)

    @model_validator(mode="after")
    def _settings_agree(self) -> RunConfig:
        a = self.algorithm
        if a.groups_per_step % a.updates_per_step:
            raise ValueError(
                f"algorithm.groups_per_step {a.groups_per_step} is not a multiple of algorithm.updates_per_step "
                f"{a.updates_per_step}"
            )
        if self.sampling.temperature == 0 or self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                f"sampling is temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, top_k "
                f"{self.sampling.top_k}; training needs temperature > 0, top_p 1 and top_k -1, since the learner's "
                "log-probs are of the untruncated distribution"
            )
        if a.kl_reward_coef and self.model.lora_rank:
            raise ValueError(
                f"algorithm.kl_reward_coef is {a.kl_reward_coef} and model.lora_rank {self.model.lora_rank}; with LoRA "
                "the reference is inside the learner, after rewards are given: use algorithm.kl_coef"
            )
        if self.reference.on_ranks and a.kl_reward_coef:
            raise ValueError(
                f"reference.on_ranks is true and algorithm.kl_reward_coef {a.kl_reward_coef}; rewards need the "
                "reference's log-probs before the ranks get a step: set reference.on_ranks to false, or use "
                "algorithm.kl_coef"
            )
        if self.reference.on_ranks and self.model.lora_rank:
            raise ValueError(
                f"reference.on_ranks is true and model.lora_rank {self.model.lora_rank}; with LoRA the learner's model "
                "with the adapter off is the reference, and there is no second one: set reference.on_ranks to false"
            )
        if self.ordered and (a.max_off_policy_steps or self.stream.num_drivers > 1):
            raise ValueError("ordered needs algorithm.max_off_policy_steps 0 and stream.num_drivers 1")
        if self.ordered and self.generation.num_threads > 1:
            raise ValueError(
                f"ordered needs generation.num_threads 1, got {self.generation.num_threads}: several threads share the "
                "attention of a sequence in another way when the batch has other sequences"
            )
        if self.generation.updates_in_flight and not a.max_off_policy_steps:
            raise ValueError(
                "generation.updates_in_flight: nothing is in flight at a sync with algorithm.max_off_policy_steps 0; "
                "allow at least 1"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> RunConfig:
        if self.checkpoint.best_on and not self.evaluation.every_steps:
            raise ValueError(
                f"checkpoint.best_on is {self.checkpoint.best_on!r}, but evaluation.every_steps is 0: there is no "
                "validation while training to choose from"
            )
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> RunConfig:
        parts, limit = self.budget.parts(), self.budget.context_tokens
        if sum(parts.values()) > limit:
            listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
            raise ValueError(
                f"budget.context_tokens is {limit}, but {listed} tokens need {sum(parts.values())} before the "
                "template; raise context_tokens or lower the parts"
            )
        return self

    @model_validator(mode="after")
    def _agent_agrees(self) -> RunConfig:
        name, compat = self.agent.name, self.agent.compat
        most = self.retrieval.max_passages
        if isinstance(compat, SearchCompat) and compat.num_passages is not None and compat.num_passages > most:
            raise ValueError(
                f"agent.compat.num_passages is {compat.num_passages}, more than retrieval.max_passages {most}"
            )
        if self.reward.information_weight and not isinstance(self.budget, MemoryBudget):
            raise ValueError(
                f"reward.information_weight is {self.reward.information_weight}, but agent.name {name!r} writes no "
                "memory to answer from"
            )
        if self.world is not None:
            self._world_fits(self.world)
        if self.reward.per_turn and self.agent_spec.grows:
            raise ValueError(
                f"reward.per_turn is {self.reward.per_turn}, but agent.name {name!r} has one context for the whole "
                "attempt, so its turns have one advantage; leave it empty"
            )
        if self.reward.format not in self.agent_spec.reward_formats:
            raise ValueError(
                f"reward.format is {self.reward.format!r}, which does not read the messages of agent.name {name!r}"
            )
        return self

    def _world_fits(self, world: WorldConfig) -> None:
        """Raises ValueError if the agent cannot ask the world's questions within its budget."""
        if world.objectives > 1 and not self.agent_spec.searches:
            raise ValueError(
                f"world.objectives is {world.objectives}, but agent.name {self.agent.name!r} reads the document of one "
                "question; expected 1, or an agent that searches"
            )
        hops = max([*(world.hops if world.objectives > 1 else ()), *world.unseen_hops], default=0)
        name = "world.unseen_hops" if hops in world.unseen_hops else "world.hops"
        searches = hops * world.objectives
        each = f" for each of {world.objectives} objectives" if world.objectives > 1 else ""
        if isinstance(self.budget, SearchBudget) and searches >= self.budget.max_turns:
            raise ValueError(
                f"{name} has {hops}{each}, which takes {searches + 1} turns, but budget.max_turns is "
                f"{self.budget.max_turns}; raise it"
            )
        scripted = self.warm_start is not None and self.warm_start.scripted
        limits = getattr(self.budget, "memory_choices", None) or [self.budget.memory_limit]
        held = [facts_that_fit(tokens) for tokens in limits if tokens is not None]
        if world.objectives > 1 and scripted and min(held, default=searches) < searches:
            raise ValueError(
                f"{name} has {hops}{each}, and a demonstration notes {searches} facts for them, but a memory of "
                f"{min(limits)} tokens holds {min(held)}; raise the memory's limit in budget, or lower {name}"
            )
