"""Checks whether there are enough GPUs and memory for the roles of a run. On GPUs the plan is refused that does not fit
by the ledger (`mempipe.planning.ledger`); the memory counted for CPUs is a lower bound."""

from __future__ import annotations

import math

from mempipe.checks.findings import Finding, fatal, note, ok
from mempipe.checks.machine import Devices
from mempipe.config import RunConfig
from mempipe.engines.gpus import GPUS
from mempipe.planning.capacity import GIB, ModelShape, model_shape, trained_parameters, uneven
from mempipe.planning.costs import step_costs
from mempipe.planning.hosts import all_on_cpus, offloaded
from mempipe.planning.ledger import cache_bytes, engine_held
from mempipe.planning.placement import Demand, Placement, plan
from mempipe.settings import ConfigError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Dimensions of an attention head for which an engine without a GPU has code (vLLM 0.32); it ends at the first token of
another model."""


def check_roles(config: RunConfig, devices: Devices, *, training: bool = True) -> list[Finding]:
    """Checks that every role has a place there. Without GPUs all run on CPUs and share the machine's memory."""
    searches = config.retrieval.index or config.world is not None  # a run with a world makes its index
    if not devices.num_gpus and config.retrieval.num_gpus and searches:
        return [fatal(f"retrieval.num_gpus is {config.retrieval.num_gpus}, but there is no GPU; 0 searches on CPUs")]
    demand = Demand.of_training(config) if training else Demand.of_rollouts(config)
    try:
        shape = None if config.makes_model else model_shape(config.model)  # a world's model is tiny
        placed = plan(config, demand, [devices.num_gpus], gpu_bytes=int(devices.gpu_gib * GIB))
    except ConfigError as error:
        return [fatal(str(error))]
    findings = _of_plan(config, devices, demand, placed)
    if config.makes_model:
        text = "seconds of a step are not estimated for the tiny model that a run with a `world` makes"
        return [*findings, note(text)] if devices.gpu else findings
    if shape is None:
        return [
            *findings,
            note(f"memory not estimated: the shape of {config.model.path or config.model.source!r} is not known here"),
        ]
    if reason := uneven(shape, placed.tensor_parallel):
        text = f"generation.tensor_parallel is {placed.tensor_parallel}, which {reason} of the model"
        return [*findings, fatal(text)]
    if not devices.num_gpus and shape.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        text = (
            f"{config.model.path} has attention heads of {shape.head_dim} dimensions; on CPUs vLLM has code for {sizes}"
        )
        return [*findings, fatal(text)]
    trained = trained_parameters(config.model, shape)
    if not trained and config.world is None:  # with a world `check_adapter` says it
        return [*findings, fatal(f"model.lora_targets {config.model.lora_targets} name no linear layer of the model")]
    of_them = f", {_short(trained)} trained" if training else ""
    findings.append(ok(f"model: {_short(shape.num_parameters)} parameters{of_them}"))
    if devices.num_gpus:
        planned = placed.applied(config)
        findings += _gpu_memory(planned, shape, placed, devices.gpu_gib)
        if training:
            findings += _offloaded(planned, shape, placed.num_ranks, devices.host_gib)
        if devices.gpu and training and not any(finding.fatal for finding in findings):
            findings += _seconds(planned, shape, placed, devices)
        return findings
    return [*findings, *_on_cpus(config, shape, devices.host_gib, training=training)]


def _of_plan(config: RunConfig, devices: Devices, demand: Demand, placed: Placement) -> list[Finding]:
    """Returns the plan, and what its reader should know of it."""
    hint = "" if devices.num_gpus else " (no GPU here; --devices plans for a machine that has some)"
    findings = [ok(f"{placed}{hint}")]
    if placed.bundles and placed.tensor_parallel != config.generation.tensor_parallel:
        needed = sum(demand.by_role.values())
        findings.append(
            note(
                f"generation.tensor_parallel is {config.generation.tensor_parallel}, but engines share their GPUs with "
                f"the learner, and with {config.generation.tensor_parallel} of one node each the roles do not fit, so "
                f"the plan has {placed.tensor_parallel}; with {needed} GPUs every role has its own (placement separate)"
            )
        )
    if placed.seats("retrieval") and placed.vector_bytes is None:
        findings.append(
            note(
                f"memory of the GPUs for vectors is not estimated: index {config.retrieval.index} is not here, or does "
                "not compare every vector"
            )
        )
    if devices.num_gpus and config.model.dtype == "float32":
        findings.append(
            note(
                "model.dtype is float32: attention kernels of a GPU's engine multiply in TF32, so that the canary "
                "probably exceeds its tolerance for float32; set model.dtype to bfloat16"
            )
        )
    return findings


