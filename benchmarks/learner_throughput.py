"""Trained tokens per second of one optimiser update: mempipe's packed rows, the same rows padded, and TRL's
GRPOTrainer.

    python -m benchmarks.learner_throughput [--contexts 650] [--repeats 5] [--threads 1] [--model FOLDER] [--scale 4]
    python -m benchmarks.learner_throughput --profile [--dtype bfloat16] [--lora-rank 16] [...]

All contestants get the same contexts (a memory agent's: prompt, action, observation, memory message; loss on action and
memory only), the same random Qwen2 (or a given model) in float32, the same token-mean GRPO loss without KL term, AdamW,
gradient clip and number of threads. Timed is everything between prepared rows and changed weights: forward, loss and
metrics, backward, clip and optimiser step. Tokenising, generation and advantages are not. Loss and gradient norm of the
first update are printed to show that the work is the same.

- packed: `Learner.step`. Contexts of one length share a row, logits exist at loss tokens only.
- padded: the same learner and micro-batches, but contexts as right-padded rows of a batch and logits at every position.
- trl: `GRPOTrainer.compute_loss` on the tensors its own rollout would have made (left-padded prompts, right-padded
  completions, `tool_mask` 0 on observations), padded to the longest of the micro-batch rather than of the whole
  generation batch, which favours TRL; rows in random order, as its sampler deals them; gradient checkpointing off.
  Every size of `--trl-rows` is run and the fastest counts. On the CPU TRL projects every position through the LM head;
  with Triton it would leave out prompts.

Contestants alternate within each repeat; medians are compared. On a busy machine the ratios of CPU seconds are the ones
to look at. `--profile` compares nothing: it prints where the time of one packed update goes, operation by operation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.machine import product_rate
from benchmarks.rows import Row, record
from mempipe.engines.config import LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.gauges import TrainingFlops
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.model import PolicyModel, load_policy, to_device
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.losses import policy_loss
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.types import TrainingSample

VOCAB = 1160
LR = 1e-4
ALGORITHM = AlgorithmConfig(kl_coef=0.0, dual_clip=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=650)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row-tokens", type=int, default=2048, help="tokens of one packed micro-batch")
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[8, 16], help="micro-batch sizes tried for TRL")
    parser.add_argument("--model", help="a Hugging Face folder; without it a random tiny model")
    parser.add_argument("--scale", type=int, default=1, help="contexts of this many times the tiny world's length")
    parser.add_argument("--profile", action="store_true", help="print the operations of one packed update")
    parser.add_argument("--dtype", default="float32", help="of the profiled update")
    parser.add_argument("--lora-rank", type=int, default=0, help="of the profiled update")
    arguments = parser.parse_args()
    if not arguments.profile and (arguments.dtype != "float32" or arguments.lora_rank):
        parser.error("--dtype and --lora-rank need --profile: all sides of a comparison train all weights in float32")
    torch.set_num_threads(arguments.threads)
    samples = make_contexts(arguments.contexts, scale=arguments.scale, seed=0)
    num_tokens = sum(len(s.token_ids) for s in samples)
    num_loss_tokens = sum(sum(s.loss_mask) for s in samples)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            save_model(Path(folder))
        path = Path(arguments.model or folder)
        if arguments.profile:
            print_operations(path, samples, arguments)
            return
        limit = most_tokens_per_second(path, samples, row_tokens=arguments.row_tokens)
        contestants = make_contestants(path, samples, arguments)
        first = {name: update() for name, update in contestants.items()}  # also the warm-up
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
        for _ in range(arguments.repeats):
            for name, update in contestants.items():
                start = time.perf_counter(), time.process_time()
                update()
                seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))

    print(
        f"{len(samples)} contexts, {num_tokens} tokens, {num_loss_tokens / num_tokens:.0%} in the loss, "
        f"{arguments.threads} thread(s), "
        f"medians of {arguments.repeats}"
    )
    print(
        f"{'contestant':<14}{'seconds':>9}{'tokens/s':>10}{'CPU s':>8}{'tokens/CPU s':>14}{'loss':>12}{'grad norm':>12}"
    )
    medians = {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in seconds.items()}
    for name, (wall, cpu) in medians.items():
        loss, norm = first[name]
        print(
            f"{name:<14}{wall:>9.2f}{num_tokens / wall:>10.0f}{cpu:>8.2f}{num_tokens / cpu:>14.0f}"
            f"{loss:>12.6f}{norm:>12.6f}"
        )
    for clock, unit in enumerate(("seconds", "CPU seconds")):
        best_trl = min(values[clock] for name, values in medians.items() if name.startswith("trl"))
        ours, unpacked = medians["packed"][clock], medians["padded"][clock]
        print(
            f"in {unit}, packed is {unpacked / ours:.2f} x as fast as padded and {best_trl / ours:.2f} x as fast as trl"
        )
    trl = min((name for name in medians if name.startswith("trl")), key=lambda name: medians[name][0])
    rates = {name: [num_tokens / wall for wall, _ in seconds[name]] for name in ("packed", trl)}
    row = Row(
        name="learner update",
        unit="tokens/s",
        values=rates["packed"],
        peer="TRL",
        of_peer=rates[trl],
        limit="matrix products",
        of_limit=[limit] * arguments.repeats,
    )
    record(row)
    print(f"of the machine's matrix products, packed reaches {statistics.median(row.ratios(row.of_limit)):.2f}")


def most_tokens_per_second(folder: Path, samples: list[TrainingSample], *, row_tokens: int) -> float:
    """Returns the trained tokens per second if an update were nothing but its operations, each as fast as a plain
    matrix product of the model's widths."""
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32"), dtype=torch.float32)
    config = policy.lm.config
    rate = product_rate(row_tokens, config.hidden_size, config.intermediate_size)
    return sum(len(sample.token_ids) for sample in samples) * rate / needed_operations(policy, samples)


