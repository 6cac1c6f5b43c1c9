"""Checks whether a training run can start. Nothing heavy is imported; the network is asked last."""

from __future__ import annotations

from pathlib import Path

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.program.tool_calls import HERMES
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.registry import BUILT_IN
from mempipe.checks.findings import Finding, attempt, fatal, note, ok, refused
from mempipe.checks.machine import Devices, check_cluster, check_writable, devices_here, is_on_a_cluster
from mempipe.checks.models import check_adapter, check_architecture, check_hub, check_model
from mempipe.checks.roles import check_roles
from mempipe.config import RunConfig
from mempipe.data.config import Columns
from mempipe.data.input_files import is_remote
from mempipe.data.plain_text import check_source
from mempipe.data.qa import understood
from mempipe.engines.architectures import TINY_POSITIONS, adapter_refusal, tiny_layers
from mempipe.engines.gguf_file import find_gguf
from mempipe.engines.vllm_tools import class_of
from mempipe.retrieval.manifest import check_index
from mempipe.runs import Resume, saved_state
from mempipe.settings import ConfigError
from mempipe.tracking.writers import writer_class

MIN_ANSWER_TOKENS = 4
"""The opening of an answer, one token of it, its closing and the stop token."""
SERVICE_TIMEOUT_S = 3.0