def _gpu_memory(config: RunConfig, shape: ModelShape, placed: Placement, gib: float) -> list[Finding]:
    """Shows the ledger, and checks that an engine has room for one full context at least."""
    ledger = placed.ledger(config, shape, gpu_bytes=int(gib * GIB))
    held = engine_held(config, shape, tensor_parallel=placed.tensor_parallel)
    room = gib * GIB * config.generation.gpu_memory_utilization - held
    context = cache_bytes(config, shape, contexts=1, tensor_parallel=placed.tensor_parallel)
    text = (
        f"engine: weights and working memory {held / GIB:.1f} GiB, KV cache {context / GIB:.2f} GiB per full context; "
        f"room for {max(0, math.floor(room / context))} of them "
        f"(generation.max_num_seqs {config.generation.max_num_seqs})"
    )
    table = [ok("\n       ".join(["memory by phase", *ledger.table()]))] if ledger.cards else []
    return [*table, fatal(text) if room < context else ok(text)]


def _seconds(config: RunConfig, shape: ModelShape, placed: Placement, devices: Devices) -> list[Finding]:
    """Estimates the seconds of a step and its bottleneck."""
    costs = step_costs(config, shape, placed, GPUS[devices.gpu])
    parts = {"engines": costs.generate, "reference": costs.reference, "learner": costs.learn, "driver": costs.driver}
    parts |= {"sync": costs.sync, "longest trajectory": costs.longest}
    hours = costs.total * config.num_steps / 3600
    listed = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items() if seconds)
    return [
        note(
            f"a step on {devices.num_gpus} x {devices.gpu}: about {costs.total:.0f} s for {costs.tokens / 1e6:.1f} "
            f"million tokens ({listed}); it waits for {costs.bottleneck}. Arithmetic, not measured (docs/scale.md)"
        ),
        note(
            f"the whole run, {config.num_steps:,} steps: about {hours:.3g} hours, {hours * devices.num_gpus:.3g} GPU "
            f"hours of {devices.gpu}, evaluations and checkpoints apart"
        ),
    ]


def _offloaded(config: RunConfig, shape: ModelShape, num_ranks: int, gib: float) -> list[Finding]:
    """Checks what the ranks keep in the memory of their machine: all of them in that of this one, or of the one that
    `--devices` describes; of that the memory is not known."""
    kept = offloaded(config, shape, num_ranks=num_ranks)
    if not kept:
        return []
    total = num_ranks * sum(kept.values()) / GIB
    parts = ", ".join(f"{name} {num_ranks * size / GIB:.1f}" for name, size in kept.items())
    text = f"learner ranks keep {total:.1f} GiB in pinned memory, in blocks of powers of two ({parts})"
    if not gib:
        return [ok(f"{text}, if all {num_ranks} are on one machine")]
    if total <= gib:
        return [ok(f"{text}, of this machine's {gib:.0f}")]
    settings = {"moments of AdamW": "learner.offload_optimizer", "reference": "reference.on_ranks"}
    off = " or ".join(settings[name] for name in kept)
    return [
        fatal(f"{text}, but this machine has {gib:.0f} GiB; set {off} to false, or spread the ranks over more machines")
    ]


def _on_cpus(config: RunConfig, shape: ModelShape, gib: float, *, training: bool) -> list[Finding]:
    """Checks the memory of all roles together, on one machine without a GPU."""
    if not gib:
        return []
    needed, cache = all_on_cpus(config, shape, training=training), config.generation.cpu_kv_cache_gib
    text = f"all roles on CPUs: at least {needed / GIB:.1f} of the {gib:.1f} GiB that may be used here"
    findings = [fatal(f"{text}; a run of this size needs GPUs (--devices)") if needed > gib * GIB else ok(text)]
    context = cache_bytes(config, shape, contexts=1) / GIB
    if context > cache:
        findings.append(fatal(f"generation.cpu_kv_cache_gib is {cache}, but a full context takes {context:.2f} GiB"))
    return findings


def _short(count: float) -> str:
    """Returns a number of parameters with three significant digits."""
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