def needed_operations(policy: PolicyModel, samples: Sequence[TrainingSample]) -> int:
    """Returns the operations that an update needs, three times those of a forward pass: the model's (`TrainingFlops`),
    but those of the head at loss tokens only, since nothing else needs logits."""
    lengths = [len(sample.token_ids) for sample in samples]
    others = sum(lengths) - sum(sum(sample.loss_mask) for sample in samples)
    config = policy.lm.config
    return TrainingFlops(policy).of(lengths, []) - 6 * config.vocab_size * config.hidden_size * others


def make_contexts(num_contexts: int, *, scale: int, seed: int) -> list[TrainingSample]:
    """Contexts with `scale` times the lengths of those of the synthetic world; three in a trajectory, the last of which
    has no observation.
    """
    rng = np.random.default_rng(seed)
    contexts = []
    for i in range(num_contexts):
        trajectory, index = divmod(i, 3)
        prompt, action, observation, memory = (scale * rng.integers((30, 6, 16, 6), (56, 13, 36, 15))).tolist()
        parts = [(prompt, 0), (action, 1)] if index == 2 else [(prompt, 0), (action, 1), (observation, 0), (memory, 1)]
        mask = np.concatenate([np.full(length, bit) for length, bit in parts])
        contexts.append(
            TrainingSample(
                trajectory_id=f"t{trajectory}",
                group_id=f"g{trajectory // 8}",
                context_index=index,
                token_ids=rng.integers(0, VOCAB, len(mask)).tolist(),
                loss_mask=mask.tolist(),
                logprobs=np.where(mask, rng.normal(-7.0, 0.1, len(mask)), 0.0).tolist(),
                policy_versions=np.where(mask, 0, -1).tolist(),
                advantage=float(np.random.default_rng(trajectory).normal()),
                trajectory_tokens=0,
            )
        )
    return contexts


def save_model(folder: Path) -> None:
    """Saves the tiny model of the quickstart's size, and a tokenizer as far as TRL's trainer wants one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1").save_pretrained(folder)


def print_operations(folder: Path, samples: list[TrainingSample], arguments: argparse.Namespace) -> None:
    """Prints tokens per second of an update, then the operations of another one that took longest."""
    learner, batches = Learner(settings_of(folder, arguments)), packed(samples, arguments)
    learner.step([batches])  # the warm-up
    start = time.perf_counter()
    learner.step([batches])
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    print(f"{num_tokens} tokens, {num_tokens / (time.perf_counter() - start):.0f} tokens/s")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        learner.step([batches])
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def packed(samples: list[TrainingSample], arguments: argparse.Namespace) -> list[MicroBatch]:
    (batches,) = pack_step(samples, num_ranks=1, max_tokens=arguments.row_tokens, aggregation="token")
    return batches


def settings_of(folder: Path, arguments: argparse.Namespace) -> LearnerSettings:
    return LearnerSettings(
        model=ModelConfig(path=str(folder), dtype=arguments.dtype, lora_rank=arguments.lora_rank, lora_merge=False),
        optimizer=OptimizerConfig(lr=LR),
        learner=LearnerConfig(num_threads=arguments.threads),
        algorithm=ALGORITHM,
        temperature=1.0,
        num_updates=1000,
    )


def make_contestants(
    folder: Path, samples: list[TrainingSample], arguments: argparse.Namespace
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Returns, by name, functions that make one update and return loss and gradient norm."""
    settings, batches = settings_of(folder, arguments), packed(samples, arguments)

    def of(learner: Learner) -> Callable[[], tuple[float, float]]:
        def update() -> tuple[float, float]:
            (metrics,) = learner.step([batches])
            return metrics["loss"], metrics["grad_norm"]

        return update

    contestants = {"packed": of(Learner(settings)), "padded": of(PaddedLearner(settings))}
    return contestants | {f"trl, {rows} rows": trl_update(folder, samples, rows) for rows in arguments.trl_rows}