def check_run(config: RunConfig, *, resume: Resume = "never", devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about a training run.

    `devices` describes a cluster that is elsewhere. None means this machine's, or those of the cluster that the run
    connects to, which are counted there.
    """
    findings = [_folder(config, resume), *check_agent(config), *_lengths(config)]
    if resume != "always":  # the config.yaml of a run's folder names every setting
        findings += _correction(config)
    findings += _tracking(config)
    if config.world is not None:
        findings += [*_world(config), *(_tiny_model(config) if config.makes_model else _model(config))]
    else:
        findings += [*_model(config), *(_given(config) if config.cloze is None else _cloze(config))]
    findings += [*_demonstrations(config), *place_roles(config, devices)]
    return findings if any(finding.fatal for finding in findings) else [*findings, *ask_network(config)]


def check_agent(config: RunConfig) -> list[Finding]:
    """Checks that the agent finds what its settings name, its tool parser among it, and that its prompt set can be
    read and, with budget.memory_choices, states the limit.
    """
    try:
        config.agent.check()
        if (name := getattr(config.agent, "tool_parser", HERMES)) != HERMES:
            class_of(name)  # loads vLLM, but only where one of its parsers is named
    except ConfigError as error:
        return [refused(error)]
    kind, name = config.agent_spec.prompts, config.agent.prompts or config.agent.name
    if kind is None or not (config.agent.prompts or name in BUILT_IN):  # an agent of your own finds its own texts
        return []
    memory = config.budget if isinstance(config.budget, MemoryBudget) else None
    return [attempt(lambda: load_prompts(name, kind, memory=memory), f"agent.prompts: {name}")]


def check_retrieval(config: RunConfig) -> list[Finding]:
    """Checks that an agent that searches has something to search."""
    retrieval = config.retrieval
    if not config.agent_spec.searches or retrieval.url:
        return []
    if not retrieval.index:
        return [fatal(f"retrieval.index is empty; agent.name {config.agent.name!r} needs it, or retrieval.url")]

    def check() -> None:
        check_index(
            retrieval.index, mode=retrieval.mode, shard_actors=retrieval.shard_actors, num_gpus=retrieval.num_gpus
        )

    return [attempt(check, f"retrieval.index: {retrieval.index}")]


def place_roles(config: RunConfig, devices: Devices | None, *, training: bool = True) -> list[Finding]:
    """Checks that GPUs and memory suffice, if this machine can determine it."""
    if devices is None and is_on_a_cluster(config.ray_address):
        return [note("the cluster's GPUs are counted when it is connected to (--devices plans for them)")]
    return check_roles(config, devices or devices_here(), training=training)


def ask_network(config: RunConfig) -> list[Finding]:
    """Asks the cluster, the hub that has the model, and the service that is searched."""
    return [
        *(check_cluster(config.ray_address) if config.ray_address else []),
        *(check_hub(config.model.path, setting="model.path") if config.model.path else []),
        *(_service(config.retrieval.url) if config.retrieval.url else []),
    ]


def few_questions(config: RunConfig, number: int) -> str:
    """Says that `number` training questions are used up before the last step of the run; "" where they are not."""
    needed, epochs = config.algorithm.groups_per_step, config.data.num_epochs
    if number * epochs >= needed * config.num_steps:
        return ""
    return (
        f"num_steps is {config.num_steps:,}, but {number:,} training questions are used up after step "
        f"{number * epochs // needed:,}: data.num_epochs is {epochs}, and a step takes algorithm.groups_per_step "
        f"{needed} of them; raise data.num_epochs, or lower num_steps, by which the learning rate is scheduled"
    )


def _folder(config: RunConfig, resume: Resume) -> Finding:
    try:
        saved = saved_state(config, resume=resume)
    except ConfigError as error:
        return refused(error)
    if saved is None:
        return check_writable(config.folder, setting="output")
    return ok(f"{config.folder} is resumed after step {saved.get('num_steps', 0)}")


def _lengths(config: RunConfig) -> list[Finding]:
    action, room = config.budget.action_tokens, config.budget.context_tokens
    row = config.learner.max_tokens_per_micro_batch
    findings = []
    if action < MIN_ANSWER_TOKENS:
        text = f"budget.action_tokens is {action}; it must be at least {MIN_ANSWER_TOKENS} (tags, an answer)"
        findings.append(fatal(text))
    if row < room:
        findings.append(fatal(f"learner.max_tokens_per_micro_batch is {row}, below budget.context_tokens {room}"))
    return findings


def _correction(config: RunConfig) -> list[Finding]:
    """Notes a correction that was asked for and changes nothing."""
    asked, source = config.algorithm.correction, config.learner.old_logprobs
    if "correction" not in config.algorithm.model_fields_set or asked not in ("token", "sequence"):
        return []
    if source != "sampler":
        return []
    text = (
        f"algorithm.correction is {asked}, which changes nothing with learner.old_logprobs sampler: the clipped ratio "
        f"is the importance weight already; choose {asked}_mask, or set learner.old_logprobs to recompute"
    )
    return [note(text)]


def _tracking(config: RunConfig) -> list[Finding]:
    """Checks the writers next to MLflow, and notes steps that are to be profiled and do not come."""
    names = config.tracking.further_writers
    findings = [attempt(lambda name=name: writer_class(name), f"tracking.writers: {name}") for name in names]
    if late := [step for step in config.tracking.profile_steps if step > config.num_steps]:
        findings.append(note(f"tracking.profile_steps names {late}, but num_steps is {config.num_steps}"))
    return findings


def _questions(setting: str, path: str, *, columns: Columns, needed: bool) -> list[Finding]:
    """Checks that the file is there and begins with a question; `mempipe.checks.inputs` reads the rest."""
    if not path:
        text = f"{setting} is empty"
        return [fatal(f"{text}; a run without a `world` needs it") if needed else note(f"{text}: nothing is evaluated")]
    if is_remote(path):
        return [note(f"{setting}: {path}, to be read when the run starts")]
    try:
        first = understood(path, columns=columns)
    except ConfigError as error:
        return [refused(error, what=setting)]
    except OSError as error:
        return [fatal(f"{setting}: {path} cannot be read: {error.strerror or error}")]
    return [ok(f"{setting}: {path} ({first})")]


def _given(config: RunConfig) -> list[Finding]:
    """Checks the question files and the index that the settings name."""
    data, best_on = config.data, config.checkpoint.best_on
    unmeasured = [fatal(f"checkpoint.best_on is {best_on!r}, but data.validation is empty: there is no validation")]
    return [
        *_questions("data.train", data.train, columns=data.columns, needed=True),
        *_questions("data.validation", data.validation, columns=data.columns, needed=False),
        *(unmeasured if best_on and not data.validation else []),
        *check_retrieval(config),
    ]


def _cloze(config: RunConfig) -> list[Finding]:
    """Checks the passages from which the run makes its questions and index."""
    corpus = config.data.corpus
    given = {
        "data.train": config.data.train,
        "data.validation": config.data.validation,
        "retrieval.index": config.retrieval.index or config.retrieval.url,
    }
    for setting, value in given.items():
        if value:
            return [fatal(f"{setting} is {value!r}; a run with `cloze` makes it from data.corpus")]
    if not corpus:
        return [fatal("data.corpus is empty; a run with `cloze` makes its questions of it, e.g. python-reference")]
    findings = [attempt(lambda: check_source(corpus), f"data.corpus: {corpus}")]
    if fallback := config.data.fallback_corpus:
        findings.append(attempt(lambda: check_source(fallback), f"data.fallback_corpus: {fallback}"))
    return findings


def _demonstrations(config: RunConfig) -> list[Finding]:
    """Checks that something plays the agent when the warm start imitates a script, and that recorded trajectories are
    there.
    """
    if config.warm_start is None:
        return []
    if config.warm_start.scripted:
        return [attempt(config.script, "warm_start: a script plays the agent")]
    missing = [place for place in config.warm_start.trajectories if not Path(place).exists()]
    return [
        fatal(
            f"warm_start.trajectories names {place}, which does not exist; give the folder of a run or an evaluation, "
            "or a Parquet file",
            absent=place,
        )
        for place in missing
    ]


def _model(config: RunConfig) -> list[Finding]:
    """Checks the model, or the source that it is imported from."""
    model = config.model
    if config.world is not None and model.source:  # `_world` refuses it
        return []
    if not model.source:
        found = check_model(model.path, setting="model.path", context_tokens=config.budget.context_tokens)
        found += check_architecture(model.path, context_tokens=config.budget.context_tokens)
        return [*found, *check_adapter(model)]
    if model.path:
        return [fatal(f"model.path is {model.path!r} and model.source is {model.source!r}; set one of them")]
    return [attempt(lambda: find_gguf(model.source), f"model.source: {model.source}, to be imported")]


def _tiny_model(config: RunConfig) -> list[Finding]:
    """Checks what the settings ask of the model that the `world` makes."""
    assert config.world is not None, "only a run with a `world` makes it"
    wanted, model, found = config.budget.context_tokens, config.model, list[str]()
    if wanted > TINY_POSITIONS:
        found.append(
            f"budget.context_tokens is {wanted}, but the model that a run with a `world` makes has {TINY_POSITIONS} "
            "positions; lower it, or name a model (model.path)"
        )
    if model.lora_rank:
        layers = tiny_layers(config.world.num_layers)
        found.append(adapter_refusal("qwen2", model.lora_targets, layers=layers, merged=model.lora_merge))
    return [fatal(text) for text in found if text]


def _world(config: RunConfig) -> list[Finding]:
    """Checks that the settings name nothing that the run makes itself."""
    if config.retrieval.url:
        url = config.retrieval.url
        return [fatal(f"retrieval.url is {url!r}; a run with a `world` searches the index that it makes itself")]
    assert config.world is not None, "only a run with a `world` makes them"
    few = few_questions(config, config.world.num_train_questions)
    notes = [note(few)] if few else []
    if folder := _other_run(config):
        return [ok(f"the run makes its own questions and index (`world`), not those of {folder}"), *notes]
    return [
        fatal(f"{setting} is {value!r}; a run with a `world` makes {made} itself: leave it empty, or set world=null")
        for setting, (value, made) in {
            "data.train": (config.data.train, "its questions"),
            "data.validation": (config.data.validation, "its questions"),
            **{f"data.columns.{name}": (path, "its questions") for name, path in config.data.columns.named.items()},
            "data.corpus": (config.data.corpus, "its passages"),
            "data.fallback_corpus": (config.data.fallback_corpus, "its passages"),
            "retrieval.index": (config.retrieval.index, "its index"),
            "model.source": (config.model.source, "its model"),
        }.items()
        if value
    ] or [ok("the run makes its own questions, index and model (`world`)"), *notes]


def _other_run(config: RunConfig) -> str:
    """Returns the folder of the run whose config.yaml these settings are a copy of, under another name; "" for none.
    It names all that the world of that run made."""
    folder = Path(config.retrieval.index).parent
    made = [folder / "index", *(folder / "world" / f"{split}.parquet" for split in ("train", "validation"))]
    named = [config.retrieval.index, config.data.train, config.data.validation]
    return str(folder) if named == list(map(str, made)) else ""


def _service(url: str) -> list[Finding]:
    """Asks a retrieval service about itself. Perhaps only the cluster can reach it, so nothing is fatal."""
    import httpx

    try:
        health = httpx.get(f"{url.rstrip('/')}/health", timeout=SERVICE_TIMEOUT_S, trust_env=False)
        described = health.json() if health.is_success else {}
        snapshot, count = described["snapshot"], described["num_passages"]
        return [ok(f"retrieval.url: {url}, snapshot {snapshot}, {count} passages")]
    except httpx.RequestError as error:
        return [note(f"retrieval.url {url} cannot be reached from this machine: {error!r}")]
    except (KeyError, TypeError, ValueError):
        return [note(f"retrieval.url {url} is not a mempipe service; searches in partitions and snapshots need one")]
