"""One FSDP rank of the learner: it turns micro-batches into optimiser updates.

All ranks call the same methods in the same order with equally many micro-batches, which is checked before the first
collective that would hang otherwise. Losses and gradients of micro-batches and ranks are summed, never averaged: the
weights of a micro-batch count the whole update (`mempipe.rl.packing`), so neither packing nor the number of ranks
changes it.
"""

from __future__ import annotations

import datetime
import math
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mempipe.engines.checkpoint import Position, TrainingState
from mempipe.engines.config import OptimizerConfig
from mempipe.engines.gauges import TrainingFlops, peak_memory_gib, peak_teraflops
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.model import (
    accumulate_locally,
    base_model,
    load_policy,
    loss_token_logprobs,
    reshard,
    score,
    shard,
    to_device,
)
from mempipe.engines.offload import MOMENTS, host_zeros, moments_on_device
from mempipe.engines.policy_weights import adapter_state_dict, full_state_dict, merged_checksums, weight_checksums
from mempipe.engines.profile import profiled
from mempipe.engines.proof import SamplingMismatch, check_sampled
from mempipe.engines.reference import ShardedReference
from mempipe.engines.sharded_checkpoint import CheckpointWriter, load_state, load_tensors
from mempipe.rl.losses import policy_loss, same_version_mismatch
from mempipe.rl.metrics import mean_metrics, merge_metrics
from mempipe.rl.packing import Floats, MicroBatch
from mempipe.storage.files import in_turn