class PaddedLearner(Learner):
    """The learner as it would be without packing: one right-padded row per context, logits at every position."""

    def __init__(self, settings: LearnerSettings) -> None:
        super().__init__(settings)
        self.policy.lm.set_attn_implementation("sdpa")

    def forward_backward(self, micro_batch: MicroBatch, *, old_logprobs: Tensor | None = None) -> dict[str, float]:
        rows = np.split(micro_batch.token_ids, micro_batch.sequence_lengths.cumsum()[:-1])
        token_ids = padded([row.tolist() for row in rows])
        mask = padded([[1] * len(row) for row in rows])
        all_logprobs = self.policy.lm(input_ids=token_ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
        with torch.no_grad():
            entropies = -torch.linalg.vecdot(all_logprobs.exp(), all_logprobs)
        sequences = torch.from_numpy(micro_batch.loss_sequences)
        columns = torch.from_numpy(micro_batch.position_ids[micro_batch.loss_positions])
        logprobs = all_logprobs[sequences, columns - 1, token_ids[sequences, columns]]
        names = ("old_logprobs", "ref_logprobs", "advantages", "weights", "loss_sequences", "context_indices")
        loss, sums = policy_loss(
            logprobs, **{n: to_device(getattr(micro_batch, n), torch.device("cpu")) for n in names}, config=ALGORITHM
        )
        loss.backward()
        return sums | {"entropy": entropies[sequences, columns - 1].sum().item()}


def trl_update(folder: Path, samples: list[TrainingSample], rows: int) -> Callable[[], tuple[float, float]]:
    """Computes GRPOTrainer's loss over all micro-batches of `rows` contexts, then its optimiser."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    order = np.random.default_rng(1).permutation(len(samples))
    chunks = [[samples[i] for i in order[start : start + rows]] for start in range(0, len(samples), rows)]
    num_loss_tokens = torch.tensor(float(sum(sum(s.loss_mask) for s in samples)))
    inputs = [trl_inputs(chunk, num_loss_tokens) for chunk in chunks]
    config = GRPOConfig(
        output_dir=str(Path(tempfile.gettempdir()) / "trl"),  # nothing is saved
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=len(chunks),
        steps_per_generation=len(chunks),
        loss_type="dapo",
        beta=0.0,
        learning_rate=LR,
        weight_decay=0.01,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w3", "w4"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = len(chunks)
    model = trainer.model
    assert model is not None, "it was given"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)

    def update() -> tuple[float, float]:
        total = 0.0
        for tensors in inputs:
            loss = trainer.compute_loss(model, tensors)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return update


def trl_inputs(chunk: list[TrainingSample], num_loss_tokens: Tensor) -> Mapping[str, Tensor]:
    """Returns what GRPOTrainer's rollout hands to its loss."""
    starts = [s.loss_mask.index(1) for s in chunk]
    prompts = [s.token_ids[:start] for s, start in zip(chunk, starts, strict=True)]
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": padded([s.token_ids[start:] for s, start in zip(chunk, starts, strict=True)]),
        "completion_mask": padded([[1] * len(s.token_ids[start:]) for s, start in zip(chunk, starts, strict=True)]),
        "tool_mask": padded([s.loss_mask[start:] for s, start in zip(chunk, starts, strict=True)]),
        "old_per_token_logps": padded([s.logprobs[start:] for s, start in zip(chunk, starts, strict=True)]),
        "advantages": torch.tensor([s.advantage for s in chunk]),
        "num_items_in_batch": num_loss_tokens,
    }


def padded(rows: Sequence[Sequence[float]], *, left: bool = False) -> Tensor:
    """Returns [rows, longest], filled up with zeros."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_side="left" if left else "right"
    )


if __name__ == "__main__":
    main()