class Learner:
    """Model and optimiser of one rank.

    With LoRA the reference is the base model, and with `settings.holds_reference` a second model: the `ref_logprobs` of
    micro-batches are filled here. With several ranks, a second model, or a 16-bit compute dtype, it joins a process
    group at `master_address`:`master_port`, unless this process is in one already. Rank 0 may bring the `listener` of
    that port, which the group takes over: without a listener another process may take the port before the ranks meet.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        master_address: str = "127.0.0.1",
        master_port: int = 29500,
        listener: socket.socket | None = None,
    ) -> None:
        model, learner = settings.model, settings.learner
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.num_updates_done = 0
        self._step: list[tuple[Sequence[MicroBatch], list[Tensor | None]]] = []
        is_policy = settings.objective == "policy"
        self._fill_reference = is_policy and model.lora_rank > 0 and settings.algorithm.kl_coef > 0
        self._reference: ShardedReference | None = None
        self._reference_seconds = 0.0
        self._offloads = learner.offload_optimizer
        self._recompute_old = is_policy and learner.old_logprobs == "recompute"
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self._device = _device(rank)
        if self._device.type == "cpu":
            torch.set_num_threads(learner.num_threads)
        torch.manual_seed(settings.seed + rank)

        self._made_group = False
        holds_reference = is_policy and settings.holds_reference
        mesh = None  # FSDP2's mixed precision and its offloading work on a mesh only, also with one rank
        if world_size > 1 or self.dtype != torch.float32 or holds_reference:
            self._made_group = _join(
                self._device,
                rank,
                world_size,
                address=(master_address, master_port),
                listener=listener,
                timeout_s=learner.timeout_s,
            )
            mesh = init_device_mesh(self._device.type, (world_size,))
        with in_turn("load"):  # a whole float32 model in the machine's memory, until it is sharded
            self.policy = load_policy(model, seed=settings.seed)
            self._flops, self._peak_teraflops = TrainingFlops(self.policy), peak_teraflops(self._device)
            if mesh is not None:
                # CPU ranks share the machine's memory: freeing gathered layers between forward and backward would gain
                # nothing.
                shard(self.policy, mesh, compute_dtype=self.dtype, reshard_after_forward=self._device.type != "cpu")
            if mesh is not None and holds_reference:
                self._reference = ShardedReference(model, mesh, device=self._device, temperature=settings.temperature)
        self.policy.entropy_gradient = is_policy and settings.algorithm.entropy_coef > 0
        self._checkpoints = CheckpointWriter()
        self.policy.to(self._device).train()
        self._trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        adamw = settings.optimizer
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=adamw.lr, betas=adamw.betas, weight_decay=adamw.weight_decay, fused=True
        )

    @property
    def lr(self) -> float:
        """Returns the learning rate of the next update."""
        schedule = self.settings.optimizer
        per_step = self.settings.algorithm.updates_per_step if self.settings.objective == "policy" else 1
        return schedule.lr * lr_factor(
            schedule, self.num_updates_done // per_step, self.settings.num_updates // per_step
        )

    def step(self, updates: Sequence[Sequence[MicroBatch]]) -> list[dict[str, float]]:
        """Makes one learner step: `begin_step`, then every `update`; returns the metrics of each."""
        self.begin_step(updates)
        return [self.update(i) for i in range(len(updates))]

    def begin_step(self, updates: Sequence[Sequence[MicroBatch]], *, first: int = 0) -> None:
        """Takes this rank's micro-batches of every optimiser update of a step.

        The reference that the ranks hold scores those of the updates to be made, while no gradient exists yet. With
        `old_logprobs: recompute` the ratios of all updates are to the present policy, which scores them here. A
        step that resumes with update `first` after an interruption has lost that policy: its ratios are to the sampler.
        Raises ValueError when ranks were given different numbers of micro-batches.
        """
        self._check_counts([len(update) for update in updates])
        if self._reference is not None:
            start = time.perf_counter()
            updates = [*updates[:first], *(self._reference.scored(update) for update in updates[first:])]
            self._reference_seconds = time.perf_counter() - start
        old = self._sampler_logprobs(updates) if first else self._old_logprobs(updates)
        self._step = list(zip(updates, old, strict=True))

    def update(self, index: int) -> dict[str, float]:
        """Makes the optimiser update number `index` of the step that was begun; returns its metrics, over all ranks.

        Raises FloatingPointError when a gradient is not finite, and SamplingMismatch when engines and learner disagree
        about sampled tokens; the weights are unchanged then.
        """
        with profiled(self._profile):
            report = self._update(*self._step[index])
        gathered: list[Any] = [report]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            dist.all_gather_object(gathered, report)
        return _metrics(gathered)

    def forward_backward(self, micro_batch: MicroBatch, *, old_logprobs: Tensor | None = None) -> dict[str, float]:
        """Adds the gradient of one micro-batch; returns its metric sums (`mempipe.rl.losses`).

        `old_logprobs` [N]: recomputed by the learner; replaces the sampler's log-probs as the denominator of the ratio.
        """
        if self._fill_reference:
            micro_batch = replace(micro_batch, ref_logprobs=self.reference_logprobs(micro_batch))
        logprobs, entropy = loss_token_logprobs(self.policy, micro_batch, temperature=self.settings.temperature)
        columns = {name: to_device(getattr(micro_batch, name), self._device) for name in ("advantages", "weights")}
        real = columns["weights"] > 0
        if self.settings.objective == "sft":
            loss = -(columns["weights"] * columns["advantages"] * logprobs).sum()
            sums = {"loss": loss.item(), "tokens": real.sum().item(), "nll": -logprobs[real].sum().item()}
        else:
            for name in ("old_logprobs", "ref_logprobs", "loss_sequences", "context_indices"):
                columns[name] = to_device(getattr(micro_batch, name), self._device)
            sampler_logprobs = None
            if self._recompute_old:
                sampler_logprobs = columns["old_logprobs"]
                columns["old_logprobs"] = logprobs.detach() if old_logprobs is None else old_logprobs
            loss, sums = policy_loss(
                logprobs,
                sampler_logprobs=sampler_logprobs,
                entropies=entropy,
                config=self.settings.algorithm,
                **columns,
            )
            if self._is_of_one_version:
                versions = to_device(micro_batch.policy_versions, self._device)
                sampled = columns["old_logprobs"] if sampler_logprobs is None else sampler_logprobs
                sums |= same_version_mismatch(logprobs, sampled, real & (versions == self._version))
        loss.backward()
        return sums | {"entropy": entropy[real].sum().item()}

    def optim_step(self) -> float:
        """Clips the gradient and steps the optimiser; returns the gradient's norm before the clip.

        Raises FloatingPointError, on all ranks and with the weights untouched, when the norm is not finite.
        """
        norm = get_total_norm(
            [parameter.grad for parameter in self._trained if parameter.grad is not None], foreach=True
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value = norm.item()
        if not math.isfinite(value):
            self._optimizer.zero_grad()
            raise FloatingPointError(
                f"gradient norm is {value} at optimiser update {self.num_updates_done}; the weights are unchanged"
            )
        clip_grads_with_norm_(self._trained, self.settings.optimizer.grad_clip, norm, foreach=True)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
        with moments_on_device(self._optimizer) if self._offloads else nullcontext():
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_updates_done += 1
        return value

    def logprobs(self, micro_batch: MicroBatch) -> Floats:
        """Returns the current policy's log-probs [N] of the loss tokens. All ranks must call it equally often."""
        return self._logprobs(micro_batch).cpu().numpy()

    def reference_logprobs(self, micro_batch: MicroBatch) -> Floats:
        """Returns log-probs [N] under the model that training started from; needs LoRA. All ranks must call it equally
        often."""
        with base_model(self.policy):
            return self.logprobs(micro_batch)

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probs of all tokens of every sequence but the first; engines score at temperature 1.

        All ranks must call it with the same sequences.
        """
        masks = [[0] + [1] * (len(sequence) - 1) for sequence in sequences]
        scores = score(
            self.policy,
            sequences,
            loss_masks=masks,
            temperature=temperature,
            max_tokens=self.settings.learner.max_tokens_per_micro_batch,
        )
        reshard(self.policy)
        return [row[1:] for row in scores]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns, on rank 0, the whole model: every weight under its Hugging Face name, LoRA merged, on the CPU in the
        model's dtype; elsewhere {}.

        All ranks must call it together.
        """
        return full_state_dict(self.policy, dtype=self.dtype, keep=self.rank == 0)

    def served_state_dict(self) -> dict[str, Tensor]:
        """Returns, on rank 0, the weights that an engine needs to serve the policy, elsewhere {}: the
        `full_state_dict`, or of a model that `serves_adapter` the adapter under PEFT's names, in the precision that the
        learner computes with.

        All ranks must call it together.
        """
        if not self.settings.model.serves_adapter:
            return self.full_state_dict()
        return adapter_state_dict(self.policy, dtype=self.dtype, keep=self.rank == 0)

    @property
    def num_served_bytes(self) -> int:
        """Returns the bytes that a sync sends to an engine: of all weights, or of the adapter."""
        model, parameters = self.settings.model, self.policy.lm.parameters()
        if model.lora_rank:  # the adapter alone is trained
            parameters = (parameter for parameter in parameters if parameter.requires_grad == model.serves_adapter)
        return sum(parameter.numel() for parameter in parameters) * self.dtype.itemsize

    def checksums(self) -> dict[str, int]:
        """Returns the checksum of every weight as the engine holds it. All ranks must call it together."""
        model = self.settings.model
        sums = merged_checksums if model.lora_rank and model.lora_merge else weight_checksums
        return sums(self.policy, dtype=self.dtype)

    def save(self, folder: str | Path, position: Position, *, keep: int) -> Path:
        """Writes a checkpoint of this moment under `folder`, together on all ranks, and removes all but the newest
        `keep`; returns its path. Raises CheckpointError.
        """
        self.start_save(folder, position, keep=keep)
        path = self.finish_save()
        assert path is not None, "it was just started"
        return path

    def start_save(self, folder: str | Path, position: Position, *, keep: int) -> None:
        """Does as `save`, but writes in the background while training continues. Raises CheckpointError when the
        checkpoint before could not be written.
        """
        state = TrainingState(num_updates_done=self.num_updates_done, ranks=self._ranks, position=position)
        tensors = self._tensors() | self._rng_states()
        self._checkpoints.start(folder, self.num_updates_done, tensors=tensors, state=state, keep=keep)

    @property
    def save_failed(self) -> bool:
        """Returns at once whether a checkpoint could not be written; `finish_save` says why."""
        return self._checkpoints.failed

    def finish_save(self) -> Path | None:
        """Waits for the checkpoint that is being written, on all ranks together; returns its path. Raises
        CheckpointError."""
        return self._checkpoints.finish()

    def load(self, path: str | Path, *, verified: bool = False) -> Position:
        """Continues from the checkpoint at `path`, together on all ranks; returns its position. `verified`: its files
        were compared with the manifest already.

        Bit-identical to a run that never stopped, when number and kind of ranks are the same. Raises CheckpointError.
        """
        state = load_state(path, verified=verified)
        tensors = self._tensors()
        rng_states = self._rng_states() if state.ranks == self._ranks else {}
        load_tensors(path, tensors | rng_states)
        if rng_states:
            self._set_rng_states(rng_states)
        self.num_updates_done = state.num_updates_done
        return state.position

    def close(self) -> None:
        """Finishes a checkpoint that is being written, and ends the process group, if this learner made it."""
        self.finish_save()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()

    def _update(self, update: Sequence[MicroBatch], old_logprobs: Sequence[Tensor | None]) -> dict[str, Any]:
        start = time.perf_counter()
        parts = []
        for index, (batch, old) in enumerate(zip(update, old_logprobs, strict=True)):
            # On CPU ranks communication costs more than memory.
            accumulate_locally(self.policy, self._device.type == "cpu" and index + 1 < len(update))
            parts.append(self.forward_backward(batch, old_logprobs=old))
        sums = merge_metrics(parts)
        real = [batch for batch in update if not batch.is_filler]
        counts = {
            "num_tokens": sum(b.num_tokens for b in real),
            "num_contexts": sum(len(b.sequence_lengths) for b in real),
        }
        self._check_sampled(sums)
        lr = self.lr
        norm = self.optim_step()
        reference_seconds, self._reference_seconds = self._reference_seconds, 0.0
        return {
            "sums": sums,
            "reference_seconds": reference_seconds,
            "counts": counts,
            "shared": {"lr": lr, "grad_norm": norm},
            "seconds": time.perf_counter() - start,
            "flops": sum(
                self._flops.of(batch.sequence_lengths.tolist(), batch.shared_lengths.tolist()) for batch in real
            ),
            "peak_memory_gib": peak_memory_gib(self._device),
            "peak_teraflops": self._peak_teraflops,
        }

    @property
    def _version(self) -> int:
        """Returns the version that engines were sent before the present step."""
        return self.num_updates_done // self.settings.algorithm.updates_per_step

    @property
    def _is_of_one_version(self) -> bool:
        """Returns whether the weights are still those of `_version`: no update of the step was made."""
        return not self.num_updates_done % self.settings.algorithm.updates_per_step

    @property
    def _profile(self) -> Path | None:
        """Returns where a trace of the next update is wanted."""
        is_first = self.settings.objective == "policy" and self.rank == 0 and self._is_of_one_version
        return self.settings.profiles.get(self._version + 1) if is_first else None

    def _check_sampled(self, sums: Mapping[str, float]) -> None:
        """Compares the step's tokens of one version with the engines, over all ranks. Raises SamplingMismatch on all
        ranks, after deleting the gradient."""
        names = ("same_version/abs_logprob_diff", "same_version/tokens")
        found = torch.tensor([sums.get(name, 0.0) for name in names], dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(found)
        try:
            check_sampled(found[0].item(), int(found[1].item()), tolerance=self.settings.mismatch_tolerance)
        except SamplingMismatch:
            self._optimizer.zero_grad()
            raise

    def _logprobs(self, micro_batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            logprobs, _ = loss_token_logprobs(self.policy, micro_batch, temperature=self.settings.temperature)
        reshard(self.policy)
        return logprobs

    def _old_logprobs(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Returns the learner's own old log-probs per update and micro-batch. None in the first update, whose training
        pass computes the same values, and with old_logprobs: sampler."""
        return [
            [self._logprobs(batch) if self._recompute_old and index else None for batch in update]
            for index, update in enumerate(updates)
        ]

    def _sampler_logprobs(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Returns the log-probs that the engine sampled with."""
        return [[to_device(batch.old_logprobs, self._device) for batch in update] for update in updates]

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that training changes, in their shards: trained parameters and AdamW's state, by name."""
        reshard(self.policy)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.policy.lm.named_parameters():
            if not parameter.requires_grad:
                continue
            tensors[f"model/{name}"] = parameter.detach()
            state = self._optimizer.state[parameter]
            if not state:  # as AdamW makes it at its first step
                state["step"] = torch.zeros((), device=self._device)
                zeros = host_zeros if self._offloads else torch.zeros_like
                state |= {moment: zeros(parameter.detach()) for moment in MOMENTS}
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
        return tensors

    @property
    def _ranks(self) -> str:
        return f"{self.world_size} {self._device.type}"

    def _rng_states(self) -> dict[str, Tensor]:
        states = {f"rng/cpu/{self.rank}": torch.get_rng_state()}
        if self._device.type == "cuda":
            states[f"rng/cuda/{self.rank}"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set_rng_states(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states[f"rng/cpu/{self.rank}"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[f"rng/cuda/{self.rank}"], self._device)

    def _check_counts(self, counts: list[int]) -> None:
        """Raises ValueError for ranks with different numbers of micro-batches, which would wait for each other until
        the timeout."""
        if not counts or not all(counts):
            raise ValueError(
                f"rank {self.rank} was given {counts} micro-batches per optimiser update; every update needs at "
                "least one"
            )
        if self.world_size == 1:
            return
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, counts)
        if any(other != counts for other in gathered):
            raise ValueError(f"ranks were given different numbers of micro-batches per optimiser update: {gathered}")


def lr_factor(config: OptimizerConfig, done: int, num_steps: int) -> float:
    """Returns the share of `config.lr` in the step after `done` ones: linear warm-up, then the schedule, which ends
    with the last step. All updates of a step have the same rate.
    """
    if done < config.warmup_steps:
        return (done + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (done - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    if config.schedule == "cosine":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return 1 - (1 - config.min_lr_ratio) * progress
    return 1.0


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(
    device: torch.device,
    rank: int,
    world_size: int,
    *,
    address: tuple[str, int],
    listener: socket.socket | None,
    timeout_s: float,
) -> bool:
    """Joins the ranks' process group; returns whether it was made here. An engine of this process may have made one."""
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size), (
            "this process is in another process group"
        )
        return False
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=meeting_store(rank, world_size, address=address, listener=listener, timeout=timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return True


def meeting_store(
    rank: int,
    world_size: int,
    *,
    address: tuple[str, int],
    listener: socket.socket | None = None,
    timeout: datetime.timedelta,
) -> dist.Store:
    """Returns the store through which the ranks find each other. Rank 0 serves it at `address`, on its `listener` of
    that port if it has one, and waits for all others."""
    if world_size == 1:
        return dist.HashStore()
    descriptor = listener.detach() if listener is not None and rank == 0 else None
    return dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=descriptor)


def _metrics(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of one update, from every rank's report."""
    counts = merge_metrics(report["counts"] for report in ranks)
    seconds = max(report["seconds"] for report in ranks)
    means = mean_metrics(merge_metrics(report["sums"] for report in ranks))
    teraflops = sum(report["flops"] for report in ranks) / len(ranks) / seconds / 1e12
    gauges = {
        "seconds": seconds,
        "tokens_per_second": counts["num_tokens"] / seconds,
        "teraflops_per_rank": teraflops,
        "peak_memory_gib": max(report["peak_memory_gib"] for report in ranks),
    }
    if scoring := max(report["reference_seconds"] for report in ranks):
        gauges["reference_seconds"] = scoring
    if peak := ranks[0]["peak_teraflops"]:
        gauges["model_flops_utilization"] = teraflops / peak
    return means | counts | ranks[0]["shared"] | gauges
